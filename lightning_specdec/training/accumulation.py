"""Optimizer steps over several batches: counting tokens in advance, resuming between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import GradClipAlgorithmType


class PeekableIterator(Iterator[Any]):
    """An iterator whose next items can be looked at before they are taken."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._peeked: deque[Any] = deque()

    def __next__(self) -> Any:
        if self._peeked:
            return self._peeked.popleft()
        return next(self._items)

    def peek(self, count: int) -> list[Any]:
        """The next `count` items, or fewer if the iterator ends before."""
        # Not `islice`, which calls `iter`: Lightning's loaders begin a new epoch then.
        with suppress(StopIteration):
            while len(self._peeked) < count:
                self._peeked.append(next(self._items))
        return list(self._peeked)[:count]


def upcoming_batches(trainer: Trainer, data: LightningDataModule, count: int) -> list[Any]:
    """The next `count` training batches on the host, or fewer at the end of an epoch.

    The training loop still receives these batches. The Trainer has no public way to read ahead: its
    data fetcher prefetches only from loaders without a length.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    if count > 0 and fetcher.length is not None:
        # The loader does not know `limit_train_batches`; its length does.
        count = min(count, fetcher.length - fetcher.fetched)
    if count <= 0:
        return []

    if not isinstance(fetcher.iterator, PeekableIterator):
        # The fetcher creates a new iterator for every epoch.
        fetcher.iterator = PeekableIterator(fetcher.iterator)
    prefetched = getattr(fetcher, "batches", [])[:count]
    items = [*prefetched, *fetcher.iterator.peek(count - len(prefetched))]

    batches = []
    for raw_batch, _, _ in items:
        batch = data.on_before_batch_transfer(raw_batch, 0)
        batches.append(data.on_after_batch_transfer(batch, 0))
    return batches


def rewind_to_step(
    checkpoint: dict[str, Any],
    trainer: Trainer,
    *,
    is_validation_open: bool = False,
) -> None:
    """Let a checkpoint from the middle of an optimizer step resume at the step's first batch.

    Accumulated gradients are not saved. Weights and the optimizer have not changed since the step
    began, so only the counts of batches go back. Metrics are not saved either, so a validation that
    has begun is repeated from its first batch.

    Args:
        is_validation_open: whether a validation is due or runs, even if it is between two batches.
    """
    loops = checkpoint.get("loops", {})
    if "fit_loop" not in loops:
        return
    fit_loop = loops["fit_loop"]
    validation = fit_loop["epoch_loop.val_loop.batch_progress"]
    num_validated = validation["total"]["completed"]
    if is_validation_open or validation["total"]["ready"] != num_validated:
        _repeat_validation(validation)

    progress = fit_loop["epoch_loop.batch_progress"]
    current = progress["current"]
    is_epoch_over = progress["is_last_batch"] and current["ready"] == current["processed"]
    num_accumulated = current["processed"] % trainer.accumulate_grad_batches
    if num_accumulated == 0 or is_epoch_over:
        return

    # The state of a run that stops in the first batch of this step: the batch is started, and not
    # processed.
    for counts in (progress["total"], current):
        step_start = counts["processed"] - num_accumulated
        counts["ready"] = step_start + 1
        counts["started"] = step_start + 1
        counts["processed"] = step_start
        counts["completed"] = step_start
    progress["is_last_batch"] = False

    # No validation is open at the start of a step: one before it is over, and one within it will
    # begin again.
    for count_name in ("ready", "started", "processed"):
        validation["total"][count_name] = num_validated

    # `ResumableLoader` counts batches; the state of other loaders is unknown.
    for loader_state in fit_loop["state_dict"].get("combined_loader", []):
        if isinstance(loader_state, dict) and "num_batches" in loader_state:
            loader_state["num_batches"] = current["processed"]


def _repeat_validation(progress: dict[str, Any]) -> None:
    """Let Lightning repeat an open validation from its first batch.

    Lightning resumes a validation only if it has begun a batch, and skips as many batches as the
    current counts say.
    """
    num_validated = progress["total"]["completed"]
    progress["total"]["ready"] = num_validated + 1
    progress["total"]["started"] = num_validated + 1
    progress["total"]["processed"] = num_validated
    for count_name in progress["current"]:
        progress["current"][count_name] = 0
    progress["is_last_batch"] = False


def gradient_settings(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's arguments that change gradients, as plain values to store in a checkpoint."""
    accumulation: Any = trainer.accumulate_grad_batches
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            # The scheduler changes the Trainer's value from epoch to epoch.
            accumulation = {str(epoch): count for epoch, count in callback.scheduling.items()}

    clip_algorithm = None
    if trainer.gradient_clip_val:
        # Lightning clips by norm if the Trainer names no algorithm.
        clip_algorithm = GradClipAlgorithmType(trainer.gradient_clip_algorithm or "norm").value
    return {
        "accumulate_grad_batches": accumulation,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": clip_algorithm,
    }
