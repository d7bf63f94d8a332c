"""Laws of training heads: what each is judged by, who learns and who does not, metrics that are decodings."""

from __future__ import annotations

import functools
import math
from copy import deepcopy
from pathlib import Path

import pytest
import tiny_models
import torch
from cli_fixtures import call
from families import tiny
from lightning_specdec.training.multi_token import as_drafts, head_losses, labels_ahead
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_heads import heads
from torch import Tensor
from training_fixtures import shrunk

from lightning_specdec.checkpoints import checkpoint
from lightning_specdec.data import ArithmeticProgressions, Batch
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import MultiTokenDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import MultiTokenTraining, next_token_loss

VOCAB = 11
LOGGED = ["--trainer.logger", "TensorBoardLogger", "--trainer.logger.save_dir", "logs"]


@functools.cache
def target() -> HuggingFaceLM:
    """A random model; read it, do not write to it."""
    return HuggingFaceLM(tiny("llama", vocab_size=VOCAB, sharpness=14.0))


@functools.cache
def fitted() -> MultiTokenDrafter:
    """Heads that are right often, not always."""
    return heads(target(), num_steps=40)


def batch_of(rows: list[list[int]], prompt_length: int = 3) -> Batch:
    return ArithmeticProgressions(prompt_length=prompt_length).collate(list(enumerate(rows)))


def text(num_rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(0))


def test_head_i_is_judged_by_the_token_two_and_i_places_on_and_never_behind_the_end() -> None:
    batch = batch_of([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10]])
    labels = batch.next_tokens()
    assert labels_ahead(labels, 1).tolist() == [[3, 4, 5, 6, -100], [9, 10, -100, -100, -100]]
    assert labels_ahead(labels, 3).tolist() == [[5, 6, -100, -100, -100], [-100] * 5]
    assert labels_ahead(labels, 9).tolist() == [[-100] * 5] * 2
    logits = torch.randn(3, 2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    by_hand = -torch.stack([logits[1, 0, place].log_softmax(-1)[place + 4] for place in range(3)])
    by_hand = torch.cat((by_hand, -logits[1, 1, 0].log_softmax(-1)[10][None]))
    torch.testing.assert_close(head_losses(logits, labels)[1], by_hand.mean())
    assert head_losses(logits[:, :, :1], labels[:, :1]).tolist() == [0, 0, 0], "no token so far ahead, no loss"


def test_a_round_behind_token_t_guesses_with_what_the_heads_made_of_the_token_before() -> None:
    logits = torch.randn(4, 2, 5, VOCAB)
    guesses = as_drafts(logits)
    assert guesses.shape == (2, 5, 4, VOCAB)
    for place in range(1, 5):
        for i in range(4):
            # Head i at place t - 1 scores token t - 1 + 2 + i.
            assert torch.equal(guesses[:, place, i], logits[i, :, place - 1])


@pytest.mark.parametrize("prompt_length", [1, 4])
def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding(prompt_length: int) -> None:
    training = MultiTokenTraining(target(), 3, num_draft_tokens=3, freeze_target=True).eval()
    training.drafter.load_state_dict(fitted().state_dict())
    prompts = text(6, prompt_length).tolist()
    tokens = autoregressive_decode(target(), prompts, max_new_tokens=19).tokens
    result = speculative_decode(target(), training.drafter, prompts, max_new_tokens=19, num_draft_tokens=3)
    rows = [prompt + new for prompt, new in zip(prompts, tokens, strict=True)]
    metrics = training.new_metrics()
    with torch.no_grad():
        training.measure(metrics, batch_of(rows, prompt_length), "val")
    counts, counted = result.counts, metrics.greedy.compute()
    assert result.tokens == tokens and counts is not None
    # Heads know nothing before the target has read the prompt, and the metrics know that.
    assert all(row.rounds is not None and row.rounds[0].drafted == [] for row in result.rows)
    assert counted.num_rounds == sum(row.num_rounds for row in result.rows)
    assert counted.accepted_per_round.tolist() == counts.histogram + [0] * (4 - len(counts.histogram))
    assert counted.num_tested == counts.num_tested and counted.acceptance_sum == counts.num_accepted
    assert 10 < counts.num_accepted < counts.num_tested, "the law says little of heads that are never right, or always"


def test_the_sum_of_all_losses_moves_the_target_and_every_head() -> None:
    training = MultiTokenTraining(HuggingFaceLM(tiny("llama")), 2, num_draft_tokens=2)
    logits, target_logits = training.score_heads(batch := batch_of(text().tolist()))
    (head_losses(logits, batch.next_tokens())[1]).backward()
    moved = {name for name, weight in training.named_parameters() if weight.grad is not None and weight.grad.any()}
    assert any(name.startswith("target.model.model.layers.2") for name in moved)
    assert any(name.startswith("drafter.heads.1") for name in moved)
    assert not any(name.startswith("drafter.heads.0") for name in moved)
    assert training.head_weights == [1, 1] and target_logits.requires_grad


@pytest.mark.parametrize("shared_output", [False, True])
def test_on_a_frozen_target_only_the_heads_learn(shared_output: bool) -> None:
    model = HuggingFaceLM(tiny("llama"))
    training = MultiTokenTraining(model, 3, freeze_target=True, shared_output=shared_output)
    before = deepcopy(model.state_dict())
    assert training.head_weights == pytest.approx([0.8, 0.64, 0.512])
    assert not model.training and not training.train().target.training and training.drafter.training
    optimizer = training.configure_optimizers()
    heads_before = deepcopy(training.drafter.state_dict())
    logits, target_logits = training.score_heads(batch := batch_of(text().tolist()))
    assert not target_logits.requires_grad
    head_losses(logits, batch.next_tokens()).sum().backward()
    assert all(weight.grad is None for weight in model.parameters())
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(not torch.equal(weight, heads_before[name]) for name, weight in training.drafter.state_dict().items())


def test_metrics_show_every_head_and_the_loss_that_is_minimized() -> None:
    rates = {}
    batch = batch_of(text().tolist())
    for frozen in (False, True):
        weights = [1.0, 0.5, 0.25, 0.0]
        training = MultiTokenTraining(target(), 4, head_weights=weights, freeze_target=frozen).eval()
        metrics = training.new_metrics()
        with torch.no_grad():
            training.measure(metrics, batch, "val")
            logits, target_logits = training.score_heads(batch)
        rates[frozen] = metrics.compute()
        losses, target_loss = (
            head_losses(logits, batch.next_tokens()),
            next_token_loss(target_logits, batch.next_tokens()),
        )
        for i in range(4):
            torch.testing.assert_close(rates[frozen][f"head_{i + 1}/loss"], losses[i])
        expected = (losses * torch.tensor(weights)).sum() + (0 if frozen else target_loss)
        torch.testing.assert_close(rates[frozen]["loss"], expected)
        assert rates[frozen]["draft_loss"] == rates[frozen]["head_1/loss"]
        metrics.reset()
        assert all(head.num_tokens == 0 for head in metrics.heads)
    assert math.isfinite(rates[True]["acceptance_rate"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_heads": 0}, "num_heads must be from 1 to 64, got 0"),
        ({"num_heads": 2}, "a round cannot have 3 draft tokens of 2 heads"),
        ({"head_weights": [1.0]}, "head_weights must be 4 numbers, one for each head, got 1"),
        ({"head_weights": [1.0, 1.0, -1.0, 1.0]}, r"head_weights must be in \[0, inf\), got -1"),
        ({"target_checkpoint": "other.ckpt"}, "heads need one target, got both"),
        ({"target": None}, "heads need one target, got neither"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        MultiTokenTraining(**{"target": target(), **arguments})  # type: ignore[arg-type]


def test_two_steps_of_the_shipped_config_write_a_checkpoint_that_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(shrunk("multi_token", tmp_path)), "--data.batch_size", "16"]
    outcome = call("fit", *config, *LOGGED)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    path = tmp_path / "checkpoints" / "multi_token" / "version_0" / "last.ckpt"
    made = checkpoint.load(path)
    assert made.training["global_step"] == 2 and made.recipe["num_heads"] >= 4
    shown = call("decode", "--ckpt", str(path), "--repeats", "0")
    assert shown.code == 0 and "output identical" in shown.out
    accumulator = EventAccumulator(str(next(tmp_path.rglob("events.out*")).parent))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    for i in range(1, 5):
        assert {f"val/head_{i}/loss", f"val/head_{i}/accuracy", f"train/head_{i}/loss"} <= tags
    # The same file is a target for new heads, and stays as it is in every bit.
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path / "again")
    given = ["--model.target", "null", "--model.target_checkpoint", str(path), "--model.freeze_target", "true"]
    outcome = call("fit", *config, *given)
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    frozen = checkpoint.load("checkpoints/multi_token")
    assert frozen.recipe["target_checkpoint"] == str(path)
    for name, weight in frozen.target.state_dict().items():
        assert torch.equal(weight, made.target.state_dict()[name]), name


def test_the_target_may_be_a_directory_of_transformers(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path, "gpt2")
    training = MultiTokenTraining(target_checkpoint=path, freeze_target=True)
    assert isinstance(training.target, HuggingFaceLM) and training.drafter.settings.hidden_size == 32
    assert MultiTokenTraining(target_checkpoint=path).target.training, "what learns is in training mode"
    with pytest.raises(FileNotFoundError):
        MultiTokenTraining(target_checkpoint=str(tmp_path / "nowhere.ckpt"))
