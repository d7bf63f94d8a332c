"""Muon with AdamW as one optimizer, the learning-rate schedule, and runs of a fixed time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.checks import require_number

BETAS = (0.9, 0.95)
"""Decay rates of AdamW's moments."""
TRAINING_SHARE = 0.92
"""The part of a run's time after which training ends if the last validation cannot be measured."""
SAVE_SECONDS = 1.0
"""Time to write the last checkpoint."""


START_UP_FACTOR = 2.0
"""The time until the first step, at least, as a multiple of that until libraries are imported."""
DECODING_SHARE = 0.15
"""The part of the time after start-up that the last validation decodes for, and the verdict too.

They take less if they need less.
"""
BATCHES_SHARE = 0.25
"""The part of the time after start-up for the batches of the last validation, one at least."""
PACKING_FACTOR = 1.5
"""Time of the verdict, which packs the weights first, as a multiple of what it decodes for."""
LEAST_DECODING = 0.25
"""The part of what a validation decodes that suffices for a run with little time: a prompt."""
LOAD_MARGIN = 2.0
"""How much slower the machine may become until the user has read the advice and tries again."""
AFTER_CACHING = 2.0
"""What a longer run needs after its start-up, as a multiple, as it may spend half on a cache."""


class MuonAdamW(Optimizer):
    """Updates the matrices of hidden layers by Muon and all other parameters by AdamW.

    Both have one learning rate: Muon's updates are scaled to the root mean square of AdamW's (Liu
    et al. 2025, "Muon is scalable for LLM training").
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
        adamw = AdamW(others, lr=lr, betas=BETAS, weight_decay=weight_decay)
        self.parts: list[Optimizer] = [muon, adamw]
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        """Let the parts work on this optimizer's groups and state."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        device = self.param_groups[0]["params"][0].device.type
        precision: AbstractContextManager[Any] = nullcontext()
        if not fast_bfloat16(device):
            precision = _InFloat32()
        with precision:
            for part in self.parts:
                part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share_state()


class _InFloat32(TorchFunctionMode):
    """Makes torch's Muon, which always multiplies in bfloat16, multiply in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16:
            # Muon writes to the result.
            return args[0].to(torch.float32, copy=True)
        return func(*args, **(kwargs or {}))


def fast_bfloat16(device: str) -> bool:
    """Whether a type of device computes in bfloat16 rather than emulates it."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def warmup_cosine(step: int, num_steps: float, *, warmup_steps: int, final: float) -> float:
    """Return a step's learning rate relative to the highest: linear warmup, then half a cosine.

    It depends only on the step, so a resumed run needs no scheduler's state.

    Args:
        step: the optimizer step, from 0.
        num_steps: optimizer steps of the whole run. If it is infinite, the rate does not fall.
        warmup_steps: steps over which the rate rises.
        final: the relative rate at the end.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not math.isfinite(num_steps):
        return 1.0
    num_falling_steps = max(1, num_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / num_falling_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return final + (1 - final) * cosine


class TimeLimit(Timer):
    """Ends a run after a time that includes its start-up, the last validation and the verdict.

    Where time is short, the last validation and the verdict decode less, and the training goes on.
    Only a run without time for a step is refused.

    The learning rate follows the time. A resumed run has the time that the run before left.

    Args:
        minutes: duration of the whole run.

    Attributes:
        began: when the process began, on the clock of `time.monotonic`.
    """

    began: ClassVar[float] = time.monotonic()

    def __init__(self, minutes: float) -> None:
        self.minutes = require_number("minutes", minutes, low=0.0, high=1e6, low_open=True)
        super().__init__(timedelta(minutes=TRAINING_SHARE * minutes), verbose=False)
        self._reserved_seconds = 60 * minutes * (1 - TRAINING_SHARE)
        self._verdict_seconds = 0.0
        self._validation_batch_seconds: float | None = None
        self._step_start = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # The models are loaded, and the target's outputs may be computed next, which is long.
        if stage == "fit":
            check_start_up(self.minutes, factor=1.0)

    def seconds_left(self) -> float:
        """Seconds until all of the run's time is over, also after the training; 0 at least."""
        elapsed = self._offset + time.monotonic() - self.began
        return max(0.0, 60 * self.minutes - elapsed)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_batches = sum(trainer.num_sanity_val_batches)
        if num_batches:
            seconds = self.time_elapsed(RunningStage.VALIDATING)
            self._validation_batch_seconds = seconds / num_batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_time[RunningStage.TRAINING] = self.began
        if self._validation_batch_seconds is not None:
            show_activity("measuring how long the last validation takes")
            seconds = self._divide_time(trainer, pl_module)
            self._reserve(trainer.strategy.broadcast(seconds))
        if (self.time_remaining() or 0) <= 0:
            elapsed = self.time_elapsed()
            raise ValueError(
                f"--minutes {self.minutes:g} is too short: {elapsed:.0f} s passed before the first "
                "step, and the last validation and the verdict take "
                f"{self._reserved_seconds:.0f} s: give --minutes "
                f"{enough_minutes(self.minutes, elapsed, self._reserved_seconds)} or more"
            )

    def on_train_batch_start(self, *args: Any) -> None:
        self._step_start = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        # The next step will take as long as this one.
        self._reserve(self._reserved_seconds, time.monotonic() - self._step_start)
        super().on_train_batch_end(trainer, *args, **options)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if not trainer.sanity_checking:
            # The next validation will take as long as this one.
            seconds = self.time_elapsed(RunningStage.VALIDATING) + SAVE_SECONDS
            self._reserve(seconds + self._verdict_seconds)

    def _divide_time(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """Limit how long the last validation and the verdict decode; returns the time of both."""
        assert self._validation_batch_seconds is not None
        seconds = SAVE_SECONDS
        self._limit_batches(trainer, self._validation_batch_seconds)
        num_batches = sum(trainer.num_val_batches)
        if math.isfinite(num_batches):
            seconds += self._validation_batch_seconds * num_batches
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if not hasattr(callback, "estimated_seconds"):
                continue
            needed = callback.estimated_seconds(trainer, pl_module)
            share = DECODING_SHARE * (self.seconds_left() - seconds)
            callback.max_seconds = min(needed, max(LEAST_DECODING * needed, share))
            seconds += callback.max_seconds
            # The verdict decodes the same prompts, with packed weights.
            self._verdict_seconds = PACKING_FACTOR * callback.max_seconds
        return seconds + self._verdict_seconds

    def _limit_batches(self, trainer: Trainer, batch_seconds: float) -> None:
        """Validate with fewer batches if all of them would take too much of the time."""
        seconds = BATCHES_SHARE * self.seconds_left()
        num_affordable = max(1, int(seconds / max(batch_seconds, 1e-9)))
        # All processes must read equally many batches.
        num_affordable = trainer.strategy.broadcast(num_affordable)
        num_batches = trainer.num_val_batches
        for index, num_all in enumerate(num_batches):
            # The Trainer reads this list at the start of each validation.
            num_batches[index] = min(num_all, num_affordable)

    def _reserve(self, last_seconds: float, step_seconds: float = 0.0) -> None:
        """End the training so early that there is time for these."""
        self._reserved_seconds = last_seconds
        self._duration = 60 * self.minutes - last_seconds - step_seconds


def enough_minutes(minutes: float, start_up_seconds: float, last_seconds: float) -> int:
    """Minutes with which a run trains, also if the machine is slower the next time.

    Args:
        minutes: those that were too few.
        start_up_seconds: time until the first step.
        last_seconds: time of the last validation and the verdict.
    """
    seconds = LOAD_MARGIN * (start_up_seconds + AFTER_CACHING * last_seconds)
    return max(math.ceil(seconds / 60), math.floor(minutes)) + 1


def check_start_up(minutes: float, *, factor: float = START_UP_FACTOR) -> None:
    """Raise ValueError if a run of this time cannot succeed, judging by what has passed so far.

    Args:
        minutes: of the run.
        factor: the whole start-up, as a multiple of the time so far. Once the libraries are
            imported, loading the target and preparing the text take about as long again.
    """
    elapsed = time.monotonic() - TimeLimit.began
    start_up_seconds = START_UP_FACTOR * elapsed
    if 60 * minutes < factor * elapsed:
        raise ValueError(
            f"--minutes {minutes:g} is too short: starting up took {elapsed:.0f} s so far, give "
            f"--minutes {enough_minutes(minutes, start_up_seconds, 0.0)} or more"
        )


def timers(trainer: Trainer) -> list[Timer]:
    """Return the callbacks that limit a run's time."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    limits = []
    for callback in callbacks:
        if isinstance(callback, Timer) and callback.time_remaining() is not None:
            limits.append(callback)
    return limits


def time_share(trainer: Trainer) -> float | None:
    """Return the part of a run's time that is over, from 0 to 1; None without a limit."""
    limits = timers(trainer)
    if not limits:
        return None
    elapsed = limits[0].time_elapsed()
    remaining = limits[0].time_remaining() or 0
    return min(1.0, elapsed / max(1e-9, elapsed + remaining))


def time_left(trainer: Trainer) -> float | None:
    """Return the seconds that a run has left at its first step; None without a limit."""
    limits = timers(trainer)
    if not limits:
        return None
    remaining = limits[0].time_remaining() or 0
    if isinstance(limits[0], TimeLimit):
        # This limit includes the start-up of the process.
        remaining -= time.monotonic() - TimeLimit.began
    return max(0.0, remaining)
