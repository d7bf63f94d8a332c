"""Laws of training early exits: LayerSkip's formulas by hand, gradients in their places, metrics that are decodings."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from cli_fixtures import call
from families import tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.data import ArithmeticProgressions, Batch
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import EarlyExitTraining, next_token_loss
from lightning_specdec.training.early_exit import (
    EveryExit,
    ExitCurriculum,
    ExitMetrics,
    GradualExits,
    RotatingExits,
    draw_kept,
    dropout_rates,
    layer_weights,
    normalized,
    step_scale,
)


def test_exit_weights_are_the_papers_counted_by_hand() -> None:
    assert layer_weights(6, 1.0) == [0, 1, 3, 6, 10, 5 + 10]
    assert layer_weights(4, 0.5) == [0, 0.5, 1.5, 3 + 0.5 * 3]
    assert layer_weights(2, 1.0) == [0, 1]
    assert normalized(layer_weights(4, 1.0), [True] * 4) == [0, 0.1, 0.3, 0.6]
    assert normalized(layer_weights(4, 1.0), [True, True, False, True]) == pytest.approx([0, 1 / 7, 0, 6 / 7])


def test_later_layers_are_skipped_more_often_and_more_so_as_training_goes_on() -> None:
    rates = dropout_rates(5, 0.2)
    assert rates == pytest.approx([0.2 * (2 ** (layer / 4) - 1) for layer in range(5)])
    assert rates[0] == 0 and rates[-1] == pytest.approx(0.2)
    scales = [step_scale(step, 101) for step in (0, 50, 100, 500)]
    assert scales == pytest.approx([0, math.sqrt(2) - 1, 1, 1])
    assert dropout_rates(5, 0.2, scales[1])[-1] == pytest.approx(0.2 * scales[1])


def test_each_sample_is_skipped_by_itself_as_often_as_the_rate_says() -> None:
    # The mean of 20,000 draws is off by more than 0.02 once in 10^8 runs; the generator is seeded all the same.
    rates, generator = [0.0, 0.1, 0.3, 1.0], torch.Generator().manual_seed(0)
    kept = draw_kept(rates, 20_000, generator)
    assert kept[0].all() and not kept[3].any()
    torch.testing.assert_close(1 - kept.float().mean(1), torch.tensor(rates), atol=0.02, rtol=0)
    both = (~kept[1] & ~kept[2]).float().mean()
    assert float(both) == pytest.approx(0.03, abs=0.01), "layers are skipped independently of each other"


@pytest.mark.parametrize(
    ("curriculum", "by_step"),
    [
        (EveryExit(), {0: "1111", 7: "1111"}),
        (RotatingExits(3), {0: "1001", 1: "0101", 2: "0011", 3: "1001"}),
        (RotatingExits(1), {0: "1111", 1: "1111"}),
        (GradualExits(), {0: "0001", 9: "0001", 10: "0011", 19: "0011", 20: "0111", 30: "1111", 79: "1111"}),
    ],
)
def test_curricula_enable_exits_step_by_step_and_the_last_always(
    curriculum: ExitCurriculum, by_step: dict[int, str]
) -> None:
    for step, wanted in by_step.items():
        assert "".join(str(int(on)) for on in curriculum.enabled(step, 80, 4)) == wanted, step
    assert all(curriculum.enabled(step, 80, 4)[-1] for step in range(80))


VOCAB, LAYERS = 23, 4
TWO_STEPS = ["--data.batch_size", "16"]
LOGGED = ["--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "logs"]


@functools.cache
def target() -> HuggingFaceLM:
    """A random model; read it, do not write to it."""
    return HuggingFaceLM(tiny("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, sharpness=4.0))


def batch_of(rows: list[list[int]], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(rows)))


def text(num_rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(0))


def test_the_layers_one_by_one_are_the_models_own_pass() -> None:
    training = EarlyExitTraining(target(), 2)
    tokens = text()
    with torch.no_grad():
        states = training.hidden_states(tokens)
        whole = target()(tokens, features=range(LAYERS - 1))
        assert all(torch.equal(states[layer], whole.features[layer]) for layer in range(LAYERS - 1))
        torch.testing.assert_close(training.exit_logits(states[-1], LAYERS), whole.logits)


def test_a_skipped_layer_leaves_its_samples_alone_and_reads_the_others_as_ever() -> None:
    training, tokens = EarlyExitTraining(target(), 2), text()
    kept = torch.tensor([[True] * 3, [True, False, True], [False] * 3, [True] * 3])
    with torch.no_grad():
        whole, dropped = training.hidden_states(tokens), training.hidden_states(tokens, kept)
        assert torch.equal(dropped[1][1], dropped[0][1])
        torch.testing.assert_close(dropped[1][[0, 2]], whole[1][[0, 2]])
        assert torch.equal(dropped[2], dropped[1])
        hidden, call = target().begin(tokens)
        torch.testing.assert_close(dropped[3], target().stack.run(dropped[2], call, 3, 4))


def test_in_expectation_a_layers_update_counts_as_often_as_it_is_not_skipped() -> None:
    # 4,000 copies of one row: their mean is 5 standard deviations off once in 10^6 runs; seeded all the same.
    training, rate, count = EarlyExitTraining(target(), 2), 0.3, 4_000
    kept = draw_kept([0.0, 0.0, 0.0, rate], count, torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, after = training.hidden_states(text(1, 2))[-2:]
        mean = training.hidden_states(text(1, 2).expand(count, -1), kept)[-1].mean(0)
    deviation = 5 * math.sqrt(rate * (1 - rate) / count)
    off = (mean - (before + (1 - rate) * (after - before))[0]).abs()
    assert (off <= deviation * (after - before)[0].abs() + 1e-3).all()


def gradients(training: EarlyExitTraining, exit_layer: int) -> set[str]:
    """Which weights the loss of one exit moves: layers by number, and heads."""
    training.zero_grad()
    batch = batch_of(text().tolist())
    states = training.hidden_states(batch.tokens[:, :-1])
    next_token_loss(training.exit_logits(states[exit_layer - 1], exit_layer), batch.next_tokens()).backward()
    names = [name for name, weight in training.named_parameters() if weight.grad is not None and weight.grad.any()]
    found = {f"layer {name.split('.')[4]}" for name in names if ".layers." in name}
    return found | {
        name for name in names if "lm_head" in name or "heads" in name or name.endswith("model.norm.weight")
    }


def test_an_exits_loss_moves_the_layers_below_it_and_its_own_head_or_the_shared_one() -> None:
    model = HuggingFaceLM(tiny("llama", num_hidden_layers=LAYERS))
    training = EarlyExitTraining(model, 2, head_layers=[1, 3], exit_weights=[1, 1, 1, 1])
    shared = {"target.model.lm_head.weight", "target.model.model.norm.weight"}
    assert gradients(training, 2) == {"layer 0", "layer 1", *shared}
    assert gradients(training, 4) == {"layer 0", "layer 1", "layer 2", "layer 3", *shared}
    own = {"drafter.heads.3.norm.weight", "drafter.heads.3.output.weight"}
    assert gradients(training, 3) == {"layer 0", "layer 1", "layer 2", *own}


@pytest.mark.parametrize("head_layers", [[], [2]], ids=["shared head", "own head"])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(head_layers: list[int]) -> None:
    torch.manual_seed(0)
    training = EarlyExitTraining(target(), 2, head_layers=head_layers, num_draft_tokens=3).eval()
    prompts = text(4, 3).tolist()
    tokens = autoregressive_decode(target(), prompts, max_new_tokens=13).tokens
    metrics = training.new_metrics()
    with torch.no_grad():
        batch = batch_of([prompt + new for prompt, new in zip(prompts, tokens, strict=True)])
        training.measure(metrics, batch, "val")
    for layer in range(1, LAYERS):
        drafter = training.drafter.at(layer)
        result = speculative_decode(target(), drafter, prompts, max_new_tokens=13, num_draft_tokens=3)
        counted = metrics.rounds[layer - 1].compute()  # type: ignore[operator]
        assert result.tokens == tokens and result.counts is not None
        assert counted.num_rounds == sum(row.num_rounds for row in result.rows)
        kept = result.counts.histogram
        assert counted.accepted_per_round.tolist() == kept + [0] * (4 - len(kept))
        if layer == 2:
            assert metrics.compute()["block_efficiency"] == counted.block_efficiency
        if layer == 3:
            assert 1 < counted.block_efficiency < 4, "the law says little of an exit that is never right, or always"


def test_metrics_show_every_exit_beside_the_model() -> None:
    training = EarlyExitTraining(target(), 3, num_draft_tokens=2).eval()
    metrics, batch = training.new_metrics(), batch_of(text().tolist())
    assert isinstance(metrics, ExitMetrics)
    with torch.no_grad():
        training.measure(metrics, batch, "val")
        logits = training.all_logits(batch)
    rates, labels = metrics.compute(), batch.next_tokens()
    losses = [next_token_loss(each, labels) for each in logits]
    for layer in range(1, LAYERS):
        torch.testing.assert_close(rates[f"exit_{layer}/loss"], losses[layer - 1])
        agree = (logits[layer - 1].argmax(-1) == logits[-1].argmax(-1))[:, 2:].float().mean()
        torch.testing.assert_close(rates[f"exit_{layer}/teacher_forced_acceptance_rate"], agree)
    assert rates["draft_loss"] == rates["exit_3/loss"]
    # e = 0, 1, 3 and 3 + 3.
    torch.testing.assert_close(rates["loss"], (1 * losses[1] + 3 * losses[2] + 6 * losses[3]) / 10)
    metrics.reset()
    assert all(tokens.num_tokens == 0 for tokens in metrics.exits)


def test_on_bytes_every_exit_is_shown_in_bits_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    training = EarlyExitTraining(target(), 2).eval()
    shown: dict[str, Tensor] = {}
    data = ArithmeticProgressions()
    monkeypatch.setattr(data, "bytes_per_token", lambda split: 2.0)
    monkeypatch.setattr(training, "_data", lambda: data)
    monkeypatch.setattr(training, "log_dict", lambda values, **options: shown.update(values))
    with torch.no_grad():
        training.validation_step(batch_of(text().tolist()), 0)
        training.on_validation_epoch_end()
    for name in ("exit_1/", "exit_3/", "target_", "draft_"):
        torch.testing.assert_close(shown[f"val/{name}bits_per_byte"], shown[f"val/{name}loss"] / math.log(2) / 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"exit_layer": 0}, "exit_layer must be from 1 to 3, got 0"),
        ({"exit_layer": 4}, "exit_layer must be from 1 to 3, got 4"),
        ({"exit_layer": 2, "head_layers": [5]}, "must be from 1 to 3, got 5"),
        ({"exit_layer": 2, "layer_dropout": 1.5}, r"layer_dropout must be in \[0, 1\], got 1.5"),
        ({"exit_layer": 2, "layer_dropout": -0.1}, r"layer_dropout must be in \[0, 1\], got -0.1"),
        ({"exit_layer": 2, "exit_scale": -1.0}, r"exit_scale must be in \[0, inf\), got -1"),
        ({"exit_layer": 1}, "exit 1 is to draft, .* give exit_weights"),
        ({"exit_layer": 2, "head_layers": [1]}, "exit 1 is to draft"),
        ({"exit_layer": 2, "exit_weights": [1.0, 2.0]}, "exit_weights must be 4 numbers.*got 2"),
        ({"exit_layer": 2, "exit_weights": [1.0, 1.0, 1.0, 0.0]}, "exit 4 is to draft, or is the model itself"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EarlyExitTraining(target(), **arguments)  # type: ignore[arg-type]


def test_a_model_without_open_layers_and_a_rotation_without_period_are_refused() -> None:
    with pytest.raises(ValueError, match="RNN has no layers to exit from"):
        EarlyExitTraining(RNN(50), 1)
    with pytest.raises(ValueError, match="period must be at least 1, got 0"):
        RotatingExits(0)


def test_two_steps_of_the_shipped_config_write_a_checkpoint_that_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(shrunk("early_exit", tmp_path))
    outcome = call("fit", "--config", config, *TWO_STEPS, *LOGGED)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    made = checkpoint.load("checkpoints/early_exit")
    assert made.training["global_step"] == 2 and made.recipe["exit_layer"] == 3
    shown = call("decode", "checkpoints/early_exit", "--repeats", "0")
    assert shown.code == 0 and "output identical" in shown.out
    accumulator = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    for layer in range(1, 6):
        assert {f"val/exit_{layer}/{rate}" for rate in ("loss", "accuracy")} <= tags
        assert {f"val/exit_{layer}/teacher_forced_{rate}" for rate in ("acceptance_rate", "block_efficiency")} <= tags
    assert {"train/exit_3/loss", "train/target_loss", "val/target_loss", "val/loss", "val/walltime_speedup"} <= tags


def test_a_resumed_run_skips_the_layers_that_the_whole_one_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ["--config", str(shrunk("early_exit", tmp_path)), *TWO_STEPS]
    config += ["--model.layer_dropout", "0.9", "--model.growing_dropout", "false"]
    config += ["--model.curriculum", "RotatingExits", "--model.curriculum.period", "3"]
    two = ["--trainer.max_epochs", "2"]
    for name, options in (("whole", two), ("halves", []), ("halves", [*two, "--ckpt_path", "last"])):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        outcome = call("fit", *config, *options)
        assert outcome.code == 0, outcome.err
    lasts = (tmp_path / name / "checkpoints/early_exit/version_0/last.ckpt" for name in ("whole", "halves"))
    whole, resumed = map(checkpoint.read, lasts)
    assert whole["global_step"] == resumed["global_step"] == 4
    assert whole["lightning_specdec"]["recipe"]["period"] == 3
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name
