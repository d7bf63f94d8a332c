"""Were tokens drawn from known distributions? Two tests, with stated odds of a false alarm.

Each token has a known distribution given the tokens before it. If the tokens were drawn from these
distributions, two sums have known laws, whatever the texts are:

- log probability + entropy has mean 0 and a known variance (`likelihood_test`).
- the token's place among all tokens, ordered from the most likely to the least likely and spread
  evenly over its own probability, is uniform in [0, 1) (`rank_test`).

This file knows nothing about engines or models.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

FALSE_ALARM_ODDS = 1e-3
"""How often all tests together reject tokens that were drawn correctly."""
NUM_TESTS = 2
NUM_BINS = 16
"""Bins of equal probability that the tokens' places are counted in."""
MIN_PER_BIN = 5
"""Tokens that a bin must expect, so that its count has nearly a normal distribution."""
MAX_CERTAINTY = 0.95
"""The rank test leaves out tokens whose most likely alternative is likelier than this.

Almost every sampler draws the same token there. Which tokens are left out depends on the texts
before them only, so the test stays exact."""
TRUNCATED_SHARE = 0.5
"""Tails with less than this share of the expected tokens are called truncated."""
MIN_INVERSE_TEMPERATURE = 0.1
"""The estimate of the temperature holds near 1 only; it is cut off here."""


@dataclass(frozen=True)
class TokenScores:
    """What the known distributions say about each token.

    Args:
        probs: probability of the token.
        mass_before: probability of all tokens that are more likely.
        entropies: entropy of the distribution, in nats.
        varentropies: variance of the log probability of a token drawn from it.
        largest_probs: probability of the most likely token.
    """

    probs: Float[Tensor, "N"]
    mass_before: Float[Tensor, "N"]
    entropies: Float[Tensor, "N"]
    varentropies: Float[Tensor, "N"]
    largest_probs: Float[Tensor, "N"]

    @classmethod
    def of(cls, probs: Float[Tensor, "N V"], tokens: Int[Tensor, "N"]) -> TokenScores:
        """Score tokens.

        Args:
            probs: the distribution of each token.
            tokens: the tokens that were drawn.
        """
        probs = probs.double()
        token_column = tokens[:, None]
        token_probs = probs.gather(1, token_column)

        # Among equally likely tokens, those with lower numbers come first.
        all_tokens = torch.arange(probs.shape[1], device=probs.device)
        is_likelier = probs > token_probs
        is_equal_and_earlier = (probs == token_probs) & (all_tokens < token_column)
        is_before = is_likelier | is_equal_and_earlier

        # A token of probability 0 adds nothing to these sums.
        log_probs = probs.clamp(min=torch.finfo(torch.float64).tiny).log()
        entropies = -(probs * log_probs).sum(1)
        squares = (probs * log_probs.square()).sum(1)
        varentropies = (squares - entropies.square()).clamp(min=0)
        return cls(
            probs=token_probs[:, 0].cpu(),
            mass_before=(probs * is_before).sum(1).cpu(),
            entropies=entropies.cpu(),
            varentropies=varentropies.cpu(),
            largest_probs=probs.amax(1).cpu(),
        )

    @classmethod
    def join(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """The scores of all tokens together."""
        columns = {}
        for field in fields(cls):
            tensors = [getattr(part, field.name) for part in parts]
            columns[field.name] = torch.cat([torch.zeros(0, dtype=torch.float64), *tensors])
        return cls(**columns)

    def select(self, mask: Bool[Tensor, "N"]) -> TokenScores:
        """The scores of some of the tokens."""
        columns = {field.name: getattr(self, field.name)[mask] for field in fields(self)}
        return TokenScores(**columns)

    def __len__(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class LawTest:
    """The outcome of one test.

    Args:
        name: what was tested.
        statistic: z, or chi-square.
        p_value: odds of a statistic at least this extreme if the tokens were drawn correctly.
        level: the test fails below this p-value.
    """

    name: str
    statistic: float
    p_value: float
    level: float

    @property
    def failed(self) -> bool:
        """Whether the tokens contradict the distributions."""
        return self.p_value < self.level


@dataclass(frozen=True)
class LawReport:
    """The outcome of both tests.

    Args:
        num_tokens: tokens of the likelihood test.
        num_uncertain: tokens that the tests use.
        tests: the tests that had enough tokens.
        bin_shares: share of the places in each bin; each expects 1 / `NUM_BINS`.
        temperature_ratio: temperature at which the tokens were drawn, as their likelihoods suggest,
            divided by that of the known distributions; None if all tokens are certain.
        temperature_error: standard error of that ratio.
        false_alarm_odds: how often a test fails although the tokens were drawn correctly.
    """

    num_tokens: int
    num_uncertain: int
    tests: tuple[LawTest, ...]
    bin_shares: tuple[float, ...]
    temperature_ratio: float | None
    temperature_error: float | None
    false_alarm_odds: float = FALSE_ALARM_ODDS

    @property
    def failed(self) -> bool:
        """Whether a test failed."""
        return any(test.failed for test in self.tests)

    @property
    def has_power(self) -> bool:
        """Whether there were enough uncertain tokens for all tests."""
        return len(self.tests) == NUM_TESTS

    @property
    def direction(self) -> str:
        """How the tokens differ from the distributions; "" if no test failed."""
        if not self.failed:
            return ""
        tail_share = self.bin_shares[-1] if self.bin_shares else 1.0
        expected_share = 1 / NUM_BINS
        if tail_share < TRUNCATED_SHARE * expected_share:
            return (
                f"truncated: the least likely {expected_share:.1%} of the probability has only "
                f"{tail_share:.1%} of the tokens"
            )
        likelihood = next((test for test in self.tests if test.name == "likelihood"), None)
        if likelihood is not None and likelihood.failed:
            if likelihood.statistic > 0:
                return "too close to the favorites: likely tokens are drawn too often"
            return "too flat: unlikely tokens are drawn too often"
        return "the ranks of the tokens are not distributed as their probabilities are"


def likelihood_test(scores: TokenScores, level: float) -> LawTest | None:
    """Compare the mean log probability with the mean negative entropy, by a z-test.

    The terms are a martingale's differences, so their sum over the square root of the summed
    variances is nearly standard normal for thousands of uncertain tokens. Nearly certain ones must
    be left out: their rare large terms make the sum skewed. None if there are no tokens.
    """
    total_variance = float(scores.varentropies.sum())
    if total_variance <= 0:
        return None
    z = float(_likelihood_terms(scores).sum()) / math.sqrt(total_variance)
    p_value = math.erfc(abs(z) / math.sqrt(2))
    return LawTest("likelihood", z, p_value, level)


def _likelihood_terms(scores: TokenScores) -> Float[Tensor, "N"]:
    """Log probability + entropy of each token."""
    smallest = torch.finfo(torch.float64).tiny
    return scores.probs.clamp(min=smallest).log() + scores.entropies


def rank_places(scores: TokenScores, generator: torch.Generator) -> Float[Tensor, "N"]:
    """Each token's place in [0, 1) among all tokens, from the most likely to the least likely.

    A token with probability p takes an interval of that length. The place is drawn evenly from it,
    so it is uniform if the token was drawn from its distribution.
    """
    uniform = torch.rand(len(scores), generator=generator, dtype=torch.float64)
    ranks = scores.mass_before + uniform * scores.probs
    return ranks.clamp(0, 1 - torch.finfo(torch.float64).eps)


def rank_test(
    scores: TokenScores,
    level: float,
    generator: torch.Generator,
) -> tuple[LawTest | None, tuple[float, ...]]:
    """Test whether the places of the tokens are uniform, by chi-square.

    Returns:
        The test, and the share of the places in each bin. None and no shares if there are too few
        tokens.
    """
    num_tokens = len(scores)
    expected_count = num_tokens / NUM_BINS
    if expected_count < MIN_PER_BIN:
        return None, ()
    ranks = rank_places(scores, generator)
    bins = (ranks * NUM_BINS).long()
    counts = torch.bincount(bins, minlength=NUM_BINS).double()
    chi_square = float(((counts - expected_count).square() / expected_count).sum())
    p_value = chi_square_tail(chi_square, NUM_BINS - 1)
    return LawTest("ranks", chi_square, p_value, level), tuple((counts / num_tokens).tolist())


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The probability that a chi-square variable exceeds a value."""
    shape = torch.tensor(freedom / 2, dtype=torch.float64)
    half = torch.tensor(statistic / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(shape, half))


def examine(
    scores: TokenScores,
    *,
    seed: int = 0,
    odds: float = FALSE_ALARM_ODDS,
) -> LawReport:
    """Run both tests.

    Args:
        scores: of all tokens, in the order of their texts.
        seed: of the uniform numbers that spread a token over its interval.
        odds: of a false alarm of all tests together (Bonferroni).
    """
    level = odds / NUM_TESTS
    generator = torch.Generator().manual_seed(seed)
    uncertain_scores = scores.select(scores.largest_probs < MAX_CERTAINTY)
    # The selection depends on the distributions only, not on the tokens that were drawn.
    likelihood = likelihood_test(uncertain_scores, level)
    ranks, bin_shares = rank_test(uncertain_scores, level, generator)

    # At inverse temperature 1 + x, the mean of the terms is x times their variance, for small x.
    temperature_ratio = None
    temperature_error = None
    if likelihood is not None:
        total_variance = float(uncertain_scores.varentropies.sum())
        excess = float(_likelihood_terms(uncertain_scores).sum()) / total_variance
        temperature_ratio = 1 / max(1 + excess, MIN_INVERSE_TEMPERATURE)
        temperature_error = temperature_ratio**2 / math.sqrt(total_variance)
    return LawReport(
        num_tokens=len(scores),
        num_uncertain=len(uncertain_scores),
        tests=tuple(test for test in (likelihood, ranks) if test is not None),
        bin_shares=bin_shares,
        temperature_ratio=temperature_ratio,
        temperature_error=temperature_error,
        false_alarm_odds=odds,
    )
