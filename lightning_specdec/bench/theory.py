"""Closed forms of speculative decoding: tokens per round, rounds for a text, speedup from measured costs.

`alpha` is the acceptance rate: each tested token is accepted with that probability, independently (Leviathan et al.
2023, whose gamma is `num_draft_tokens` here). Where it is a sequence, entry i is the rate
of the draft token behind i accepted ones. EOS is not modelled. See docs/theory.md, section 8.
"""

import itertools
import math
from collections.abc import Sequence

Rates = float | Sequence[float]
"""One acceptance rate for all positions of a window, or one for each."""


def accepted_distribution(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that a round accepts 0, 1, ..., k draft tokens.

    (1 - alpha) alpha^i for i < k, alpha^k for i = k (Leviathan et al. 2023, before equation 1).
    """
    reached = _reached(alpha, num_draft_tokens)
    return [here - there for here, there in itertools.pairwise(reached)] + [reached[-1]]


def expected_tokens(alpha: Rates, num_draft_tokens: int) -> float:
    """The block efficiency of an endless text: (1 - alpha^(k+1)) / (1 - alpha) (Leviathan et al. 2023, equation 1).

    Summed as 1 + alpha + ... + alpha^k, which is exact near 1 and holds for a rate per position too.
    """
    return math.fsum(_reached(alpha, num_draft_tokens))


def expected_rounds(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The expected number of rounds until `num_new_tokens` are there.

    rounds(0) = 0; rounds(m) = 1 + sum over i = 0..w of P(i of w accepted) rounds(m - i - 1), with w = min(k, m - 1).
    """
    return _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens)[0]


def block_efficiency_finite(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The block efficiency of a text of that length: num_new_tokens / expected_rounds."""
    return num_new_tokens / expected_rounds(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)


def predicted_speedup(
    alpha: Rates,
    num_draft_tokens: int,
    *,
    draft_step_seconds: float,
    target_seconds: float,
    verify_seconds: float,
    round_overhead_seconds: float = 0.0,
    step_overhead_seconds: float = 0.0,
    num_new_tokens: int | None = None,
) -> float:
    """The walltime speedup that measured costs promise: seconds of standard decoding / of speculative decoding.

    tokens (target + step overhead) / (draft steps draft_step + rounds (verify + round overhead)) (Leviathan et al.
    2023, Theorem 3.8, with measured costs).

    Args:
        draft_step_seconds: one draft token.
        target_seconds, verify_seconds: one target call on one token, and on k + 1.
        round_overhead_seconds, step_overhead_seconds: what a round, or a token of standard decoding, takes besides.
        num_new_tokens: length of the text; None for an endless one.
    """
    tokens, rounds, steps = expected_tokens(alpha, num_draft_tokens), 1.0, float(num_draft_tokens)
    if num_new_tokens is not None:
        tokens, (rounds, steps) = (
            num_new_tokens,
            _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens),
        )
    speculative = steps * draft_step_seconds + rounds * (verify_seconds + round_overhead_seconds)
    return tokens * (target_seconds + step_overhead_seconds) / speculative


def _rounds_and_steps(
    alpha: Rates, num_draft_tokens: int, num_new_tokens: int
) -> tuple[float, float]:
    """Expected rounds and draft steps: two recursions over the tokens still wanted."""
    if num_new_tokens < 1:
        raise ValueError(f"num_new_tokens must be at least 1, got {num_new_tokens}")
    rounds, steps = [0.0], [0.0]
    for wanted in range(1, num_new_tokens + 1):
        window = min(num_draft_tokens, wanted - 1)
        outcomes = list(
            enumerate(accepted_distribution(alpha, window), start=1)
        )  # (tokens gained, probability)
        rounds.append(1 + math.fsum(prob * rounds[wanted - gained] for gained, prob in outcomes))
        steps.append(window + math.fsum(prob * steps[wanted - gained] for gained, prob in outcomes))
    return rounds[-1], steps[-1]


def _reached(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that at least 0, 1, ..., k draft tokens are accepted."""
    rates = alpha[:num_draft_tokens] if isinstance(alpha, Sequence) else [alpha] * num_draft_tokens
    if len(rates) != num_draft_tokens or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(
            f"alpha must be {num_draft_tokens} rates from 0 to 1, or one for all positions, got {alpha}"
        )
    return list(itertools.accumulate(rates, lambda kept, rate: kept * rate, initial=1.0))
