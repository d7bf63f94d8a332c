"""What a safetensors file says of itself, checked against its size, without reading a weight."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What a directory's weights are called: in one file, or in several that the index names."""
LONGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""
_METADATA = "__metadata__"
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8, "F8_E8M0": 8, "C64": 64, "F4": 4}


@dataclass(frozen=True)
class StoredTensor:
    """The type and the shape of one tensor of a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its numbers."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Format: eight bytes with the header's length, the header as JSON, the tensors' bytes.

    Raises:
        ValueError: the file is cut off, longer than it says, or of another format.
    """
    length, header = _header(path)
    try:
        tensors = {name: entry for name, entry in header.items() if name != _METADATA}
        found = {name: StoredTensor(str(t["dtype"]), tuple(map(int, t["shape"]))) for name, t in tensors.items()}
        ranges = {name: (int(t["data_offsets"][0]), int(t["data_offsets"][1])) for name, t in tensors.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(_damaged(path, "its header cannot be read")) from error
    for name, (begin, end) in ranges.items():
        bits = _BITS.get(found[name].dtype)
        if begin < 0 or end < begin or (bits is not None and (end - begin) * 8 != found[name].numel * bits):
            raise ValueError(_damaged(path, f"the place of {name[:80]} does not fit its shape"))
    wanted = 8 + length + max((end for _, end in ranges.values()), default=0)
    if (size := path.stat().st_size) != wanted:
        raise ValueError(_damaged(path, f"it has {size:,} bytes, its header says {wanted:,}"))
    return found


def read_metadata(path: Path, key: str, longest: int) -> str | None:
    """What a file says of itself under that key, beside its tensors; None where it says nothing.

    Raises:
        ValueError: as `read_header`; or it is no text, or one of more than `longest` characters.
    """
    read_header(path)
    metadata = _header(path)[1].get(_METADATA)
    if not isinstance(metadata, dict) or key not in metadata:
        return None
    text = metadata[key]
    if not isinstance(text, str) or len(text) > longest:
        raise ValueError(f"{path} says of itself what is no text, or one of more than {longest:,} characters")
    return text


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """A file's header and how many bytes it has."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise ValueError(_damaged(path, "its header is cut off or is none"))
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_damaged(path, "its header cannot be read")) from error
    if not isinstance(header, dict):
        raise ValueError(_damaged(path, "its header cannot be read"))
    return length, header


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's directory by name: of `model.safetensors`, or of all files that its index names.

    Raises:
        ValueError: there are no weights, a file is missing or damaged, or the index and the files do not agree.
    """
    places = _places(directory)
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        tensors |= read_header(path)
    if places is not None and (lost := sorted(places.keys() - tensors.keys())):
        raise ValueError(_damaged(directory, f"{places[lost[0]]} lacks {lost[0]}, which the index places there"))
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that a model's directory keeps its weights in, in the order of their names.

    Raises:
        ValueError: there are none, or one is missing.
    """
    places = _places(directory)
    if places is None:
        return [directory / SINGLE]
    files = sorted(set(places.values()))
    for name in files:
        if Path(name).name != name or not (directory / name).is_file():
            missing = [file for file in files if not (directory / file).is_file()]
            raise ValueError(
                f"{directory} is incomplete: {missing[0] if missing else name} is missing "
                f"({len(missing)} of {len(files)} files of weights): copy or download it again"
            )
    return [directory / name for name in files]


def _places(directory: Path) -> dict[str, str] | None:
    """Each tensor's file, as the index says; None where one file holds them all."""
    if (directory / SINGLE).is_file():
        return None
    index = directory / INDEX
    if not index.is_file():
        other = sorted(path.name for path in directory.glob("*.bin")) or sorted(
            p.name for p in directory.glob("*.gguf")
        )
        found = f"only {other[0]}, which is not read here: convert it" if other else f"no {SINGLE}"
        raise ValueError(f"{directory} holds no weights in safetensors files ({found})")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(file) for tensor, file in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(_damaged(index, "it names no files")) from error


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is truncated or damaged ({reason}): copy or download it again"
