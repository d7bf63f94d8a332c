"""Which cells may be advised, which of them pay, and why there are none.

Each cell is tested at odds of (1 - `LEVEL`) / their number, so where none gains, one is said to pay with odds of
1 - `LEVEL` at most (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.bench.config_entries import SPECULATIVE, STANDARD
from lightning_specdec.bench.report.analysis import MeasuredCell, rounds
from lightning_specdec.bench.statistics import LEVEL, Estimate


def excused(cell: MeasuredCell, dtype: str | None) -> bool:
    """Whether its tokens are standard decoding's as far as they can be."""
    return cell.same_tokens is not False or rounds(dtype)


def sound(cell: MeasuredCell, dtype: str | None) -> bool:
    """Whether its speedup is known, none of its runs failed, and its tokens are as they should be."""
    return cell.timings is not None and cell.error is None and excused(cell, dtype)


def pays(estimate: Estimate | None, num_judged: int) -> bool:
    """Whether a speedup is more than chance: its interval lies above 1, and so does the bound that makes up for being
    one of so many. A single prompt, or batch, has no spread to go by."""
    low = lower_bound(estimate, num_judged)
    return low is not None and low > 1


def lower_bound(estimate: Estimate | None, num_judged: int) -> float | None:
    """What `pays` goes by: the bound of a speedup that is the best of so many."""
    if estimate is None or estimate.prompts is None:
        return None
    return estimate.bound((1 - LEVEL) / max(2, num_judged))


def missing(cells: Sequence[MeasuredCell]) -> str:
    """Why none of a domain's cells can be advised."""
    tried = [cell for cell in cells if cell.way == SPECULATIVE]
    finished = [cell for cell in tried if cell.rows]
    if not tried:
        return "no speculation was measured"
    if not finished:
        return "no speculative run has finished"
    if not any(cell.rows for cell in cells if cell.way == STANDARD):
        return "no run of standard decoding has finished"
    if not any(cell.lossless for cell in tried):
        return "no lossless rule was measured"
    if not any(cell.lossless for cell in finished):
        return "no run of a lossless rule has finished"
    whole = [cell for cell in finished if cell.lossless and cell.error is None]
    if not whole:
        return "a run of every lossless method has failed"
    if all(cell.same_tokens is False for cell in whole):
        return "every lossless method gave other tokens than standard decoding"
    return "no lossless speculative run has finished beside a standard one"
