"""The script that audits other engines: what it keeps of an audit, its table, how it resumes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_fixtures import call
from local_server import serving
from stand_in_engine import Answers, stand_in
from text_model import model

from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import NGramDrafter

__all__ = ["model"]
ROOT = Path(__file__).parent.parent
SMALL = ("--num_prompts", "3", "--max_new_tokens", "12", "--engine_dtype", "float32")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("engine_audits")


def audited(script: ModuleType, model: str, **abilities: Any) -> dict[str, Any]:
    """The row of a real audit of a stand-in engine."""
    decoder = SpeculativeDecoder.from_pretrained(model, NGramDrafter())
    with serving(stand_in(Answers(decoder, **abilities))) as address:
        outcome = call(
            *("audit", "--target", model, "--engine", f"http://{address}", *SMALL),
            *("--output", "json"),
        )
    row = {"engine": "vLLM", "version": "1.0", "method": "n-gram", "seconds": 90.0}
    return {**row, "exit_code": outcome.code, **script.summary(outcome.json)}


def cells(script: ModuleType, row: dict[str, Any]) -> list[str]:
    heading, _, line = script.table([row]).splitlines()
    assert heading.count("|") == line.count("|")
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_the_counts_and_the_verdict_of_the_audit(script: ModuleType, model: str) -> None:
    row = audited(script, model)
    assert row["passed"]
    assert row["greedy"]["num_equal"] == row["greedy"]["num_tokens"] > 20
    line = cells(script, row)
    assert line[:2] == ["vLLM 1.0", "n-gram"]
    assert line[2] == str(row["greedy"]["num_tokens"])
    assert line[3:5] == ["0", "0"]
    assert line[7:] == ["passed", "-", "2"]


def test_a_row_of_a_wrong_engine_says_what_is_wrong(script: ModuleType, model: str) -> None:
    row = audited(script, model, fixed_text="the lightning speaks to the oak")
    assert row["exit_code"] == 1
    assert 0 < row["greedy"]["num_wrong"] <= row["greedy"]["num_tokens"]
    assert len(row["greedy"]["first_wrong"]) <= script.MAX_WRONG
    line = cells(script, row)
    assert line[4] == str(row["greedy"]["num_wrong"])
    assert line[7].startswith("greedy tokens are wrong")


def test_an_engine_that_cannot_be_audited_has_a_row_with_the_reason(script: ModuleType) -> None:
    row = {"engine": "llama.cpp", "version": "b1", "method": "draft model", "seconds": 30.0}
    line = cells(script, {**row, "exit_code": 2, "error": "error: it cannot be reached"})
    assert line[7] == "error: it cannot be reached"


def test_a_run_continues_after_the_rows_that_it_has(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, str]] = []

    def audit_engine(engine: str, method: str, options: Any) -> dict[str, Any]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((engine, method))
        return {"version": "1", "seconds": 60.0, "exit_code": 2, "error": "none"}

    def run(*arguments: str) -> int:
        command = ["engine_audits", "--vllm", "python", "--llama_server", "server"]
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(output), *arguments])
        code: int = script.main()
        return code

    output = tmp_path / "audits.json"
    monkeypatch.setattr(script, "audit_engine", audit_engine)
    with pytest.raises(KeyboardInterrupt):
        run()
    all_pairs = [(engine, method) for engine in script.METHODS for method in script.METHODS[engine]]
    assert asked == all_pairs[:3]
    assert len(json.loads(output.read_text())["rows"]) == 3

    asked.clear()
    assert run("--methods", *script.METHODS["vLLM"][:3]) == 1
    assert asked == [pair for pair in all_pairs[3:] if pair[1] in script.METHODS["vLLM"][:3]]
    # Other settings are other rows.
    asked.clear()
    run("--methods", "n-gram", "--num_prompts", "5")
    assert asked == [("vLLM", "n-gram")]
    document = json.loads(output.read_text())
    assert {row["num_prompts"] for row in document["rows"]} == {5, 64}
    # What is recorded names no place of this machine.
    assert str(tmp_path) not in output.read_text()
    assert "measured before" in capsys.readouterr().out
