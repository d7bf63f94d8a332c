"""Measure one call of SmolLM2 by its number of tokens, in every form of the model.

    make smollm2
    python benchmarks/smollm2_calls.py --output docs/results/smollm2_calls.json

A figure is the milliseconds of a call on 1 to 16 tokens after a text of 200, the median over
repeats in which the forms take turns. `bench` measures whole decodes and not single calls, so this
is a script of its own. The record also has the bytes of the KV cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record_tables
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.models import KVState
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import in_backend
from lightning_specdec.models.packed import quantize

CONTEXT_LENGTH = 200
WIDTHS = (1, 2, 4, 8, 16)
"""Numbers of tokens in a call."""
DTYPES = (torch.bfloat16, torch.float32)
NUM_WARMUPS = 2
CACHE_LENGTH = 512
"""Tokens of the text whose KV cache is measured."""

Call = Callable[[Tensor], None]
"""Reads tokens `[1, T]` after the context, and rolls back to it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()

    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        dtype_name = str(dtype).removeprefix("torch.")
        calls = model_forms(options.model, dtype)
        for width in WIDTHS:
            milliseconds = measure(calls, random_tokens(width, seed=width), options.repeats)
            rows.append({"dtype": dtype_name, "width": width, "milliseconds": milliseconds})
        rows.append({"dtype": dtype_name, "cache_bytes": cache_bytes(options.model, dtype)})
    print(record_tables.smollm2_calls_table(rows))

    if options.output:
        settings = {"model": options.model, "repeats": options.repeats}
        record = {
            "manifest": manifest(options=settings, device=torch.device("cpu")),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def model_forms(model_path: str, dtype: torch.dtype) -> dict[str, Call]:
    """Every form of the model, each after it has read the same context."""
    int8_model = HuggingFaceLM(load(model_path, dtype))
    quantize(int8_model.model, "int8")
    calls = {
        "transformers": transformers_call(load(model_path, dtype)),
        "ours": our_call(HuggingFaceLM(load(model_path, dtype))),
        "packed": our_call(HuggingFaceLM(load(model_path, dtype)).pack()),
        "int8": our_call(int8_model.pack()),
    }
    if find_spec("openvino"):
        for name, quantization in (("openvino", None), ("openvino int8", "int8")):
            model = HuggingFaceLM(load(model_path, dtype))
            calls[name] = our_call(in_backend(model, "openvino", quantization))
    return calls


def load(model_path: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()


def random_tokens(num_tokens: int, *, seed: int) -> Tensor:
    """Random tokens `[1, num_tokens]`. Small ids are left out: they are special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40_000, (1, num_tokens), generator=generator)


def transformers_call(model: Any) -> Call:
    """transformers' own forward pass, with its dynamic cache."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(random_tokens(CONTEXT_LENGTH, seed=0), past_key_values=cache)

    @torch.inference_mode()
    def call(tokens: Tensor) -> None:
        model(tokens, past_key_values=cache)
        cache.crop(-tokens.shape[1])

    return call


def our_call(model: HuggingFaceLM) -> Call:
    """A forward pass with this package's state."""
    state = model.init_state(1, 2 * CONTEXT_LENGTH)
    with torch.inference_mode():
        context = random_tokens(CONTEXT_LENGTH, seed=0)
        model(context, state, logits_for=slice(-1, None))

    @torch.inference_mode()
    def call(tokens: Tensor) -> None:
        model(tokens, state)
        state.truncate([CONTEXT_LENGTH])

    return call


def measure(calls: dict[str, Call], tokens: Tensor, num_repeats: int) -> dict[str, float]:
    """Median milliseconds of each call. The calls take turns, so that all see the same machine."""
    seconds: dict[str, list[float]] = {form: [] for form in calls}
    for repeat in range(NUM_WARMUPS + num_repeats):
        for form, call in calls.items():
            start = time.perf_counter()
            call(tokens)
            if repeat >= NUM_WARMUPS:
                seconds[form].append(time.perf_counter() - start)
    return {form: 1000 * statistics.median(values) for form, values in seconds.items()}


def cache_bytes(model_path: str, dtype: torch.dtype) -> int:
    """Bytes of the KV cache of a text of `CACHE_LENGTH` tokens."""
    model = HuggingFaceLM(load(model_path, dtype)).pack()
    # A state has room for one token more than it is asked for.
    state = model.init_state(1, CACHE_LENGTH - 1)
    assert isinstance(state, KVState)
    with torch.inference_mode():
        context = random_tokens(CONTEXT_LENGTH, seed=0)
        model(context, state, logits_for=slice(-1, None))
    return sum(buffer.nbytes for buffer in state.storage.buffers())


if __name__ == "__main__":
    main()
