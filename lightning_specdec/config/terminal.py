"""Text for a terminal. Foreign text may hold control characters, which a terminal would obey."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
import unicodedata
from typing import Any

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 control characters and DEL, without tab and newline."""


def visible(text: str) -> str:
    r"""Return the text with control characters other than tab and newline as escapes like `\x1b`.

    Each character is replaced separately, so pieces of a stream can be converted one by one.
    """
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def short(text: str, length: int) -> str:
    """Return the text, cut after `length` characters if it is longer."""
    return text if len(text) <= length else f"{text[:length]}..."


def display_width(text: str) -> int:
    """The columns that a text occupies in a terminal: Chinese characters are two columns wide."""
    width = 0
    for character in text:
        if unicodedata.category(character) in ("Cf", "Me", "Mn"):
            continue  # joined to the character before it
        width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def padded(text: str, width: int, *, to_right: bool = False) -> str:
    """The text with blanks to a display width; `to_right` moves it to the right end."""
    blanks = " " * max(0, width - display_width(text))
    return blanks + text if to_right else text + blanks


class StatusLine:
    """The last line of a terminal, which shows what runs and makes way for other output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_drawn = False

    def draw(self, text: str) -> None:
        """Show a text in place of the last one, cut to the terminal's width."""
        num_columns = shutil.get_terminal_size().columns - 1
        line = visible(text).replace("\n", " ")[:num_columns]
        with self._lock:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
            self._is_drawn = True

    def erase(self) -> None:
        """Remove the line, so that other output begins at its start."""
        with self._lock:
            if self._is_drawn:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
                self._is_drawn = False


STATUS_LINE = StatusLine()
_last_output = time.monotonic()


def note_output() -> None:
    """Remember that something was printed just now."""
    global _last_output
    _last_output = time.monotonic()


def seconds_since_output() -> float:
    """How long nothing has been printed."""
    return time.monotonic() - _last_output


def say(
    text: object = "",
    *,
    file: Any = None,
    end: str = "\n",
    flush: bool = False,
    has_colours: bool = False,
) -> None:
    """Print text with its control characters visible.

    Args:
        file: text stream to write to; None for stdout.
        has_colours: whether the text contains our own color codes. The caller has then made its
            foreign parts visible already.
    """
    STATUS_LINE.erase()
    note_output()
    printable = text if has_colours else visible(str(text))
    print(printable, file=file, end=end, flush=flush)
