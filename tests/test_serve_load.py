"""The script that measures servers under load: what it sends, counts, keeps, and leaves out."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from test_serve_http import running
from text_model import model

from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import NGramDrafter

__all__ = ["model"]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    load = importlib.import_module("serve_load")
    # The context of the tiny model is short.
    monkeypatch.setattr(load, "LONG_PROMPT_CHARACTERS", 100)
    return load


@contextmanager
def tiny_server(model: str, **settings: Any) -> Iterator[str]:
    decoder = SpeculativeDecoder.from_pretrained(model, NGramDrafter())
    with running(decoder, **settings) as (_, address):
        yield address


def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str
) -> list[dict[str, Any]]:
    """Run the script. Returns the rows that it has written."""
    monkeypatch.setattr(sys, "argv", ["serve_load", "--output", str(output), *arguments])
    script.main()
    return list(json.loads(output.read_text(encoding="utf-8"))["rows"])


def test_each_level_is_measured_once_and_every_answer_is_complete(
    script: ModuleType, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "load.json"
    bodies: list[dict[str, Any]] = []
    own_stream = httpx.AsyncClient.stream

    def stream(client: Any, method: str, url: str, *, json: dict[str, Any]) -> Any:
        bodies.append(json)
        return own_stream(client, method, url, json=json)

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    with tiny_server(model) as address:
        arguments = ["--address", address, "--engine", "tiny", "--pid", str(os.getpid())]
        arguments += ["--seconds", "1", "--max_tokens", "12"]
        rows = run(script, monkeypatch, output, *arguments, "--clients", "1", "3")
        num_requests = len(bodies)
        # The second run measures what is missing only.
        rows_again = run(script, monkeypatch, output, *arguments, "--clients", "1", "3", "2")
        assert rows_again[:2] == rows
        assert [row["clients"] for row in rows_again] == [1, 3, 2]

    first_level = bodies[: 1 + rows[0]["requests"]]
    prompts = [body["messages"][0]["content"] for body in first_level[1:]]
    # All servers get the same prompts in the same order.
    assert prompts == script.make_prompts()[: len(prompts)]
    assert all(body["max_tokens"] == 12 and body["ignore_eos"] for body in first_level[1:])
    assert sum(row["requests"] for row in rows) + 1 + 3 == num_requests
    for row in rows:
        assert row["lost"] == 0
        assert row["errors"] == []
        assert 0 < row["tokens"] <= 12 * row["requests"]
        assert row["tokens_per_second"] == row["tokens"] / row["seconds"]
        assert 0 < row["first_token_seconds"]["p50"] <= row["first_token_seconds"]["p95"]
        assert row["chunk_gap_seconds"]["largest"] >= row["chunk_gap_seconds"]["p95"]
        assert row["accepted_tokens"] <= row["draft_tokens"]
        assert row["memory"]["largest"] >= row["memory"]["first"] > 10**7
        assert row["manifest"]["commit"] is not None
    lines = script.table(rows).splitlines()
    assert len(lines) == 4
    assert "| tiny - | no speculation | 3 |" in lines[3]


def test_refused_and_short_answers_are_lost(
    script: ModuleType, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_post = httpx.AsyncClient.stream

    def stream(client: Any, method: str, url: str, *, json: dict[str, Any]) -> Any:
        if json["max_tokens"] == 12:
            json = {**json, "max_tokens": 5}
        return own_post(client, method, url, json=json)

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    with tiny_server(model) as address:
        arguments = ["--address", address, "--engine", "tiny", "--seconds", "0.2"]
        arguments += ["--clients", "2", "--max_tokens", "12"]
        (row,) = run(script, monkeypatch, tmp_path / "load.json", *arguments)
    assert row["lost"] == row["requests"] > 0
    assert row["errors"] == ["ValueError: the answer has 5 of 12 tokens"]
    assert row["tokens"] == 0
    assert row["memory"] is None
    assert "| - | - | - | - |" in script.table([row])


def test_tokens_count_up_to_the_end_of_the_level(script: ModuleType) -> None:
    sample = script.Sample(chunk_times=[1.0, 2.0, 3.0, 6.0], first_seconds=0.5, num_tokens=8)
    lost = script.Sample(error="lost")
    summary = script.summarize([sample, lost, sample], {"seconds": 4.0})
    assert summary["tokens"] == 2 * 6
    assert summary["tokens_per_second"] == 3
    assert summary["lost"] == 1
    assert summary["inter_token_seconds"]["p50"] == 5 / 7
    assert summary["chunk_gap_seconds"] == {"p50": 1.0, "p95": 3.0, "largest": 3.0}


def test_every_engine_has_a_slot_for_each_client(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve_load"])
    options = script.make_parser().parse_args()
    options.directory = tmp_path
    (tmp_path / "target.gguf").touch()
    options.llama_server = "llama-server"
    options.vllm = "python"
    ours = script.own_command(script.STANDARD, 1, 16, options)
    theirs = script.llama_cpp_command(script.STANDARD, 1, options, 16)
    vllm = script.vllm_command(script.STANDARD, 1, options, 16)
    assert "--max_batch_size 16" in shlex.join(ours)
    assert f"-np 16 -c {16 * script.CONTEXT_LENGTH}" in shlex.join(theirs)
    assert "--max-num-seqs 16" in shlex.join(vllm)
    assert script.shown(["/home/me/bin/llama-server", "-m", "a b"]) == "llama-server -m 'a b'"


def test_a_session_with_no_drafts_decodes_standardly(
    script: ModuleType, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_drafts = importlib.import_module("no_drafts")
    decoder = SpeculativeDecoder.from_pretrained(model, no_drafts.NoDrafts())
    result = decoder.decode(["the oak"], max_new_tokens=12, num_draft_tokens=1, temperature=1.0)
    expected = decoder.decode_standard(["the oak"], max_new_tokens=12, temperature=1.0)
    assert result.tokens == expected.tokens
    assert result.num_target_calls == 12
