"""The comparison with other engines: which prompts, which setting, what counts as the same answer, what a row shows."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


class _Words:
    eos = frozenset({2})

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(word) for word in messages[0]["content"].split()]


def test_prompts_are_spread_over_each_task_and_no_reported_one_is_tuned_on(
    peers: ModuleType,
) -> None:
    tasks = ["qa", "rag", "translation", "summarization", "math_reasoning", "writing", "coding"]
    rows = [
        {
            "question_id": number,
            "category": tasks[number % 7],
            "turns": ["a " * (5 if number else 1025), "more"],
        }
        for number in range(7 * 16)
    ]
    reported, tuning = peers.choose(rows, _Words(), tuning=2)
    assert len(reported) == 24 and len(tuning) == 12
    ids = [prompt.id for prompt in (*reported, *tuning)]
    assert len(set(ids)) == 36 and 0 not in ids, "the first has too many tokens"
    kinds = [prompt.task for prompt in reported]
    assert {kinds.count(kind) for kind in kinds} == {4} and len(set(kinds[:6])) == 6
    assert [prompt.tokens for prompt in reported] == [[1] * 5] * 24


def measured(
    peers: ModuleType, name: str, seconds: dict[int, float], **changes: Any
) -> list[dict[str, Any]]:
    load, setting = peers.METHODS[name].candidates()[0]
    row = {
        "part": "prompts",
        "method": name,
        "load": load,
        "setting": setting,
        "repeat": 0,
        "tokens": [[5, 6, 7]],
    }
    row |= {"first": 0.5, "num_tokens": 4, "calls": 2}
    return [
        {**row, "prompt": prompt, "seconds": each, **changes} for prompt, each in seconds.items()
    ]


def test_the_fastest_candidate_is_taken_unless_it_fails(peers: ModuleType) -> None:
    method = peers.METHODS["openvino_genai/int8/lookup"]
    assert peers.best([], method) == method.candidates()[0]
    rows = []
    for i, (load, setting) in enumerate(method.candidates()):
        rows += measured(peers, method.name, {1: 40.0 - i}, part="tune", load=load, setting=setting)
    assert peers.best(rows, method) == method.candidates()[-1]
    rows.append({**rows[-1], "prompt": 2, "error": "out of memory"})
    del rows[-1]["seconds"]
    assert peers.best(rows, method) == method.candidates()[-2]


def test_the_table_shows_speeds_ratios_and_failures(peers: ModuleType) -> None:
    ours, theirs, broken = (
        "ours openvino/bfloat16/standard",
        "openvino_genai/bfloat16/lookup",
        "vllm/bfloat16/lookup",
    )
    rows = measured(peers, ours, {1: 2.0, 2: 2.5, 3: 4.0}) + measured(
        peers, ours, {1: 2.2, 2: 2.5}, repeat=1
    )
    rows += measured(peers, theirs, {1: 1.05, 2: 1.25, 3: 2.0})
    rows.append(
        {
            "part": "prompts",
            "method": broken,
            "prompt": 1,
            "repeat": 0,
            "error": "the process ended",
        }
    )
    lines = peers.table(rows).splitlines()
    assert (
        lines[2]
        == "| openvino genai | bfloat16 | lookup | 2.8 | 3.2 | 2.00 | 500 | 2.00 (2.00 to 2.00) | - | - |"
    )
    assert "| 1.4 | 1.3 | 2.00 | 500 | 1.00 (1.00 to 1.00) |" in lines[3]
    assert "fails: the process ended" in lines[4] and len({line.count("|") for line in lines}) == 1


def test_answers_are_compared_with_ours_in_standard_decoding(peers: ModuleType) -> None:
    worker = importlib.import_module("peers_worker")
    assert worker.without_end([5, 2, 9], [2]) == [5] and worker.without_end([5, 6], [2]) == [5, 6]
    assert "/" not in worker.reason(ValueError("no file /a/b/c.bin"))
    rows = measured(peers, "ours openvino/int8/standard", {1: 1.0})
    rows += measured(peers, "llama_cpp/Q8_0/lookup", {1: 1.0}, tokens=[[5, 6]])
    rows += measured(peers, "openvino_genai/int8/lookup", {1: 1.0}, tokens=[[5, 9, 7]])
    rows += measured(peers, "transformers/bfloat16/lookup", {1: 1.0})
    asked: list[Any] = []

    def gap(*request: Any) -> float:
        asked.append(request)
        return 0.25

    shown = peers.with_differences(rows, gap)
    assert asked == [(1, [5, 6], 7, -1), (1, [5], 6, 9)]
    assert [row.get("differs") for row in shown] == [None, 2, 1, None]
    assert "differs" not in shown[3], "there is nothing to compare with"
    assert not any("tokens" in row for row in shown)
    assert "1 of 1 (0.25)" in peers.table(shown) and "0 of 1 |" in peers.table(shown)
    assert peers.fastest(shown).splitlines()[2:] == [
        "| ours openvino | int8 | 4.0 | - | 1 |",
        "| openvino genai | int8 | - | 4.0 (lookup) | 1 |",
        "| llama cpp | Q8_0 | - | 4.0 (lookup) | 1 |",
        "| transformers | bfloat16 | - | 4.0 (lookup) | 1 |",
    ]


def test_measuring_goes_on_where_it_stopped(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []

    class Engine:
        error = None
        versions: dict[str, str] = {}

        def __init__(self, method: Any, load: Any, options: Any) -> None:
            engines.append(method.engine)

        def ask(self, **request: Any) -> dict[str, Any]:
            return {"tokens": [[5]], "seconds": 1.0, "first": 0.5, "num_tokens": 2, "calls": 2}

        def stop(self) -> None:
            pass

        def peak_memory(self) -> int:
            return 2_000_000

        close = stop

    monkeypatch.setattr(peers, "Engine", Engine)
    tasks = ["qa", "rag", "translation", "summarization", "math_reasoning", "writing"]
    lines = [
        {"question_id": i, "category": tasks[i % 6], "turns": [f"word {i}"]} for i in range(48)
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = argparse.Namespace(
        rows=tmp_path / "rows.jsonl", prompts=tmp_path / "questions.jsonl", quiet=None
    )
    options.only, options.engines, options.repeats, options.max_new_tokens = (
        ["torch/int8"],
        {},
        2,
        128,
    )
    tokenizer = _Words()
    peers.Run(options, tokenizer).go("prompts")
    rows = peers.read_rows(options.rows)
    assert (
        engines == ["ours torch"]
        and len([row for row in rows if row["part"] == "prompts"]) == 3 * 24 * 2
    )
    order = [row["method"].split("/")[-1] for row in rows if row["part"] == "prompts"]
    assert len({tuple(order[i : i + 3]) for i in range(0, len(order), 3)}) == 6, "in all orders"
    assert "| 24 of 24" not in peers.table(rows) and " 2 |" in peers.table(rows).splitlines()[2]
    peers.Run(options, tokenizer).go("prompts")
    assert peers.read_rows(options.rows) == rows and len(engines) == 1, "nothing is missing"
    lost = [
        row
        for row in rows
        if (row["part"], row["prompt"], row["repeat"]) != ("prompts", rows[5]["prompt"], 1)
    ]
    options.rows.write_text("".join(json.dumps(row) + "\n" for row in lost))
    peers.Run(options, tokenizer).go("prompts")
    assert len(peers.read_rows(options.rows)) == len(rows) + 1, "what was lost, and the memory held"
