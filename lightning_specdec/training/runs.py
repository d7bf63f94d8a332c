"""A run's files: checkpoints and curves of its own version, locked, written whole, and checked before it resumes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_only

from lightning_specdec.checkpoints import archive, networks, runs
from lightning_specdec.checkpoints import checkpoint as checkpoint_file
from lightning_specdec.data import TokenData
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.optimizers import time_left, timers

_CONFIG = "give the config and the --data options that it was trained with"


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes beside the old file and swaps the two in one step; reads tensors and plain values only."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Path] = set()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        archive.write(path, checkpoint)
        self.written.add(Path(path).resolve())

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        content = archive.read_any(path)
        # A checkpoint exported for decoding holds no trainer's state; its models can be validated all the same.
        return {**content, "pytorch-lightning_version": lightning.__version__}

    def remove_checkpoint(self, path: str | Path) -> None:
        # The path may come from a resumed checkpoint, which may be a stranger's: delete only what this run has written.
        if Path(path).resolve() in self.written:
            Path(path).unlink(missing_ok=True)


class CheckOptimizers(Callback):
    """Refuses a restored optimizer whose fused step would write beyond what it remembers of a weight."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            for weight in (
                each
                for group in optimizer.param_groups
                if group.get("fused")
                for each in group["params"]
            ):
                for name, value in optimizer.state[weight].items():
                    if (
                        isinstance(value, torch.Tensor)
                        and name != "step"
                        and value.shape != weight.shape
                    ):
                        raise ValueError(
                            f"the checkpoint's {name} is of other weights: give the last.ckpt of this run"
                        )


class RunFiles:
    """The directories that one run writes to, beside those of earlier runs.

    Checkpoints go to `DIRPATH/version_N`, for each `ModelCheckpoint` of the config that has a dirpath, and curves to
    `SAVE_DIR/NAME/version_N`. A run that resumes from `last` continues in its version; any other one begins a new one.

    Attributes:
        newest: the `ModelCheckpoint`s that keep the newest state.
    """

    def __init__(self, trainer: Trainer) -> None:
        callbacks = [
            each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)
        ]
        self.checkpoints = {
            callback: Path(str(callback.dirpath)) for callback in callbacks if callback.dirpath
        }
        if remote := [
            callback.dirpath for callback in self.checkpoints if "://" in str(callback.dirpath)
        ]:
            raise ValueError(
                f"dirpath {remote[0]} is no directory of this machine: checkpoints are written there first"
            )
        self.newest = [callback for callback in self.checkpoints if callback.monitor is None]
        for (
            callback
        ) in self.newest:  # where one of several processes fails, the others would not come to save
            callback.save_on_exception = trainer.world_size == 1
        self.logger = trainer.logger if isinstance(trainer.logger, TensorBoardLogger) else None
        self._locks: list[int] = []
        self._made: list[Path] = []

    def find(self, name: str) -> str:
        """The file behind `last`, `best` or a path.

        Raises:
            FileNotFoundError: there is no such checkpoint yet.
            ValueError: the config does not say where checkpoints lie.
        """
        if name not in ("last", "best"):
            return str(runs.find(name))
        if not self.checkpoints:
            raise ValueError(
                f"--ckpt_path {name} needs a ModelCheckpoint with a dirpath in the config: give a file"
            )
        return str(runs.find(next(iter(self.checkpoints.values())), (name,)))

    @rank_zero_only
    def claim(self, resumed: str | None) -> None:
        """Choose the version, make its directories, and lock them until `release` or the process's end.

        Args:
            resumed: the checkpoint of `last`, whose version goes on; None for a new run.

        Raises:
            ValueError: another run writes there.
        """
        curves = (
            ()
            if self.logger is None or "://" in self.logger.root_dir
            else (Path(self.logger.root_dir),)
        )
        used = {place.resolve() for place in (*self.checkpoints.values(), *curves)}
        version = (
            max((number for each in used for number in runs.versions(each)[:1]), default=-1) + 1
        )
        if resumed is not None and (name := Path(resumed).parent.name).startswith("version_"):
            version = int(name.removeprefix("version_"))
        for directory in (place / f"version_{version}" for place in used):
            try:
                directory.mkdir(parents=True, exist_ok=resumed is not None)
                self._made += [directory] * (resumed is None)
                self._locks.append(os.open(directory, os.O_RDONLY))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                for half in directory.glob(".*.ckpt.*"):  # of a run that was killed while it wrote
                    half.unlink()
            except (FileExistsError, BlockingIOError) as error:
                raise ValueError(
                    f"another run writes to {seen_from_here(directory)}: wait until it ends, or begin a new run"
                ) from error
        for callback, place in self.checkpoints.items():
            callback.dirpath = str(place / f"version_{version}")
        if self.logger is not None:
            self.logger._version = version

    def release(self, *, keep: bool) -> None:
        """Let other runs write there, and remove what a new run has made unless `keep`, or if it saved a checkpoint."""
        # The Trainer counts neither the steps of an optimizer that it does not wrap nor those of forked processes.
        saved = any(found for directory in self._made for found in directory.rglob("*.ckpt"))
        for directory in () if keep or saved else self._made:
            shutil.rmtree(directory, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())


def seen_from_here(path: str | Path) -> str:
    """The path as seen from the current directory, where it is below that."""
    here, whole = Path.cwd(), Path(path).absolute()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else str(whole)


def check_checkpoint(
    path: str, trainer: Trainer, model: LightningModule, data: Any, *, resume: bool
) -> int:
    """Raise unless the Trainer can use this checkpoint for this model, or resume from it with these data; its step.

    Of a LightningModule that is no `SpeculativeTraining`, what its own optimizers remember is checked when the Trainer
    has restored it: see `CheckOptimizers`.

    Raises:
        FileNotFoundError, ValueError: as `checkpoint.load`; and for weights of other networks, files without a run's
            state, runs that are over, and runs of another config.
    """
    ours, reference = isinstance(model, SpeculativeTraining), None
    if isinstance(model, SpeculativeTraining):
        content, reference = checkpoint_file.read(path), checkpoint_file.load(path).reference
        if reference is not None:
            reference.check(model.target, path)
    else:
        content = archive.read_weights(path)
    held = {name: tensor.shape for name, tensor in content["state_dict"].items()}
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if reference is not None:
        wanted = {
            name: shape
            for name, shape in wanted.items()
            if not name.startswith(checkpoint_file.TARGET)
        }
    if held != wanted:
        name = min(
            name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name)
        )
        raise ValueError(f"{path} has networks of other shapes ({name[:80]}): {_CONFIG}")
    if not resume:
        return 0
    try:
        loop = content["loops"]["fit_loop"]
        done, step = loop["epoch_progress"]["current"]["processed"], int(content["global_step"])
        whole = all(isinstance(state, dict) for state in content["callbacks"].values())
        whole = whole and _alike(loop, trainer.fit_loop.state_dict())
        whole = whole and (
            not ours or _fits(content["optimizer_states"], model.configure_optimizers())
        )
        for timer in timers(trainer):
            timer.load_state_dict(content["callbacks"].get(timer.state_key, {}))
        left = time_left(trainer)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(
            f"{path} holds no training run to resume, or a damaged one: give the last.ckpt of a run"
        )
    if isinstance(model, SpeculativeTraining):
        _check_config(path, content[checkpoint_file.KEY], model, data)
    if trainer.max_epochs not in (None, -1) and done >= trainer.max_epochs:
        raise ValueError(
            f"{path} has {done} finished epochs and the run ends after {trainer.max_epochs}: raise --trainer.max_epochs"
        )
    if 0 <= trainer.max_steps <= step:
        raise ValueError(
            f"{path} is at step {step}, the run ends after {trainer.max_steps}: raise --trainer.max_steps"
        )
    for each in trainer.early_stopping_callbacks:
        waited = content["callbacks"].get(each.state_key, {}).get("wait_count")
        if isinstance(waited, int) and waited >= each.patience:
            raise ValueError(
                f"{path} is over, EarlyStopping ended the run ({each.monitor}, patience {each.patience}): resume "
                "without it, or begin a new run"
            )
    if left == 0:
        raise ValueError(
            f"{path} is over, the run's time is used up: give more --minutes or --trainer.max_time, or begin a new run"
        )
    return step


def _check_config(
    path: str, described: Mapping[str, Any], model: SpeculativeTraining, data: Any
) -> None:
    """Raise ValueError where a network has changed, or a setting of the training or its data that the file knows."""
    given = {**model.describe(), **model.settings(), "data": type(data).__name__}
    before = networks.current({**described, **described["recipe"]})
    if isinstance(data, TokenData):
        before |= before.get("data_arguments", {})
        given |= data.arguments()
    moved = {"target_checkpoint"} | ({"target"} if "sha256" in described["target"] else set())
    free = moved | {"format", "recipe", "versions", "prompts", "tokenizer"}
    differences, options = [], []
    for name in (name for name in given if name in before and name not in free):
        if difference := _difference(name, before[name], json.loads(json.dumps(given[name]))):
            differences.append(difference)
            if name in model.settings() and isinstance(before[name], str | int | float):
                options.append(f"--model.{name} {before[name]}")
    if differences:
        advice = f"give {' '.join(options)}" if len(options) == len(differences) else _CONFIG
        raise ValueError(
            f"{path} cannot resume: {'; '.join(differences[:3])}: {advice}, or begin a new run"
        )


def _difference(name: str, before: Any, now: Any) -> str | None:
    """The first entry in which plain values differ: of those that were known before, where none is the same as None."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, dict) and isinstance(now, dict):
        found = (_difference(f"{name}.{key}", before[key], now.get(key)) for key in before)
        return next((each for each in found if each), None)
    return None if before == now else f"{name} changed from {str(before)[:60]} to {str(now)[:60]}"


def _alike(given: object, fresh: object) -> bool:
    """Whether a state has every entry of a fresh one, of the same type, and no negative or absurd count."""
    if isinstance(fresh, dict):
        return isinstance(given, dict) and all(
            key in given and _alike(given[key], fresh[key]) for key in fresh
        )
    return type(given) is type(fresh) and (not isinstance(given, int) or 0 <= given < 2**53)


def _fits(states: Any, configured: Any) -> bool:
    """Whether a state's tensors have the optimizer's shapes: its fused step would write beyond smaller ones."""
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    (state,) = states
    groups = zip(state["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    same = all(
        _alike(given, fresh) and given["params"] == fresh["params"] for given, fresh in groups
    )
    return same and all(
        value.shape == (() if key == "step" else weights[index].shape)
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
        for index, entries in state["state"].items()
        for key, value in entries.items()
    )
