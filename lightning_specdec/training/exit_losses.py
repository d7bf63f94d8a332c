"""How LayerSkip trains a model to be left early: which exits learn at a step, how much, and which layers are skipped.

Source: Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710), section 4.1. Layers are counted from 0 to L - 1 there and
here; exit l + 1 is the one behind layer l. What the paper leaves open is as in its authors' code (torchtune): exit L,
which is the whole model, learns at every step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.checks import require_int, require_number

if TYPE_CHECKING:
    from jaxtyping import Bool


def layer_scales(num_layers: int) -> list[float]:
    """D(l) = exp(l ln 2 / (L - 1)) - 1: from 0 at the first layer to 1 at the last; it doubles what is added to 1."""
    return [math.expm1(layer * math.log(2) / (num_layers - 1)) for layer in range(num_layers)]


def step_scale(step: int, num_steps: int) -> float:
    """S(t) = exp(t ln 2 / (T - 1)) - 1: from 0 at the first step to 1 at the last, for training from scratch."""
    return math.expm1(min(step / max(num_steps - 1, 1), 1.0) * math.log(2))


def dropout_rates(num_layers: int, max_rate: float, scale: float = 1.0) -> list[float]:
    """p_l = S(t) D(l) p_max: how likely each layer is skipped, for one sample at one step.

    Args:
        max_rate: p_max.
        scale: S(t); 1 for models that are trained already.
    """
    return [scale * part * max_rate for part in layer_scales(num_layers)]


def draw_kept(rates: Sequence[float], num_samples: int, generator: torch.Generator) -> Bool[Tensor, "L B"]:
    """Which layers read which samples: each sample is skipped by itself, with the layer's rate."""
    uniform = torch.rand(len(rates), num_samples, generator=generator)
    return uniform >= torch.tensor(rates)[:, None]


def layer_weights(num_layers: int, exit_scale: float) -> list[float]:
    """e(l), what the loss of the exit behind layer l counts, before the curriculum and not normalized.

    Theory: the higher a layer, the easier it is for it to predict, so the more its loss counts:

        e(l) = e_scale (0 + 1 + ... + l)                    for l < L - 1
        e(L - 1) = L - 1 + e_scale (0 + 1 + ... + (L - 2))

    The first exit counts nothing by this: it can only learn from what the second one asks of the first layer.

    Args:
        exit_scale: e_scale, how much the early exits count beside the whole model.
    """
    sums = [layer * (layer + 1) / 2 for layer in range(num_layers)]
    return [exit_scale * each for each in sums[:-1]] + [num_layers - 1 + exit_scale * sums[-2]]


def checked_weights(weights: Sequence[float], num_layers: int) -> list[float]:
    """Weights that a user gave for the exits, in place of `layer_weights`."""
    if len(weights) != num_layers:
        raise ValueError(
            f"exit_weights must be {num_layers} numbers, one for each layer of the model, got {len(weights)}"
        )
    checked = [require_number("exit_weights", weight, low=0.0) for weight in weights]
    if not checked[-1]:
        raise ValueError("exit_weights must end in a number above 0: it is that of the model itself")
    return checked


def normalized(weights: Sequence[float], enabled: Sequence[bool]) -> list[float]:
    """C(t, l) e(l) / sum over i of C(t, i) e(i): the weights of a step's exits, which add up to 1."""
    chosen = [weight if on else 0.0 for weight, on in zip(weights, enabled, strict=True)]
    total = sum(chosen)
    return [weight / total for weight in chosen]


class ExitCurriculum(ABC):
    """Which exits learn at a step: C(t, l) of the paper.

    Theory: every exit costs an output head over all tokens, which in a large vocabulary is what a step costs most, and
    early exits that learn all at once from the start hold the whole model back.
    """

    @abstractmethod
    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        """For each layer whether the exit behind it learns; that of the last one always does.

        Args:
            step: t, counted from 0.
            num_steps: T, of the whole run.
        """

    @abstractmethod
    def arguments(self) -> dict[str, int]:
        """The constructor's arguments, for the record."""


class EveryExit(ExitCurriculum):
    """All exits learn at every step."""

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [True] * num_layers

    def arguments(self) -> dict[str, int]:
        return {}


class RotatingExits(ExitCurriculum):
    """C_rot,R: every R-th exit learns, one layer further at each step, so that each has its turn every R steps.

    Args:
        period: R.
    """

    def __init__(self, period: int) -> None:
        self.period = require_int("period", period, 1)

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [layer == num_layers - 1 or (layer - step) % self.period == 0 for layer in range(num_layers)]

    def arguments(self) -> dict[str, int]:
        return {"period": self.period}


class GradualExits(ExitCurriculum):
    """C_grad: from the last layer down to the first, one more exit every T / (2 L) steps; all of them by half time."""

    def enabled(self, step: int, num_steps: int, num_layers: int) -> list[bool]:
        return [2 * num_layers * step >= (num_layers - 1 - layer) * num_steps for layer in range(num_layers)]

    def arguments(self) -> dict[str, int]:
        return {}
