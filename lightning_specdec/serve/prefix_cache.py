"""The states of texts that have ended, so that a chat's next turn reads only its own tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_specdec.decoding import SavedText
from lightning_specdec.decoding.requests import num_shared
from lightning_specdec.decoding.state_size import state_bytes

MIN_SHARED = 8
"""Fewest tokens of a prefix that are worth a copy."""


class PrefixCache:
    """Saved texts, bounded by their memory. Those that were not used for longest are dropped.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        # With their bytes, the one that was used last at the end.
        self._texts: dict[SavedText, int] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def find(self, prompt: Sequence[int]) -> tuple[SavedText | None, int]:
        """The text that shares the longest prefix with a prompt, and the length of that prefix.

        It was read with the positions that the prompt has. The prompt's last token does not count,
        since it is always read.
        """
        best_text = None
        best_length = 0
        for text in self._texts:
            if not text.serves(prompt):
                continue
            length = min(num_shared(prompt, text.tokens), len(prompt) - 1)
            if length >= MIN_SHARED and length > best_length:
                best_text = text
                best_length = length
        if best_text is not None:
            self._texts[best_text] = self._texts.pop(best_text)
        return best_text, best_length

    def put(self, text: SavedText) -> None:
        """Keep a text. Texts that it begins with are dropped, since it serves in their place.

        Those that were read with other positions stay.
        """
        size = state_bytes(text.target_copy, text.draft_copy)
        if size > self.capacity:
            return
        for other in list(self._texts):
            is_beginning = text.tokens[: len(other.tokens)] == other.tokens
            if is_beginning and text.target_copy.is_long == other.target_copy.is_long:
                self._drop(other)
        while self.num_bytes + size > self.capacity:
            self._drop(next(iter(self._texts)))
        self._texts[text] = size
        self.num_bytes += size

    def _drop(self, text: SavedText) -> None:
        self.num_bytes -= self._texts.pop(text)
