"""What a training step costs when the target reads each batch, and when its features are cached; and their size.

    make smollm2
    python benchmarks/cached_features.py --output docs/results/cached_features.json

The draft is `EagleTraining`'s, in bfloat16 by autocast, on rows of Python's own standard library. A step's seconds are
from the batch to the new weights, the median of all but the first two; what caching costs is told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_specdec.data import SequenceFile, TextFiles
from lightning_specdec.manifest import manifest
from lightning_specdec.models.loading import load_model
from lightning_specdec.training import CachedFeatures, EagleTraining, OnTheFly, TargetFeatures

NUM_WARM = 2
"""First steps that are not counted."""


class StepTimer(Callback):
    """Seconds of each training step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="checkpoints/smollm2")
    parser.add_argument("--length", type=int, default=257)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_steps", type=int, default=8)
    parser.add_argument("--draft_vocabulary", type=int, default=8192)
    parser.add_argument("--top_n", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        data = rows(options, home / "rows.npy")
        ways: dict[str, TargetFeatures] = {
            "on the fly": OnTheFly(),
            "cached": CachedFeatures(str(home / "states")),
            f"cached, top_n {options.top_n}": CachedFeatures(str(home / "top"), top_n=options.top_n),
        }
        measured = [{"features": name, **measure(options, data, way)} for name, way in ways.items()]
    print(
        f"{'target_features':20}  seconds a step  of them reading  times as fast  caching tokens/s  GB a million tokens"
    )
    for row in measured:
        row["times_as_fast"] = measured[0]["step_seconds"] / row["step_seconds"]
        told = f"{row['features']:20}  {row['step_seconds']:14.2f}  {row['reading_seconds']:15.2f}"
        told += f"  {row['times_as_fast']:13.1f}"
        if row["bytes_per_token"] is not None:
            told += f"  {row['caching_tokens_per_second']:16.0f}  {row['bytes_per_token'] / 1e3:19.2f}"
        print(told)
    if options.output:
        found = manifest(options={**vars(options), "output": None}, device=torch.device("cpu"))
        options.output.write_text(json.dumps({"manifest": found, "rows": measured}, indent=1) + "\n")


def rows(options: argparse.Namespace, path: Path) -> SequenceFile:
    """As many rows as half of the steps need: each is read twice."""
    vocab_size = load_model(options.model, dtype="bfloat16").vocab_size
    texts = TextFiles(tokenizer=options.model, vocab_size=vocab_size, length=options.length, max_bytes=1_000_000)
    tokens = texts.texts()["train"].tokens
    num_rows = options.batch_size * (options.num_steps // 2) + 2
    np.save(path, np.array(tokens[: num_rows * options.length], np.int64).reshape(num_rows, options.length))
    data = SequenceFile(str(path), vocab_size, num_val=1, num_test=1, batch_size=options.batch_size)
    data.tokenizer = options.model
    return data


def measure(options: argparse.Namespace, data: SequenceFile, features: TargetFeatures) -> dict[str, Any]:
    """A step's seconds, and what was cached before the first one."""
    target = load_model(options.model, dtype="bfloat16")
    training = EagleTraining(target, draft_vocabulary=options.draft_vocabulary, target_features=features)
    training.check_data(data)
    began = time.perf_counter()
    features.prepare(training.target, data, training.layers(), ["train", "val"])
    seconds = time.perf_counter() - began
    timer = StepTimer()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=options.num_steps,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[timer],
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(training, datamodule=data)
    found: dict[str, Any] = {"step_seconds": statistics.median(timer.seconds[NUM_WARM:]), "steps": timer.seconds}
    found["reading_seconds"] = statistics.median(reading_seconds(training, data))
    if not isinstance(features, CachedFeatures):
        return {**found, "bytes_per_token": None}
    kept = features.splits.values()
    num_tokens = sum(each.num_tokens for each in kept)
    size = next(iter(kept)).bytes_per_token
    return {**found, "bytes_per_token": size, "caching_tokens_per_second": num_tokens / seconds}


def reading_seconds(training: EagleTraining, data: SequenceFile) -> list[float]:
    """Of a step, what becomes of the target's part: the reading of one batch, three times."""
    source, seconds = data.rows("train"), []
    batch = data.collate([source[i] for i in range(data.batch_size)])
    for _ in range(3):
        began = time.perf_counter()
        training.read(batch, "train")
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
