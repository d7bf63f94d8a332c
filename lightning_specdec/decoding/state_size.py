"""How much memory the states of a session use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_specdec.models.snapshot_state import SnapshotState


def state_bytes(*states: Any) -> int:
    """Bytes of all tensors that states hold, at any depth. Models are not counted."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    num_other_bytes = 0
    stack: list[Any] = list(states)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, nn.Module):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, SnapshotState):
            # Its caches are objects of transformers.
            num_other_bytes += value.num_bytes()
        else:
            stack += _parts_of(value)
    return sum(storages.values()) + num_other_bytes


def _parts_of(value: Any) -> Iterable[Any]:
    """The values inside a container or an object of this package."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set):
        return value
    is_ours = type(value).__module__.startswith("lightning_specdec.")
    return vars(value).values() if is_ours and hasattr(value, "__dict__") else ()
