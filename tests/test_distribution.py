"""Law 2, exactly: a round has the target's distribution, summed over all drafts and outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from exact_rounds import (
    BLOCKS,
    DRAFT_LOGITS,
    DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_POSITIONS,
    SAMPLINGS,
    TARGET,
    TARGET_LOGITS,
    TOLERANCE,
    BonusFromDraft,
    MeasuredRule,
    NoResidual,
    Text,
    interval_ends,
    interval_sizes,
    largest_error,
    measure_draft_probs,
    sampled_probs,
)
from torch import Tensor

from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
)


@dataclass(frozen=True)
class Proposal:
    """How a drafter draws its tokens, and which distribution it reports; None means one-hot.

    An honest drafter reports the distribution that it draws from.
    """

    drawn: Sampling
    reported: Sampling | None


HONEST = {
    "alike": lambda sampling: Proposal(sampling, sampling),
    "hotter": lambda sampling: Proposal(Sampling(2.0), Sampling(2.0)),
    "filtered": lambda sampling: Proposal(Sampling(0.8, top_k=2), Sampling(0.8, top_k=2)),
    "certain": lambda sampling: Proposal(Sampling(0.0), None),
}
"""Honest proposals for a target with that sampling."""


def measure(
    rule: AcceptanceRule,
    sampling: Sampling,
    reported: Sampling | None,
    *,
    draft_length: int = NUM_DRAFT_TOKENS,
) -> MeasuredRule:
    """The rule's decisions between this file's target and drafter."""
    reported_probs = None
    if reported is not None:
        reported_probs = reported.probs(DRAFT_LOGITS)
    return MeasuredRule(rule, sampling, TARGET_LOGITS, reported_probs, draft_length=draft_length)


def error_of_round(
    rule: AcceptanceRule,
    sampling: Sampling,
    proposal: Proposal,
    *,
    draft_length: int = NUM_DRAFT_TOKENS,
) -> float:
    """The largest error of a block's probability under that rule."""
    measured = measure(rule, sampling, proposal.reported, draft_length=draft_length)
    round_probs = measured.round_probs(measure_draft_probs(proposal.drawn, DRAFT_LOGITS))
    assert sum(round_probs.values()) == pytest.approx(1, abs=TOLERANCE)
    return largest_error(round_probs, sampled_probs(TARGET, sampling))


@pytest.mark.parametrize(
    ("proposal_name", "draft_length"),
    [
        *[(name, NUM_DRAFT_TOKENS) for name in HONEST],
        *[("hotter", draft_length) for draft_length in range(NUM_DRAFT_TOKENS)],
    ],
)
@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_a_round_of_rejection_sampling_has_exactly_the_targets_distribution(
    sampling_name: str,
    proposal_name: str,
    draft_length: int,
) -> None:
    sampling = SAMPLINGS[sampling_name]
    proposal = HONEST[proposal_name](sampling)
    error = error_of_round(RejectionSampling(), sampling, proposal, draft_length=draft_length)
    assert error < TOLERANCE


def test_rejection_sampling_accepts_as_much_as_any_lossless_rule_can() -> None:
    """The probability of acceptance is the overlap of the two distributions."""
    sampling = Sampling(1.0)
    measured = measure(RejectionSampling(), sampling, sampling)
    draft_probs = measure_draft_probs(sampling, DRAFT_LOGITS)
    acceptance_prob = (draft_probs * measured.accept_probs[:, 0]).sum()

    first_target_probs = TARGET_LOGITS[0, 0].softmax(-1)
    first_draft_probs = DRAFT_LOGITS[0, 0].softmax(-1)
    overlap = torch.minimum(first_target_probs, first_draft_probs).sum()
    assert float(acceptance_prob) == pytest.approx(float(overlap), abs=TOLERANCE)


def test_the_measured_intervals_predict_every_verdict() -> None:
    """A measurement changes one uniform number at a time. If a decision read another number than
    the measured one, verdicts with all numbers at random would differ from the prediction."""
    sampling = Sampling(1.0)
    measured = measure(RejectionSampling(), sampling, sampling)
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(DRAFTS))
    for _ in range(300):
        noise = torch.rand(len(DRAFTS), NUM_POSITIONS, len(Purpose), generator=generator)
        verdict = measured.rule.judge(measured.draft, TARGET_LOGITS, sampling, noise)

        accept_noise = noise[:, :NUM_DRAFT_TOKENS, Purpose.ACCEPT]
        is_accepted = accept_noise < measured.accept_probs[:, :NUM_DRAFT_TOKENS]
        num_accepted = is_accepted.long().cumprod(1).sum(1)
        uniform = noise[rows, num_accepted, Purpose.CORRECT]
        next_tokens = (uniform[:, None] >= measured.ends[rows, num_accepted]).sum(1)
        assert verdict.num_accepted.tolist() == num_accepted.tolist()
        assert verdict.next_tokens.tolist() == next_tokens.tolist()


def exact_match_ends(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[V]`: the ends of the intervals of the target's own tokens."""
    no_draft = Draft(torch.zeros(1, 0, dtype=torch.long))

    def draw_tokens(uniform: Tensor) -> Tensor:
        noise = uniform[:, None, None].expand(-1, 1, len(Purpose))
        return ExactMatch().judge(no_draft, logits[None, None], sampling, noise).next_tokens

    return interval_ends(draw_tokens, 1)[0]


def common_prefix_length(draft: Text, block: Text) -> int:
    """The number of draft tokens before the first one that differs."""
    length = 0
    while length < len(draft) and draft[length] == block[length]:
        length += 1
    return length


@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_a_round_of_exact_match_commits_the_targets_own_tokens_for_every_draft(
    sampling_name: str,
) -> None:
    sampling = SAMPLINGS[sampling_name]
    token_probs: dict[Text, Tensor] = {}
    interval_starts: dict[Text, Tensor] = {}
    for text, logits in TARGET.items():
        ends = exact_match_ends(logits, sampling)
        token_probs[text] = interval_sizes(ends[None])[0]
        interval_starts[text] = ends - token_probs[text]
        expected_probs = sampling.probs(logits).double().tolist()
        assert token_probs[text].tolist() == pytest.approx(expected_probs, abs=TOLERANCE)

    for block in BLOCKS:
        texts = [block[:i] for i in range(NUM_POSITIONS)]
        block_probs = [float(token_probs[texts[i]][block[i]]) for i in range(NUM_POSITIONS)]
        if min(block_probs) == 0:
            continue

        # The smallest uniform numbers with which the target draws this block.
        uniform = [float(interval_starts[texts[i]][block[i]]) for i in range(NUM_POSITIONS)]
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(len(DRAFTS), NUM_POSITIONS, len(Purpose), generator=generator)
        noise[..., Purpose.CORRECT] = torch.tensor(uniform)
        verdict = ExactMatch().judge(Draft(torch.tensor(DRAFTS)), TARGET_LOGITS, sampling, noise)

        num_accepted = [common_prefix_length(draft, block) for draft in DRAFTS]
        assert verdict.num_accepted.tolist() == num_accepted
        assert verdict.next_tokens.tolist() == [block[length] for length in num_accepted]


BIASED = {
    "no residual": (NoResidual(), Proposal(Sampling(1.0), Sampling(1.0))),
    "bonus from the draft": (BonusFromDraft(), Proposal(Sampling(1.0), Sampling(1.0))),
    "argmax reported as softmax": (RejectionSampling(), Proposal(Sampling(0.0), Sampling(1.0))),
    "wrong temperature reported": (RejectionSampling(), Proposal(Sampling(1.0), Sampling(1.1))),
}


@pytest.mark.parametrize("bias", BIASED)
def test_a_biased_rule_or_drafter_is_detected(bias: str) -> None:
    rule, proposal = BIASED[bias]
    assert error_of_round(rule, Sampling(1.0), proposal) > 1000 * TOLERANCE
