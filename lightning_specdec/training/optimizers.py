"""Muon with AdamW as one optimizer, the learning rate of each step, and runs of a given time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from lightning_specdec.config.checks import require_number

BETAS = (0.9, 0.95)


class MuonAdamW(Optimizer):
    """Steps the matrices of hidden layers by Muon and all other parameters by AdamW, with one learning rate.

    Muon's steps are scaled to AdamW's in root mean square (Liu et al. 2025, "Muon is scalable for LLM training").
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        muon = Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.parts: list[Optimizer] = [
            muon,
            AdamW(others, lr=lr, betas=BETAS, weight_decay=weight_decay),
        ]
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
        device = self.param_groups[0]["params"][0].device.type
        with nullcontext() if fast_bfloat16(device) else _InFloat32():
            for part in self.parts:
                part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


class _InFloat32(TorchFunctionMode):
    """Lets torch's Muon, which always multiplies in bfloat16, do so in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)  # it is written to
        return func(*args, **(kwargs or {}))


def fast_bfloat16(device: str) -> bool:
    """Whether a kind of device computes in bfloat16 rather than imitates it."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


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


class TimeLimit(Timer):
    """Ends a run so many minutes after its process began, start-up and the last validation included.

    The learning rate falls with the time then. A resumed run has what the one before left.

    Args:
        minutes: of the whole run.

    Attributes:
        began: when the process began, on the clock of `time.monotonic`.
    """

    began: ClassVar[float] = time.monotonic()

    def __init__(self, minutes: float) -> None:
        self.minutes = require_number("minutes", minutes, low=0.0, high=1e6, low_open=True)
        super().__init__(
            timedelta(minutes=0.92 * minutes), verbose=False
        )  # the rest is for the last validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_time[RunningStage.TRAINING] = self.began
        if (self.time_remaining() or 0) <= 0:
            gone = self.time_elapsed()
            raise ValueError(
                f"{self.minutes:g} minutes are too few for one checkpoint: {gone:.0f} s were gone before the first "
                f"step, give --minutes {math.ceil(gone / 30)} or more"
            )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking:
            self._duration = 60 * self.minutes - self.time_elapsed(RunningStage.VALIDATING)


def time_share(trainer: Trainer) -> float | None:
    """How much of a run's time is over, from 0 to 1; None for a run without a time limit."""
    for timer in timers(trainer):
        done = timer.time_elapsed()
        return min(1.0, done / max(1e-9, done + (timer.time_remaining() or 0)))
    return None


def time_left(trainer: Trainer) -> float | None:
    """Seconds that a run has left before it begins its steps; None for a run without a time limit."""
    for timer in timers(trainer):
        gone = time.monotonic() - TimeLimit.began if isinstance(timer, TimeLimit) else 0.0
        return max(0.0, (timer.time_remaining() or 0) - gone)
    return None


def timers(trainer: Trainer) -> list[Timer]:
    """The callbacks that limit a run's time."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        each for each in callbacks if isinstance(each, Timer) and each.time_remaining() is not None
    ]
