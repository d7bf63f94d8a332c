"""Offline features: the target's outputs for each training row, computed once and cached.

Shapes: B rows, T tokens, D width of a hidden state, V vocabulary of the target, W tokens of the
draft.
"""

from __future__ import annotations

import hashlib
import math
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
from lightning_specdec.models.weights import weights_digest
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
"""Rows of a shard. A killed run loses at most one shard for each process."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CACHE_VERSION = 6
"""Raise it when the content of the shards changes, so that older shards are not read."""
SINGLE_READING_EPOCHS = 1.5
"""With fewer passes over the text than this, caching does not pay."""
FEWEST_EPOCHS = 0.02
"""Passes over the text below which a run of given minutes is told that it is short. A head for
SmolLM2 that has read 4% of the shipped text gains (docs/train_a_draft.md)."""
SAMPLE_SECONDS = 2.0
"""Time after which a sample of the text is large enough to show how fast the target reads."""


class OfflineFeatures(OnlineFeatures):
    """Runs the target on each row once, before training, and caches its outputs on disk.

    Later runs with the same target and text read the same cache. A shard contains each row's hidden
    states, the most likely tokens, and the logarithm of each softmax's normalizer. `read` computes
    the logits again from the last layer's hidden states, exact up to `dtype`.

    Args:
        cache_dir: contains one directory for each combination of target, layers and text; the
            program's cache directory when None. It can be deleted at any time.
        dtype: "bfloat16" or "float32", of the cached hidden states.
        also_layers: further layers to cache, so that several kinds of drafts can share one cache.
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

        if cache_dir is None:
            self.home = cache_home() / "features"
        else:
            self.home = Path(cache_dir).expanduser()

        self.dtype = DTYPES[dtype]
        self.also_layers = list(also_layers)
        self.directories: dict[str, Path] = {}
        """The directory of each split, named by a digest of target, layers and text."""
        self._open_shards: dict[Path, Any] = {}

    @torch.no_grad()
    def prepare(
        self,
        target: LanguageModel,
        data: TokenData,
        layers: Sequence[int],
        splits: Sequence[str],
    ) -> None:
        """Compute the missing shards, each process its share.

        Raises:
            ValueError: the target is trained, its output head cannot be called separately, or the
                disk is too full.
        """
        if not splits:
            return
        check_cacheable(target)
        assert target.num_layers is not None and target.hidden_size is not None

        # The last layer's states replace the logits, which would take V numbers for each token.
        cached_layers = sorted({*layers, *self.also_layers, target.num_layers - 1})
        identity = f"{CACHE_VERSION} {weights_digest(target)} {cached_layers} {self.dtype}"
        for split in splits:
            key = f"{identity} {rows_digest(data, split)}"
            digest = hashlib.sha256(key.encode()).hexdigest()
            self.directories[split] = self.home / f"{split}-{digest[:24]}"

        # A token has the states of all layers, its most likely successor and its normalizer.
        missing_shards = self._missing_shards(data, splits)
        state_bytes = len(cached_layers) * target.hidden_size * self.dtype.itemsize
        bytes_per_token = state_bytes + 4 + 4
        bytes_per_shard = SHARD_ROWS * data.max_length * bytes_per_token
        self._announce(bytes_per_shard * len(missing_shards))

        # No process may write before all have listed the missing shards, or their shares would
        # differ.
        trainer: Any = data.trainer
        trainer.strategy.barrier("all processes have listed the missing shards")
        my_shards = missing_shards[trainer.global_rank :: trainer.world_size]
        is_bar_shown = bool(my_shards) and trainer.is_global_zero
        with progress_bar(len(my_shards), "shard", shown=is_bar_shown) as bar:
            for split, shard_index in my_shards:
                arrays = self._compute_shard(target, data, split, shard_index, cached_layers)
                with replaced(self._shard_path(split, shard_index)) as file:
                    file.write(save(arrays))
                bar.update()
        trainer.strategy.barrier("all shards are written")

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
        """See `OnlineFeatures.read`."""
        assert target.num_layers is not None
        last_layer = target.num_layers - 1
        device = batch.tokens.device
        dtype = next(weight.dtype for weight in target.parameters() if weight.is_floating_point())

        states: dict[int, Tensor] = {}
        for layer in {*layers, last_layer}:
            states[layer] = self._read_array(f"layer_{layer}", batch, split).to(dtype)
        choices = self._read_array("choice", batch, split)
        normalizers = self._read_array("normalizer", batch, split)

        # A frozen target computes as it does in decoding, without mixed precision.
        with torch.autocast(device.type, enabled=False):
            logits = _head_logits(target, states[last_layer], tokens)

        features = {layer: states[layer] for layer in layers}
        log_probs = logits - normalizers[..., None]
        return TargetOutputs(features, log_probs, choices.long())

    def _read_array(self, name: str, batch: Batch, split: str) -> Tensor:
        """One of the cached arrays for the rows of a batch, padded with zeros to its length."""
        rows = []
        for row_index in batch.indices.tolist():
            shard = self._shard_of(split, row_index)
            rows.append(shard.get_tensor(f"{row_index}.{name}"))
        padded = _pad_tokens(pad_sequence(rows, batch_first=True), batch.tokens.shape[1])
        return padded.to(batch.tokens.device, non_blocking=True)

    def _missing_shards(self, data: TokenData, splits: Sequence[str]) -> list[tuple[str, int]]:
        """Split and index of every shard that is absent or cannot be read."""
        missing_shards = []
        for split in splits:
            num_shards = math.ceil(len(data.rows(split)) / SHARD_ROWS)
            for shard_index in range(num_shards):
                if not self._is_readable(split, shard_index):
                    missing_shards.append((split, shard_index))
        return missing_shards

    def _shard_path(self, split: str, shard_index: int) -> Path:
        return self.directories[split] / f"shard-{shard_index:05d}.safetensors"

    def _is_readable(self, split: str, shard_index: int) -> bool:
        try:
            with safe_open(self._shard_path(split, shard_index), "pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def _shard_of(self, split: str, row_index: int) -> Any:
        """The shard that contains a row, memory-mapped."""
        path = self._shard_path(split, row_index // SHARD_ROWS)
        if path not in self._open_shards:
            self._open_shards[path] = safe_open(path, "pt")
        return self._open_shards[path]

    def _announce(self, num_bytes: int) -> None:
        """Report how much disk space the missing shards need.

        Raises:
            ValueError: the disk has less.
        """
        if not num_bytes:
            tell(f"the offline features are in {self.home}")
            return

        # The directory is created later, so ask for its nearest existing parent.
        candidates = (self.home, *self.home.absolute().parents)
        existing_directory = next(path for path in candidates if path.exists())
        num_free_bytes = shutil.disk_usage(existing_directory).free
        summary = f"caching the target's outputs takes up to {gigabytes(num_bytes)} in {self.home}"
        if num_bytes > num_free_bytes:
            raise ValueError(
                f"{summary}, {gigabytes(num_free_bytes)} are free: give another "
                "target_features.cache_dir, or OnlineFeatures"
            )
        tell(f"{summary} ({gigabytes(num_free_bytes)} free)")

    def _compute_shard(
        self,
        target: LanguageModel,
        data: TokenData,
        split: str,
        shard_index: int,
        layers: Sequence[int],
    ) -> dict[str, Tensor]:
        """The arrays of a shard, named `ROW.NAME`, from batches of rows with similar lengths."""
        rows = data.rows(split)
        first_row = shard_index * SHARD_ROWS
        end_row = min(first_row + SHARD_ROWS, len(rows))
        batch = data.collate([rows[row_index] for row_index in range(first_row, end_row)])
        lengths = batch.lengths.tolist()

        # Rows of similar lengths need little padding. Indices are those of the batch.
        longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        arrays: dict[str, Tensor] = {}
        start = 0
        while start < len(longest_first):
            num_tokens = lengths[longest_first[start]]
            num_rows = min(data.batch_size, rows_at_once(num_tokens, target.vocab_size))
            group = longest_first[start : start + num_rows]
            start += num_rows

            outputs = self._run_target(target, batch.tokens[group, :num_tokens], layers)
            for name, values in outputs.items():
                for index, row_values in zip(group, values.cpu(), strict=True):
                    row_index = first_row + index
                    arrays[f"{row_index}.{name}"] = row_values[: lengths[index]].clone()
        return arrays

    def _run_target(
        self,
        target: LanguageModel,
        tokens: Int[Tensor, "B T"],
        layers: Sequence[int],
    ) -> dict[str, Tensor]:
        """A shard's arrays for some rows: hidden states, most likely tokens, normalizers."""
        # A frozen target computes as it does in decoding, without mixed precision.
        with torch.autocast(target.device.type, enabled=False):
            output = target(tokens.to(target.device), features=tuple(layers))

        choices = []
        normalizers = []
        for logits in in_float32(output.logits):
            choices.append(largest(logits).int())
            normalizers.append(logits.logsumexp(-1))

        arrays = {f"layer_{layer}": output.features[layer].to(self.dtype) for layer in layers}
        shape = output.logits.shape[:2]
        arrays["choice"] = torch.cat(choices).unflatten(0, shape)
        arrays["normalizer"] = torch.cat(normalizers).unflatten(0, shape)
        return arrays


class AutoFeatures(OfflineFeatures):
    """Caches the target's outputs if the run reads the text several times; else runs online.

    The choice follows from the run's epochs or minutes and from how fast the target reads. Targets
    that `OfflineFeatures` does not support are always read online.

    Attributes:
        online: whether the target runs on each training batch.
    """

    online = True

    @torch.no_grad()
    def prepare(
        self,
        target: LanguageModel,
        data: TokenData,
        layers: Sequence[int],
        splits: Sequence[str],
    ) -> None:
        """Choose once for a run, then prepare the cache if it is used."""
        if "train" in splits:
            self.online = self._choose_online(target, data, layers)
        if not self.online:
            super().prepare(target, data, layers, splits)

    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        **options: Any,
    ) -> TargetOutputs:
        """See `OnlineFeatures.read`."""
        if self.online:
            return OnlineFeatures().read(target, batch, split, **options)
        return super().read(target, batch, split, **options)

    def _choose_online(self, target: LanguageModel, data: TokenData, layers: Sequence[int]) -> bool:
        """Whether caching is impossible or would not save time; reports the reason."""
        trainer: Any = data.trainer
        # A sharded target is not on its devices yet, and one that is trained changes with every
        # step.
        if is_sharded(trainer) or is_trained(target):
            return True

        # What the family supports comes first: a choice by time alone would fail on some texts.
        try:
            check_cacheable(target)
        except ValueError as error:
            cause = error.__cause__ or error
            tell(f"hidden states are computed online, in each step: {cause}")
            return True

        seconds_left = trainer.strategy.broadcast(time_left(trainer))
        if seconds_left == 0:
            # The time limit ends this run before its first step.
            return True

        reading_seconds = self._time_reading(target, data, layers)
        if seconds_left is None:
            num_epochs = float(trainer.max_epochs)
            reason = f"max_epochs is {trainer.max_epochs}"
        else:
            # The draft's own steps take about as long as the target's.
            num_epochs = seconds_left / (2 * reading_seconds)
            reason = f"the run has {seconds_left / 60:.1f} minutes left, half of them for the draft"

        # All processes must choose alike, although each has timed itself.
        is_online = bool(trainer.strategy.broadcast(num_epochs <= SINGLE_READING_EPOCHS))
        choice = "online, in each step" if is_online else "once and cached"
        reading_minutes = f"about {reading_seconds / 60:,.1f} minutes"
        tell(
            f"hidden states are computed {choice}: the target needs {reading_minutes} to read the "
            f"text once, {reason}"
        )
        if seconds_left is not None and num_epochs < FEWEST_EPOCHS:
            needed_minutes = math.ceil(FEWEST_EPOCHS * 2 * reading_seconds / 60)
            tell(
                f"this run will learn from about {num_epochs:.1%} of the text, which is too little "
                f"for most drafts: --minutes {needed_minutes} would read {FEWEST_EPOCHS:.0%} of it"
            )
        return is_online

    def _time_reading(self, target: LanguageModel, data: TokenData, layers: Sequence[int]) -> float:
        """Seconds that the target takes to read the training text once, estimated from a sample.

        A slow target reads one part of the sample. Otherwise the first part warms up.
        """
        sample = data.first_rows("train", 2 * data.batch_size)
        tokens = sample.tokens.to(target.device)
        # On a CPU, a row of text is as efficient as a batch of them.
        rows_of_part = 1 if target.device.type == "cpu" else data.batch_size

        num_timed_rows = 0
        timed_seconds = 0.0
        for number, part in enumerate(tokens.split(rows_of_part)):
            batch = Batch.of(part)
            start_time = time.perf_counter()
            outputs = OnlineFeatures().read(target, batch, "train", layers=layers, tokens=None)
            # Copying a result waits for the device.
            outputs.choices.cpu()
            seconds = time.perf_counter() - start_time
            is_warm_up = number == 0 and seconds < SAMPLE_SECONDS and len(tokens) > rows_of_part
            if not is_warm_up:
                num_timed_rows += len(part)
                timed_seconds += seconds
            if timed_seconds >= SAMPLE_SECONDS:
                break
        return timed_seconds * len(data.rows("train")) / num_timed_rows


def check_cacheable(target: LanguageModel) -> None:
    """Raise ValueError if the target's outputs cannot be cached.

    The cached hidden states replace the logits, so the output head must work separately from the
    model.
    """
    if is_trained(target):
        raise ValueError(
            "the target is trained, so its outputs cannot be cached: give OnlineFeatures as "
            "model.target_features"
        )
    try:
        target.check_output_head()
    except ValueError as error:
        raise ValueError(
            f"the target's outputs cannot be cached ({error}): give OnlineFeatures as "
            "model.target_features"
        ) from error


def _pad_tokens(values: Tensor, num_tokens: int) -> Tensor:
    """Rows `[B, S, ...]` with zeros after them, so that S becomes `num_tokens`."""
    num_missing = num_tokens - values.shape[1]
    # `pad` counts dimensions from the last one: leave all after the tokens unchanged.
    unchanged = (0, 0) * (values.dim() - 2)
    return pad(values, (*unchanged, 0, num_missing))


def _head_logits(
    target: LanguageModel,
    hidden: Float[Tensor, "B T D"],
    tokens: Int[Tensor, "W"] | None,
) -> Float[Tensor, "B T W"]:
    """The output head's float32 logits of some tokens, of all when None.

    A linear head is applied to the rows of these tokens only, which is several times faster for a
    reduced vocabulary.
    """
    if tokens is not None:
        # The bias is what the head returns for zeros.
        zeros = torch.zeros_like(hidden[:1, :1])
        bias = pick(target.output_logits(zeros), tokens)[0, 0]
        weight = target.output_weight.index_select(0, tokens)

        # Compare with the head on a sample. Caps on logits show in large numbers only, so the
        # states are enlarged.
        sample = 64 * hidden[:1, :8]
        expected = pick(target.output_logits(sample), tokens)
        error = (linear(sample, weight, bias) - expected).abs().max()
        relative_tolerance = max(1e-3, 4 * torch.finfo(hidden.dtype).eps)
        tolerance = relative_tolerance * expected.abs().max()
        is_linear = bool(error <= tolerance)
        if is_linear:
            return linear(hidden, weight, bias).float()

    # Few rows at a time, because the logits of the whole vocabulary take gigabytes.
    num_rows = rows_at_once(hidden.shape[1], target.vocab_size)
    pieces = []
    for rows in hidden.split(num_rows):
        logits = pick(target.output_logits(rows), tokens)
        pieces.append(logits.float())
    return torch.cat(pieces)


def rows_digest(data: TokenData, split: str) -> str:
    """A digest of all tokens of a split."""
    digest = hashlib.sha256()
    for batch in batches(data, split):
        for tokens, length in zip(batch.tokens.numpy(), batch.lengths.tolist(), strict=True):
            # The length comes first, so that the same tokens in other rows differ.
            row = np.array([length, *tokens[:length]], "<i4")
            digest.update(row.tobytes())
    return digest.hexdigest()
