"""Measure how well each exit, head or draft of a checkpoint predicts held-out sequences.

    python benchmarks/prediction_quality.py checkpoints/text.safetensors --output quality.json

For the target and each of its predictors: the loss in nats, the accuracy, the bits per byte of
text, and how often the most likely token is the target's. Nothing is decoded, so no speed is
measured: `lightning_specdec bench` does that.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import record_tables
import torch
from torch import Tensor

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec import data as data_modules
from lightning_specdec.bench.candidates import candidates
from lightning_specdec.bench.manifest import manifest
from lightning_specdec.data import IGNORED, TokenData
from lightning_specdec.drafters import Drafter, EarlyExitDrafter
from lightning_specdec.drafters.early_exit import ExitModel
from lightning_specdec.drafters.medusa import MedusaDrafter
from lightning_specdec.drafters.staged import StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.metrics import next_token_loss


@dataclass(frozen=True)
class Predictor:
    """A network that predicts tokens of a text.

    Args:
        num_ahead: how many positions after its last input token the predicted token is; 1 for a
            language model.
        score: its logits `[B, T, V]` for tokens `[B, T]`.
    """

    name: str
    num_ahead: int
    score: Callable[[Tensor], Tensor]


@dataclass
class Totals:
    """Sums over the predictions of one predictor."""

    loss: float = 0.0
    num_correct: int = 0
    num_agreeing: int = 0
    num_predictions: int = 0

    def add(self, logits: Tensor, labels: Tensor, target_tokens: Tensor) -> None:
        """Count one batch.

        Args:
            logits: `[B, N, V]`.
            labels: the tokens `[B, N]` that follow; `IGNORED` where there is none.
            target_tokens: the target's most likely tokens at the same positions.
        """
        is_counted = labels != IGNORED
        predicted_tokens = logits.argmax(-1)
        self.loss += float(next_token_loss(logits, labels, "sum"))
        self.num_correct += int((predicted_tokens == labels)[is_counted].sum())
        self.num_agreeing += int((predicted_tokens == target_tokens)[is_counted].sum())
        self.num_predictions += int(is_counted.sum())

    def figures(self, bytes_per_token: float | None) -> dict[str, float | None]:
        """Means over all predictions. Bits per byte need the bytes of a token."""
        loss = self.loss / self.num_predictions
        bits_per_byte = None
        if bytes_per_token is not None:
            bits_per_byte = loss / math.log(2) / bytes_per_token
        return {
            "loss": loss,
            "accuracy": self.num_correct / self.num_predictions,
            "bits_per_byte": bits_per_byte,
            "agreement": self.num_agreeing / self.num_predictions,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    rows: list[dict[str, Any]] = []
    for path in options.checkpoints:
        decoder = SpeculativeDecoder.from_checkpoint(path)
        quality_rows = quality(decoder, held_out_data(decoder))
        rows += [{"checkpoint": checkpoint_name(path), **row} for row in quality_rows]

    print(record_tables.transformer_quality_table(rows))
    if options.output:
        names = [checkpoint_name(path) for path in options.checkpoints]
        record = {
            "manifest": manifest(options={"checkpoints": names}, device=torch.device("cpu")),
            "quality": rows,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


def held_out_data(decoder: SpeculativeDecoder) -> TokenData:
    """The data that the checkpoint was trained on, with its held-out splits."""
    data_class = getattr(data_modules, decoder.recipe["data"])
    # Older runs recorded `max_bytes`, an argument that was since removed.
    arguments = {
        name: value
        for name, value in decoder.recipe["data_arguments"].items()
        if name != "max_bytes"
    }
    data: TokenData = data_class(**arguments)
    return data


def checkpoint_name(path: Path) -> str:
    """Name of a checkpoint in the table; the best and last ones of a run have the run's name."""
    if path.stem in ("best", "last"):
        return path.parent.name
    return path.stem


@torch.no_grad()
def quality(decoder: SpeculativeDecoder, data: TokenData) -> list[dict[str, Any]]:
    """Quality of all predictors on held-out data (validation and test), the target first."""
    target = decoder.target.eval()
    predictors = [Predictor("target", 1, lambda tokens: target(tokens).logits)]
    for name, candidate in candidates(decoder).items():
        predictors += predictors_of(name, candidate.drafter.eval(), target)

    totals = {predictor.name: Totals() for predictor in predictors}
    for batch in chain(data.val_dataloader(), data.test_dataloader()):
        target_tokens = target(batch.tokens).logits.argmax(-1)
        for predictor in predictors:
            # The output at position i predicts the token at i + num_ahead. Labels and the target's
            # tokens at position i are those of i + 1, so both are shifted by num_ahead - 1.
            num_ahead = predictor.num_ahead
            logits = predictor.score(batch.tokens)[:, :-num_ahead]
            labels = batch.next_tokens()[:, num_ahead - 1 :]
            compared_tokens = target_tokens[:, num_ahead - 1 : -1]
            totals[predictor.name].add(logits, labels, compared_tokens)

    bytes_per_token = data.bytes_per_token("val", "test")
    return [
        {"predictor": name, **predictor_totals.figures(bytes_per_token)}
        for name, predictor_totals in totals.items()
    ]


def predictors_of(name: str, drafter: Drafter, target: LanguageModel) -> Iterator[Predictor]:
    """The predictors of a drafter: one network, each of its heads, or each of its stages."""
    if isinstance(drafter, EarlyExitDrafter):
        yield _exit_predictor(name, drafter, target)
    elif isinstance(drafter, ModelDrafter):
        yield Predictor(name, 1, lambda tokens: drafter.model(tokens).logits)
    elif isinstance(drafter, MedusaDrafter):
        # The first head predicts the token after the target's own next token.
        for head in range(drafter.settings.num_heads):
            yield _head_predictor(drafter, target, head)
    elif isinstance(drafter, StagedDrafter):
        for stage_number, stage in enumerate(drafter.stages, 1):
            if isinstance(stage, ModelDrafter | EarlyExitDrafter):
                yield from predictors_of(f"{name}, stage {stage_number}", stage, target)


def _exit_predictor(name: str, drafter: EarlyExitDrafter, target: LanguageModel) -> Predictor:
    exit_model = ExitModel(target, drafter)
    layer = drafter.exit_layer - 1

    def score(tokens: Tensor) -> Tensor:
        hidden = target(tokens, features=(layer,)).features[layer]
        return exit_model.logits(hidden)

    return Predictor(name, 1, score)


def _head_predictor(drafter: MedusaDrafter, target: LanguageModel, head: int) -> Predictor:
    (layer,) = drafter.features(target)

    def score(tokens: Tensor) -> Tensor:
        hidden = target(tokens, features=(layer,)).features[layer]
        return drafter.logits(head, hidden)

    return Predictor(f"head {head + 1}", head + 2, score)


if __name__ == "__main__":
    main()
