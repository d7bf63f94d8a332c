"""What a safetensors file says of itself, checked against its size, without reading a weight.

Knows nothing of models.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

LONGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""
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
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise ValueError(_damaged(path, "its header is cut off or is none"))
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = {name: StoredTensor(str(t["dtype"]), tuple(map(int, t["shape"]))) for name, t in tensors.items()}
        ranges = {name: (int(t["data_offsets"][0]), int(t["data_offsets"][1])) for name, t in tensors.items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(_damaged(path, "its header cannot be read")) from error
    for name, (begin, end) in ranges.items():
        bits = _BITS.get(found[name].dtype)
        if begin < 0 or end < begin or (bits is not None and (end - begin) * 8 != found[name].numel * bits):
            raise ValueError(_damaged(path, f"the place of {name[:80]} does not fit its shape"))
    wanted = 8 + length + max((end for _, end in ranges.values()), default=0)
    if size != wanted:
        raise ValueError(_damaged(path, f"it has {size:,} bytes, its header says {wanted:,}"))
    return found


def read_headers(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a model's directory by name: of `model.safetensors`, or of all files that its index names.

    Raises:
        ValueError: there are no weights, a file is missing or damaged, or the index and the files do not agree.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        other = sorted(path.name for path in directory.glob("*.bin")) or sorted(
            p.name for p in directory.glob("*.gguf")
        )
        found = f"only {other[0]}, which is not read here: convert it" if other else "no model.safetensors"
        raise ValueError(f"{directory} holds no weights in safetensors files ({found})")
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(_damaged(index, "it names no files")) from error
    tensors: dict[str, StoredTensor] = {}
    files = sorted(set(names.values()))
    for name in files:
        path = directory / name
        if Path(name).name != name or not path.is_file():
            missing = [file for file in files if not (directory / file).is_file()]
            raise ValueError(
                f"{directory} is incomplete: {missing[0] if missing else name} is missing "
                f"({len(missing)} of {len(files)} files of weights): copy or download it again"
            )
        tensors |= read_header(path)
    if lost := sorted(names.keys() - tensors.keys()):
        raise ValueError(_damaged(directory, f"{names[lost[0]]} lacks {lost[0]}, which the index places there"))
    return tensors


def _damaged(path: Path, reason: str) -> str:
    return f"{path} is truncated or damaged ({reason}): copy or download it again"
