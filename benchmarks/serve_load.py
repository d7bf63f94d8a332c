"""Load a running server with several clients at once, and report latencies and throughput.

    lightning_specdec serve --pair smollm2 &
    python benchmarks/serve_load.py --output docs/results/serve_load.json

The clients of a level send requests one after the other, each with another prompt, until the time
is over. For each request, a client measures the seconds to its first text, and the mean seconds
between its tokens after that. The memory is that of the server's process, if `--pid` names it. Any
server with OpenAI's API can be measured: `--address`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.cli.common import OWN_PROMPTS

QUESTIONS = (
    *OWN_PROMPTS,
    "Write a short story about a dog that finds an old map.",
    "List the planets of the solar system with one fact about each.",
    "Explain to a child why the sky is blue.",
    "Write a Python function that checks whether a text is a palindrome.",
)


@dataclass
class Sample:
    """What a client saw of one request.

    Args:
        first_seconds: from the request to its first text.
        token_seconds: mean seconds between its tokens; None for a single token.
        num_tokens: of the answer.
        num_drafted: draft tokens, if the server reports them.
        num_accepted: accepted draft tokens.
        error: what went wrong; "" if nothing did.
    """

    first_seconds: float = 0.0
    token_seconds: float | None = None
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--max_tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--pid", type=int, help="the server's process, to read its memory")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    rows = []
    for num_clients in options.clients:
        row = asyncio.run(measure(options, num_clients))
        rows.append(row)
        print(json.dumps(row))
    print(table(rows))
    if options.output is not None:
        recorded_options = {**vars(options), "output": None, "pid": None}
        record = {
            "manifest": manifest(options=recorded_options, device=torch.device("cpu")),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


async def measure(options: argparse.Namespace, num_clients: int) -> dict[str, Any]:
    """One level: this many clients for the given time."""
    memory_before = resident_bytes(options.pid)
    timeout = httpx.Timeout(600.0)
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(timeout=timeout, limits=limits) as client:
        start = time.perf_counter()
        end = start + options.seconds
        tasks = [run_client(client, options, number, end) for number in range(num_clients)]
        samples = [sample for samples in await asyncio.gather(*tasks) for sample in samples]
        seconds = time.perf_counter() - start
    row = summarize(samples, seconds)
    row["clients"] = num_clients
    # Above the number of cores, other programs took a share of the time.
    row["load_average"] = os.getloadavg()[0]
    row["memory_bytes"] = [memory_before, resident_bytes(options.pid)]
    return row


async def run_client(
    client: httpx.AsyncClient,
    options: argparse.Namespace,
    number: int,
    end: float,
) -> list[Sample]:
    """Send requests until the time is over; the last one is finished."""
    samples: list[Sample] = []
    while time.perf_counter() < end:
        # No two requests have the same prompt, so that no server answers from a cache.
        question = QUESTIONS[(number + len(samples)) % len(QUESTIONS)]
        text = f"({number}-{len(samples)}) {question}"
        sample = Sample()
        samples.append(sample)
        try:
            await send(client, options, text, sample)
        except (httpx.HTTPError, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"
    return samples


async def send(
    client: httpx.AsyncClient,
    options: argparse.Namespace,
    text: str,
    sample: Sample,
) -> None:
    """One request, as a stream."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    chunk_times: list[float] = []
    url = f"{options.address}/v1/chat/completions"
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                chunk_times.append(time.perf_counter() - start)
            if event.get("usage"):
                sample.num_tokens = event["usage"]["completion_tokens"]
                speculative = event.get("speculative", {})
                sample.num_drafted = speculative.get("draft_tokens", 0)
                sample.num_accepted = speculative.get("accepted_tokens", 0)
    if not chunk_times or not sample.num_tokens:
        raise ValueError("the stream ended without an answer")
    sample.first_seconds = chunk_times[0]
    num_later_tokens = sample.num_tokens - 1
    if num_later_tokens:
        seconds = chunk_times[-1] - chunk_times[0]
        sample.token_seconds = seconds / num_later_tokens


def summarize(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """The figures of one level."""
    answered = [sample for sample in samples if not sample.error]
    first_seconds = [sample.first_seconds for sample in answered]
    token_seconds = [
        sample.token_seconds for sample in answered if sample.token_seconds is not None
    ]
    num_tokens = sum(sample.num_tokens for sample in answered)
    num_drafted = sum(sample.num_drafted for sample in answered)
    num_accepted = sum(sample.num_accepted for sample in answered)
    return {
        "requests": len(samples),
        "errors": sorted({sample.error for sample in samples if sample.error}),
        "num_failed": len(samples) - len(answered),
        "seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_token_seconds": percentiles(first_seconds),
        "inter_token_seconds": percentiles(token_seconds),
        "draft_tokens": num_drafted,
        "accepted_tokens": num_accepted,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """The median and the 95th percentile; None for fewer than two values."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": cuts[9], "p95": cuts[18]}


def resident_bytes(pid: int | None) -> int | None:
    """The memory of a process; None if it is not known."""
    if pid is None:
        return None
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for a reader."""
    lines = [
        "| Clients | Requests | Failed | Tokens/s | First token, p50 / p95 | Between tokens, "
        "p50 / p95 | Memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = _shown(row["first_token_seconds"], "s", 1.0)
        between = _shown(row["inter_token_seconds"], "ms", 1000.0)
        memory = row["memory_bytes"][-1]
        memory_text = "?" if memory is None else f"{memory / 1e9:.2f} GB"
        lines.append(
            f"| {row['clients']} | {row['requests']} | {row['num_failed']} "
            f"| {row['tokens_per_second']:.1f} | {first} | {between} | {memory_text} |"
        )
    return "\n".join(lines)


def _shown(values: dict[str, float] | None, unit: str, factor: float) -> str:
    if values is None:
        return "?"
    return f"{values['p50'] * factor:.2f} / {values['p95'] * factor:.2f} {unit}"


if __name__ == "__main__":
    main()
