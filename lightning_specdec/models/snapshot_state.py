"""A decoding state for models that cannot drop single tokens: they return to a snapshot instead.

A recurrent layer sums up its whole text in a state of fixed size, so it cannot be truncated. It can
be copied, though. `SnapshotState` copies it before tokens are read that may be removed again. After
a truncation it returns to the newest copy that is short enough, and the remaining tokens of the
text are read again together with the next ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.models.state import DecodeState, Lengths

if TYPE_CHECKING:
    from jaxtyping import Int


class RowCache(ABC):
    """What a model keeps of the text of one row.

    `snapshot` returns values that later calls leave unchanged, and `restore` may be called any
    number of times with the same values.
    """

    @abstractmethod
    def snapshot(self) -> Any:
        """What `restore` needs to return to the present text."""

    @abstractmethod
    def restore(self, saved: Any) -> None:
        """Return to a snapshot of this text, of which tokens may have been added since."""

    def copy(self) -> RowCache:
        """Another cache after the same text."""
        return deepcopy(self)

    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return tensor_bytes(vars(self))


@dataclass(frozen=True)
class Snapshot:
    """A cache as it was after the first tokens of a text.

    Args:
        num_read: number of these tokens.
        saved: what `RowCache.restore` takes.
    """

    num_read: int
    saved: Any


class SnapshotRow:
    """One row: its cache, up to two snapshots, and the tokens that may have to be read again.

    Attributes:
        cache: the model's cache, after `num_read` tokens of the text.
        num_read: at most the length of the text. The tokens from there on are read with the next
            call.
        snapshots: by ascending length. An empty cache needs none.
    """

    def __init__(self, new_cache: Callable[[], RowCache], device: torch.device) -> None:
        self._new_cache = new_cache
        self.cache = new_cache()
        self.num_read = 0
        self.snapshots: list[Snapshot] = []
        self._tokens: Int[Tensor, "T"] = torch.empty(0, dtype=torch.long, device=device)
        """The text from position `_first` on, which no snapshot precedes."""
        self._first = 0
        self._is_interrupted = False
        """Whether a call was interrupted, which leaves the cache in no known state."""

    def truncate(self, length: int) -> None:
        """Shorten the text, and return to the newest snapshot that is not longer."""
        self._tokens = self._tokens[: length - self._first]
        if self.num_read <= length and not self._is_interrupted:
            return

        self.snapshots = [saved for saved in self.snapshots if saved.num_read <= length]
        if self.snapshots:
            newest = self.snapshots[-1]
            self.cache.restore(newest.saved)
            self.num_read = newest.num_read
        else:
            assert self._first == 0, f"no snapshot of at most {length} tokens was kept"
            self.cache = self._new_cache()
            self.num_read = 0
        self._is_interrupted = False

    def append(self, tokens: Int[Tensor, "T"]) -> None:
        """Add tokens to the text, which the cache has not read."""
        self._tokens = torch.cat((self._tokens, tokens))

    @property
    def unread(self) -> Int[Tensor, "T"]:
        """The tokens of the text that the cache has not read."""
        return self._tokens[self.num_read - self._first :]

    @contextmanager
    def reading(self, num_tokens: int) -> Iterator[None]:
        """The cache reads the next tokens inside the block."""
        self._is_interrupted = True
        yield
        self._is_interrupted = False
        self.num_read += num_tokens

    def take_snapshot(self, committed: int) -> None:
        """Copy the cache as it is now, and forget the snapshots that are no longer needed.

        Two remain at most: the newest one that is not longer than `committed`, to which a row can
        always return, and the present one if it is longer.
        """
        if self.num_read == 0:
            return
        if not self.snapshots or self.snapshots[-1].num_read < self.num_read:
            self.snapshots.append(Snapshot(self.num_read, self.cache.snapshot()))

        num_committed = sum(snapshot.num_read <= committed for snapshot in self.snapshots)
        if num_committed > 0:
            oldest = self.snapshots[num_committed - 1]
            self._tokens = self._tokens[oldest.num_read - self._first :]
            self._first = oldest.num_read
            self.snapshots = [oldest, *self.snapshots[num_committed:][-1:]]
        else:
            self.snapshots = self.snapshots[-1:]

    def copy(self) -> SnapshotRow:
        """Another row with the same text."""
        row = copy(self)
        row.cache = self.cache.copy()
        row.snapshots = list(self.snapshots)
        return row

    def num_bytes(self) -> int:
        """Bytes of the cache and its snapshots."""
        num_bytes = self.cache.num_bytes()
        for snapshot in self.snapshots:
            num_bytes += tensor_bytes(snapshot.saved)
        return num_bytes


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value: in its items if it is a container, or in its attributes."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, type):
        return 0
    items: Iterable[Any] = getattr(value, "__dict__", {}).values()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple):
        items = value
    return sum(tensor_bytes(item) for item in items)


class SnapshotState(DecodeState):
    """The rows of a batch, each with a separate cache that can return to a snapshot.

    `consumed` counts a row's whole text. Its cache may have read less of it: after a truncation,
    the tokens from the snapshot on are unread, and the model reads them again with the next ones.
    So a truncation goes to any length, as in every other state.

    Args:
        batch_size: rows.
        new_cache: creates an empty cache for one row.
    """

    shares_calls = False

    def __init__(
        self,
        batch_size: int,
        device: torch.device,
        new_cache: Callable[[], RowCache],
    ) -> None:
        super().__init__(batch_size, device)
        self._new_cache = new_cache
        self.rows = [self._new_row() for _ in range(batch_size)]

    def _new_row(self) -> SnapshotRow:
        return SnapshotRow(self._new_cache, self.device)

    def truncate(self, lengths: Lengths, uploaded: Int[Tensor, "B"] | None = None) -> None:
        super().truncate(lengths, uploaded)
        for row, length in zip(self.rows, self.consumed, strict=True):
            row.truncate(length)

    def _select(self, rows: Sequence[int], source: Tensor, empty: Tensor) -> None:
        selected: list[SnapshotRow] = []
        is_taken: set[int] = set()
        for index in rows:
            if index < 0:
                selected.append(self._new_row())
            elif index in is_taken:
                selected.append(self.rows[index].copy())
            else:
                selected.append(self.rows[index])
                is_taken.add(index)
        self.rows = selected

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        for index in rows:
            self.rows[index] = self._new_row()

    def num_bytes(self) -> int:
        """Bytes of all caches and snapshots."""
        return sum(row.num_bytes() for row in self.rows)
