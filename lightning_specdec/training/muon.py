"""Muon for matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Steps the matrices of hidden layers by Muon, all other parameters by AdamW.

    Theory: AdamW divides each number of a gradient by its own size, Muon gives a matrix's whole update singular values
    of about 1, so that rare directions are learned as fast as common ones: about half of the texts do for the same loss
    (Jordan et al. 2024, "Muon"). Its steps are scaled to AdamW's in root mean square (Liu et al. 2025, "Muon is
    scalable for LLM training"), so one learning rate serves both. Embeddings and output heads, of which a step touches
    few rows, are no such matrices.

    Args:
        matrices: parameters of two dimensions.
        others: the rest.
        lr: the learning rate.
        betas: of AdamW.
        momentum: of Muon.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
    ) -> None:
        muon = Muon(matrices, lr=lr, weight_decay=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [muon, AdamW(others, lr=lr, betas=betas, weight_decay=0.0)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's own groups and state."""
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
