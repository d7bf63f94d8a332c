"""A run's files: checkpoints and curves of its own version, locked, written whole, and checked before it resumes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_specdec.checkpoints import archive, runs
from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.checkpoints.networks import spec
from lightning_specdec.data import TokenData
from lightning_specdec.training.base import SpeculativeTraining

_CONFIG = "give the config and the --data options that it was trained with"


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes beside the old file and swaps the two in one step; reads tensors and plain values only."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes local files: it takes no storage_options")
        archive.write(path, checkpoint)
        self.written.add(Path(path).resolve())

    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        content = archive.read_any(path)
        # A checkpoint exported for decoding holds no trainer's state; its models can be validated all the same.
        return {**content, "pytorch-lightning_version": lightning.__version__}

    def remove_checkpoint(self, path: str | Path) -> None:
        # The path may come from a resumed checkpoint, which may be a stranger's: delete only what this run has written.
        if Path(path).resolve() in self.written:
            Path(path).unlink(missing_ok=True)


class RunLogger(TensorBoardLogger):
    """A TensorBoard logger whose version the run's checkpoints share, without a curve of the epoch's number."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: value for name, value in metrics.items() if name != "epoch"}, step)

    def use_version(self, version: int) -> None:
        """Write to `version_N`."""
        self._version = version


class RunFiles:
    """The directories that one run writes to, beside those of earlier runs.

    Checkpoints go to `DIRPATH/version_N`, for each `ModelCheckpoint` of the config that has a dirpath, and curves to
    `SAVE_DIR/NAME/version_N`. A run that resumes from `last` continues in its version; any other one begins a new one.
    """

    def __init__(self, trainer: Trainer) -> None:
        callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        self.checkpoints = {callback: Path(str(callback.dirpath)) for callback in callbacks if callback.dirpath}
        self.logger = trainer.logger if isinstance(trainer.logger, RunLogger) else None
        self._locks: list[int] = []

    def find(self, name: str) -> str:
        """The file behind `last`, `best` or a path.

        Raises:
            FileNotFoundError: there is no such checkpoint yet.
            ValueError: the config does not say where checkpoints lie.
        """
        if name not in ("last", "best"):
            return str(runs.find(name))
        if not self.checkpoints:
            raise ValueError(f"--ckpt_path {name} needs a ModelCheckpoint with a dirpath in the config: give a file")
        place = next(iter(self.checkpoints.values()))
        if not place.is_dir():
            raise FileNotFoundError(
                f"there is no {name} checkpoint in {seen_from_here(place)}: train one, or name a file"
            )
        return str(runs.find(place, (name,)))

    @rank_zero_only
    def claim(self, resumed: str | None) -> None:
        """Choose the version, make its directories, and lock them until `release` or the process's end.

        Args:
            resumed: the checkpoint of `last`, whose version goes on; None for a new run.

        Raises:
            ValueError: another run writes there.
        """
        places = set(self.checkpoints.values())
        if resumed is not None:
            name = Path(resumed).parent.name
            version = int(name.removeprefix("version_")) if name.startswith("version_") else None
        else:
            used = set(places) if self.logger is None else {*places, Path(self.logger.root_dir)}
            version = max((number for each in used for number in runs.versions(each)[:1]), default=-1) + 1
        for place in places:
            directory = place if version is None else place / f"version_{version}"
            try:
                directory.mkdir(parents=True, exist_ok=resumed is not None)
                self._locks.append(os.open(directory, os.O_RDONLY))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (FileExistsError, BlockingIOError) as error:
                raise ValueError(
                    f"another run writes to {seen_from_here(directory)}: wait until it ends, or begin a new run"
                ) from error
        for callback, place in self.checkpoints.items():
            callback.dirpath = str(place if version is None else place / f"version_{version}")
            # So that a run that is stopped, in its first epoch too, can go on.
            callback.save_on_exception = callback.monitor is None
        if self.logger is not None and version is not None:
            self.logger.use_version(version)

    def release(self) -> None:
        """Let other runs write there."""
        while self._locks:
            os.close(self._locks.pop())


def seen_from_here(path: str | Path) -> str:
    """The path as seen from the current directory, where it is below that."""
    here, whole = Path.cwd(), Path(path).absolute()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def check_checkpoint(path: str, trainer: Trainer, model: LightningModule, data: Any, *, resume: bool) -> None:
    """Raise unless the Trainer can use this checkpoint for this model, or resume from it with these data.

    Raises:
        FileNotFoundError, ValueError: as `checkpoint.load`; and for files without what the Trainer needs, weights of
            other networks, runs that are already over, and runs of another config.
    """
    reference = checkpoint_file.load(path).reference
    content = checkpoint_file.read(path)
    if isinstance(model, SpeculativeTraining):
        if reference is not None:
            reference.check(model.target, path)
        if resume:
            _check_config(path, content[checkpoint_file.KEY], model, data)
    held = {name: tensor.shape for name, tensor in content["state_dict"].items()}
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if reference is not None:
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith(checkpoint_file.TARGET)}
    for name in sorted(wanted.keys() | held.keys()):
        if held.get(name) != wanted.get(name):
            shapes = [str(tuple(each[name])) if name in each else "nothing" for each in (wanted, held)]
            raise ValueError(
                f"{path} is of other networks ({name[:80]}: {' is needed, it has '.join(shapes)}): {_CONFIG}"
            )
    if not resume:
        return
    if "loops" not in content or "optimizer_states" not in content:
        raise ValueError(f"{path} holds models but no training run to resume: give the last.ckpt or best.ckpt of a run")
    callbacks, loops = content.get("callbacks"), content["loops"]
    whole = isinstance(callbacks, dict) and all(isinstance(state, dict) for state in callbacks.values())
    whole = whole and isinstance(loops, dict) and _alike(loops.get("fit_loop"), trainer.fit_loop.state_dict())
    if not whole or not _fits(content["optimizer_states"], model.configure_optimizers()):
        raise ValueError(f"{path} holds a training run that does not fit or is damaged: give another checkpoint of it")
    done = content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if trainer.max_epochs not in (None, -1) and done >= trainer.max_epochs:
        raise ValueError(
            f"{path} has {done} epochs behind it and the run ends after {trainer.max_epochs}: raise "
            "--trainer.max_epochs"
        )


def _check_config(path: str, described: Mapping[str, Any], model: SpeculativeTraining, data: Any) -> None:
    """Raise ValueError where the run was trained with something else than what is given now, which it names.

    Settings that the checkpoint does not know, since an older version wrote it, may be anything.
    """
    recipe, now = described["recipe"], model.describe()
    given: dict[str, Any] = {"training": type(model).__name__, **model.settings(), "data": type(data).__name__}
    if isinstance(data, TokenData):
        given["data_arguments"] = data.arguments()
    if "sha256" not in described["target"]:  # it holds the target's weights, and says how that is built
        now["target"] = spec(model.target)
    elif "sha256" in now["target"]:  # the same target, which may have moved
        now["target"]["source"] = described["target"]["source"]
        given.pop("target_checkpoint", None)
    parts = [name for name in ("target", "drafter", "name", "others") if name in described or name in now]
    given = {name: value for name, value in given.items() if name in recipe} | {name: now.get(name) for name in parts}
    before = _flat({name: {**recipe, **described}.get(name) for name in given})
    after = _flat(json.loads(json.dumps(given)))
    for name in (*after, *(name for name in before if name not in after)):
        if before.get(name) != after.get(name):
            was, now_is = ("not given" if each.get(name) is None else str(each[name])[:60] for each in (before, after))
            raise ValueError(
                f"{path} cannot resume: {name} changed from {was} to {now_is}: {_CONFIG}, or begin a new run"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values as one level of names, as a person would name them: `target.hidden_size`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        place = prefix if name in ("arguments", "model") else f"{prefix}.{name}".strip(".")
        flat |= _flat(value, place) if isinstance(value, Mapping) else {place: value}
    return flat


def _alike(given: object, fresh: object) -> bool:
    """Whether a state has every entry of a fresh one, of the same type; counts are not negative and not absurd."""
    if isinstance(fresh, dict):
        return isinstance(given, dict) and all(key in given and _alike(given[key], fresh[key]) for key in fresh)
    return type(given) is type(fresh) and (not isinstance(given, int) or 0 <= given < 2**53)


def _fits(states: Any, configured: Any) -> bool:
    """Whether a state's tensors have the optimizer's shapes: its fused step would write beyond smaller ones."""
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    fresh = optimizer.state_dict()["param_groups"]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    try:
        (state,) = states
        alike = [_alike(given, group) for given, group in zip(state["param_groups"], fresh, strict=True)]
        same = [given["params"] == group["params"] for given, group in zip(state["param_groups"], fresh, strict=True)]
        kept = [
            value.shape == (() if key == "step" else weights[index].shape) and _is_plain(value)
            for index, entries in state["state"].items()
            for key, value in entries.items()
        ]
        keys = {frozenset(entries) for entries in state["state"].values()}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False
    return all((*alike, *same, *kept)) and len(keys) <= len(fresh) and frozenset() not in keys


def _is_plain(value: Tensor) -> bool:
    whole = value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    return value.dtype.is_floating_point and value.layout == torch.strided and value.device.type == "cpu" and whole
