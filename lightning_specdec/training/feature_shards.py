"""What a target made of the tokens of some rows, as files: shards of flat arrays, and a manifest that says of what."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from lightning_specdec.files import replaced
from lightning_specdec.models.safetensors_file import StoredTensor, read_header
from lightning_specdec.target_reference import TargetReference

MANIFEST = "manifest.json"
FORMAT = 1
"""Counted up when the files change, `SHARD_BYTES` included, so that features of another version are not misread."""
SHARD_BYTES = 2**27
"""Of a shard at most, but for the rest of its last row: what is lost when a process is stopped."""
_STALE_SECONDS = 3600
"""A file that is half written and older than that is nobody's: a shard is written in seconds."""
_TYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
_ELSE = "give another target_features.cache_dir"


class Column(NamedTuple):
    """What is kept of each token: numbers of a type, one where the shape is ()."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of a token."""
        return self.dtype.itemsize * math.prod(self.shape)


class FeatureShards:
    """The features of a split's rows in a directory: each array holds all tokens of a shard's rows, one row behind the
    other, and is memory-mapped when it is read.

    Theory: a page of a mapped file is read when one of its numbers is asked for, stays in the system's cache while
    there is room, and is shared by all processes. Rows are of any lengths, so nothing is spent on padding.

    Args:
        directory: of the files.
        lengths: tokens of each row.
        columns: what is kept of each token, by name.
        manifest: what the features are of, in plain values.
    """

    def __init__(
        self, directory: Path, lengths: Sequence[int], columns: Mapping[str, Column], manifest: Mapping[str, Any]
    ) -> None:
        self.directory, self.columns, self.manifest = directory, dict(columns), dict(manifest)
        self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        """Where each row begins among all tokens, and where the last one ends."""
        in_a_shard = max(1, SHARD_BYTES // self.bytes_per_token)
        self.firsts = np.unique(self.starts[:-1] // in_a_shard, return_index=True)[1]
        """Each shard's first row."""
        self._opened: dict[int, dict[str, Tensor]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of all columns."""
        return sum(column.num_bytes for column in self.columns.values())

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        """Shards."""
        return len(self.firsts)

    def rows(self, number: int) -> range:
        """The rows of a shard."""
        last = len(self.starts) - 1 if number + 1 == len(self) else int(self.firsts[number + 1])
        return range(int(self.firsts[number]), last)

    def tokens_of(self, number: int) -> int:
        """Tokens of a shard."""
        rows = self.rows(number)
        return int(self.starts[rows.stop] - self.starts[rows.start])

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.directory / f"shard-{number:05d}.safetensors"

    @cached_property
    def missing(self) -> list[int]:
        """The shards that were not there, or not whole, when this was first asked for."""
        return [number for number in range(len(self)) if not self.is_whole(number)]

    def is_whole(self, number: int) -> bool:
        """Whether a shard is there and holds what it should."""
        try:
            found = read_header(self.path(number))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        size = self.tokens_of(number)
        wanted = {name: StoredTensor(_TYPES[each.dtype], (size, *each.shape)) for name, each in self.columns.items()}
        return found == wanted

    def empty(self, number: int) -> dict[str, Tensor]:
        """The arrays of a shard, to be filled."""
        size = self.tokens_of(number)
        return {name: torch.empty((size, *each.shape), dtype=each.dtype) for name, each in self.columns.items()}

    def write(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        """Write a shard; its file is there whole or not at all.

        Raises:
            ValueError: the disk is full, or nothing can be written there.
        """
        path = self.path(number)
        try:
            with replaced(path) as file:
                file.write(save(dict(arrays)))
        except OSError as error:
            told = f"{path} cannot be written ({error.strerror or error})"
            raise ValueError(f"{told}: the finished shards stay, make room and run it again") from error

    def read(self, rows: Sequence[int], width: int) -> dict[str, Tensor]:
        """What is kept of some rows' tokens, `[B, T, ...]`, with zeros behind a row's end.

        Args:
            width: T, at least the longest row's tokens.
        """
        found = {
            name: torch.zeros((len(rows), width, *each.shape), dtype=each.dtype) for name, each in self.columns.items()
        }
        for line, row in enumerate(rows):
            shard = int(np.searchsorted(self.firsts, row, side="right")) - 1
            before = self.starts[self.firsts[shard]]
            start, end = int(self.starts[row] - before), int(self.starts[row + 1] - before)
            for name, array in self._mapped(shard).items():
                found[name][line, : end - start] = array[start:end]
        return found

    def _mapped(self, number: int) -> dict[str, Tensor]:
        """The arrays of a shard, of which nothing is read yet."""
        if number not in self._opened:
            with safe_open(self.path(number), "pt") as file:
                self._opened[number] = {name: file.get_tensor(name) for name in self.columns}
        return self._opened[number]

    def begin(self) -> None:
        """Write what the directory says of its shards, and clear away what a killed process left of one.

        Raises:
            ValueError: nothing can be written there.
        """
        path = self.directory / MANIFEST
        try:
            if not path.exists():
                with replaced(path) as file:
                    file.write((json.dumps(self.manifest, indent=1) + "\n").encode())
            for torn in self.directory.glob(".shard-*"):
                if time.time() - torn.stat().st_mtime > _STALE_SECONDS:
                    torn.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"{self.directory} cannot be written to ({error.strerror or error}): {_ELSE}") from error

    def check(self) -> None:
        """Raise ValueError, which names the first difference, unless the directory is empty or holds what is wanted."""
        try:
            found = json.loads((self.directory / MANIFEST).read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise KeyError("format")
            (had, reference), (has, own) = _flat(found), _flat(json.loads(json.dumps(self.manifest)))
        except (FileNotFoundError, NotADirectoryError):
            if any(self.directory.glob("shard-*")):
                raise ValueError(f"{self.directory} holds shards without a manifest: {_ELSE}, or delete it") from None
            return
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            told = f"{self.directory} holds no features that this version knows"
            raise ValueError(f"{told}: {_ELSE}, or delete it") from error
        for name, value in has.items():
            if had.get(name) != value:
                told = f"of {name} {had.get(name)}, those of {name} {value}"
                if name == "rows":
                    told = f"of other texts, those of these data's {self.manifest['split']} rows"
                elif name == "target":
                    told = f"of another target ({reference}), those of {own}"
                raise ValueError(f"{self.directory} holds features {told} are wanted: {_ELSE}, or delete it")


def identity(manifest: Mapping[str, Any]) -> str:
    """The part of a manifest that tells features apart, as a text."""
    return json.dumps(_flat(manifest)[0], sort_keys=True)


def _flat(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What two manifests must have in common, and the target as a message says it.

    Raises:
        KeyError, TypeError, ValueError: this is no manifest.
    """
    plain = dict(manifest["target"])
    weights = plain.pop("weights")
    reference = TargetReference.read(plain)
    # Where a target lies, and how its tokens are spelt, changes nothing of what it makes of them.
    target = {**plain, "weights": weights, "source": None, "tokenizer": None}
    same = {name: manifest[name] for name in ("layers", "top_n", "dtype", "rows")}
    return {"target": target, **same}, f"{reference} in {reference.dtype}"
