"""A file <-> tensors and plain values: written whole or not at all, read without running anything in it."""

from __future__ import annotations

import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.files import replaced

_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, OverflowError, RuntimeError)
_BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading a file of somebody else's making can raise."""


_MOST_VALUES = 4_000_000
"""Of plain values, each counted wherever it stands: one list that stands in many places costs what all of them do."""
_MOST_CHARACTERS = 2**26
_DEEPEST = 100


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write beside the old file, if there is one, and swap the two in one step.

    Raises:
        ValueError: no file can be put there.
        OSError: the writing failed, as on a full disk; the error names the file, and the old one stays.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the file to write in it")
    if path.parent.exists() and not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written, for {path.parent} is no directory: choose another name")
    with replaced(path) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer raises its own error over the system's
                raise error.__context__ from None
            raise


def read(path: str | os.PathLike[str]) -> Any:
    """What a file holds, if every byte of it is as torch wrote it and it holds tensors and plain values only.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another kind, or damaged, or asks to run code, or holds absurdly many plain values. Nothing
            in it has run.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint; `lightning_specdec fit --config ...` writes one")
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the checkpoint file in it")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: the copy or the run that wrote it was cut off; make it again")
    _check_whole(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the kinds of tensors that other programs store
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _BROKEN as error:
        if isinstance(error, pickle.UnpicklingError) and ("GLOBAL" in str(error) or "class" in str(error)):
            raise ValueError(
                f"{path} asks to run code when it is opened, so it was refused: take checkpoints only from this program"
            ) from error
        raise ValueError(_foreign(path)) from error
    _check_plain_size(path, content)
    return content


def _check_plain_size(path: Path, content: object) -> None:
    """Raise ValueError where writing out all plain values would take absurd memory.

    A list may stand in many places at the cost of one, so a small file can hold more values than any memory. The walk
    counts every place, ends at the first value too many, and copies nothing.
    """
    num_values = num_characters = 0
    walks: list[Iterator[object]] = [iter((content,))]
    while walks:
        for value in walks[-1]:
            inner: Iterator[object] | None = None
            num_values += 1
            if isinstance(value, str | bytes | bytearray):
                num_characters += len(value)
            elif isinstance(value, Mapping):
                inner = chain.from_iterable(value.items())
            elif isinstance(value, list | tuple | set | frozenset):
                inner = iter(value)
            if num_values > _MOST_VALUES or num_characters > _MOST_CHARACTERS or len(walks) > _DEEPEST:
                raise ValueError(
                    f"{path} holds more plain values than any checkpoint needs, or nests them too deeply: take "
                    "checkpoints only from this program"
                )
            if inner is not None:
                walks.append(inner)
                break
        else:
            walks.pop()


def _check_whole(path: Path) -> None:
    """Raise ValueError unless this is an archive as torch writes it and every byte of it is as it was written."""
    with path.open("rb") as file:
        head = file.read(2)
    if head != b"PK":
        raise ValueError(_foreign(path))
    stored = True
    try:
        with zipfile.ZipFile(path) as archive:
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
            whole = stored and archive.testzip() is None
    except _DAMAGED:
        whole = False
    if not stored:
        raise ValueError(_foreign(path))
    if not whole:
        raise ValueError(f"{path} is truncated or damaged: copy it again, or go back to another checkpoint of that run")


def _foreign(path: Path) -> str:
    return f"{path} is no checkpoint of this program: expected the file that `lightning_specdec fit` writes"
