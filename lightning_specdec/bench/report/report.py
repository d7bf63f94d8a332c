"""A results directory as a report: the answer, warnings, tables and figures, written as one HTML page and as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lightning_specdec.bench.config_entries import OURS, SPECULATIVE, STANDARD
from lightning_specdec.bench.report.advice import Advice, FasterBaseline, advise
from lightning_specdec.bench.report.analysis import MeasuredCell, cells_of
from lightning_specdec.bench.report.figures import PALETTE, Picture, draw, pictures
from lightning_specdec.bench.report.judged import excused
from lightning_specdec.bench.report.prediction import TOLERANCE, Prediction, predictions, unpredicted
from lightning_specdec.bench.report.tables import (
    Table,
    best_table,
    cells_table,
    predictions_table,
    to_csv,
    to_markdown,
    way_of,
)
from lightning_specdec.bench.report.wording import listed, shown
from lightning_specdec.bench.results import Results
from lightning_specdec.files import replaced
from lightning_specdec.manifest import made_on

PAGE = "report.html"


@dataclass(frozen=True)
class Report:
    """What a results directory comes to.

    Args:
        tables: by the names of their files.
    """

    name: str
    manifest: Mapping[str, Any]
    cells: Sequence[MeasuredCell]
    advice: Sequence[Advice]
    predictions: Sequence[Prediction]
    tables: Mapping[str, Table]

    @classmethod
    def of(cls, results: Results) -> Report:
        """Everything but the figures."""
        cells, manifest = cells_of(results.rows), results.manifest
        advice, found = advise(cells, dtypes(manifest)), predictions(cells, manifest)
        tables = {"advice": best_table(advice), "predictions": predictions_table(found), "cells": cells_table(cells)}
        return cls(str(manifest.get("name") or results.directory.name), manifest, cells, advice, found, tables)

    @cached_property
    def pictures(self) -> list[Picture]:
        """Figures under their titles."""
        return pictures(self.cells, self.manifest, self.predictions)

    @property
    def answers(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """For each pair the settings that were measured, in words (none where there is one alone), with the advice."""
        found: dict[str, list[tuple[str, str]]] = {}
        settings = Counter(each.setting[0] for each in self.advice)
        for each in self.advice:
            pair, temperature, batch_size, max_new_tokens = each.setting
            lines = found.setdefault(pair, [])
            setting = f"temperature {temperature:g}, batch size {batch_size}, {max_new_tokens} new tokens"
            if settings[pair] == 1:
                setting = ""
            lines.append((setting, each.sentence))
            if each.outside is not None:
                lines.append((setting, _faster(each.outside)))
        return list(found.items())

    @property
    def without_prediction(self) -> list[str]:
        """For how many cells of speculation there is no prediction, by the reason."""
        cells = [cell for cell in self.cells if cell.way == SPECULATIVE and cell.error is None]
        reasons = Counter(why for cell in cells if (why := unpredicted(cell, self.manifest)))
        return [f"{number} {'cell' if number == 1 else 'cells'}: {why}" for why, number in reasons.items()]

    @property
    def warnings(self) -> list[str]:
        """What must not be overlooked."""
        failed = [cell for cell in self.cells if cell.error is not None]
        lines = [f"failed: {name}: {error}" for name, error in (self.manifest.get("failed_pairs") or {}).items()]
        for error in dict.fromkeys(cell.error for cell in failed):
            places = [_named(cell) for cell in failed if cell.error == error]
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            lines.append(f"failed: {places[0]}{more}: {error}")
        return [*lines, *self._other_tokens()]

    def _other_tokens(self) -> list[str]:
        """Where tokens are not standard decoding's: a line for a pair that rounds, a line for each cell of another."""
        known, lines = dtypes(self.manifest), []
        for pair, dtype in {cell.pair: known.get(cell.pair) for cell in self.cells}.items():
            cells = [
                cell
                for cell in self.cells
                if cell.pair == pair and cell.way != STANDARD and cell.same_tokens is not None
            ]
            other = [cell for cell in cells if cell.same_tokens is False]
            if any(not excused(cell, dtype) for cell in other):
                for cell in other:
                    why = (
                        f"which {dtype or 'its type'} hardly excuses" if cell.way in OURS else "in another computation"
                    )
                    told = " and is not advised: see what `audit` finds" if cell.way in OURS else ""
                    lines.append(f"{_named(cell)} gave other tokens than standard decoding, {why}{told}")
            elif other:
                lines.append(
                    f"{pair}: tokens differ from standard decoding's in {len(other)} of {len(cells)} cells, as they "
                    f"may where {dtype} rounds; `audit` tells such a tie from a bug"
                )
        return lines


def dtypes(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """What each pair computes in."""
    return {name: facts.get("dtype") for name, facts in (manifest.get("pairs") or {}).items()}


def write(report: Report, directory: Path) -> Path:
    """Write the page, its tables as CSV and Markdown, its pictures as PNG; gives the page's path.

    Raises:
        OSError: something cannot be written there.
    """
    figures = []
    for picture in report.pictures:
        drawn = []
        for number, panel in enumerate(picture.panels, start=1):
            svg, png = draw(panel, salt=f"{picture.name}-{number}")
            drawn.append((Markup(svg), panel.axes[0].get_title(loc="left")))
            _write(directory / f"{picture.name}-{number}.png", png)
        figures.append((picture, drawn))
        for old in directory.glob(f"{picture.name}-*.png"):  # of results that had more panels
            number_of = old.stem.removeprefix(f"{picture.name}-")
            if number_of.isdigit() and int(number_of) > len(picture.panels):
                old.unlink()
    for name, table in report.tables.items():
        _write(directory / f"{name}.csv", to_csv(table).encode())
        _write(directory / f"{name}.md", to_markdown(table).encode())
    _write(directory / PAGE, _page(report, figures).encode())
    return directory / PAGE


def _page(report: Report, figures: Sequence[tuple[Picture, Sequence[tuple[Markup, str]]]]) -> str:
    """The page: it escapes whatever comes from the results, loads nothing and runs no script."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_printable)
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8")).render(
        report=report,
        figures=figures,
        palette=PALETTE,
        machine=f"{made_on(report.manifest)}, {report.manifest.get('date', '?')}",
        held=sum(each.holds for each in report.predictions),
        tolerance=f"{TOLERANCE:.0%}",
        manifest=json.dumps({name: value for name, value in report.manifest.items() if name != "prompts"}, indent=1),
    )


def _printable(value: object) -> object:
    """Text without control characters."""
    if isinstance(value, Markup):
        return value
    return "".join(letter for letter in str(value) if letter.isprintable() or letter == "\n")


def _write(path: Path, content: bytes) -> None:
    with replaced(path) as file:
        file.write(content)


def _faster(outside: FasterBaseline) -> str:
    """That a Hugging Face baseline is faster than what is advised."""
    on = f" on {listed(outside.domains)}" if outside.domains else ""
    told = f"is {way_of(outside.cell)}{on}: {shown(outside.speedup)}"
    if outside.advised is None:
        return f"faster than standard decoding {told}"
    return f"faster than that {told}, where that gives {shown(outside.advised)}"


def _named(cell: MeasuredCell) -> str:
    """What a cell is called in a sentence."""
    words = [
        cell.pair,
        way_of(cell),
        cell.draft,
        cell.num_draft_tokens and f"window {cell.num_draft_tokens}",
        cell.rule,
    ]
    words += [cell.domain, f"temperature {cell.temperature:g}", f"batch size {cell.batch_size}"]
    return ", ".join(str(word) for word in words if word)
