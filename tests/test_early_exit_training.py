"""Laws of training early exits: LayerSkip's formulas, gradients, and rounds as in decoding."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from families import tiny
from tiny_distillation import batch_of
from torch import Tensor

from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import EarlyExitTraining, next_token_loss

VOCAB, LAYERS = 23, 4


@functools.cache
def target() -> HuggingFaceLM:
    """A random model; read it, do not write to it."""
    return HuggingFaceLM(tiny("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, sharpness=4.0))


def text(num_rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (num_rows, length), generator=torch.Generator().manual_seed(0))


def test_the_layers_one_by_one_are_the_models_own_pass() -> None:
    training = EarlyExitTraining(target(), 2)
    tokens = text()
    with torch.no_grad():
        states = training.hidden_states(tokens)
        expected = target()(tokens, features=range(LAYERS - 1))
        assert all(
            torch.equal(states[layer], expected.features[layer]) for layer in range(LAYERS - 1)
        )
        torch.testing.assert_close(target().exit_logits(states[-1]), expected.logits)


def gradients(training: EarlyExitTraining, exit_layer: int) -> set[str]:
    """Which weights the loss of one exit moves: layers by number, and heads."""
    training.zero_grad()
    batch = batch_of(text().tolist())
    states = training.hidden_states(batch.tokens[:, :-1])
    next_token_loss(
        training.target.exit_logits(states[exit_layer - 1]), batch.next_tokens()
    ).backward()
    names = [
        name
        for name, weight in training.named_parameters()
        if weight.grad is not None and weight.grad.any()
    ]
    parts = {f"layer {name.split('.')[4]}" for name in names if ".layers." in name}
    return parts | {
        name
        for name in names
        if "lm_head" in name or "heads" in name or name.endswith("model.norm.weight")
    }


def test_an_exits_loss_moves_the_layers_below_it_and_the_shared_head() -> None:
    training = EarlyExitTraining(HuggingFaceLM(tiny("llama", num_hidden_layers=LAYERS)), 2)
    shared = {"target.model.lm_head.weight", "target.model.model.norm.weight"}
    assert gradients(training, 2) == {"layer 0", "layer 1", *shared}
    assert gradients(training, 4) == {"layer 0", "layer 1", "layer 2", "layer 3", *shared}


def test_rounds_counted_on_the_targets_own_texts_are_those_of_decoding() -> None:
    training = EarlyExitTraining(target(), 2, num_draft_tokens=3).eval()
    prompts = text(4, 3).tolist()
    tokens = autoregressive_decode(target(), prompts, max_new_tokens=13).tokens
    with torch.no_grad():
        batch = batch_of([prompt + new for prompt, new in zip(prompts, tokens, strict=True)])
        training.measure(batch, "val")
    for layer in range(1, LAYERS):
        drafter = training.drafter.at(layer)
        result = speculative_decode(
            target(), drafter, prompts, max_new_tokens=13, num_draft_tokens=3
        )
        counted = training.metrics.of(f"exit_{layer}/teacher_forced_").compute()
        assert result.tokens == tokens and result.counts is not None
        histogram = result.counts.histogram
        assert counted["accepted_per_round"].tolist() == histogram + [0] * (4 - len(histogram))
        if layer == 2:
            assert training.metrics.compute()["block_efficiency"] == counted["block_efficiency"]
        if layer == 3:
            assert 1 < counted["block_efficiency"] < 4, (
                "the law says little of an exit that is never right, or always"
            )


def test_the_loss_is_the_weighted_mean_of_all_exits() -> None:
    training = EarlyExitTraining(target(), 3, exit_weights=[0.0, 1.0, 3.0, 6.0]).eval()
    with torch.no_grad():
        measured = training.measure(batch_of(text().tolist()), "val")
    means = {name: value for name, (value, _) in measured.items()}
    assert means["draft_loss"] == means["exit_3/loss"]
    expected_loss = (
        1 * means["exit_2/loss"] + 3 * means["exit_3/loss"] + 6 * means["target_loss"]
    ) / 10
    torch.testing.assert_close(means["loss"], expected_loss)


def test_on_bytes_every_loss_is_shown_in_bits_per_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    training = EarlyExitTraining(target(), 2).eval()
    logged_values: dict[str, Tensor] = {}
    data = ArithmeticProgressions()
    monkeypatch.setattr(data, "bytes_per_token", lambda split: 2.0)
    monkeypatch.setattr(training, "_data", lambda: data)
    monkeypatch.setattr(
        training, "log", lambda name, value, **options: logged_values.update({name: value})
    )
    with torch.no_grad():
        training.validation_step(batch_of(text().tolist()), 0)
    for name in ("exit_1/", "exit_3/", "target_", "draft_"):
        torch.testing.assert_close(
            logged_values[f"val/{name}bits_per_byte"],
            logged_values[f"val/{name}loss"] / math.log(2) / 2,
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be from 1 to 3, got 0"),
        ({"exit_layer": 2, "layer_dropout": 1.5}, r"layer_dropout must be in \[0, 1\], got 1.5"),
        ({"exit_layer": 2, "exit_weights": [1.0, 2.0]}, "exit_weights must be 4 numbers"),
        (
            {"exit_layer": 2, "exit_weights": [1.0, 1.0, 1.0, 0.0]},
            "above 0 for exit 2 and the model itself",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EarlyExitTraining(target(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="RNN has no layers to exit from"):
        EarlyExitTraining(RNN(50), 1)


def test_what_is_skipped_depends_on_the_step_alone() -> None:
    def drawn(step: int) -> list[list[bool]]:
        training = EarlyExitTraining(target(), 2, layer_dropout=0.9)
        training.trainer = SimpleNamespace(  # type: ignore[assignment]
            global_step=step, global_rank=0, world_size=1, estimated_stepping_batches=10
        )
        is_run = training.draw_layers(16, 0)
        assert is_run is not None
        return is_run.tolist()

    assert drawn(7) == drawn(7) != drawn(8)
    assert all(map(all, drawn(0))), "the first step skips nothing"
