"""A file <-> tensors and plain values: written whole or not at all, read without running anything in it.

Training runs are torch archives (`.ckpt`). Exported pairs and draft files are safetensors with one JSON document in
their metadata.
"""

from __future__ import annotations

import json
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
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from lightning_specdec.checkpoints import runs
from lightning_specdec.config.files import replaced
from lightning_specdec.config.terminal import short
from lightning_specdec.models.safetensors_file import read_header

KEY = "lightning_specdec"
"""Where the document stands in either kind of file."""
FORMAT = 2
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Everything that reading a stranger's file, or building what it describes, can raise."""
_MOST_VALUES, _MOST_CHARACTERS, _DEEPEST = 4_000_000, 2**26, 100
"""Plain values of an archive, each counted wherever it stands: one list in many places costs what all of them do."""
_LONGEST_DOCUMENT = 2**24


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a training run as a torch archive.

    Raises:
        OSError, ValueError: it cannot be written; the old file stays.
    """
    with replaced(Path(path)) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch's writer raises its own error over the system's
                raise error.__context__ from None
            raise


def write_document(path: str | os.PathLike[str], document: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write a document and weights as safetensors; raises as `write`."""
    content = safetensors.save(dict(weights), {KEY: json.dumps(document)})
    with replaced(Path(path)) as file:
        file.write(content)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file of either kind: its document under `KEY`, its weights under "state_dict".

    Raises:
        FileNotFoundError, ValueError: as `read_any`; and for files of another program or version.
    """
    content = read_any(path)
    document = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(document, dict):
        raise ValueError(_foreign(path))
    found = document.get("format")
    if type(found) is not int or not 1 <= found <= FORMAT:
        shown = short(repr(found), 40)
        raise ValueError(f"{path} has format {shown}, this version reads 1 to {FORMAT}: update or export it anew")
    weights = content.get("state_dict")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        raise ValueError(f"{path} holds no weights: the run that wrote it was cut off; make it again")
    return dict(content)


def read_any(path: str | os.PathLike[str]) -> Any:
    """The content of a file, if it holds tensors and plain values only.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another kind, damaged, asks to run code, or holds absurdly many plain values. Nothing in it
            has run.
    """
    path = runs.find(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint; `lightning_specdec fit --config ...` writes one")
    with path.open("rb") as file:
        head = file.read(2)
    if not head:
        raise ValueError(f"{path} is empty: the copy or the run that wrote it was cut off; make it again")
    return _read_archive(path) if head == b"PK" else _read_document(path)


def _read_document(path: Path) -> dict[str, Any]:
    """A safetensors file. Draft files of format 1 name their drafter at the top of the document."""
    text = read_header(path)[0].get(KEY)
    if text is None:
        raise ValueError(_foreign(path))
    if len(text) > _LONGEST_DOCUMENT:
        raise ValueError(f"the metadata of {path} is longer than {_LONGEST_DOCUMENT:,} characters")
    try:
        document = json.loads(text)
        weights = safetensors.load_file(path)
    except (RecursionError, *BROKEN) as error:
        raise ValueError(f"{path} cannot be read: copy it again ({short(str(error), 80)})") from error
    if isinstance(document, dict) and "class" in document:
        drafter = {name: document.pop(name, None) for name in ("class", "arguments")}
        document |= {"drafter": drafter, "prompts": []}
        weights = {f"drafter.{name}": value for name, value in weights.items()}
    return {KEY: document, "state_dict": weights}


def _read_archive(path: Path) -> Any:
    """A torch archive, if every byte of it is as it was written and it holds tensors and plain values only."""
    try:
        with zipfile.ZipFile(path) as archive:
            if not all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError(_foreign(path))
            whole = archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is truncated or damaged: copy it again, or go back to another checkpoint of that run")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the kinds of tensors that other programs store
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except BROKEN as error:
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


def _foreign(path: str | os.PathLike[str]) -> str:
    return f"{path} is no checkpoint of this program: expected a file that `lightning_specdec fit` or `export` writes"
