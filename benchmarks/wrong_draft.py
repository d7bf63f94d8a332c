"""Measure the cost of a draft that is never right with an adaptive window: SmolLM2 with six random layers of its shape.

    make smollm2
    python benchmarks/wrong_draft.py --prompts question.jsonl --output docs/results/wrong_draft.json

Each prompt is decoded alternately with standard decoding and with the draft, prefill included. The figure is the ratio
of their seconds: the slowdown with the worst draft and the window `auto`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from spec_bench import load, mixed
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.config.files import replaced
from lightning_specdec.drafters import ModelDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM

COUNTS = ("num_proposed", "num_tested", "num_accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--backend", default="openvino", choices=("torch", "openvino"))
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.model)
    config.update({"num_hidden_layers": 6})
    draft = HuggingFaceLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    kind = {"dtype": "bfloat16", "backend": options.backend}
    decoder = SpeculativeDecoder.from_pretrained(options.model, ModelDrafter(draft), **kind)
    prompts = mixed(load(options.prompts, decoder.tokenizer), options.num_prompts)
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "eos": (),
        "num_draft_tokens": "auto",
    }
    ratios: list[list[float]] = [[] for _ in prompts]
    counts = [0, 0, 0]
    decoder.decode(prompts[0], **settings)  # this call calibrates
    for repeat in range(options.repeats):
        for number, prompt in enumerate(prompts):
            ways: list[Any] = [decoder.decode, decoder.decode_standard]
            seconds: dict[Any, float] = {}
            for way in ways if (repeat + number) % 2 else reversed(ways):
                began = time.perf_counter()
                result = way(prompt, **settings)
                seconds[way] = time.perf_counter() - began
                for i, name in enumerate(COUNTS if result.counts else ()):
                    counts[i] += getattr(result.counts, name)
            ratios[number].append(seconds[ways[0]] / seconds[ways[1]])
    values = [statistics.median(each) for each in ratios]
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(2000))
    found = {
        "seconds_over_standard": statistics.median(values),
        "interval": [medians[50], medians[-51]],
        "by_prompt": values,
        **dict(zip(COUNTS, counts, strict=True)),
    }
    print(json.dumps(found))
    plain = {**vars(options), "output": None, "prompts": Path(options.prompts).name}
    if options.output:
        record = {"manifest": manifest(options=plain, device=torch.device("cpu")), **found}
        with replaced(options.output) as file:
            file.write((json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
