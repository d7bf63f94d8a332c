"""How long do running streams pause while a long prompt joins, or while the draft is swapped?

    make smollm2
    python benchmarks/serve_gaps.py --event join --output serve_gaps_join.json
    python benchmarks/serve_gaps.py --event swap --output serve_gaps_swap.json

Some streams run in the engine of the server. Once all of them have tokens, the event happens:

- join: a request with a long prompt is submitted. With several numbers in
  `--prompt_tokens_per_round`, they take turns.
- swap: the file of the draft is replaced by another draft of the same kind.

The figures are seconds between two updates of a stream: the median without the event, and the
longest during it. Updates carry the tokens of a round.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from markdown_tables import markdown_table
from safetensors.torch import load_file, safe_open, save_file

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.cli.common import OWN_PROMPTS
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.files import replaced
from lightning_specdec.config.models import PairSource
from lightning_specdec.serve.engine import Generation, Update
from lightning_specdec.serve.server import Server, make_server
from lightning_specdec.serve.settings import ServeSettings

WHOLE_PROMPT = 2**20
"""Prompt tokens per round that no prompt has."""
NUM_UPDATES_BEFORE = 6
"""Updates that each stream has before the event, and that count for the median."""
MOST_SECONDS = 300.0
"""Longest wait for anything."""


class Stream:
    """A request and the times of its updates."""

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, index: int) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.error = ""
        self.has_ended = False
        self.generation = Generation(prompt, max_new_tokens, self._receive, index=index)

    def _receive(self, update: Update) -> None:
        self.times.append(time.perf_counter())
        self.tokens += update.tokens
        self.error = self.error or update.error
        self.has_ended = update.is_last

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between consecutive updates, of all gaps that overlap a period."""
        gaps = []
        for previous, following in pairwise(self.times):
            if following > start and previous < end:
                gaps.append(following - previous)
        return gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--event", choices=("join", "swap"), required=True)
    parser.add_argument("--target", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--backends", nargs="+", default=["torch", "openvino"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt_tokens", type=int, default=1500, help="of the one that joins")
    parser.add_argument("--prompt_tokens_per_round", type=int, nargs="+", default=[WHOLE_PROMPT])
    parser.add_argument("--stream_tokens", type=int, default=400, help="most tokens of a stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for backend in options.backends:
        measure = measure_joins if options.event == "join" else measure_swaps
        for row in measure(backend, options):
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    if options.output is not None:
        recorded_options = {**vars(options), "output": None}
        record = {
            "manifest": manifest(options=recorded_options, device=torch.device("cpu")),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_joins(backend: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each repeat and each number of prompt tokens per round, which take turns."""
    decoder = load(backend, Path(options.draft), options)
    for repeat in range(options.repeats):
        for tokens_per_round in options.prompt_tokens_per_round:
            with running(decoder, options, prompt_tokens_per_round=tokens_per_round) as server:
                row = measure_join(server, decoder, repeat, options)
            yield {
                "event": "join",
                "backend": backend,
                "prompt_tokens_per_round": tokens_per_round,
                "load_average": os.getloadavg()[0],
                **row,
            }


def measure_join(
    server: Server,
    decoder: SpeculativeDecoder,
    repeat: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    streams = start_streams(server, decoder, options)
    # Another prompt each time, so that the cache has no prefix of it.
    prompt = long_prompt(decoder, repeat, options.prompt_tokens)
    joining = Stream(prompt, 8, index=len(streams))
    start = time.perf_counter()
    server.engine.submit([joining.generation])
    wait_until(lambda: joining.has_ended, streams)
    end = joining.times[0]
    row = summary(streams, start, end)
    row["first_token_seconds"] = end - start
    return row


def measure_swaps(backend: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each repeat."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "draft.safetensors"
        shutil.copy(options.draft, path)
        decoder = load(backend, path, options)
        with running(decoder, options, reload_seconds=0) as server:
            for repeat in range(options.repeats):
                row = measure_swap(server, decoder, path, repeat, options)
                yield {
                    "event": "swap",
                    "backend": backend,
                    "load_average": os.getloadavg()[0],
                    **row,
                }


def measure_swap(
    server: Server,
    decoder: SpeculativeDecoder,
    path: Path,
    repeat: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    present = server.engine.drafter
    streams = start_streams(server, decoder, options)
    write_another_draft(Path(options.draft), path, repeat)
    start = time.perf_counter()
    server.updates.request()
    wait_until(lambda: server.engine.drafter is not present, streams)
    end = time.perf_counter()
    # The new drafter reads the texts in its first rounds.
    num_updates = len(streams[0].times)
    wait_until(lambda: len(streams[0].times) >= num_updates + 3, streams)
    row = summary(streams, start, time.perf_counter())
    row["swap_seconds"] = end - start
    for stream in streams:
        server.engine.cancel(stream.generation)
    return row


def write_another_draft(source: Path, path: Path, number: int) -> None:
    """Replace a draft file by one whose weights differ a little."""
    tensors = load_file(source)
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor *= 1 + 1e-3 * (number + 1)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy.safetensors"
        save_file(tensors, copy, metadata)
        with replaced(path) as output:
            output.write(copy.read_bytes())


def load(backend: str, draft: Path, options: argparse.Namespace) -> SpeculativeDecoder:
    source = PairSource(
        target=options.target, draft=str(draft), backend=backend, dtype=options.dtype
    )
    return SpeculativeDecoder.load(source, mapped=False)


@contextmanager
def running(
    decoder: SpeculativeDecoder, options: argparse.Namespace, **changes: Any
) -> Iterator[Server]:
    """A server whose engine runs, without its HTTP part."""
    # One more than the streams and the request that joins, so that nothing waits for a slot.
    settings = ServeSettings(max_batch_size=options.streams + 2, max_length=2048, **changes)
    config = DecodingConfig(temperature=0.0)
    server = make_server(decoder, config, settings, model_name="model")
    server.start()
    try:
        yield server
    finally:
        server.stop()


def start_streams(
    server: Server, decoder: SpeculativeDecoder, options: argparse.Namespace
) -> list[Stream]:
    """Streams that have some tokens each, and whose batch has its size."""
    streams = []
    for index in range(options.streams):
        prompt = decoder.encode_chat(OWN_PROMPTS[index % len(OWN_PROMPTS)])
        stream = Stream(prompt, options.stream_tokens, index)
        # An answer must not end before the measurement does.
        stream.generation.changes["eos"] = ()
        streams.append(stream)
    server.engine.submit([stream.generation for stream in streams])
    wait_until(lambda: all(len(stream.times) > NUM_UPDATES_BEFORE for stream in streams), streams)
    return streams


def long_prompt(decoder: SpeculativeDecoder, number: int, num_tokens: int) -> list[int]:
    """The first tokens of a file of Python's standard library."""
    files = sorted(Path(ast.__file__).parent.glob("*.py"))
    long_files = [file for file in files if file.stat().st_size > 16 * num_tokens]
    text = long_files[number % len(long_files)].read_text(encoding="utf-8")
    return decoder.encode(text)[:num_tokens]


def wait_until(condition: Any, streams: Sequence[Stream]) -> None:
    """Wait for something, while all streams run."""
    end = time.perf_counter() + MOST_SECONDS
    while not condition():
        for stream in streams:
            if stream.has_ended:
                raise SystemExit(
                    f"error: a stream ended too early ({stream.error or 'all of its tokens'}): "
                    "choose more --stream_tokens"
                )
        if time.perf_counter() > end:
            raise SystemExit("error: it takes too long")
        time.sleep(0.005)


def summary(streams: Sequence[Stream], start: float, end: float) -> dict[str, Any]:
    """The gaps of all streams before and during the event."""
    before = []
    during = []
    for stream in streams:
        before += stream.gaps(stream.times[1], start)
        during += stream.gaps(start, end)
    return {
        "median_gap_before": statistics.median(before),
        "median_gap": statistics.median(during),
        "longest_gap": max(during),
        "seconds": end - start,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the repeats of each setting."""
    groups: dict[tuple[str, str, Any], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["event"], row["backend"], row.get("prompt_tokens_per_round"))
        groups.setdefault(key, []).append(row)

    names = ("median_gap_before", "median_gap", "longest_gap", "first_token_seconds")
    lines = []
    for (event, backend, tokens_per_round), group in groups.items():
        setting = "-"
        if tokens_per_round is not None:
            setting = "whole" if tokens_per_round == WHOLE_PROMPT else str(tokens_per_round)
        cells = []
        for name in names:
            values = [row[name] for row in group if name in row]
            cells.append(f"{statistics.median(values):.2f} s" if values else "-")
        lines.append([event, backend, setting, *cells])
    headings = (
        "Event",
        "Backend",
        "Prompt tokens per round",
        "Gap before",
        "Gap during it",
        "Longest gap",
        "First token of the prompt",
    )
    return markdown_table(headings, lines)


if __name__ == "__main__":
    main()
