"""Train heads and block drafters on SmolLM2's hidden states for equal minutes, then measure them.

    make smollm2
    python benchmarks/draft_comparison.py drafts --prompts question.jsonl --minutes 60 \
        --output docs/results/draft_comparison.json

The script trains the drafts that DIRECTORY lacks, then measures; with `--also FILE` it trains only those that `--only`
names. All drafts learn from the same batches of the shipped text, in the same order. The drafts of a process share the
target's outputs. A draft's minutes count its own steps and these outputs, in processor time divided by threads, so
other work on the machine does not shorten them. `--hours` ends training earlier; the record holds the minutes of each
draft.

`--only` trains or measures some drafts and keeps the others in the output. Two processes of one thread train as much as
one of two, and each measurement needs a quiet machine for a shorter time.
Windows, and the confidence that ends them, are chosen on prompts of Spec-Bench that follow the reported ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from record_tables import markdown_table
from spec_bench import check_same, load, mixed

from lightning_specdec import SpeculativeDecoder, checkpoints
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.records import Comparison
from lightning_specdec.checkpoints import TargetReference
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.files import replaced
from lightning_specdec.data import Batch
from lightning_specdec.data.generated_text import GeneratedText
from lightning_specdec.drafters import Drafter, NGramDrafter, NGramWithFallback
from lightning_specdec.models.loading import load_model
from lightning_specdec.training import (
    BlockTraining,
    DistillationTraining,
    EagleTraining,
    OnlineFeatures,
)
from lightning_specdec.training.draft_recipes import config_for
from lightning_specdec.training.optimizers import warmup_cosine

KINDS: dict[str, tuple[str, type[DistillationTraining], dict[str, Any]]] = {
    "eagle": ("eagle", EagleTraining, {}),
    "eagle_31": ("eagle", EagleTraining, {"norm_output": True}),
    "block": ("block", BlockTraining, {}),
    "block_no_markov": ("block", BlockTraining, {"markov_rank": 0}),
}
"""Recipe, module and differences from the recipe; "eagle" is the shipped head."""
LOOKUP = "lookup"
SAME = (
    "model",
    "backend",
    "prompts",
    "num_prompts",
    "num_chosen_on",
    "max_new_tokens",
    "threads",
    "repeats",
)
OF_TRAINING = ("minutes", "hours", "num_held_out")
MEASURED_TIMES = 4
"""How often held-out text is measured during training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="directory of the drafts")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", help="Spec-Bench's question.jsonl; if not given, only train")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time of each draft")
    parser.add_argument("--hours", type=float, default=24.0, help="time limit of training")
    parser.add_argument(
        "--num_held_out",
        type=int,
        default=8,
        help="rows of held-out text that measure the training",
    )
    parser.add_argument("--num_prompts", type=int, default=24, help="prompts that are reported")
    parser.add_argument(
        "--num_chosen_on",
        type=int,
        default=6,
        help="prompts after those, on which windows are chosen",
    )
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--windows", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--confidences", nargs="+", type=float, default=[0.0, 0.1, 0.3])
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="drafts to train and measure in this run"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        type=Path,
        default=[],
        help="other draft files to measure, named by file, beside lookup and the trained drafts of DIRECTORY; with "
        "them, only drafts that --only names are trained",
    )
    parser.add_argument("--backend", choices=["auto", "torch", "openvino"], default="auto")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.only or (() if options.also else KINDS)
    names = [name for name in KINDS if name in wanted]
    if lacking := [name for name in names if not record_of(name, options).is_file()]:
        options.directory.mkdir(parents=True, exist_ok=True)
        train(lacking, options)
    if options.prompts:
        measure(options)


class Run:
    """Training of one draft, one step per call."""

    def __init__(
        self, name: str, target: Any, data: GeneratedText, options: argparse.Namespace
    ) -> None:
        recipe, kind, changes = KINDS[name]
        config = config_for(recipe, options.model, ["shipped"])["model"]["init_args"] | changes
        left_out = ("target_checkpoint", "target_dtype", "target_features")
        given = {key: value for key, value in config.items() if key not in left_out}
        torch.manual_seed(0)
        self.name, self.given, self.seconds, self.step, self.tokens = name, given, 0.0, 0, 0
        self.curve: list[dict[str, Any]] = []
        self.module = kind(target, target_features=OnlineFeatures(), **given)
        self.module.check_data(data)
        self.trainer = type("NoTrainer", (), {"world_size": 1, "global_step": 0})()
        self.module.trainer = self.trainer
        self.module.log_losses = lambda *_, **__: None  # type: ignore[method-assign]
        self.optimizer: Any = self.module.configure_optimizers()
        self.weights = [each for each in self.module.parameters() if each.requires_grad]

    def learn(self, batch: Batch, outputs: Any, share: float) -> None:
        """One step, given the fraction of the run that is done."""
        module, self.trainer.global_step = self.module.train(), self.step
        module.read = lambda *_: outputs  # type: ignore[method-assign]
        of_rate = warmup_cosine(
            self.step, self.step / max(share, 1e-9), warmup_steps=module.warmup_steps, final=0.05
        )
        for group in self.optimizer.param_groups:
            group["lr"] = module.learning_rate * of_rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module.training_step(batch, self.step)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.step, self.tokens = self.step + 1, self.tokens + int(batch.lengths.sum())

    @torch.no_grad()
    def look(self, held_out: Sequence[tuple[Batch, Any]]) -> None:
        """Add the figures on held-out text to the curve."""
        module, sums = self.module.eval(), dict[str, list[float]]()
        module.metrics.reset()
        for batch, outputs in held_out:
            module.read = lambda *_, found=outputs: found  # type: ignore[method-assign]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for name, (value, count) in module.measure(batch, "val").items():
                    total = sums.setdefault(name, [0.0, 0.0])
                    total[0], total[1] = total[0] + float(value) * count, total[1] + count
        means = {name: total / max(1, count) for name, (total, count) in sums.items()}
        means["block_efficiency"] = float(module.metrics.compute()["block_efficiency"])
        self.curve.append(
            {"minutes": self.seconds / 60, "steps": self.step, "tokens": self.tokens, **means}
        )
        print(
            self.name,
            *(f"{name} {value:.3f}" for name, value in self.curve[-1].items()),
            flush=True,
        )


def train(names: Sequence[str], options: argparse.Namespace) -> None:
    """Train these drafts on the same batches and write them."""
    began, config = time.monotonic(), config_for("eagle", options.model, ["shipped"])
    data = GeneratedText(
        **{**config["data"]["init_args"], "num_val": options.num_held_out, "num_test": 1}
    )
    data.setup("fit")
    target = (
        load_model(options.model, dtype=config["model"]["init_args"]["target_dtype"])
        .requires_grad_(False)
        .eval()
    )
    runs = [Run(name, target, data, options) for name in names]
    batches = (batch for epoch in itertools.count() for batch in epoch_of(data, epoch))
    rows, read = data.rows("val"), runs[0].module.read
    held_out = [
        data.collate([rows[j] for j in range(i, min(i + 4, len(rows)))])
        for i in range(0, len(rows), 4)
    ]
    with torch.no_grad():
        measured = [(batch, read(batch, "val")) for batch in held_out]
    for run in runs:
        run.look(measured)
    while live := [run for run in runs if share_of(run, began, options) < 1]:
        batch, before = next(batches), spent(options)
        with torch.no_grad():
            outputs = read(batch, "train")
        of_target = spent(options) - before
        for run in live:
            before = spent(options)
            run.learn(batch, outputs, share_of(run, began, options))
            run.seconds += spent(options) - before + of_target
            if share_of(run, began, options) >= len(run.curve) / MEASURED_TIMES:
                run.look(measured)
                save(run, target, options)
    for run in runs:
        save(run, target, options)
        with replaced(record_of(run.name, options)) as file:
            file.write((json.dumps(message(run, options), indent=1) + "\n").encode())


def epoch_of(data: GeneratedText, epoch: int) -> Any:
    """The batches of an epoch."""
    sampler, rows = data.train_sampler(), data.rows("train")
    sampler.set_epoch(epoch)
    numbers = list(sampler)
    for first in range(0, len(numbers), data.batch_size):
        yield data.collate([rows[i] for i in numbers[first : first + data.batch_size]])


def spent(options: argparse.Namespace) -> float:
    """Seconds of processor time so far, over threads."""
    return time.process_time() / options.threads


def share_of(run: Run, began: float, options: argparse.Namespace) -> float:
    """Fraction of a training that is done."""
    return max(
        run.seconds / 60 / options.minutes, (time.monotonic() - began) / 3600 / options.hours
    )


def save(run: Run, target: Any, options: argparse.Namespace) -> None:
    """Write the current state of a draft."""
    recipe = {
        "training": type(run.module).__name__,
        "tokens_seen": run.tokens,
        "training_seconds": run.seconds,
    }
    path = options.directory / f"{run.name}.safetensors"
    checkpoints.save(
        path, TargetReference.of(target), run.module.drafter, recipe=recipe, dtype="bfloat16"
    )


def record_of(name: str, options: argparse.Namespace) -> Path:
    """File of a draft's training record, written when training ends."""
    path: Path = options.directory / f"{name}.json"
    return path


def message(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """A training's record."""
    return {
        "minutes": run.seconds / 60,
        "steps": run.step,
        "tokens_seen": run.tokens,
        "asked": {name: getattr(options, name) for name in (*OF_TRAINING, "threads")},
        "settings": run.given,
        "curve": run.curve,
    }


def measure(options: argparse.Namespace) -> None:
    """Choose each draft's window on some prompts, decode other prompts with it, and write the results."""
    records = {name: record_of(name, options) for name in KINDS}
    training = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in records.items()
        if path.is_file()
    }
    decoder = SpeculativeDecoder.from_pretrained(
        options.model, NGramDrafter(), dtype="bfloat16", backend=options.backend
    )
    assert decoder.tokenizer is not None
    prompts = mixed(
        load(options.prompts, decoder.tokenizer), options.num_prompts + options.num_chosen_on
    )
    reported, others = prompts[: options.num_prompts], prompts[options.num_prompts :]
    left_out = ("output", "only", "also", "directory", *OF_TRAINING)
    plain = {name: value for name, value in vars(options).items() if name not in left_out}
    plain |= {"prompts": Path(options.prompts).name, "backend": decoder.target.backend}
    found: dict[str, dict[str, Any]] = {}
    if options.output and options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))["drafts"]
        check_same(plain, [each["manifest"] for each in found.values()], SAME)
    names = [LOOKUP, *(path.stem for path in options.also), *training]
    for name in [name for name in names if options.only is None or name in options.only]:
        list(
            sweep(
                decoder,
                others[:1],
                made(name, decoder, options, None),
                options.windows[:1],
                options,
            )
        )  # warms up
        choices = list(candidates(name, decoder, others, options))
        best = max(choices, key=lambda row: row["walltime_speedup"])
        drafter = made(name, decoder, options, best["min_confidence"])
        (cell,) = sweep(decoder, reported, drafter, [best["num_draft_tokens"]], options)
        print(name, cell, flush=True)
        row = row_of(cell) | {"min_confidence": best["min_confidence"]}
        found[name] = {"choices": choices, "reported": row, "training": training.get(name)}
        found[name]["manifest"] = manifest(options=plain, device=torch.device("cpu"))
        if options.output:
            with replaced(options.output) as file:
                record = {"manifest": found[name]["manifest"], "drafts": found}
                file.write((json.dumps(record, indent=1) + "\n").encode())
    print(f"\n{table(found)}")


def made(
    name: str,
    decoder: SpeculativeDecoder,
    options: argparse.Namespace,
    min_confidence: float | None,
) -> Drafter:
    """Prompt lookup, with that draft as fallback if one is named."""
    if name == LOOKUP:
        return NGramDrafter()
    paths = {path.stem: path for path in options.also}
    loaded = checkpoints.load(
        paths.get(name, options.directory / f"{name}.safetensors"), target=decoder.target
    )
    drafter = loaded.drafter.to(dtype_of(decoder.target))
    return NGramWithFallback.for_target(decoder.target, drafter, min_confidence=min_confidence)


def sweep(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    drafter: Drafter,
    windows: Sequence[int],
    options: argparse.Namespace,
) -> Iterator[Comparison]:
    """Measure each window beside standard decoding, greedy, one prompt at a time."""
    settings: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "eos": (),
        "repeats": options.repeats,
    }
    return decoder.sweep(
        prompts, drafters={"draft": drafter}, windows=windows, warmup=0, **settings
    )


def candidates(
    name: str,
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Results of each window on some prompts, and of each confidence if there is a draft."""
    for confidence in [None] if name == LOOKUP else options.confidences:
        drafter = made(name, decoder, options, confidence)
        for cell in sweep(decoder, prompts, drafter, options.windows, options):
            yield row_of(cell) | {"min_confidence": confidence}
            print(f"{name} {confidence}", cell, flush=True)


def row_of(cell: Comparison) -> dict[str, Any]:
    """Figures of a row: counts, seconds, and rates derived from them."""
    summary, rows, standard = cell.summary(), cell.rows, cell.standard
    histogram = [
        sum(each)
        for each in itertools.zip_longest(*(row.histogram or [] for row in rows), fillvalue=0)
    ]
    kept = [sum(histogram[i:]) / sum(histogram) for i in range(1, len(histogram))]
    names = (
        "num_draft_tokens",
        "walltime_speedup",
        "walltime_speedup_low",
        "walltime_speedup_high",
        "same_tokens",
    )
    return {
        **{
            name: summary[name] for name in (*names, "block_efficiency", "acceptance_rate", "error")
        },
        "kept_by_position": kept,
        "histogram": histogram,
        "round_seconds": sum(row.seconds for row in rows)
        / sum(row.num_target_calls for row in rows),
        "standard_step_seconds": sum(row.seconds for row in standard)
        / sum(row.num_target_calls for row in standard),
        "draft_seconds": len(rows)
        * (cell.phase_seconds or {"draft": 0.0})["draft"]
        / sum(histogram),
        "phase_seconds": cell.phase_seconds,
    }


def table(drafts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per draft with lookup first, as a Markdown table."""
    headings = (
        "Draft",
        "Minutes",
        "Steps",
        "Held out: first, second, third, fourth draft token",
        "Window",
        "Rounds that keep 1, 2, 3, 4",
        "Block efficiency",
        "Drafting a round, ms",
        "walltime_speedup",
    )
    rows = []
    for name, draft in drafts.items():
        reported = draft["reported"]
        kept_by_position = [f"{rate:.2f}" for rate in reported["kept_by_position"][:4]]
        low = reported["walltime_speedup_low"]
        high = reported["walltime_speedup_high"]
        rows.append(
            (
                name if name == LOOKUP else f"{LOOKUP} + {name}",
                *_training_cells(draft["training"]),
                str(reported["num_draft_tokens"]),
                " ".join(kept_by_position),
                f"{reported['block_efficiency']:.2f}",
                f"{1000 * reported['draft_seconds']:.1f}",
                f"{reported['walltime_speedup']:.2f} [{low:.2f}, {high:.2f}]",
            )
        )
    return markdown_table(headings, rows)


def _training_cells(training: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Minutes, steps, and held-out acceptance by position; "-" for a draft that was not trained here."""
    if not training:
        return "-", "-", "-"
    final_metrics = training["curve"][-1]
    held_out = [
        f"{final_metrics[name]:.2f}"
        for name in sorted(final_metrics)
        if name.startswith("position_") and "sampling" not in name
    ]
    return f"{training['minutes']:.1f}", str(training["steps"]), " ".join(held_out) or "-"


if __name__ == "__main__":
    main()
