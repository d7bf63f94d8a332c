"""The rules against cases counted by hand.

Also law 8: degenerate inputs never yield NaN or an impossible token.
"""

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
GREEDY = Sampling(0.0)
SAMPLED = Sampling(1.0)


def logits(*rows: list[float]) -> Tensor:
    """`[1, N, V]`: logits whose softmax are these rows."""
    return torch.tensor([rows]).log()


def noise(num_positions: int, *, accept: float = 0.0, correct: float = 0.0) -> Tensor:
    table = torch.zeros(1, num_positions, len(Purpose))
    table[..., Purpose.ACCEPT] = accept
    table[..., Purpose.CORRECT] = correct
    return table


def draft_of(*tokens: int, probs: list[float] | None = None) -> Draft:
    """The draft of one row; `probs` is the distribution of its only token."""
    draft_probs = None if probs is None else torch.tensor([[probs]])
    return Draft(torch.tensor([tokens]), probs=draft_probs)


def outcome(verdict: Verdict) -> tuple[int, int]:
    """The number of accepted tokens of one row, and the token after them."""
    return int(verdict.num_accepted), int(verdict.next_tokens)


def test_exact_match_accepts_draft_tokens_while_they_are_the_targets_own() -> None:
    target = logits([0.2, 0.5, 0.3], [0.2, 0.5, 0.3], [0.2, 0.5, 0.3])
    for draft_tokens, expected in ([1, 1], (2, 1)), ([1, 0], (1, 1)), ([2, 1], (0, 1)):
        verdict = ExactMatch().judge(draft_of(*draft_tokens), target, GREEDY, None)
        assert outcome(verdict) == expected

    draws_token_2 = noise(3, correct=0.75)
    for draft_tokens, expected in ([2, 2], (2, 2)), ([2, 1], (1, 2)), ([1, 2], (0, 2)):
        verdict = ExactMatch().judge(draft_of(*draft_tokens), target, SAMPLED, draws_token_2)
        assert outcome(verdict) == expected


@pytest.mark.parametrize(
    ("accept", "is_accepted"), [(0.0, True), (0.49, True), (0.51, False), (LAST, False)]
)
def test_rejection_sampling_keeps_with_the_ratio_of_the_probabilities(
    accept: float, is_accepted: bool
) -> None:
    target = logits([0.4, 0.4, 0.2], [1.0, 0.0, 0.0])
    draft = draft_of(0, probs=[0.8, 0.1, 0.1])

    # The residual of (0.4, 0.4, 0.2) - (0.8, 0.1, 0.1) is (0, 0.3, 0.1): token 1 up to 0.75, then
    # token 2.
    verdict = RejectionSampling().judge(
        draft, target, SAMPLED, noise(2, accept=accept, correct=0.74)
    )
    assert outcome(verdict) == ((1, 0) if is_accepted else (0, 1))
    verdict = RejectionSampling().judge(draft, target, SAMPLED, noise(2, accept=LAST, correct=0.76))
    assert outcome(verdict) == (0, 2)


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
    assert bool(verdict.accepted.all())
    assert bool((probs.gather(2, verdict.endings[..., None]) > 0).all())


@pytest.mark.parametrize("correct", [0.0, 0.3, 0.6, 0.99, LAST])
def test_a_rejection_by_rounding_alone_draws_from_the_target(correct: float) -> None:
    """The draft's probabilities barely exceed the target's.

    The residual is zero, or less than float32 can divide.
    """
    for small_logit in (-1000.0, -100.0, -88.0):
        target = torch.tensor([[[0.0, 0.0, small_logit], [0.0, 0.0, small_logit]]])
        draft = draft_of(0, probs=[0.5 + 6e-8, 0.5, 0.0])
        verdict = RejectionSampling().judge(
            draft, target, SAMPLED, noise(2, accept=LAST, correct=correct)
        )
        # The target's probabilities of tokens 0 and 1 are 1/2.
        assert outcome(verdict) == (0, int(correct >= 0.5))


@pytest.mark.parametrize("accept", [0.0, 0.5, LAST])
@pytest.mark.parametrize("correct", [0.0, 0.5, LAST])
def test_probabilities_of_zero_and_one_decide_alone(accept: float, correct: float) -> None:
    certain_of_1_then_2 = logits([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    table = noise(2, accept=accept, correct=correct)
    for probs in (None, [0.3, 0.4, 0.3], [0.0, 1.0, 0.0]):
        verdict = RejectionSampling().judge(
            draft_of(1, probs=probs), certain_of_1_then_2, SAMPLED, table
        )
        assert outcome(verdict) == (1, 2)
    for probs in (None, [0.3, 0.4, 0.3], [1.0, 0.0, 0.0]):
        verdict = RejectionSampling().judge(
            draft_of(0, probs=probs), certain_of_1_then_2, SAMPLED, table
        )
        assert outcome(verdict) == (0, 1)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(3.0, top_k=1)], ids=str)
def test_epsilon_threshold_compares_the_softmaxes_at_temperature_one(sampling: Sampling) -> None:
    target = logits([0.7, 0.3], [0.6, 0.4], [0.1, 0.9])
    table = noise(3)
    for draft_prob, expected in ((0.65, (1, 0)), (0.75, (1, 0)), (0.55, (0, 0)), (0.85, (0, 0))):
        draft_logits = logits([draft_prob, 1 - draft_prob], [0.9, 0.1])
        draft = Draft(torch.tensor([[0, 1]]), logits=draft_logits)
        verdict = EpsilonThreshold(0.1).judge(draft, target, sampling, table)
        assert outcome(verdict) == expected
        assert verdict.changed is not None and verdict.changed.tolist() == [[False, True]]

    draft = Draft(torch.tensor([[1, 1]]), logits=logits([0.7, 0.3], [0.6, 0.4]))
    assert outcome(EpsilonThreshold(0.01).judge(draft, target, sampling, table)) == (2, 1)


def test_typical_acceptance_asks_less_where_the_target_is_unsure() -> None:
    # Entropy 0.39: 0.3 * exp(-0.39) = 0.20, so epsilon is the threshold.
    sure_probs = [0.9, 0.06, 0.04]
    sure = logits(sure_probs, sure_probs)
    for token, num_accepted in ((0, 1), (1, 0), (2, 0)):
        verdict = TypicalAcceptance(0.09, 0.3).judge(draft_of(token), sure, SAMPLED, noise(2))
        assert int(verdict.num_accepted) == num_accepted
    verdict = TypicalAcceptance(0.05, 0.3).judge(draft_of(1), sure, SAMPLED, noise(2))
    assert int(verdict.num_accepted) == 1

    # Entropy ln 100: the threshold is 0.3 / 100.
    flat_probs = [0.01] * 100
    flat = logits(flat_probs, flat_probs)
    verdict = TypicalAcceptance(0.09, 0.3).judge(draft_of(7), flat, SAMPLED, noise(2))
    assert int(verdict.num_accepted) == 1


@pytest.mark.parametrize(
    ("sampling", "num_accepted"),
    [(GREEDY, 1), (SAMPLED, 1), (Sampling(0.3), 0), (Sampling(1.0, top_k=1), 0)],
    ids=str,
)
def test_typical_acceptance_reads_temperature_one_at_temperature_zero_and_the_sampling_elsewhere(
    sampling: Sampling, num_accepted: int
) -> None:
    target = logits([0.8, 0.15, 0.05], [1.0, 0.0, 0.0])
    table = None if sampling.greedy else noise(2)
    verdict = TypicalAcceptance().judge(draft_of(1), target, sampling, table)
    assert int(verdict.num_accepted) == num_accepted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_without_a_draft_a_round_is_one_standard_step(rule: str, sampling: Sampling) -> None:
    target = torch.randn(5, 1, 4)
    table = torch.rand(5, 1, 3)
    draft = Draft(torch.zeros(5, 0, dtype=torch.long), logits=torch.zeros(5, 0, 4))
    verdict = cases.RULES[rule]().judge(draft, target, sampling, table)
    assert verdict.num_accepted.tolist() == [0] * 5
    standard_tokens = sampling.sample(target, table[..., Purpose.CORRECT])[:, 0]
    assert verdict.next_tokens.tolist() == standard_tokens.tolist()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=str)
@pytest.mark.parametrize("rule", cases.RULES)
def test_padding_after_a_rows_draft_is_neither_accepted_nor_read(
    rule: str, sampling: Sampling
) -> None:
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(60, 4, 5, generator=generator)
    table = torch.rand(60, 4, 3, generator=generator)
    # The target's own tokens, so that every rule accepts some.
    tokens = sampling.sample(target, table[..., Purpose.CORRECT])[:, :-1]
    draft_logits = target[:, :-1]
    probs = None if sampling.greedy else sampling.probs(draft_logits)
    lengths = torch.arange(60) % 4
    clean = Draft(tokens, lengths, probs, draft_logits)

    is_padding = torch.arange(3) >= lengths[:, None]
    dirty = Draft(
        torch.where(is_padding, (tokens + 1) % 5, tokens),
        lengths,
        None if probs is None else probs.masked_fill(is_padding[..., None], torch.nan),
        draft_logits.masked_fill(is_padding[..., None], torch.nan),
    )

    clean_verdict = cases.RULES[rule]().judge(clean, target, sampling, table)
    dirty_verdict = cases.RULES[rule]().judge(dirty, target, sampling, table)
    assert bool((clean_verdict.num_accepted <= lengths).all())
    assert bool((clean_verdict.num_accepted > 0).any())
    assert torch.equal(clean_verdict.num_accepted, dirty_verdict.num_accepted)
    assert torch.equal(clean_verdict.next_tokens, dirty_verdict.next_tokens)


@pytest.mark.parametrize(
    "rule", [EpsilonThreshold(1.0), TypicalAcceptance(1e-6, 1e-6)], ids=["epsilon", "typical"]
)
def test_a_lossy_rule_counts_the_tokens_that_it_changed(rule: AcceptanceRule) -> None:
    """At temperature 0, these are the accepted tokens that are not the target's own choice."""
    target = cases.target("rnn")
    result = speculative_decode(
        target,
        cases.drafter("near", "rnn"),
        cases.PROMPTS,
        max_new_tokens=20,
        rule=rule,
        eos=cases.EOS,
    )
    num_changed = 0
    for row in result.rows:
        choices = target(torch.tensor([row.prompt + row.tokens])).logits[0].argmax(-1).tolist()
        target_tokens = choices[len(row.prompt) - 1 : -1]
        for token, target_token in zip(row.tokens, target_tokens, strict=True):
            num_changed += token != target_token
    assert result.num_changed == num_changed > 0


@pytest.mark.parametrize("drafter", ["near", "hotter", "certain"])
@pytest.mark.parametrize(
    "sampling", [SAMPLED, Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.6)], ids=str
)
@pytest.mark.parametrize("rule", cases.RULES)
def test_a_result_is_lossless_if_its_rule_is_whatever_either_side_filters(
    rule: str,
    sampling: Sampling,
    drafter: str,
) -> None:
    """The draft's sampling is the session's, or has other filters or another temperature."""
    result = cases.decode("rnn", drafter, max_new_tokens=9, rule=rule, sampling=sampling)
    assert result.lossless == (rule in ("ExactMatch", "RejectionSampling"))
    assert (result.num_changed is None) == result.lossless


def test_a_drafter_without_logits_is_refused_by_name_where_logits_are_compared() -> None:
    message = "EpsilonThreshold compares the draft's logits, and Repeater has none"
    with pytest.raises(ValueError, match=message):
        Session(cases.target("rnn"), cases.Repeater(), max_length=9, rule=EpsilonThreshold())
