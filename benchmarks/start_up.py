"""Measure how long a pair takes to start, and how much memory it needs, each in a fresh process.

The first start begins with an empty cache directory, so that it converts and measures what later
starts find there. Each start decodes a few tokens with and without the draft.

    python benchmarks/start_up.py --pair qwen_coder --backend openvino --quantization int8 \\
        --draft_quantization int8 --output start_up.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROMPTS = (
    "Write a Python function that checks whether a number is prime.",
    "Write a Python class for a stack with push, pop and peek.",
)
STARTS = ("first", "later")
PAIR_OPTIONS = ("backend", "dtype", "quantization", "draft_quantization", "draft_dtype")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", help="a pair of the registry")
    parser.add_argument("--target", help="a model, instead of a pair")
    parser.add_argument("--draft", help="its draft")
    for name in PAIR_OPTIONS:
        parser.add_argument(f"--{name}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num_draft_tokens", type=int, default=3)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.pair is None) == (options.target is None):
        parser.error("name a pair or a target")
    if options.child:
        print(json.dumps(measure(options)))
        return

    document: dict[str, Any] = {"command": sys.argv[1:]}
    with TemporaryDirectory(prefix="start_up_") as cache:
        for start in STARTS:
            document[start] = run_child(cache)
            print(start, json.dumps(document[start], indent=2), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def run_child(cache: str) -> dict[str, Any]:
    """The measurements of a fresh process with this cache directory."""
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    finished = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"error: the measured process ended with {finished.returncode}: see above")
    values: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return values


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load the pair and decode, in this process."""
    start = time.perf_counter()
    import torch

    from lightning_specdec import SpeculativeDecoder

    torch.set_num_threads(options.threads)
    settings: dict[str, Any] = {}
    for name in PAIR_OPTIONS:
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    settings["num_draft_tokens"] = options.num_draft_tokens
    import_seconds = time.perf_counter() - start
    import_memory = memory()

    if options.pair is not None:
        decoder = SpeculativeDecoder.from_pair(options.pair, options.draft, **settings)
    else:
        decoder = SpeculativeDecoder.from_pretrained(options.target, options.draft, **settings)
    load_seconds = time.perf_counter() - start
    load_memory = memory()

    prompts = [decoder.encode_chat(prompt) for prompt in PROMPTS]
    # The first call compiles what is left.
    decoder.decode(prompts[:1], max_new_tokens=1)
    first_token_seconds = time.perf_counter() - start

    result = {
        "import_seconds": round(import_seconds, 2),
        "load_seconds": round(load_seconds, 2),
        "first_token_seconds": round(first_token_seconds, 2),
        "imported": import_memory,
        "loaded": load_memory,
        "load_average": os.getloadavg()[0],
        "threads": options.threads,
    }
    methods = {"standard": decoder.decode_standard, "speculative": decoder.decode}
    for name, decode in methods.items():
        decode(prompts[:1], max_new_tokens=4)
        began = time.perf_counter()
        num_tokens = 0
        for prompt in prompts:
            output = decode([prompt], max_new_tokens=options.max_new_tokens)
            num_tokens += len(output.tokens[0])
        result[f"{name}_tokens_per_second"] = round(num_tokens / (time.perf_counter() - began), 2)
    result["decoded"] = memory()
    return result


def memory() -> dict[str, int]:
    """Megabytes (10^6 bytes) of this process: its peak so far, and what it has in memory now.

    Pages of mapped files count as "file"; the system takes them back when it needs memory.
    """
    kilobytes: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        words = line.split()
        kilobytes[words[0].rstrip(":")] = int(words[1])
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            kilobytes["Peak"] = int(line.split()[1])
    in_kilobytes = {
        "peak": kilobytes["Peak"],
        "anonymous": kilobytes["Anonymous"],
        "file": kilobytes["Rss"] - kilobytes["Anonymous"],
    }
    return {name: round(1.024 * size / 1000) for name, size in in_kilobytes.items()}


if __name__ == "__main__":
    main()
