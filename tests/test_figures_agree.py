"""Laws of figures that stand beside each other: speeds, their ratio, and its interval agree."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cli_fixtures import here, succeed
from report_records import cells_of, standard, timed

from lightning_specdec.bench.records import Comparison
from lightning_specdec.bench.statistics import Pair, piece_interval
from lightning_specdec.bench.table import comparison_table, listing
from lightning_specdec.bench.verdict import level_among
from lightning_specdec.cli import decode

__all__ = ["here"]

RNN = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
NUM_TOKENS = 4800


def alternated(repeats: Sequence[Sequence[Pair]], *, num_tokens: int = NUM_TOKENS) -> Comparison:
    """A comparison whose repeats took turns: the seconds of both methods for each piece.

    Args:
        num_tokens: of the method in each repeat; standard decoding has `NUM_TOKENS`.
    """
    rows = []
    for repeat, pieces in enumerate(repeats):
        standard_seconds = [sum(piece[0] for piece in pieces)]
        seconds = [sum(piece[1] for piece in pieces)]
        rows.append(
            timed(standard_seconds, "standard", tokens=[NUM_TOKENS], repeat=repeat, pieces=[])
        )
        rows.append(timed(seconds, tokens=[num_tokens], repeat=repeat, pieces=list(pieces)))
    return cells_of(rows)[1]


NOISY = [
    [(1.0, 0.9), (1.1, 0.8)],
    [(1.0, 0.5), (0.9, 0.4)],
    # A burst of load that hit both methods.
    [(9.0, 8.0), (8.0, 9.0)],
]


def test_the_speeds_of_methods_that_took_turns_have_the_ratio_that_is_printed() -> None:
    comparison = alternated(NOISY)
    line = decode.describe_speed(comparison)
    ratio, standard_speed, speed = (
        float(text.replace(",", ""))
        for text in re.search(r"([\d.]+)x.*\(([\d.,]+) -> ([\d.,]+) tokens/s", line).groups()  # type: ignore[union-attr]
    )
    assert comparison.tokens_per_second == pytest.approx(3 * NUM_TOKENS / 19.6)
    assert speed / standard_speed == pytest.approx(ratio, abs=0.01)


def test_speeds_agree_with_the_ratio_though_the_texts_differ_in_length() -> None:
    # The second piece is text that standard decoding did not write.
    comparison = alternated([[(2.0, 1.0)], [(2.1, 1.0)]], num_tokens=6000)
    assert comparison.tokens_per_second == pytest.approx(6000.0)
    assert comparison.standard_tokens_per_second == pytest.approx(6000.0 / 2.05)
    summary = comparison.summary()
    assert summary["standard"]["tokens_per_second"] == comparison.standard_tokens_per_second
    assert summary["speculative"]["tokens_per_second"] == comparison.tokens_per_second
    speeds_line = next(line for line in listing(comparison).splitlines() if "tokens per" in line)
    assert speeds_line.split()[3:] == ["2,926.8", "6,000.0"]


def test_a_table_of_methods_that_took_turns_has_the_speed_of_standard_decoding_that_fits() -> None:
    rows = [*alternated(NOISY).standard, *alternated(NOISY).rows]
    standard_cell, cell = cells_of(rows)
    assert standard_cell.tokens_per_second is not None
    assert cell.tokens_per_second is not None
    assert cell.walltime_speedup is not None
    quotient = cell.tokens_per_second / standard_cell.tokens_per_second
    assert quotient == pytest.approx(cell.walltime_speedup.value)
    # The mean of three repeats.
    figures = ("seconds", "tokens_per_second")
    lines = comparison_table([standard_cell, cell], figures=figures).splitlines()[-2:]
    assert [line.split()[-2:] for line in lines] == [["7", "685.7"], ["6.53", "734.7"]]


def test_repeats_that_ran_after_each_other_keep_their_medians() -> None:
    rows = []
    for repeat, seconds in enumerate([1.0, 2.0, 9.0]):
        rows.append(timed([2 * seconds], "standard", repeat=repeat))
        rows.append(timed([seconds], repeat=repeat))
    cell = cells_of(rows)[1]
    assert cell.tokens_per_second == 48 / 2.0
    assert cell.standard_tokens_per_second == pytest.approx(48 / 4.0)


def test_a_comparison_prints_every_interval_at_its_level() -> None:
    comparison = alternated(NOISY)
    level = level_among(12)
    stricter = Comparison(comparison.case, comparison.rows, comparison.standard, level=level)
    expected = piece_interval(comparison.pieces, level=level)
    assert stricter.walltime_speedup == expected
    assert f"{expected.low:.2f}, {expected.high:.2f}" in stricter.verdict.text
    assert "(99.2% interval)" in stricter.verdict.text
    assert json.loads(json.dumps(stricter.summary()))["walltime_speedup_low"] == expected.low


def test_standard_decoding_alone_has_its_speed() -> None:
    cell = cells_of([standard(2)])[0]
    assert cell.tokens_per_second == 48
    assert decode.describe_speed(cell) == "48.0 tokens/s"


@pytest.mark.usefixtures("here")
def test_a_sweep_prints_one_interval_for_its_answer() -> None:
    """The row of the best way and the sentence below the table have the same figures."""
    command = ("sweep", "--ckpt", RNN, "--minutes", "0.1", "--max_new_tokens", "30")
    text = succeed(*command, "--num_draft_tokens", "2", "4").out
    table, _, rest = text.partition("\n\n")
    sentence = rest.splitlines()[0]
    figures = re.search(r"([\d.]+)x (\[[\d.]+, [\d.]+\])", sentence)
    assert figures is not None, sentence
    assert f"{figures[1]} {figures[2]}" in table
    assert "tokens per" not in table
    assert re.search(r"\nstandard decoding has [\d,.]+ tokens/s; the intervals are of 9", text)
