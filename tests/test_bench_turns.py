"""Laws of a benchmark's turns and of its estimates of the time that is left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_bench
from test_pieces import FakeStream

from lightning_specdec.bench import measure as measure_module
from lightning_specdec.bench.measure import Case, planned_runs
from lightning_specdec.bench.pieces import Tape
from lightning_specdec.bench.records import SPECULATIVE, STANDARD, comparisons
from lightning_specdec.bench.results import read
from lightning_specdec.bench.run_progress import RunProgress
from lightning_specdec.config import activity as activity_module

SETTINGS: dict[str, Any] = {"max_new_tokens": 40, "repeats": 2, "num_draft_tokens": [1, 2]}


def test_all_cases_of_a_benchmark_take_turns_within_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[Tape] = []
    run_piece = Tape.run_piece

    def recorded_run_piece(self: Tape, goal: int) -> None:
        turns.append(self)
        run_piece(self, goal)

    monkeypatch.setattr(Tape, "run_piece", recorded_run_piece)
    rows = tiny_bench.measured(tmp_path / "r", tiny_bench.config(**SETTINGS)).rows
    # Standard decoding, and two drafts with two windows each.
    assert len(rows) == 2 * 5
    assert len(set(turns[:5])) == 5
    assert turns[5:10] == turns[:5][::-1]
    for row in rows:
        assert row.pieces is not None
        assert bool(row.pieces) == (row.method != STANDARD)


def test_a_benchmark_of_two_repeats_has_intervals(tmp_path: Path) -> None:
    results = tiny_bench.measured(tmp_path / "r", tiny_bench.config(**SETTINGS))
    assert read(tmp_path / "r").rows == results.rows
    for cell in comparisons(results.rows):
        if cell.case.method == SPECULATIVE:
            assert cell.num_pairs >= 8
            assert cell.walltime_speedup is not None
            assert cell.walltime_speedup.ends is not None


def test_a_repeat_that_was_cut_off_is_completed_beside_standard_decoding(tmp_path: Path) -> None:
    bench_config = tiny_bench.config(**SETTINGS)
    directory = tmp_path / "r"
    complete = tiny_bench.measured(directory, bench_config).rows
    path = directory / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:7]))

    resumed = tiny_bench.measured(directory, bench_config).rows
    assert path.read_text().startswith("".join(lines[:7]))
    assert [row.cell for row in resumed] == [row.cell for row in complete]
    assert all(row.pieces for row in resumed if row.method == SPECULATIVE)
    assert all(row.same_tokens for row in resumed)


def test_a_case_that_fails_in_a_repeat_leaves_the_turns_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_stream = Case._open

    def failing_open(self: Case, number: int, repeat: int) -> Any:
        if self.draft == "ngram" and number == 1 and repeat == 1:
            raise RuntimeError("no memory")
        return open_stream(self, number, repeat)

    monkeypatch.setattr(Case, "_open", failing_open)
    bench_config = tiny_bench.config(**{**SETTINGS, "num_draft_tokens": [2], "repeats": 3})
    rows = tiny_bench.measured(tmp_path / "r", bench_config).rows
    assert [row.error for row in rows if row.draft == "ngram"] == [None, "no memory"]
    assert [row.repeat for row in rows if row.draft == "model"] == [0, 1, 2]
    assert [row.repeat for row in rows if row.method == STANDARD] == [0, 1, 2]


def test_cases_whose_states_do_not_fit_the_memory_take_turns_after_whole_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_open = 0
    run_piece = Tape.run_piece
    tapes: set[Tape] = set()

    def counted_run_piece(self: Tape, goal: int) -> None:
        nonlocal most_open
        tapes.add(self)
        run_piece(self, goal)
        most_open = max(most_open, sum(tape.num_bytes > 0 for tape in tapes))

    monkeypatch.setattr(Tape, "run_piece", counted_run_piece)
    bench_config = tiny_bench.config(**SETTINGS)
    tiny_bench.measured(tmp_path / "much", bench_config)
    assert most_open == 5

    most_open = 0
    monkeypatch.setattr(measure_module, "available_bytes", lambda device: 1000)
    rows = tiny_bench.measured(tmp_path / "little", bench_config).rows
    assert most_open == 1
    assert all(row.same_tokens for row in rows)
    # Two prompts.
    assert [len(row.pieces or []) for row in rows[:5]] == [0, 2, 2, 2, 2]


# --- the estimate ---


def tape_of(seconds_per_token: float, *, once: float, num_answers: int) -> Tape:
    """A tape of answers of 40 tokens, whose first step takes longer by what happens once."""

    class Begun(FakeStream):
        @property
        def seconds(self) -> float:
            extra_seconds = once if self._num_steps else 0.0
            return super().seconds + extra_seconds

    def open_answer(number: int) -> FakeStream:
        kind = Begun if number == 0 else FakeStream
        return kind([1] * 40, seconds_per_token)

    return Tape(open_answer, num_answers=num_answers)


@pytest.mark.parametrize("once", [0.0, 500.0])
def test_after_the_first_run_the_estimate_holds_whatever_happened_once(once: float) -> None:
    """Cases of different speed; eight answers of forty tokens, and one warm-up, take turns."""
    speeds = {"standard": 1.0, "fast": 0.3, "slow": 3.0}
    progress = RunProgress("measuring", dict.fromkeys(speeds, 4))
    assert progress.seconds_left is None
    tapes = {}
    for name, seconds in speeds.items():
        tapes[name] = tape_of(seconds, once=once, num_answers=8)
    for goal in range(12, 340, 12):
        for name, tape in tapes.items():
            if not tape.is_over:
                tape.run_piece(goal)
                progress.after_piece(name, tape, 40)
                if tape.is_over:
                    progress.finish_run(name)
        if goal == 60:
            # Each answer takes 40, 12 or 120 s, and 62 of 32 runs' tokens are there.
            true_seconds = sum(4 * 320 * speed for speed in speeds.values())
            true_seconds -= sum(60 * speed for speed in speeds.values())
            assert true_seconds / 1.5 < progress.seconds_left < true_seconds * 1.5  # type: ignore[operator]
    assert progress.num_done == 3
    assert progress.seconds_left == pytest.approx(3 * 320 * 4.3, rel=0.01)
    assert progress.describe() == f"measuring: 3 of 12 runs, about {3 * 320 * 4.3:.0f} s left"


def test_a_case_that_fails_is_no_part_of_the_time_left() -> None:
    progress = RunProgress("measuring", {"a": 2, "b": 2})
    tape = tape_of(1.0, once=0.0, num_answers=1)
    tape.run_piece(40)
    progress.after_piece("a", tape, 40)
    progress.finish_run("a")
    assert progress.seconds_left == pytest.approx(3 * 40)
    progress.drop("b")
    assert progress.seconds_left == pytest.approx(40)
    assert progress.describe() == "measuring: 1 of 2 runs, about 40 s left"


def test_a_case_of_another_group_is_expected_to_be_as_fast_as_the_same_way() -> None:
    cells = {("greedy", "fast"): 1, ("greedy", "slow"): 1, ("drawn", "slow"): 1}
    progress = RunProgress("measuring", cells, {cell: cell[1] for cell in cells})
    for cell, seconds in ((("greedy", "fast"), 1.0), (("greedy", "slow"), 4.0)):
        tape = tape_of(seconds, once=0.0, num_answers=1)
        tape.run_piece(40)
        progress.after_piece(cell, tape, 40)
        progress.finish_run(cell)
    assert progress.seconds_left == pytest.approx(4.0 * 40)


def test_what_is_known_is_not_planned() -> None:
    bench_config = tiny_bench.config(repeats=3, warmup=2)
    (group,) = tiny_bench.pair().cases(bench_config)
    known = {(group[1].cell, repeat): group[1].row(repeat) for repeat in range(3)}
    runs = planned_runs(group, repeats=3, warmup=2, known=known)
    assert list(runs.values()) == [5, 0, 5]


def test_a_benchmark_in_python_is_logged_while_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "lightning_specdec")
    monkeypatch.setattr(activity_module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(activity_module, "REPORT_SECONDS", 0.0)
    tiny_bench.measured(tmp_path / "r", tiny_bench.config(**SETTINGS))
    assert "tiny: measuring: 10 of 10 runs, about 0 s left" in caplog.messages
    assert "tiny: measuring: 5 of 10 runs, about " in "\n".join(caplog.messages)
