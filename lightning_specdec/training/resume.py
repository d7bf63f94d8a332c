"""Whether the Trainer can use a checkpoint, found out before it starts.

The Trainer restores loops, callbacks and optimizers by itself and trusts what it finds. Adam's fused step trusts the
shapes in its state so far as to write beyond its memory, so whatever is restored is compared with what it will replace.
A run that goes on with other settings would keep some of the old ones in silence (Adam's learning rate comes from the
checkpoint), so what it was trained with is compared too.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor

from lightning_specdec import checkpoint as checkpoint_file
from lightning_specdec.data import TokenData
from lightning_specdec.description import spec
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.checkpoint_io import VERSION_KEY
from lightning_specdec.training.muon import MuonAdamW

_CONFIG = "give the config and the --data options that it was trained with"


def check_trainer_state(
    path: str, trainer: Trainer, model: LightningModule, data: LightningDataModule | None, *, resume: bool
) -> None:
    """Raise unless the Trainer can use this checkpoint for this model, or resume from it with these data.

    Raises:
        FileNotFoundError, ValueError: as `checkpoint.load`; and for files without what the Trainer needs, weights of
            other networks, runs that are already over, and runs of another config.
    """
    reference = checkpoint_file.load(path).reference
    content = checkpoint_file.read(path)
    if "hyper_parameters" in content:
        raise ValueError(f"{path} holds hyperparameters for another program to build: give a checkpoint of this one")
    if not re.fullmatch(r"\d+(\.\w+)+", str(content.get(VERSION_KEY, "0.0"))):
        raise ValueError(f"{path} does not say which version wrote it: make it again")
    if reference is not None and isinstance(model, SpeculativeTraining):
        reference.check(model.target, path)
    if resume and isinstance(model, SpeculativeTraining) and isinstance(data, TokenData):
        _check_config(path, content[checkpoint_file.KEY], model, data)
    wanted = model.state_dict()
    if reference is not None:
        wanted = {name: value for name, value in wanted.items() if not name.startswith(checkpoint_file.TARGET)}
    for name, tensor in wanted.items():
        stored = content["state_dict"].get(name)
        if stored is None or stored.shape != tensor.shape:
            found = "is not there" if stored is None else f"has the shape {tuple(stored.shape)}"
            raise ValueError(
                f"{path} is of other networks ({name} {found}, {tuple(tensor.shape)} is needed): {_CONFIG}"
            )
    if foreign := content["state_dict"].keys() - wanted.keys():
        raise ValueError(f"{path} is of other networks ({min(foreign)[:80]} has no place here): {_CONFIG}")
    callbacks = content.get("callbacks", {})
    if not isinstance(callbacks, dict) or not all(isinstance(state, dict) for state in callbacks.values()):
        raise ValueError(f"{path} holds no usable callbacks: give another checkpoint of that run")
    if resume:
        _check_run(path, content, trainer, model)


def _check_config(path: str, described: Mapping[str, Any], model: SpeculativeTraining, data: TokenData) -> None:
    """Raise ValueError where the run was trained with something else than what is given now, which it names.

    Settings that the checkpoint does not know, since an older version wrote it, may be anything.
    """
    recipe = described["recipe"]
    now = model.describe()
    given: dict[str, Any] = {"training": type(model).__name__, **model.settings()}
    given |= {"data": type(data).__name__, "data_arguments": data.arguments()}
    if "sha256" not in described["target"]:  # it holds the target's weights, and says how that is built
        now["target"] = spec(model.target)
    elif "sha256" in now["target"]:  # the same target, which may have moved
        now["target"]["source"] = described["target"]["source"]
        given.pop("target_checkpoint", None)
    pairs = [(recipe.get(name), value, name) for name, value in given.items() if name in recipe]
    parts = ("target", "drafter", "name", "others")
    pairs += [(described.get(name), now.get(name), name) for name in parts if name in described or name in now]
    for before, after, name in pairs:
        if (changed := _difference(before, json.loads(json.dumps(after)), name)) is not None:
            raise ValueError(f"{path} cannot go on as it began: {changed}: {_CONFIG}, or begin a new run")


def _difference(before: object, after: object, name: str) -> str | None:
    """The first difference between two plain values, by its place; None where they are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        # As a person would name it: `target.hidden_size`, where a description says `target.arguments.hidden_size`.
        for key in [*before, *(key for key in after if key not in before)]:
            place = name if key in ("arguments", "model") else f"{name}.{key}"
            if (found := _difference(before.get(key), after.get(key), place)) is not None:
                return found
        return None
    if before == after:
        return None
    return f"{name} was {_shown(before)} and is {_shown(after)} now"


def _shown(value: object) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_run(path: str, content: Mapping[str, Any], trainer: Trainer, model: LightningModule) -> None:
    """Raise unless the checkpoint holds a run that this Trainer can go on with."""
    wanted = {"epoch": int, "global_step": int, "loops": dict, "optimizer_states": list, "lr_schedulers": list}
    if missing := [key for key, kind in wanted.items() if not isinstance(content.get(key), kind)]:
        raise ValueError(
            f"{path} holds models but no training run to resume (no {', '.join(missing)}): give the last.ckpt or "
            "best.ckpt of a run"
        )
    damaged = f"{path} holds a training run that cannot be resumed (its %s): give another checkpoint of that run"
    if not _alike(content["loops"].get("fit_loop"), trainer.fit_loop.state_dict()):
        raise ValueError(damaged % "counts of epochs and steps are damaged")
    configured: Any = model.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    assert isinstance(optimizer, torch.optim.Optimizer)
    states = content["optimizer_states"]
    if len(states) != 1 or not _fits(states[0], optimizer):
        raise ValueError(damaged % "optimizer's state is not that of this model's optimizer")
    epochs = content["epoch"] + 1
    if trainer.max_epochs not in (None, -1) and epochs >= trainer.max_epochs:
        raise ValueError(
            f"{path} has {epochs} epochs behind it and the run ends after {trainer.max_epochs}: "
            "raise --trainer.max_epochs"
        )


def _alike(given: object, fresh: object) -> bool:
    """Whether a state has every entry of a fresh one, of the same kind; counts are not negative and not absurd."""
    if isinstance(fresh, dict):
        return isinstance(given, dict) and all(key in given and _alike(given[key], fresh[key]) for key in fresh)
    if type(given) is not type(fresh):
        return False
    return not isinstance(given, int) or 0 <= given < 2**53


def _fits(state: object, optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's state is one that this optimizer could have reached: each number where it belongs."""
    fresh = optimizer.state_dict()["param_groups"]
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    parts = optimizer.parts if isinstance(optimizer, MuonAdamW) else [optimizer]
    kinds_of = [(part, _state_kinds(part)) for part in parts]
    weights = [(each, kinds) for part, kinds in kinds_of for group in part.param_groups for each in group["params"]]
    if not isinstance(groups, list) or len(groups) != len(fresh):
        return False
    for given, group in zip(groups, fresh, strict=True):
        if not isinstance(given, dict) or given.keys() != group.keys() or given["params"] != group["params"]:
            return False
        if not all(_same_kind(given[key], group[key]) for key in group):
            return False
    if not state["state"].keys() <= set(range(len(weights))):
        return False
    for index, entries in state["state"].items():
        weight, kinds = weights[index]
        if not isinstance(entries, dict) or entries.keys() != kinds.keys():
            return False
        for key, is_scalar in kinds.items():
            shape = torch.Size() if is_scalar else weight.shape
            value = entries[key]
            if not isinstance(value, Tensor) or value.shape != shape or not _is_plain(value):
                return False
    return True


def _same_kind(given: object, fresh: object) -> bool:
    if isinstance(fresh, tuple | list):
        return isinstance(given, tuple | list) and len(given) == len(fresh) and all(map(_same_kind, given, fresh))
    if isinstance(fresh, float | int) and not isinstance(fresh, bool):
        return isinstance(given, float | int) and not isinstance(given, bool)
    return type(given) is type(fresh)


def _state_kinds(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    """What this kind of optimizer remembers of a weight, and whether that is a single number."""
    weight = torch.zeros(2, 3, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    taken = inspect.signature(type(optimizer)).parameters  # AdamW has defaults that its constructor refuses
    given = {name: value for name, value in optimizer.defaults.items() if name in taken}
    probe = type(optimizer)([weight], **given)
    probe.step()
    return {key: value.dim() == 0 for key, value in probe.state[weight].items()}


def _is_plain(value: Tensor) -> bool:
    whole = value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    return value.dtype.is_floating_point and value.layout == torch.strided and value.device.type == "cpu" and whole
