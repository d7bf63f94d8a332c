"""Files of a run: its versioned directories, safe checkpoints, and checks before a run resumes."""

from __future__ import annotations

import contextlib
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
from lightning_specdec.training.accumulation import gradient_settings
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.optimizers import time_left, timers

_USE_SAME_CONFIG = "give the config and the --data options that it was trained with"
_MOST_VERSIONS = 20
"""Versions of a run that are searched for a checkpoint that fits, the newest first."""
_MOST_DIFFERENCES = 3
"""Differences that an error message lists."""


class SafeCheckpointIO(TorchCheckpointIO):
    """Replaces a checkpoint in one step, and reads tensors and plain values only."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[Path] = set()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
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
        # A checkpoint that was exported for decoding has no version, but its models can be
        # validated.
        return {**content, "pytorch-lightning_version": lightning.__version__}

    def remove_checkpoint(self, path: str | Path) -> None:
        # The path may come from a resumed checkpoint, which may be a stranger's: delete only files
        # that this run has written.
        if Path(path).resolve() in self.written:
            Path(path).unlink(missing_ok=True)


class CheckOptimizers(Callback):
    """Refuses a restored optimizer whose fused step would write beyond its state of a weight."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if group.get("fused"):
                    for weight in group["params"]:
                        self._check_state(weight, optimizer.state[weight])

    def _check_state(self, weight: torch.Tensor, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or name == "step":
                continue
            if value.shape != weight.shape:
                raise ValueError(
                    f"the checkpoint's {name} is of other weights: give the last.ckpt of this run"
                )


class RunFiles:
    """The directories that one run writes to, next to those of earlier runs.

    Checkpoints go to `DIRPATH/version_N`, for each `ModelCheckpoint` of the config that has a
    dirpath, and curves to `SAVE_DIR/NAME/version_N`. A run that resumes from `last` continues in
    its version. Any other run begins a new version.

    Attributes:
        newest: the `ModelCheckpoint`s that keep the newest state.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.checkpoints: dict[ModelCheckpoint, Path] = {}
        for callback in trainer.checkpoint_callbacks:
            if not isinstance(callback, ModelCheckpoint) or not callback.dirpath:
                continue
            if "://" in str(callback.dirpath):
                raise ValueError(
                    f"dirpath {callback.dirpath} is not a local directory: give a local one"
                )
            self.checkpoints[callback] = Path(str(callback.dirpath))

        # Without a monitor, Lightning keeps the newest checkpoint.
        self.newest = [callback for callback in self.checkpoints if callback.monitor is None]
        # Saving needs all processes, and after a failure the others do not join. A trial run saves
        # nothing.
        save_on_exception = trainer.world_size == 1 and not is_trial(trainer)
        for callback in self.newest:
            callback.save_on_exception = save_on_exception
        self.logger = trainer.logger if isinstance(trainer.logger, TensorBoardLogger) else None
        self._lock_descriptors: list[int] = []
        self._new_directories: list[Path] = []
        self._new_parents: list[Path] = []

    def find(self, name: str, *, fit_command: str) -> str:
        """Return the checkpoint that `last`, `best` or a path selects.

        Args:
            name: `last`, `best` or a path.
            fit_command: the command that writes such checkpoints, for messages.

        Raises:
            FileNotFoundError: there is no such checkpoint yet.
            ValueError: the config does not name a directory of checkpoints.
        """
        if name not in ("last", "best"):
            return str(runs.find(name))
        if not self.checkpoints:
            raise ValueError(
                f"--ckpt_path {name} needs a ModelCheckpoint with a dirpath in the config: give a "
                "file"
            )
        directory = next(iter(self.checkpoints.values()))
        advice = f"train one with `{fit_command}`"
        if not directory.is_dir():
            raise FileNotFoundError(
                f"there is no {name} checkpoint, since there is no directory "
                f"{seen_from_here(directory)}: {advice}"
            )
        try:
            return str(runs.find(directory, (name,)))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no {name} checkpoint in {seen_from_here(directory)}: {advice}"
            ) from None

    @rank_zero_only
    def claim(self, resumed: str | None, step: int = 0) -> None:
        """Choose the version, create its directories, and lock them until `release`.

        Args:
            resumed: the checkpoint of `last`, whose version continues; None for a new run.
            step: the optimizer step of that checkpoint.

        Raises:
            ValueError: another run writes there.
        """
        parents = {directory.resolve() for directory in self.checkpoints.values()}
        if self.logger is not None and "://" not in self.logger.root_dir:
            parents.add(Path(self.logger.root_dir).resolve())
        version = self._choose_version(parents, resumed)

        for parent in parents:
            directory = parent / f"version_{version}"
            try:
                self._lock(directory, is_new=resumed is None)
            except (FileExistsError, BlockingIOError) as error:
                raise ValueError(
                    f"another run writes to {seen_from_here(directory)}: wait until it ends, or "
                    "begin a new run"
                ) from error
            for partial_file in directory.glob(".*.ckpt.*"):
                # Left by a run that was killed while it wrote a checkpoint.
                partial_file.unlink()

        for callback, parent in self.checkpoints.items():
            callback.dirpath = str(parent / f"version_{version}")
        if self.logger is not None:
            self.logger._version = version
            if resumed is not None:
                # TensorBoard hides what a crashed run logged after the checkpoint: it is logged
                # again.
                self.logger._kwargs["purge_step"] = step

    @staticmethod
    def _choose_version(parents: set[Path], resumed: str | None) -> int:
        if resumed is not None:
            directory_name = Path(resumed).parent.name
            if directory_name.startswith("version_"):
                return int(directory_name.removeprefix("version_"))
        newest_version = -1
        for parent in parents:
            newest_version = max([newest_version, *runs.versions(parent)])
        return newest_version + 1

    def _lock(self, directory: Path, *, is_new: bool) -> None:
        # The innermost parent comes first, the order in which they can be removed.
        new_parents = [parent for parent in directory.parents if not parent.exists()]
        directory.mkdir(parents=True, exist_ok=not is_new)
        self._new_parents += new_parents
        if is_new:
            self._new_directories.append(directory)
        descriptor = os.open(directory, os.O_RDONLY)
        self._lock_descriptors.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self, *, keep: bool) -> None:
        """Unlock the directories; unless `keep`, remove them if a new run has saved nothing."""
        # The Trainer counts neither the steps of an optimizer that it does not wrap nor those of
        # forked processes, so look for checkpoints.
        is_saved = any(any(directory.rglob("*.ckpt")) for directory in self._new_directories)
        if not keep and not is_saved:
            for directory in self._new_directories:
                shutil.rmtree(directory, ignore_errors=True)
            for parent in self._new_parents:
                # Another run may have begun there.
                with contextlib.suppress(OSError):
                    parent.rmdir()
        while self._lock_descriptors:
            os.close(self._lock_descriptors.pop())


def is_trial(trainer: Trainer) -> bool:
    """Return whether a run only tries a few batches (`fast_dev_run`), and so leaves no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def seen_from_here(path: str | Path) -> str:
    """Return the path relative to the current directory if it is below that."""
    current_directory = Path.cwd()
    absolute = Path(path).absolute()
    if absolute.is_relative_to(current_directory):
        return str(absolute.relative_to(current_directory))
    return str(absolute)


def check_checkpoint(
    path: str,
    trainer: Trainer,
    model: LightningModule,
    data: Any,
    *,
    resume: bool,
) -> int:
    """Check that the Trainer can use this checkpoint for this model, and can resume from it.

    If the model is no `SpeculativeTraining`, its optimizer's state is checked when the Trainer has
    restored it: see `CheckOptimizers`.

    Args:
        path: the checkpoint.
        trainer: the Trainer of the new run.
        model: the module of the new run.
        data: the data module of the new run.
        resume: whether a run resumes from it; otherwise only its weights are read.

    Returns:
        The optimizer step at which the run resumes; 0 if it does not.

    Raises:
        FileNotFoundError, ValueError: as `checkpoint.load`; and for weights of other networks,
            files without a run's state, runs that are over, and runs of another config.
    """
    if isinstance(model, SpeculativeTraining):
        content = checkpoint_file.read(path)
        reference = checkpoint_file.load(path).reference
        if reference is not None:
            reference.check(model.target, path)
        has_target = reference is None
    else:
        content = archive.read_weights(path)
        has_target = True
    _check_shapes(path, content["state_dict"], model, has_target=has_target)
    if not resume:
        return 0

    if not _is_resumable(content, trainer, model):
        raise ValueError(
            f"{path} holds no training run to resume, or a damaged one: give the last.ckpt of a run"
        )
    if isinstance(model, SpeculativeTraining):
        _check_config(path, content[checkpoint_file.KEY], model, data, trainer)
    _check_not_over(path, content, trainer)
    return int(content["global_step"])


def _check_shapes(
    path: str,
    weights: Mapping[str, Any],
    model: LightningModule,
    *,
    has_target: bool,
) -> None:
    """Raise ValueError unless the weights have the names and shapes of the model's."""
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    model_shapes = {}
    for name, tensor in model.state_dict().items():
        if has_target or not name.startswith(checkpoint_file.TARGET):
            model_shapes[name] = tensor.shape
    if shapes == model_shapes:
        return
    names = shapes.keys() | model_shapes.keys()
    name = min(name for name in names if shapes.get(name) != model_shapes.get(name))
    sizes = (
        f"{name[:80]} is {_size(shapes.get(name))} there and {_size(model_shapes.get(name))} here"
    )
    fitting_path = _fitting_version(Path(path), model_shapes)
    advice = _USE_SAME_CONFIG
    if fitting_path is not None:
        advice = f"give --ckpt_path {fitting_path}, which fits, or {_USE_SAME_CONFIG}"
    raise ValueError(f"{path} has networks of other sizes ({sizes}): {advice}")


def _size(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))


def _fitting_version(path: Path, model_shapes: Mapping[str, torch.Size]) -> str | None:
    """A checkpoint of this name in another version of the run whose weights have these shapes."""
    if not path.parent.name.startswith("version_"):
        return None
    runs_directory = path.parent.parent
    for number in runs.versions(runs_directory)[:_MOST_VERSIONS]:
        candidate = runs_directory / f"version_{number}" / path.name
        if candidate.resolve() == path.resolve() or not candidate.is_file():
            continue
        try:
            weights = archive.read_weights(candidate)["state_dict"]
        except (OSError, ValueError):
            continue  # A damaged file is not a better choice.
        if {name: tensor.shape for name, tensor in weights.items()} == model_shapes:
            return seen_from_here(candidate)
    return None


def _is_resumable(content: Mapping[str, Any], trainer: Trainer, model: LightningModule) -> bool:
    """Whether a file has all of a run's state, of the right types and shapes."""
    try:
        int(content["global_step"])
        fit_loop = content["loops"]["fit_loop"]
        if not _has_structure_of(fit_loop, trainer.fit_loop.state_dict()):
            return False
        if not all(isinstance(state, dict) for state in content["callbacks"].values()):
            return False
        if isinstance(model, SpeculativeTraining):
            optimizer = model.configure_optimizers()
            if not _fits_optimizer(content["optimizer_states"], optimizer):
                return False
        for timer in timers(trainer):
            timer.load_state_dict(content["callbacks"].get(timer.state_key, {}))
        time_left(trainer)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return False
    return True


def _check_not_over(path: str, content: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise ValueError if the run has ended and the new one would end at once."""
    num_epochs = content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    step = int(content["global_step"])
    if trainer.max_epochs not in (None, -1) and num_epochs >= trainer.max_epochs:
        raise ValueError(
            f"{path} has {num_epochs} finished epochs and the run ends after {trainer.max_epochs}: "
            "raise --trainer.max_epochs"
        )
    if 0 <= trainer.max_steps <= step:
        raise ValueError(
            f"{path} is at step {step}, the run ends after {trainer.max_steps}: raise "
            "--trainer.max_steps"
        )
    for callback in trainer.early_stopping_callbacks:
        wait_count = content["callbacks"].get(callback.state_key, {}).get("wait_count")
        if isinstance(wait_count, int) and wait_count >= callback.patience:
            raise ValueError(
                f"{path} is over, EarlyStopping ended the run ({callback.monitor}, patience "
                f"{callback.patience}): resume without it, or begin a new run"
            )
    if time_left(trainer) == 0:
        raise ValueError(
            f"{path} is over, the run's time is used up: give more --minutes or "
            "--trainer.max_time, or begin a new run"
        )


def _check_config(
    path: str,
    described: Mapping[str, Any],
    model: SpeculativeTraining,
    data: Any,
    trainer: Trainer,
) -> None:
    """Raise ValueError if a network, a setting of the training, or its data differ from the file's.

    Settings that an older file does not record are not compared.
    """
    settings = model.settings()
    current = {
        **model.describe(),
        **settings,
        "data": type(data).__name__,
        "gradients": gradient_settings(trainer),
    }
    recorded = networks.current({**described, **described["recipe"]})
    if isinstance(data, TokenData):
        recorded.update(recorded.get("data_arguments", {}))
        current.update(data.arguments())

    # The same target may lie elsewhere by now.
    ignored = {
        "format",
        "recipe",
        "versions",
        "prompts",
        "tokenizer",
        "target_checkpoint",
        "target_adapter",
    }
    if "sha256" in described["target"]:
        ignored.add("target")
    differences = []
    options = []
    for name in current:
        if name in ignored or name not in recorded:
            continue
        plain_value = json.loads(json.dumps(current[name]))
        difference = _difference(name, recorded[name], plain_value)
        if difference is None:
            continue
        differences.append(difference)
        if name in settings and isinstance(recorded[name], str | int | float):
            options.append(f"--model.{name} {recorded[name]}")

    if not differences:
        # Reading all texts takes longest, and another difference is more informative.
        digest = recorded.get("data_digest")
        if digest is not None and digest != model.data_digest(data):
            differences.append("the texts of the data changed, or their order")
    if differences:
        advice = _USE_SAME_CONFIG
        if len(options) == len(differences):
            advice = f"give {' '.join(options)}"
        differences_text = "; ".join(differences[:_MOST_DIFFERENCES])
        raise ValueError(f"{path} cannot resume: {differences_text}: {advice}, or begin a new run")


def _difference(name: str, recorded: Any, current: Any) -> str | None:
    """Describe the first entry in which plain values differ; a missing entry equals None.

    Entries that are only in `current` do not count.
    """
    if isinstance(recorded, list) and isinstance(current, list) and len(recorded) == len(current):
        recorded = dict(enumerate(recorded))
        current = dict(enumerate(current))
    if isinstance(recorded, dict) and isinstance(current, dict):
        for key in recorded:
            difference = _difference(f"{name}.{key}", recorded[key], current.get(key))
            if difference is not None:
                return difference
        return None
    if recorded == current:
        return None
    return f"{name} changed from {str(recorded)[:60]} to {str(current)[:60]}"


def _has_structure_of(state: object, fresh_state: object) -> bool:
    """Whether a state has all entries of a fresh one, of the same types, and no absurd count."""
    if isinstance(fresh_state, dict):
        return isinstance(state, dict) and all(
            key in state and _has_structure_of(state[key], fresh_state[key]) for key in fresh_state
        )
    if type(state) is not type(fresh_state):
        return False
    return not isinstance(state, int) or 0 <= state < 2**53


def _fits_optimizer(states: Any, configured: Any) -> bool:
    """Whether the tensors of a state have the optimizer's shapes.

    A fused step would write beyond the end of smaller ones.
    """
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    (state,) = states
    fresh_groups = optimizer.state_dict()["param_groups"]
    for group, fresh_group in zip(state["param_groups"], fresh_groups, strict=True):
        if not _has_structure_of(group, fresh_group) or group["params"] != fresh_group["params"]:
            return False

    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, entries in state["state"].items():
        for name, tensor in entries.items():
            shape = torch.Size() if name == "step" else weights[index].shape
            if not _is_stored(tensor, shape):
                return False
    return True


def _is_stored(tensor: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a tensor has that shape, and its storage all the elements that it claims to have."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.shape == shape and tensor.untyped_storage().nbytes() >= num_bytes
