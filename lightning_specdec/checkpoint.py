"""A checkpoint file <-> models, without running anything that the file says.

Knows nothing of training: a training checkpoint and an exported one are read alike.

A checkpoint names its classes from our own registries and gives their arguments as plain values; the constructors check
the ranges. Networks are built without memory (on the meta device) and take the file's weights, which must fit exactly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_specdec import archive
from lightning_specdec.drafters import DRAFTERS, Drafter
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.models import MODELS, LanguageModel

KEY = "lightning_specdec"
FORMAT = 1
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}


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
    name = type(module).__name__
    if {**MODELS, **DRAFTERS}.get(name) is not type(module):
        raise ValueError(f"a checkpoint cannot hold a {name}: it could not be built again (see MODELS and DRAFTERS)")
    arguments: dict[str, Any] = module.arguments()
    plain = {k: _spec(v) if isinstance(v, LanguageModel | Drafter) else v for k, v in arguments.items()}
    return {"class": name, "arguments": plain}


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
    archive.write(path, content)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint's content as plain values and tensors, checked to be ours.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint of this program, or a broken one. Nothing in it has run.
    """
    content = archive.read(path)
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict):
        raise ValueError(f"{path} is no checkpoint of this program: it has no {KEY!r} entry; train one with `fit`")
    found = content[KEY].get("format")
    if type(found) is not int or found != FORMAT:
        found = _short(repr(found), 40)
        raise ValueError(f"{path} has checkpoint format {found}, this version reads {FORMAT}: update or train anew")
    weights = content.get("state_dict")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        raise ValueError(f"{path} holds no weights: the run that wrote it was cut off; make it again")
    return content


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Build what a checkpoint describes, with its weights.

    Raises:
        FileNotFoundError, ValueError: as `read`; and for descriptions out of range or weights that do not fit them.
    """
    content = read(path)
    described, weights = content[KEY], content["state_dict"]
    try:
        with torch.device("meta"), _Unset():
            target = _build(described.get("target"), MODELS)
            drafter = _build(described.get("drafter"), DRAFTERS)
        for name, module in (("target", target), ("drafter", drafter)):
            prefix = f"{name}."
            own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            _check_weights(name, own, module.state_dict())
            module.load_state_dict(own, strict=True, assign=True)
        drafter.check_target(target)
        prompts = described.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(prompt, list) for prompt in prompts):
            raise ValueError("its prompts are no lists of tokens")
        for prompt in prompts:
            check_prompt(prompt, target.vocab_size, "a stored prompt")
        recipe = _plain(described.get("recipe"))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        reason = _short(" ".join(str(error).split()), 300)
        raise ValueError(f"{path} is no usable checkpoint, train another: {reason}") from error
    training = {key: content[key] for key in ("epoch", "global_step") if type(content.get(key)) is int}
    return Checkpoint(target.eval(), drafter.eval(), prompts, recipe, training)


class _Unset(TorchFunctionMode):
    """Leaves new weights unset: the file's take their place, and setting one without memory takes torch a second."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def _check_weights(owner: str, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the given weights are those that the description wants, whole and finite."""
    if missing := wanted.keys() - given.keys():
        raise ValueError(
            f"the weights of the {owner} lack {min(missing)} ({len(missing)} of {len(wanted)} are missing)"
        )
    if foreign := given.keys() - wanted.keys():
        raise ValueError(f"among the weights of the {owner} is {_short(min(foreign), 80)!r}, which it has no place for")
    for name, value in given.items():
        if value.shape != wanted[name].shape:
            shapes = f"{tuple(value.shape)}, its description says {tuple(wanted[name].shape)}"
            raise ValueError(f"the shape of the {owner}'s {name} is {shapes}")
        if value.dtype not in _FLOATS or value.layout != torch.strided or value.device.type != "cpu":
            kind = f"{value.dtype}, {value.layout}, on {value.device}"
            raise ValueError(f"the {owner}'s {name} is no plain floating-point tensor ({kind})")
        if value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise ValueError(f"the {owner}'s {name} claims more numbers than the file holds")
        if not value.isfinite().all():
            raise ValueError(f"the {owner}'s {name} is not finite: its training diverged, so lower the learning rate")
    if len(kinds := {str(value.dtype) for value in given.values()}) > 1:
        raise ValueError(f"the weights of the {owner} are of several kinds: {', '.join(sorted(kinds))}")


def _plain(recipe: object) -> dict[str, Any]:
    """The recipe, if it is a dictionary of plain values and nothing else."""
    try:
        plain = json.loads(json.dumps(recipe))
    except (TypeError, ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise ValueError("its recipe is no dictionary of plain values")
    return plain


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _build(spec: object, registry: dict[str, Any]) -> Any:
    """An object of a registered class from its description."""
    if not isinstance(spec, dict) or not isinstance(spec.get("arguments"), dict):
        raise ValueError(f"expected a class and its arguments, got {_short(repr(spec), 80)}")
    name = spec.get("class")
    if not isinstance(name, str) or name not in registry:
        raise ValueError(f"{_short(repr(name), 80)} is none of the classes that may stand there: {', '.join(registry)}")
    arguments = {k: _build(v, MODELS) if isinstance(v, dict) else v for k, v in spec["arguments"].items()}
    built = registry[name](**arguments)
    if foreign := arguments.keys() - built.arguments().keys():
        raise ValueError(f"a checkpoint's {name} has no argument {_short(min(foreign), 80)!r}")
    return built
