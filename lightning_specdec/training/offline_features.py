"""Offline features: the target's outputs for each training row, computed once and kept in safetensors shards.

Shapes: B rows, T tokens, D width of a hidden state, V vocabulary of the target, W of the draft.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, distributed
from torch.nn.functional import linear

from lightning_specdec.config.checks import require_int
from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.config.memory import gigabytes
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.base import tell
from lightning_specdec.models import LanguageModel
from lightning_specdec.training.target_outputs import OnlineFeatures, TargetOutputs, batches, pick, rows_at_once

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    Columns = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

SHARD_ROWS = 32
"""Rows of a shard: at most these are lost when a run is killed."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_STORED = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}
_ELSEWHERE = "give another target_features.cache_dir"


class Shards:
    """Arrays over all tokens of a split, row after row, in memory-mapped files of whole rows.

    Args:
        lengths: tokens of each row.
        columns: dtype and shape of what is kept of each token, by name.
        identity: plain values that say what the contents are of; stored in every file.
    """

    def __init__(self, directory: Path, lengths: Sequence[int], columns: Columns, identity: Mapping[str, Any]) -> None:
        self.directory, self.columns, self.identity = directory, dict(columns), dict(identity)
        self.token_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())
        self.starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self._open: dict[int, dict[str, Tensor]] = {}

    def rows(self, number: int) -> range:
        """The rows of a shard."""
        return range(number * SHARD_ROWS, min((number + 1) * SHARD_ROWS, len(self.starts) - 1))

    def num_tokens(self, number: int) -> int:
        """The tokens of a shard."""
        rows = self.rows(number)
        return int(self.starts[rows.stop] - self.starts[rows.start])

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return self.directory / f"shard-{number:05d}.safetensors"

    def missing(self) -> list[int]:
        """The shards that are not there, or are truncated.

        Raises:
            ValueError: a shard is of something else.
        """
        return [number for number in range(-(-(len(self.starts) - 1) // SHARD_ROWS)) if not self._is_whole(number)]

    def _is_whole(self, number: int) -> bool:
        try:
            with safe_open(self.path(number), "pt") as file:
                found = json.loads((file.metadata() or {}).get("identity", "{}"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                kinds = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        except (OSError, SafetensorError):
            return False
        for name, value in self.identity.items():
            if found.get(name) != value:
                what = f"other {name}" if isinstance(value, dict) else f"{name} {found.get(name)} instead of {value}"
                raise ValueError(f"{self.directory} holds features of {what}: {_ELSEWHERE}, or delete it")
        size = self.num_tokens(number)
        return kinds == {name: (_STORED[dtype], (size, *shape)) for name, (dtype, shape) in self.columns.items()}

    def write(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        """Write a whole shard.

        Raises:
            ValueError: the disk is full or read-only.
        """
        try:
            with replaced(self.path(number)) as file:
                file.write(save(dict(arrays), {"identity": json.dumps(self.identity)}))
        except OSError as error:
            told = f"{self.path(number)} cannot be written ({error.strerror or error})"
            raise ValueError(f"{told}: make room and run it again, it goes on, or {_ELSEWHERE}") from error

    def read(self, rows: Sequence[int], width: int) -> dict[str, Tensor]:
        """The columns of some rows as `[B, width, ...]`, zeros behind a row's end."""
        found = {
            name: torch.zeros(len(rows), width, *shape, dtype=dtype) for name, (dtype, shape) in self.columns.items()
        }
        for line, row in enumerate(rows):
            number = row // SHARD_ROWS
            if number not in self._open:
                with safe_open(self.path(number), "pt") as file:
                    self._open[number] = {name: file.get_tensor(name) for name in self.columns}
            start, end = (int(each - self.starts[number * SHARD_ROWS]) for each in self.starts[row : row + 2])
            for name, array in self._open[number].items():
                found[name][line, : end - start] = array[start:end]
        return found


class OfflineFeatures(OnlineFeatures):
    """Runs the target on each row once, before training, and keeps the outputs on disk for this and later runs.

    Logits are recovered from the last layer's states: exact up to `dtype`.

    Args:
        cache_dir: the directory, for one target, one choice of layers and one corpus; a directory of their own below
            this program's cache when None. It can be deleted at any time.
        dtype: "bfloat16" or "float32", of the hidden states.
        also_layers: further layers to keep, so that drafts of several kinds share one cache.
    """

    def __init__(
        self,
        cache_dir: str | None = None,
        *,
        dtype: str = "bfloat16",
        also_layers: Sequence[int] = (),
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        self.cache_dir, self.dtype = cache_dir, dtype
        self.also_layers = [require_int("also_layers", layer, 0) for layer in also_layers]
        self.splits: dict[str, Shards] = {}

    @property
    def home(self) -> Path:
        """The directory of all splits."""
        return cache_home() / "features" if self.cache_dir is None else Path(self.cache_dir).expanduser()

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cache_dir", "dtype", "also_layers")}

    @torch.no_grad()
    def prepare(self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]) -> None:
        """Compute what is missing, each process its share.

        Raises:
            ValueError: the directory holds features of something else, or there is no room.
        """
        if not splits:
            return
        wanted = sorted({*map(int, layers), *self.also_layers})
        if target.num_layers is not None and wanted and wanted[-1] >= target.num_layers:
            raise ValueError(f"also_layers must be below the target's {target.num_layers}, got {wanted}: lower them")
        rank, num_processes = process_rank()
        with barrier():
            columns = self._columns(target, wanted)
            identity = {"format": 2, **identify(target), "layers": wanted, "dtype": self.dtype}
            for split in splits:
                lengths, rows = survey(data, split)
                own = {**identity, "split": split, "rows": rows}
                self.splits[split] = Shards(self._directory(own), lengths, columns, own)
            parts = [(self.splits[split], number) for split in splits for number in self.splits[split].missing()]
            self._announce(sum(shards.num_tokens(number) for shards, number in parts), wanted)
        with barrier(), _progress(sum(each.num_tokens(n) for each, n in parts[rank::num_processes])) as progress:
            for shards, number in parts[rank::num_processes]:
                shards.write(number, self._compute(target, data, shards, number, progress))
        if any(self.splits[split].missing() for split in splits):
            raise ValueError(f"{self.home} lacks what other processes wrote: give a cache_dir that all machines share")

    @torch.no_grad()
    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Int[Tensor, "W"] | None,
    ) -> TargetOutputs:
        device = batch.tokens.device
        dtype = next(weight.dtype for weight in target.parameters() if weight.is_floating_point())
        found = self.splits[split].read(batch.indices.tolist(), batch.tokens.shape[1])
        kept = {name: values.to(device, non_blocking=True) for name, values in found.items()}
        assert target.num_layers is not None
        with torch.autocast(device.type, enabled=False):  # compute as in decoding
            logits = _logits(target, kept[f"layer_{target.num_layers - 1}"].to(dtype), tokens)
        states = {layer: kept[f"layer_{layer}"].to(dtype) for layer in layers}
        return TargetOutputs(states, logits - kept["normalizer"][..., None], kept["choice"].long())

    def _columns(self, target: LanguageModel, layers: Sequence[int]) -> Columns:
        try:
            target.check_output_head()
        except ValueError as error:
            raise ValueError(f"{error}: give OnlineFeatures as model.target_features") from error
        assert target.num_layers is not None
        kept = sorted({*layers, target.num_layers - 1})
        token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        states = target(token, features=tuple(kept)).features  # widths may differ by layer
        columns = {f"layer_{layer}": (DTYPES[self.dtype], (states[layer].shape[-1],)) for layer in kept}
        return {**columns, "choice": (torch.int32, ()), "normalizer": (torch.float32, ())}

    def _directory(self, identity: Mapping[str, Any]) -> Path:
        if self.cache_dir is not None:
            return self.home / str(identity["split"])
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return self.home / f"{identity['split']}-{digest[:24]}"

    def _announce(self, num_tokens: int, layers: Sequence[int]) -> None:
        """Say what will be computed and its size, or refuse where there is no room."""
        if not num_tokens:
            return tell(f"the offline features are in {self.home}")
        size = num_tokens * next(iter(self.splits.values())).token_bytes
        there = next(each for each in (self.home, *self.home.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free
        what = f"keeping {num_tokens:,} tokens of the target's layers {layers} takes {gigabytes(size)} in {self.home}"
        if size > free:
            raise ValueError(f"{what}, {gigabytes(free)} are free: {_ELSEWHERE}, or OnlineFeatures")
        tell(f"{what} ({gigabytes(free)} free)")

    def _compute(
        self, target: LanguageModel, data: TokenData, shards: Shards, number: int, progress: Tqdm
    ) -> dict[str, Tensor]:
        """The arrays of a shard, from batches of rows with similar lengths."""
        size, rows, source = shards.num_tokens(number), shards.rows(number), data.rows(shards.identity["split"])
        arrays = {name: torch.empty(size, *shape, dtype=dtype) for name, (dtype, shape) in shards.columns.items()}
        layers = [int(name.removeprefix("layer_")) for name in arrays if name.startswith("layer_")]
        batch = data.collate([source[row] for row in rows])
        lengths, starts = batch.lengths.tolist(), (shards.starts[rows.start :] - shards.starts[rows.start]).tolist()
        left = sorted(range(len(rows)), key=lambda line: -lengths[line])
        while left:
            width = lengths[left[0]]
            count = min(data.batch_size, rows_at_once(width, target.vocab_size))
            lines, left = left[:count], left[count:]
            with torch.autocast(target.device.type, enabled=False):  # compute as in decoding
                output = target(batch.tokens[lines, :width].to(target.device), features=tuple(layers))
            logits = output.logits.float()
            values = {f"layer_{layer}": output.features[layer] for layer in layers}
            values |= {"choice": logits.argmax(-1), "normalizer": logits.logsumexp(-1)}
            for name, each in values.items():
                for line, row in zip(lines, each.to("cpu", arrays[name].dtype), strict=True):
                    arrays[name][starts[line] : starts[line + 1]] = row[: lengths[line]]
            progress.update(sum(lengths[line] for line in lines))
        return arrays


class CachedFeatures(OfflineFeatures):
    """Former name of `OfflineFeatures`."""


def _logits(
    target: LanguageModel, hidden: Float[Tensor, "B T D"], tokens: Int[Tensor, "W"] | None
) -> Float[Tensor, "B T W"]:
    """The output head's float32 logits of some tokens, of all when None: from their rows alone if it is linear."""
    if tokens is not None:
        sample = 64 * hidden[:1, :8]  # caps and norms show in large numbers
        wanted, bias = (pick(target.output_logits(each), tokens) for each in (sample, torch.zeros_like(sample[:, :1])))
        try:
            head = (target.output_weight.index_select(0, tokens), bias[0, 0])
        except ValueError:  # the target does not expose it
            head = None
        tolerance = max(1e-3, 4 * torch.finfo(hidden.dtype).eps) * wanted.abs().max()
        if head is not None and (linear(sample, *head) - wanted).abs().max() <= tolerance:
            return linear(hidden, *head).float()
    pieces = hidden.split(rows_at_once(hidden.shape[1], target.vocab_size))
    return torch.cat([pick(target.output_logits(piece), tokens).float() for piece in pieces])


def survey(data: TokenData, split: str) -> tuple[list[int], dict[str, Any]]:
    """The length of each row of a split, and what identifies the rows."""
    lengths, digest = list[int](), hashlib.sha256()
    for batch in batches(data, split):
        for tokens, length in zip(batch.tokens.numpy(), batch.lengths.tolist(), strict=True):
            digest.update(np.array([length, *tokens[:length]], "<i4").tobytes())
            lengths.append(length)
    return lengths, {"sha256": digest.hexdigest(), "num_rows": len(lengths), "num_tokens": sum(lengths)}


def identify(target: LanguageModel) -> dict[str, Any]:
    """What tells a target from others: its weights, dtypes included."""
    digest = hashlib.sha256()
    for name, weight in target.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {"target": {"class": type(target).__name__, "weights": digest.hexdigest()}}


def process_rank() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


@contextmanager
def barrier() -> Iterator[None]:
    """A block that no process leaves before all have ended it; a ValueError in one is raised in all."""
    own: ValueError | None = None
    try:
        yield
    except ValueError as error:
        own = error
    _, num_processes = process_rank()
    faults: list[str | None] = [None] * num_processes
    if num_processes > 1:
        distributed.all_gather_object(faults, None if own is None else str(own))
    if own is not None:
        raise own
    for fault in filter(None, faults):
        raise ValueError(fault)


def _progress(num_tokens: int) -> Tqdm:
    """A bar on stderr of the first process; in a log, a line every thirty seconds."""
    shown = num_tokens > 0 and process_rank()[0] == 0
    interval = 0.2 if sys.stderr.isatty() else 30
    return Tqdm(total=num_tokens, desc="features", unit=" tokens", disable=not shown, mininterval=interval)
