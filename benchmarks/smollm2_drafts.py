"""Measure the best window and the speedup of each trained draft for SmolLM2, alone and with prompt lookup first.

    make smollm2
    python benchmarks/smollm2_drafts.py eagle.safetensors heads.safetensors --prompts question.jsonl \
        --output docs/results/smollm2_drafts.json

Greedy decoding in the first dtype measures all windows, each beside standard decoding, one prompt at a time, with
alternating repeats. Rejection sampling at temperature 1 in that dtype, and greedy decoding in the others, use the
window that was best there. Both sides use the same form of weights. Prompts alternate between the tasks of Spec-Bench
and between the domains of the shipped set; none was trained on. No text stops early. The cost of training is read from
the draft files' recipes.

Drafts in the output that are not named are kept, each with the manifest of its own run; so is lookup alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from spec_bench import check_same, load, mixed
from transformer_speed import line

from lightning_specdec import (
    AcceptanceRule,
    ExactMatch,
    RejectionSampling,
    SpeculativeDecoder,
    checkpoints,
)
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.rows import Comparison
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.files import replaced
from lightning_specdec.data.prompts import shipped_prompts
from lightning_specdec.drafters import Drafter, NGramDrafter, NGramWithFallback
from lightning_specdec.drafters.ngram_with_fallback import sure_lookup

LOOKUP = "lookup"
DTYPES = ("bfloat16", "float32")
SAME = ("model", "prompts", "num_prompts", "num_shipped", "max_new_tokens", "threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafts", nargs="+", type=Path, help="draft files")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--num_prompts", type=int, default=12, help="prompts of Spec-Bench")
    parser.add_argument(
        "--num_shipped", type=int, default=2, help="prompts of each domain of the shipped set"
    )
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 2, 3, 4, 6])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = {**vars(options), "drafts": [path.name for path in options.drafts], "output": None}
    plain["prompts"] = Path(options.prompts).name
    drafts: dict[str, Any] = {}
    if (
        options.output and options.output.exists()
    ):  # fail now, not after an hour, if the record cannot be extended
        drafts = json.loads(options.output.read_text(encoding="utf-8"))["drafts"]
        check_same(plain, [each["manifest"] for each in drafts.values()], SAME)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        rows += measured(dtype, options, rows, look_up=LOOKUP not in drafts)
    made = manifest(options=plain, device=torch.device("cpu"))
    recipes = {
        path.stem: {**told(path), "file_bytes": path.stat().st_size} for path in options.drafts
    }
    for name in dict.fromkeys(row["draft"].removeprefix(f"{LOOKUP} + ") for row in rows):
        own = [row for row in rows if row["draft"].removeprefix(f"{LOOKUP} + ") == name]
        drafts[name] = {"manifest": made, "recipe": recipes.get(name), "rows": own}
    if options.output:
        with replaced(options.output) as file:
            file.write((json.dumps({"manifest": made, "drafts": drafts}, indent=1) + "\n").encode())
    print(f"\n{table(drafts)}")


def told(path: Path) -> dict[str, Any]:
    """Training record in a draft file."""
    found = checkpoints.load(path)
    names = ("training", "tokens_seen", "training_seconds", "reached", "loss", "steps")
    return {
        "kind": type(found.drafter).__name__,
        **{name: found.recipe.get(name) for name in names},
    }


def measured(
    dtype: str, options: argparse.Namespace, before: Sequence[Mapping[str, Any]], *, look_up: bool
) -> list[dict[str, Any]]:
    """All rows of one dtype.

    Args:
        before: rows of other dtypes, whose best windows are used.
        look_up: whether to measure lookup alone too.
    """
    decoder = SpeculativeDecoder.from_pretrained(options.model, NGramDrafter(), dtype=dtype)
    assert decoder.tokenizer is not None
    prompts = mixed(load(options.prompts, decoder.tokenizer), options.num_prompts)
    shipped = [prompt for prompt in shipped_prompts() if int(prompt.id[-3:]) <= options.num_shipped]
    prompts += [list(prompt.encoded(decoder.tokenizer).tokens) for prompt in shipped]
    trained = {
        path.stem: checkpoints.load(path, target=decoder.target).drafter.to(
            dtype_of(decoder.target)
        )
        for path in options.drafts
    }
    drafts: dict[str, Drafter] = {LOOKUP: NGramDrafter()} if look_up else {}
    for name, each in trained.items():
        drafts |= {name: each, f"{LOOKUP} + {name}": NGramWithFallback(sure_lookup(), each)}
    shared: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "eos": (),
        "repeats": options.repeats,
    }
    rows: list[dict[str, Any]] = []

    def add(
        name: str, windows: Sequence[int], rule: AcceptanceRule, temperature: float
    ) -> list[Comparison]:
        settings = {
            "windows": windows,
            "rule": rule,
            "temperature": temperature,
            "warmup": 0,
            **shared,
        }
        cells = []
        for cell in decoder.sweep(prompts, drafters={name: drafts[name]}, **settings):
            cells.append(cell)
            told = {"dtype": dtype, "rule": type(rule).__name__, "temperature": temperature}
            rows.append({**told, **cell.summary()})
            print(f"{dtype:<9}", line({"checkpoint": "smollm2", **rows[-1]}), flush=True)
        return cells

    for name in drafts:
        known = _best(before, name, before[0]["dtype"]) if before else None
        cells = add(
            name,
            options.windows if known is None else [known["num_draft_tokens"]],
            ExactMatch(),
            0.0,
        )
        timed = [cell for cell in cells if cell.walltime_speedup is not None]
        if (
            known is None and timed
        ):  # near ties in bfloat16 may differ from standard decoding: the row records it
            top = max(timed, key=lambda cell: cell.walltime_speedup or (0.0, 0.0, 0.0))
            add(name, [int(top.case.num_draft_tokens or 0)], RejectionSampling(), 1.0)
    return rows


def table(drafts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per draft, alone and with lookup first, at its best window, as a Markdown table."""
    rows = [row for each in drafts.values() for row in each["rows"]]
    lines = [
        "| Draft | Training, minutes | Tokens seen | Teacher-forced acceptance | Window | Block efficiency, T=0, T=1 "
        "| walltime_speedup bfloat16, T=0, T=1 | float32, T=0 | File, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["draft"] for row in rows):
        recipe = drafts[name.removeprefix(f"{LOOKUP} + ")]["recipe"] or {}
        first = next(str(row["dtype"]) for row in rows if row["draft"] == name)
        tops = {dtype: _best(rows, name, dtype) for dtype in DTYPES}
        sampled = {dtype: _sampled(rows, name, dtype) for dtype in tops}
        if (top := tops[first]) is None:
            continue
        efficiency = ", ".join(_shown(row, "block_efficiency") for row in (top, sampled[first]))
        speeds = ", ".join(_shown(each["bfloat16"], "walltime_speedup") for each in (tops, sampled))
        trained = bool(recipe) and name in drafts  # neither lookup alone nor lookup first
        cells = [
            name,
            f"{recipe['training_seconds'] / 60:.0f}"
            if trained and recipe.get("training_seconds")
            else "-",
            f"{recipe['tokens_seen'] / 1e6:.2f} M"
            if trained and recipe.get("tokens_seen")
            else "-",
            _acceptance(recipe) if trained else "-",
            str(top["num_draft_tokens"]),
            efficiency,
            speeds,
            _shown(tops["float32"], "walltime_speedup"),
            f"{recipe['file_bytes'] / 1e6:.1f}" if trained else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(rows: Sequence[Mapping[str, Any]], name: str, dtype: str) -> Mapping[str, Any] | None:
    own = [
        row
        for row in rows
        if (row["draft"], row["dtype"]) == (name, dtype) and row["error"] is None
    ]
    greedy = [row for row in own if row["temperature"] == 0]
    return max(greedy, key=lambda row: row["walltime_speedup"], default=None)


def _sampled(rows: Sequence[Mapping[str, Any]], name: str, dtype: str) -> Mapping[str, Any] | None:
    """Rejection sampling; for a draft without probabilities, exact matching is equivalent."""
    own = [
        row
        for row in rows
        if (row["draft"], row["dtype"], row["rule"]) == (name, dtype, "RejectionSampling")
    ]
    return next((row for row in own if row["error"] is None), None)


def _acceptance(recipe: Mapping[str, Any]) -> str:
    reached = recipe.get("reached") or {}
    names = [
        name for name in reached if name.startswith("val/position_") and "sampling" not in name
    ]
    return " ".join(f"{reached[name]:.2f}" for name in sorted(names)) or "-"


def _shown(row: Mapping[str, Any] | None, name: str) -> str:
    return "-" if row is None or row[name] is None else f"{row[name]:.2f}"


if __name__ == "__main__":
    main()
