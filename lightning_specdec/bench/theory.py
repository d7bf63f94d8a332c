"""Closed forms of speculative decoding: tokens per round, rounds for a text, speedup from measured costs.

`alpha` is the acceptance rate: each tested token is accepted with that probability, independently (Leviathan et al.
2023, whose gamma is `num_draft_tokens` here and whose c is `cost_ratio`). Where it is a sequence, entry i is the rate
of the draft token behind i accepted ones. EOS is not modelled. See docs/theory.md, section 8.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

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


def expected_draft_steps(alpha: Rates, num_draft_tokens: int, *, num_new_tokens: int) -> float:
    """The expected number of draft tokens until `num_new_tokens` are there: the windows of all rounds, summed."""
    return _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens)[1]


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
    prompt_seconds: float = 0.0,
    num_new_tokens: int | None = None,
) -> float:
    """The walltime speedup that measured costs promise: seconds of standard decoding / of speculative decoding.

    tokens (target + step overhead) / (draft steps draft_step + rounds (verify + round overhead)), `prompt_seconds`
    added on both sides (Leviathan et al. 2023, Theorem 3.8, with measured costs).

    Args:
        draft_step_seconds: one draft token.
        target_seconds, verify_seconds: one target call on one token, and on k + 1.
        round_overhead_seconds, step_overhead_seconds: what a round, or a token of standard decoding, takes besides.
        prompt_seconds: what reading the prompt adds to the first call.
        num_new_tokens: length of the text; None for an endless one, where the prompt vanishes.
    """
    positive = {"target_seconds": target_seconds, "verify_seconds": verify_seconds}
    others = {"draft_step_seconds": draft_step_seconds, "round_overhead_seconds": round_overhead_seconds}
    others |= {"step_overhead_seconds": step_overhead_seconds, "prompt_seconds": prompt_seconds}
    for name, seconds in (positive | others).items():
        _check(name, seconds, 0, math.inf, low_open=name in positive)
    tokens, rounds, steps = expected_tokens(alpha, num_draft_tokens), 1.0, float(num_draft_tokens)
    if num_new_tokens is None:
        prompt_seconds = 0.0
    else:
        tokens, (rounds, steps) = num_new_tokens, _rounds_and_steps(alpha, num_draft_tokens, num_new_tokens)
    standard = tokens * (target_seconds + step_overhead_seconds)
    speculative = steps * draft_step_seconds + rounds * (verify_seconds + round_overhead_seconds)
    return (prompt_seconds + standard) / (prompt_seconds + speculative)


def speedup_with_cost_ratio(
    alpha: Rates, num_draft_tokens: int, *, cost_ratio: float, call_ratio: float = 1.0
) -> float:
    """The walltime speedup of an endless text: expected_tokens / (k cost_ratio + call_ratio).

    Leviathan et al. 2023, Theorem 3.8, where `call_ratio` is 1.

    Args:
        cost_ratio: seconds of one draft step / of a target call on one token.
        call_ratio: seconds of the target call on k + 1 tokens / of one on one token.
    """
    _check("cost_ratio", cost_ratio, 0, math.inf)
    _check("call_ratio", call_ratio, 0, math.inf, low_open=True)
    return expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + call_ratio)


def call_ratio(seconds: Mapping[int, float], num_tokens: int) -> float:
    """Seconds of the target call on `num_tokens` / of the call on one, which must be among `seconds`."""
    if not seconds.get(1, 0.0) > 0:
        raise ValueError(f"seconds must include those of the call on 1 token, got {dict(seconds)}: measure it")
    return between(seconds, num_tokens) / seconds[1]


def between(seconds: Mapping[int, float], num_tokens: int) -> float:
    """Seconds for `num_tokens`, on straight lines between measured widths. Beyond the largest one the last line goes
    on, unless it falls."""
    _check("num_tokens", num_tokens, 1)
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
    """The smallest window from 0 to `max_window` with the largest `speedup_with_cost_ratio`; 0 when none beats 1.

    Where calls of all widths cost the same, a window pays only if alpha > cost_ratio (Leviathan et al. 2023, Corollary
    3.9).

    Args:
        call_seconds: of the target's calls by width; None where all cost the same.
    """
    _check("max_window", max_window, 0)

    def speedup(window: int) -> float:
        wide = 1.0 if call_seconds is None else call_ratio(call_seconds, window + 1)
        return speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio, call_ratio=wide)

    return max(range(max_window + 1), key=speedup)


def break_even_alpha(num_draft_tokens: int, cost_ratio: float, *, call_ratio: float = 1.0) -> float | None:
    """The acceptance rate at which `speedup_with_cost_ratio` is 1, by bisection; None when it stays below 1."""
    _check("num_draft_tokens", num_draft_tokens, 1)

    def speedup(alpha: float) -> float:
        return speedup_with_cost_ratio(alpha, num_draft_tokens, cost_ratio=cost_ratio, call_ratio=call_ratio)

    if speedup(1.0) < 1:
        return None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if speedup(middle) < 1 else (low, middle)
    return high


def _rounds_and_steps(alpha: Rates, num_draft_tokens: int, num_new_tokens: int) -> tuple[float, float]:
    """Expected rounds and draft steps: two recursions over the tokens still wanted."""
    _reached(alpha, num_draft_tokens)
    _check("num_new_tokens", num_new_tokens, 1)
    rounds, steps = [0.0], [0.0]
    for wanted in range(1, num_new_tokens + 1):
        window = min(num_draft_tokens, wanted - 1)
        outcomes = list(enumerate(accepted_distribution(alpha, window), start=1))  # (tokens gained, probability)
        rounds.append(1 + math.fsum(prob * rounds[wanted - gained] for gained, prob in outcomes))
        steps.append(window + math.fsum(prob * steps[wanted - gained] for gained, prob in outcomes))
    return rounds[-1], steps[-1]


def _reached(alpha: Rates, num_draft_tokens: int) -> list[float]:
    """The probabilities that at least 0, 1, ..., k draft tokens are accepted."""
    _check("num_draft_tokens", num_draft_tokens, 0)
    rates = alpha[:num_draft_tokens] if isinstance(alpha, Sequence) else [alpha] * num_draft_tokens
    if len(rates) < num_draft_tokens:
        raise ValueError(f"a window of {num_draft_tokens} needs as many rates, got {len(rates)}: give one for each")
    for rate in rates if isinstance(alpha, Sequence) else [alpha]:
        _check("alpha", rate, 0, 1)
    return list(itertools.accumulate(rates, lambda kept, rate: kept * rate, initial=1.0))


def _check(name: str, value: float, low: float, high: float = math.inf, *, low_open: bool = False) -> None:
    """Raise ValueError unless low <= value <= high, and the value is finite."""
    if not low <= value <= high or math.isinf(value) or (low_open and value == low):
        above = "more than" if low_open else "at least"
        limit = "finite" if math.isinf(high) else f"at most {high:g}"
        raise ValueError(f"{name} must be {above} {low:g} and {limit}, got {value}")
