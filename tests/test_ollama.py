"""Laws of the look at Ollama: its models as it describes them, one short generation, one line where there is none."""

from __future__ import annotations

import time

import pytest
from cli_fixtures import call, here, refused, succeed
from fake_ollama import serve

from lightning_specdec import ollama

__all__ = ["here"]
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("", "http://localhost:11434"),
        ("localhost", "http://localhost:11434"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000"),
        ("0.0.0.0", "http://localhost:11434"),
        ("0.0.0.0:9999", "http://localhost:9999"),
        ("https://box.example/", "https://box.example"),
    ],
)
def test_the_address_is_read_as_ollama_reads_it(given: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", given)
    assert ollama.host() == address


def test_models_come_smallest_first_with_what_the_list_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as (address, _):
        monkeypatch.setenv("OLLAMA_HOST", address)
        small, large = ollama.list_models()
    assert small == ollama.OllamaModel("phi3:mini", "3.8B", "Q4_K_M", 2_176_178_913)
    assert large == ollama.OllamaModel("llama3:8b", "8.0B", "Q4_0", 4_661_224_676)


def test_a_generation_asks_for_few_tokens_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as (address, asked):
        monkeypatch.setenv("OLLAMA_HOST", address)
        done = ollama.generate("phi3:mini", "The quick brown fox", max_new_tokens=4)
    assert done == ollama.Generation("phi3:mini", " jumps over", 4, 0.2) and done.tokens_per_second == 20
    assert asked[0]["options"] == {"num_predict": 4, "temperature": 0} and asked[0]["stream"] is False


def test_the_command_line_lists_the_models_and_tries_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as (address, asked):
        monkeypatch.setenv("OLLAMA_HOST", address)
        shown = succeed("pairs", "--ollama").out
        document = succeed("pairs", "--ollama", "--output", "json").json
    assert [request["model"] for request in asked] == ["phi3:mini"] * 2
    assert "llama3:8b  8.0B        Q4_0          4.7 GB\n" in shown
    assert "phi3:mini: 'The quick brown fox' goes on with ' jumps over' (4 tokens, 20.0 tokens/s)" in shown
    assert [model["name"] for model in document["models"]] == ["phi3:mini", "llama3:8b"]
    assert document["generation"]["num_tokens"] == 4 and document["host"] == f"http://{address}"


def test_a_server_without_models_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve([]) as (address, _):
        monkeypatch.setenv("OLLAMA_HOST", address)
        assert "has no models" in succeed("pairs", "--ollama").out
        assert succeed("pairs", "--ollama", "--output", "json").json["generation"] is None


def test_what_goes_wrong_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")
    started = time.perf_counter()
    refused("pairs", "--ollama", told="no Ollama server answers at http://127.0.0.1:9: start one (`ollama serve`)")
    assert time.perf_counter() - started < 3
    with serve() as (address, _):
        monkeypatch.setenv("OLLAMA_HOST", address)
        refused("pairs", "--ollama", "--model", "gemma", told="no model 'gemma': it has phi3:mini, llama3:8b")
        refused(
            "pairs",
            "--ollama",
            "--model",
            "llama3:8b",
            told="answered 500 to /api/generate: model requires more system memory than is available",
        )
        refused("pairs", "--ollama", "--check", told="--check and --ollama exclude each other")
        refused("pairs", "--model", "x", told="--model is for --ollama")
    for content in (b"<html>", b"[1]", b'{"models": 3}'):
        with serve(content) as (address, _):
            monkeypatch.setenv("OLLAMA_HOST", address)
            refused("pairs", "--ollama", told="does not answer as Ollama does: check OLLAMA_HOST")
    assert call("pairs", "--help").code == 0
