"""Closed forms of speculative decoding: tokens per round, rounds per text, speedup from costs.

`alpha` is the acceptance rate: each tested token is accepted with that probability, independently
(Leviathan et al. 2023, whose gamma is `num_draft_tokens` here). If it is a sequence, entry i is the
rate of the draft token after i accepted ones. EOS is not modeled. See docs/theory.md, section 8.
"""

import itertools
import math
import operator
from collections.abc import Sequence

Rates = float | Sequence[float]
"""One acceptance rate for all positions of a window, or one for each."""


def accepted_distribution(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that a round accepts 0, 1, ..., k draft tokens.

    (1 - alpha) alpha^i for i < k, alpha^k for i = k (Leviathan et al. 2023, before equation 1).
    """
    reach_probs = _reach_probs(alpha, num_draft_tokens)
    # Exactly i tokens are accepted if at least i are and not at least i + 1.
    exact_probs = [at_least - more for at_least, more in itertools.pairwise(reach_probs)]
    return [*exact_probs, reach_probs[-1]]


def expected_tokens(alpha: Rates, num_draft_tokens: int) -> float:
    """The block efficiency of an endless text (Leviathan et al. 2023, equation 1).

    (1 - alpha^(k+1)) / (1 - alpha), summed as 1 + alpha + ... + alpha^k. The sum is exact near 1
    and also holds for a rate per position.
    """
    return math.fsum(_reach_probs(alpha, num_draft_tokens))


def expected_rounds(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The expected number of rounds that generate `num_new_tokens`.

    rounds(0) = 0; rounds(m) = 1 + sum over i = 0..w of P(i of w accepted) rounds(m - i - 1), with
    w = min(k, m - 1).
    """
    num_rounds, _ = _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens)
    return num_rounds


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
    """The walltime speedup expected from measured costs: standard / speculative seconds.

    tokens (target + step overhead) / (draft steps draft_step + rounds (verify + round overhead))
    (Leviathan et al. 2023, Theorem 3.8, with measured costs).

    Args:
        draft_step_seconds: one draft token.
        target_seconds, verify_seconds: one target call on one token, and on k + 1.
        round_overhead_seconds: other costs of a round of speculative decoding.
        step_overhead_seconds: other costs of a token of standard decoding.
        num_new_tokens: length of the text; None for an endless one.
    """
    if num_new_tokens is None:
        # Per round of an endless text.
        num_tokens = expected_tokens(alpha, num_draft_tokens)
        num_rounds = 1.0
        num_steps = float(num_draft_tokens)
    else:
        num_tokens = num_new_tokens
        num_rounds, num_steps = _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens)

    standard_seconds = num_tokens * (target_seconds + step_overhead_seconds)
    draft_seconds = num_steps * draft_step_seconds
    round_seconds = num_rounds * (verify_seconds + round_overhead_seconds)
    return standard_seconds / (draft_seconds + round_seconds)


def _rounds_and_steps(
    alpha: Rates,
    num_draft_tokens: int,
    num_new_tokens: int,
) -> tuple[float, float]:
    """Expected rounds and draft steps: two recursions over the number of tokens still to come."""
    if num_new_tokens < 1:
        raise ValueError(f"num_new_tokens must be at least 1, got {num_new_tokens}")

    # Entry m of each list is the expectation for m tokens still to come.
    expected_num_rounds = [0.0]
    expected_num_steps = [0.0]
    for num_remaining in range(1, num_new_tokens + 1):
        # The last token of a text comes from the target, so it is never drafted.
        window = min(num_draft_tokens, num_remaining - 1)
        accepted_probs = accepted_distribution(alpha, window)

        round_terms = []
        step_terms = []
        for num_accepted, prob in enumerate(accepted_probs):
            num_after_round = num_remaining - num_accepted - 1
            round_terms.append(prob * expected_num_rounds[num_after_round])
            step_terms.append(prob * expected_num_steps[num_after_round])

        expected_num_rounds.append(1 + math.fsum(round_terms))
        expected_num_steps.append(window + math.fsum(step_terms))
    return expected_num_rounds[-1], expected_num_steps[-1]


def _reach_probs(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that at least 0, 1, ..., k draft tokens are accepted."""
    if isinstance(alpha, Sequence):
        rates = list(alpha[:num_draft_tokens])
    else:
        rates = [alpha] * num_draft_tokens

    if len(rates) != num_draft_tokens or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(
            f"alpha must be {num_draft_tokens} rates from 0 to 1, or one for all positions, "
            f"got {alpha}"
        )
    return list(itertools.accumulate(rates, operator.mul, initial=1.0))
