"""The cells of results as plain lines: means over the repeats with their spread, and the speedup with its interval."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from lightning_specdec.bench.report.analysis import MeasuredCell, Row, cells_of
from lightning_specdec.bench.statistics import finite, mean_std

NAMES = ("pair", "domain", "temperature", "batch_size", "way", "draft", "num_draft_tokens", "rule")
"""What tells a line from the others."""
SPREAD = ("seconds", "tokens_per_second", "time_to_first_token")
"""Figures that come as a mean and a standard deviation over the repeats, of all prompts together or on their mean."""
SPEEDUP = ("walltime_speedup", "walltime_speedup_low", "walltime_speedup_high")
"""That of the report, and the ends of its interval."""
GAPS = ("seconds_per_token_p50", "seconds_per_token_p95", "seconds_per_token_p99")
"""Percentiles of the seconds between a token and the one before it, over all prompts and repeats."""
RATES = ("acceptance_rate", "draft_utilization", "block_efficiency")
"""Figures over all repeats together."""
REST = ("repeats", "lossless", "same_tokens", "error")


def summarize(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A line for each cell, in the order in which they first ran; None for what is not known, as a single repeat's
    deviation."""
    return [_line(cell) for cell in cells_of(rows)]


def _line(cell: MeasuredCell) -> dict[str, Any]:
    figures = {
        "seconds": [row["seconds"] for row in cell.rows],
        "tokens_per_second": [row["num_new_tokens"] / row["seconds"] for row in cell.rows],
        "time_to_first_token": [
            statistics.fmean(row["time_to_first_token"]) for row in cell.rows if row["time_to_first_token"]
        ],
    }
    line: dict[str, Any] = {name: getattr(cell, name) for name in NAMES}
    for name in SPREAD:
        mean, deviation = mean_std(figures[name]) if figures[name] else (None, None)
        line |= {f"{name}_mean": mean, f"{name}_std": finite(deviation)}
    speedup = (None, None, None) if cell.walltime_speedup is None else cell.walltime_speedup
    line |= {name: finite(value) for name, value in zip(SPEEDUP, speedup, strict=True)}
    line |= dict(zip(GAPS, cell.gap_percentiles or (None,) * len(GAPS), strict=True))
    line |= {name: getattr(cell, name) for name in RATES}
    return line | {"repeats": len(cell.rows), **{name: getattr(cell, name) for name in REST[1:]}}
