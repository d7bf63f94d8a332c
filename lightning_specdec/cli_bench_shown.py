"""A benchmark on the terminal: a bar while it runs, and its cells as a table for people, pages or programs."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_specdec.bench.compare import Comparison
from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.report.analysis import rounds
from lightning_specdec.bench.report.summary import GAPS, NAMES, RATES, REST, SPEEDUP, SPREAD, summarize
from lightning_specdec.bench.report.tables import harmless
from lightning_specdec.bench.report.wording import shown
from lightning_specdec.bench.results import Results
from lightning_specdec.bench.run import Progress
from lightning_specdec.bench.statistics import Interval
from lightning_specdec.cli_common import counted
from lightning_specdec.manifest import made_on
from lightning_specdec.terminal import say, visible

WIDTH = 24
QUIET_SECONDS = 30.0
"""Between two lines where nobody sits and waits."""
_HEADS = ("pair", "domain", "T", "batch", "way", "window", "rule", "ms", "tokens/s", "walltime_speedup")


class Bar(Progress):
    """How many runs are finished and how long the rest will take, on one line of stderr that is drawn anew; where that
    is no terminal, a line every `QUIET_SECONDS`."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._done = self._total = 0
        self._text = self._behind = ""
        self._began = self._drawn = time.monotonic()

    def plan(self, num_runs: int, *, pairs_left: int) -> None:
        """So many runs of the next pair are to come, and so many pairs behind it."""
        self._done, self._total, self._began = 0, num_runs, time.monotonic()
        self._behind = f", then {counted(pairs_left, 'pair')}" if pairs_left else ""

    def say(self, text: str) -> None:
        """What is being done now."""
        self._text = text
        self._draw()

    def warn(self, text: str) -> None:
        """A line of its own."""
        self.close()
        super().warn(text)

    def advance(self, num_runs: int) -> None:
        """So many runs have ended."""
        self._done += num_runs
        self._draw()

    def line(self) -> str:
        """The bar as it is."""
        if not self._total:
            return self._text
        passed = time.monotonic() - self._began
        left = _clock(passed / self._done * (self._total - self._done)) if self._done else "?"
        full = WIDTH * self._done // self._total
        drawn = "#" * full + "." * (WIDTH - full)
        return f"runs {self._done}/{self._total} |{drawn}| {_clock(passed)}<{left}{self._behind} {self._text}"

    def _draw(self) -> None:
        now = time.monotonic()
        if self._live:
            sys.stderr.write(f"\r{visible(self.line()[:150])}\x1b[K")
            sys.stderr.flush()
        elif now - self._drawn >= QUIET_SECONDS:
            self._drawn = now
            say(self.line(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show(several: Sequence[Results], form: str) -> str:
    """The cells of one or several results.

    Args:
        form: text, markdown, csv or json.
    """
    if form == "json":
        documents = [
            {"results": str(each.directory), "manifest": each.manifest, "cells": summarize(each.rows)}
            for each in several
        ]
        return json.dumps(documents)
    if form == "csv":
        return _csv(several)
    parts = []
    for each in several:
        lines = summarize(each.rows)
        title = f"{each.manifest['name']}: {_beside(each.manifest)}"
        table = _table([*_HEADS, *RATES[::2], ""], [_cells(line, each.manifest) for line in lines], form)
        parts.append(f"{table}\n\n{title}" if lines else f"nothing was measured\n\n{title}")
    return "\n\n".join(parts)


def _csv(several: Sequence[Results]) -> str:
    spread = [f"{name}_{end}" for name in SPREAD for end in ("mean", "std")]
    names = ["name", *NAMES, *spread, *SPEEDUP, *GAPS, *RATES, *REST]
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for each in several:
        for line in summarize(each.rows):
            values = {"name": each.manifest["name"], **line}
            writer.writerow({name: harmless(value) for name, value in values.items()})
    return file.getvalue().rstrip("\n")


def _cells(line: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    way = " ".join(part for part in ("" if line["way"] == SPECULATIVE else line["way"], line["draft"]) if part)
    places = [line["pair"], line["domain"], f"{line['temperature']:g}", str(line["batch_size"]), way]
    places += ["" if line[name] is None else str(line[name]) for name in ("num_draft_tokens", "rule")]
    if line["error"] is not None and not line["repeats"]:
        return [*places, "", "", "", "", "", f"failed: {line['error']}"]
    figures = [_spread(line, "seconds", 1000), _spread(line, "tokens_per_second"), _speedup(line)]
    rates = ["-" if line[name] is None else f"{line[name]:.2f}" for name in RATES[::2]]
    return [*places, *figures, *rates, _remark(line, manifest)]


def _remark(line: Mapping[str, Any], manifest: Mapping[str, Any]) -> str:
    if line["error"] is not None:
        return f"failed after {line['repeats']} runs: {line['error']}"
    if line["lossless"] is False:
        return "lossy"
    if line["same_tokens"] is False:
        dtype = manifest["pairs"][line["pair"]]["dtype"]
        why = f", as {dtype}'s rounding may" if rounds(dtype) or line["lossless"] is None else ""
        return f"OTHER TOKENS than standard decoding{why}"
    return ""


def _spread(line: Mapping[str, Any], name: str, scale: float = 1.0) -> str:
    """Mean and standard deviation, with three digits of the mean."""
    mean, deviation = line[f"{name}_mean"], line[f"{name}_std"]
    if mean is None:
        return "-"
    digits = max(0, 2 - math.floor(math.log10(mean * scale))) if mean > 0 else 2
    digits = min(digits, 6)
    return f"{mean * scale:.{digits}f}" + ("" if deviation is None else f" ± {deviation * scale:.{digits}f}")


def _speedup(line: Mapping[str, Any]) -> str:
    value, low, high = (line[name] for name in SPEEDUP)
    if value is None:
        return "-"
    return shown(Interval(value, math.nan if low is None else low, math.nan if high is None else high), unit="")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], form: str) -> str:
    """Columns as wide as they need; what stands last may be any length."""
    if form == "markdown":
        lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        for row in (heads, *rows)
    )


def _beside(manifest: Mapping[str, Any]) -> str:
    """What the figures hold for."""
    config = manifest["config"]
    return (
        f"at most {config['max_new_tokens']} new tokens, means ± standard deviations of "
        f"{counted(config['repeats'], 'repeat')}, speedups with 95% intervals, " + made_on(manifest)
    )


def show_comparisons(found: Sequence[Comparison], form: str) -> str:
    """What `--compare` has found."""
    if form == "json":
        return json.dumps([each.to_dict() for each in found])
    heads = ["pair", "domain", "T", "batch", "first", "second", "first is times as fast", ""]
    rows = []
    for each in found:
        first, second = each.cells
        places = [first.pair, first.domain, f"{first.temperature:g}", str(first.batch_size), first.label, second.label]
        ratio = "-" if each.ratio is None else shown(each.ratio, unit="")
        rows.append([*places, ratio, "same tokens" if each.same_tokens else ""])
    if form == "csv":
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([heads[:-1], *(map(harmless, row[:-1]) for row in rows)])
        return file.getvalue().rstrip("\n")
    return _table(heads, rows, form)
