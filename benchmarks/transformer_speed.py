"""Measure the speedup of each kind of draft on the shipped transformers: the best of its exits, drafts and windows.

    make bench-transformers
    python benchmarks/transformer_speed.py --output docs/results/transformers.json

Repeats of every cell of the grid alternate with standard decoding of the same target. Greedy decoding at batch 1 covers
the whole grid. At temperature 1, and in batches (greedy), the script measures all windows of the draft that was best
there. Prompts are from the checkpoint's held-out data; those of a batch have different lengths. No text stops early.

The second table shows how well each exit, head or draft predicts held-out sequences alone: loss in nats, accuracy,
bits per byte of text, and how often its most likely token is the target's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_specdec import (
    AcceptanceRule,
    ExactMatch,
    ModelDrafter,
    RejectionSampling,
    SpeculativeDecoder,
)
from lightning_specdec import data as data_modules
from lightning_specdec.bench.candidates import candidates
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.measure import best
from lightning_specdec.bench.rows import Comparison
from lightning_specdec.data import IGNORED, TokenData
from lightning_specdec.drafters import Drafter, EarlyExitDrafter
from lightning_specdec.drafters.early_exit import ExitModel
from lightning_specdec.drafters.medusa import MedusaDrafter
from lightning_specdec.drafters.staged import StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.packed import limit_threads
from lightning_specdec.training.metrics import next_token_loss

NAMES = ("transformer", "early_exit", "medusa", "staged", "text", "draft_sizes")
SETTINGS: list[tuple[AcceptanceRule, float]] = [
    (ExactMatch(), 0.0),
    (ExactMatch(), 1.0),
    (RejectionSampling(), 1.0),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkpoints", nargs="*", type=Path, help="default: shipped ones and those of `fit`"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument(
        "--num_prompts",
        type=int,
        default=4,
        help="at batch 1; larger batches have one prompt per row",
    )
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, help="number of threads (default: one for small models)"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    paths = options.checkpoints or [
        path for name in NAMES if (path := found_checkpoint(name)) is not None
    ]
    if not paths:
        raise SystemExit(f"there is none of {', '.join(NAMES)} in checkpoints/: name a checkpoint")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    predictions: list[dict[str, Any]] = []
    for path in paths:
        decoder = SpeculativeDecoder.from_checkpoint(path)
        if options.threads is None:
            limit_threads(decoder.target.num_parameters)
        given = {
            name: value
            for name, value in decoder.recipe["data_arguments"].items()
            if name != "max_bytes"
        }
        data: TokenData = getattr(data_modules, decoder.recipe["data"])(
            **given
        )  # older runs had max_bytes
        name = checkpoint_name(path)
        predictions += [{"checkpoint": name, **row} for row in quality(decoder, data)]
        print(
            f"{quality_table([row for row in predictions if row['checkpoint'] == name])}\n",
            flush=True,
        )
        rows += _measured(name, decoder, data.prompts(), options)
    plain = {
        **vars(options),
        "output": None,
        "checkpoints": [checkpoint_name(path) for path in paths],
    }
    found = manifest(options=plain, device=torch.device("cpu"))
    found["checkpoint_sha256"] = {
        checkpoint_name(path): sha256(path.read_bytes()).hexdigest() for path in paths
    }
    print(f"\n{table(rows)}")
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"manifest": found, "rows": rows, "quality": predictions}
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    if wrong := [row for row in rows if row["same_tokens"] is False]:
        sys.exit(f"OTHER TOKENS than standard decoding in {len(wrong)} of {len(rows)} rows")


def found_checkpoint(name: str) -> Path | None:
    """The shipped checkpoint of that name, or else the best one of the `fit` run of its config."""
    folder = Path("checkpoints")
    return next(
        (
            path
            for path in (folder / f"{name}.safetensors", folder / name / "best.ckpt")
            if path.exists()
        ),
        None,
    )


def checkpoint_name(path: Path) -> str:
    """Name of a checkpoint in the tables; best and last ones of a run have the name of their directory."""
    return path.parent.name if path.stem in ("best", "last") else path.stem


def _measured(
    name: str, decoder: SpeculativeDecoder, held_out: list[list[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure the grid of one checkpoint in every setting."""
    rows: list[dict[str, Any]] = []
    drafts: dict[str, Drafter] = {name: each.drafter for name, each in candidates(decoder).items()}
    for batch_size in options.batch_sizes:
        number = options.num_prompts if batch_size == 1 else batch_size
        for rule, temperature in SETTINGS if batch_size == 1 else SETTINGS[:1]:
            cells: list[Comparison] = []
            for cell in decoder.sweep(
                ragged(held_out, number),
                drafters=drafts,
                windows=options.windows,
                max_new_tokens=options.max_new_tokens,
                rule=rule,
                eos=(),
                repeats=options.repeats,
                batch_size=batch_size,
                temperature=temperature,
            ):
                cells.append(cell)
                rows.append(
                    {
                        "checkpoint": name,
                        "rule": type(rule).__name__,
                        "temperature": temperature,
                        **cell.summary(),
                    }
                )
                print(line(rows[-1]), flush=True)
            top = best(cells)
            if top is not None:
                drafts = {str(top.case.draft): drafts[str(top.case.draft)]}
    return rows


def ragged(prompts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """A number of prompts of different lengths, cycling from whole prompts down to half of them."""
    found = []
    for i in range(number):
        prompt = list(prompts[i % len(prompts)])
        found.append(
            prompt[: max(1, len(prompt) - (i * len(prompt) // 8) % (len(prompt) // 2 + 1))]
        )
    return found


def ends(row: dict[str, Any]) -> tuple[float, float]:
    """Interval of a speedup; older records hold quartiles."""
    low, high = row.get("speedup_quartiles") or (
        row["walltime_speedup_low"],
        row["walltime_speedup_high"],
    )
    return (0.0, float("inf")) if low is None else (low, high)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    start = f"{row['checkpoint']:<12} {row['rule']:<17} T={row['temperature']:.0f} batch {row['batch_size']:>2} "
    start += f"{row['draft']:<16} k={row['num_draft_tokens']}:"
    if row["error"] is not None:
        return f"{start} failed: {row['error']}"
    first, third = ends(row)
    told = "  OTHER TOKENS than standard decoding" if row["same_tokens"] is False else ""
    return (
        f"{start} speedup {row['walltime_speedup']:.2f} ({first:.2f} to {third:.2f}) | "
        f"acceptance {_shown(row['acceptance_rate'])} block {row['block_efficiency']:.2f} | "
        f"cost ratio {_shown(row['cost_ratio'])}{told}"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Best row of each checkpoint in each setting, as a Markdown table."""
    lines = [
        "| Checkpoint | Rule, temperature | Batch | Draft, window | Acceptance rate | Block efficiency | Cost ratio "
        "| walltime_speedup (quartiles) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("checkpoint", "rule", "temperature", "batch_size")
    for setting in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        group = [
            row
            for row in rows
            if tuple(row[key] for key in keys) == setting and row["error"] is None
        ]
        if not group:
            lines.append(
                f"| {setting[0]} | {setting[1]}, {setting[2]:.0f} | {setting[3]} | failed | - | - | - | - |"
            )
            continue
        row = max(group, key=lambda row: row["walltime_speedup"])
        first, third = ends(row)
        lines.append(
            f"| {setting[0]} | {setting[1]}, {setting[2]:.0f} | {setting[3]} "
            f"| {row['draft']}, {row['num_draft_tokens']} | {_shown(row['acceptance_rate'])} "
            f"| {row['block_efficiency']:.2f} | {_shown(row['cost_ratio'])} "
            f"| {row['walltime_speedup']:.2f} ({first:.2f} to {third:.2f}) |"
        )
    return "\n".join(lines)


def grid_table(rows: Sequence[dict[str, Any]]) -> str:
    """Acceptance rate and speedup of every draft with every window, greedy at batch 1, as a Markdown table."""
    greedy = [
        row
        for row in rows
        if row["temperature"] == 0 and row["batch_size"] == 1 and row["error"] is None
    ]
    windows = list(dict.fromkeys(row["num_draft_tokens"] for row in greedy))
    cells = {
        (
            row["checkpoint"],
            row["draft"],
            row["num_draft_tokens"],
        ): f"{row['walltime_speedup']:.2f} "
        f"({_shown(row['acceptance_rate'])}, {row['block_efficiency']:.1f})"
        for row in greedy
    }
    lines = [
        "| Checkpoint | Draft |" + "".join(f" window {window} |" for window in windows),
        "|---|---|" + "---|" * len(windows),
    ]
    for checkpoint, draft in dict.fromkeys((row["checkpoint"], row["draft"]) for row in greedy):
        figures = " | ".join(cells.get((checkpoint, draft, window), "-") for window in windows)
        lines.append(f"| {checkpoint} | {draft} | {figures} |")
    return "\n".join(lines)


def quality_table(rows: Sequence[dict[str, Any]]) -> str:
    """Quality of all predictors, as a Markdown table."""
    lines = [
        "| Checkpoint | Predicts | Loss | Accuracy | Bits per byte | Agrees with the target |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = " | ".join(
            _shown(row[name], 3) for name in ("loss", "accuracy", "bits_per_byte", "agreement")
        )
        lines.append(f"| {row['checkpoint']} | {row['predictor']} | {figures} |")
    return "\n".join(lines)


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


Predictor = tuple[str, int, Callable[[Tensor], Tensor]]
"""Name, number of positions ahead that it predicts, and its logits `[B, T, V]` for tokens `[B, T]`."""


@torch.no_grad()
def quality(decoder: SpeculativeDecoder, data: TokenData) -> list[dict[str, Any]]:
    """Quality of all predictors on held-out data (validation and test), the target first."""
    target = decoder.target.eval()
    predictors: list[Predictor] = [("target", 1, lambda tokens: target(tokens).logits)]
    for name, candidate in candidates(decoder).items():
        predictors += predictors_of(name, candidate.drafter.eval(), target)
    losses = {name: 0.0 for name, _, _ in predictors}
    correct, agreeing, compared = (dict.fromkeys(losses, 0) for _ in range(3))
    for batch in chain(data.val_dataloader(), data.test_dataloader()):
        likeliest = target(batch.tokens).logits.argmax(-1)
        for name, ahead, score in predictors:
            logits, labels = score(batch.tokens), batch.next_tokens()
            logits, labels = logits[:, :-ahead], labels[:, ahead - 1 :]
            losses[name] += float(next_token_loss(logits, labels, "sum"))
            own, others = logits.argmax(-1), likeliest[:, ahead - 1 : ahead - 1 + labels.shape[1]]
            real = labels != IGNORED
            correct[name] += int((own == labels)[real].sum())
            agreeing[name] += int((own == others)[real].sum())
            compared[name] += int(real.sum())
    num_bytes = data.bytes_per_token("val", "test")
    return [
        {
            "predictor": name,
            "loss": losses[name] / compared[name],
            "accuracy": correct[name] / compared[name],
            "bits_per_byte": None
            if num_bytes is None
            else losses[name] / compared[name] / math.log(2) / num_bytes,
            "agreement": agreeing[name] / compared[name],
        }
        for name in losses
    ]


def predictors_of(name: str, drafter: Drafter, target: LanguageModel) -> Iterator[Predictor]:
    """Predictors of a drafter: one network, or each of its heads."""
    if isinstance(drafter, EarlyExitDrafter):
        model, layer = ExitModel(target, drafter), drafter.exit_layer - 1
        yield (
            name,
            1,
            lambda tokens: model.logits(target(tokens, features=(layer,)).features[layer]),
        )
    elif isinstance(drafter, ModelDrafter):
        yield name, 1, lambda tokens: drafter.model(tokens).logits
    elif isinstance(drafter, MedusaDrafter):
        (layer,) = drafter.features(target)
        for head in range(drafter.settings.num_heads):
            yield f"head {head + 1}", head + 2, _head(drafter, target, layer, head)
    elif isinstance(drafter, StagedDrafter):
        for i, stage in enumerate(drafter.stages, 1):
            if isinstance(stage, ModelDrafter | EarlyExitDrafter):
                yield from predictors_of(f"{name}, stage {i}", stage, target)


def _head(
    drafter: MedusaDrafter, target: LanguageModel, layer: int, head: int
) -> Callable[[Tensor], Tensor]:
    def score(tokens: Tensor) -> Tensor:
        hidden = target(tokens, features=(layer,)).features[layer]
        return drafter.logits(head, hidden)

    return score


if __name__ == "__main__":
    main()
