"""Text on its way to a terminal: what others wrote may hold control characters, which a terminal would obey."""

from __future__ import annotations

import re
from typing import Any

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""C0 and C1 control characters and DEL, without tab and newline."""


def visible(text: str) -> str:
    r"""The text with control characters other than tab and newline as escapes, as `\x1b`.

    Each character is replaced alone, so pieces of a stream can be made visible one by one.
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(error: BaseException) -> str:
    """What an error says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def short(text: str, length: int) -> str:
    """The text, cut where it is longer."""
    return text if len(text) <= length else f"{text[:length]}..."


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
        file: text stream to write to; stdout when None.
        has_colours: whether the text holds our own colour codes; its other parts must be made visible before.
    """
    print(text if has_colours else visible(str(text)), file=file, end=end, flush=flush)
