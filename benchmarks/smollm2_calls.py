"""Measure one call of SmolLM2 by its width in every form of the model, and the memory that decoding adds.

    make smollm2
    python benchmarks/smollm2_calls.py --output docs/results/smollm2_calls.json

Figures are milliseconds of a call on 1 to 16 tokens behind a text of 200, medians of interleaved repeats. The forms are
transformers' own forward pass with its dynamic cache, the same model over our state, with packed weights, with int8
weights, and, if it is installed, in OpenVINO with plain and with int8 weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import in_backend
from lightning_specdec.models.packed import quantize

CONTEXT, WIDTHS = 200, (1, 2, 4, 8, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        calls = _forms(options, dtype)
        for width in WIDTHS:
            tokens = torch.randint(
                100, 40_000, (1, width), generator=torch.Generator().manual_seed(width)
            )
            seconds = _interleave(
                {form: partial(call, tokens) for form, call in calls.items()}, options.repeats
            )
            row = {form: 1000 * statistics.median(each) for form, each in seconds.items()}
            rows.append({"dtype": name, "width": width, "milliseconds": row})
            print(
                f"{name:<9} {width:>3}  "
                + "  ".join(f"{form} {value:.1f}" for form, value in row.items()),
                flush=True,
            )
        rows.append({"dtype": name, **_memory(options, dtype)})
        print(f"{name:<9} {rows[-1]}", flush=True)
    if options.output:
        found = manifest(options={**vars(options), "output": None}, device=torch.device("cpu"))
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Milliseconds by form, as a Markdown table."""
    calls = [row for row in rows if "milliseconds" in row]
    lines = [f"| dtype | Tokens | {' | '.join(calls[0]['milliseconds'])} |"]
    lines.append("|---" * (2 + len(calls[0]["milliseconds"])) + "|")
    for row in calls:
        shown = " | ".join(f"{value:.1f}" for value in row["milliseconds"].values())
        lines.append(f"| {row['dtype']} | {row['width']} | {shown} |")
    return "\n".join(lines)


Call = Callable[[torch.Tensor], None]


def _forms(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, Call]:
    """All forms of the model, each after reading the same text."""
    calls = {"transformers": _theirs(_load(options, dtype))}
    calls["ours"] = _ours(HuggingFaceLM(_load(options, dtype)))
    calls["packed"] = _ours(HuggingFaceLM(_load(options, dtype)).pack())
    int8 = HuggingFaceLM(_load(options, dtype))
    quantize(int8.model, "int8")
    calls["int8"] = _ours(int8.pack())
    if find_spec("openvino"):
        for name, quantization in (("openvino", None), ("openvino int8", "int8")):
            calls[name] = _ours(
                in_backend(HuggingFaceLM(_load(options, dtype)), "openvino", quantization)
            )
    return calls


def _load(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()


def _text() -> torch.Tensor:
    return torch.randint(100, 40_000, (1, CONTEXT), generator=torch.Generator().manual_seed(0))


def _theirs(model: Any) -> Call:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(_text(), past_key_values=cache)

    @torch.inference_mode()
    def call(tokens: torch.Tensor) -> None:
        model(tokens, past_key_values=cache)
        cache.crop(-tokens.shape[1])

    return call


def _ours(model: HuggingFaceLM) -> Call:
    state = model.init_state(1, 2 * CONTEXT)
    with torch.inference_mode():
        model(_text(), state, logits_for=slice(-1, None))

    @torch.inference_mode()
    def call(tokens: torch.Tensor) -> None:
        model(tokens, state)
        state.truncate([CONTEXT])

    return call


def _interleave(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {form: [] for form in calls}
    for i in range(repeats + 2):
        for form, call in calls.items():
            started = time.perf_counter()
            call()
            if i >= 2:
                seconds[form].append(time.perf_counter() - started)
    return seconds


def _memory(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the KV caches of a text of 512 tokens."""
    model = HuggingFaceLM(_load(options, dtype)).pack()
    state = model.init_state(1, 511)
    with torch.inference_mode():
        model(_text(), state, logits_for=slice(-1, None))
    return {
        "cache_bytes": sum(
            buffer.nbytes for pair in state.storage.layers.values() for buffer in pair
        ),
    }


if __name__ == "__main__":
    main()
