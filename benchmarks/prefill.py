"""Measure the time to the first token of long prompts, and the memory that it takes.

    make smollm2
    python benchmarks/prefill.py --lengths 500 2000 4000 8000 --output prefill.json

Each figure is the median over repeats in which transformers' `generate` and standard decoding here
take turns, in one process with the same threads. A batch has four prompts of the given length and
of 3/4, 1/2 and 1/4 of it; transformers pads them on the left. With `--memory`, each side reads each
length once more in a separate process, and the figure is that process's largest memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import autoregressive_decode
from lightning_specdec.models.huggingface import HuggingFaceLM

SIDES = ("transformers", "ours")
NUM_ROWS = 4
"""Prompts of a batch."""

FirstToken = Callable[[list[list[int]]], list[int]]
"""Reads prompts; returns the first new token of each."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 4000, 8000])
    parser.add_argument("--batch_lengths", type=int, nargs="*", default=[500, 2000])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num_layers", type=int, help="read only the first layers, to save time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure memory as well")
    parser.add_argument("--once", choices=SIDES, help="read one prompt, and print the memory")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()

    if options.once:
        print(memory_of_one_prompt(options))
        return

    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        readers = {side: reader(side, options, dtype) for side in SIDES}
        cases = [(1, length) for length in options.lengths]
        cases += [(NUM_ROWS, length) for length in options.batch_lengths]
        for num_rows, length in cases:
            row = {"dtype": dtype, "rows": num_rows, "length": length}
            row["seconds"] = seconds(readers, prompts(num_rows, length), options.repeats)
            row["ratio"] = row["seconds"]["ours"] / row["seconds"]["transformers"]
            if options.memory and num_rows == 1:
                row["megabytes"] = {side: megabytes(side, options, row) for side in SIDES}
            print(json.dumps(row), flush=True)
            rows.append(row)

    if options.output:
        settings = {name: str(value) for name, value in vars(options).items()}
        record = {
            "manifest": manifest(options=settings, device=torch.device("cpu")),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def prompts(num_rows: int, length: int) -> list[list[int]]:
    """Random prompts, the first one of this length. Small ids are left out: they are special."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(100, 40_000, (num_rows, length), generator=generator).tolist()
    return [row[: length * (num_rows - i) // num_rows] for i, row in enumerate(tokens)]


def reader(side: str, options: argparse.Namespace, dtype: str) -> FirstToken:
    """How one side reads prompts."""
    sizes = {}
    if options.num_layers is not None:
        sizes["num_hidden_layers"] = options.num_layers
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, dtype), **sizes
    ).eval()
    if side == "ours":
        target = HuggingFaceLM(model).packed()
        return lambda texts: [row[0] for row in _decode(target, texts)]
    return lambda texts: _generate(model, texts)


def _decode(target: Any, texts: list[list[int]]) -> list[list[int]]:
    return autoregressive_decode(target, texts, max_new_tokens=1).tokens


def _generate(model: Any, texts: list[list[int]]) -> list[int]:
    """The first tokens of transformers' greedy `generate`, with padding on the left."""
    width = max(len(text) for text in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    attention_mask = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, width - len(text) :] = torch.tensor(text)
        attention_mask[row, width - len(text) :] = 1
    output = model.generate(
        tokens, attention_mask=attention_mask, max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    first_tokens: list[int] = output[:, -1].tolist()
    return first_tokens


def seconds(
    readers: dict[str, FirstToken], texts: list[list[int]], num_repeats: int
) -> dict[str, float]:
    """Median seconds of each side. The sides alternate, and the one that begins changes."""
    for read in readers.values():
        read([text[:64] for text in texts])

    times: dict[str, list[float]] = {side: [] for side in readers}
    for repeat in range(num_repeats):
        sides = list(readers)
        if repeat % 2:
            sides.reverse()
        for side in sides:
            started = time.perf_counter()
            readers[side](texts)
            times[side].append(time.perf_counter() - started)
    return {side: statistics.median(values) for side, values in times.items()}


def megabytes(side: str, options: argparse.Namespace, row: dict[str, Any]) -> float:
    """Largest memory of a new process in which one side reads one prompt."""
    command = [sys.executable, __file__, "--once", side, "--model", options.model]
    command += ["--dtypes", row["dtype"], "--lengths", str(row["length"])]
    if options.num_layers is not None:
        command += ["--num_layers", str(options.num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def memory_of_one_prompt(options: argparse.Namespace) -> float:
    """Megabytes that reading a prompt adds to the memory of a process, KV cache included."""
    read = reader(options.once, options, options.dtypes[0])
    read(prompts(1, 64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read(prompts(1, options.lengths[0]))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) / 1024


if __name__ == "__main__":
    main()
