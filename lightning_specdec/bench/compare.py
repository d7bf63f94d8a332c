"""Two ways of decoding against each other: the same prompts, in turn, and what lies between them.

Knows nothing of files, nor of how figures are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_specdec.bench.config import BenchConfig
from lightning_specdec.bench.config_entries import OUTSIDE
from lightning_specdec.bench.isolated import best_setting
from lightning_specdec.bench.matrix import Cell, Subject, cells
from lightning_specdec.bench.measure import measure, watch
from lightning_specdec.bench.results import Row
from lightning_specdec.bench.statistics import Interval, ratio_interval
from lightning_specdec.bench.ways import Prepared, window_of


@dataclass(frozen=True)
class Comparison:
    """Two cells of one group.

    Args:
        cells: the two.
        rows: of each cell, one for each repeat.
        ratio: the second's seconds for each new token / the first's: how many times as fast the first one is.
        same_tokens: whether both gave the same ones in every repeat.
    """

    cells: tuple[Cell, Cell]
    rows: tuple[list[Row], list[Row]]
    ratio: Interval
    same_tokens: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        first, second = self.cells
        return {
            "pair": first.pair,
            "domain": first.domain,
            "temperature": first.temperature,
            "batch_size": first.batch_size,
            "first": first.label,
            "second": second.label,
            "ratio": self.ratio.value,
            "interval": [self.ratio.low, self.ratio.high],
            "same_tokens": self.same_tokens,
            "seconds": [[row["seconds"] for row in rows] for rows in self.rows],
            "num_new_tokens": [[row["num_new_tokens"] for row in rows] for rows in self.rows],
        }


def find(name: str, config: BenchConfig, subject: Subject) -> list[Cell]:
    """The cells that a name means, one for each group: NAME or NAME:WINDOW, a draft's or a way's.

    Without a window it is the first of the config; the rule is the first too.

    Raises:
        ValueError: nothing is called so.
    """
    wanted, _, window = name.partition(":")
    chosen: int | str = int(window) if window.isdigit() else window or config.num_draft_tokens[0]
    rule = config.rules[0]
    found = []
    for group in cells(config, subject):
        for cell in group:
            guesses = cell.way == "speculative" and cell.draft == wanted
            if (guesses and (cell.num_draft_tokens, cell.rule) == (chosen, rule)) or (
                not guesses and cell.way == wanted and not window
            ):
                found.append(cell)
                break
        else:
            ways = dict.fromkeys(each.way for each in group if each.way != "speculative")
            windows = ", ".join(map(str, config.num_draft_tokens))
            raise ValueError(
                f"{name!r} is nothing that this config measures: give one of {', '.join(subject.drafts)}, with a "
                f"window of {windows} as NAME:WINDOW, or one of {', '.join(ways)}"
            )
    return found


def compare(config: BenchConfig, subject: Subject, first: str, second: str) -> Iterator[Comparison]:
    """Measure both in every group of the matrix, and give each comparison as it is there.

    Raises:
        ValueError: nothing is called so, or it cannot decode.
    """
    pairs = list(zip(find(first, config, subject), find(second, config, subject), strict=True))
    if any(one == other for one, other in pairs):
        raise ValueError(f"{first!r} and {second!r} are the same: compare two that differ")
    return (_compared(pair, config, subject) for pair in pairs)


def _compared(pair: tuple[Cell, Cell], config: BenchConfig, subject: Subject) -> Comparison:
    ready = []
    for cell in pair:
        setting = None
        if cell.way in OUTSIDE:
            setting = best_setting(cell, subject, config)["setting"]
        ready.append(watch(cell, subject, config, Prepared(window_of(cell, subject), setting)))
    rows: tuple[list[Row], list[Row]] = ([], [])
    for repeat in range(config.repeats):
        for cell, prepared, own in zip(pair, ready, rows, strict=True):
            own.append(measure(cell, subject, config, prepared, repeat=repeat))
    same = all(one["tokens_sha256"] == other["tokens_sha256"] for one, other in zip(*rows, strict=True))
    times = [[_seconds_per_token(row, pair[0].batch_size) for row in own] for own in rows]
    return Comparison(pair, rows, ratio_interval(times[1], times[0]), same)


def _seconds_per_token(row: Row, batch_size: int) -> list[float]:
    """Of each prompt by itself; of prompts that were decoded together, of all."""
    if batch_size > 1:
        return [row["seconds"] / row["num_new_tokens"]]
    return [seconds / count for seconds, count in zip(row["prompt_seconds"], row["prompt_new_tokens"], strict=True)]
