"""Time batches of recurrent and hybrid models whose rows share calls, and whose rows do not.

    python benchmarks/joined_rows.py --output docs/results/joined_rows.json

The models have random weights and 8 layers of width 1024. Standard decoding, and a draft model with
similar weights, decode prompts of different lengths: with one call for all rows that read equally
many tokens, and with one call for each row. Both take turns in one process, and each figure is a
median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import (
    DecodeResult,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.row_reader import Joins

HYBRID: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **HYBRID,
        "head_dim": 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
    },
    "lfm2": HYBRID,
    "mamba2": {
        "vocab_size": 16_384,
        "hidden_size": 1024,
        "num_heads": 32,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 64,
    },
    "bloom": {"vocab_size": 16_384, "hidden_size": 1024, "n_head": 16},
}
LAYER_KINDS = {"qwen3_5_text": "linear_attention", "lfm2": "conv"}
"""The recurrent layers of the hybrid families; every second layer is of full attention."""
NUM_LAYERS = 8
NOISE = 0.02
"""Of the draft's weights, relative to their spread."""
PROMPT_LENGTHS = (64, 48, 24, 12, 56, 40, 32, 20)
NUM_DRAFT_TOKENS = 3

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()

    rows: list[Row] = []
    for family in options.families:
        for batch_size in options.batch_sizes:
            rows += measure(family, batch_size, options.max_new_tokens, options.repeats)
    if options.output:
        record = {
            "manifest": manifest(options=vars(options), device=torch.device("cpu")),
            "rows": rows,
        }
        options.output.write_text(json.dumps(record, indent=1, default=str) + "\n")


def measure(family: str, batch_size: int, num_new: int, repeats: int) -> list[Row]:
    """One row for standard decoding, and one for a draft model."""
    target = random_model(family, NUM_LAYERS)
    draft = noisy_copy(target)
    generator = torch.Generator().manual_seed(0)
    prompts = []
    for length in PROMPT_LENGTHS[:batch_size]:
        prompts.append(torch.randint(1, 16_384, (length,), generator=generator).tolist())
    drafter = ModelDrafter(draft)

    def standard() -> DecodeResult:
        return autoregressive_decode(target, prompts, max_new_tokens=num_new)

    def drafted() -> DecodeResult:
        return speculative_decode(
            target,
            drafter,
            prompts,
            max_new_tokens=num_new,
            num_draft_tokens=NUM_DRAFT_TOKENS,
        )

    rows = []
    for method, decode in (("standard decoding", standard), ("draft model", drafted)):
        timed_row = timed(decode, (target, draft), repeats)
        row = {"family": family, "batch_size": batch_size, "method": method, **timed_row}
        print(row, flush=True)
        rows.append(row)
    return rows


def noisy_copy(model: HuggingFaceLM) -> HuggingFaceLM:
    copied = deepcopy(model.model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.add_(torch.randn_like(weight) * NOISE * weight.std().nan_to_num())
    return HuggingFaceLM(copied)


def random_model(family: str, num_layers: int) -> HuggingFaceLM:
    settings = dict(FAMILIES[family])
    name = "n_layer" if family == "bloom" else "num_hidden_layers"
    settings[name] = num_layers
    if family in LAYER_KINDS:
        settings["layer_types"] = [LAYER_KINDS[family], "full_attention"] * (num_layers // 2)
    torch.manual_seed(num_layers)
    config = AutoConfig.for_model(family, **settings)
    return HuggingFaceLM(AutoModelForCausalLM.from_config(config).eval())


def timed(
    decode: Callable[[], DecodeResult], models: tuple[HuggingFaceLM, ...], repeats: int
) -> Row:
    """Seconds with shared calls and with calls for each row, and whether the tokens are equal."""
    decode()
    joins = [reader_of(model).joins for model in models]
    seconds: dict[str, list[float]] = {"one_by_one": [], "together": []}
    results = {}
    for _ in range(repeats):
        for way, times in seconds.items():
            for model, found in zip(models, joins, strict=True):
                reader_of(model).joins = found if way == "together" else Joins.NONE
            start = time.perf_counter()
            results[way] = decode()
            times.append(time.perf_counter() - start)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "joins": joins[0].name,
        "seconds_together": round(medians["together"], 4),
        "seconds_one_by_one": round(medians["one_by_one"], 4),
        "times_as_fast": round(medians["one_by_one"] / medians["together"], 3),
        "acceptance_length": results["together"].block_efficiency,
        "equal_tokens": results["together"].tokens == results["one_by_one"].tokens,
    }


def reader_of(model: HuggingFaceLM) -> Any:
    return model._row_reader


if __name__ == "__main__":
    main()
