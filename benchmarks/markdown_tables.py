"""Markdown tables from records: each column is a function that shows a part of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Column = Callable[[Any], str]
"""The text of a record in one column."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table. Cells are Markdown, so they are not escaped."""
    separators = ["---"] * len(headings)
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, separators, *rows)]
    return "\n".join(lines)


def records_table(columns: Mapping[str, Column], records: Iterable[Any]) -> str:
    """A Markdown table with a line for each record, and a column for each heading."""
    rows = []
    for record in records:
        rows.append([column(record) for column in columns.values()])
    return markdown_table(list(columns), rows)


def text_column(name: str) -> Column:
    """Shows the value of this name."""
    return lambda record: str(record[name])


def number_column(name: str, digits: int = 2) -> Column:
    """Shows the number of this name with this many decimal places."""
    return lambda record: format_number(record[name], digits)


def format_number(value: float | None, digits: int = 2) -> str:
    """The number with this many decimal places; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}"
