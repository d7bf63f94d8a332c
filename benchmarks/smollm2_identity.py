"""Is the output the target's own? SmolLM2's greedy output against transformers' `generate`, token for token.

    make smollm2
    python benchmarks/smollm2_identity.py --prompts question.jsonl --output docs/results/smollm2_identity.json

In float32 every way of ours must give what `generate` gives. In bfloat16, where a call over nine tokens rounds
otherwise than nine calls, every first divergence is reported with the gap between the two tokens' logits, in bfloat16
and as float32 sees it. A divergence is a tie when that gap is within what rounding does to it, and otherwise a bug.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from spec_bench import load, mixed
from transformers import AutoModelForCausalLM, DynamicCache

from lightning_specdec.drafters import NGramDrafter
from lightning_specdec.inference import autoregressive_decode, speculative_decode
from lightning_specdec.manifest import manifest
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.text.tokenizer import TextTokenizer

FLOAT32_TIE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
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
        exact: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        target = HuggingFaceLM(AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()).pack()
        eos = sorted(tokenizer.eos)
        expected = [_generate(reference, prompt, options.max_new_tokens) for prompt in prompts]
        found[name] = {}
        for way, outputs in _ours(target, prompts, eos, options).items():
            splits = [
                {"prompt": i, **_divergence(reference, exact, prompt, want, got)}
                for i, (prompt, want, got) in enumerate(zip(prompts, expected, outputs, strict=True))
                if want != got
            ]
            found[name][way] = {"num_prompts": len(prompts), "num_equal": len(prompts) - len(splits), "splits": splits}
            print(f"{name:<9} {way:<26} {len(prompts) - len(splits)} of {len(prompts)} equal", flush=True)
            for split in splits:
                print(f"          {split}", flush=True)
    kinds = [split["verdict"] for ways in found.values() for way in ways.values() for split in way["splits"]]
    print(f"{kinds.count('tie')} ties, {kinds.count('bug')} bugs")
    if options.output:
        record = {"manifest": manifest(options=_plain(options), device=torch.device("cpu")), "identity": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {**vars(options), "output": None, "prompts": Path(options.prompts).name}


def _ours(
    target: HuggingFaceLM, prompts: list[list[int]], eos: list[int], options: argparse.Namespace
) -> dict[str, list[list[int]]]:
    """Every way of ours: one by one and in ragged batches of 8, standard and with look-up."""
    outputs: dict[str, list[list[int]]] = {}
    shared: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos": eos}
    for size in (1, 8):
        batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
        started = time.perf_counter()
        outputs[f"standard, batch {size}"] = [
            tokens for batch in batches for tokens in autoregressive_decode(target, batch, **shared).tokens
        ]
        outputs[f"look-up, batch {size}"] = [
            tokens
            for batch in batches
            for tokens in speculative_decode(
                target, NGramDrafter(), batch, num_draft_tokens=options.num_draft_tokens, **shared
            ).tokens
        ]
        print(f"batch {size}: {time.perf_counter() - started:.0f} s", flush=True)
    return outputs


def _generate(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


def _divergence(reference: Any, exact: Any, prompt: list[int], want: list[int], got: list[int]) -> dict[str, Any]:
    """Where two outputs part, and how far apart the two tokens' logits are there.

    transformers itself scores the place three times: the text in one call, and its end in calls of 1 and of 9 tokens.
    How much the gap changes between these is what rounding does to it.
    """
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    if at in (len(want), len(got)):
        return {"position": at, "verdict": "bug", "why": "one output ends before the other"}
    text, pair = prompt + want[:at], [want[at], got[at]]
    whole, largest = _gap(reference, text, pair, len(text))
    gaps = [whole, *(_gap(reference, text, pair, width)[0] for width in (1, 9))]
    noise = max(gaps) - min(gaps)
    if reference.dtype == torch.bfloat16:
        # bfloat16 keeps 8 bits: neighbouring numbers as large as the largest logit are this far apart.
        noise = max(noise, 2.0 ** (math.floor(math.log2(largest)) - 7))
    else:
        noise = FLOAT32_TIE
    return {
        "position": at,
        "tokens": pair,
        "gap": abs(whole),
        "gap_float32": abs(_gap(exact, text, pair, len(text))[0]),
        "rounding": noise,
        "verdict": "tie" if min(map(abs, gaps)) <= noise else "bug",
    }


@torch.inference_mode()
def _gap(model: Any, text: list[int], pair: list[int], width: int) -> tuple[float, float]:
    """The difference of two tokens' logits behind a text whose end is read in calls of `width`; the largest logit."""
    cache = DynamicCache(config=model.config)
    read = max(1, len(text) - 27) if width < len(text) else 0
    pieces = [text[:read]] if read else []
    pieces += [text[i : i + width] for i in range(read, len(text), width)]
    for piece in pieces:
        output = model(torch.tensor([piece]), past_key_values=cache, logits_to_keep=1)
    logits = output.logits[0, -1].float()
    return (logits[pair[0]] - logits[pair[1]]).item(), logits.abs().max().item()


if __name__ == "__main__":
    main()
