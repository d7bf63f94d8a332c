"""What a way of decoding may fail by while a measurement goes on."""

from __future__ import annotations

from lightning_specdec.models.config_file import FOREIGN

FAILURES = (ValueError, RuntimeError, MemoryError)
"""What a draft or a window can fail by: what they cannot do, and what torch or the memory cannot."""
OUTSIDE_FAILURES = tuple(each for each in FOREIGN if each is not OSError)
"""What transformers' ways can fail by; a disk is not among it."""


def in_one_line(error: BaseException) -> str:
    """What something failed by."""
    return " ".join(str(error).split()) or type(error).__name__
