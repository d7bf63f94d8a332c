"""A report's tables as plain rows, and the same as escaped CSV and Markdown."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config_entries import ASSISTED, GENERATE, PROMPT_LOOKUP, ROLLED
from lightning_specdec.bench.report.advice import Advice, DomainAdvice
from lightning_specdec.bench.report.analysis import MeasuredCell
from lightning_specdec.bench.report.prediction import Prediction
from lightning_specdec.bench.report.wording import phrase
from lightning_specdec.bench.statistics import Interval, finite
from lightning_specdec.inference import PHASES

Value = str | float | int | bool | None
METHODS = {
    GENERATE: "transformers' generate",
    ASSISTED: "transformers' assisted generation",
    PROMPT_LOOKUP: "transformers' prompt look-up",
    ROLLED: "the target alone, rolled out as a draft is",
}
"""Methods of decoding in words, where their names are not."""


@dataclass(frozen=True)
class Column:
    """A column: its heading with the unit, and how a number is shown to a reader (files have it in full)."""

    name: str
    digits: int = 2
    unit: float = 1.0

    def shown(self, value: Value) -> str:
        """A value as a reader sees it."""
        if value is None:
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{value:,.{self.digits}f}" if self.name != "temperature" else f"{value:g}"
        return str(value)


@dataclass(frozen=True)
class Table:
    """Rows under headings; `failed` are the numbers of rows that stand for something that failed."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    failed: frozenset[int] = frozenset()

    def shown_columns(self) -> list[tuple[int, Column, str]]:
        """Columns that are not empty throughout: their number, and what the page calls their kind."""
        found = []
        for i, column in enumerate(self.columns):
            values = [row[i] for row in self.rows if row[i] is not None]
            longest = max((len(str(value)) for value in values), default=0)
            numeric = any(isinstance(value, int | float) for value in values)
            kind = "number" if numeric else "long" if longest > 40 else "text" if longest > 14 else ""
            if values or not self.rows:
                found.append((i, column, kind))
        return found


def way_of(cell: MeasuredCell) -> str:
    """A method of decoding in words."""
    return METHODS.get(cell.way, cell.way)


def _end(interval: Interval | None, end: int) -> float | None:
    """An end of an interval that says something."""
    return None if interval is None or interval.ends is None else interval.ends[end]


_CELL: tuple[tuple[Column, Callable[[MeasuredCell], Any]], ...] = (
    (Column("pair"), lambda cell: cell.pair),
    (Column("domain"), lambda cell: cell.domain),
    (Column("temperature"), lambda cell: cell.temperature),
    (Column("batch size"), lambda cell: cell.batch_size),
    (Column("new tokens"), lambda cell: cell.max_new_tokens),
    (Column("way"), way_of),
    (Column("draft"), lambda cell: cell.draft),
    (Column("window"), lambda cell: cell.num_draft_tokens),
    (Column("rule"), lambda cell: cell.rule),
    (Column("lossless"), lambda cell: cell.lossless),
    (Column("walltime speedup"), lambda cell: cell.walltime_speedup and cell.walltime_speedup.value),
    (Column("from"), lambda cell: _end(cell.walltime_speedup, 0)),
    (Column("to"), lambda cell: _end(cell.walltime_speedup, 1)),
    (Column("latency reduction"), lambda cell: cell.latency_reduction),
    (Column("acceptance rate"), lambda cell: cell.acceptance_rate),
    (Column("draft utilization"), lambda cell: cell.draft_utilization),
    (Column("block efficiency"), lambda cell: cell.block_efficiency),
    (Column("tokens/s", 1), lambda cell: cell.tokens_per_second and cell.tokens_per_second.value),
    (Column("tokens/s from", 1), lambda cell: _end(cell.tokens_per_second, 0)),
    (Column("tokens/s to", 1), lambda cell: _end(cell.tokens_per_second, 1)),
    (Column("ms/token", 2, 1000), lambda cell: cell.seconds_per_token),
    *(
        (Column(f"ms/token p{share}", 2, 1000), lambda cell, i=i: cell.gap_percentiles and cell.gap_percentiles[i])
        for i, share in enumerate((50, 95, 99))
    ),
    (Column("first token, ms", 1, 1000), lambda cell: cell.time_to_first_token and cell.time_to_first_token.value),
    (Column("first token, ms, from", 1, 1000), lambda cell: _end(cell.time_to_first_token, 0)),
    (Column("first token, ms, to", 1, 1000), lambda cell: _end(cell.time_to_first_token, 1)),
    *(
        (Column(f"{phase}, s", 3), lambda cell, phase=phase: cell.phase_seconds and cell.phase_seconds[phase])
        for phase in PHASES
    ),
    (Column("seconds, mean", 3), lambda cell: cell.seconds and cell.seconds[0]),
    (Column("std", 3), lambda cell: cell.seconds and cell.seconds[1]),
    (Column("repeats"), lambda cell: len(cell.rows)),
    (Column("peak memory, MB", 0, 1e-6), lambda cell: cell.peak_memory_bytes),
    *(
        (Column(f"peak memory in {phase}, MB", 0, 1e-6), lambda cell, phase=phase: cell.phase_memory_bytes.get(phase))
        for phase in PHASES
    ),
    (Column("GPU utilization"), lambda cell: cell.gpu_utilization),
    (Column("same tokens"), lambda cell: cell.same_tokens),
    (Column("tokens changed"), lambda cell: cell.total("num_changed") if cell.lossless is False else None),
    (Column("error"), lambda cell: cell.error),
)


def cells_table(cells: Sequence[MeasuredCell]) -> Table:
    """Every cell with all its figures; those of a failed one are empty, but for its error."""
    rows = tuple(tuple(_plain(column, get(cell)) for column, get in _CELL) for cell in cells)
    failed = frozenset(number for number, cell in enumerate(cells) if cell.error is not None)
    return Table(tuple(column for column, _ in _CELL), rows, failed)


def best_table(advice: Sequence[Advice]) -> Table:
    """What pays, domain by domain."""
    columns = (
        *map(Column, ("pair", "domain", "temperature", "batch size", "advice", "walltime speedup", "from", "to")),
        *map(Column, ("from, best of several", "faster, not proven")),
        *map(Column, ("acceptance rate", "break-even acceptance", "block efficiency", "best window by theory")),
        Column("what would help"),
    )
    rows = []
    for each in advice:
        pair, temperature, batch_size, _ = each.setting
        for domain in each.domains:
            best = domain.best
            speedup = None if best is None else best.walltime_speedup
            rates = (None, None) if best is None else (best.acceptance_rate, best.block_efficiency)
            helps = "; ".join(f"{change}: {value:.2f}x" for change, value in domain.helps)
            rows.append(
                (
                    *(pair, domain.domain, temperature, batch_size, domain.choice),
                    *(speedup and speedup.value, _end(speedup, 0), _end(speedup, 1)),
                    *(finite(domain.bound), _unproven(domain)),
                    *(rates[0], domain.break_even, rates[1]),
                    *(domain.window, helps or None),
                )
            )
    return Table(columns, tuple(rows))


def _unproven(domain: DomainAdvice) -> str | None:
    """A faster cell than the one that is advised, which may not pay."""
    cell = domain.unproven
    if cell is None or cell.walltime_speedup is None:
        return None
    return f"{phrase(cell, rule=domain.name_rule)}: {cell.walltime_speedup.value:.2f}x"


_PREDICTION: tuple[tuple[Column, Callable[[Prediction], Any]], ...] = (
    (Column("pair"), lambda each: each.cell.pair),
    (Column("domain"), lambda each: each.cell.domain),
    (Column("temperature"), lambda each: each.cell.temperature),
    (Column("draft"), lambda each: each.cell.draft),
    (Column("window"), lambda each: each.cell.num_draft_tokens),
    (Column("rule"), lambda each: each.cell.rule),
    (Column("alpha, other prompts"), lambda each: each.alpha),
    (Column("of guesses"), lambda each: each.num_tested),
    (Column("acceptance rate"), lambda each: each.cell.acceptance_rate),
    (Column("cost ratio"), lambda each: each.cost_ratio),
    (Column("wide call / call"), lambda each: each.call_ratio),
    (Column("predicted"), lambda each: each.predicted),
    (Column("measured"), lambda each: each.measured.value),
    (Column("predicted / measured - 1"), lambda each: each.deviation),
    (Column("within 10%"), lambda each: each.holds),
)


def predictions_table(predictions: Sequence[Prediction]) -> Table:
    """Each prediction beside its measurement."""
    rows = tuple(tuple(get(each) for _, get in _PREDICTION) for each in predictions)
    return Table(tuple(column for column, _ in _PREDICTION), rows)


def to_csv(table: Table) -> str:
    """Numbers in full; text that a spreadsheet would take for a formula is quoted by an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.name for column in table.columns)
    for row in table.rows:
        writer.writerow(map(harmless, row))
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """A table as GitHub shows it; columns that are empty throughout are left out."""
    kept = [(i, column) for i, column, _ in table.shown_columns()]
    lines = [[column.name for _, column in kept], ["---"] * len(kept)]
    lines += [[_in_markdown(column.shown(row[i])) for i, column in kept] for row in table.rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(column: Column, value: Any) -> Value:
    """In the column's unit; None for what is not known."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not math.isfinite(value):
        return None
    return value * column.unit if column.unit != 1.0 else value


def harmless(value: Value) -> Value:
    """A value of a CSV file: text that a spreadsheet would take for a formula is quoted by an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _in_markdown(text: str) -> str:
    plain = html.escape(" ".join(text.split()), quote=False)
    for letter in "\\|`*_[]":
        plain = plain.replace(letter, f"\\{letter}")
    return plain
