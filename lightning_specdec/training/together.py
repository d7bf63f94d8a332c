"""What the processes of a run do side by side, and how a fault of one becomes a fault of all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


def place() -> tuple[int, int]:
    """This process's number, and how many there are."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


@contextmanager
def together() -> Iterator[None]:
    """A part that no process leaves before all have come to its end.

    Raises:
        ValueError: that of this process, or the first of any other.
    """
    own: ValueError | None = None
    try:
        yield
    except ValueError as error:
        own = error
    _, num_processes = place()
    faults: list[str | None] = [None] * num_processes
    if num_processes > 1:
        distributed.all_gather_object(faults, None if own is None else str(own))
    if own is not None:
        raise own
    for fault in faults:
        if fault is not None:
            raise ValueError(fault)
