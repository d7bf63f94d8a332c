"""Two ways of decoding against each other: the same prompts, in turn, and what lies between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import SPECULATIVE
from lightning_specdec.bench.failures import in_one_line
from lightning_specdec.bench.matrix import Cell, cells
from lightning_specdec.bench.measure import measure
from lightning_specdec.bench.row import ResultRow
from lightning_specdec.bench.run import caught, place, prepare
from lightning_specdec.bench.runner import no_collection
from lightning_specdec.bench.speed import timings
from lightning_specdec.bench.statistics import Interval, finite, ratio_estimate
from lightning_specdec.bench.subject import Subject
from lightning_specdec.bench.ways import Prepared


@dataclass(frozen=True)
class Comparison:
    """Two cells of one group.

    Args:
        cells: the two.
        rows: of each cell, one for each repeat that both have finished.
        ratio: the first's walltime_speedup with the second in standard decoding's place: how many times as fast the
            first one is. None where nothing was timed.
        same_tokens: whether both gave the same ones in every repeat.
    """

    cells: tuple[Cell, Cell]
    rows: tuple[list[ResultRow], list[ResultRow]]
    ratio: Interval | None
    same_tokens: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first, second = self.cells
        value, low, high = map(finite, (None, None, None) if self.ratio is None else self.ratio)
        return {
            "pair": first.pair,
            "domain": first.domain,
            "temperature": first.temperature,
            "batch_size": first.batch_size,
            "first": first.label,
            "second": second.label,
            "ratio": value,
            "interval": [low, high],
            "same_tokens": self.same_tokens,
            "seconds": [[row.seconds for row in rows] for rows in self.rows],
            "num_new_tokens": [[row.num_new_tokens for row in rows] for rows in self.rows],
        }


@dataclass(frozen=True)
class Failed:
    """Two cells of which one could not decode.

    Args:
        cell: that one.
        error: what it failed by, in one line.
    """

    cell: Cell
    error: str

    def __str__(self) -> str:
        return f"{place(self.cell)}: {self.cell.label} failed: {self.error}"


def find(name: str, config: BenchConfig, subject: Subject) -> list[Cell]:
    """The cells that a name means, one for each group: NAME or NAME:WINDOW, a draft's or a way's.

    Without a window it is the first of the config; the rule is the first too.

    Raises:
        ValueError: nothing is called so.
    """
    wanted, _, window = name.partition(":")
    chosen: int | str = int(window) if window.isdecimal() else window or config.num_draft_tokens[0]
    rule = config.rules[0]
    found = []
    for group in cells(config, subject):
        for cell in group:
            guesses = cell.way == SPECULATIVE and cell.draft == wanted
            if (guesses and (cell.num_draft_tokens, cell.rule) == (chosen, rule)) or (
                not guesses and cell.way == wanted and not window
            ):
                found.append(cell)
                break
        else:
            ways = dict.fromkeys(each.way for each in group if each.way != SPECULATIVE)
            windows = ", ".join(map(str, config.num_draft_tokens))
            raise ValueError(
                f"{name!r} is nothing that this config measures: give one of {', '.join(subject.drafts)}, with a "
                f"window of {windows} as NAME:WINDOW, or one of {', '.join(ways)}"
            )
    return found


def compare(config: BenchConfig, subject: Subject, first: str, second: str) -> Iterator[Comparison | Failed]:
    """Measure both in every group of the matrix, and give each comparison as it is there; where one of them fails, that
    of what both had finished, then the failure, and the next group.

    Raises:
        ValueError: nothing is called so.
        KeyboardInterrupt: Ctrl-C, behind the comparison of what was finished.
    """
    pairs = list(zip(find(first, config, subject), find(second, config, subject), strict=True))
    if any(one == other for one, other in pairs):
        raise ValueError(f"{first!r} and {second!r} are the same: compare two that differ")
    return _each(pairs, config, subject)


def _each(pairs: Sequence[tuple[Cell, Cell]], config: BenchConfig, subject: Subject) -> Iterator[Comparison | Failed]:
    """The comparisons of checked pairs."""
    for pair in pairs:
        rows: tuple[list[ResultRow], list[ResultRow]] = ([], [])
        failed, interrupted = None, False
        try:
            failed = _take_turns(pair, rows, config, subject)
        except KeyboardInterrupt:
            interrupted = True
        if both := min(map(len, rows)):
            yield _comparison(pair, (rows[0][:both], rows[1][:both]))
        if failed is not None:
            yield failed
        if interrupted:
            raise KeyboardInterrupt


def _take_turns(
    pair: tuple[Cell, Cell], rows: tuple[list[ResultRow], list[ResultRow]], config: BenchConfig, subject: Subject
) -> Failed | None:
    """Make both ready and add the rows of their repeats, until one of them fails."""
    ready: list[Prepared] = []
    try:
        for cell in pair:
            ready.append(prepare(cell, subject, config))
        with no_collection():
            for repeat in range(config.repeats):
                for cell, prepared, own in zip(pair, ready, rows, strict=True):
                    own.append(measure(cell, subject, config, prepared, repeat=repeat))
    except caught(cell) as error:
        return Failed(cell, in_one_line(error))
    return None


def _comparison(pair: tuple[Cell, Cell], rows: tuple[list[ResultRow], list[ResultRow]]) -> Comparison:
    same = all(one.tokens_sha256 == other.tokens_sha256 for one, other in zip(*rows, strict=True))
    pairs = [(other.to_dict(), one.to_dict()) for one, other in zip(*rows, strict=True)]
    found = timings(pairs, batch_size=pair[0].batch_size)
    return Comparison(pair, rows, None if found is None else ratio_estimate(*found[:2]).interval, same)
