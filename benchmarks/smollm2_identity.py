"""Compare SmolLM2's greedy output with transformers' `generate`, token for token.

    make smollm2
    python benchmarks/smollm2_identity.py --prompts question.jsonl --output docs/results/smollm2_identity.json
    python benchmarks/smollm2_identity.py --prompts question.jsonl --backend openvino --output FILE

In float32, all our methods must give the tokens of `generate`. In bfloat16, a call on nine tokens rounds differently
from nine calls. Every first divergence is reported with the gap between the logits of the two tokens: it is a tie if
the gap is within the rounding error, and otherwise a bug (`audit.identity`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from spec_bench import load, mixed
from transformers import AutoModelForCausalLM

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.audit.identity import find_divergence
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Sampling
from lightning_specdec.text.tokenizer import TextTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--backend", default="torch", choices=("torch", "openvino"))
    parser.add_argument("--num_prompts", type=int, default=20)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--num_draft_tokens", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokenizer = TextTokenizer.load(options.model)
    prompts = mixed(load(options.prompts, tokenizer), options.num_prompts)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        reference: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        target = SpeculativeDecoder.from_pretrained(
            options.model, dtype=name, backend=options.backend
        ).ready()[0]
        eos = sorted(tokenizer.eos)
        expected = [_generate(reference, prompt, options.max_new_tokens) for prompt in prompts]
        found[name] = {}
        for way, outputs in _ours(target, prompts, eos, options).items():
            settings: dict[str, Any] = {
                "sampling": Sampling(),
                "seed": 0,
                "width": options.num_draft_tokens + 1,
            }
            each = (
                find_divergence(target, *texts, number=number, **settings)
                for number, texts in enumerate(zip(prompts, expected, outputs, strict=True))
            )
            splits = [vars(parting) for parting in each if parting is not None]
            found[name][way] = {
                "num_prompts": len(prompts),
                "num_equal": len(prompts) - len(splits),
                "splits": splits,
            }
            print(
                f"{name:<9} {way:<26} {len(prompts) - len(splits)} of {len(prompts)} equal",
                flush=True,
            )
            for split in splits:
                print(f"          {split}", flush=True)
    kinds = [
        split["verdict"]
        for ways in found.values()
        for way in ways.values()
        for split in way["splits"]
    ]
    print(f"{kinds.count('tie')} ties, {kinds.count('bug')} bugs")
    plain = {**vars(options), "output": None, "prompts": Path(options.prompts).name}
    if options.output:
        record = {
            "manifest": manifest(options=plain, device=torch.device("cpu")),
            "identity": found,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def _ours(
    target: LanguageModel, prompts: list[list[int]], eos: list[int], options: argparse.Namespace
) -> dict[str, list[list[int]]]:
    """All our methods: one by one and in ragged batches of 8, standard and with lookup."""
    outputs: dict[str, list[list[int]]] = {}
    shared: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos": eos}
    for size in (1, 8):
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        outputs[f"standard, batch {size}"] = [
            tokens
            for batch in batches
            for tokens in autoregressive_decode(target, batch, **shared).tokens
        ]
        outputs[f"lookup, batch {size}"] = [
            tokens
            for batch in batches
            for tokens in speculative_decode(
                target, NGramDrafter(), batch, num_draft_tokens=options.num_draft_tokens, **shared
            ).tokens
        ]
    return outputs


def _generate(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main()
