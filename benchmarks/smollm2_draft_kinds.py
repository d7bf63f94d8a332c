"""Measure the block efficiency of each trained draft for SmolLM2 by kind of prompt.

    make smollm2
    python benchmarks/smollm2_draft_kinds.py eagle.safetensors heads.safetensors --prompts question.jsonl \
        --output docs/results/smollm2_draft_kinds.json

Decoding is greedy in bfloat16, one prompt at a time, with one window for all, for each draft alone and with prompt
lookup first. Kinds are Spec-Bench's tasks and the shipped set's domains, none of which was trained on. No text stops
early. The script measures no times, so it may run beside other work. Drafts in the output that are not named are kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from spec_bench import check_same, load

from lightning_specdec import SpeculativeDecoder, checkpoints
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.files import replaced
from lightning_specdec.data.prompts import shipped_prompts
from lightning_specdec.drafters import Drafter, NGramDrafter, NGramWithFallback
from lightning_specdec.drafters.ngram_with_fallback import sure_lookup

LOOKUP = "lookup"
SAME = ("model", "prompts", "num_prompts", "max_new_tokens", "num_draft_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafts", nargs="+", type=Path, help="draft files")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=6, help="prompts of each kind")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--num_draft_tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = {**vars(options), "drafts": [path.name for path in options.drafts], "output": None}
    plain["prompts"] = Path(options.prompts).name
    record: dict[str, Any] = {"drafts": {}}
    if options.output and options.output.exists():
        record = json.loads(options.output.read_text(encoding="utf-8"))
        check_same(plain, [each["manifest"] for each in record["drafts"].values()], SAME)
    decoder = SpeculativeDecoder.from_pretrained(options.model, NGramDrafter(), dtype="bfloat16")
    assert decoder.tokenizer is not None
    kinds = {
        f"Spec-Bench {task}": texts
        for task, texts in load(options.prompts, decoder.tokenizer).items()
    }
    for prompt in [
        prompt for prompt in shipped_prompts() if int(prompt.id[-3:]) <= options.num_prompts
    ]:
        tokens = list(prompt.encoded(decoder.tokenizer).tokens)
        kinds.setdefault(f"shipped {prompt.domain}", []).append(tokens)
    made = manifest(options=plain, device=torch.device("cpu"))
    ways: dict[str, Drafter] = {} if LOOKUP in record["drafts"] else {LOOKUP: NGramDrafter()}
    for path in options.drafts:
        draft = checkpoints.load(path, target=decoder.target).drafter.to(dtype_of(decoder.target))
        ways |= {
            path.stem: draft,
            f"{LOOKUP} + {path.stem}": NGramWithFallback(sure_lookup(), draft),
        }
    for name, drafter in ways.items():
        decoder = SpeculativeDecoder(decoder.target, drafter)
        found = {
            kind: efficiency(decoder, texts[: options.num_prompts], options)
            for kind, texts in kinds.items()
        }
        print(name, *(f"{kind} {value:.2f}" for kind, value in found.items()), sep="  ", flush=True)
        record["drafts"][name] = {"manifest": made, "block_efficiency": found}
    if options.output:
        with replaced(options.output) as file:
            file.write(
                (
                    json.dumps({"manifest": made, "drafts": record["drafts"]}, indent=1) + "\n"
                ).encode()
            )
    print(f"\n{table(record['drafts'])}")


def efficiency(
    decoder: SpeculativeDecoder, prompts: Sequence[list[int]], options: argparse.Namespace
) -> float:
    """New tokens / rounds, over all prompts."""
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "eos": ()}
    rows = [
        decoder.decode([each], num_draft_tokens=options.num_draft_tokens, **settings).rows[0]
        for each in prompts
    ]
    return sum(len(row.tokens) for row in rows) / sum(row.num_rounds for row in rows)


def table(drafts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per kind of prompt and one column per draft, as a Markdown table."""
    kinds = list(
        dict.fromkeys(kind for each in drafts.values() for kind in each["block_efficiency"])
    )
    lines = [f"| Prompts | {' | '.join(drafts)} |", "|---" * (len(drafts) + 1) + "|"]
    for kind in kinds:
        found = [each["block_efficiency"].get(kind) for each in drafts.values()]
        lines.append(
            f"| {kind} | {' | '.join('-' if value is None else f'{value:.2f}' for value in found)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
