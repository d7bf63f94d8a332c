"""Compare SmolLM2's greedy output with transformers' `generate`, token for token.

    make smollm2
    python benchmarks/smollm2_identity.py --prompts question.jsonl --output identity.json
    python benchmarks/smollm2_identity.py --prompts question.jsonl --backend openvino

In float32, all our methods must produce the tokens of `generate`. In bfloat16, a call on nine
tokens rounds differently from nine calls. Every first divergence is reported with the gap between
the logits of the two tokens: it is a tie if the gap is within the rounding error, and otherwise a
bug (`audit.identity`).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
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

DTYPES = ("float32", "bfloat16")
BATCH_SIZES = (1, 8)

Texts = list[list[int]]
"""The tokens of each prompt, or of each answer."""


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
    results: dict[str, dict[str, Any]] = {}
    verdicts: Counter[str] = Counter()
    for dtype in DTYPES:
        results[dtype] = compare(dtype, prompts, sorted(tokenizer.eos), options)
        for method, result in results[dtype].items():
            num_equal = result["num_equal"]
            print(f"{dtype:<9} {method:<26} {num_equal} of {len(prompts)} equal")
            for split in result["splits"]:
                print(f"          {split}")
                verdicts[split["verdict"]] += 1
    print(f"{verdicts['tie']} ties, {verdicts['bug']} bugs")

    if options.output:
        settings = {**vars(options), "output": None, "prompts": Path(options.prompts).name}
        record = {
            "manifest": manifest(options=settings, device=torch.device("cpu")),
            "identity": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def compare(
    dtype: str,
    prompts: Texts,
    eos: list[int],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """For each of our methods, how many answers are those of `generate`, and where others split."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, dtype)
    ).eval()
    expected = [generate(reference, prompt, options.max_new_tokens) for prompt in prompts]

    decoder = SpeculativeDecoder.from_pretrained(
        options.model, dtype=dtype, backend=options.backend
    )
    target, *_ = decoder.ready()
    results = {}
    for method, answers in our_answers(target, prompts, eos, options).items():
        splits = find_splits(target, prompts, expected, answers, options.num_draft_tokens)
        results[method] = {
            "num_prompts": len(prompts),
            "num_equal": len(prompts) - len(splits),
            "splits": splits,
        }
    return results


def generate(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The answer of transformers' `generate`."""
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def our_answers(
    target: LanguageModel,
    prompts: Texts,
    eos: list[int],
    options: argparse.Namespace,
) -> dict[str, Texts]:
    """All our methods: one by one and in ragged batches, standard and with lookup."""
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos": eos}
    answers: dict[str, Texts] = {}
    for batch_size in BATCH_SIZES:
        standard_answers: Texts = []
        lookup_answers: Texts = []
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            standard_answers += autoregressive_decode(target, batch, **settings).tokens
            lookup_answers += speculative_decode(
                target,
                NGramDrafter(),
                batch,
                num_draft_tokens=options.num_draft_tokens,
                **settings,
            ).tokens
        answers[f"standard, batch {batch_size}"] = standard_answers
        answers[f"lookup, batch {batch_size}"] = lookup_answers
    return answers


def find_splits(
    target: LanguageModel,
    prompts: Texts,
    expected: Texts,
    answers: Texts,
    num_draft_tokens: int,
) -> list[dict[str, Any]]:
    """The first divergence of each answer that is not the expected one, with its verdict."""
    splits = []
    texts = zip(prompts, expected, answers, strict=True)
    for number, (prompt, expected_answer, answer) in enumerate(texts):
        divergence = find_divergence(
            target,
            prompt,
            expected_answer,
            answer,
            prompt_index=number,
            sampling=Sampling(),
            seed=0,
            width=num_draft_tokens + 1,
        )
        if divergence is not None:
            splits.append(vars(divergence))
    return splits


if __name__ == "__main__":
    main()
