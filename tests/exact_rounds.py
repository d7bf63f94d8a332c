"""The exact distribution of a round: every probability is measured on the code, nothing is sampled.

A rule accepts a draft token if a uniform number is below a bound, and draws the next token from
intervals of another uniform number. Bisection over the 2^24 values of such a number finds these
bounds by calling the rule itself.

Shapes: N = V^K drafts (or other rows), K draft tokens, K1 = K + 1 positions, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from lightning_specdec.rules import (
    AcceptanceRule,
    Draft,
    Purpose,
    RejectionSampling,
    Sampling,
    Verdict,
    column,
    draw,
)

VOCAB = 3
NUM_DRAFT_TOKENS = 2
NUM_POSITIONS = NUM_DRAFT_TOKENS + 1
NUM_UNIFORM = 2**24
"""Values that a uniform number in float32 can take."""
LARGEST_UNIFORM = 1 - 1 / NUM_UNIFORM
TOLERANCE = 1e-6
"""Largest error of a probability that rounding explains."""
DRAFTS = list(itertools.product(range(VOCAB), repeat=NUM_DRAFT_TOKENS))
BLOCKS = list(itertools.product(range(VOCAB), repeat=NUM_POSITIONS))
"""All texts of as many tokens as a round can add."""
Text = tuple[int, ...]
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "t1": Sampling(1.0),
    "cold": Sampling(0.4),
    "top_k": Sampling(1.3, top_k=2),
    "top_p": Sampling(1.0, top_p=0.8),
    "min_p": Sampling(0.9, min_p=0.3),
}


def random_logits(seed: int) -> dict[Text, Tensor]:
    """Random logits `[V]` after every text that is shorter than a block."""
    generator = torch.Generator().manual_seed(seed)
    logits: dict[Text, Tensor] = {}
    for length in range(NUM_POSITIONS):
        for text in itertools.product(range(VOCAB), repeat=length):
            logits[text] = 1.5 * torch.randn(VOCAB, generator=generator)
    return logits


def along_drafts(logits: Mapping[Text, Tensor], num_positions: int) -> Tensor:
    """`[N, num_positions, V]`: the logits at the first positions of every draft."""
    rows = []
    for draft in DRAFTS:
        rows.append(torch.stack([logits[draft[:i]] for i in range(num_positions)]))
    return torch.stack(rows)


TARGET = random_logits(1)
TARGET_LOGITS = along_drafts(TARGET, NUM_POSITIONS)
DRAFT_LOGITS = along_drafts(random_logits(101), NUM_DRAFT_TOKENS)


def share_below_bound(is_below_bound: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
    """The share of uniform numbers below each row's bound, which bisection finds."""
    low = torch.zeros(num_rows, dtype=torch.long)
    high = torch.full((num_rows,), NUM_UNIFORM)
    # 25 halvings for 2^24 + 1 possible bounds: no number or all numbers may be below.
    for _ in range(25):
        middle = (low + high) // 2
        uniform = (middle / NUM_UNIFORM).float().clamp(max=LARGEST_UNIFORM)
        is_found = low == high
        goes_up = is_below_bound(uniform) & ~is_found
        low = torch.where(goes_up, (middle + 1).clamp(max=NUM_UNIFORM), low)
        high = torch.where(goes_up | is_found, high, middle)
    assert torch.equal(low, high)
    return low.double() / NUM_UNIFORM


def interval_ends(draw_tokens: Callable[[Tensor], Tensor], num_rows: int) -> Tensor:
    """`[N, V]`: the end of the interval of uniform numbers that draw each token.

    The intervals are ordered by token.
    """

    def is_at_most(token: int, uniform: Tensor) -> Tensor:
        return draw_tokens(uniform) <= token

    ends = [share_below_bound(partial(is_at_most, token), num_rows) for token in range(VOCAB)]
    return torch.stack(ends, dim=1)


def interval_sizes(ends: Tensor) -> Tensor:
    """`[N, V]`: the tokens' probabilities, from the ends of their intervals."""
    return ends.diff(dim=1, prepend=torch.zeros(len(ends), 1, dtype=ends.dtype))


def measure_draft_probs(drawn: Sampling, draft_logits: Tensor) -> Tensor:
    """`[N]`: each draft's probability, measured on the code that draws draft tokens."""
    probs = torch.ones(len(DRAFTS), dtype=torch.float64)
    draft_tokens = torch.tensor(DRAFTS)
    for i in range(NUM_DRAFT_TOKENS):
        ends = interval_ends(partial(drawn.sample, draft_logits[:, i]), len(DRAFTS))
        probs *= interval_sizes(ends).gather(1, draft_tokens[:, i : i + 1])[:, 0]
    return probs


class MeasuredRule:
    """A rule's decisions about every draft, measured at each position.

    Args:
        rule: the rule.
        sampling: how the target draws tokens.
        target_logits: `[N, K1, V]`.
        reported_probs: `[N, K, V]`: the distributions that the drafter reports; None for one-hot.
        draft_length: number of draft tokens that are real. The others are padding.

    Attributes:
        accept_probs: `[N, K1]`: the probability that the draft token at a position is accepted if
            those before it are; 0 at the bonus position.
        ends: `[N, K1, V]`: the intervals of the token that follows a rejection at a position, or of
            the bonus token.
    """

    def __init__(
        self,
        rule: AcceptanceRule,
        sampling: Sampling,
        target_logits: Tensor,
        reported_probs: Tensor | None,
        *,
        draft_length: int = NUM_DRAFT_TOKENS,
    ) -> None:
        self.rule = rule
        self.sampling = sampling
        self.target_logits = target_logits
        self.draft_length = draft_length
        lengths = None
        if draft_length < NUM_DRAFT_TOKENS:
            lengths = torch.full((len(DRAFTS),), draft_length)
        self.draft = Draft(torch.tensor(DRAFTS), lengths, reported_probs)

        num_drafts = len(DRAFTS)
        self.accept_probs = torch.zeros(num_drafts, NUM_POSITIONS, dtype=torch.float64)
        self.ends = torch.zeros(num_drafts, NUM_POSITIONS, VOCAB, dtype=torch.float64)
        for i in range(draft_length):
            self.accept_probs[:, i] = share_below_bound(partial(self.is_accepted, i), num_drafts)
        for i in range(draft_length + 1):
            self.ends[:, i] = interval_ends(partial(self.next_tokens, i), num_drafts)

    def judge(self, position: int, purpose: Purpose, uniform: Tensor) -> Verdict:
        """The verdict with these uniform numbers for one purpose at one position.

        The other numbers accept the draft tokens before the position. At the position itself they
        reject if the rule can.
        """
        noise = torch.zeros(len(DRAFTS), NUM_POSITIONS, len(Purpose))
        noise[:, position, Purpose.ACCEPT] = LARGEST_UNIFORM
        noise[:, position, purpose] = uniform
        return self.rule.judge(self.draft, self.target_logits, self.sampling, noise)

    def is_accepted(self, position: int, uniform: Tensor) -> Tensor:
        return self.judge(position, Purpose.ACCEPT, uniform).num_accepted > position

    def next_tokens(self, position: int, uniform: Tensor) -> Tensor:
        return self.judge(position, Purpose.CORRECT, uniform).next_tokens

    def round_probs(self, draft_probs: Tensor) -> dict[Text, float]:
        """The exact distribution of a round's tokens, for drafts `[N]` of these probabilities."""
        round_probs: dict[Text, float] = defaultdict(float)
        next_token_probs = [interval_sizes(self.ends[:, i]) for i in range(self.draft_length + 1)]
        for row, draft in enumerate(DRAFTS):
            # The probability that this is the draft and that its first i tokens are accepted.
            accepted_prob = float(draft_probs[row])
            for i in range(self.draft_length + 1):
                accept_prob = float(self.accept_probs[row, i])
                ends_here_prob = accepted_prob * (1 - accept_prob)
                for token in range(VOCAB):
                    token_prob = float(next_token_probs[i][row, token])
                    round_probs[(*draft[:i], token)] += ends_here_prob * token_prob
                accepted_prob *= accept_prob
        return round_probs


def sampled_probs(logits: Mapping[Text, Tensor], sampling: Sampling) -> dict[Text, Tensor]:
    """The probabilities of the next token after every text, in float64."""
    return {text: sampling.probs(row).double() for text, row in logits.items()}


def largest_error(round_probs: Mapping[Text, float], target_probs: Mapping[Text, Tensor]) -> float:
    """The largest error of a block's probability.

    A block begins with the tokens of a round. If these are fewer than a block, the target's own
    tokens follow.

    Args:
        round_probs: the distribution of a round's tokens.
        target_probs: the target's distribution after every text.
    """

    def continuation_prob(block: Text, start: int) -> float:
        """The target's probability of a block's tokens from a position on."""
        prob = 1.0
        for i in range(start, NUM_POSITIONS):
            prob *= float(target_probs[block[:i]][block[i]])
        return prob

    largest = 0.0
    for block in BLOCKS:
        block_prob = 0.0
        for num_new in range(1, NUM_POSITIONS + 1):
            round_prob = round_probs.get(block[:num_new], 0.0)
            block_prob += round_prob * continuation_prob(block, num_new)
        largest = max(largest, abs(block_prob - continuation_prob(block, 0)))
    return largest


class NoResidual(RejectionSampling):
    """Biased: draws corrections from the target itself, so the draft's favorites are too likely."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        target_tokens = sampling.sample(target_logits, column(noise, Purpose.CORRECT))
        return Verdict(verdict.accepted, target_tokens)


class BonusFromDraft(RejectionSampling):
    """Biased: draws the bonus token from the draft's last distribution."""

    def judge(
        self,
        draft: Draft,
        target_logits: Tensor,
        sampling: Sampling,
        noise: Tensor | None,
    ) -> Verdict:
        verdict = super().judge(draft, target_logits, sampling, noise)
        if draft.probs is not None and noise is not None:
            verdict.endings[:, -1] = draw(draft.probs[:, -1], noise[:, -1, Purpose.CORRECT])
        return verdict
