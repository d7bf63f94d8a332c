"""Safetensors files: their headers, read without the weights, and digests of a model's weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.config.hub import is_gguf

if TYPE_CHECKING:
    from lightning_specdec.models.adapters import Adapter

SINGLE = "model.safetensors"
"""File name of weights that are stored in one file."""
INDEX = "model.safetensors.index.json"
"""File name of the index of weights that are stored in several files."""

_HEADER_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 8
_CHUNK_BYTES = 2**24
_DTYPE_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32"),
    *("BF16", "F16", "U16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"),
)
"""The order in which safetensors writes tensors; those of one dtype are sorted by name."""


@dataclass(frozen=True)
class Origin:
    """The files that a model's weights were read from.

    Args:
        source: the directory or Hub name that the user passed.
        path: the directory that was read.
        adapter: the adapter that was merged into these weights; None if there is none.
    """

    source: str
    path: Path
    adapter: Adapter | None = None

    @cached_property
    def sha256(self) -> str:
        """See `weights_sha256`. With an adapter, a hash of both."""
        return self._with_adapter(weights_sha256(self.path))

    @cached_property
    def single_file_sha256(self) -> str:
        """See `single_file_sha256`. With an adapter, a hash of both."""
        return self._with_adapter(single_file_sha256(self.path))

    def _with_adapter(self, sha256: str) -> str:
        if self.adapter is None:
            return sha256
        return hashlib.sha256(f"{sha256} {self.adapter.sha256}".encode()).hexdigest()


def read_header(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """Return a file's metadata and the shapes of its tensors, checked against the file's size.

    Raises:
        ValueError: the file is cut off, longer than its header declares, or has another format.
    """
    try:
        with safe_open(path, "np") as file:
            # The file object is not iterable, hence keys().
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            return file.metadata() or {}, shapes
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or damaged ({str(error)[:100]}): copy or download it again"
        ) from error


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files of a model's directory, sorted by name; a GGUF file itself.

    Raises:
        ValueError: there are none, the index is damaged, or a file is missing.
    """
    if is_gguf(directory):
        return [directory]
    if (directory / SINGLE).is_file():
        file_names = [SINGLE]
    else:
        file_names = _indexed_file_names(directory)

    for file_name in file_names:
        # The index may come from a stranger, so it must not point outside the directory.
        is_plain_name = Path(file_name).name == file_name
        if not is_plain_name or not (directory / file_name).is_file():
            raise ValueError(
                f"{directory} is incomplete: {file_name} is missing: copy or download it again"
            )
    return [directory / file_name for file_name in file_names]


def _indexed_file_names(directory: Path) -> list[str]:
    """Return the sorted names of the files that a directory's index lists."""
    index_path = directory / INDEX
    if not index_path.is_file():
        raise ValueError(
            f"{directory} holds no weights in safetensors files: convert weights of other formats"
        )
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        file_names = {str(file_name) for file_name in index["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index_path} is damaged (it names no files): copy or download it again"
        ) from error
    return sorted(file_names)


def weights_sha256(directory: Path) -> str:
    """Return the sha256 over a directory's weight files, concatenated in the order of their names.

    Equals `cat model*.safetensors | sha256sum`. The result is cached in `files.cache_home()` by
    the files' paths, sizes and modification times, because reading gigabytes takes seconds.

    Raises:
        ValueError: there are no weights, or a file is missing.
    """
    files = weight_files(directory)

    def compute() -> str:
        digest = hashlib.sha256()
        with Activity("computing the hash of the weights", len(files), unit="files") as progress:
            for path in files:
                with path.open("rb") as file:
                    # Adds the file's bytes to the digest that the function returns.
                    hashlib.file_digest(file, lambda: digest)
                progress.advance()
        return digest.hexdigest()

    return _cached_digest("weights", files, compute)


def single_file_sha256(directory: Path) -> str:
    """Return the sha256 that a directory's weights have in one file, however they are stored.

    That file is the one that `save_pretrained` writes with a large `max_shard_size`: equal weights
    have equal digests, in one file or in several. Cached like `weights_sha256`.

    Raises:
        ValueError: there are no weights, or a file is missing or damaged.
    """
    files = weight_files(directory)
    if is_gguf(directory):
        return weights_sha256(directory)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        tensors.update(stored_tensors(path))
    names = sorted(tensors, key=lambda name: (tensors[name].dtype_rank, name))
    header = _single_file_header({name: tensors[name] for name in names})

    if len(files) == 1 and _starts_with(files[0], header):
        # The file is already in that form, so its own digest is the result.
        return weights_sha256(directory)

    def compute() -> str:
        digest = hashlib.sha256(header)
        for name in names:
            tensors[name].update(digest)
        return digest.hexdigest()

    return _cached_digest("single-file", files, compute)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's bytes within a safetensors file."""

    path: Path
    dtype: str
    shape: list[int]
    start: int
    num_bytes: int

    @property
    def dtype_rank(self) -> int:
        """Where tensors of this dtype are in a file; unknown ones are at the end."""
        if self.dtype in _DTYPE_ORDER:
            return _DTYPE_ORDER.index(self.dtype)
        return len(_DTYPE_ORDER)

    def update(self, digest: Any) -> None:
        """Add the tensor's bytes to a digest."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            num_bytes_left = self.num_bytes
            while num_bytes_left > 0:
                chunk = file.read(min(num_bytes_left, _CHUNK_BYTES))
                if not chunk:
                    raise ValueError(f"{self.path} was cut off while it was read: start again")
                digest.update(chunk)
                num_bytes_left -= len(chunk)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors by name."""
    # Checks that the header is valid and fits the file.
    read_header(path)

    with path.open("rb") as file:
        header_length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        header = json.loads(file.read(header_length))
    header.pop("__metadata__", None)

    data_start = _HEADER_LENGTH_BYTES + header_length
    tensors = {}
    for name, description in header.items():
        start, end = description["data_offsets"]
        tensors[name] = StoredTensor(
            path=path,
            dtype=description["dtype"],
            shape=description["shape"],
            start=data_start + start,
            num_bytes=end - start,
        )
    return tensors


def _single_file_header(tensors: dict[str, StoredTensor]) -> bytes:
    """Return the bytes before the weights in a file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.num_bytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end

    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(_HEADER_LENGTH_BYTES, "little") + text


def _starts_with(path: Path, content: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(content)) == content


def _cached_digest(kind: str, files: list[Path], compute: Callable[[], str]) -> str:
    """Return a digest of these files from the cache, or compute it and add it to the cache."""
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:24]
    cache_path = cache_home() / f"{kind}-{key}.sha256"
    if cache_path.is_file():
        return cache_path.read_text(encoding="ascii")

    digest = compute()
    # Without a writable cache the digest is computed again next time.
    with suppress(OSError), replaced(cache_path) as file:
        file.write(digest.encode())
    return digest
