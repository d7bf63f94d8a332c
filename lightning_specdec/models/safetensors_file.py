"""Safetensors files: what their headers say, without reading a weight, and the sha256 of a model's files."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lightning_specdec.config.files import cache_home, replaced

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


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


def read_header(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """A file's metadata and the shapes of its tensors, checked against its size.

    Raises:
        ValueError: the file is cut off, longer than its header says, or of another format.
    """
    try:
        with safe_open(path, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, shapes
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or damaged ({str(error)[:100]}): copy or download it again"
        ) from error


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model's directory, in the order of their names.

    Raises:
        ValueError: there are none, the index is damaged, or a file is missing.
    """
    names, index = [SINGLE], directory / INDEX
    if not (directory / SINGLE).is_file():
        if not index.is_file():
            raise ValueError(
                f"{directory} holds no weights in safetensors files: convert those of other kinds"
            )
        try:
            names = sorted(
                set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{index} is damaged (it names no files): copy or download it again"
            ) from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise ValueError(
                f"{directory} is incomplete: {name} is missing: copy or download it again"
            )
    return [directory / name for name in names]


def weights_sha256(directory: Path) -> str:
    """The sha256 over a directory's weight files, joined in the order of their names.

    Equals `cat model*.safetensors | sha256sum`. It is cached in `files.cache_home()` by the files' paths, sizes and
    modification times, since reading gigabytes takes seconds.

    Raises:
        ValueError: there are no weights, or a file is missing.
    """
    files = weight_files(directory)
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    cached = (
        cache_home()
        / f"weights-{hashlib.sha256(json.dumps(states).encode()).hexdigest()[:24]}.sha256"
    )
    if cached.is_file():
        return cached.read_text(encoding="ascii")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    with suppress(OSError), replaced(cached) as file:
        file.write(digest.hexdigest().encode())
    return digest.hexdigest()
