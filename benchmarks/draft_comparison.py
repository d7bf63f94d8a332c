"""Train heads and block drafters on SmolLM2's hidden states for equal minutes, then measure them.

    make smollm2
    python benchmarks/draft_comparison.py drafts --prompts question.jsonl --minutes 60 \
        --output docs/results/draft_comparison.json

The script trains the drafts that DIRECTORY lacks, and then measures them. All drafts learn from the
same batches of the shipped text, in the same order, and the drafts of a process share the target's
outputs. The minutes of a draft count its own steps and these outputs, in processor time divided by
threads, so other work on the machine does not shorten them. `--hours` ends training earlier.

`--only` trains or measures some drafts, and keeps the others in the output. Windows and confidence
thresholds are chosen on prompts that are not reported.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from markdown_tables import markdown_table
from spec_bench import check_same, load, mixed

from lightning_specdec import SpeculativeDecoder, checkpoints
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.bench.records import Comparison, Record
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
"""Recipe, module, and changes to the recipe of each draft. `eagle` is the default recipe."""
LOOKUP = "lookup"
"""Name of prompt lookup without a draft."""

COMPARED_OPTIONS = (
    "model",
    "backend",
    "prompts",
    "num_prompts",
    "num_chosen_on",
    "max_new_tokens",
    "threads",
    "repeats",
)
"""Options that all drafts of an output must have in common."""
TRAINING_OPTIONS = ("minutes", "hours", "num_held_out")
NUM_CURVE_POINTS = 4
"""How often held-out text is measured during training."""
HELD_OUT_BATCH_SIZE = 4

HeldOut = Sequence[tuple[Batch, Any]]
"""Batches of held-out text, each with the target's outputs."""


def main() -> None:
    options = make_parser().parse_args()
    torch.set_num_threads(options.threads)
    trained_names: Sequence[str] = list(KINDS)
    if options.only:
        trained_names = options.only
    elif options.also:
        trained_names = []

    missing_names = []
    for name in KINDS:
        if name in trained_names and not record_path(name, options).is_file():
            missing_names.append(name)
    if missing_names:
        options.directory.mkdir(parents=True, exist_ok=True)
        train(missing_names, options)
    if options.prompts:
        measure(options)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="directory of the drafts")
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--prompts", help="Spec-Bench's question.jsonl; without it, only train")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time of each draft")
    parser.add_argument("--hours", type=float, default=24.0, help="time limit of training")
    parser.add_argument(
        "--num_held_out", type=int, default=8, help="rows of held-out text to measure training on"
    )
    parser.add_argument("--num_prompts", type=int, default=24, help="prompts that are reported")
    parser.add_argument(
        "--num_chosen_on", type=int, default=6, help="further prompts, to choose windows on"
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
        help="further draft files to measure, each under the file's name; with this option, only "
        "the drafts of --only are trained",
    )
    parser.add_argument("--backend", choices=["auto", "torch", "openvino"], default="auto")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    return parser


class Run:
    """Training of one draft, one step per call of `learn`.

    Attributes:
        settings: arguments of the training module, recorded.
        seconds: processor time of its steps and of the target's outputs, divided by threads.
        curve: figures on held-out text, in order of time.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        data: GeneratedText,
        options: argparse.Namespace,
    ) -> None:
        recipe, module_class, changes = KINDS[name]
        config = config_for(recipe, options.model, ["shipped"])
        self.name = name
        self.settings = {**config["model"]["init_args"], **changes}
        # The runs share one target, whose outputs are passed to each.
        for argument in ("target_checkpoint", "target_dtype", "target_features"):
            self.settings.pop(argument, None)
        self.seconds = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.curve: list[dict[str, Any]] = []

        torch.manual_seed(0)
        self.module = module_class(target, target_features=OnlineFeatures(), **self.settings)
        self.module.check_data(data)
        self.trainer = minimal_trainer()
        self.module.trainer = self.trainer
        self.module.log_losses = lambda *_, **__: None  # type: ignore[method-assign]
        self.optimizer: Any = self.module.configure_optimizers()
        self.weights = [weight for weight in self.module.parameters() if weight.requires_grad]

    def learn(self, batch: Batch, outputs: Any, done: float) -> None:
        """One step.

        Args:
            outputs: the target's outputs for the batch.
            done: fraction of the training that is done.
        """
        module = self.module.train()
        self.trainer.global_step = self.num_steps
        self._set_outputs(outputs)

        # The schedule's length follows from the speed so far.
        num_all_steps = self.num_steps / max(done, 1e-9)
        learning_rate = module.learning_rate * warmup_cosine(
            self.num_steps, num_all_steps, warmup_steps=module.warmup_steps, final=0.05
        )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module.training_step(batch, self.num_steps)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += int(batch.lengths.sum())

    @torch.no_grad()
    def evaluate(self, held_out: HeldOut) -> None:
        """Add the figures on held-out text to the curve."""
        module = self.module.eval()
        module.metrics.reset()
        sums: dict[str, float] = collections.defaultdict(float)
        counts: dict[str, float] = collections.defaultdict(float)
        for batch, outputs in held_out:
            self._set_outputs(outputs)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                measured = module.measure(batch, "val")
            for name, (value, count) in measured.items():
                sums[name] += float(value) * count
                counts[name] += count

        point: dict[str, Any] = {
            "minutes": self.seconds / 60,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
        }
        for name, total in sums.items():
            point[name] = total / max(1, counts[name])
        point["block_efficiency"] = float(module.metrics.compute()["block_efficiency"])
        self.curve.append(point)
        figures = [f"{name} {value:.3f}" for name, value in point.items()]
        print(self.name, *figures, flush=True)

    def _set_outputs(self, outputs: Any) -> None:
        """Let the module use these outputs of the target instead of calling it."""
        self.module.read = lambda *_: outputs  # type: ignore[method-assign]


def minimal_trainer() -> Any:
    """What a training module needs of a Trainer: one process, one batch in each optimizer step."""
    return SimpleNamespace(world_size=1, global_step=0, accumulate_grad_batches=1)


def train(names: Sequence[str], options: argparse.Namespace) -> None:
    """Train these drafts on the same batches and write them."""
    start = time.monotonic()
    config = config_for("eagle", options.model, ["shipped"])
    data_arguments = {
        **config["data"]["init_args"],
        "num_val": options.num_held_out,
        "num_test": 1,
    }
    data = GeneratedText(**data_arguments)
    data.setup("fit")
    target_dtype = config["model"]["init_args"]["target_dtype"]
    target = load_model(options.model, dtype=target_dtype).requires_grad_(False).eval()

    runs = [Run(name, target, data, options) for name in names]
    # This function calls the target. A run's own is replaced in each step.
    read_target = runs[0].module.read
    held_out = []
    with torch.no_grad():
        for batch in held_out_batches(data):
            held_out.append((batch, read_target(batch, "val")))
    for run in runs:
        run.evaluate(held_out)

    for batch in training_batches(data):
        unfinished = [run for run in runs if fraction_done(run, start, options) < 1]
        if not unfinished:
            break
        seconds_before = processor_seconds(options)
        with torch.no_grad():
            outputs = read_target(batch, "train")
        target_seconds = processor_seconds(options) - seconds_before

        for run in unfinished:
            seconds_before = processor_seconds(options)
            run.learn(batch, outputs, fraction_done(run, start, options))
            run.seconds += processor_seconds(options) - seconds_before + target_seconds
            if fraction_done(run, start, options) >= len(run.curve) / NUM_CURVE_POINTS:
                run.evaluate(held_out)
                save(run, target, options)

    for run in runs:
        save(run, target, options)
        with replaced(record_path(run.name, options)) as file:
            file.write((json.dumps(training_record(run, options), indent=1) + "\n").encode())


def held_out_batches(data: GeneratedText) -> Iterator[Batch]:
    num_rows = len(data.rows("val"))
    for indices in batched(range(num_rows), HELD_OUT_BATCH_SIZE):
        yield collate_rows(data, "val", indices)


def training_batches(data: GeneratedText) -> Iterator[Batch]:
    """The batches of all epochs, without end."""
    for epoch in itertools.count():
        sampler = data.train_sampler()
        sampler.set_epoch(epoch)
        for indices in batched(list(sampler), data.batch_size):
            yield collate_rows(data, "train", indices)


def batched(indices: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(indices), batch_size):
        yield indices[first : first + batch_size]


def collate_rows(data: GeneratedText, split: str, indices: Sequence[int]) -> Batch:
    rows = data.rows(split)
    return data.collate([rows[index] for index in indices])


def processor_seconds(options: argparse.Namespace) -> float:
    """Seconds of processor time so far, divided by threads."""
    return time.process_time() / options.threads


def fraction_done(run: Run, start: float, options: argparse.Namespace) -> float:
    """Fraction of a training that is done, by its own minutes or by the hours of all."""
    hours = (time.monotonic() - start) / 3600
    return max(run.seconds / 60 / options.minutes, hours / options.hours)


def save(run: Run, target: Any, options: argparse.Namespace) -> None:
    """Write the current state of a draft."""
    recipe = {
        "training": type(run.module).__name__,
        "tokens_seen": run.num_tokens,
        "training_seconds": run.seconds,
    }
    reference = TargetReference.of(target)
    path = draft_path(run.name, options)
    checkpoints.save(path, reference, run.module.drafter, recipe=recipe, dtype="bfloat16")


def draft_path(name: str, options: argparse.Namespace) -> Path:
    """File of a draft that this script trains."""
    path: Path = options.directory / f"{name}.safetensors"
    return path


def record_path(name: str, options: argparse.Namespace) -> Path:
    """File of a draft's training record, written when training ends."""
    path: Path = options.directory / f"{name}.json"
    return path


def training_record(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    requested = {name: getattr(options, name) for name in (*TRAINING_OPTIONS, "threads")}
    return {
        "minutes": run.seconds / 60,
        "steps": run.num_steps,
        "tokens_seen": run.num_tokens,
        "asked": requested,
        "settings": run.settings,
        "curve": run.curve,
    }


def measure(options: argparse.Namespace) -> None:
    """Choose each draft's window on some prompts, and measure it on others."""
    decoder = SpeculativeDecoder.from_pretrained(
        options.model, NGramDrafter(), dtype="bfloat16", backend=options.backend
    )
    assert decoder.tokenizer is not None
    num_prompts = options.num_prompts + options.num_chosen_on
    prompts = mixed(load(options.prompts, decoder.tokenizer), num_prompts)
    reported_prompts = prompts[: options.num_prompts]
    choice_prompts = prompts[options.num_prompts :]

    recorded_options = dict(vars(options))
    for option in ("output", "only", "also", "directory", *TRAINING_OPTIONS):
        del recorded_options[option]
    recorded_options["prompts"] = Path(options.prompts).name
    recorded_options["backend"] = decoder.target.backend

    drafts: dict[str, dict[str, Any]] = {}
    if options.output and options.output.exists():
        drafts = json.loads(options.output.read_text(encoding="utf-8"))["drafts"]
        manifests = [draft["manifest"] for draft in drafts.values()]
        check_same(recorded_options, manifests, COMPARED_OPTIONS)

    trainings = read_trainings(options)
    for name in (LOOKUP, *(path.stem for path in options.also), *trainings):
        if options.only is not None and name not in options.only:
            continue
        draft = measure_draft(name, decoder, choice_prompts, reported_prompts, options)
        draft["training"] = trainings.get(name)
        draft["manifest"] = manifest(options=recorded_options, device=torch.device("cpu"))
        drafts[name] = draft
        if options.output:
            record = {"manifest": draft["manifest"], "drafts": drafts}
            with replaced(options.output) as file:
                file.write((json.dumps(record, indent=1) + "\n").encode())
    print(f"\n{table(drafts)}")


def read_trainings(options: argparse.Namespace) -> dict[str, Any]:
    """Training records of the drafts that are in the directory."""
    trainings = {}
    for name in KINDS:
        path = record_path(name, options)
        if path.is_file():
            trainings[name] = json.loads(path.read_text(encoding="utf-8"))
    return trainings


def measure_draft(
    name: str,
    decoder: SpeculativeDecoder,
    choice_prompts: Sequence[list[int]],
    reported_prompts: Sequence[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The figures of all candidate settings, and those of the fastest one on other prompts."""
    # The first call warms up and is not used.
    warmup_drafter = make_drafter(name, decoder, options, None)
    list(sweep(decoder, choice_prompts[:1], warmup_drafter, options.windows[:1], options))

    choices = list(candidates(name, decoder, choice_prompts, options))
    best = max(choices, key=lambda row: row["walltime_speedup"])
    drafter = make_drafter(name, decoder, options, best["min_confidence"])
    windows = [best["num_draft_tokens"]]
    (cell,) = sweep(decoder, reported_prompts, drafter, windows, options)
    print(name, cell, flush=True)
    reported = {**figures(cell), "min_confidence": best["min_confidence"]}
    return {"choices": choices, "reported": reported}


def make_drafter(
    name: str,
    decoder: SpeculativeDecoder,
    options: argparse.Namespace,
    min_confidence: float | None,
) -> Drafter:
    """Prompt lookup, with the named draft as its fallback."""
    if name == LOOKUP:
        return NGramDrafter()
    path = draft_path(name, options)
    for other_path in options.also:
        if other_path.stem == name:
            path = other_path
    loaded = checkpoints.load(path, target=decoder.target)
    drafter = loaded.drafter.to(dtype_of(decoder.target))
    return NGramWithFallback.for_target(decoder.target, drafter, min_confidence=min_confidence)


def sweep(
    decoder: SpeculativeDecoder,
    prompts: Sequence[list[int]],
    drafter: Drafter,
    windows: Sequence[int],
    options: argparse.Namespace,
) -> Iterator[Comparison]:
    """Compare each window with standard decoding: greedy, one prompt at a time, EOS ignored."""
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
    """The figures of each window and, for a draft, of each confidence threshold."""
    confidences = [None] if name == LOOKUP else options.confidences
    for confidence in confidences:
        drafter = make_drafter(name, decoder, options, confidence)
        for cell in sweep(decoder, prompts, drafter, options.windows, options):
            yield {**figures(cell), "min_confidence": confidence}
            print(f"{name} {confidence}", cell, flush=True)


def figures(cell: Comparison) -> dict[str, Any]:
    """Counts, seconds, and the rates that follow from them."""
    summary = cell.summary()
    histograms = [row.histogram or [] for row in cell.rows]
    histogram = [sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)]
    num_rounds = sum(histogram)
    # Rounds that accept at least 1, 2, ... draft tokens.
    kept_by_position = []
    for position in range(1, len(histogram)):
        kept_by_position.append(sum(histogram[position:]) / num_rounds)

    draft_seconds = 0.0
    if cell.phase_seconds:
        draft_seconds = cell.phase_seconds["draft"]
    return {
        "num_draft_tokens": summary["num_draft_tokens"],
        "walltime_speedup": summary["walltime_speedup"],
        "walltime_speedup_low": summary["walltime_speedup_low"],
        "walltime_speedup_high": summary["walltime_speedup_high"],
        "same_tokens": summary["same_tokens"],
        "block_efficiency": summary["block_efficiency"],
        "acceptance_rate": summary["acceptance_rate"],
        "error": summary["error"],
        "kept_by_position": kept_by_position,
        "histogram": histogram,
        "round_seconds": seconds_per_call(cell.rows),
        "standard_step_seconds": seconds_per_call(cell.standard),
        "draft_seconds": len(cell.rows) * draft_seconds / num_rounds,
        "phase_seconds": cell.phase_seconds,
    }


def seconds_per_call(records: Sequence[Record]) -> float:
    """Seconds of a target call, with everything between two calls."""
    seconds = 0.0
    num_calls = 0
    for record in records:
        seconds += record.seconds
        num_calls += record.num_target_calls
    return seconds / num_calls


def table(drafts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per draft with lookup first, as a Markdown table."""
    headings = (
        "Draft",
        "Minutes",
        "Steps",
        "Held-out acceptance of the first, second, third, fourth draft token",
        "Window",
        "Share of rounds that accept at least 1, 2, 3, 4",
        "Block efficiency",
        "Drafting, ms per round",
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
    """Minutes, steps, and held-out acceptance by position; "-" if another run trained the draft."""
    if not training:
        return "-", "-", "-"
    final_metrics = training["curve"][-1]
    held_out_rates = []
    for name in sorted(final_metrics):
        if name.startswith("position_") and "sampling" not in name:
            held_out_rates.append(f"{final_metrics[name]:.2f}")
    held_out = " ".join(held_out_rates) or "-"
    return f"{training['minutes']:.1f}", str(training["steps"]), held_out


if __name__ == "__main__":
    main()
