"""Text that another engine writes: the same shards, or one clear line.

vLLM itself runs in benchmarks/engines.py.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
from cli_fixtures import call, succeed
from generated import contents, generate, prompt_file, target
from local_server import Handler, serving

from lightning_specdec.data import PromptFiles
from lightning_specdec.data import corpus as corpus_files
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.training import served

__all__ = ["target"]


class StandIn(Handler):
    """Answers as vLLM does, by this package's own decoding."""

    model: HuggingFaceLM
    name = ""
    asked: list[dict[str, Any]]
    faults: dict[str, Any]
    one_at_a_time = Lock()

    def do_GET(self) -> None:  # noqa: N802  # named by http.server
        answers: dict[str, Any] = {
            "/v1/models": {
                "data": [{"id": "other", "root": "other"}, {"id": self.name, "root": self.name}]
            },
            "/version": {"version": "0.32.0"},
        }
        self.answer({**answers, **self.faults}[self.path])

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if "answer" in self.faults:
            self.answer(self.faults["answer"])
            return
        with self.one_at_a_time:
            row = autoregressive_decode(
                self.model,
                [body["prompt"]],
                max_new_tokens=body["max_tokens"],
                eos=body["stop_token_ids"],
            )
        self.answer({"choices": [{"token_ids": row.tokens[0]}]})

    def answer(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        failed = isinstance(value, dict) and ("error" in value or "detail" in value)
        self.send_response(400 if value == b"no" else 500 if failed or value == b"" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def stand_in(name: str, model: HuggingFaceLM | None = None, **faults: Any) -> type[StandIn]:
    paths = {"models": "/v1/models", "version": "/version"}
    faults = {
        paths.get(name_of_fault, name_of_fault): value for name_of_fault, value in faults.items()
    }
    return type("Own", (StandIn,), {"model": model, "name": name, "asked": [], "faults": faults})


def command(target: str, engine: str, *more: str) -> tuple[str, ...]:
    options = {
        "model": "GenerateText",
        "model.target": target,
        "model.output": "text",
        "model.max_new_tokens": "9",
        "model.shard_size": "4",
        "data": "PromptFiles",
        "data.paths": "prompts.txt",
        "trainer.accelerator": "cpu",
        "engine": engine,
    }
    words = ["generate"]
    for name, value in options.items():
        words += [f"--{name}", value]
    return (*words, *more)


def test_greedy_text_is_the_same_whoever_writes_it_and_a_run_goes_on(
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = generate(
        target, tmp_path / "own", PromptFiles(prompt_file(tmp_path)), temperatures=[0.0]
    )
    handler = stand_in(target, load_model(target))
    with serving(handler) as address:
        first_outcome = succeed(
            *command(target, f"http://{address}/v1/", "--model.batch_size", "3")
        )
        assert contents(tmp_path / "text") == contents(expected) and len(contents(expected)) == 3
        (tmp_path / "text" / "shard-00001.safetensors").unlink()
        handler.asked.clear()
        second_outcome = succeed(*command(target, f"http://{address}", "--model.batch_size", "3"))
        assert (
            first_outcome.out == second_outcome.out
            and len(handler.asked) == 4
            and contents(tmp_path / "text") == contents(expected)
        )
    body = handler.asked[0]
    assert (body["model"], body["top_p"], body["top_k"], body["ignore_eos"]) == (
        target,
        1.0,
        0,
        True,
    )
    assert len({request["seed"] for request in handler.asked}) == 4
    succeed(
        *command(target, f"http://{address}", "--model.batch_size", "3")
    )  # all is there, so nobody is asked
    manifest = corpus_files.read_manifest(tmp_path / "text")
    expected_manifest = corpus_files.read_manifest(expected)
    assert (
        manifest["target"] == expected_manifest["target"]
        and manifest["versions"]["vllm"] == "0.32.0"
    )
    assert (
        manifest["arguments"]["engine"] == "vllm" and "engine" not in expected_manifest["arguments"]
    )
    refused = call(*command(target, "vllm", "--model.output", "own"))
    assert refused.code == 2 and "another run's text" in refused.err


def tokens(*numbers: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": list(numbers)}]}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"models": {"data": [{"id": "llama", "root": None}]}}, "serves llama, not "),
    "no models": ({"models": []}, "list of models is damaged"),
    "another program": ({"version": {}}, "is not a vLLM server"),
    "a page": ({"models": b"<html>"}, "does not answer with JSON"),
    "an older release": ({"answer": {"choices": [{"text": "a"}]}}, "(0.32.0) is too old"),
    "an error": ({"answer": b"no"}, "refuses with 400: no"),
    "a failure": (
        {"answer": {"error": {"message": "no\nmemory " + "x" * 3000, "code": 500}}},
        "refuses with 500: no memory x",
    ),
    "a failure of its framework": (
        {"answer": {"detail": "no engine"}},
        "refuses with 500: no engine",
    ),
    "a failure without a word": ({"answer": b""}, "refuses with 500: Internal Server Error"),
    "no choice": ({"answer": {"choices": []}}, "does not answer with a completion"),
    "foreign tokens": ({"answer": tokens(*[10**6] * 9)}, "tokens outside the target's vocabulary"),
    "text for tokens": ({"answer": tokens(*"abcdefghi")}, "tokens outside the target's vocabulary"),
    "half a row": ({"answer": tokens(3, 3)}, "ends a row before max_tokens and without an eos"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_what_a_server_must_not_answer_is_one_line(
    fault: str,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path)
    faults, message = FAULTS[fault]
    with serving(stand_in(target, **faults)) as address:
        outcome = call(*command(target, f"http://{address}"))
    refused(outcome, message)
    assert (tmp_path / "text").exists() == ("answer" in faults) and not list(
        tmp_path.glob("text/*shard*")
    )


def refused(outcome: Any, message: str) -> None:
    last_line = outcome.err.splitlines()[-1]
    assert outcome.code == 2 and outcome.out == "" and "Traceback" not in outcome.err
    assert last_line.startswith("error: ") and message in last_line, last_line


@pytest.mark.parametrize(
    ("engine", "more", "message"),
    [
        ("http://127.0.0.1:9", (), "http://127.0.0.1:9 cannot be reached"),
        ("ftp://here", (), "begins with http:// or https://"),
        ("nowhere/python", (), "there is no engine nowhere/python"),
        (sys.executable, (), "vLLM is not installed for"),
        ("vllm", ("--model.num_draft_tokens", "3"), "configure a draft in vLLM's server"),
        (
            "vllm",
            ("--trainer.devices", "2", "--trainer.strategy", "ddp_fork"),
            "several processes share one server",
        ),
    ],
)
def test_an_engine_that_is_not_there_is_one_line_and_leaves_nothing(
    engine: str,
    more: tuple[str, ...],
    message: str,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path)
    refused(call(*command(target, engine, *more)), message)
    assert not (tmp_path / "text").exists()


PROGRAM = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
open("pid", "w").write(str(os.getpid()))
assert ("--no-enable-chunked-prefill" in sys.argv) != bool("{fault}")
if "{fault}":
    sys.exit("ValueError: {fault}")
class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = options["--served-model-name"]
        models = [dict(id=name, root="x")]
        choices = [dict(token_ids=[5] * 8 + [1])]
        data = json.dumps(dict(data=models, version="0.32.0", choices=choices)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = answer
    log_message = lambda *arguments: None
HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


@pytest.mark.parametrize("fault", ["", "no memory for the cache"])
def test_an_engine_by_its_python_is_started_for_the_run_and_ended(
    fault: str,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path)
    # Of a machine without a GPU, or with one.
    monkeypatch.setattr(
        served, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: bool(fault)))
    )
    path = tmp_path / "python"
    path.write_text(PROGRAM.format(python=sys.executable, fault=fault))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if fault:
        refused(call(*command(target, str(path))), f"vLLM does not start (ValueError: {fault})")
        assert not (tmp_path / "text").exists()
    else:
        assert succeed(*command(target, str(path))).out == "11 rows, 99 new tokens: text\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
