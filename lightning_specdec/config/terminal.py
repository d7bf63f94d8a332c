"""Text for a terminal. Foreign text may hold control characters, which a terminal would obey."""

from __future__ import annotations

import re
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
    printable = text if has_colours else visible(str(text))
    print(printable, file=file, end=end, flush=flush)
