"""Laws of training: the shipped config learns, its logs hold what they promise, its metrics are their formulas."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from training_fixtures import CONFIGS, EPOCHS, TrainedRun, shipped_run, verb

from lightning_specdec import checkpoint
from lightning_specdec.data import ArithmeticProgressions, Batch, PromptSource
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.inference import autoregressive_decode, speculative_decode
from lightning_specdec.models import RNN
from lightning_specdec.rules import Sampling
from lightning_specdec.training import (
    NextToken,
    PairMetrics,
    PairTraining,
    SafeCheckpointIO,
    Speculation,
    expected_rounds,
    next_token_loss,
)
from lightning_specdec.training.cli import CliTrainer, run
from lightning_specdec.training.parse_errors import one_line

__all__ = ["shipped_run"]
RATES = ["loss", "draft_loss", "target_loss", "draft_perplexity", "target_perplexity", "draft_accuracy"]
RATES += ["target_accuracy", "acceptance_rate", "block_efficiency"]
RATES += ["sampling_acceptance_rate", "sampling_block_efficiency"]


def pair(seed: int = 0) -> tuple[RNN, RNN]:
    torch.manual_seed(seed)
    return RNN(50, hidden_size=16), RNN(50, hidden_size=16, num_layers=1)


def one_hot_logits(tokens: list[list[int]], vocab_size: int = 9) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float() * 50


def batch_of(*sequences: list[int], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(sequences)))


@pytest.fixture(scope="module")
def events(shipped_run: TrainedRun) -> EventAccumulator:
    accumulator = EventAccumulator(str(shipped_run.events), size_guidance={"histograms": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize("model", ["draft", "target"])
def test_training_losses_fall_from_about_3_9_to_half_or_less(events: EventAccumulator, model: str) -> None:
    losses = [event.value for event in events.Scalars(f"train/{model}_loss")]
    assert len(losses) == EPOCHS
    assert 3.6 < losses[0] < 4.1, "the first epoch's mean is a little below log(50) = 3.9"
    assert losses[-1] <= 0.5


def test_tensorboard_holds_every_promised_tag(events: EventAccumulator) -> None:
    tags = events.Tags()
    assert {f"val/{rate}" for rate in RATES} | {"train/draft_loss", "train/target_loss"} <= set(tags["scalars"])
    assert set(tags["histograms"]) == {"val/accepted_per_round", "val/sampling_accepted_per_round"}
    assert all(len(events.Scalars(f"val/{rate}")) == EPOCHS for rate in RATES)
    histogram = events.Histograms("val/accepted_per_round")[-1].histogram_value
    efficiency = events.Scalars("val/block_efficiency")[-1].value
    assert histogram.bucket_limit == [0.5, 1.5, 2.5, 3.5]
    # Every round adds its kept guesses and one token of the target's own.
    assert (histogram.sum + histogram.num) / histogram.num == pytest.approx(efficiency)


def test_the_hparams_tab_shows_what_was_given_and_the_last_metrics(events: EventAccumulator) -> None:
    content = events.PluginTagToContent("hparams")
    given = content["_hparams_/session_start_info"].decode(errors="replace")
    assert "target/hidden_size" in given and "data/batch_size" in given
    announced = content["_hparams_/experiment"].decode(errors="replace")
    for name in ("draft_loss", "target_loss", "acceptance_rate", "block_efficiency"):
        assert f"hp/{name}" in announced
        assert events.Scalars(f"hp/{name}")[-1].value == events.Scalars(f"val/{name}")[-1].value


def test_a_run_says_what_it_reached_and_nothing_else(shipped_run: TrainedRun) -> None:
    assert "best checkpoint: checkpoints/rnn/best.ckpt" in shipped_run.output
    assert f"epoch {EPOCHS}/{EPOCHS}" in shipped_run.output
    assert "arning" not in shipped_run.output and "tip" not in shipped_run.output.lower()


def test_checkpoints_are_enough_by_themselves_and_say_how_they_were_made(
    shipped_run: TrainedRun, events: EventAccumulator
) -> None:
    made = checkpoint.load(shipped_run.last)
    assert made.prompts == ArithmeticProgressions().prompts()
    assert made.recipe["epochs"] == EPOCHS and made.recipe["data"] == "ArithmeticProgressions"
    assert made.recipe["losses"]["train/target_loss"] == events.Scalars("train/target_loss")[-1].value
    best = checkpoint.load(shipped_run.best).recipe["losses"]["val/loss"]
    assert best == min(event.value for event in events.Scalars("val/loss"))


def test_predictions_are_the_targets_own_in_the_order_of_the_prompts(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb(monkeypatch, tmp_path, "predict", "--ckpt_path", str(shipped_run.best), "--data.batch_size", "2")
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    best = checkpoint.load(shipped_run.best)
    standard = autoregressive_decode(best.target, best.prompts, max_new_tokens=7)
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert [row["prompt"] for row in rows] == best.prompts
    assert [row["tokens"] for row in rows] == standard.tokens
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_read_the_same_yaml_and_the_best_checkpoint(
    shipped_run: TrainedRun,
    events: EventAccumulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    verb(monkeypatch, shipped_run.directory, name)
    shown = capsys.readouterr().out
    prefix = {"validate": "val", "test": "test"}[name]
    assert all(f"{prefix}/{rate}" in shown for rate in RATES)
    if name == "validate":
        assert str(min(event.value for event in events.Scalars("val/loss")))[:6] in shown


def test_a_strangers_checkpoint_deletes_nothing(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning restores from a checkpoint which file it believes it has to replace."""
    precious = tmp_path / "precious.ckpt"
    shutil.copy(shipped_run.best, precious)
    content = torch.load(shipped_run.last, weights_only=True)
    victims = [str(precious), "checkpoints/rnn/../../precious.ckpt"]
    for victim in victims:
        for name, state in content["callbacks"].items():
            if "val/loss" in name:
                state.pop("dirpath", None)
                worst = torch.tensor(99.0)
                state |= {"best_k_models": {victim: worst}, "kth_best_model_path": victim}
                state |= {"kth_value": worst, "best_model_score": worst, "best_model_path": victim}
        torch.save(content, tmp_path / "stranger.ckpt")
        options = ["--ckpt_path", "stranger.ckpt", "--trainer.max_epochs", str(EPOCHS + 2)]
        verb(monkeypatch, tmp_path, "fit", *options)
        assert precious.read_bytes() == shipped_run.best.read_bytes()


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    verb(monkeypatch, tmp_path / "whole", "fit", "--trainer.max_epochs", "4")
    verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "2")
    verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "4", "--ckpt_path", "last")
    whole, halves = (checkpoint.read(tmp_path / n / "checkpoints/rnn/last.ckpt") for n in ("whole", "halves"))
    assert whole["epoch"] == halves["epoch"] == 3 and whole["global_step"] == halves["global_step"] == 200
    assert whole["lightning_specdec"]["recipe"] == halves["lightning_specdec"]["recipe"]
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, halves["state_dict"][name]), name


def test_one_adam_over_both_losses_is_two_adams() -> None:
    data = ArithmeticProgressions(num_train=20)
    (target, draft), (target_alone, draft_alone) = pair(), pair()
    both = torch.optim.Adam([*target.parameters(), *draft.parameters()], lr=0.01, fused=True)
    alone = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (target_alone, draft_alone)]
    for batch in data.train_dataloader():
        inputs, labels = batch.tokens[:, :-1], batch.next_tokens()
        both.zero_grad()
        sum(next_token_loss(model(inputs).logits, labels) for model in (target, draft)).backward()  # type: ignore[union-attr]
        both.step()
        for model, adam in zip((target_alone, draft_alone), alone, strict=True):
            adam.zero_grad()
            next_token_loss(model(inputs).logits, labels).backward()
            adam.step()
    for one, other in ((target, target_alone), (draft, draft_alone)):
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_padding_is_masked_out_of_loss_and_metrics() -> None:
    target, draft = pair()
    sequences = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6], [3, 30, 4]]
    together, apart = PairMetrics(3), PairMetrics(3)
    with torch.no_grad():
        for metrics, batches in ((together, [batch_of(*sequences)]), (apart, [batch_of(row) for row in sequences])):
            for batch in batches:
                inputs = batch.tokens[:, :-1]
                metrics.update(draft(inputs).logits, target(inputs).logits, batch)
        padded = batch_of(*sequences)
        loss = next_token_loss(target(padded.tokens[:, :-1]).logits, padded.next_tokens())
    assert together.target.num_tokens == 5 + 3 + 2
    torch.testing.assert_close(together.compute(), apart.compute())
    torch.testing.assert_close(loss, together.compute()["target_loss"])


def test_next_token_metrics_are_their_formulas() -> None:
    metric = NextToken()
    logits = torch.tensor([[[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], [[0.0, 9.0, 0.0], [5.0, 5.0, 5.0]]])
    metric.update(logits, torch.tensor([[0, 0], [0, -100]]))
    counts = metric.compute()
    wrong = torch.tensor([0.0, 9.0, 0.0]).logsumexp(0)
    right = wrong - 9
    assert counts.num_tokens == 3 and counts.num_correct == 2  # a tie goes to the first token
    torch.testing.assert_close(counts.loss, (torch.tensor(3.0).log() + right + wrong) / 3)
    torch.testing.assert_close(counts.perplexity, counts.loss.exp())
    torch.testing.assert_close(counts.accuracy, torch.tensor(2 / 3))


def test_greedy_rounds_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three; draft and target agree on new tokens 0, 1, 3, 4, 5 and 6.
    target = [[0, 0, 1, 1, 1, 1, 1, 1, 1]]
    draft = [[5, 5, 1, 1, 2, 1, 1, 1, 1]]
    metric = Speculation(3, Sampling())
    metric.update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))
    counts = metric.compute()
    # Round 1 keeps 2 of 3 and adds a correction: 3 tokens. Round 2 guesses 3 of the 4 left, keeps all, adds one.
    assert counts.accepted_per_round.tolist() == [0, 0, 1, 1]
    assert counts.num_rounds == 2 and counts.num_positions == 7 and counts.acceptance_sum == 6
    assert counts.block_efficiency == 3.5
    torch.testing.assert_close(counts.acceptance_rate, torch.tensor(6 / 7))


def test_expected_rounds_are_counted_by_hand() -> None:
    # Two new tokens, window 3: one guess at most, kept with probability 0.25; if not, a second round guesses nothing.
    rounds = expected_rounds(torch.tensor([[0.25, 0.9]]), torch.tensor([2]), 3)
    assert rounds[0].tolist() == [[0.75, 0.25, 0, 0], [0.75, 0, 0, 0]]


def test_expected_rounds_of_heads_follow_every_path() -> None:
    """Against a walk over all outcomes: what a guess is worth depends on where its round starts."""
    num_new, num_draft_tokens = 6, 3
    acceptance = torch.rand(num_new, num_draft_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for first_round in (True, False):
        wanted = torch.zeros(num_new, num_draft_tokens + 1, dtype=torch.float64)

        def walk(j: int, probability: float, wanted: Tensor = wanted, first_round: bool = first_round) -> None:
            if j >= num_new:
                return
            window = min(num_draft_tokens, num_new - j - 1) if j or first_round else 0
            for n in range(window + 1):
                kept = float(acceptance[j, :n].prod()) * (1 if n == window else 1 - float(acceptance[j, n]))
                wanted[j, n] += probability * kept
                walk(j + n + 1, probability * kept)

        walk(0, 1.0)
        lengths = torch.tensor([num_new, 2])
        both = torch.stack((acceptance, acceptance))
        found = expected_rounds(both, lengths, num_draft_tokens, first_round=first_round)
        torch.testing.assert_close(found[0], wanted)
        assert found[1, 2:].sum() == 0


def test_a_chain_is_heads_whose_guess_does_not_mind_where_it_starts() -> None:
    generator = torch.Generator().manual_seed(1)
    chain, lengths = torch.rand(3, 9, generator=generator), torch.tensor([9, 4, 1])
    heads = torch.nn.functional.pad(chain, (0, 1)).unfold(1, 2, 1)
    torch.testing.assert_close(expected_rounds(chain, lengths, 2), expected_rounds(heads, lengths, 2))


def test_the_rounds_of_heads_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three, the target says 1 throughout. Nothing is guessed in the first round;
    # the second starts at new token 1 and keeps one of its two guesses, the third, at new token 3, both; the last, at
    # new token 6, has no room for a guess.
    target = [[1] * 9]
    draft = [[[5, 5]] * 3 + [[1, 7], [5, 5], [1, 1], [5, 5], [5, 5], [5, 5]]]
    metric = Speculation(2, Sampling(), first_round=False)
    metric.update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))  # type: ignore[arg-type]
    counts = metric.compute()
    assert counts.accepted_per_round.tolist() == [2, 1, 1]
    assert counts.num_rounds == 4 and counts.num_positions == 7
    assert counts.acceptance_sum == 3 and counts.num_tested == 4
    with pytest.raises(ValueError, match="logits of 2 guesses, the metric counts rounds of 3"):
        Speculation(3, Sampling()).update(one_hot_logits(draft), one_hot_logits(target), batch_of(list(range(10))))  # type: ignore[arg-type]


def test_sampling_acceptance_is_the_mean_overlap() -> None:
    draft, target = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    metric = Speculation(2, Sampling(temperature=1.0))
    sequence = [0, 1, 2, 0, 1]
    metric.update(draft.log().expand(1, 4, 3), target.log().expand(1, 4, 3), batch_of(sequence, prompt_length=2))
    beta = 0.2 + 0.3 + 0.1
    counts = metric.compute()
    torch.testing.assert_close(counts.acceptance_rate, torch.tensor(beta))
    # Three new tokens. Round 1 guesses 2 and keeps 0, 1 or 2; what is left is 2, 1 or 0 tokens.
    rounds = 1 + (1 - beta) * (1 + (1 - beta)) + beta * (1 - beta) * 1
    torch.testing.assert_close(counts.num_rounds, torch.tensor(rounds))


def test_identical_models_keep_every_guess() -> None:
    logits = torch.randn(2, 10, 50, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        metric = Speculation(3, sampling)
        metric.update(logits, logits, batch_of(list(range(11)), list(range(11))))
        torch.testing.assert_close(metric.compute().acceptance_rate, torch.tensor(1.0))
        torch.testing.assert_close(metric.compute().block_efficiency, torch.tensor(4.0))


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5])
def test_along_the_targets_own_text_the_counts_are_those_of_decoding(num_draft_tokens: int) -> None:
    target, draft = pair(3)
    with torch.no_grad():
        draft.output.bias[:25] -= 1
    prompts = [[start, start + 1, start + 2] for start in range(12)]
    decoded = speculative_decode(
        target, ModelDrafter(draft), prompts, max_new_tokens=9, num_draft_tokens=num_draft_tokens
    )
    batch = batch_of(*(row.prompt + row.tokens for row in decoded.rows))
    metric = Speculation(num_draft_tokens, Sampling())
    with torch.no_grad():
        metric.update(draft(batch.tokens[:, :-1]).logits, target(batch.tokens[:, :-1]).logits, batch)
    counts = metric.compute()
    assert decoded.counts is not None
    histogram = decoded.counts.histogram + [0] * (num_draft_tokens + 1 - len(decoded.counts.histogram))
    assert counts.accepted_per_round.tolist() == histogram
    assert counts.block_efficiency == pytest.approx(decoded.block_efficiency)
    assert 0 < decoded.counts.num_accepted < decoded.counts.num_tested, "a case that tells something"


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed_and_built(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generates = "class_path: GenerateText" in config.read_text()
    if "target_checkpoint: checkpoints/smollm2" in config.read_text():  # built on a tiny target by `fit_shipped`
        monkeypatch.setattr(sys, "argv", ["lightning_specdec", "fit", "--config", str(config), "--print_config"])
        with pytest.raises(SystemExit, match="0"):
            run()
        return
    options = ["--trainer.max_epochs", "0", "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    verb = "generate" if generates else "fit"
    monkeypatch.setattr(sys, "argv", ["lightning_specdec", verb, "--config", str(config), *options])
    started: list[object] = []
    if generates:  # its target is a real model, which starting would load
        monkeypatch.setattr(CliTrainer, "predict", lambda *_, **given: started.append(given["datamodule"]))
    run()
    assert [isinstance(data, PromptSource) for data in started] == [True] * generates


def test_a_users_own_file_takes_the_datas_place_and_sets_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("".join(",".join(str(start + i) for i in range(3 + start % 4)) + "\n" for start in range(40)))
    own = ("--data", "SequenceFile", "--data.path", "mine.csv")
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", *own)
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", *own, "--data.vocab_size", "70")
    made = checkpoint.load(tmp_path / "checkpoints/rnn/last.ckpt")
    assert made.target.vocab_size == 70 and made.recipe["data_arguments"]["path"] == "mine.csv"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trainer.max_epoch", "3"], "unrecognized arguments: --trainer.max_epoch"),
        (["--trainer.max_epochs", "three"], "trainer.max_epochs: expected an int, got three"),
        (["--config", "nowhere.yaml"], "config: File does not exist"),
        (["--model.target.hiden_size", "3"], "Option 'hiden_size' is not accepted: did you mean hidden_size?"),
        (["--model.lerning_rate", "3"], "model: Option 'lerning_rate' is not accepted: did you mean learning_rate?"),
        (["--data.xyzzy", "3"], "data: Option 'xyzzy' is not accepted"),
        (["--model.target", "RMM"], "model.target: there is no class RMM"),
        (["--model.target", "subprocess.Popen"], "subprocess.Popen may not be named here"),
        (["--model.target.class_path", "os.system"], "os.system may not be named here"),
        (["--trainer.callbacks+=torch.nn.Linear"], "torch.nn.Linear may not be named here"),
        (["--model.target.hidden_size", "-3"], "hidden_size must be from 1 to 16384, got -3"),
        (["--model.learning_rate", "0"], "learning_rate must be in (0, inf)"),
        (["--data.num_train", "104"], "115 distinct sequences, and the split needs 119"),
        (["--data", "SequenceFile", "--data.path", "nowhere.csv"], "nowhere.csv does not exist"),
        (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt: no such checkpoint"),
        (["--ckpt_path", "last"], "there is no last checkpoint (checkpoints/rnn/last.ckpt does not exist)"),
        (["--weights_only", "false"], "unrecognized arguments: --weights_only"),
        (["--trainer.accelerator", "gpux"], "invalid accelerator name"),
    ],
)
def test_a_fault_of_the_command_line_is_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        verb(monkeypatch, tmp_path, "fit", *arguments, logger=True)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


def test_a_bad_checkpoint_is_refused_before_anything_runs(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = checkpoint.read(shipped_run.last)
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "empty.ckpt").write_text("")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "half.ckpt").write_bytes(shipped_run.last.read_bytes()[:50_000])
    torch.save({**good, "callbacks": Bomb()}, tmp_path / "bomb.ckpt")
    torch.save({"state_dict": good["state_dict"]}, tmp_path / "foreign.ckpt")
    torch.save({**good, "hyper_parameters": {"_class_path": "os.system"}}, tmp_path / "named.ckpt")
    before = sorted(tmp_path.iterdir())
    for path in before:
        for name in ("fit", "test"):
            with pytest.raises((ValueError, FileNotFoundError), match=path.name) as caught:
                verb(monkeypatch, tmp_path, name, "--ckpt_path", path.name, logger=True)
            assert "\n" not in str(caught.value)
    best, last = str(shipped_run.best), str(shipped_run.last)
    with pytest.raises(ValueError, match="is of other networks .*embedding"):
        verb(monkeypatch, tmp_path, "test", "--ckpt_path", best, "--data.vocab_size", "60", logger=True)
    told = f"{EPOCHS} epochs behind it and the run ends after 50: raise --trainer.max_epochs"
    with pytest.raises(ValueError, match=told):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", last, "--trainer.max_epochs", "50", logger=True)
    assert sorted(tmp_path.iterdir()) == before


def test_an_exported_checkpoint_is_validated_but_not_resumed(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = checkpoint.load(shipped_run.best)
    checkpoint.save(tmp_path / "models.ckpt", made.target, made.drafter)
    verb(monkeypatch, tmp_path, "validate", "--ckpt_path", "models.ckpt")
    assert str(made.recipe["losses"]["val/loss"])[:6] in capsys.readouterr().out
    with pytest.raises(ValueError, match="models.ckpt holds models but no training run to resume"):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", "models.ckpt")


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(shipped_run: TrainedRun, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copy(shipped_run.last, path)
    content = checkpoint.read(shipped_run.last)
    for attempt in range(12):
        child = os.fork()
        if not child:
            while True:
                SafeCheckpointIO().save_checkpoint(content, path)
        time.sleep(0.02 + 0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert checkpoint.load(path).training["epoch"] == EPOCHS - 1


def test_a_write_that_fails_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint({"epoch": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        SafeCheckpointIO().save_checkpoint({"epoch": lambda: None}, path)
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1


def test_two_runs_into_one_directory_never_write_into_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    class AnotherRunSaves:
        def __reduce__(self) -> tuple[object, tuple[()]]:
            SafeCheckpointIO().save_checkpoint({"epoch": 2}, path)
            assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 2
            return OrderedDict, ()

    SafeCheckpointIO().save_checkpoint({"epoch": 1, "meanwhile": AnotherRunSaves()}, path)
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("num_values", [1, 2**18])
def test_a_full_disk_names_the_file_and_leaves_the_old_checkpoint_alone(tmp_path: Path, num_values: int) -> None:
    path = tmp_path / "best.ckpt"
    SafeCheckpointIO().save_checkpoint({"epoch": 1}, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            SafeCheckpointIO().save_checkpoint({"epoch": 2, "weights": torch.ones(num_values)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["best.ckpt"]
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1


def test_only_what_this_run_has_written_is_ever_removed(tmp_path: Path) -> None:
    io = SafeCheckpointIO()
    (tmp_path / "folder.ckpt").mkdir()
    for name in ("notes.txt", "old.ckpt"):
        (tmp_path / name).write_text("")
    io.save_checkpoint({}, tmp_path / "mine.ckpt")
    for path in sorted(tmp_path.iterdir()):
        io.remove_checkpoint(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.ckpt", "notes.txt", "old.ckpt"]


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        PairTraining(RNN(50), RNN(40))


def test_a_parse_error_that_is_not_understood_is_kept_in_one_line() -> None:
    assert one_line("something\n  went wrong") == "something; went wrong"
