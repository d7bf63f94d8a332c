"""Law 2, exactly: a round has the target's distribution, summed over all drafts and outcomes.

Each token, and each decision to accept one, belongs to an interval of uniform numbers. The ends of
the intervals are found by calling the rule itself, by bisection over the 2^24 values that a
uniform number can take; nothing is sampled.

Shapes: N = V^K drafts (or other rows), K draft tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    ExactMatch,
    Purpose,
    RejectionSampling,
    Sampling,
    Verdict,
    column,
    draw,
)

VOCAB = 3
WINDOW = 2
STEPS = 2**24
TOLERANCE = 1e-6
DRAFTS = list(itertools.product(range(VOCAB), repeat=WINDOW))
BLOCKS = list(itertools.product(range(VOCAB), repeat=WINDOW + 1))
Prefix = tuple[int, ...]
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "t1": Sampling(1.0),
    "cold": Sampling(0.4),
    "top_k": Sampling(1.3, top_k=2),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(0.9, min_p=0.3),
}


@dataclass(frozen=True)
class Proposal:
    """How a drafter draws its tokens, and which distribution it reports.

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


def world(seed: int) -> dict[Prefix, Tensor]:
    """Random logits after every prefix."""
    generator = torch.Generator().manual_seed(seed)
    table: dict[Prefix, Tensor] = {}
    for length in range(WINDOW + 1):
        for prefix in itertools.product(range(VOCAB), repeat=length):
            table[prefix] = 1.5 * torch.randn(VOCAB, generator=generator)
    return table


def along(table: dict[Prefix, Tensor], num_positions: int) -> Tensor:
    """`[N, num_positions, V]`: the logits after each prefix of every draft."""
    draft_logits = []
    for draft in DRAFTS:
        draft_logits.append(torch.stack([table[draft[:i]] for i in range(num_positions)]))
    return torch.stack(draft_logits)


def block_probs(table: dict[Prefix, Tensor], sampling: Sampling) -> dict[Prefix, float]:
    """Each block's probability under standard decoding, in float64."""
    probs = {prefix: sampling.probs(logits).double() for prefix, logits in table.items()}
    blocks = {}
    for block in BLOCKS:
        blocks[block] = 1.0
        for i, token in enumerate(block):
            blocks[block] *= float(probs[block[:i]][token])
    return blocks


def share(holds: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
    """For each row the share of uniform numbers for which `holds`: all below a bound that
    bisection finds.
    """
    low = torch.zeros(num_rows, dtype=torch.long)
    high = torch.full((num_rows,), STEPS)
    for _ in range(25):
        middle = (low + high) // 2
        uniform = (middle / STEPS).float().clamp(max=1 - 1 / STEPS)
        is_found = low == high
        is_below_bound = holds(uniform) & ~is_found
        low = torch.where(is_below_bound, (middle + 1).clamp(max=STEPS), low)
        high = torch.where(is_below_bound | is_found, high, middle)
    assert bool((low == high).all())
    return low.double() / STEPS


def token_ends(token_of: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
    """`[N, V]`: where each token's interval of uniform numbers ends; tokens lie in their order."""

    def at_most(token: int, uniform: Tensor) -> Tensor:
        return token_of(uniform) <= token

    return torch.stack([share(partial(at_most, token), num_rows) for token in range(VOCAB)], dim=1)


def sizes(ends: Tensor) -> Tensor:
    """The intervals' sizes: the tokens' probabilities."""
    return ends.diff(dim=1, prepend=torch.zeros(len(ends), 1, dtype=ends.dtype))


class Measured:
    """A rule's intervals for every draft: where keeping ends at each position, and where each next
    token's ends.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        target: Tensor,
        draft: Tensor,
        sampling: Sampling,
        proposal: Proposal,
        length: int,
    ) -> None:
        self.rule = rule
        self.target_logits = target
        self.sampling = sampling
        self.length = length
        self.tokens = torch.tensor(DRAFTS)
        lengths = None if length == WINDOW else torch.full((len(DRAFTS),), length)
        probs = None if proposal.reported is None else proposal.reported.probs(draft)
        self.draft = Draft(self.tokens, lengths, probs)
        self.keep = torch.zeros(len(DRAFTS), WINDOW + 1, dtype=torch.float64)
        self.ends = torch.zeros(len(DRAFTS), WINDOW + 1, VOCAB, dtype=torch.float64)
        for i in range(length + 1):
            if i < length:
                self.keep[:, i] = share(partial(self.is_kept, i), len(DRAFTS))
            self.ends[:, i] = token_ends(partial(self.next_token, i), len(DRAFTS))

    def ask(self, position: int, purpose: Purpose, uniform: Tensor) -> Verdict:
        """The verdict where everything before `position` is kept, and for CORRECT nothing at it if
        that is possible.
        """
        noise = torch.zeros(len(DRAFTS), WINDOW + 1, len(Purpose))
        noise[:, position, Purpose.ACCEPT] = 1 - 1 / STEPS
        noise[:, position, purpose] = uniform
        return self.rule.judge(self.draft, self.target_logits, self.sampling, noise)

    def is_kept(self, position: int, uniform: Tensor) -> Tensor:
        return self.ask(position, Purpose.ACCEPT, uniform).num_accepted > position

    def next_token(self, position: int, uniform: Tensor) -> Tensor:
        return self.ask(position, Purpose.CORRECT, uniform).next_tokens

    def law(self, guess_probs: Tensor) -> dict[Prefix, float]:
        """The exact distribution of a round's tokens, for drafts `[N]` of these probabilities."""
        outcomes: dict[Prefix, float] = defaultdict(float)
        next_probs = [sizes(self.ends[:, i]) for i in range(self.length + 1)]
        for n, draft in enumerate(DRAFTS):
            reached_prob = float(guess_probs[n])
            for i in range(self.length + 1):
                end_probs = (1 - self.keep[n, i]) * next_probs[i][n]
                for token in range(VOCAB):
                    outcomes[(*draft[:i], token)] += reached_prob * float(end_probs[token])
                reached_prob *= float(self.keep[n, i])
        return outcomes


def guess_probs(drawn: Sampling, logits: Tensor) -> Tensor:
    """`[N]`: each draft's probability, measured on the code that draws guesses."""
    probs = torch.ones(len(DRAFTS), dtype=torch.float64)
    for i in range(WINDOW):
        token_probs = sizes(token_ends(partial(drawn.sample, logits[:, i]), len(DRAFTS)))
        probs *= token_probs.gather(1, torch.tensor(DRAFTS)[:, i : i + 1])[:, 0]
    return probs


def largest_error(
    rule: AcceptanceRule,
    sampling: Sampling,
    proposal: Proposal,
    *,
    seed: int = 1,
    length: int = WINDOW,
) -> float:
    """The largest error of a block's probability.

    A block begins with the tokens of a round, and continues with the target's own tokens.
    """
    target = world(seed)
    draft = world(seed + 100)
    measured = Measured(
        rule, along(target, WINDOW + 1), along(draft, WINDOW), sampling, proposal, length
    )
    law = measured.law(guess_probs(proposal.drawn, along(draft, WINDOW)))
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    probs = {prefix: sampling.probs(logits).double() for prefix, logits in target.items()}
    return error_of(law, probs, block_probs(target, sampling))


def error_of(
    law: dict[Prefix, float], probs: dict[Prefix, Tensor], expected: dict[Prefix, float]
) -> float:
    """The same for a round's measured law and the target's distribution after every prefix."""
    largest = 0.0
    for block in BLOCKS:
        block_prob = 0.0
        for round_length in range(1, WINDOW + 2):
            prob = law.get(block[:round_length], 0.0)
            for i in range(round_length, WINDOW + 1):
                prob *= float(probs[block[:i]][block[i]])
            block_prob += prob
        largest = max(largest, abs(block_prob - expected[block]))
    return largest


@pytest.mark.parametrize(
    ("proposal", "length"),
    [*((name, WINDOW) for name in HONEST), *(("hotter", n) for n in range(WINDOW))],
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_round_of_rejection_sampling_has_exactly_the_targets_distribution(
    sampling: str, proposal: str, length: int
) -> None:
    target_sampling = SAMPLINGS[sampling]
    honest = HONEST[proposal](target_sampling)
    error = largest_error(RejectionSampling(), target_sampling, honest, length=length)
    assert error < TOLERANCE


def test_rejection_sampling_accepts_as_much_as_any_lossless_rule_can() -> None:
    sampling = Sampling(1.0)
    target = along(world(1), WINDOW + 1)
    draft = along(world(101), WINDOW)
    proposal = Proposal(sampling, sampling)
    measured = Measured(RejectionSampling(), target, draft, sampling, proposal, WINDOW)
    accepted_share = (guess_probs(sampling, draft) * measured.keep[:, 0]).sum()

    target_probs = target[0, 0].softmax(-1)
    draft_probs = draft[0, 0].softmax(-1)
    overlap = torch.minimum(target_probs, draft_probs).sum()
    assert float(accepted_share) == pytest.approx(float(overlap), abs=TOLERANCE)


def test_the_measured_intervals_predict_every_verdict() -> None:
    """Measuring one number at a time would not show a decision that reads another number than its
    own.
    """
    sampling = Sampling(1.0)
    target = along(world(1), WINDOW + 1)
    draft = along(world(101), WINDOW)
    proposal = Proposal(sampling, sampling)
    measured = Measured(RejectionSampling(), target, draft, sampling, proposal, WINDOW)
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(len(DRAFTS))
    for _ in range(300):
        noise = torch.rand(len(DRAFTS), WINDOW + 1, len(Purpose), generator=generator)
        verdict = measured.rule.judge(measured.draft, target, sampling, noise)

        is_accepted = noise[:, :WINDOW, Purpose.ACCEPT] < measured.keep[:, :WINDOW]
        num_accepted = is_accepted.long().cumprod(1).sum(1)
        uniform = noise[rows, num_accepted, Purpose.CORRECT]
        next_tokens = (uniform[:, None] >= measured.ends[rows, num_accepted]).sum(1)
        assert verdict.num_accepted.tolist() == num_accepted.tolist()
        assert verdict.next_tokens.tolist() == next_tokens.tolist()


def exact_match_ends(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[1, V]`: the ends of the intervals of the target's own draws."""
    no_draft = Draft(torch.zeros(1, 0, dtype=torch.long))

    def token_of(uniform: Tensor) -> Tensor:
        noise = uniform[:, None, None].expand(-1, 1, len(Purpose))
        return ExactMatch().judge(no_draft, logits[None, None], sampling, noise).next_tokens

    return token_ends(token_of, 1)


@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_a_round_of_exact_match_commits_the_targets_own_draws_whatever_was_drafted(
    sampling_name: str,
) -> None:
    sampling = SAMPLINGS[sampling_name]
    target = world(1)
    token_probs: dict[Prefix, Tensor] = {}
    starts: dict[Prefix, Tensor] = {}
    for prefix, logits in target.items():
        ends = exact_match_ends(logits, sampling)
        token_probs[prefix] = sizes(ends)[0]
        starts[prefix] = ends[0] - token_probs[prefix]
        expected = sampling.probs(logits).double()
        assert token_probs[prefix].tolist() == pytest.approx(expected.tolist(), abs=TOLERANCE)

    for block in BLOCKS:
        cells = [(block[:i], token) for i, token in enumerate(block)]
        if any(float(token_probs[prefix][token]) == 0 for prefix, token in cells):
            continue
        # The first uniform numbers with which the target draws this block.
        numbers = torch.stack([starts[prefix][token] for prefix, token in cells]).float()
        generator = torch.Generator().manual_seed(0)
        noise = torch.rand(len(DRAFTS), WINDOW + 1, len(Purpose), generator=generator)
        noise[..., Purpose.CORRECT] = numbers
        verdict = ExactMatch().judge(
            Draft(torch.tensor(DRAFTS)), along(target, WINDOW + 1), sampling, noise
        )
        num_accepted = verdict.num_accepted.tolist()
        next_tokens = verdict.next_tokens.tolist()
        for row, draft in enumerate(DRAFTS):
            num_equal = 0
            while num_equal < WINDOW and draft[num_equal] == block[num_equal]:
                num_equal += 1
            assert num_accepted[row] == num_equal
            assert next_tokens[row] == block[num_equal]


class NoResidual(RejectionSampling):
    """Biased: corrects from the target itself, so that tokens that the draft prefers come twice."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(
            verdict.accepted, sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        )


class BonusFromDraft(RejectionSampling):
    """Biased: the bonus token comes from the draft's last distribution."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        if draft.probs is not None and noise is not None:
            verdict.endings[:, -1] = draw(draft.probs[:, -1], noise[:, -1, Purpose.CORRECT])
        return verdict


BIASED = {
    "no residual": (NoResidual(), Proposal(Sampling(1.0), Sampling(1.0))),
    "bonus from the draft": (BonusFromDraft(), Proposal(Sampling(1.0), Sampling(1.0))),
    "argmax reported as softmax": (RejectionSampling(), Proposal(Sampling(0.0), Sampling(1.0))),
    "wrong temperature reported": (RejectionSampling(), Proposal(Sampling(1.0), Sampling(1.1))),
}


@pytest.mark.parametrize("bias", BIASED)
def test_a_biased_round_is_detected(bias: str) -> None:
    rule, proposal = BIASED[bias]
    assert largest_error(rule, Sampling(1.0), proposal) > 1000 * TOLERANCE
