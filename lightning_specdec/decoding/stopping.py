"""Strings that end a row: found in the bytes of its new tokens, wherever they begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class StopStrings:
    """Strings that end a row once its new text holds one of them.

    The search goes over bytes: a string may begin in one token and end in another. The string that is complete first
    ends the row, and among several at one byte the longest, so the outcome does not depend on how the text was cut into
    tokens or rounds. The row ends with the token that completes the string; what is shown ends before the string.

    Args:
        strings: what to look for; the prompt does not count.
        token_bytes: what each token adds to the text; None, as for special tokens, adds nothing.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Sequence[bytes | None]) -> None:
        if "" in strings:
            raise ValueError("a stop string is empty: give at least one character")
        self.token_bytes = token_bytes
        self.needles = tuple(sorted({string.encode() for string in strings}, key=len, reverse=True))


class StopSearch:
    """How far the search through one row's new text has come. A round costs its own bytes and one string's length.

    Attributes:
        num_cut: bytes at the end of the text, from the beginning of the stop string; 0 until one is complete.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._tail = b""  # the newest bytes, as many as may still begin a string
        self.num_cut = 0

    def push(self, tokens: Sequence[int]) -> int | None:
        """Read more tokens; gives how many of them the text keeps if a string is complete, None while none is."""
        table = self._stops.token_bytes
        pieces = [(table[token] if token < len(table) else None) or b"" for token in tokens]
        before, text = len(self._tail), self._tail + b"".join(pieces)
        places = ((text.find(needle), len(needle)) for needle in self._stops.needles)
        found = [(place + size, -size) for place, size in places if place >= 0]
        if not found:
            longest = max(map(len, self._stops.needles), default=1)
            self._tail = text[max(len(text) - longest + 1, 0) :]
            return None
        end, length = min(found)
        ends = [before + size for size in accumulate(map(len, pieces))]
        kept = next(i for i, last in enumerate(ends) if last >= end)
        self.num_cut = ends[kept] - (end + length)
        return kept + 1

    @property
    def num_held(self) -> int:
        """Bytes at the end that are not to be shown: the stop string's, or those that may be the beginning of one."""
        if self.num_cut:
            return self.num_cut
        for size in range(len(self._tail), 0, -1):
            if any(needle.startswith(self._tail[-size:]) for needle in self._stops.needles):
                return size
        return 0
