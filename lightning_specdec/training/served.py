"""Prompts continued by vLLM: by a running server, or by one that is started for the run."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

from lightning_specdec.config.http import open_url
from lightning_specdec.config.terminal import short
from lightning_specdec.rules import Sampling

_START_SECONDS = 900
"""How long a started server may take until it answers."""
_STATUS_SECONDS = 30
"""How long a server may take to describe itself."""
_COMPLETION_SECONDS = 3600
"""How long a server may take for one completion, waiting in its queue included."""
_ERROR_BYTES = 100_000
"""Maximum bytes that are read of an error's description."""


class Endpoint:
    """A server with vLLM's version of OpenAI's completions, which accepts and returns tokens.

    Args:
        url: its address, with or without `/v1`.
        model: the target, by the name or the directory that the server was started with.

    Raises:
        ValueError: the server cannot be reached, is not vLLM, or serves other models.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"an engine's address begins with http:// or https://, got {short(url, 100)!r}"
            )

        aliases_by_name = _served_models(self._request("/v1/models", timeout=_STATUS_SECONDS))
        names = []
        for name, aliases in aliases_by_name.items():
            if _absolute(model) in [_absolute(alias) for alias in aliases]:
                names.append(name)
        if not names:
            served_names = short(", ".join(aliases_by_name) or "no model", 200)
            raise ValueError(
                f"{self.url} serves {served_names}, not {model}: set model.target to a "
                f"served name, or serve it with --served-model-name {model}"
            )
        self.model = names[0]

        try:
            self.version = str(self._request("/version", timeout=_STATUS_SECONDS)["version"])
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{self.url} is not a vLLM server: it does not report its version"
            ) from None

    def continue_all(
        self,
        prompts: Mapping[int, Sequence[int]],
        *,
        max_new_tokens: int,
        batch_size: int,
        sampling: Sampling,
        eos: Sequence[int],
        seed: int,
        vocab_size: int,
        watch: Callable[[int, int], None],
    ) -> dict[int, list[int]]:
        """The new tokens of every prompt, by its number; see `generate.continue_all`.

        Args:
            batch_size: maximum requests at a time.

        Raises:
            ValueError: the server ended, or its answer does not contain such tokens.
        """
        common_options = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            # Without these, values from the model's generation_config.json would apply.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(eos),
            "ignore_eos": True,
            "return_token_ids": True,
        }

        def complete(number: int) -> tuple[int, list[int]]:
            # A seed for each prompt, of seven bytes: servers read signed integers of eight.
            digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
            body = {
                **common_options,
                "prompt": list(prompts[number]),
                "seed": int.from_bytes(digest[:7]),
            }
            answer = self._request("/v1/completions", body, timeout=_COMPLETION_SECONDS)
            tokens = self._tokens_of(answer, vocab_size)

            is_finished = bool(tokens) and (len(tokens) == max_new_tokens or tokens[-1] in eos)
            if not is_finished:
                raise ValueError(f"{self.url} ends a row before max_tokens and without an eos")
            return number, tokens

        new_tokens: dict[int, list[int]] = {}
        pool = ThreadPoolExecutor(batch_size)
        try:
            requests = [pool.submit(complete, number) for number in prompts]
            for request in as_completed(requests):
                number, tokens = request.result()
                new_tokens[number] = tokens
                watch(len(tokens), 1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return new_tokens

    def _tokens_of(self, answer: Any, vocab_size: int) -> list[int]:
        """The tokens of a completion.

        Raises:
            ValueError: the answer contains none, or tokens outside the target's vocabulary.
        """
        try:
            tokens = answer["choices"][0].get("token_ids")
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"{self.url} does not answer with a completion") from None
        if tokens is None:
            raise ValueError(
                f"{self.url} returns no token ids: this vLLM ({self.version}) is too old, update it"
            )
        is_valid = isinstance(tokens, list) and all(
            type(token) is int and 0 <= token < vocab_size for token in tokens
        )
        if not is_valid:
            raise ValueError(f"{self.url} answers with tokens outside the target's vocabulary")
        return tokens

    def _request(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> Any:
        """The server's answer, read from JSON.

        Args:
            body: sent as JSON; when None, the request has no body.
            timeout: in seconds.

        Raises:
            ValueError: the server cannot be reached, refuses, or does not answer with JSON.
        """
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()

        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with open_url(request, timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            reason = " ".join(_refusal(error).split())
            message = short(f"refuses with {error.code}: {reason}", 320)
            raise ValueError(f"{self.url}{path} {message}") from error
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            raise ValueError(
                f"{self.url} cannot be reached ({cause}): start vLLM there, then run it again"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.url}{path} does not answer with JSON") from error


def _refusal(error: urllib.error.HTTPError) -> str:
    """Why a server refuses a request: the message in its JSON, else its text, else the status."""
    text = error.read(_ERROR_BYTES).decode(errors="replace").strip() or str(error.reason)
    try:
        # vLLM answers with {"error": {"message": ...}} or {"message": ...}, its framework with
        # {"detail": ...}.
        document = json.loads(text)
        description = document.get("error") or document
        return str(description.get("message") or document.get("detail") or text)
    except (ValueError, AttributeError, RecursionError):
        return text


def _served_models(answer: Any) -> dict[str, list[str]]:
    """The names of the served models, each with the names and directories that stand for it."""
    try:
        return {card["id"]: [card["id"], card.get("root") or card["id"]] for card in answer["data"]}
    except (LookupError, TypeError, AttributeError):
        raise ValueError("the server's list of models is damaged: is it vLLM's?") from None


def _absolute(name: str) -> str:
    """A directory of this machine as an absolute path; another name unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


@contextmanager
def served(
    engine: str,
    target: str,
    *,
    dtype: str | None,
    batch_size: int,
    max_length: int,
) -> Iterator[Endpoint]:
    """A server for a run, which ends with the context if it was started here.

    Args:
        engine: a server's address; or `vllm`, or the Python of an environment with vLLM, to start a
            server.
        target: the model's directory, or its name on the Hub.
        dtype: of a started server; the stored dtype when None.
        batch_size: maximum rows that a started server decodes together.
        max_length: maximum length of a row in a started server, prompt included.

    Raises:
        ValueError: vLLM is not installed, does not start, or as `Endpoint`.
    """
    if "://" in engine:
        yield Endpoint(engine, target)
        return

    python = shutil.which(sys.executable if engine == "vllm" else os.path.expanduser(engine))
    if python is None:
        raise ValueError(
            f"there is no engine {engine}: give a server's address, or the Python that has vLLM"
        )
    port = _free_port()
    command = _server_command(
        python, target, port, dtype=dtype, batch_size=batch_size, max_length=max_length
    )
    # These are for this process, and vLLM may run in another environment.
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    environment.pop("OMP_NUM_THREADS", None)

    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            yield _wait_until_ready(process, log, f"http://127.0.0.1:{port}", target, engine)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        _, port = server.getsockname()
    return port


def _server_command(
    python: str,
    target: str,
    port: int,
    *,
    dtype: str | None,
    batch_size: int,
    max_length: int,
) -> list[str]:
    """The command line that starts vLLM's server on this machine."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", _absolute(target), "--served-model-name", target]
    command += ["--max-num-seqs", str(batch_size), "--max-model-len", str(max_length)]
    if dtype is not None:
        command += ["--dtype", dtype]
    # On a CPU, vLLM 0.32 fails where a chunk of a prompt has a seed; on a GPU chunks are faster.
    if not torch.cuda.is_available():
        command.append("--no-enable-chunked-prefill")
    return command


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    log: TextIO,
    url: str,
    target: str,
    engine: str,
) -> Endpoint:
    """The endpoint of a started server, once it answers.

    Raises:
        ValueError: the server ended or did not answer in time; the message has its last error.
    """
    end_time = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < end_time:
        try:
            return Endpoint(url, target)
        except ValueError:
            time.sleep(0.5)

    log.seek(0)
    errors = [line.strip() for line in log if "Error" in line] or ["no reason given"]
    if "No module named 'vllm" in errors[-1]:
        raise ValueError(
            f"vLLM is not installed for {engine}: give the Python that has it, or a server's "
            "address"
        )
    raise ValueError(
        f"vLLM does not start ({short(errors[-1], 300)}): start it yourself and give its address"
    )
