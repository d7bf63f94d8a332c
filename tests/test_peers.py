"""The comparison with other engines: its prompts, settings, comparison of answers, and tables."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peers_rows import WordTokenizer, measured

ROOT = Path(__file__).parent.parent
TASKS = ["qa", "rag", "translation", "summarization", "math_reasoning", "writing"]
NUM_REPORTED = 24
"""Prompts that are reported: four of each task."""


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


def test_prompts_are_spread_over_each_task_and_no_reported_one_is_tuned_on(
    peers: ModuleType,
) -> None:
    # Questions of "coding" belong to no task of the comparison.
    categories = [*TASKS, "coding"]
    rows = []
    for number in range(7 * 16):
        category = categories[number % 7]
        rows.append({"question_id": number, "category": category, "turns": ["a " * 5, "more"]})
    rows[0]["turns"] = ["a " * 1025, "more"]

    reported, tuning = peers.choose(rows, WordTokenizer(), tuning=2)
    assert len(reported) == NUM_REPORTED
    assert len(tuning) == 12
    ids = {prompt.id for prompt in (*reported, *tuning)}
    assert len(ids) == 36
    assert 0 not in ids, "this question has too many tokens"

    reported_tasks = [prompt.task for prompt in reported]
    for task in reported_tasks:
        assert reported_tasks.count(task) == 4
    assert len(set(reported_tasks[:6])) == 6
    for prompt in reported:
        assert prompt.tokens == [1] * 5


def test_the_fastest_candidate_is_taken_unless_it_fails(peers: ModuleType) -> None:
    method = peers.METHODS["openvino_genai/int8/lookup"]
    candidates = method.candidates()
    assert peers.best([], method) == candidates[0]

    # Each candidate is faster than the one before it.
    rows = []
    for i, (load, setting) in enumerate(candidates):
        seconds = {1: 40.0 - i}
        rows += measured(
            peers.METHODS, method.name, seconds, part="tune", load=load, setting=setting
        )
    assert peers.best(rows, method) == candidates[-1]

    failed_row = {**rows[-1], "prompt": 2, "error": "out of memory"}
    del failed_row["seconds"]
    rows.append(failed_row)
    assert peers.best(rows, method) == candidates[-2]


def test_the_table_shows_speeds_ratios_and_failures(peers: ModuleType) -> None:
    our_name = "ours openvino/bfloat16/standard"
    rows = measured(peers.METHODS, our_name, {1: 2.0, 2: 2.5, 3: 4.0})
    rows += measured(peers.METHODS, our_name, {1: 2.2, 2: 2.5}, repeat=1)
    rows += measured(peers.METHODS, "openvino_genai/bfloat16/lookup", {1: 1.05, 2: 1.25, 3: 2.0})
    failed_row = {
        "part": "prompts",
        "method": "vllm/bfloat16/lookup",
        "prompt": 1,
        "repeat": 0,
        "error": "the process ended",
    }
    rows.append(failed_row)

    lines = peers.table(rows).splitlines()
    num_borders = lines[0].count("|")
    for line in lines:
        assert line.count("|") == num_borders
    method_cells = "| openvino genai | bfloat16 | lookup |"
    assert lines[2] == f"{method_cells} 2.8 | 3.2 | 2.00 | 500 | 2.00 (2.00 to 2.00) | - | - |"
    assert "| 1.4 | 1.3 | 2.00 | 500 | 1.00 (1.00 to 1.00) |" in lines[3]
    assert "fails: the process ended" in lines[4]


def test_a_worker_cuts_answers_at_the_end_and_hides_paths(peers: ModuleType) -> None:
    worker = importlib.import_module("peers_worker")
    assert worker.without_end([5, 2, 9], [2]) == [5]
    assert worker.without_end([5, 6], [2]) == [5, 6]
    assert "/" not in worker.reason(ValueError("no file /a/b/c.bin"))


def test_answers_are_compared_with_ours_in_standard_decoding(peers: ModuleType) -> None:
    rows = measured(peers.METHODS, "ours openvino/int8/standard", {1: 1.0})
    rows += measured(peers.METHODS, "llama_cpp/Q8_0/lookup", {1: 1.0}, tokens=[[5, 6]])
    rows += measured(peers.METHODS, "openvino_genai/int8/lookup", {1: 1.0}, tokens=[[5, 9, 7]])
    rows += measured(peers.METHODS, "transformers/bfloat16/lookup", {1: 1.0})
    requests: list[Any] = []

    def gap(*request: Any) -> float:
        requests.append(request)
        return 0.25

    compared_rows = peers.with_differences(rows, gap)
    assert requests == [(1, [5, 6, 7], 2, -1), (1, [5, 6, 7], 1, 9)]
    assert [row.get("differs") for row in compared_rows] == [None, 2, 1, None]
    assert "differs" not in compared_rows[3], "there is no answer of ours to compare with"
    for row in compared_rows:
        assert "tokens" not in row
    table = peers.table(compared_rows)
    assert "1 of 1 (0.25)" in table
    assert "0 of 1 |" in table
    assert peers.fastest(compared_rows).splitlines()[2:] == [
        "| ours openvino | int8 | 4.0 | - | 1 |",
        "| openvino genai | int8 | - | 4.0 (lookup) | 1 |",
        "| llama cpp | Q8_0 | - | 4.0 (lookup) | 1 |",
        "| transformers | bfloat16 | - | 4.0 (lookup) | 1 |",
    ]


class FakeEngine:
    """Answers each request at once. `started` lists the engines in the order of their starts."""

    error = None
    versions: dict[str, str] = {}
    started: list[str] = []

    def __init__(self, method: Any, load: Any, options: Any) -> None:
        self.started.append(method.engine)

    def ask(self, **request: Any) -> dict[str, Any]:
        return {"tokens": [[5]], "seconds": 1.0, "first": 0.5, "num_tokens": 2, "calls": 2}

    def stop(self) -> None:
        pass

    def peak_memory(self) -> int:
        return 2_000_000

    close = stop


@pytest.fixture
def measurement(
    peers: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> argparse.Namespace:
    """Options of a measurement of 48 questions, whose engines are fake."""
    monkeypatch.setattr(FakeEngine, "started", [])
    monkeypatch.setattr(peers, "Engine", FakeEngine)
    questions = tmp_path / "questions.jsonl"
    lines = []
    for i in range(48):
        question = {"question_id": i, "category": TASKS[i % 6], "turns": [f"word {i}"]}
        lines.append(json.dumps(question))
    questions.write_text("\n".join(lines))
    return argparse.Namespace(
        rows=tmp_path / "rows.jsonl",
        prompts=questions,
        quiet=None,
        only=["torch/int8"],
        engines={},
        repeats=2,
        max_new_tokens=128,
        warm_up_tokens=24,
        num_prompts=24,
        draft=None,
    )


def test_every_prompt_goes_through_the_methods_in_changing_order(
    peers: ModuleType, measurement: argparse.Namespace
) -> None:
    num_methods = 3
    peers.Run(measurement, WordTokenizer()).go("prompts")
    assert FakeEngine.started == ["ours torch"]
    rows = peers.read_rows(measurement.rows)
    decodings = [row["method"].split("/")[-1] for row in rows if row["part"] == "prompts"]
    assert len(decodings) == num_methods * NUM_REPORTED * measurement.repeats

    orders = set()
    for start in range(0, len(decodings), num_methods):
        orders.add(tuple(decodings[start : start + num_methods]))
    assert len(orders) == 6, "methods run in all orders"

    table = peers.table(rows)
    assert "| 24 of 24" not in table
    assert " 2 |" in table.splitlines()[2]


def test_a_measurement_continues_where_it_stopped(
    peers: ModuleType, measurement: argparse.Namespace
) -> None:
    peers.Run(measurement, WordTokenizer()).go("prompts")
    rows = peers.read_rows(measurement.rows)

    # Without missing rows, nothing is measured.
    peers.Run(measurement, WordTokenizer()).go("prompts")
    assert peers.read_rows(measurement.rows) == rows
    assert len(FakeEngine.started) == 1

    # Lost rows are measured again. Each time an engine is used, its memory is one more row.
    lost_key = ("prompts", rows[5]["prompt"], 1)
    remaining_rows = []
    for row in rows:
        if (row["part"], row["prompt"], row["repeat"]) != lost_key:
            remaining_rows.append(row)
    measurement.rows.write_text("".join(json.dumps(row) + "\n" for row in remaining_rows))
    peers.Run(measurement, WordTokenizer()).go("prompts")
    assert len(peers.read_rows(measurement.rows)) == len(rows) + 1
