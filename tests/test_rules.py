"""The rules against cases counted by hand, and law 8: nothing degenerate gives NaN or a token that cannot be."""

from __future__ import annotations

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.decoding import Session, speculative_decode
from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    EpsilonThreshold,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
    TypicalAcceptance,
    Verdict,
)

LAST = 1 - 2**-24
GREEDY, SAMPLED = Sampling(0.0), Sampling(1.0)


def logits(*rows: list[float]) -> Tensor:
    """`[1, N, V]`: logits whose softmax are these rows."""
    return torch.tensor([rows]).log()


def noise(num_positions: int, *, accept: float = 0.0, correct: float = 0.0) -> Tensor:
    table = torch.zeros(1, num_positions, len(Purpose))
    table[..., Purpose.ACCEPT], table[..., Purpose.CORRECT] = accept, correct
    return table


def outcome(verdict: Verdict) -> tuple[int, int]:
    return int(verdict.num_accepted), int(verdict.next_tokens)


def test_exact_match_keeps_guesses_while_they_are_the_targets_draws() -> None:
    target = logits([0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3])
    for guess, expected in ([1, 1], (2, 1)), ([1, 0], (1, 1)), ([2, 1], (0, 1)):
        assert (
            outcome(ExactMatch().judge(Draft(torch.tensor([guess])), target, GREEDY, None))
            == expected
        )
    drawn = noise(3, correct=0.75)  # falls on token 2
    for guess, expected in ([2, 2], (2, 2)), ([2, 1], (1, 2)), ([1, 2], (0, 2)):
        assert (
            outcome(ExactMatch().judge(Draft(torch.tensor([guess])), target, SAMPLED, drawn))
            == expected
        )


@pytest.mark.parametrize(
    ("accept", "kept"), [(0.0, True), (0.49, True), (0.51, False), (LAST, False)]
)
def test_rejection_sampling_keeps_with_the_ratio_of_the_probabilities(
    accept: float, kept: bool
) -> None:
    target, draft_probs = (
        logits([0.4, 0.4, 0.2], [1.0, 0.0, 0.0]),
        torch.tensor([[[0.8, 0.1, 0.1]]]),
    )
    draft = Draft(torch.tensor([[0]]), probs=draft_probs)
    verdict = RejectionSampling().judge(
        draft, target, SAMPLED, noise(2, accept=accept, correct=0.74)
    )
    # The residual of (0.4, 0.4, 0.2) - (0.8, 0.1, 0.1) is (0, 0.3, 0.1): token 1 up to 0.75, then token 2.
    assert outcome(verdict) == ((1, 0) if kept else (0, 1))
    later = RejectionSampling().judge(draft, target, SAMPLED, noise(2, accept=LAST, correct=0.76))
    assert outcome(later) == (0, 2)


@pytest.mark.parametrize("accept", [0.0, 0.5, LAST])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, Sampling(0.1), Sampling(1.0, top_k=2)], ids=str
)
def test_identical_models_are_always_kept_and_never_nan(accept: float, sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(2)
    target = 8 * torch.randn(200, 4, 9, generator=generator)
    probs = sampling.probs(target)
    tokens = sampling.sample(target, torch.rand(200, 4, generator=generator))[:, :-1]
    table = torch.rand(200, 4, 3, generator=generator)
    table[..., Purpose.ACCEPT] = accept
    verdict = RejectionSampling().judge(Draft(tokens, probs=probs[:, :-1]), target, sampling, table)
    assert bool(verdict.kept.all())
    assert bool((probs.gather(2, verdict.endings[..., None]) > 0).all())


@pytest.mark.parametrize("correct", [0.0, 0.3, 0.6, 0.99, LAST])
def test_a_rejection_by_rounding_alone_draws_from_the_target(correct: float) -> None:
    """The draft's probabilities are a hair above the target's, so nothing is left, or less than float32 can divide."""
    for tiny in (-1000.0, -100.0, -88.0):
        target = torch.tensor([[[0.0, 0.0, tiny], [0.0, 0.0, tiny]]])
        draft_probs = torch.tensor([[[0.5 + 6e-8, 0.5, 0.0]]])
        draft = Draft(torch.tensor([[0]]), probs=draft_probs)
        verdict = RejectionSampling().judge(
            draft, target, SAMPLED, noise(2, accept=LAST, correct=correct)
        )
        assert outcome(verdict) == (0, int(correct >= 0.5)), (
            "with chances of 1/2 and 1/2, as the target has them"
        )


def test_probabilities_of_zero_and_one_decide_alone() -> None:
    certain = logits([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    for accept in (0.0, 0.5, LAST):
        for correct in (0.0, 0.5, LAST):
            table = noise(2, accept=accept, correct=correct)
            for draft_probs in (
                None,
                torch.tensor([[[0.3, 0.4, 0.3]]]),
                torch.tensor([[[0.0, 1.0, 0.0]]]),
            ):
                right = Draft(torch.tensor([[1]]), probs=draft_probs)
                assert outcome(RejectionSampling().judge(right, certain, SAMPLED, table)) == (1, 2)
            for draft_probs in (
                None,
                torch.tensor([[[0.3, 0.4, 0.3]]]),
                torch.tensor([[[1.0, 0.0, 0.0]]]),
            ):
                wrong = Draft(torch.tensor([[0]]), probs=draft_probs)
                assert outcome(RejectionSampling().judge(wrong, certain, SAMPLED, table)) == (0, 1)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(3.0, top_k=1)], ids=str)
def test_epsilon_threshold_compares_the_softmaxes_at_temperature_one(sampling: Sampling) -> None:
    target, table = logits([0.7, 0.3], [0.6, 0.4], [0.1, 0.9]), noise(3)
    for near, expected in ((0.65, (1, 0)), (0.75, (1, 0)), (0.55, (0, 0)), (0.85, (0, 0))):
        draft = Draft(torch.tensor([[0, 1]]), logits=logits([near, 1 - near], [0.9, 0.1]))
        verdict = EpsilonThreshold(0.1).judge(draft, target, sampling, table)
        assert outcome(verdict) == expected
        assert verdict.changed is not None and verdict.changed.tolist() == [[False, True]]
    draft = Draft(torch.tensor([[1, 1]]), logits=logits([0.7, 0.3], [0.6, 0.4]))
    assert outcome(EpsilonThreshold(0.01).judge(draft, target, sampling, table)) == (2, 1)


def test_typical_acceptance_asks_less_where_the_target_is_unsure() -> None:
    sure, table = (
        [0.9, 0.06, 0.04],
        noise(2),
    )  # entropy 0.39: 0.3 * exp(-0.39) = 0.20, so epsilon decides
    for token, kept in ((0, True), (1, False), (2, False)):
        verdict = TypicalAcceptance(0.09, 0.3).judge(
            Draft(torch.tensor([[token]])), logits(sure, sure), SAMPLED, table
        )
        assert int(verdict.num_accepted) == kept
    assert int(
        TypicalAcceptance(0.05, 0.3)
        .judge(Draft(torch.tensor([[1]])), logits(sure, sure), SAMPLED, table)
        .kept
    )
    flat = [0.01] * 100  # entropy ln 100: 0.3 / 100 is enough
    verdict = TypicalAcceptance(0.09, 0.3).judge(
        Draft(torch.tensor([[7]])), logits(flat, flat), SAMPLED, table
    )
    assert int(verdict.num_accepted) == 1


def test_typical_acceptance_reads_temperature_one_at_temperature_zero_and_the_sampling_elsewhere() -> (
    None
):
    target, draft = logits([0.8, 0.15, 0.05], [1.0, 0.0, 0.0]), Draft(torch.tensor([[1]]))
    assert int(TypicalAcceptance().judge(draft, target, GREEDY, None).num_accepted) == 1
    assert int(TypicalAcceptance().judge(draft, target, SAMPLED, noise(2)).num_accepted) == 1
    assert int(TypicalAcceptance().judge(draft, target, Sampling(0.3), noise(2)).num_accepted) == 0
    assert (
        int(TypicalAcceptance().judge(draft, target, Sampling(1.0, top_k=1), noise(2)).num_accepted)
        == 0
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_without_guesses_a_round_is_one_standard_step(rule: str, sampling: Sampling) -> None:
    target, table = torch.randn(5, 1, 4), torch.rand(5, 1, 3)
    draft = Draft(torch.zeros(5, 0, dtype=torch.long), logits=torch.zeros(5, 0, 4))
    verdict = cases.RULES[rule]().judge(draft, target, sampling, table)
    assert verdict.num_accepted.tolist() == [0] * 5
    assert (
        verdict.next_tokens.tolist()
        == sampling.sample(target, table[..., Purpose.CORRECT])[:, 0].tolist()
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_what_lies_behind_a_rows_guesses_is_never_kept_nor_read(
    rule: str, sampling: Sampling
) -> None:
    generator = torch.Generator().manual_seed(3)
    target, table = (
        torch.randn(60, 4, 5, generator=generator),
        torch.rand(60, 4, 3, generator=generator),
    )
    tokens = sampling.sample(target, table[..., Purpose.CORRECT])[
        :, :-1
    ]  # so that some are kept by every rule
    lengths = torch.arange(60) % 4
    behind = (torch.arange(3) >= lengths[:, None])[..., None]
    probs = None if sampling.greedy else sampling.probs(target[:, :-1])
    clean = Draft(tokens, lengths, probs, target[:, :-1])
    other_tokens = torch.where(behind[..., 0], (tokens + 1) % 5, tokens)
    other_probs = None if probs is None else probs.masked_fill(behind, torch.nan)
    dirty = Draft(other_tokens, lengths, other_probs, target[:, :-1].masked_fill(behind, torch.nan))
    first, second = (
        cases.RULES[rule]().judge(draft, target, sampling, table) for draft in (clean, dirty)
    )
    assert bool((first.num_accepted <= lengths).all()) and bool((first.num_accepted > 0).any())
    assert torch.equal(first.num_accepted, second.num_accepted)
    assert torch.equal(first.next_tokens, second.next_tokens)


@pytest.mark.parametrize(
    "rule", [EpsilonThreshold(1.0), TypicalAcceptance(1e-6, 1e-6)], ids=["epsilon", "typical"]
)
def test_a_lossy_rule_counts_the_tokens_that_it_changed(rule: AcceptanceRule) -> None:
    """At temperature 0, from the text itself: kept guesses that are not the target's own choice there."""
    target = cases.target("rnn")
    result = speculative_decode(
        target,
        cases.drafter("near", "rnn"),
        cases.PROMPTS,
        max_new_tokens=20,
        rule=rule,
        eos=cases.EOS,
    )
    changed = 0
    for row in result.rows:
        choices = target(torch.tensor([row.prompt + row.tokens])).logits[0].argmax(-1).tolist()
        own = choices[len(row.prompt) - 1 : -1]
        changed += sum(token != choice for token, choice in zip(row.tokens, own, strict=True))
    assert result.num_changed == changed > 0


def test_a_drafter_without_logits_is_refused_by_name_where_logits_are_compared() -> None:
    with pytest.raises(
        ValueError, match="EpsilonThreshold compares the draft's logits, and Repeater has none"
    ):
        Session(cases.target("rnn"), cases.Repeater(), max_length=9, rule=EpsilonThreshold())
