"""A file <-> tensors and plain values: written whole or not at all, read without running anything in it.

Training runs are torch archives (`.ckpt`). Exported pairs and draft files are safetensors with one JSON document in
their metadata.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
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
from lightning_specdec.config.checks import BUILTIN_ERRORS
from lightning_specdec.config.files import replaced
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import short
from lightning_specdec.models.safetensors_file import read_header

KEY = "lightning_specdec"
"""Where the document stands in either kind of file."""
FORMAT = 2
BROKEN = (
    *BUILTIN_ERRORS,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Everything that reading a stranger's file, or building what it describes, can raise."""
_LONGEST_DOCUMENT = 2**24
_FOREIGN = (
    "{} is no checkpoint of this program: take one that `lightning_specdec fit` writes for its own training modules, "
    "or `export`"
)
_MOST_CHARACTERS, _CHARACTERS_PER_VALUE, _DEEPEST = 2**26, 64, 100
"""Of the plain values of a file, each counted wherever it stands: one list in many places costs what all of them do."""


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a training run as a torch archive.

    Raises:
        OSError, ValueError: it cannot be written; the old file stays.
    """
    with replaced(Path(path)) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:  # torch's writer raises its own error over the system's
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def write_document(
    path: str | os.PathLike[str], document: dict[str, Any], weights: Mapping[str, Tensor]
) -> None:
    """Write a document and weights as safetensors; raises as `write`."""
    content = safetensors.save(dict(weights), {KEY: json.dumps(document)})
    with replaced(Path(path)) as file:
        file.write(content)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file of either kind: its document under `KEY`, its weights under "state_dict".

    Raises:
        FileNotFoundError, ValueError: as `read_any`; and for files of another program or version.
    """
    content = read_weights(path)
    document = content.get(KEY)
    if not isinstance(document, dict):
        raise ValueError(_FOREIGN.format(path))
    found = document.get("format")
    if type(found) is not int or not 1 <= found <= FORMAT:
        shown = short(repr(found), 40)
        raise ValueError(
            f"{path} has format {shown}, this version reads 1 to {FORMAT}: update, or export it again"
        )
    return content


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file with weights under "state_dict", by whatever program; raises as `read_any`."""
    content = read_any(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(_FOREIGN.format(path))
    for name, value in content["state_dict"].items():
        whole = (
            isinstance(value, Tensor)
            and value.layout == torch.strided
            and value.device.type == "cpu"
        )
        if (
            not isinstance(name, str)
            or not whole
            or value.untyped_storage().nbytes() < value.nbytes
        ):
            raise ValueError(f"{path}: its weight {short(str(name), 80)!r} is no plain tensor")
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
        there = [each.name for each in path.parent.glob("*")] if path.parent.is_dir() else []
        advice = nearest(path.name, there) or "; `lightning_specdec fit --config ...` writes one"
        raise FileNotFoundError(f"{path}: no such checkpoint{advice}")
    try:
        with path.open("rb") as file:
            is_archive = file.read(2) == b"PK"
        content = _read_archive(path) if is_archive else _read_document(path)
        _check_size(content)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} asks to run code or holds objects other than tensors and plain values, and was not read: take a "
            "file that `lightning_specdec fit` or `export` writes"
        ) from error
    except BROKEN as error:
        found = (
            f"it has no {error}" if isinstance(error, KeyError) else str(error.__cause__ or error)
        )
        reason = short(" ".join(found.split()), 120)
        raise ValueError(
            f"{path} is truncated or damaged, or is no checkpoint of this program ({reason}): copy it "
            "again, or take a file that `lightning_specdec fit` or `export` writes"
        ) from error
    return content


def _read_document(path: Path) -> dict[str, Any]:
    """A safetensors file. Draft files of format 1 name their drafter at the top of the document."""
    document = json.loads(
        read_header(path)[0][KEY][:_LONGEST_DOCUMENT]
    )  # a longer one is cut, and no JSON then
    weights = safetensors.load_file(path)
    if "class" in document:
        drafter = {name: document.pop(name, None) for name in ("class", "arguments")}
        document |= {"drafter": drafter, "prompts": []}
        weights = {f"drafter.{name}": value for name, value in weights.items()}
    return {KEY: document, "state_dict": weights}


def _read_archive(path: Path) -> Any:
    """A torch archive, if every byte of it is as it was written and it holds tensors and plain values only."""
    with zipfile.ZipFile(path) as archive:
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        if not stored or archive.testzip() is not None:
            raise ValueError("its parts are compressed or have wrong checksums")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _check_size(content: object) -> None:
    """Raise ValueError where writing out all plain values would take absurd memory.

    A list may stand in many places at the cost of one, so a small file can hold more values than any memory. This walk
    counts every place and copies nothing.
    """
    walks: list[Iterator[object]] = [iter((content,))]
    left = _MOST_CHARACTERS
    while walks:
        value = next(walks[-1], walks)
        if value is walks:  # the end of this one
            walks.pop()
            continue
        left -= len(value) if isinstance(value, str | bytes | bytearray) else _CHARACTERS_PER_VALUE
        if left < 0 or len(walks) > _DEEPEST:
            raise ValueError(
                "it holds more plain values than any checkpoint needs, or nests them too deeply"
            )
        if isinstance(value, Mapping):
            walks.append(chain.from_iterable(value.items()))
        elif isinstance(value, list | tuple | set | frozenset):
            walks.append(iter(value))
