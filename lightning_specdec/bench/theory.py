"""Closed forms of speculative decoding: tokens a round, rounds for a text, speedup from measured costs.

Knows nothing of models, tensors or clocks: numbers in, numbers out, standard library alone.

Every function assumes what Leviathan et al. assume: each tested token is kept with the same probability `alpha`
(the acceptance rate), whatever happened to the others. Real texts have easy and hard stretches, so a measured block
efficiency may differ from the one computed from the average acceptance rate. EOS is not modelled either.

Sources:
    Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding"
        (alpha; gamma is `num_draft_tokens` here; c is `cost_ratio`).
    Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper 2023, "Accelerating Large Language Model Decoding with
        Speculative Sampling" (K is `num_draft_tokens` here).
"""

import math


def accepted_distribution(alpha: float, num_draft_tokens: int) -> list[float]:
    """The probabilities that a round keeps 0, 1, ..., num_draft_tokens of its drafted tokens.

    Formula: (1 - alpha) * alpha^i for i < k (the token behind the i kept ones is rejected), alpha^k for i = k: a
    geometric distribution, capped. Source: Leviathan et al. 2023, section 3.1, the step before equation (1).

    Raises:
        ValueError: alpha outside [0, 1], or a negative num_draft_tokens.
    """
    _check_alpha(alpha)
    _check_count("num_draft_tokens", num_draft_tokens, at_least=0)
    return [(1 - alpha) * alpha**accepted for accepted in range(num_draft_tokens)] + [alpha**num_draft_tokens]


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """The block efficiency of an endless text: new tokens a round, the correction or bonus token included.

    Formula: (1 - alpha^(k+1)) / (1 - alpha), which is k + 1 at alpha = 1. It is summed here as
    1 + alpha + ... + alpha^k, which needs no special case and loses no digits near 1.
    Source: Leviathan et al. 2023, equation (1).

    Raises:
        ValueError: alpha outside [0, 1], or a negative num_draft_tokens.
    """
    _check_alpha(alpha)
    _check_count("num_draft_tokens", num_draft_tokens, at_least=0)
    return math.fsum(alpha**kept for kept in range(num_draft_tokens + 1))


def expected_rounds(alpha: float, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The exact expected number of rounds until num_new_tokens are there, none too many.

    Formula, with m tokens still wanted and a window of w = min(k, m - 1) (the target adds one token itself):
    rounds(0) = 0; rounds(m) = 1 + sum over i = 0..w of P(i of w kept) * rounds(m - i - 1), P as in
    `accepted_distribution`. The last rounds have a shorter window, so `num_new_tokens / expected_tokens` is too few.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
    return _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)[0]


def expected_draft_steps(alpha: float, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The exact expected number of drafted tokens until num_new_tokens are there: the windows of all rounds, summed.

    Formula: as `expected_rounds`, where each round costs its window instead of 1.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
    return _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)[1]


def block_efficiency_finite(alpha: float, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The block efficiency of a text of num_new_tokens: num_new_tokens / expected_rounds.

    It is at most `expected_tokens`, and comes close to it as the text grows.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
    return num_new_tokens / expected_rounds(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)


def predicted_speedup(
    alpha: float,
    num_draft_tokens: int,
    *,
    draft_step_seconds: float,
    target_seconds: float,
    verify_seconds: float,
    round_overhead_seconds: float = 0.0,
    step_overhead_seconds: float = 0.0,
    num_new_tokens: int | None = None,
) -> float:
    """The walltime speedup that measured costs promise: seconds of standard decoding / seconds of speculation.

    Formula, for an endless text, E = `expected_tokens`:
    E * (target_seconds + step_overhead_seconds) / (k * draft_step_seconds + verify_seconds + round_overhead_seconds).
    With num_new_tokens = n it is n * (target_seconds + step_overhead_seconds) / (`expected_draft_steps` *
    draft_step_seconds + `expected_rounds` * (verify_seconds + round_overhead_seconds)): a round near the end drafts
    fewer tokens, but its target call has the same shape and is charged in full.
    Source: Leviathan et al. 2023, Theorem 3.8, without its assumption that a target call on k + 1 tokens takes as long
    as one on a single token. Reading the prompt is left out on both sides.

    Args:
        alpha: the acceptance rate.
        num_draft_tokens: the window k.
        draft_step_seconds: one drafted token.
        target_seconds: one target call on one token, as standard decoding makes it.
        verify_seconds: one target call on k + 1 tokens.
        round_overhead_seconds: what a round costs besides (verdict, bookkeeping, going back).
        step_overhead_seconds: what standard decoding costs for each token besides its target call.
        num_new_tokens: the length of the text; None for an endless one.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, num_new_tokens below 1, a negative or infinite
            time, or no time at all for a target call.
    """
    for name, seconds in (("target_seconds", target_seconds), ("verify_seconds", verify_seconds)):
        if not 0 < seconds < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {seconds}: give the seconds of one call")
    for name, seconds in (
        ("draft_step_seconds", draft_step_seconds),
        ("round_overhead_seconds", round_overhead_seconds),
        ("step_overhead_seconds", step_overhead_seconds),
    ):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {seconds}: give seconds, 0.0 for no cost")
    if num_new_tokens is None:
        tokens, rounds, draft_steps = expected_tokens(alpha, num_draft_tokens), 1.0, float(num_draft_tokens)
    else:
        tokens = float(num_new_tokens)
        rounds, draft_steps = _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
    standard_seconds = tokens * (target_seconds + step_overhead_seconds)
    return standard_seconds / (draft_steps * draft_step_seconds + rounds * (verify_seconds + round_overhead_seconds))


def speedup_with_cost_ratio(alpha: float, num_draft_tokens: int, *, cost_ratio: float) -> float:
    """The walltime speedup when a target call on k + 1 tokens takes as long as one on a single token.

    Formula: (1 - alpha^(k+1)) / ((1 - alpha) * (k * cost_ratio + 1)). Source: Leviathan et al. 2023, Theorem 3.8.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or a negative or infinite cost_ratio.
    """
    _check_cost_ratio(cost_ratio)
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + 1)


def best_window(alpha: float, cost_ratio: float, *, max_window: int = 32) -> int:
    """The window from 0 to max_window with the largest `speedup_with_cost_ratio`; 0 when no window beats 1.

    The smallest one wins a tie. A window pays only if alpha > cost_ratio (Leviathan et al. 2023, Corollary 3.9).

    Raises:
        ValueError: alpha outside [0, 1], a negative or infinite cost_ratio, or a negative max_window.
    """
    _check_count("max_window", max_window, at_least=0)
    return max(range(max_window + 1), key=lambda window: speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio))


def break_even_alpha(num_draft_tokens: int, cost_ratio: float) -> float | None:
    """The acceptance rate at which `speedup_with_cost_ratio` is exactly 1; None when it stays below 1 at any rate.

    Found by bisection: the speedup grows with alpha. For a window of 1 it is the cost ratio itself.

    Raises:
        ValueError: num_draft_tokens below 1, or a negative or infinite cost_ratio.
    """
    _check_count("num_draft_tokens", num_draft_tokens, at_least=1)
    if speedup_with_cost_ratio(1.0, num_draft_tokens, cost_ratio=cost_ratio) < 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if speedup_with_cost_ratio(middle, num_draft_tokens, cost_ratio=cost_ratio) < 1:
            low = middle
        else:
            high = middle
    return high


def _expected_rounds_and_draft_steps(
    alpha: float, num_draft_tokens: int, *, num_new_tokens: int
) -> tuple[float, float]:
    """The two recursions over the tokens still wanted, side by side: they share their probabilities."""
    _check_alpha(alpha)
    _check_count("num_draft_tokens", num_draft_tokens, at_least=0)
    _check_count("num_new_tokens", num_new_tokens, at_least=1)
    rounds, draft_steps = [0.0], [0.0]
    for wanted in range(1, num_new_tokens + 1):
        window = min(num_draft_tokens, wanted - 1)
        outcomes = list(enumerate(accepted_distribution(alpha, window), start=1))  # (tokens gained, probability)
        rounds.append(1 + math.fsum(prob * rounds[wanted - gained] for gained, prob in outcomes))
        draft_steps.append(window + math.fsum(prob * draft_steps[wanted - gained] for gained, prob in outcomes))
    return rounds[-1], draft_steps[-1]


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}: give num_accepted / num_tested, 0.8 for 80%")


def _check_cost_ratio(cost_ratio: float) -> None:
    if not 0 <= cost_ratio < math.inf:
        raise ValueError(
            f"cost_ratio must be 0 or more and finite, got {cost_ratio}: "
            "give seconds of one draft step / seconds of one target call"
        )


def _check_count(name: str, count: int, *, at_least: int) -> None:
    if count < at_least:
        raise ValueError(f"{name} is too small, got {count}: give {at_least} or more")
