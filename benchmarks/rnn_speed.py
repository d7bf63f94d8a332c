"""Measure the speedup and the block efficiency of the recurrent pair with every rule and window.

    make bench
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/rnn_speed.py --output docs/results/rnn_speed.json

The repeats of each window alternate with those of standard decoding of the packed target. Older records have one more
column: the speedup over a fused autoregressive baseline, and its upper bound.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from lightning_specdec import (
    AcceptanceRule,
    EpsilonThreshold,
    ExactMatch,
    RejectionSampling,
    SpeculativeDecoder,
)
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.data import ArithmeticProgressions

WINDOWS = (1, 2, 3, 4, 5, 6)
MAX_NEW_TOKENS = 7
"""Remaining tokens of a progression after its prompt."""
FIGURES = ("walltime_speedup", "predicted_speedup", "acceptance_rate", "block_efficiency")
RULES: tuple[tuple[AcceptanceRule, float], ...] = (
    (ExactMatch(), 0.0),
    (EpsilonThreshold(), 0.0),
    (ExactMatch(), 1.0),
    (RejectionSampling(), 1.0),
)


def main() -> None:
    """Measure and print; with --output, write the figures and their manifest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", default="checkpoints/rnn.safetensors")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = SpeculativeDecoder.from_checkpoint(options.ckpt)
    splits = ArithmeticProgressions(**decoder.recipe["data_arguments"]).splits()
    length = len(decoder.prompts[0])
    unseen = [list(row)[:length] for row in (*splits.val, *splits.test)]
    prompts = {"test": decoder.prompts, "unseen": unseen}
    found = manifest(
        options=vars(options) | {"output": None},
        device=decoder.target.device,
        checkpoint=options.ckpt,
    )
    print(f"{found['processor']}, 1 thread, torch {found['torch']}, commit {found['commit']}")
    print(f"{MAX_NEW_TOKENS} new tokens, batch 1")
    rows = []
    for rule, temperature in RULES:
        for name, texts in prompts.items():
            settings = {
                "windows": WINDOWS,
                "rule": rule,
                "temperature": temperature,
                "repeats": options.repeats,
            }
            settings |= {"max_new_tokens": MAX_NEW_TOKENS, "drafters": {"fused": decoder.drafter}}
            for each in decoder.sweep(texts, **settings):
                row = {
                    "prompts": name,
                    "rule": type(rule).__name__,
                    "temperature": temperature,
                    **each.summary(),
                }
                rows.append(row)
                figures = (f"{key} {row[key]:.2f}" for key in FIGURES if row[key] is not None)
                print(
                    row["rule"],
                    f"T={temperature:.0f}",
                    name,
                    f"k={row['num_draft_tokens']}:",
                    *figures,
                    flush=True,
                )
    print(f"\n{table(rows)}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Table of the README: each rule at window 3 and at its best window, over all held-out progressions."""
    heads = [
        "Rule, temperature",
        "Draft",
        "Window",
        "Acceptance rate",
        "Block efficiency",
        "walltime_speedup",
    ]
    older = "equal_treatment_speedup" in rows[0]
    heads += ["Equal treatment (its ceiling)"] * older
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for rule, temperature in dict.fromkeys((row["rule"], row["temperature"]) for row in rows):
        setting = (rule, temperature, "unseen")
        group = [
            row for row in rows if (row["rule"], row["temperature"], row["prompts"]) == setting
        ]
        best = max(group, key=lambda row: row["walltime_speedup"])
        for row in group:
            if row is not best and (row["num_draft_tokens"], row["draft"]) != (3, "fused"):
                continue
            cells = [
                f"{rule}, {temperature:.0f}",
                row["draft"],
                f"{row['num_draft_tokens']}{' (best)' * (row is best)}",
            ]
            cells += [
                f"{row[key]:.2f}"
                for key in ("acceptance_rate", "block_efficiency", "walltime_speedup")
            ]
            if older:
                cells.append(
                    f"{row['equal_treatment_speedup']:.2f} ({row['equal_treatment_ceiling']:.2f})"
                )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
