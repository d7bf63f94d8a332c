"""Files of tensors and plain values: written completely or not at all, read without running code.

Training runs are torch archives (`.ckpt`). Exported pairs and draft files are safetensors with one
JSON document in their metadata.
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
from lightning_specdec.config.models import missing_checkpoint
from lightning_specdec.config.terminal import short
from lightning_specdec.models.safetensors_file import read_header

KEY = "lightning_specdec"
"""Name of the document in either kind of file."""
FORMAT = 2
"""Newest version of the document that this package reads and writes."""
BROKEN = (
    *BUILTIN_ERRORS,
    EOFError,
    SafetensorError,
    pickle.UnpicklingError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""All errors that reading a damaged file, or building what it describes, can raise."""

_FOREIGN = (
    "{} is no checkpoint of this program: take one that `lightning_specdec fit` writes for its own "
    "training modules, or `export`"
)
_MAX_DOCUMENT_CHARACTERS = 2**24
_MAX_PLAIN_CHARACTERS = 2**26
"""Limit on the characters of all plain values of a file; shared ones are counted each time."""
_CHARACTERS_PER_VALUE = 64
"""What a value that is no text counts for."""
_MAX_DEPTH = 100


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a training run as a torch archive.

    Raises:
        OSError, ValueError: it cannot be written; the old file stays.
    """
    with replaced(Path(path)) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch's writer replaces the system's error by its own.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def write_document(
    path: str | os.PathLike[str],
    document: dict[str, Any],
    weights: Mapping[str, Tensor],
) -> None:
    """Write a document and weights as safetensors; raises the errors of `write`."""
    # Serialized before the file is opened: errors of single weights leave no file.
    content = safetensors.save(dict(weights), {KEY: json.dumps(document)})
    with replaced(Path(path)) as file:
        file.write(content)


def read(path: str | os.PathLike[str], *, mapped: bool = True) -> dict[str, Any]:
    """Return the content of a file of either kind.

    The document is under `KEY`, the weights are under "state_dict".

    Args:
        mapped: as of `read_any`.

    Raises:
        FileNotFoundError, ValueError: as `read_any`; and for files of another program or version.
    """
    content = read_weights(path, mapped=mapped)
    document = content.get(KEY)
    if not isinstance(document, dict):
        raise ValueError(_FOREIGN.format(path))
    version = document.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise ValueError(
            f"{path} has format {short(repr(version), 40)}, this version reads 1 to {FORMAT}: "
            "update, or export it again"
        )
    return content


def read_weights(path: str | os.PathLike[str], *, mapped: bool = True) -> dict[str, Any]:
    """Return the content of any program's file with weights under "state_dict".

    Args:
        mapped: as of `read_any`.

    Raises:
        FileNotFoundError, ValueError: as `read_any`; and for files without such weights.
    """
    content = read_any(path, mapped=mapped)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(_FOREIGN.format(path))
    for name, value in content["state_dict"].items():
        if not isinstance(name, str) or not _is_plain_tensor(value):
            raise ValueError(f"{path}: its weight {short(str(name), 80)!r} is no plain tensor")
    return dict(content)


def _is_plain_tensor(value: object) -> bool:
    """Whether this is a dense tensor on the CPU with as many bytes as its shape needs."""
    if not isinstance(value, Tensor):
        return False
    is_dense = value.layout == torch.strided and value.device.type == "cpu"
    # With strides of 0, a few bytes can claim any shape.
    return is_dense and value.untyped_storage().nbytes() >= value.nbytes


def read_any(path: str | os.PathLike[str], *, mapped: bool = True) -> Any:
    """Return the content of a file that contains only tensors and plain values.

    Args:
        mapped: whether tensors may stay in the file, as mapped memory. The file must then not be
            written to as long as they are used.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has another format, is damaged, asks to run code, or contains far too many
            plain values. Nothing in it has run.
    """
    path = runs.find(path)
    if not path.exists():
        raise missing_checkpoint(path)
    try:
        with path.open("rb") as file:
            is_archive = file.read(2) == b"PK"
        read_content = _read_archive if is_archive else _read_document
        content = read_content(path, mapped)
        _check_size(content)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} asks to run code or holds objects other than tensors and plain values, and "
            "was not read: take a file that `lightning_specdec fit` or `export` writes"
        ) from error
    except BROKEN as error:
        raise _damaged(path, error) from error
    return content


def _damaged(path: Path, error: BaseException) -> ValueError:
    if isinstance(error, KeyError):
        reason = f"it has no {error}"
    else:
        reason = str(error.__cause__ or error)
    reason = short(" ".join(reason.split()), 120)
    return ValueError(
        f"{path} is truncated or damaged, or is no checkpoint of this program ({reason}): copy it "
        "again, or take a file that `lightning_specdec fit` or `export` writes"
    )


def _read_document(path: Path, mapped: bool) -> dict[str, Any]:
    """Read a safetensors file."""
    metadata, _ = read_header(path)
    # A longer document is cut, and then is not JSON.
    document = json.loads(metadata[KEY][:_MAX_DOCUMENT_CHARACTERS])
    if mapped:
        weights = safetensors.load_file(path)
    else:
        weights = safetensors.load(path.read_bytes())

    if "class" in document:
        # A draft file of format 1 describes its drafter at the top of the document.
        document["drafter"] = {
            "class": document.pop("class"),
            "arguments": document.pop("arguments", None),
        }
        document["prompts"] = []
        weights = {f"drafter.{name}": value for name, value in weights.items()}
    return {KEY: document, "state_dict": weights}


def _read_archive(path: Path, mapped: bool) -> Any:
    """Read a torch archive of tensors and plain values whose checksums are right."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # torch writes without compression; a compressed archive could expand to any size.
        is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if is_compressed or archive.testzip() is not None:
            raise ValueError("its parts are compressed or have wrong checksums")
    # weights_only refuses everything but tensors and plain values before it is built.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _check_size(content: object) -> None:
    """Raise ValueError if writing out all plain values would take absurd memory.

    One list may be an entry of many others, so a small file can describe more values than any
    memory holds. This walk counts a value wherever it occurs and copies nothing.
    """
    end = object()
    num_characters = 0
    # The iterators over all containers that the walk is within, the innermost at the end.
    iterators: list[Iterator[object]] = [iter((content,))]
    while iterators:
        value = next(iterators[-1], end)
        if value is end:
            iterators.pop()
            continue

        if isinstance(value, str | bytes | bytearray):
            num_characters += len(value)
        else:
            num_characters += _CHARACTERS_PER_VALUE
        if num_characters > _MAX_PLAIN_CHARACTERS or len(iterators) > _MAX_DEPTH:
            raise ValueError(
                "it holds more plain values than any checkpoint needs, or nests them too deeply"
            )

        if isinstance(value, Mapping):
            iterators.append(chain.from_iterable(value.items()))
        elif isinstance(value, list | tuple | set | frozenset):
            iterators.append(iter(value))
