"""How well a target, its exits, heads and drafts predict held-out sequences, each by itself.

Used by transformer_speed.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_specdec import ModelDrafter, SpeculativeDecoder
from lightning_specdec.data import IGNORED, TokenData
from lightning_specdec.drafters import Drafter, EarlyExitDrafter
from lightning_specdec.drafters.early_exit import ExitModel
from lightning_specdec.drafters.multi_token import MultiTokenDrafter
from lightning_specdec.drafters.staged import StagedDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.metrics import NextToken

Predictor = tuple[str, int, Callable[[Tensor], Tensor]]
"""A name, how many places ahead it predicts, and its logits `[B, T, V]` for tokens `[B, T]`."""


@torch.no_grad()
def quality(decoder: SpeculativeDecoder, data: TokenData) -> list[dict[str, Any]]:
    """Figures of everything that predicts, on what was held out (validation and test), the target's own first."""
    target = decoder.target.eval()
    predictors: list[Predictor] = [("target", 1, lambda tokens: target(tokens).logits)]
    for name, candidate in decoder.candidates().items():
        predictors += predictors_of(name, candidate.drafter.eval(), target)
    counts = {name: NextToken() for name, _, _ in predictors}
    agreeing, compared = dict.fromkeys(counts, 0), dict.fromkeys(counts, 0)
    for batch in chain(data.val_dataloader(), data.test_dataloader()):
        likeliest = target(batch.tokens).logits.argmax(-1)
        for name, ahead, score in predictors:
            logits, labels = score(batch.tokens), batch.next_tokens()
            logits, labels = logits[:, :-ahead], labels[:, ahead - 1 :]
            counts[name].update(logits, labels)
            own, others = logits.argmax(-1), likeliest[:, ahead - 1 : ahead - 1 + labels.shape[1]]
            real = labels != IGNORED
            agreeing[name] += int((own == others)[real].sum())
            compared[name] += int(real.sum())
    num_bytes = data.bytes_per_token("val", "test")
    return [
        {
            "predictor": name,
            "loss": float(found.loss),
            "accuracy": float(found.accuracy),
            "bits_per_byte": None if num_bytes is None else float(found.loss) / math.log(2) / num_bytes,
            "agreement": agreeing[name] / compared[name],
        }
        for name, found in ((name, counts[name].compute()) for name in counts)
    ]


def predictors_of(name: str, drafter: Drafter, target: LanguageModel) -> Iterator[Predictor]:
    """What a drafter predicts with: one network, or as many heads as it has."""
    if isinstance(drafter, EarlyExitDrafter):
        model = ExitModel(target, drafter.exit_layer, drafter.head)
        yield name, 1, lambda tokens: model(tokens).logits
    elif isinstance(drafter, ModelDrafter):
        yield name, 1, lambda tokens: drafter.model(tokens).logits
    elif isinstance(drafter, MultiTokenDrafter):
        (layer,) = drafter.features(target)
        for head in range(drafter.num_heads):
            yield f"head {head + 1}", head + 2, _head(drafter, target, layer, head)
    elif isinstance(drafter, StagedDrafter):
        for i, stage in enumerate(drafter.stages, 1):
            if isinstance(stage, ModelDrafter | EarlyExitDrafter):
                yield from predictors_of(f"{name}, stage {i}", stage, target)


def _head(drafter: MultiTokenDrafter, target: LanguageModel, layer: int, head: int) -> Callable[[Tensor], Tensor]:
    def score(tokens: Tensor) -> Tensor:
        hidden = target(tokens, features=(layer,)).features[layer]
        return drafter.logits(hidden, target, head + 1)[head]

    return score
