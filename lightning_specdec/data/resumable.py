"""A loader that goes on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` whose next epoch, once a state is loaded, begins behind the batches that are done.

    Theory: an order that depends on the epoch alone can be entered anywhere; without that a run that is stopped in an
    epoch of an hour would learn from its first batches twice and never from its last. Lightning keeps the state of
    loaders that have one.

    Args:
        num_done: gives how many batches of this epoch have been learned from.
        options: those of `DataLoader`.
    """

    def __init__(self, *args: Any, num_done: Callable[[], int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_done, self._first = num_done, 0

    def state_dict(self) -> dict[str, int]:
        return {"num_batches": self.num_done()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        done = int(state["num_batches"])
        self._first = done if done < len(self) else 0  # else the epoch was over

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first, self._first = self._first, 0
        return islice(super().__iter__(), first, None)
