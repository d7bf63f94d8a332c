"""The table of `decode`, `sweep` and `bench`, for terminals, Markdown and CSV."""

from __future__ import annotations

import csv
import html
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_specdec.bench.rows import SPECULATIVE, STANDARD, Comparison, seconds
from lightning_specdec.bench.statistics import Interval

Column = tuple[str, Callable[[Comparison], str]]


def _figure(name: str, form: str = "{:.2f}") -> Column:
    def cell(each: Comparison) -> str:
        value = getattr(each, name)
        return "-" if value is None else form.format(value)

    return name, cell


def _setting(name: str, attribute: str = "") -> Column:
    def cell(each: Comparison) -> str:
        value = getattr(each.case, attribute or name)
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return name, cell


def method(each: Comparison) -> str:
    """The method and its drafter."""
    case = each.case
    return (
        " ".join(
            part for part in ("" if case.method == SPECULATIVE else case.method, case.draft) if part
        )
        or "-"
    )


_WHERE: tuple[Column, ...] = (
    *map(_setting, ("pair", "domain", "temperature")),
    _setting("batch", "batch_size"),
)
_WHAT: tuple[Column, ...] = (
    ("method", method),
    _setting("window", "num_draft_tokens"),
    _setting("rule"),
)
_FIGURES: tuple[Column, ...] = (
    ("seconds", lambda each: f"{float(f'{seconds(each.rows):.3g}'):,g}" if each.rows else "-"),
    _figure("tokens_per_second", "{:,.1f}"),
    _figure("acceptance_rate"),
    _figure("block_efficiency"),
    _figure("cost_ratio"),
    (
        "walltime_speedup",
        lambda each: "-" if each.walltime_speedup is None else interval(each.walltime_speedup),
    ),
)


def comparison_table(
    found: Sequence[Comparison],
    form: str = "text",
    *,
    remark: Callable[[Comparison], str] | None = None,
) -> str:
    """A line for each comparison; settings that are the same in all of them are left out.

    Args:
        form: "text", "markdown" or "csv".
        remark: what stands at a line's end.
    """
    if form == "csv":
        return _csv(found)
    settings = [
        column for column in (*_WHERE, _WHAT[2]) if len({column[1](each) for each in found}) > 1
    ]
    columns = [column for column in (*_WHERE, *_WHAT) if column in settings or column in _WHAT[:2]]
    rows = []
    for each in found:
        failed = each.error is not None and not each.rows
        cells = [cell(each) for _, cell in columns] + [
            "" if failed else cell(each) for _, cell in _FIGURES
        ]
        rows.append(
            [*cells, " ".join(filter(None, (_failure(each), remark(each) if remark else "")))]
        )
    return grid(
        [*(head for head, _ in (*columns, *_FIGURES)), ""], rows, form, num_text=len(columns)
    )


def grid(
    heads: Sequence[str], rows: Sequence[Sequence[str]], form: str = "text", *, num_text: int = 1
) -> str:
    """Cells in columns: the first ones are text, then figures; what stands last may be any length."""
    if form == "markdown":
        marked = [
            heads,
            ["---"] * len(heads),
            *([_in_markdown(cell) for cell in row] for row in rows),
        ]
        return "\n".join("| " + " | ".join(line) + " |" for line in marked)
    broken = [
        [head] if i < num_text else _broken(head, [row[i] for row in rows])
        for i, head in enumerate(heads)
    ]
    height = max(map(len, broken))
    lines, tops = [], zip(*([""] * (height - len(each)) + each for each in broken), strict=True)
    rows = [*tops, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads) - 1)]
    for row in rows:
        cells = [
            cell.ljust(width) if i < num_text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row[:-1], widths, strict=True))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def _broken(head: str, cells: Sequence[str]) -> list[str]:
    """A heading as lines no wider than its words and the cells below it."""
    words = (
        head if "." in head else head.replace("_", " ")
    ).split()  # an import path stays as it is
    return textwrap.wrap(" ".join(words), max(map(len, (".", *words, *cells)))) or [""]


def interval(found: Interval) -> str:
    """A ratio with its interval, where that says something."""
    return f"{found.value:.2f}" + (
        "" if found.ends is None else " [{:.2f}, {:.2f}]".format(*found.ends)
    )


def listing(each: Comparison) -> str:
    """A comparison on its own: a line for each figure, standard decoding beside it."""
    sides = (
        [Comparison(each.standard[0], each.standard)]
        if each.standard and each.case.method != STANDARD
        else []
    )
    sides.append(each)
    window = each.case.num_draft_tokens
    heads = [
        "",
        *map(method, sides[:-1]),
        method(each) + ("" if window is None else f", window {window}"),
        "",
    ]
    rows = [
        (name.replace("_", " "), *(cell(side) for side in sides), "") for name, cell in _FIGURES
    ]
    return "\n".join(filter(None, (grid(heads, rows), _failure(each))))


def details(each: Comparison) -> str:
    """Where the time of a comparison goes, and what theory expects: a line each."""
    lines = []
    if each.latency_reduction is not None:
        predicted = (
            ""
            if each.predicted_speedup is None
            else f", predicted speedup {each.predicted_speedup:.2f}"
        )
        lines.append(f"latency reduction {each.latency_reduction:.0%}{predicted}")
    if each.phase_seconds is not None:
        whole = sum(each.phase_seconds.values()) or 1.0
        shares = ", ".join(
            f"{phase} {seconds / whole:.0%}" for phase, seconds in each.phase_seconds.items()
        )
        lines.append(f"time by phase: {shares}")
    return "\n".join(lines)


def harmless(value: Any) -> Any:
    """A value of a CSV file: text that a spreadsheet would take for a formula is quoted by an apostrophe."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _csv(found: Sequence[Comparison]) -> str:
    file = io.StringIO()
    lines = [
        {k: v for k, v in each.summary().items() if not isinstance(v, Mapping)} for each in found
    ]
    names = [
        name for name in (lines[0] if lines else ()) if name not in ("standard", "speculative")
    ]
    writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for line in lines:
        writer.writerow({name: harmless(value) for name, value in line.items()})
    return file.getvalue().rstrip("\n")


def _failure(each: Comparison) -> str:
    if each.error is not None:
        after = f" after {len(each.rows)} runs" if each.rows else ""
        return f"failed{after}: {each.error}"
    if each.case.lossless is False:
        return "lossy"
    return "OTHER TOKENS than standard decoding" if each.same_tokens is False else ""


def _in_markdown(text: str) -> str:
    plain = html.escape(" ".join(text.split()), quote=False)
    for letter in "\\|`*_[]":
        plain = plain.replace(letter, f"\\{letter}")
    return plain
