"""Stop strings: found in the bytes of a row's new tokens, wherever they begin and end."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Strings that end a row when its new text contains one of them.

    The search uses bytes: a string may begin in one token and end in another. The string that is
    complete first ends the row. If several are complete at the same byte, the longest one counts,
    so the result does not depend on how the text was cut into tokens or rounds. The row ends with
    the token that completes the string; the text that is shown ends before the string.

    Args:
        strings: strings to search for. The prompt is not searched.
        token_bytes: the bytes that each token adds to the text; None, as for special tokens, adds
            nothing.

    Raises:
        ValueError: a string is empty or has half a surrogate, which no text can contain.
    """

    def __init__(self, strings: Sequence[str], token_bytes: Sequence[bytes | None]) -> None:
        distinct_strings = set()
        for string in strings:
            if not string:
                raise ValueError("a stop string is empty: give at least one character")
            try:
                distinct_strings.add(string.encode())
            except UnicodeEncodeError:
                raise ValueError(
                    f"the stop string {string!r} has half a surrogate, which no text can contain: "
                    "give whole characters"
                ) from None
        self.token_bytes = token_bytes
        self.encoded_strings = tuple(distinct_strings)
        self.longest_length = max((len(string) for string in distinct_strings), default=1)


class StopSearch:
    """The state of the search in one row's new text.

    A round reads its own bytes and at most one string's length more.

    Attributes:
        num_cut: number of bytes from the start of the stop string to the end of the text; 0 until a
            string is complete.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        # The last bytes of the text, which may be the beginning of a string.
        self._tail = b""
        self.num_cut = 0

    def push(self, tokens: Sequence[int]) -> int | None:
        """Read more tokens.

        Returns:
            The number of these tokens that the text keeps if a string is complete, else None.
        """
        pieces = [self._bytes_of(token) for token in tokens]
        text = self._tail + b"".join(pieces)
        match = self._first_match(text)
        if match is None:
            num_kept = min(self._stops.longest_length - 1, len(text))
            self._tail = text[len(text) - num_kept :]
            return None

        match_start, match_end = match
        text_length = len(self._tail)
        for num_tokens, piece in enumerate(pieces, 1):
            text_length += len(piece)
            if text_length >= match_end:
                self.num_cut = text_length - match_start
                return num_tokens
        raise AssertionError("a string ends in the tokens that completed it")

    @property
    def num_held(self) -> int:
        """Number of bytes at the end that are not shown: a stop string, or the beginning of one."""
        if self.num_cut:
            return self.num_cut
        for size in range(len(self._tail), 0, -1):
            suffix = self._tail[-size:]
            if any(string.startswith(suffix) for string in self._stops.encoded_strings):
                return size
        return 0

    def _bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for special tokens and for ids outside the vocabulary."""
        token_bytes = self._stops.token_bytes
        if token >= len(token_bytes):
            return b""
        return token_bytes[token] or b""

    def _first_match(self, text: bytes) -> tuple[int, int] | None:
        """Start and end of the string that is complete first, the longest if several are."""
        matches = []
        for string in self._stops.encoded_strings:
            start = text.find(string)
            if start >= 0:
                matches.append((start, start + len(string)))
        if not matches:
            return None
        return min(matches, key=lambda match: (match[1], match[0]))
