"""What speculation saves on the recurrent pair: both figures, every rule, every window.

    make bench
    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/rnn_speed.py --output docs/results/rnn_speed.json

All ratios of a line come from one run with interleaved repeats. `speedup`: the target is called the same way on both
sides, the draft is fused, or compiled where it says so. `equal`: the target is as fused as the draft's roll-out on the
standard side too; `ceiling` is what that could reach in as few rounds as the window allows, with a loop that costs
nothing. `loop` is the time of a round outside the model calls, opening the session included.
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
from lightning_specdec.data import ArithmeticProgressions
from lightning_specdec.drafters.compiled import CompilerMissing
from lightning_specdec.manifest import manifest

WINDOWS = {"fused": (1, 2, 3, 4, 5, 6), "compiled": (3, 6)}
BARS = {("ExactMatch", 0.0): 1.5, ("EpsilonThreshold", 0.0): 1.5, ("RejectionSampling", 1.0): 1.2}
"""What a window of 3 is meant to reach, by rule and temperature."""


def main() -> None:
    """Measure and print; with --output, write the figures and their manifest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", default="checkpoints/rnn.ckpt")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = SpeculativeDecoder.from_checkpoint(options.ckpt)
    splits = ArithmeticProgressions(**decoder.recipe["data_arguments"]).splits()
    length = len(decoder.prompts[0])
    unseen = [list(row)[:length] for row in (*splits.val, *splits.test)]
    prompts = {"test": decoder.prompts, "unseen": unseen}
    found = manifest(options=vars(options) | {"output": None}, device=decoder.target.device, checkpoint=options.ckpt)
    print(f"{found['processor']}, 1 thread, torch {found['torch']}, commit {found['commit']}; 7 new tokens, batch 1")
    rows = []
    rules: list[tuple[AcceptanceRule, float]] = [
        (ExactMatch(), 0.0),
        (EpsilonThreshold(), 0.0),
        (ExactMatch(), 1.0),
        (RejectionSampling(), 1.0),
    ]
    for rule, temperature in rules:
        for name, texts in prompts.items():
            for draft, windows in WINDOWS.items():
                for window in windows:
                    compiled = draft == "compiled"
                    row = measure(decoder, texts, rule, temperature, window, compiled=compiled, repeats=options.repeats)
                    rows.append({"prompts": name, **row})
                    print(line(rows[-1]), flush=True)
    print(f"\n{table(rows)}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"manifest": found, "rows": rows}, indent=1) + "\n")


def measure(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    rule: AcceptanceRule,
    temperature: float,
    window: int,
    *,
    compiled: bool,
    repeats: int,
) -> dict[str, Any]:
    """One line of the table."""
    compile_seconds = 0.0
    pair = SpeculativeDecoder(decoder.target, decoder.drafter)
    if compiled:
        try:
            compile_seconds = pair.compile_draft(num_draft_tokens=window, temperature=temperature)
        except CompilerMissing as error:
            print(error)
    bench = pair.benchmark(
        prompts,
        num_draft_tokens=window,
        rule=rule,
        repeats=repeats,
        equal_treatment=True,
        temperature=temperature,
    )
    assert bench.standard is not None and bench.speculative is not None
    result = bench.speculative.result
    overhead = (result.phase_seconds["accept"] + result.phase_seconds["rest"]) / result.num_target_calls
    return {
        "rule": type(rule).__name__,
        "temperature": temperature,
        "draft": "compiled" if compiled else "fused",
        "num_draft_tokens": window,
        "walltime_speedup": bench.walltime_speedup,
        "equal_treatment_speedup": bench.equal_treatment_speedup,
        "equal_treatment_ceiling": bench.equal_treatment_ceiling,
        "predicted_speedup": bench.predicted_speedup,
        "acceptance_rate": result.acceptance_rate,
        "block_efficiency": result.block_efficiency,
        "loop_microseconds": overhead * 1e6,
        "standard_seconds": bench.standard.seconds,
        "speculative_seconds": bench.speculative.seconds,
        "compile_seconds": compile_seconds,
        "bar": BARS.get((type(rule).__name__, temperature)) if window == 3 else None,
    }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    bar = f"  (bar {row['bar']})" if row["bar"] else ""
    return (
        f"{row['rule']:<17} T={row['temperature']:.0f} {row['prompts']:<6} {row['draft']:<8} "
        f"k={row['num_draft_tokens']}: speedup {row['walltime_speedup']:.2f} | "
        f"equal {row['equal_treatment_speedup']:.2f} ceiling {row['equal_treatment_ceiling']:.2f} | "
        f"predicted {row['predicted_speedup']:.2f} | acceptance {row['acceptance_rate']:.2f} "
        f"block {row['block_efficiency']:.2f} | loop {row['loop_microseconds']:.0f} us{bar}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """The table of the README: each rule at a window of 3 and at its best, over all unseen progressions."""
    lines = [
        "| Rule, temperature | Draft | Window | Acceptance rate | Block efficiency "
        "| walltime_speedup | Equal treatment (its ceiling) |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule, temperature in dict.fromkeys((row["rule"], row["temperature"]) for row in rows):
        group = [
            row for row in rows if (row["rule"], row["temperature"], row["prompts"]) == (rule, temperature, "unseen")
        ]
        best = max(group, key=lambda row: row["walltime_speedup"])
        for row in group:
            if row is not best and (row["num_draft_tokens"], row["draft"]) != (3, "fused"):
                continue
            lines.append(
                f"| {rule}, {temperature:.0f} | {row['draft']} | {row['num_draft_tokens']}{' (best)' * (row is best)} "
                f"| {row['acceptance_rate']:.2f} | {row['block_efficiency']:.2f} | {row['walltime_speedup']:.2f} "
                f"| {row['equal_treatment_speedup']:.2f} ({row['equal_treatment_ceiling']:.2f}) |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
