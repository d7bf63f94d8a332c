"""Safetensors files: what their headers say, without reading a weight, and the sha256 of a model's files."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lightning_specdec.config.files import cache_home, replaced

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """A file's metadata, and the type and the shape of each of its tensors."""

    metadata: dict[str, str]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Origin:
    """The files that a model's weights were read from.

    Args:
        source: its directory or its name on the hub, as it was given.
        path: the directory that was read.
    """

    source: str
    path: Path

    @cached_property
    def sha256(self) -> str:
        """See `weights_sha256`."""
        return weights_sha256(self.path)


def read_header(path: Path) -> Header:
    """What a file says of itself, checked against its size.

    Raises:
        ValueError: the file is cut off, longer than its header says, or of another format.
    """
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            return Header(file.metadata() or {}, tensors)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({str(error)[:100]}): copy or download it again") from error


def read_headers(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of a model's directory: of `model.safetensors`, or of all files that its index names.

    Raises:
        ValueError: there are no weights, a file is missing or damaged, or the index and the files do not agree.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(directory):
        tensors |= read_header(path).tensors
    for name, file in (read_index(directory) or {}).items():
        if name not in tensors:
            raise ValueError(f"{directory} is damaged ({file} lacks {name[:100]}): copy or download it again")
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model's directory, in the order of their names.

    Raises:
        ValueError: there are none, or one is missing.
    """
    places = read_index(directory)
    files = [SINGLE] if places is None else sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(f"{directory} is incomplete: {name} is missing: copy or download it again")
    return [directory / name for name in files]


def read_index(directory: Path) -> dict[str, str] | None:
    """Each tensor's file; None where one file holds them all."""
    index = directory / INDEX
    if (directory / SINGLE).is_file():
        return None
    if not index.is_file():
        raise ValueError(f"{directory} holds no weights in safetensors files: convert those of other kinds")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is damaged (it names no files): copy or download it again") from error


def weights_sha256(directory: Path) -> str:
    """The sha256 over a directory's weight files, joined in the order of their names.

    Equals `cat model*.safetensors | sha256sum`. It is cached in `files.cache_home()` by the files' paths, sizes and
    modification times, since reading gigabytes takes seconds.

    Raises:
        ValueError: there are no weights, or a file is missing.
    """
    files = weight_files(directory)
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:24]
    remembered = cache_home() / f"weights-{key}.sha256"
    try:
        known = remembered.read_text(encoding="ascii")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    except (OSError, UnicodeDecodeError):
        pass  # not cached yet
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    try:
        with replaced(remembered) as file:
            file.write(digest.hexdigest().encode())
    except OSError as error:
        log.info("the sha256 of %s cannot be cached and will be computed again: %s", directory, error)
    return digest.hexdigest()
