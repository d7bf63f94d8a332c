"""Readings of a target that are made once, kept on the disk, and looked up from then on.

Shapes: B rows, T tokens, W tokens of the draft.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from torch import Tensor

from lightning_specdec import __version__
from lightning_specdec.checks import require_int
from lightning_specdec.data import Batch, TokenData
from lightning_specdec.data.corpus import tell
from lightning_specdec.files import cache_home
from lightning_specdec.memory import gigabytes
from lightning_specdec.models import LanguageModel
from lightning_specdec.target_reference import TargetReference, dtype_of
from lightning_specdec.training.feature_shards import FORMAT, Column, FeatureShards, identity
from lightning_specdec.training.kept_output import KeptNormalizer, KeptOutput, KeptTop
from lightning_specdec.training.outputs import seen_from_here
from lightning_specdec.training.target_reading import Reading, TargetFeatures, rows_at_once
from lightning_specdec.training.together import place, together

if TYPE_CHECKING:
    from jaxtyping import Int

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Watch = Callable[[int], Any]
"""Told how many tokens more are made."""


class CachedFeatures(TargetFeatures):
    """What the target makes of each row is made before the run and kept on the disk.

    Theory: most of a training step is the target's, and it would make the same of a text each epoch. Kept are, for each
    token, the hidden states that the draft reads, the target's choice, and enough to say how likely any token was.
    Whatever another run of these texts learns, it finds them there. Rows must stay what they are, so windows that
    begin anywhere cannot be cached.

    Args:
        cache_dir: the directory, for one target, one choice of layers and one corpus; a place below the cache of this
            program when None, another for each of them. It can be deleted at any time.
        top_n: how many of the likeliest tokens are kept with their log probabilities, the others counting as never
            said. When None, the last layer's states are kept instead, and log probabilities are made from them: exact
            up to `dtype`.
        dtype: "bfloat16" or "float32", of the hidden states.
        also_layers: layers that are kept though this draft does not read them, so that drafts of several kinds share
            one cache: give each of them the same.

    Attributes:
        splits: what is prepared, by split.
    """

    def __init__(
        self,
        cache_dir: str | None = None,
        *,
        top_n: int | None = None,
        dtype: str = "bfloat16",
        also_layers: Sequence[int] = (),
    ) -> None:
        self.cache_dir, self.dtype = cache_dir, dtype
        self.also_layers = [require_int("also_layers", layer, 0) for layer in also_layers]
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
        self.top_n = None if top_n is None else require_int("top_n", top_n, 1)
        self.output: KeptOutput = KeptNormalizer() if top_n is None else KeptTop(top_n)
        self.splits: dict[str, FeatureShards] = {}

    @property
    def home(self) -> Path:
        """Where all of it lies."""
        return cache_home() / "features" if self.cache_dir is None else Path(self.cache_dir).expanduser()

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("cache_dir", "top_n", "dtype", "also_layers")}

    @torch.no_grad()
    def prepare(self, target: LanguageModel, data: TokenData, layers: Sequence[int], splits: Sequence[str]) -> None:
        """Make what is not there yet; each process makes its part, and goes on when all is there.

        Raises:
            ValueError: the rows differ each time, the directory holds features of something else, there is no room, or
                the disk is full.
        """
        if not splits:
            return
        if not data.fixed_rows:
            raise ValueError(
                f"{type(data).__name__} reads other rows each epoch, so their features cannot be cached: give OnTheFly "
                "as model.target_features, or train on what `lightning_specdec generate` writes (GeneratedText)"
            )
        self.output.check(target)
        if target.num_layers is not None and max(self.also_layers, default=0) >= target.num_layers:
            raise ValueError(
                f"also_layers must be of the target's layers 0 to {target.num_layers - 1}, got {self.also_layers}: "
                "lower them"
            )
        wanted = sorted({*map(int, layers), *self.also_layers})
        with together():
            columns = self._columns(target, sorted({*wanted, *self.output.layers(target)}))
            described = {**self._described(target), "layers": wanted}
            found: dict[str, FeatureShards] = {}
            for split in splits:
                lengths, rows = survey(data, split)
                manifest = {**described, "split": split, "rows": rows}
                found[split] = FeatureShards(self._directory(split, manifest), lengths, columns, manifest)
                found[split].check()
            self._announce(found, _layers(columns))
        rank, num_processes = place()
        with together():
            if rank == 0:
                for kept in found.values():
                    kept.begin()
        parts = [(split, number) for split, kept in found.items() for number in kept.missing]
        with together():
            own = parts[rank::num_processes]
            with _bar(sum(found[split].tokens_of(number) for split, number in own), shown=rank == 0) as bar:
                for split, number in own:
                    kept = found[split]
                    kept.write(number, self._made(target, data, split, kept, number, bar.update))
        for split, number in parts:
            if not found[split].is_whole(number):
                path = found[split].path(number)
                raise ValueError(f"{path} is not seen here: give a target_features.cache_dir that all machines share")
        self.splits |= found

    @torch.no_grad()
    def read(
        self,
        target: LanguageModel,
        batch: Batch,
        split: str,
        *,
        layers: Sequence[int],
        tokens: Int[Tensor, "W"] | None,
    ) -> Reading:
        assert split in self.splits, f"the features of {split} were not prepared"
        device, dtype = batch.tokens.device, dtype_of(target)
        found = self.splits[split].read(batch.indices.tolist(), batch.tokens.shape[1])
        kept = {name: values.to(device, non_blocking=True) for name, values in found.items()}
        needed = {*layers, *self.output.layers(target)}
        states = {layer: kept[_name(layer)].to(dtype) for layer in needed}
        with torch.autocast(device.type, enabled=False):  # as the target decodes by itself
            log_probs = self.output.log_probs(target, kept, states, tokens)
        return Reading({layer: states[layer] for layer in layers}, log_probs, kept["choice"].long())

    def _columns(self, target: LanguageModel, layers: Sequence[int]) -> dict[str, Column]:
        """What is kept of each token; how wide states are is seen from one."""
        token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
        states = target(token, features=tuple(layers)).features
        columns = {_name(layer): Column(DTYPES[self.dtype], (states[layer].shape[-1],)) for layer in layers}
        return {**columns, **self.output.columns(), "choice": Column(torch.int32)}

    def _described(self, target: LanguageModel) -> dict[str, Any]:
        """What these features are, but for their layers and rows."""
        reference = TargetReference.of(target)
        weights = weights_fingerprint(target) if reference.sha256 is None else None
        return {
            "format": FORMAT,
            "target": {**reference.described(), "weights": weights},
            "top_n": self.top_n,
            "dtype": self.dtype,
            "versions": {"lightning_specdec": __version__, "torch": torch.__version__},
        }

    def _directory(self, split: str, manifest: Mapping[str, Any]) -> Path:
        if self.cache_dir is not None:
            return self.home / split
        return self.home / f"{split}-{hashlib.sha256(identity(manifest).encode()).hexdigest()[:24]}"

    def _announce(self, found: Mapping[str, FeatureShards], layers: Sequence[int]) -> None:
        """Say what will be made and what it takes, or refuse where there is no room."""
        where = seen_from_here(self.home)
        num_tokens = sum(kept.tokens_of(number) for kept in found.values() for number in kept.missing)
        if not num_tokens:
            total = sum(kept.num_tokens for kept in found.values())
            tell(f"the cached features of {total:,} tokens are in {where}")
            return
        size = num_tokens * next(iter(found.values())).bytes_per_token
        what = f"caching {num_tokens:,} tokens of the target's layers {list(layers)} takes {gigabytes(size)}"
        there = next(path for path in (self.home, *self.home.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if size > free:
            ways = "make room, or give another target_features.cache_dir, fewer top_n, or OnTheFly"
            raise ValueError(f"{what}, {where} has {gigabytes(free)} free: {ways}")
        tell(f"{what} in {where} ({gigabytes(free)} free)")

    def _made(
        self, target: LanguageModel, data: TokenData, split: str, kept: FeatureShards, number: int, watch: Watch
    ) -> dict[str, Tensor]:
        """The arrays of a shard, from rows of like lengths at a time."""
        arrays, rows, source = kept.empty(number), kept.rows(number), data.rows(split)
        layers = _layers(arrays)
        batch = data.collate([source[row] for row in rows])
        lengths, starts = batch.lengths.tolist(), (kept.starts[rows.start :] - kept.starts[rows.start]).tolist()
        left = sorted(range(len(rows)), key=lambda line: -lengths[line])
        while left:
            width = lengths[left[0]]
            size = min(data.batch_size, rows_at_once(width, target.vocab_size))
            lines, left = left[:size], left[size:]
            with torch.autocast(target.device.type, enabled=False):  # as the target decodes by itself
                output = target(batch.tokens[lines, :width].to(target.device), features=layers)
            scores = output.logits.float()
            made = {_name(layer): output.features[layer] for layer in layers}
            made |= {**self.output.of(scores), "choice": scores.argmax(-1)}
            for name, values in made.items():
                for line, row in zip(lines, values.to("cpu", arrays[name].dtype), strict=True):
                    arrays[name][starts[line] : starts[line + 1]] = row[: lengths[line]]
            watch(sum(lengths[line] for line in lines))
        return arrays


def survey(data: TokenData, split: str) -> tuple[list[int], dict[str, Any]]:
    """How many tokens each row of a split has, and what tells these rows from others."""
    rows, lengths, digest = data.rows(split), list[int](), hashlib.sha256()
    for first in range(0, len(rows), data.batch_size):
        batch = data.collate([rows[i] for i in range(first, min(first + data.batch_size, len(rows)))])
        for tokens, length in zip(batch.tokens.numpy(), batch.lengths.tolist(), strict=True):
            digest.update(np.array([length, *tokens[:length]], "<i4").tobytes())
            lengths.append(length)
    return lengths, {"sha256": digest.hexdigest(), "num_rows": len(lengths), "num_tokens": sum(lengths)}


def weights_fingerprint(target: LanguageModel) -> str:
    """Changes with any weight of a target that came from no files."""
    digest = hashlib.sha256()
    for name, weight in target.state_dict().items():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _bar(num_tokens: int, *, shown: bool) -> Tqdm:
    """How far this process has come with its part, on stderr; a line's worth every thirty seconds in a log."""
    return Tqdm(
        total=num_tokens,
        unit=" tokens",
        disable=not shown or not num_tokens,
        dynamic_ncols=True,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 30,
        bar_format="features {n_fmt}/{total_fmt} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}, {rate_fmt}",
    )


def _name(layer: int) -> str:
    """The column of a layer's states."""
    return f"layer_{layer}"


def _layers(columns: Iterable[str]) -> tuple[int, ...]:
    """The layers whose states are among columns."""
    return tuple(sorted(int(name.removeprefix("layer_")) for name in columns if name.startswith("layer_")))
