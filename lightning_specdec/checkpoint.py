"""A checkpoint file <-> models, without running anything that the file says.

Knows nothing of training: a training checkpoint and an exported one are read alike.

A checkpoint names its classes from our own registries and gives their arguments as plain values; the constructors check
the ranges. Networks are built without memory (on the meta device) and take the file's weights, which must fit exactly.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_specdec.drafters import DRAFTERS, Drafter
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.models import MODELS, LanguageModel

KEY = "lightning_specdec"
FORMAT = 1
_FLOATS = {"torch.float64", "torch.float32", "torch.bfloat16", "torch.float16"}
_BROKEN = (pickle.UnpicklingError, OSError, EOFError, KeyError, RuntimeError, UnicodeDecodeError, ValueError, TypeError)


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Args:
        target: the model whose output is wanted.
        drafter: what guesses for it.
        prompts: held-out prompts to try it on.
        recipe: how it was made, as plain values.
        training: what a training checkpoint holds besides: epoch and step; empty in an exported one.
    """

    target: LanguageModel
    drafter: Drafter
    prompts: list[list[int]]
    recipe: dict[str, Any]
    training: dict[str, int]


def describe(
    target: LanguageModel, drafter: Drafter, *, prompts: Sequence[Sequence[int]], recipe: dict[str, Any]
) -> dict[str, Any]:
    """What goes into a checkpoint under `KEY`, beside weights named `target.*` and `drafter.*`."""
    return {
        "format": FORMAT,
        "target": _spec(target),
        "drafter": _spec(drafter),
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "recipe": recipe,
    }


def _spec(module: LanguageModel | Drafter) -> dict[str, Any]:
    arguments: dict[str, Any] = module.arguments()
    plain = {k: _spec(v) if isinstance(v, LanguageModel | Drafter) else v for k, v in arguments.items()}
    return {"class": type(module).__name__, "arguments": plain}


def save(
    path: str | os.PathLike[str],
    target: LanguageModel,
    drafter: Drafter,
    *,
    prompts: Sequence[Sequence[int]] = (),
    recipe: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint for decoding: descriptions and weights, nothing of the training. Whole or not at all."""
    weights = {f"target.{name}": value for name, value in target.state_dict().items()}
    weights |= {f"drafter.{name}": value for name, value in drafter.state_dict().items()}
    content = {KEY: describe(target, drafter, prompts=prompts, recipe=recipe or {}), "state_dict": weights}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint's content as plain values and tensors, checked to be ours.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of this program, or a broken one. Nothing in it has run.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint; `lightning_specdec fit --config ...` writes one")
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name the checkpoint file in it")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty: the copy or the run that wrote it was cut off; make it again")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _BROKEN as error:
        raise ValueError(_why_unreadable(path, error)) from error
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict):
        raise ValueError(f"{path} is no checkpoint of this program: it has no {KEY!r} entry; train one with `fit`")
    if content[KEY].get("format") != FORMAT:
        found = content[KEY].get("format")
        raise ValueError(f"{path} has checkpoint format {found!r}, this version reads {FORMAT}: update or train anew")
    weights = content.get("state_dict")
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} holds no weights: the run that wrote it was cut off; make it again")
    return content


def _why_unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        head = file.read(4)
    if isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error) and head[:2] == b"PK":
        return f"{path} asks to run code when it is opened, so it was refused: take checkpoints only from this program"
    if head[:2] == b"PK":
        return f"{path} is truncated or damaged: copy it again, or go back to another checkpoint of that run"
    return f"{path} is no checkpoint: expected the file that `lightning_specdec fit` writes"


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Build what a checkpoint describes, with its weights.

    Raises:
        FileNotFoundError, ValueError: as `read`; and for descriptions out of range or weights that do not fit them.
    """
    content = read(path)
    described, weights = content[KEY], content["state_dict"]
    try:
        with torch.device("meta"):
            target = _build(described.get("target"), MODELS)
            drafter = _build(described.get("drafter"), DRAFTERS)
        for name, module in (("target", target), ("drafter", drafter)):
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            if len(kinds := {str(value.dtype) for value in own.values()}) > 1 or not kinds <= _FLOATS:
                raise ValueError(f"the weights of the {name} are {sorted(kinds)}, expected one floating-point kind")
            module.load_state_dict(own, strict=True, assign=True)
        drafter.check_target(target)
        prompts = [list(prompt) for prompt in described.get("prompts", [])]
        for prompt in prompts:
            check_prompt(prompt, target.vocab_size, "a stored prompt")
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} does not describe its own weights: {reason[:300]}") from error
    recipe = described.get("recipe")
    training = {key: content[key] for key in ("epoch", "global_step") if isinstance(content.get(key), int)}
    return Checkpoint(target.eval(), drafter.eval(), prompts, recipe if isinstance(recipe, dict) else {}, training)


def _build(spec: object, registry: dict[str, Any]) -> Any:
    """An object of a registered class from its description."""
    if not isinstance(spec, dict) or not isinstance(spec.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {str(spec)[:80]!r}")
    name = spec.get("class")
    if name not in registry:
        raise ValueError(f"{str(name)[:80]!r} is none of the classes that a checkpoint may name: {', '.join(registry)}")
    arguments = {k: _build(v, MODELS) if isinstance(v, dict) else v for k, v in spec["arguments"].items()}
    return registry[name](**arguments)
