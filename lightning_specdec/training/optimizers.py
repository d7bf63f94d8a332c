"""Muon with AdamW as one optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

BETAS = (0.9, 0.95)


class MuonAdamW(Optimizer):
    """Steps the matrices of hidden layers by Muon and all other parameters by AdamW, with one learning rate.

    Muon's steps are scaled to AdamW's in root mean square (Liu et al. 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon, AdamW(others, lr=lr, betas=BETAS, weight_decay=weight_decay)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def warmup_cosine(step: int, num_steps: float, *, warmup_steps: int, final: float) -> float:
    """The learning rate of a step as a share of the highest: a linear warmup, then half a cosine.

    A function of the step alone, so that a resumed run needs no scheduler's state.

    Args:
        num_steps: of the whole run; infinite where the run has no end, and then the rate does not fall.
        final: the share at the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not math.isfinite(num_steps):
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))
