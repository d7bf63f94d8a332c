"""Law 2, exactly: one round's tokens have the target's distribution, summed over all drafts and outcomes.

Each token, and each decision to keep one, belongs to an interval of uniform numbers. Where the intervals end is asked
of the rule's own code, by bisection over the 2^24 values that a uniform number can take; nothing is sampled.

Shapes: N = V^K drafts (or other rows), K guesses, V vocabulary.
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

VOCAB, WINDOW, STEPS = 3, 2, 2**24
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
    """How a drafter draws its guesses, and which distribution it reports: an honest one reports what it draws from."""

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
    prefixes = [
        prefix for n in range(WINDOW + 1) for prefix in itertools.product(range(VOCAB), repeat=n)
    ]
    return {prefix: 1.5 * torch.randn(VOCAB, generator=generator) for prefix in prefixes}


def along(table: dict[Prefix, Tensor], num_positions: int) -> Tensor:
    """`[N, num_positions, V]`: the logits that are met along every draft."""
    return torch.stack(
        [torch.stack([table[draft[:i]] for i in range(num_positions)]) for draft in DRAFTS]
    )


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
    """For each row the share of uniform numbers for which `holds`: all below a bound that bisection finds."""
    low, high = torch.zeros(num_rows, dtype=torch.long), torch.full((num_rows,), STEPS)
    for _ in range(25):
        middle = (low + high) // 2
        true = holds((middle / STEPS).float().clamp(max=1 - 1 / STEPS)) & (low < high)
        low, high = (
            torch.where(true, (middle + 1).clamp(max=STEPS), low),
            torch.where(true | (low == high), high, middle),
        )
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
    """A rule's intervals for every draft: where keeping ends at each position, and where each next token's ends."""

    def __init__(
        self,
        rule: AcceptanceRule,
        target: Tensor,
        draft: Tensor,
        sampling: Sampling,
        proposal: Proposal,
        length: int,
    ) -> None:
        self.rule, self.target_logits, self.sampling, self.length = rule, target, sampling, length
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
        """The verdict where everything before `position` is kept, and for CORRECT nothing at it if that is possible."""
        noise = torch.zeros(len(DRAFTS), WINDOW + 1, len(Purpose))
        noise[:, position, Purpose.ACCEPT] = 1 - 1 / STEPS
        noise[:, position, purpose] = uniform
        return self.rule.judge(self.draft, self.target_logits, self.sampling, noise)

    def is_kept(self, position: int, uniform: Tensor) -> Tensor:
        return self.ask(position, Purpose.ACCEPT, uniform).num_accepted > position

    def next_token(self, position: int, uniform: Tensor) -> Tensor:
        return self.ask(position, Purpose.CORRECT, uniform).next_tokens

    def law(self, guess_probs: Tensor) -> dict[Prefix, float]:
        """The exact distribution of what a round settles, for drafts `[N]` of these probabilities."""
        outcomes: dict[Prefix, float] = defaultdict(float)
        next_probs = [sizes(self.ends[:, i]) for i in range(self.length + 1)]
        for n, draft in enumerate(DRAFTS):
            reached = float(guess_probs[n])
            for i in range(self.length + 1):
                for token in range(VOCAB):
                    outcomes[(*draft[:i], token)] += reached * float(
                        (1 - self.keep[n, i]) * next_probs[i][n, token]
                    )
                reached *= float(self.keep[n, i])
        return outcomes


def guess_probs(drawn: Sampling, logits: Tensor) -> Tensor:
    """`[N]`: each draft's probability, measured on the code that draws guesses."""
    probs = torch.ones(len(DRAFTS), dtype=torch.float64)
    for i in range(WINDOW):
        each = sizes(token_ends(partial(drawn.sample, logits[:, i]), len(DRAFTS)))
        probs *= each.gather(1, torch.tensor(DRAFTS)[:, i : i + 1])[:, 0]
    return probs


def largest_error(
    rule: AcceptanceRule,
    sampling: Sampling,
    proposal: Proposal,
    *,
    seed: int = 1,
    length: int = WINDOW,
) -> float:
    """How far the blocks that begin with a round's tokens, and go on as the target does, are from the target's."""
    target, draft = world(seed), world(seed + 100)
    measured = Measured(
        rule, along(target, WINDOW + 1), along(draft, WINDOW), sampling, proposal, length
    )
    law = measured.law(guess_probs(proposal.drawn, along(draft, WINDOW)))
    assert sum(law.values()) == pytest.approx(1, abs=TOLERANCE)
    expected, probs = (
        block_probs(target, sampling),
        {p: sampling.probs(x).double() for p, x in target.items()},
    )
    return error_of(law, probs, expected)


def error_of(
    law: dict[Prefix, float], probs: dict[Prefix, Tensor], expected: dict[Prefix, float]
) -> float:
    """The same for a round's measured law and the target's distribution after every prefix."""
    largest = 0.0
    for block in BLOCKS:
        total = 0.0
        for n in range(1, WINDOW + 2):
            rest = law.get(block[:n], 0.0)
            for i in range(n, WINDOW + 1):
                rest *= float(probs[block[:i]][block[i]])
            total += rest
        largest = max(largest, abs(total - expected[block]))
    return largest


@pytest.mark.parametrize(
    ("proposal", "length"),
    [*((name, WINDOW) for name in HONEST), *(("hotter", n) for n in range(WINDOW))],
)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_round_of_rejection_sampling_has_exactly_the_targets_distribution(
    sampling: str, proposal: str, length: int
) -> None:
    own = SAMPLINGS[sampling]
    assert largest_error(RejectionSampling(), own, HONEST[proposal](own), length=length) < TOLERANCE


def test_rejection_sampling_keeps_as_much_as_any_lossless_rule_can() -> None:
    target, draft, sampling = along(world(1), WINDOW + 1), along(world(101), WINDOW), Sampling(1.0)
    measured = Measured(
        RejectionSampling(), target, draft, sampling, Proposal(sampling, sampling), WINDOW
    )
    target_probs, draft_probs = target[:, 0].softmax(-1), draft[:, 0].softmax(-1)
    kept = (guess_probs(sampling, draft) * measured.keep[:, 0]).sum()
    assert float(kept) == pytest.approx(
        float(torch.minimum(target_probs, draft_probs)[0].sum()), abs=TOLERANCE
    )


def test_the_measured_intervals_foretell_every_verdict() -> None:
    """Were a decision to read another number than its own, measuring one number at a time would not show it."""
    sampling = Sampling(1.0)
    target, draft = along(world(1), WINDOW + 1), along(world(101), WINDOW)
    measured = Measured(
        RejectionSampling(), target, draft, sampling, Proposal(sampling, sampling), WINDOW
    )
    generator, rows = torch.Generator().manual_seed(0), torch.arange(len(DRAFTS))
    for _ in range(300):
        noise = torch.rand(len(DRAFTS), WINDOW + 1, len(Purpose), generator=generator)
        verdict = measured.rule.judge(measured.draft, target, sampling, noise)
        accepted = (
            (noise[:, :WINDOW, Purpose.ACCEPT] < measured.keep[:, :WINDOW]).long().cumprod(1).sum(1)
        )
        number = noise[rows, accepted, Purpose.CORRECT]
        token = (number[:, None] >= measured.ends[rows, accepted]).sum(1)
        assert (
            verdict.num_accepted.tolist() == accepted.tolist()
            and verdict.next_tokens.tolist() == token.tolist()
        )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_round_of_exact_match_settles_the_targets_own_draws_whatever_was_guessed(
    sampling: str,
) -> None:
    own, target = SAMPLINGS[sampling], world(1)
    ends = {}
    for prefix, logits in target.items():
        nothing = Draft(torch.zeros(1, 0, dtype=torch.long))

        def token_of(uniform: Tensor, logits: Tensor = logits, nothing: Draft = nothing) -> Tensor:
            noise = uniform[:, None, None].expand(-1, 1, len(Purpose))
            return ExactMatch().judge(nothing, logits[None, None], own, noise).next_tokens

        ends[prefix] = token_ends(token_of, 1)
        expected = own.probs(logits).double()
        assert sizes(ends[prefix])[0].tolist() == pytest.approx(expected.tolist(), abs=TOLERANCE)
    starts = {prefix: (each - sizes(each))[0] for prefix, each in ends.items()}
    logits, tokens = along(target, WINDOW + 1), torch.tensor(DRAFTS)
    for (
        block
    ) in BLOCKS:  # the first number of every cell of the noise in which the target draws this block
        if all(float(sizes(ends[block[:i]])[0, token]) > 0 for i, token in enumerate(block)):
            numbers = torch.stack(
                [starts[block[:i]][token] for i, token in enumerate(block)]
            ).float()
            noise = torch.rand(
                len(DRAFTS), WINDOW + 1, len(Purpose), generator=torch.Generator().manual_seed(0)
            )
            noise[..., Purpose.CORRECT] = numbers
            verdict = ExactMatch().judge(Draft(tokens), logits, own, noise)
            for draft, kept, token in zip(
                DRAFTS, verdict.num_accepted.tolist(), verdict.next_tokens.tolist(), strict=True
            ):
                alike = next((i for i in range(WINDOW) if draft[i] != block[i]), WINDOW)
                assert (kept, *draft[:kept], token) == (alike, *block[: alike + 1])


class NoResidual(RejectionSampling):
    """Biased: corrects from the target itself, so that what the draft likes comes twice."""

    def judge(
        self, draft: Draft, target_logits: Tensor, sampling: Sampling, noise: Tensor | None
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        return Verdict(verdict.kept, sampling.sample(target_logits, column(noise, Purpose.CORRECT)))


class BonusFromDraft(RejectionSampling):
    """Biased: when everything was kept, the bonus comes from the draft's last distribution."""

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
def test_a_biased_round_is_found_out(bias: str) -> None:
    rule, proposal = BIASED[bias]
    assert largest_error(rule, Sampling(1.0), proposal) > 1000 * TOLERANCE
