"""Compare `--num_draft_tokens auto` with fixed numbers and with standard decoding.

    make smollm2
    python benchmarks/adaptive_window.py --prompts question.jsonl

decodes prompts of Spec-Bench with each method in turn, in batches of several sizes, at several
temperatures, with both backends. Answers go on after their end, so that all methods have the same
number of tokens. What rounds cost is measured before. Each row is written when it is measured, and
a run leaves out the rows that the output has with the same settings.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import spec_bench
import torch
from markdown_tables import markdown_table

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.statistics import Interval, ratio_interval
from lightning_specdec.config.files import replaced

Row = dict[str, Any]
"""The seconds of all methods with one backend, temperature and batch size."""

AUTO = "auto"
STANDARD = "standard"
KEYS = (
    "backend",
    "temperature",
    "batch_size",
    "windows",
    "num_prompts",
    "max_new_tokens",
    "target",
    "draft",
    "drafter",
)
"""What a row is of."""


def main() -> None:
    options = make_parser().parse_args()
    rows: list[Row] = []
    if options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]

    for backend in options.backends:
        decoder = None
        for temperature in options.temperatures:
            for batch_size in options.batch_sizes:
                key = key_of(options, backend, temperature, batch_size)
                if any(has_key(row, key) for row in rows):
                    continue
                if decoder is None:
                    decoder = SpeculativeDecoder.from_pretrained(
                        options.target, options.draft, drafter=options.drafter, backend=backend
                    )
                rows.append({**key, **measure(decoder, key, options)})
                write(rows, options)
                print(table(rows), flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="question.jsonl of Spec-Bench")
    parser.add_argument("--num_prompts", type=int, default=24)
    parser.add_argument("--target", default="checkpoints/smollm2")
    parser.add_argument("--draft", default="checkpoints/smollm2_eagle.safetensors")
    parser.add_argument("--drafter", default="NGramWithFallback")
    parser.add_argument("--backends", nargs="+", default=["openvino", "torch"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 8], help="fixed numbers")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("docs/results/adaptive_window.json"))
    return parser


def key_of(options: argparse.Namespace, backend: str, temperature: float, batch_size: int) -> Row:
    key = {"backend": backend, "temperature": temperature, "batch_size": batch_size}
    for name in KEYS:
        if name not in key:
            key[name] = getattr(options, name)
    return key


def has_key(row: Row, key: Row) -> bool:
    return all(row[name] == key[name] for name in KEYS)


def measure(decoder: SpeculativeDecoder, key: Row, options: argparse.Namespace) -> Row:
    """The seconds of each method for each batch of prompts; the methods take turns."""
    batch_size = key["batch_size"]
    by_task = spec_bench.load(options.prompts, decoder.tokenizer)
    prompts = spec_bench.mixed(by_task, max(options.num_prompts, batch_size))
    batches = []
    for first in range(0, len(prompts) - batch_size + 1, batch_size):
        batches.append(prompts[first : first + batch_size])

    settings = {
        "temperature": key["temperature"],
        "max_new_tokens": options.max_new_tokens,
        "eos": (),
    }
    started = time.perf_counter()
    window = decoder.window(num_draft_tokens=AUTO, batch_size=batch_size, **settings)
    calibration_seconds = time.perf_counter() - started

    def decode(method: str, batch: Sequence[Sequence[int]]) -> float:
        start = time.perf_counter()
        if method == STANDARD:
            decoder.decode_standard(batch, **settings)
        else:
            num_draft_tokens = window if method == AUTO else int(method)
            decoder.decode(batch, num_draft_tokens=num_draft_tokens, **settings)
        return time.perf_counter() - start

    methods = [STANDARD, AUTO, *map(str, options.windows)]
    for method in methods:
        decode(method, batches[-1])  # the first calls of a size are slow

    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for turn, batch in enumerate(batches):
        # Another method begins each time.
        shift = turn % len(methods)
        for method in methods[shift:] + methods[:shift]:
            seconds[method].append(decode(method, batch))
    return {
        "calibration_seconds": calibration_seconds,
        "seconds": seconds,
        "manifest": manifest(options={}, device=torch.device("cpu")),
    }


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    recorded = {}
    for name, value in vars(options).items():
        if name not in ("output", "prompts"):
            recorded[name] = value
    record = {
        "manifest": manifest(options=recorded, device=torch.device("cpu")),
        "rows": list(rows),
    }
    with replaced(options.output) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def table(rows: Sequence[Row]) -> str:
    """For each row: the best fixed number, and `auto` beside it and beside standard decoding."""
    headings = [
        "Backend",
        "Temperature",
        "Batch",
        "Best fixed number",
        "Its speed over standard decoding",
        "Speed of `auto` over standard decoding (95% interval)",
        "Speed of `auto` over the best fixed number, or standard decoding if that is faster",
        "Slowest batch of `auto`, time over standard decoding",
    ]
    lines = []
    for row in rows:
        seconds = row["seconds"]
        fixed = [method for method in seconds if method not in (AUTO, STANDARD)]
        best_fixed = min(fixed, key=lambda method: sum(seconds[method]))
        best = min([best_fixed, STANDARD], key=lambda method: sum(seconds[method]))
        over_standard = ratio_of(row, STANDARD)
        times = zip(seconds[AUTO], seconds[STANDARD], strict=True)
        slowest = max(auto / standard for auto, standard in times)
        lines.append(
            [
                row["backend"],
                f"{row['temperature']:g}",
                str(row["batch_size"]),
                best_fixed,
                f"{sum(seconds[STANDARD]) / sum(seconds[best_fixed]):.2f}",
                with_interval(over_standard),
                f"{ratio_of(row, best).value:.2f}",
                f"{slowest:.2f}",
            ]
        )
    return markdown_table(headings, lines)


def with_interval(ratio: Interval) -> str:
    """A ratio with its interval, which a single batch does not have."""
    if math.isnan(ratio.low):
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def ratio_of(row: Row, method: str) -> Interval:
    """The speed of `auto` over that of another method."""
    other = [[seconds] for seconds in row["seconds"][method]]
    adaptive = [[seconds] for seconds in row["seconds"][AUTO]]
    return ratio_interval(other, adaptive)


if __name__ == "__main__":
    main()
