"""Closed forms of speculative decoding: tokens a round, rounds for a text, speedup from measured costs.

Given one `alpha` (the acceptance rate), every function assumes what Leviathan et al. assume: each tested token is kept
with that probability, whatever happened to the others. Real texts have easy and hard stretches, so a measured block
efficiency may differ from the one computed from the average acceptance rate. Where `alpha` may be a sequence, its
entry i is the rate of the guess behind i kept ones, and that assumption is dropped. EOS is not modelled either.

Sources:
    Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding"
        (alpha; gamma is `num_draft_tokens` here; c is `cost_ratio`).
    Chen, Borgeaud, Irving, Lespiau, Sifre, Jumper 2023, "Accelerating Large Language Model Decoding with
        Speculative Sampling" (K is `num_draft_tokens` here).
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

Rates = float | Sequence[float]
"""One acceptance rate for all positions of a window, or one for each, given that all before it were kept."""
EQUAL = 1.0
"""The `call_ratio` of a target whose call on k + 1 tokens takes as long as one on a single token."""


def accepted_distribution(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that a round keeps 0, 1, ..., num_draft_tokens of its drafted tokens.

    Formula: (1 - alpha) * alpha^i for i < k (the token behind the i kept ones is rejected), alpha^k for i = k: a
    geometric distribution, capped. Source: Leviathan et al. 2023, section 3.1, the step before equation (1).

    Raises:
        ValueError: alpha outside [0, 1], fewer rates than num_draft_tokens, or a negative num_draft_tokens.
    """
    rates = _rates(alpha, num_draft_tokens)
    reached = _reached(rates)
    return [here * (1 - rate) for here, rate in zip(reached, rates, strict=False)] + [reached[-1]]


def expected_tokens(alpha: Rates, num_draft_tokens: int) -> float:
    """The block efficiency of an endless text: new tokens a round, the correction or bonus token included.

    Formula: (1 - alpha^(k+1)) / (1 - alpha), which is k + 1 at alpha = 1. It is summed here as
    1 + alpha + ... + alpha^k, which needs no special case and loses no digits near 1.
    With a rate for each position it is 1 + a1 + a1 a2 + ... + a1 ... ak.
    Source: Leviathan et al. 2023, equation (1).

    Raises:
        ValueError: alpha outside [0, 1], fewer rates than num_draft_tokens, or a negative num_draft_tokens.
    """
    return math.fsum(_reached(_rates(alpha, num_draft_tokens)))


def expected_rounds(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The exact expected number of rounds until num_new_tokens are there, none too many.

    Formula, with m tokens still wanted and a window of w = min(k, m - 1) (the target adds one token itself):
    rounds(0) = 0; rounds(m) = 1 + sum over i = 0..w of P(i of w kept) * rounds(m - i - 1), P as in
    `accepted_distribution`. The last rounds have a shorter window, so `num_new_tokens / expected_tokens` is too few.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
    return _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)[0]


def expected_draft_steps(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The exact expected number of drafted tokens until num_new_tokens are there: the windows of all rounds, summed.

    Formula: as `expected_rounds`, where each round costs its window instead of 1.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
    return _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)[1]


def block_efficiency_finite(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The block efficiency of a text of num_new_tokens: num_new_tokens / expected_rounds.

    It is at most `expected_tokens`, and comes close to it as the text grows.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, or num_new_tokens below 1.
    """
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
    prompt_seconds: float = 0.0,
    num_new_tokens: int | None = None,
) -> float:
    """The walltime speedup that measured costs promise: seconds of standard decoding / seconds of speculation.

    Formula, for an endless text, E = `expected_tokens`:
    E * (target_seconds + step_overhead_seconds) / (k * draft_step_seconds + verify_seconds + round_overhead_seconds).
    With num_new_tokens = n it is n * (target_seconds + step_overhead_seconds) / (`expected_draft_steps` *
    draft_step_seconds + `expected_rounds` * (verify_seconds + round_overhead_seconds)): a round near the end drafts
    fewer tokens, but its target call has the same shape and is charged in full. Then prompt_seconds is added on both
    sides; in an endless text it vanishes.
    Source: Leviathan et al. 2023, Theorem 3.8, without its assumption that a target call on k + 1 tokens takes as long
    as one on a single token.

    Args:
        alpha: the acceptance rate, or one for each position.
        num_draft_tokens: the window k.
        draft_step_seconds: one drafted token.
        target_seconds: one target call on one token, as standard decoding makes it.
        verify_seconds: one target call on k + 1 tokens.
        round_overhead_seconds: what a round costs besides (verdict, bookkeeping, going back).
        step_overhead_seconds: what standard decoding costs for each token besides its target call.
        prompt_seconds: what reading the prompt adds to the first call.
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
        ("prompt_seconds", prompt_seconds),
    ):
        if not 0 <= seconds < math.inf:
            raise ValueError(f"{name} must be 0 or more and finite, got {seconds}: give seconds, 0.0 for no cost")
    if num_new_tokens is None:
        tokens, rounds, draft_steps = expected_tokens(alpha, num_draft_tokens), 1.0, float(num_draft_tokens)
        prompt_seconds = 0.0
    else:
        tokens = float(num_new_tokens)
        rounds, draft_steps = _expected_rounds_and_draft_steps(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
    standard_seconds = tokens * (target_seconds + step_overhead_seconds)
    speculative_seconds = draft_steps * draft_step_seconds + rounds * (verify_seconds + round_overhead_seconds)
    return (prompt_seconds + standard_seconds) / (prompt_seconds + speculative_seconds)


def speedup_with_cost_ratio(
    alpha: Rates, num_draft_tokens: int, *, cost_ratio: float, call_ratio: float = EQUAL
) -> float:
    """The walltime speedup of an endless text, from what calls cost beside a target call on a single token.

    Formula: (1 - alpha^(k+1)) / ((1 - alpha) * (k * cost_ratio + call_ratio)). Source: Leviathan et al. 2023,
    Theorem 3.8, where call_ratio is 1.

    Args:
        cost_ratio: seconds of one draft step / of a target call on one token.
        call_ratio: seconds of the target call on k + 1 tokens / of one on one token.

    Raises:
        ValueError: alpha outside [0, 1], a negative num_draft_tokens, a negative or infinite cost_ratio, or a
            call_ratio that is not positive and finite.
    """
    _check_cost_ratio(cost_ratio)
    if not 0 < call_ratio < math.inf:
        raise ValueError(f"call_ratio must be positive and finite, got {call_ratio}: give 1.2 for 20% more")
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + call_ratio)


def call_ratio(seconds: Mapping[int, float], num_tokens: int) -> float:
    """Seconds of the target call on num_tokens / of the call on one, as `between` gives them.

    Args:
        seconds: of the target's calls, by the number of tokens; the call on one token among them.

    Raises:
        ValueError: a time that is negative or infinite, no time for the call on one token, or num_tokens below 1.
    """
    if not seconds.get(1, 0.0) > 0:
        raise ValueError(f"seconds must include those of the call on 1 token, got {dict(seconds)}: measure it")
    return between(seconds, num_tokens) / seconds[1]


def between(seconds: Mapping[int, float], num_tokens: int) -> float:
    """Seconds for num_tokens, straight lines drawn between measured numbers of tokens.

    Beyond the largest number the last line goes on, unless it falls; where one number alone was measured, all cost as
    much.

    Raises:
        ValueError: nothing measured, a time that is negative or infinite, or num_tokens below 1.
    """
    _check_count("num_tokens", num_tokens, at_least=1)
    if not seconds or not all(0 <= each < math.inf for each in seconds.values()):
        raise ValueError(f"seconds must be some, 0 or more and finite, got {dict(seconds)}: measure them")
    widths = sorted(seconds)
    if len(widths) == 1:
        return seconds[widths[0]]
    right = min(max(1, bisect_left(widths, num_tokens)), len(widths) - 1)
    low, high = widths[right - 1], widths[right]
    slope = (seconds[high] - seconds[low]) / (high - low)
    if num_tokens > high:
        return seconds[high] + max(slope, 0.0) * (num_tokens - high)  # noise must not make wide calls ever cheaper
    return seconds[low] + slope * (num_tokens - low)


def best_window(
    alpha: float, cost_ratio: float, *, max_window: int = 32, call_seconds: Mapping[int, float] | None = None
) -> int:
    """The window from 0 to max_window with the largest `speedup_with_cost_ratio`; 0 when no window beats 1.

    The smallest one wins a tie. Where a wide call costs as much as a narrow one, a window pays only if alpha >
    cost_ratio (Leviathan et al. 2023, Corollary 3.9).

    Args:
        call_seconds: of the target's calls, as in `call_ratio`; None where a wide call costs as much as a narrow one.

    Raises:
        ValueError: alpha outside [0, 1], a negative or infinite cost_ratio, a negative max_window, or call_seconds that
            `call_ratio` refuses.
    """
    _check_count("max_window", max_window, at_least=0)

    def speedup(window: int) -> float:
        wide = EQUAL if call_seconds is None else call_ratio(call_seconds, window + 1)
        return speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio, call_ratio=wide)

    return max(range(max_window + 1), key=speedup)


def break_even_alpha(num_draft_tokens: int, cost_ratio: float, *, call_ratio: float = EQUAL) -> float | None:
    """The acceptance rate at which `speedup_with_cost_ratio` is exactly 1; None when it stays below 1 at any rate.

    Found by bisection: the speedup grows with alpha. For a window of 1 and calls that cost the same it is the cost
    ratio itself.

    Raises:
        ValueError: num_draft_tokens below 1, a negative or infinite cost_ratio, or a call_ratio that is not positive
            and finite.
    """
    _check_count("num_draft_tokens", num_draft_tokens, at_least=1)

    def speedup(alpha: float) -> float:
        return speedup_with_cost_ratio(alpha, num_draft_tokens, cost_ratio=cost_ratio, call_ratio=call_ratio)

    if speedup(1.0) < 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if speedup(middle) < 1:
            low = middle
        else:
            high = middle
    return high


def _expected_rounds_and_draft_steps(
    alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int
) -> tuple[float, float]:
    """The two recursions over the tokens still wanted, side by side: they share their probabilities."""
    rates = _rates(alpha, num_draft_tokens)
    _check_count("num_new_tokens", num_new_tokens, at_least=1)
    rounds, draft_steps = [0.0], [0.0]
    for wanted in range(1, num_new_tokens + 1):
        window = min(num_draft_tokens, wanted - 1)
        outcomes = list(enumerate(accepted_distribution(rates, window), start=1))  # (tokens gained, probability)
        rounds.append(1 + math.fsum(prob * rounds[wanted - gained] for gained, prob in outcomes))
        draft_steps.append(window + math.fsum(prob * draft_steps[wanted - gained] for gained, prob in outcomes))
    return rounds[-1], draft_steps[-1]


def _rates(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The rate of each position of the window."""
    _check_count("num_draft_tokens", num_draft_tokens, at_least=0)
    if isinstance(alpha, Sequence):
        if len(alpha) < num_draft_tokens:
            raise ValueError(f"a window of {num_draft_tokens} needs as many rates, got {len(alpha)}: give one for each")
        rates = list(alpha[:num_draft_tokens])
    else:
        _check_alpha(alpha)
        rates = [alpha] * num_draft_tokens
    for rate in rates:
        _check_alpha(rate)
    return rates


def _reached(rates: Sequence[float]) -> list[float]:
    """The probabilities that at least 0, 1, ..., k guesses are kept."""
    return list(itertools.accumulate(rates, lambda kept, rate: kept * rate, initial=1.0))


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
