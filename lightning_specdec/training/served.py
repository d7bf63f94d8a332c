"""Prompts continued by vLLM, as a server that runs or that is started for as long as it is needed."""

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.config.terminal import short
from lightning_specdec.rules import Sampling

_STARTS_SECONDS, _ANSWERS_SECONDS = 900, 3600


class Endpoint:
    """A server with vLLM's version of OpenAI's completions, which takes and returns tokens.

    Args:
        url: its address, with or without `/v1`.
        model: the target, by the name or the directory that the server was given.

    Raises:
        ValueError: it cannot be reached, or serves other models.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"an engine's address begins with http:// or https://, got {short(url, 100)!r}"
            )
        cards = _cards(self._ask("/v1/models"))
        names = [name for name, places in cards.items() if _place(model) in map(_place, places)]
        if not names:
            raise ValueError(
                f"{self.url} serves {short(', '.join(cards) or 'no model', 200)}, not {model}: give model.target as "
                f"it is served, or serve it with --served-model-name {model}"
            )
        self.model = names[0]
        try:
            self.version = str(self._ask("/version")["version"])
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
            batch_size: requests that wait for their answers at once.

        Raises:
            ValueError: the server ended, or answered with something else than such tokens.
        """
        common = {
            "model": self.model,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            # What the model's generation_config.json says would count otherwise.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": list(eos),
            "ignore_eos": True,
            "return_token_ids": True,
        }

        def ask(number: int) -> tuple[int, list[int]]:
            key = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:7])
            found = self._ask(
                "/v1/completions", {**common, "prompt": list(prompts[number]), "seed": key}
            )
            try:
                tokens = found["choices"][0].get("token_ids")
            except (LookupError, TypeError, AttributeError):
                raise ValueError(f"{self.url} does not answer with a completion") from None
            if tokens is None:
                raise ValueError(
                    f"{self.url} returns no token ids: this vLLM ({self.version}) is too old, update it"
                )
            whole = isinstance(tokens, list) and all(
                type(each) is int and 0 <= each < vocab_size for each in tokens
            )
            if not whole or not tokens or (len(tokens) != max_new_tokens and tokens[-1] not in eos):
                raise ValueError(
                    f"{self.url} gives up on a row, or answers with tokens that the target has not"
                )
            return number, tokens

        made: dict[int, list[int]] = {}
        pool = ThreadPoolExecutor(batch_size)
        try:
            for done in as_completed([pool.submit(ask, number) for number in prompts]):
                number, made[number] = done.result()
                watch(len(made[number]), 1)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return made

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """What the server answers; ValueError where it does not, or not with JSON."""
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        try:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(
                request, timeout=30 if body is None else _ANSWERS_SECONDS
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            told = error.read(100_000).decode(errors="replace").strip() or error.reason
            with suppress(ValueError, AttributeError, RecursionError):  # else as it is
                found = json.loads(told)
                told = (found.get("error") or found).get("message") or found.get("detail") or told
            told = f"refuses with {error.code}: {' '.join(str(told).split())}"
            raise ValueError(f"{self.url}{path} {short(told, 320)}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(
                f"{self.url} cannot be reached ({reason}): start vLLM there, then run it again"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.url}{path} does not answer with JSON") from error


def _cards(answer: Any) -> dict[str, list[str]]:
    """The names of the models that are served, and what each of them may be asked for by."""
    try:
        return {card["id"]: [card["id"], card.get("root") or card["id"]] for card in answer["data"]}
    except (LookupError, TypeError, AttributeError):
        raise ValueError("the server's list of models is damaged: is it vLLM's?") from None


def _place(name: str) -> str:
    """A directory of this machine as an absolute path, another name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


@contextmanager
def served(
    engine: str, target: str, *, dtype: str | None, batch_size: int, max_length: int
) -> Iterator[Endpoint]:
    """The engine while it is needed.

    Args:
        engine: a server's address; or `vllm`, or the Python of an environment with vLLM, which is started with
            the target and ended.
        dtype, batch_size, max_length: of a server that is started.

    Raises:
        ValueError: it is not installed, does not start, or as of `Endpoint`.
    """
    if "://" in engine:
        yield Endpoint(engine, target)
        return
    python = shutil.which(sys.executable if engine == "vllm" else os.path.expanduser(engine))
    if python is None:
        raise ValueError(
            f"there is no engine {engine}: give a server's address, or the Python that has vLLM"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    words += [
        "--model",
        _place(target),
        "--served-model-name",
        target,
        "--max-num-seqs",
        str(batch_size),
    ]
    words += ["--max-model-len", str(max_length), *([] if dtype is None else ["--dtype", dtype])]
    # On a CPU, vLLM 0.32 ends where the chunk of a prompt comes with a seed; on a GPU it is faster with chunks.
    words += [] if torch.cuda.is_available() else ["--no-enable-chunked-prefill"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            yield _when_it_answers(process, log, f"http://127.0.0.1:{port}", target, engine)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _when_it_answers(
    process: subprocess.Popen[bytes], log: Any, url: str, target: str, engine: str
) -> Endpoint:
    ends = time.monotonic() + _STARTS_SECONDS
    while process.poll() is None and time.monotonic() < ends:
        try:
            return Endpoint(url, target)
        except ValueError:
            time.sleep(0.5)
    log.seek(0)
    lines = [line.strip() for line in log if "Error" in line] or ["no reason given"]
    if "No module named 'vllm" in lines[-1]:
        raise ValueError(
            f"vLLM is not installed for {engine}: give the Python that has it, or a server's address"
        )
    raise ValueError(
        f"vLLM does not start ({short(lines[-1], 300)}): start it yourself and give its address"
    )
