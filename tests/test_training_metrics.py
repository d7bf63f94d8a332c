"""Laws of training metrics: each is its formula, and equals decoding on the target's texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_distillation import VOCAB, batch_of, texts
from tiny_distillation import target as frozen
from torch import Tensor

from lightning_specdec.data import IGNORED, Batch
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN
from lightning_specdec.training import PairTraining, RoundMetrics
from lightning_specdec.training.metrics import (
    ExpectedRounds,
    draft_windows,
    expected_rounds,
    next_token_loss,
    next_token_means,
)


def one_hot_logits(tokens: list[list[int]], vocab_size: int = 9) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab_size).float() * 50


def counted(draft_logits: Tensor, target_logits: Tensor, batch: Batch, window: int) -> RoundMetrics:
    """The expected rounds of one batch."""
    metrics = RoundMetrics([""], window)
    metrics.count(draft_logits, target_logits, batch)
    return metrics


def test_padding_is_masked_out_of_means_and_rounds() -> None:
    torch.manual_seed(0)
    target = RNN(50, hidden_size=16)
    draft = RNN(50, hidden_size=16, num_layers=1)
    sequences = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6], [3, 30, 4, 7]]

    row_metrics = RoundMetrics([""], 3)
    loss_sum = 0.0
    with torch.no_grad():
        for row in sequences:
            batch = batch_of([row])
            inputs = batch.tokens[:, :-1]
            target_logits = target(inputs).logits
            row_metrics.count(draft(inputs).logits, target_logits, batch)
            means = next_token_means("target", target_logits, batch.next_tokens())
            loss, count = means["target_loss"]
            loss_sum += float(loss) * count

        batch = batch_of(sequences)
        inputs = batch.tokens[:, :-1]
        target_logits = target(inputs).logits
        batch_metrics = counted(draft(inputs).logits, target_logits, batch, 3)
        loss, count = next_token_means("target", target_logits, batch.next_tokens())["target_loss"]
    assert count == 5 + 3 + 3
    assert float(loss) == pytest.approx(loss_sum / count, rel=1e-5)
    torch.testing.assert_close(batch_metrics.compute(), row_metrics.compute())


def test_greedy_rounds_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three. The models agree on new tokens 0, 1, 3, 4, 5 and 6.
    target_logits = one_hot_logits([[0, 0, 1, 1, 1, 1, 1, 1, 1]])
    draft_logits = one_hot_logits([[5, 5, 1, 1, 2, 1, 1, 1, 1]])
    metrics = counted(draft_logits, target_logits, batch_of([list(range(10))]), 3)
    counts = metrics.of().compute()
    # Round 1 accepts 2 of 3 and adds a correction: 3 tokens. Round 2 drafts 3 of the 4 that are
    # left,
    # accepts all, and adds one.
    assert counts["accepted_per_round"].tolist() == [0, 0, 1, 1]
    assert counts["num_tested"] == 6
    assert counts["block_efficiency"] == 3.5
    torch.testing.assert_close(counts["acceptance_rate"], torch.tensor(5 / 6))


def test_expected_rounds_follow_every_path() -> None:
    """Against a walk over all outcomes: a draft token's value depends on where its round starts."""
    num_new = 6
    num_draft_tokens = 3
    generator = torch.Generator().manual_seed(0)
    acceptance = torch.rand(num_new, num_draft_tokens, generator=generator, dtype=torch.float64)

    def walk(start: int, probability: float, first_round: bool, expected: Tensor) -> None:
        if start >= num_new:
            return
        window = min(num_draft_tokens, num_new - start - 1)
        if start == 0 and not first_round:
            window = 0
        for num_accepted in range(window + 1):
            outcome = probability * float(acceptance[start, :num_accepted].prod())
            if num_accepted < window:
                outcome *= 1 - float(acceptance[start, num_accepted])
            expected[start, num_accepted] += outcome
            walk(start + num_accepted + 1, outcome, first_round, expected)

    for first_round in (True, False):
        expected = torch.zeros(num_new, num_draft_tokens + 1, dtype=torch.float64)
        walk(0, 1.0, first_round, expected)
        windows = draft_windows(
            torch.tensor([num_new, 2]), num_draft_tokens, first_round=first_round
        )
        rounds = expected_rounds(torch.stack((acceptance, acceptance)), windows)
        torch.testing.assert_close(rounds[0], expected)
        assert rounds[1, 2:].sum() == 0


def test_sampled_rounds_go_by_the_overlap() -> None:
    draft_logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 4, 3)
    target_logits = torch.tensor([0.2, 0.7, 0.1]).log().expand(1, 4, 3)
    beta = 0.2 + 0.3 + 0.1
    batch = batch_of([[0, 1, 2, 0, 1]], prompt_length=2)
    metrics = counted(draft_logits, target_logits, batch, 2)
    # Three new tokens. Round 1 drafts 2 and accepts 0, 1 or 2; then 2, 1 or 0 tokens are left.
    num_rounds = 1 + (1 - beta) * (1 + (1 - beta)) + beta * (1 - beta) * 1
    torch.testing.assert_close(
        metrics.of("sampling_").accepted_per_round.sum(), torch.tensor(num_rounds)
    )
    torch.testing.assert_close(metrics.compute()["sampling_acceptance_rate"], torch.tensor(beta))


def test_the_rounds_of_each_of_several_drafts_are_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates: list[ExpectedRounds] = []
    monkeypatch.setattr(ExpectedRounds, "update", lambda self, *_: updates.append(self))
    drafts: dict[str, Any] = {name: RNN(VOCAB, hidden_size=4) for name in ("small", "large")}
    module = PairTraining(RNN(VOCAB, hidden_size=8), drafts=drafts)
    module.measure(batch_of([[1, 2, 3, 4, 5]]), "val")
    assert len(updates) == 2 * 2, "greedy and sampled rounds of two drafts"
    assert module.metrics.of() is module.metrics.of("small/")


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_along_the_targets_own_text_the_counts_are_those_of_decoding(num_draft_tokens: int) -> None:
    target = frozen()
    draft = target.with_layers([0, 2])
    rows = texts(16, 3)
    prompts = [row[:3] for row in rows]
    decoded = speculative_decode(
        target, ModelDrafter(draft), prompts, max_new_tokens=19, num_draft_tokens=num_draft_tokens
    )
    batch = batch_of(rows)
    with torch.no_grad():
        inputs = batch.tokens[:, :-1]
        metrics = counted(draft(inputs).logits, target(inputs).logits, batch, num_draft_tokens)
    counts = metrics.of().compute()
    assert decoded.counts is not None
    histogram = list(decoded.counts.histogram)
    num_missing = num_draft_tokens + 1 - len(histogram)
    assert counts["accepted_per_round"].tolist() == histogram + [0] * num_missing
    assert counts["num_tested"] == decoded.counts.num_tested
    assert counts["block_efficiency"] == pytest.approx(decoded.block_efficiency)
    # The law is empty for a draft that is always right, or never.
    assert 0 < decoded.counts.num_accepted < decoded.counts.num_tested


def test_the_loss_of_a_batch_without_labels_is_zero() -> None:
    logits = torch.zeros(1, 2, 5, requires_grad=True)
    loss = next_token_loss(logits, torch.full((1, 2), IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()
