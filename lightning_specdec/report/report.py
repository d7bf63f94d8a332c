"""A results directory as a report: one HTML page, and its tables as Markdown and CSV."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lightning_specdec.bench.manifest import made_on
from lightning_specdec.bench.records import STANDARD, Comparison, comparisons
from lightning_specdec.bench.results import Results
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.bench.table import comparison_table, grid
from lightning_specdec.config.files import replaced
from lightning_specdec.report.answer import Advice, advise, rounds
from lightning_specdec.report.figures import Chart, answer_chart, speedup_charts

PAGE = "report.html"
TOLERANCE = 0.10
"""A prediction holds if it is within this share of the measured speedup."""

_ADVICE_HEADINGS = (
    "pair",
    "domain",
    "temperature",
    "batch size",
    "advice",
    "walltime speedup",
    "95% interval",
    "acceptance rate",
    "tokens / round",
)
_CELL_HEADINGS = (
    "pair",
    "domain",
    "temperature",
    "batch size",
    "new tokens",
    "method",
    "draft",
    "window",
    "rule",
    "walltime speedup",
    "95% interval",
    "predicted",
    "acceptance rate",
    "tokens / round",
    "tokens/s",
    "same tokens",
    "remark",
)


@dataclass(frozen=True)
class Table:
    """Headings and rows of text."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        return grid(self.heads, self.rows, "markdown") + "\n"


@dataclass(frozen=True)
class Report:
    """The contents of a results directory as answers, tables, and charts."""

    name: str
    manifest: Mapping[str, Any]
    cells: Sequence[Comparison]

    @classmethod
    def of(cls, results: Results) -> Report:
        """The report of results."""
        manifest = dict(results.manifest)
        # Rows of a resumed run may come from several commits.
        commits = dict.fromkeys(str(row.commit) for row in results.rows)
        if commits:
            manifest["commit"] = ", then ".join(commits)
        return cls(str(manifest["name"]), manifest, comparisons(results.rows))

    @cached_property
    def dtypes(self) -> dict[str, str | None]:
        """The dtype that each pair computes in."""
        pairs = self.manifest.get("pairs") or {}
        return {name: facts.get("dtype") for name, facts in pairs.items()}

    @cached_property
    def advice(self) -> list[Advice]:
        """The answer for each pair, domain and setting."""
        return advise(self.cells, self.dtypes)

    @property
    def lines(self) -> list[str]:
        """The answers as lines of text."""
        if not self.advice:
            return ["nothing has been measured yet"]
        lines = []
        for advice in self.advice:
            pair, domain, temperature, batch_size, max_new_tokens = advice.workload
            settings = (
                f"temperature {temperature:g}, batch size {batch_size}, {max_new_tokens} new tokens"
            )
            line = f"{pair}, {domain} ({settings}): {advice.sentence}"
            # A domain's name may hold line breaks.
            lines.append(" ".join(line.split()))
        return lines

    @property
    def predicted(self) -> str:
        """How many predictions hold; empty if none was made."""
        num_predictions = 0
        num_held = 0
        for cell in self.cells:
            if not cell.predicted_speedup or not cell.walltime_speedup:
                continue
            num_predictions += 1
            ratio = cell.predicted_speedup / cell.walltime_speedup.value
            if abs(ratio - 1) <= TOLERANCE:
                num_held += 1
        if not num_predictions:
            return ""
        return (
            f"{num_held} of {num_predictions} predictions are within {TOLERANCE:.0%} of the "
            "measured speedup."
        )

    @property
    def warnings(self) -> list[str]:
        """Failures, and tokens that are not standard decoding's."""
        failed_pairs = self.manifest.get("failed_pairs") or {}
        lines = [f"failed: {name}: {error}" for name, error in failed_pairs.items()]
        lines += self._failure_lines()
        for pair in dict.fromkeys(cell.case.pair for cell in self.cells):
            lines += self._token_lines(pair)
        return lines

    def _failure_lines(self) -> list[str]:
        """A line for each error, with the cells that failed with it."""
        cells_by_error: dict[str, list[str]] = {}
        for cell in self.cells:
            if cell.error is not None:
                cells_by_error.setdefault(cell.error, []).append(_cell_name(cell))

        lines = []
        for error, cell_names in cells_by_error.items():
            subject = cell_names[0]
            if len(cell_names) > 1:
                subject += f" and {len(cell_names) - 1} more"
            lines.append(f"failed: {subject}: {error}")
        return lines

    def _token_lines(self, pair: str) -> list[str]:
        """Lines about tokens of a pair that are not standard decoding's."""
        checked_cells = []
        different_cells = []
        for cell in self.cells:
            if cell.case.pair != pair or cell.same_tokens is None:
                continue
            checked_cells.append(cell)
            if cell.case.method != STANDARD and not cell.same_tokens:
                different_cells.append(cell)
        if not different_cells:
            return []

        dtype = self.dtypes.get(pair)
        if rounds(dtype):
            return [
                f"{pair}: tokens differ from standard decoding's in {len(different_cells)} of "
                f"{len(checked_cells)} cells, which rounding in {dtype} can cause; `audit` "
                "distinguishes a tie from a bug"
            ]
        reason = "generated other tokens than standard decoding: run `audit`"
        return [f"{_cell_name(cell)} {reason}" for cell in different_cells]

    def advice_table(self) -> Table:
        """The answers as a table."""
        rows = []
        for advice in self.advice:
            pair, domain, temperature, batch_size, _ = advice.workload
            best = advice.best
            rows.append(
                (
                    pair,
                    domain,
                    f"{temperature:g}",
                    str(batch_size),
                    advice.choice,
                    *_speedup_cells(None if best is None else best.walltime_speedup),
                    _number(None if best is None else best.acceptance_rate),
                    _number(None if best is None else best.block_efficiency),
                )
            )
        return Table(_ADVICE_HEADINGS, rows)

    def cells_table(self) -> Table:
        """Every cell with its figures; a cell that failed with its error."""
        return Table(_CELL_HEADINGS, [_cell_row(cell) for cell in self.cells])


def write(report: Report, directory: Path) -> Path:
    """Write the page, and its tables as Markdown and CSV; returns the page's path.

    Raises:
        OSError: a file cannot be written.
    """
    advice_table = report.advice_table()
    cells_table = report.cells_table()
    texts = {
        "advice.md": advice_table.markdown(),
        "cells.md": cells_table.markdown(),
        "cells.csv": comparison_table(report.cells, "csv") + "\n",
        PAGE: _page(report, {"advice": advice_table, "cells": cells_table}),
    }
    for name, text in texts.items():
        with replaced(directory / name) as file:
            file.write(text.encode())
    return directory / PAGE


def _page(report: Report, tables: Mapping[str, Table]) -> str:
    """The HTML page. It escapes whatever comes from the results, loads nothing, runs no script."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable)
    template_text = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = environment.from_string(template_text)

    answer = answer_chart(report.advice, report.cells)
    date = str(report.manifest.get("date", "?"))[:10]
    # The page does not show the prompts.
    manifest = {name: value for name, value in report.manifest.items() if name != "prompts"}
    return template.render(
        report=report,
        tables=tables,
        answers=[] if answer is None else [_image(answer)],
        note="" if answer is None else answer.note,
        speedups=[_image(chart) for chart in speedup_charts(report.cells)],
        machine=f"{made_on(report.manifest)}, {date}",
        manifest=json.dumps(manifest, indent=1),
    )


def _image(chart: Chart) -> tuple[str, str]:
    """A chart's title and its drawing as a data URL: as an image, its text is not part of the
    page."""
    encoded = base64.b64encode(chart.svg()).decode()
    return chart.title, f"data:image/svg+xml;base64,{encoded}"


def _printable(value: object) -> object:
    """Text without control characters."""
    if not isinstance(value, str):
        return value
    characters = [letter for letter in value if letter.isprintable() or letter == "\n"]
    # Markup, a subclass of str, must not be escaped again.
    return type(value)("".join(characters))


def _number(value: float | None, num_decimals: int = 2) -> str:
    return "-" if value is None else f"{value:,.{num_decimals}f}"


def _speedup_cells(speedup: Interval | None) -> tuple[str, str]:
    """A ratio and its interval as two cells."""
    if speedup is None:
        return "-", "-"
    if speedup.ends is None:
        return f"{speedup.value:.2f}", "-"
    low, high = speedup.ends
    return f"{speedup.value:.2f}", f"{low:.2f} to {high:.2f}"


def _cell_row(cell: Comparison) -> tuple[str, ...]:
    """A line of the table of all cells."""
    case = cell.case
    remark = ""
    if cell.error is not None:
        remark = f"failed: {cell.error}"
    elif case.lossless is False:
        remark = "lossy"
    same_tokens = {True: "yes", False: "no", None: "-"}[cell.same_tokens]
    choices = (case.method, case.draft, case.num_draft_tokens, case.rule)
    return (
        case.pair,
        case.domain,
        f"{case.temperature:g}",
        str(case.batch_size),
        str(case.max_new_tokens),
        *("-" if choice is None else str(choice) for choice in choices),
        *_speedup_cells(cell.walltime_speedup),
        _number(cell.predicted_speedup),
        _number(cell.acceptance_rate),
        _number(cell.block_efficiency),
        _number(cell.tokens_per_second, 1),
        same_tokens,
        remark,
    )


def _cell_name(cell: Comparison) -> str:
    """A cell in a sentence."""
    case = cell.case
    return (
        f"{case.pair}, {case.label or case.method}, {case.domain}, "
        f"temperature {case.temperature:g}, batch size {case.batch_size}"
    )
