"""Classes by name, some of which are imported when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Registry(Mapping[str, Any]):
    """The classes that a checkpoint or a config may name.

    Args:
        classes: those that are here.
        waiting: of the others, what imports each: more than most processes should pay for.
    """

    def __init__(self, classes: Mapping[str, type], waiting: Mapping[str, Callable[[], type]]) -> None:
        self._classes, self.waiting = dict(classes), dict(waiting)

    def __getitem__(self, name: str) -> Any:
        return self.waiting[name]() if name in self.waiting else self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._classes or name in self.waiting

    def __iter__(self) -> Iterator[str]:
        yield from self._classes
        yield from self.waiting

    def __len__(self) -> int:
        return len(self._classes) + len(self.waiting)
