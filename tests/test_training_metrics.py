"""Laws of training's metrics: each is its formula, counted by hand, and along the target's own text a decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_distillation import VOCAB, batch_of, texts
from tiny_distillation import target as frozen
from torch import Tensor

from lightning_specdec.data import Batch
from lightning_specdec.decoding import speculative_decode
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models import RNN
from lightning_specdec.training import PairTraining, RoundMetrics
from lightning_specdec.training.metrics import (
    ExpectedRounds,
    draft_windows,
    expected_rounds,
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
    target, draft = RNN(50, hidden_size=16), RNN(50, hidden_size=16, num_layers=1)
    sequences = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6], [3, 30, 4, 7]]
    padded, total, apart = batch_of(sequences), 0.0, RoundMetrics([""], 3)
    with torch.no_grad():
        for row in sequences:
            batch = batch_of([row])
            inputs = batch.tokens[:, :-1]
            apart.count(draft(inputs).logits, target(inputs).logits, batch)
            loss, count = next_token_means("target", target(inputs).logits, batch.next_tokens())[
                "target_loss"
            ]
            total += float(loss) * count
        inputs = padded.tokens[:, :-1]
        together = counted(draft(inputs).logits, target(inputs).logits, padded, 3)
        loss, count = next_token_means("target", target(inputs).logits, padded.next_tokens())[
            "target_loss"
        ]
    assert count == 5 + 3 + 3 and float(loss) == pytest.approx(total / count, rel=1e-5)
    torch.testing.assert_close(together.compute(), apart.compute())


def test_greedy_rounds_are_counted_by_hand() -> None:
    # Seven new tokens after a prompt of three; draft and target agree on new tokens 0, 1, 3, 4, 5 and 6.
    target, draft = [[0, 0, 1, 1, 1, 1, 1, 1, 1]], [[5, 5, 1, 1, 2, 1, 1, 1, 1]]
    metrics = counted(one_hot_logits(draft), one_hot_logits(target), batch_of([list(range(10))]), 3)
    counts = metrics.of().compute()
    # Round 1 keeps 2 of 3 and adds a correction: 3 tokens. Round 2 drafts 3 of the 4 left, keeps all, adds one.
    assert counts["accepted_per_round"].tolist() == [0, 0, 1, 1] and counts["num_tested"] == 6
    assert counts["block_efficiency"] == 3.5
    torch.testing.assert_close(counts["acceptance_rate"], torch.tensor(5 / 6))


def test_expected_rounds_follow_every_path() -> None:
    """Against a walk over all outcomes: what a draft token is worth depends on where its round starts."""
    num_new, num_draft_tokens = 6, 3
    acceptance = torch.rand(
        num_new, num_draft_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    for first_round in (True, False):
        wanted = torch.zeros(num_new, num_draft_tokens + 1, dtype=torch.float64)

        def walk(
            j: int, probability: float, wanted: Tensor = wanted, first_round: bool = first_round
        ) -> None:
            if j >= num_new:
                return
            window = min(num_draft_tokens, num_new - j - 1) if j or first_round else 0
            for n in range(window + 1):
                kept = float(acceptance[j, :n].prod()) * (
                    1 if n == window else 1 - float(acceptance[j, n])
                )
                wanted[j, n] += probability * kept
                walk(j + n + 1, probability * kept)

        walk(0, 1.0)
        lengths = torch.tensor([num_new, 2])
        both = torch.stack((acceptance, acceptance))
        found = expected_rounds(
            both, draft_windows(lengths, num_draft_tokens, first_round=first_round)
        )
        torch.testing.assert_close(found[0], wanted)
        assert found[1, 2:].sum() == 0


def test_sampled_rounds_go_by_the_overlap() -> None:
    draft, target = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    batch, beta = batch_of([[0, 1, 2, 0, 1]], prompt_length=2), 0.2 + 0.3 + 0.1
    metrics = counted(draft.log().expand(1, 4, 3), target.log().expand(1, 4, 3), batch, 2)
    # Three new tokens. Round 1 drafts 2 and keeps 0, 1 or 2; what is left is 2, 1 or 0 tokens.
    rounds = 1 + (1 - beta) * (1 + (1 - beta)) + beta * (1 - beta) * 1
    torch.testing.assert_close(
        metrics.of("sampling_").accepted_per_round.sum(), torch.tensor(rounds)
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
    assert len(updates) == 2 * 2 and module.metrics.of() is module.metrics.of("small/"), (
        "greedy and sampled, of two"
    )


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_along_the_targets_own_text_the_counts_are_those_of_decoding(num_draft_tokens: int) -> None:
    target, draft = frozen(), frozen().with_layers([0, 2])
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
    histogram = decoded.counts.histogram + [0] * (
        num_draft_tokens + 1 - len(decoded.counts.histogram)
    )
    assert counts["accepted_per_round"].tolist() == histogram
    assert counts["num_tested"] == decoded.counts.num_tested
    assert counts["block_efficiency"] == pytest.approx(decoded.block_efficiency)
    assert 0 < decoded.counts.num_accepted < decoded.counts.num_tested, (
        "a case that tells something"
    )
