"""What theory promises for a cell, what was measured there, and which assumption accounts for the difference.

Theory: alpha comes from other prompts, and all seconds from isolated calls, so the promise could have been made before
the first prompt. Then one assumption after the other gives way to what was measured. Each of these steps multiplies the
promise by a factor, and all factors together lead to the measured speedup. That goes by medians over the repeats and by
standard decoding's number of tokens, and so do the phases and rounds here: each phase has its share, over all repeats,
of the median seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench import theory
from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.round_costs import Calls, isolated_calls
from lightning_specdec.bench.statistics import Interval, middle
from lightning_specdec.inference import PHASES

TOLERANCE = 0.10
"""A promise holds that comes within this share of the measured speedup."""
MOST = 3
"""Of assumptions that a verdict names; what is left is small."""
Told = tuple[str, str]
"""What is the case where a measurement makes speculation slower than assumed, and where it makes it faster."""

OTHER_ALPHA = (
    "guesses are right less often than on other prompts",
    "guesses are right more often than on other prompts",
)
DEPENDENT = ("acceptance is not independent between positions",) * 2
UNFILLED = ("rounds do not guess whole windows",) * 2
STANDARD_STEP = (
    "a step of standard decoding is faster than by itself",
    "a step of standard decoding is slower than by itself",
)


@dataclass(frozen=True)
class Step:
    """What the promise is multiplied by when a measurement takes an assumption's place.

    Args:
        assumption: what is the case instead of it.
    """

    assumption: Told
    factor: float

    @property
    def told(self) -> str:
        """What is the case, with the factor."""
        return f"{self.assumption[self.factor >= 1]} (x{self.factor:.2f})"


@dataclass(frozen=True)
class Prediction:
    """A promise beside its measurement.

    Args:
        alpha: from other prompts, at the same temperature and under the same rule: of `num_tested` guesses.
        cost_ratio: seconds of one guess / of the target's call on one token, isolated.
        call_ratio: seconds of the target's call on k + 1 tokens / on one, isolated.
        textbook: the speedup of an endless text where wide calls cost as much as narrow ones (Leviathan et al. 2023).
        predicted: with what wider calls and rounds cost besides, for prompts and texts of this length.
        steps: from `predicted` to `measured`.
    """

    cell: MeasuredCell
    alpha: float
    num_tested: int
    cost_ratio: float
    call_ratio: float
    textbook: float
    predicted: float
    measured: Interval
    steps: tuple[Step, ...]

    @property
    def deviation(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured.value - 1

    @property
    def holds(self) -> bool:
        """Whether it comes within `TOLERANCE`."""
        return abs(self.deviation) <= TOLERANCE

    @property
    def broken(self) -> list[Step]:
        """The assumptions whose correction brings the promise within `TOLERANCE`, the worst first; `MOST` at most."""
        found: list[Step] = []
        reached, wanted = self.predicted, self.measured.value
        for step in sorted(self.steps, key=lambda step: abs(math.log(step.factor)), reverse=True)[:MOST]:
            if abs(reached / wanted - 1) <= TOLERANCE:
                break
            if (step.factor < 1) == (reached > wanted):
                found.append(step)
                reached *= step.factor
        return found

    @property
    def verdict(self) -> str:
        """One line: whether the promise holds, and if not, which assumption broke."""
        if not self.holds:
            return f"{self.deviation:+.0%}: {'; '.join(step.told for step in self.broken)}"
        excess = self.textbook / self.measured.value - 1
        if excess <= TOLERANCE or self.call_ratio <= 1 + TOLERANCE:
            return f"holds: {self.deviation:+.0%}"
        width = int(self.cell.num_draft_tokens or 0) + 1
        calls = f"a call on {width} tokens costs {self.call_ratio:.2f} calls on one"
        return f"holds: {self.deviation:+.0%} (textbook {excess:+.0%}: {calls})"


def predictions(cells: Sequence[MeasuredCell], manifest: Mapping[str, Any]) -> list[Prediction]:
    """The promises for all cells that they can be made for.

    Those are cells of one row, which all isolated calls are of, with a fixed window, where the manifest has the calls
    and an alpha.
    """
    return [
        _prediction(cell, manifest) for cell in cells if cell.way == SPECULATIVE and unpromised(cell, manifest) is None
    ]


def unpromised(cell: MeasuredCell, manifest: Mapping[str, Any]) -> str | None:
    """Why no promise can be made for a cell; None where one can."""
    if cell.walltime_speedup is None or cell.timings is None:
        return "there is no speedup to compare it with"
    if cell.batch_size > 1:
        return "isolated calls are of one row, not of a batch"
    if not isinstance(cell.num_draft_tokens, int):
        return "the window adapts to what it meets"
    if isolated_calls(manifest, cell.pair, cell.draft) is None:
        error = ((manifest.get("calls") or {}).get(cell.pair) or {}).get("error")
        return "no isolated calls were timed" + (f": {error}" if error else "")
    if (tested := _other_prompts(manifest, cell)) is None:
        return "there are no other prompts to take alpha from"
    if not tested["num_tested"]:
        return "no guess was tested on other prompts"
    if not _prompts(cell, manifest) or cell.timings.num_units != cell.rows[0]["num_prompts"]:
        return "prompts are not known one by one"
    return None


def _prompts(cell: MeasuredCell, manifest: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """The prompts of a cell's domain, by their names."""
    return ((manifest.get("prompts") or {}).get(cell.pair) or {}).get(cell.domain) or {}


def _prediction(cell: MeasuredCell, manifest: Mapping[str, Any]) -> Prediction:
    calls, tested = isolated_calls(manifest, cell.pair, cell.draft), _other_prompts(manifest, cell)
    window, measured, prompts = cell.num_draft_tokens, cell.walltime_speedup, _prompts(cell, manifest)
    assert calls is not None and tested is not None and measured is not None and isinstance(window, int)
    alpha = tested["num_accepted"] / tested["num_tested"]
    reading = calls.prompt_token * statistics.fmean(map(len, prompts.values()))
    chain = _chain(cell, calls, alpha, window, reading)
    chain.append((STANDARD_STEP, measured.value))
    steps = [Step(told, after / before) for (_, before), (told, after) in zip(chain, chain[1:], strict=False)]
    cost_ratio = calls.guess / calls.one
    return Prediction(
        cell=cell,
        alpha=alpha,
        num_tested=tested["num_tested"],
        cost_ratio=cost_ratio,
        call_ratio=theory.call_ratio(calls.wide, window + 1),
        textbook=theory.speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio),
        predicted=chain[0][1],
        measured=measured,
        steps=tuple(steps),
    )


def _chain(cell: MeasuredCell, calls: Calls, alpha: float, window: int, reading: float) -> list[tuple[Told, float]]:
    """The promise, then speedups with more and more of it measured; each with what `Step` says is the case then.

    Args:
        reading: seconds of a prompt.
    """
    assert cell.timings is not None
    length, own = cell.timings.num_new_tokens, cell.total("num_new_tokens")
    wide, overhead = theory.between(calls.wide, window + 1), theory.between(calls.overhead, window + 1)

    def promised(rates: theory.Rates) -> float:
        return theory.predicted_speedup(
            rates,
            window,
            draft_step_seconds=calls.guess,
            target_seconds=calls.one,
            verify_seconds=wide,
            round_overhead_seconds=overhead + calls.draft,
            step_overhead_seconds=calls.step_overhead,
            prompt_seconds=reading,
            num_new_tokens=max(1, round(length)),
        )

    rate = alpha if cell.acceptance_rate is None else cell.acceptance_rate
    rates = [rate if each is None else each for each in cell.rates]
    rates += [rates[-1] if rates else rate] * (window - len(rates))
    chain = [(("", ""), promised(alpha)), (OTHER_ALPHA, promised(rate)), (DEPENDENT, promised(rates))]
    phases, num_rounds = cell.phase_seconds, sum(cell.summed("histogram"))
    if phases is None or not sum(phases.values()) or not num_rounds or not own:
        return chain
    rounds, drafted = (number * length / own for number in (num_rounds, cell.total("num_proposed") or 0))
    whole = statistics.fmean(middle(cell.timings.scaled))
    draft, verify, accept, rest = (whole * phases[phase] / sum(phases.values()) for phase in PHASES)
    plain = reading + length * (calls.one + calls.step_overhead)
    drafting, verifying = drafted * calls.guess + rounds * calls.draft, reading + rounds * wide
    besides = rounds * overhead
    return [
        *chain,
        (UNFILLED, plain / (drafting + verifying + besides)),
        (_as_cheap(f"a call on {window + 1} tokens"), plain / (drafting + verify + besides)),
        (_as_cheap("a guess"), plain / (draft + verify + besides)),
        (_as_cheap("what a round does besides its calls"), plain / (draft + verify + accept + rest)),
    ]


def _as_cheap(part: str) -> Told:
    return f"{part} is not as cheap in a round as by itself", f"{part} is cheaper in a round than by itself"


def _other_prompts(manifest: Mapping[str, Any], cell: MeasuredCell) -> Mapping[str, Any] | None:
    """What was tested and accepted on other prompts of the domain; None where there were none."""
    wanted = (cell.draft, cell.domain, cell.temperature, cell.rule)
    for each in (manifest.get("alpha_at") or {}).get(cell.pair) or ():
        if (each["draft"], each["domain"], each["temperature"], each["rule"]) == wanted:
            return each
    return None
