"""Offline features: the target's outputs for each training row, computed once and kept in safetensors shards.

Shapes: B rows, T tokens, D width of a hidden state, V vocabulary of the target, W of the draft.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.nn.utils.rnn import pad_sequence

from lightning_specdec.config.files import cache_home, replaced
from lightning_specdec.config.memory import gigabytes
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.base import tell
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.base import weights_digest
from lightning_specdec.rules.sampling import largest
from lightning_specdec.training.callbacks import progress_bar
from lightning_specdec.training.optimizers import time_left
from lightning_specdec.training.target_outputs import (
    OnlineFeatures,
    TargetOutputs,
    batches,
    in_float32,
    is_sharded,
    is_trained,
    pick,
    rows_at_once,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

SHARD_ROWS = 32
"""Rows of a shard: at most these are lost when a run is killed."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class OfflineFeatures(OnlineFeatures):
    """Runs the target on each row once, before training, and keeps the outputs on disk for this and later runs.

    Logits are recovered from the last layer's states: exact up to `dtype`.

    Args:
        cache_dir: where each target, choice of layers and text has its directory; this program's cache when None. It
            can be deleted at any time.
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
        self.home = cache_home() / "features" if cache_dir is None else Path(cache_dir).expanduser()
        self.dtype, self.also_layers = DTYPES[dtype], list(also_layers)
        self.directories: dict[str, Path] = {}
        """Of each split; their names are digests of target, layers and text."""
        self._open: dict[Path, Any] = {}

    @torch.no_grad()
    def prepare(
        self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]
    ) -> None:
        """Compute what is missing, each process its share.

        Raises:
            ValueError: the target learns or has no output head, or there is no room.
        """
        if not splits:
            return
        if is_trained(target):
            raise ValueError(
                "the target learns, so its outputs cannot be kept: give OnlineFeatures as model.target_features"
            )
        target.check_output_head()
        assert target.num_layers is not None and target.hidden_size is not None
        kept = sorted({*layers, *self.also_layers, target.num_layers - 1})
        identity = f"6 {weights_digest(target)} {kept} {self.dtype}"
        for split in splits:
            digest = hashlib.sha256(f"{identity} {rows_digest(data, split)}".encode()).hexdigest()
            self.directories[split] = self.home / f"{split}-{digest[:24]}"
        missing = [
            (split, number)
            for split in splits
            for number in range(-(-len(data.rows(split)) // SHARD_ROWS))
            if not self._is_whole(split, number)
        ]
        row_bytes = data.max_length * (len(kept) * target.hidden_size * self.dtype.itemsize + 8)
        self._announce(row_bytes * SHARD_ROWS * len(missing))
        trainer: Any = data.trainer
        trainer.strategy.barrier("all have looked before one writes")
        own = missing[trainer.global_rank :: trainer.world_size]
        with progress_bar(len(own), "shard", shown=bool(own) and trainer.is_global_zero) as bar:
            for split, number in own:
                arrays = dict(self._compute(target, data, split, number, kept))
                with replaced(self._path(split, number)) as file:
                    file.write(save(arrays))
                bar.update()
        trainer.strategy.barrier("the features are written")

    def _path(self, split: str, number: int) -> Path:
        return self.directories[split] / f"shard-{number:05d}.safetensors"

    def _is_whole(self, split: str, number: int) -> bool:
        try:
            with safe_open(self._path(split, number), "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    @torch.no_grad()
    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Tensor | None,
    ) -> TargetOutputs:
        device = batch.tokens.device
        dtype = next(weight.dtype for weight in target.parameters() if weight.is_floating_point())
        assert target.num_layers is not None
        names = [f"layer_{layer}" for layer in {*layers, target.num_layers - 1}] + [
            "choice",
            "normalizer",
        ]
        files = [(row, self._file(split, row)) for row in batch.indices.tolist()]
        kept = {}
        for name in names:
            values = pad_sequence(
                [file.get_tensor(f"{row}.{name}") for row, file in files], batch_first=True
            )
            missing = batch.tokens.shape[1] - values.shape[1]
            kept[name] = pad(values, (0, 0) * (values.dim() - 2) + (0, missing)).to(
                device, non_blocking=True
            )
        with torch.autocast(device.type, enabled=False):  # compute as in decoding
            logits = _logits(target, kept[f"layer_{target.num_layers - 1}"].to(dtype), tokens)
        states = {layer: kept[f"layer_{layer}"].to(dtype) for layer in layers}
        return TargetOutputs(states, logits - kept["normalizer"][..., None], kept["choice"].long())

    def _file(self, split: str, row: int) -> Any:
        """The shard of a row, memory-mapped."""
        path = self._path(split, row // SHARD_ROWS)
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]

    def _announce(self, num_bytes: int) -> None:
        """Say how much will be written at most, or refuse where there is no room."""
        if not num_bytes:
            return tell(f"the offline features are in {self.home}")
        there = next(each for each in (self.home, *self.home.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free
        what = f"keeping the target's outputs takes up to {gigabytes(num_bytes)} in {self.home}"
        if num_bytes > free:
            raise ValueError(
                f"{what}, {gigabytes(free)} are free: give another target_features.cache_dir, or OnlineFeatures"
            )
        tell(f"{what} ({gigabytes(free)} free)")

    def _compute(
        self, target: LanguageModel, data: TokenData, split: str, number: int, layers: Sequence[int]
    ) -> dict[str, Tensor]:
        """The arrays of a shard, named by row, from batches of rows with similar lengths."""
        source = data.rows(split)
        rows = range(number * SHARD_ROWS, min((number + 1) * SHARD_ROWS, len(source)))
        batch = data.collate([source[row] for row in rows])
        lengths = batch.lengths.tolist()
        found: dict[str, Tensor] = {}
        left = sorted(range(len(rows)), key=lambda line: -lengths[line])
        while left:
            width = lengths[left[0]]
            count = min(data.batch_size, rows_at_once(width, target.vocab_size))
            lines, left = left[:count], left[count:]
            with torch.autocast(target.device.type, enabled=False):  # compute as in decoding
                output = target(
                    batch.tokens[lines, :width].to(target.device), features=tuple(layers)
                )
            values = {f"layer_{layer}": output.features[layer].to(self.dtype) for layer in layers}
            parts = [
                (largest(piece).int(), piece.logsumexp(-1)) for piece in in_float32(output.logits)
            ]
            shape = output.logits.shape[:2]
            for name, of_parts in zip(
                ("choice", "normalizer"), zip(*parts, strict=True), strict=True
            ):
                values[name] = torch.cat(of_parts).unflatten(0, shape)
            for name, each in values.items():
                for line, of_row in zip(lines, each.cpu(), strict=True):
                    found[f"{rows[line]}.{name}"] = of_row[: lengths[line]].clone()
        return found


class FeaturesByNeed(OfflineFeatures):
    """Online where the run goes over the text about once, offline where it does so more often: decided by the epochs or
    the time of the run, and by how fast the target reads."""

    online = True

    @torch.no_grad()
    def prepare(
        self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]
    ) -> None:
        if "train" in splits:
            self.online = self._reads_once(target, data, layers)
        if not self.online:
            super().prepare(target, data, layers, splits)

    def read(self, target: LanguageModel, batch: Batch, split: str, **wanted: Any) -> TargetOutputs:
        return (OnlineFeatures if self.online else OfflineFeatures).read(
            self, target, batch, split, **wanted
        )

    def _reads_once(self, target: LanguageModel, data: TokenData, layers: Sequence[int]) -> bool:
        """Whether keeping outputs would not save time; says so, with the time that one reading takes."""
        trainer: Any = data.trainer
        if is_sharded(trainer) or is_trained(
            target
        ):  # not yet on its devices, or never the same twice
            return True
        if (
            left := trainer.strategy.broadcast(time_left(trainer))
        ) == 0:  # the time limit ends the run
            return True
        sample = data.first_rows("train", 2 * data.batch_size)
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            batch = sample._replace(tokens=sample.tokens.to(target.device))
            OnlineFeatures.read(self, target, batch, "train", layers=layers, tokens=None)
        seconds = (time.perf_counter() - began) * len(data.rows("train")) / len(sample.tokens)
        epochs, why = float(trainer.max_epochs), f"max_epochs is {trainer.max_epochs}"
        if left is not None:  # the draft's own steps take about as long
            epochs, why = (
                left / (2 * seconds),
                f"the run has {left / 60:.1f} minutes left, half of them for the draft",
            )
        once = bool(trainer.strategy.broadcast(epochs <= 1.5))
        how = "online, in each step" if once else "once and cached"
        needs = f"the target needs about {seconds / 60:,.1f} minutes to read the text once"
        tell(f"hidden states are computed {how}: {needs}, {why}")
        return once


def _logits(
    target: LanguageModel, hidden: Float[Tensor, "B T D"], tokens: Int[Tensor, "W"] | None
) -> Float[Tensor, "B T W"]:
    """The output head's float32 logits of some tokens, of all when None: from their rows alone if it is linear."""
    if tokens is not None:
        sample = 64 * hidden[:1, :8]  # caps and norms show in large numbers
        wanted, bias = (
            pick(target.output_logits(each), tokens)
            for each in (sample, torch.zeros_like(sample[:, :1]))
        )
        head = target.output_weight.index_select(0, tokens), bias[0, 0]
        tolerance = max(1e-3, 4 * torch.finfo(hidden.dtype).eps) * wanted.abs().max()
        if (linear(sample, *head) - wanted).abs().max() <= tolerance:
            return linear(hidden, *head).float()
    pieces = hidden.split(rows_at_once(hidden.shape[1], target.vocab_size))
    return torch.cat([pick(target.output_logits(piece), tokens).float() for piece in pieces])


def rows_digest(data: TokenData, split: str) -> str:
    """A digest of all tokens of a split."""
    digest = hashlib.sha256()
    for batch in batches(data, split):
        for tokens, length in zip(batch.tokens.numpy(), batch.lengths.tolist(), strict=True):
            digest.update(np.array([length, *tokens[:length]], "<i4").tobytes())
    return digest.hexdigest()
