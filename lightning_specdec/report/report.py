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
from lightning_specdec.bench.results import Results
from lightning_specdec.bench.rows import STANDARD, Comparison, comparisons
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.bench.table import comparison_table, grid
from lightning_specdec.config.files import replaced
from lightning_specdec.report.answer import Advice, advise, rounds
from lightning_specdec.report.figures import Chart, answer_chart, speedup_charts

PAGE = "report.html"
TOLERANCE = 0.10
"""A prediction holds that is within this share of the measured speedup."""


@dataclass(frozen=True)
class Table:
    """Headings and rows of text."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """As GitHub shows it."""
        return grid(self.heads, self.rows, "markdown") + "\n"


@dataclass(frozen=True)
class Report:
    """What a results directory says."""

    name: str
    manifest: Mapping[str, Any]
    cells: Sequence[Comparison]

    @classmethod
    def of(cls, results: Results) -> Report:
        commits = dict.fromkeys(str(row.commit) for row in results.rows)
        manifest = results.manifest | ({"commit": ", then ".join(commits)} if commits else {})
        return cls(str(manifest["name"]), manifest, comparisons(results.rows))

    @cached_property
    def dtypes(self) -> dict[str, str | None]:
        """What each pair computes in."""
        return {
            name: facts.get("dtype") for name, facts in (self.manifest.get("pairs") or {}).items()
        }

    @cached_property
    def advice(self) -> list[Advice]:
        """The answer for each pair, domain and setting."""
        return advise(self.cells, self.dtypes)

    @property
    def lines(self) -> list[str]:
        """The answers as lines of text."""
        found = []
        for each in self.advice:
            pair, domain, temperature, batch_size, max_new_tokens = each.place
            setting = (
                f"temperature {temperature:g}, batch size {batch_size}, {max_new_tokens} new tokens"
            )
            found.append(" ".join(f"{pair}, {domain} ({setting}): {each.sentence}".split()))
        return found or ["nothing has been measured yet"]

    @property
    def predicted(self) -> str:
        """How many predictions hold."""
        known = [(each.predicted_speedup, each.walltime_speedup) for each in self.cells]
        ratios = [
            predicted / measured.value for predicted, measured in known if predicted and measured
        ]
        held = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
        return f"{held} of {len(ratios)} predictions are within {TOLERANCE:.0%} of the measured speedup."

    @property
    def warnings(self) -> list[str]:
        """Failures, and tokens that are not standard decoding's."""
        lines = [
            f"failed: {name}: {error}"
            for name, error in (self.manifest.get("failed_pairs") or {}).items()
        ]
        for error in dict.fromkeys(each.error for each in self.cells if each.error is not None):
            places = [_named(each) for each in self.cells if each.error == error]
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            lines.append(f"failed: {places[0]}{more}: {error}")
        for pair in dict.fromkeys(each.case.pair for each in self.cells):
            known = [
                each
                for each in self.cells
                if each.case.pair == pair and each.same_tokens is not None
            ]
            other = [
                each for each in known if each.case.method != STANDARD and each.same_tokens is False
            ]
            if other and rounds(dtype := self.dtypes.get(pair)):
                lines.append(
                    f"{pair}: tokens differ from standard decoding's in {len(other)} of {len(known)} cells, as they "
                    f"may where {dtype} rounds; `audit` tells such a tie from a bug"
                )
            elif other:
                told = "gave other tokens than standard decoding: see what `audit` finds"
                lines += [f"{_named(each)} {told}" for each in other]
        return lines

    def advice_table(self) -> Table:
        """What pays, by domain."""
        heads = [
            "pair",
            "domain",
            "temperature",
            "batch size",
            "advice",
            "walltime speedup",
            "95% interval",
        ]
        rows = []
        for each in self.advice:
            pair, domain, temperature, batch_size, _ = each.place
            best = each.best
            rates = (None, None) if best is None else (best.acceptance_rate, best.block_efficiency)
            speedup = _interval(None if best is None else best.walltime_speedup)
            place = (pair, domain, f"{temperature:g}", str(batch_size))
            rows.append((*place, each.choice, *speedup, *map(_number, rates)))
        return Table([*heads, "acceptance rate", "tokens / round"], rows)

    def cells_table(self) -> Table:
        """Every cell with its figures; a cell that failed with its error."""
        heads = [
            "pair",
            "domain",
            "temperature",
            "batch size",
            "new tokens",
            "method",
            "draft",
            "window",
            "rule",
        ]
        heads += (
            "walltime speedup",
            "95% interval",
            "predicted",
            "acceptance rate",
            "tokens / round",
        )
        heads += ("tokens/s", "same tokens", "remark")
        rows = []
        for each in self.cells:
            case = each.case
            settings = (case.method, case.draft, case.num_draft_tokens, case.rule)
            figures = (each.predicted_speedup, each.acceptance_rate, each.block_efficiency)
            same = {True: "yes", False: "no", None: "-"}[each.same_tokens]
            lossy = "lossy" if case.lossless is False else ""
            rows.append(
                (
                    case.pair,
                    case.domain,
                    f"{case.temperature:g}",
                    str(case.batch_size),
                    str(case.max_new_tokens),
                )
                + tuple("-" if value is None else str(value) for value in settings)
                + (
                    *_interval(each.walltime_speedup),
                    *map(_number, figures),
                    _number(each.tokens_per_second, 1),
                )
                + (same, f"failed: {each.error}" if each.error is not None else lossy)
            )
        return Table(heads, rows)


def write(report: Report, directory: Path) -> Path:
    """Write the page, and its tables as Markdown and CSV; returns the page's path.

    Raises:
        OSError: something cannot be written.
    """
    tables = {"advice": report.advice_table(), "cells": report.cells_table()}
    content = {f"{name}.md": table.markdown() for name, table in tables.items()}
    content |= {
        "cells.csv": comparison_table(report.cells, "csv") + "\n",
        PAGE: _page(report, tables),
    }
    for name, text in content.items():
        with replaced(directory / name) as file:
            file.write(text.encode())
    return directory / PAGE


def _page(report: Report, tables: Mapping[str, Table]) -> str:
    """The page: it escapes whatever comes from the results, loads nothing and runs no script."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable)
    answer = answer_chart(report.advice, report.cells)
    return environment.from_string(
        files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    ).render(
        report=report,
        tables=tables,
        answers=[_image(answer)] if answer else [],
        note=answer.note if answer else "",
        speedups=[_image(each) for each in speedup_charts(report.cells)],
        machine=f"{made_on(report.manifest)}, {str(report.manifest.get('date', '?'))[:10]}",
        manifest=json.dumps(
            {name: value for name, value in report.manifest.items() if name != "prompts"}, indent=1
        ),
    )


def _image(chart: Chart) -> tuple[str, str]:
    """A chart's title, and its drawing as the address of an image: its names and its text stay apart from the page."""
    return chart.title, f"data:image/svg+xml;base64,{base64.b64encode(chart.svg()).decode()}"


def _printable(value: object) -> object:
    """Text without control characters."""
    if not isinstance(value, str):
        return value
    return type(value)(
        "".join(letter for letter in value if letter.isprintable() or letter == "\n")
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _interval(found: Interval | None) -> tuple[str, str]:
    if found is None:
        return "-", "-"
    return f"{found.value:.2f}", "-" if found.ends is None else "{:.2f} to {:.2f}".format(
        *found.ends
    )


def _named(each: Comparison) -> str:
    """A cell in a sentence."""
    case = each.case
    words = [case.pair, case.label or case.method, case.domain, f"temperature {case.temperature:g}"]
    return ", ".join([*words, f"batch size {case.batch_size}"])
