"""The comparison of a target and a draft model with other engines: prompts, rows, and tables."""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peers_rows import WordTokenizer, measured

ROOT = Path(__file__).parent.parent
TASKS = ["qa", "rag", "translation", "summarization", "math_reasoning", "writing"]
NUM_PROMPTS = 6
"""Prompts of each source."""
NUM_SLOW = 2
"""Prompts of each source for slow engines."""


class FakeEngine:
    """Answers each request at once. `started` lists the arguments of all engines."""

    error = None
    versions: dict[str, str] = {}
    started: list[tuple[str, Any]] = []

    def __init__(self, method: Any, load: Any, options: Any) -> None:
        self.started.append((method.engine, load))

    def ask(self, **request: Any) -> dict[str, Any]:
        return {"tokens": [[5]], "seconds": 1.0, "first": 0.5, "num_tokens": 2, "calls": 2}

    def stop(self) -> None:
        pass

    def peak_memory(self) -> int:
        return 2_000_000

    close = stop


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("peers")


@pytest.fixture
def humaneval_path(tmp_path: Path) -> Path:
    """A file of 12 problems."""
    lines = []
    for number in range(12):
        problem = {"task_id": f"HumanEval/{number}", "prompt": f"def f{number}():\n    '''x'''\n"}
        lines.append(json.dumps(problem))
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.fixture
def measurement(
    peers: ModuleType,
    humaneval_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> argparse.Namespace:
    """Options of a measurement of 12 prompts, whose engines are fake."""
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
        humaneval=humaneval_path,
        draft="draft",
        quiet=None,
        only=[""],
        engines={"openvino_genai": "python"},
        repeats=1,
        max_new_tokens=64,
        warm_up_tokens=4,
        num_prompts=NUM_PROMPTS,
        few=NUM_SLOW,
    )


def test_problems_are_spread_over_the_file(peers: ModuleType, humaneval_path: Path) -> None:
    human_eval = importlib.import_module("human_eval")
    problems = human_eval.load(humaneval_path, WordTokenizer(), 6)
    assert [name for name, _ in problems] == [f"HumanEval/{number}" for number in range(0, 12, 2)]

    unpacked_path = humaneval_path.with_suffix("")
    unpacked_path.write_bytes(gzip.decompress(humaneval_path.read_bytes()))
    assert human_eval.load(unpacked_path, WordTokenizer(), 6) == problems

    with pytest.raises(SystemExit, match="has 12 problems, 13 are needed"):
        human_eval.load(humaneval_path, WordTokenizer(), 13)


def test_each_method_of_a_pair_answers_the_prompts_of_both_sources(
    peers: ModuleType, measurement: argparse.Namespace
) -> None:
    run = peers.Run(measurement, WordTokenizer())
    assert {method.name for method in run.methods} == set(peers.PAIR_METHODS)
    for part in peers.PAIR_PARTS:
        run.go(part)

    for part in peers.PAIR_PARTS:
        for method in run.methods:
            answers = []
            for row in run.rows:
                if row["part"] == part and row["method"] == method.name:
                    answers.append(row["prompt"])
            assert len(set(answers)) == len(answers)
            assert len(answers) == (NUM_SLOW if method.is_slow else NUM_PROMPTS), method.name

    # Methods share a process only if they load the same models.
    processes = [json.dumps(arguments, sort_keys=True) for arguments in FakeEngine.started]
    num_processes = len(set(processes))
    assert len(processes) == num_processes * len(peers.PAIR_PARTS)
    for _, load in FakeEngine.started:
        assert "draft" not in load or load["draft"] is True


def test_no_method_of_a_pair_has_settings_to_choose_from(peers: ModuleType) -> None:
    assert len(peers.PAIR_METHODS) == 17
    for method in peers.PAIR_METHODS.values():
        assert len(method.candidates()) == 1
        assert method.our_standard == "ours openvino/int8/standard"


def humaneval_rows(
    peers: ModuleType,
    name: str,
    seconds: dict[str, float],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Rows of a method of the pair, with the seconds of each prompt."""
    return measured(peers.PAIR_METHODS, name, seconds, part="humaneval", **changes)


def test_the_tables_of_a_pair_compare_methods_on_the_prompts_that_both_answered(
    peers: ModuleType,
) -> None:
    rows = humaneval_rows(peers, "ours openvino/int8/standard", {"a": 2.0, "b": 4.0})
    rows += humaneval_rows(peers, "ours openvino/int8/draft model, 3 tokens", {"a": 1.0, "b": 2.0})
    rows += humaneval_rows(peers, "ours openvino/int8/draft model, 5 tokens", {"a": 2.0, "b": 2.0})
    rows += humaneval_rows(peers, "openvino_genai/int8/standard", {"a": 2.0, "b": 2.0})
    rows += humaneval_rows(
        peers, "openvino_genai/int8/draft model, 5 tokens", {"a": 2.0, "b": 2.5}, tokens=[[5, 9]]
    )
    rows += humaneval_rows(peers, "transformers/float32/standard", {"a": 8.0}, tokens=[[5]])
    compared_rows = peers.with_differences(rows, lambda *_: 0.25, peers.PAIR_METHODS)

    table = peers.table(compared_rows, "humaneval", peers.PAIR_METHODS).splitlines()
    fastest = "| ours openvino | int8 | draft model, 3 tokens | 2.7 | 3.0 | 2.00 | 500 | 2.00"
    assert table[2].startswith(fastest)
    assert table[-1].startswith("| transformers | float32 | standard | 0.5 |")
    assert "0.25" in table[-1], "compared with our standard decoding of the same prompt"
    assert "1 of 1 (0.25)" in table[-1]

    values = {}
    for line in peers.pair_ratios(compared_rows).splitlines()[2:]:
        source, label, value = [cell.strip() for cell in line.split("|")[1:4]]
        assert source == "HumanEval"
        values[label] = value
    assert values == {
        "our draft model over our standard decoding": "2.00",
        "our fastest over the fastest of the other engines": "1.33",
        "standard over OpenVINO GenAI's": "0.67",
        "draft model over OpenVINO GenAI's": "1.50",
        "seconds to the first token over OpenVINO GenAI's, standard": "1.00",
    }


def test_the_rounds_of_our_methods_are_divided_into_phases(peers: ModuleType) -> None:
    phases = {"draft": 0.2, "verify": 0.4, "accept": 0.02, "rest": 0.01}
    rows = humaneval_rows(
        peers, "ours openvino/int8/draft model, 3 tokens", {"a": 1.0, "b": 2.0}, phases=phases
    )
    line = peers.rounds_table(rows).splitlines()[2]
    assert line == "| HumanEval | draft model, 3 tokens | 4 | 100.00 | 200.00 | 10.00 | 5.00 |"


def test_calls_of_llama_cpp_are_its_tokens_without_the_accepted_ones(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = importlib.import_module("peers_worker")
    bodies: list[dict[str, Any]] = []

    def respond(request: Any) -> io.BytesIO:
        bodies.append(json.loads(request.data))
        timings = {"predicted_n": 12, "draft_n": 9, "draft_n_accepted": 7, "prompt_ms": 250.0}
        return io.BytesIO(json.dumps({"tokens": [5, 6], "timings": timings}).encode())

    monkeypatch.setattr(worker.urllib.request, "urlopen", respond)
    server = worker.LlamaServer.__new__(worker.LlamaServer)
    server.url = "http://127.0.0.1:1"
    answer = server.answer([[3, 4]], {}, 12, [2])
    assert bodies[0]["prompt"] == [3, 4]
    assert bodies[0]["n_predict"] == 12
    assert answer["tokens"] == [[5, 6]]
    assert answer["calls"] == 5
    assert answer["first"] == 0.25
