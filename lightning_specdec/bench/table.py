"""The table of `decode`, `sweep` and `bench`, for terminals, Markdown and CSV."""

from __future__ import annotations

import csv
import html
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_specdec.bench.records import SPECULATIVE, STANDARD, Comparison, seconds
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.config.terminal import display_width, padded

Column = tuple[str, Callable[[Comparison], str]]
"""A heading, and the function that writes a comparison's cell."""

_MARKDOWN_SPECIAL = "\\|`*_[]"
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Text that begins with one of these is a formula to a spreadsheet."""


def _figure_column(name: str, number_format: str = "{:.2f}") -> Column:
    """A column of a figure of the comparison, by the name of its property."""

    def write_cell(comparison: Comparison) -> str:
        value = getattr(comparison, name)
        return "-" if value is None else number_format.format(value)

    return name, write_cell


def _setting_column(heading: str, attribute: str | None = None) -> Column:
    """A column of a setting of the case, by the name of its field (the heading when None)."""

    def write_cell(comparison: Comparison) -> str:
        value = getattr(comparison.case, attribute or heading)
        if value is None:
            return ""
        if isinstance(value, float):
            return f"{value:g}"
        return str(value)

    return heading, write_cell


def method(comparison: Comparison) -> str:
    """The method and its drafter."""
    case = comparison.case
    words = []
    if case.method != SPECULATIVE:
        words.append(case.method)
    if case.draft:
        words.append(case.draft)
    return " ".join(words) or "-"


def _seconds_cell(comparison: Comparison) -> str:
    """Seconds with three significant digits."""
    total_seconds = seconds(comparison.rows)
    if total_seconds is None:
        return "-"
    rounded_seconds = float(f"{total_seconds:.3g}")
    return f"{rounded_seconds:,g}"


def _standard_speed_cell(comparison: Comparison) -> str:
    """The speed of standard decoding that fits the speedup."""
    speed = comparison.standard_tokens_per_second
    return "-" if speed is None else f"{speed:,.1f}"


def _speedup_cell(comparison: Comparison) -> str:
    if comparison.walltime_speedup is None:
        return "-"
    return interval(comparison.walltime_speedup)


_METHOD_COLUMN: Column = ("method", method)
_WINDOW_COLUMN = _setting_column("window", "num_draft_tokens")
_SETTING_COLUMNS: tuple[Column, ...] = (
    _setting_column("pair"),
    _setting_column("domain"),
    _setting_column("temperature"),
    _setting_column("batch", "batch_size"),
)
_RULE_COLUMN = _setting_column("rule")
_FIGURE_COLUMNS: tuple[Column, ...] = (
    ("seconds", _seconds_cell),
    _figure_column("tokens_per_second", "{:,.1f}"),
    _figure_column("acceptance_rate"),
    _figure_column("block_efficiency"),
    _figure_column("cost_ratio"),
    ("walltime_speedup", _speedup_cell),
)


def comparison_table(
    comparisons: Sequence[Comparison],
    form: str = "text",
    *,
    figures: Sequence[str] | None = None,
    remark: Callable[[Comparison], str] | None = None,
) -> str:
    """A line for each comparison; settings that are equal in all of them are left out.

    Args:
        form: "text", "markdown" or "csv".
        figures: headings of the columns of figures; None for all of them.
        remark: returns the text at a line's end.
    """
    if form == "csv":
        return _csv(comparisons)

    columns = [column for column in _SETTING_COLUMNS if _varies(column, comparisons)]
    columns += [_METHOD_COLUMN, _WINDOW_COLUMN]
    figure_columns = _FIGURE_COLUMNS
    if figures is not None:
        figure_columns = tuple(column for column in _FIGURE_COLUMNS if column[0] in figures)
    speculative = [row for row in comparisons if row.case.rule is not None]
    if _varies(_RULE_COLUMN, speculative):
        columns.append(_RULE_COLUMN)

    lines = []
    for comparison in comparisons:
        cells = [write_cell(comparison) for _, write_cell in columns]
        if comparison.error is not None and not comparison.rows:
            cells += [""] * len(figure_columns)
        else:
            cells += [write_cell(comparison) for _, write_cell in figure_columns]

        remarks = [_warning(comparison)]
        if remark is not None:
            remarks.append(remark(comparison))
        cells.append(" ".join(text for text in remarks if text))
        lines.append(cells)

    headings = [heading for heading, _ in (*columns, *figure_columns)]
    # The remarks have no heading.
    return grid([*headings, ""], lines, form, num_text=len(columns))


def _varies(column: Column, comparisons: Sequence[Comparison]) -> bool:
    """Whether the column's cells differ."""
    _, write_cell = column
    return len({write_cell(comparison) for comparison in comparisons}) > 1


def grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    form: str = "text",
    *,
    num_text: int = 1,
) -> str:
    """Format cells in columns.

    Args:
        form: "text" or "markdown".
        num_text: number of leading text columns, aligned left. Figures follow, aligned right. The
            last column may be of any length.
    """
    if form == "markdown":
        return _markdown(heads, rows)

    heading_lines = _heading_lines(heads, rows, num_text)
    lines = [*heading_lines, *rows]
    num_aligned = len(heads) - 1
    widths = [max(display_width(line[i]) for line in lines) for i in range(num_aligned)]

    texts = []
    for line in lines:
        cells = []
        for i, width in enumerate(widths):
            cells.append(padded(line[i], width, to_right=i >= num_text))
        cells.append(line[-1])
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        lines.append([_escape_markdown(cell) for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _heading_lines(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_text: int,
) -> list[list[str]]:
    """The headings as lines of a table. Those of figures are wrapped, and end on the last line."""
    wrapped_heads = []
    for i, heading in enumerate(heads):
        if i < num_text:
            wrapped_heads.append([heading])
        else:
            wrapped_heads.append(_wrap_heading(heading, [row[i] for row in rows]))

    num_lines = max(len(parts) for parts in wrapped_heads)
    heading_columns = [[""] * (num_lines - len(parts)) + parts for parts in wrapped_heads]
    return [[column[i] for column in heading_columns] for i in range(num_lines)]


def _wrap_heading(heading: str, cells: Sequence[str]) -> list[str]:
    """A heading as lines no wider than its words and the cells below it."""
    # An import path keeps its underscores.
    spelled_heading = heading if "." in heading else heading.replace("_", " ")
    words = spelled_heading.split()
    width = max(display_width(text) for text in (".", *words, *cells))
    return textwrap.wrap(" ".join(words), width) or [""]


def interval(speedup: Interval) -> str:
    """A ratio with its interval, unless the interval is meaningless."""
    text = f"{speedup.value:.2f}"
    if speedup.ends is not None:
        low, high = speedup.ends
        text += f" [{low:.2f}, {high:.2f}]"
    return text


def listing(comparison: Comparison) -> str:
    """A single comparison: a line for each figure, with a column for standard decoding."""
    headings = [""]
    sides = []
    if comparison.standard and comparison.case.method != STANDARD:
        standard = Comparison(comparison.standard[0], comparison.standard)
        sides.append(standard)
        headings.append(method(standard))

    sides.append(comparison)
    heading = method(comparison)
    if comparison.case.num_draft_tokens is not None:
        heading += f", window {comparison.case.num_draft_tokens}"
    # The last column of a grid is not aligned: it stays empty here.
    headings += [heading, ""]

    lines = []
    for name, write_cell in _FIGURE_COLUMNS:
        cells = [write_cell(side) for side in sides]
        if name == "tokens_per_second" and len(sides) > 1:
            cells[0] = _standard_speed_cell(comparison)
        lines.append([name.replace("_", " "), *cells, ""])

    text = grid(headings, lines)
    warning = _warning(comparison)
    return f"{text}\n{warning}" if warning else text


def details(comparison: Comparison) -> str:
    """Where the time of a comparison goes, and what theory expects: a line each."""
    lines = []
    if comparison.latency_reduction is not None:
        line = f"latency reduction {comparison.latency_reduction:.0%}"
        if comparison.predicted_speedup is not None:
            line += f", predicted speedup {comparison.predicted_speedup:.2f}"
        lines.append(line)

    phase_seconds = comparison.phase_seconds
    if phase_seconds is not None:
        total_seconds = sum(phase_seconds.values()) or 1.0
        shares = []
        for phase, phase_time in phase_seconds.items():
            shares.append(f"{phase} {phase_time / total_seconds:.0%}")
        lines.append(f"time by phase: {', '.join(shares)}")
    return "\n".join(lines)


def harmless(value: Any) -> Any:
    """A value for a CSV file: an apostrophe precedes text that a spreadsheet reads as a formula."""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return value


def _csv(comparisons: Sequence[Comparison]) -> str:
    records = []
    for comparison in comparisons:
        summary = comparison.summary()
        # The figures of both sides are mappings, which have no place in a table.
        records.append(
            {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        )

    names: list[str] = []
    if records:
        names = [name for name in records[0] if name not in (STANDARD, SPECULATIVE)]

    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for record in records:
        writer.writerow({name: harmless(value) for name, value in record.items()})
    return file.getvalue().rstrip("\n")


def _warning(comparison: Comparison) -> str:
    """What a reader must know of a comparison before its figures; empty if nothing is wrong."""
    if comparison.error is not None:
        num_runs = len(comparison.rows)
        progress = f" after {num_runs} runs" if num_runs else ""
        return f"failed{progress}: {comparison.error}"
    if comparison.case.lossless is False:
        return "lossy"
    if comparison.same_tokens is False:
        return "OTHER TOKENS than standard decoding"
    return ""


def _escape_markdown(text: str) -> str:
    escaped = html.escape(" ".join(text.split()), quote=False)
    for character in _MARKDOWN_SPECIAL:
        escaped = escaped.replace(character, f"\\{character}")
    return escaped
