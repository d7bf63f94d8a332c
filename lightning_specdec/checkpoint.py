"""A checkpoint file <-> models, without running anything that the file says.

A checkpoint names its classes from our own registries and gives their arguments as plain values; the constructors check
the ranges. Networks are built without memory (on the meta device) and take the file's weights, which must fit exactly.
A target has one drafter that guesses for it unless another is asked for, and may have others, each with a name. One
that was not trained may lie elsewhere: the file then says which target it is, and holds none of its weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec import archive
from lightning_specdec.checkpoint_weights import BROKEN, KINDS, stored_as, try_out, with_weights
from lightning_specdec.description import build, plain, short, spec
from lightning_specdec.drafters import DRAFTERS, Drafter
from lightning_specdec.inference.rows import check_prompt
from lightning_specdec.models import MODELS, LanguageModel
from lightning_specdec.target_reference import TargetReference

KEY = "lightning_specdec"
FORMAT = 1
MAIN = "main"
"""What the drafter is called that guesses unless another is asked for, where it has no other name."""
TARGET, _OTHERS = "target.", "others."
"""What the names of their weights begin with."""


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Args:
        make_target: gives the model whose output is wanted.
        drafter: what guesses for it.
        prompts: held-out prompts to try it on.
        recipe: how it was made, as plain values.
        training: what a training checkpoint holds besides: epoch and step; empty in an exported one.
        others: what else can guess for it, by name.
        name: the drafter's own name.
        tokenizer: what makes tokens of text: a name, or a directory; None where tokens are no text.
        reference: which target it is, where that lies elsewhere; None where the file holds it.
    """

    make_target: Callable[[], LanguageModel]
    drafter: Drafter
    prompts: list[list[int]]
    recipe: dict[str, Any]
    training: dict[str, int]
    others: dict[str, Drafter] = field(default_factory=dict)
    name: str = MAIN
    tokenizer: str | None = None
    reference: TargetReference | None = None

    @cached_property
    def target(self) -> LanguageModel:
        """The model whose output is wanted; one that lies elsewhere is loaded when it is first asked for.

        Raises:
            ValueError: it is not there, or is another.
        """
        return self.make_target()

    @property
    def drafters(self) -> dict[str, Drafter]:
        """All of them by name, the one that guesses unless another is asked for first."""
        return {self.name: self.drafter, **self.others}

    def draft(self, name: str | None = None) -> Drafter:
        """The drafter of that name.

        Raises:
            ValueError: there is none.
        """
        chosen = self.name if name is None else name
        if chosen not in self.drafters:
            raise ValueError(f"the checkpoint has no draft {short(chosen, 80)!r}: it has {', '.join(self.drafters)}")
        return self.drafters[chosen]


def describe(
    target: LanguageModel | TargetReference,
    drafter: Drafter,
    *,
    prompts: Sequence[Sequence[int]],
    recipe: dict[str, Any],
    others: Mapping[str, Drafter] | None = None,
    name: str = MAIN,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """What goes into a checkpoint under `KEY`, beside weights named `target.*`, `drafter.*` and `others.NAME.*`.

    Args:
        target: the target; or which one it is, where its weights are not stored.
    """
    described = {
        "format": FORMAT,
        "target": target.described() if isinstance(target, TargetReference) else spec(target),
        "drafter": spec(drafter),
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "recipe": recipe,
    }
    if others or name != MAIN:
        described |= {"name": name, "others": {key: spec(other) for key, other in (others or {}).items()}}
        _check_names(described["others"], name)
    return described if tokenizer is None else {**described, "tokenizer": tokenizer}


def save(
    path: str | os.PathLike[str],
    target: LanguageModel | TargetReference,
    drafter: Drafter,
    *,
    prompts: Sequence[Sequence[int]] = (),
    recipe: dict[str, Any] | None = None,
    others: Mapping[str, Drafter] | None = None,
    name: str = MAIN,
    tokenizer: str | None = None,
    dtype: str | None = None,
) -> None:
    """Write a checkpoint for decoding: descriptions and weights, nothing of the training. Whole or not at all.

    Args:
        target: as of `describe`.
        dtype: what the weights are stored as, for a smaller file; what reads it computes in the type that they had.
    """
    described = describe(
        target, drafter, prompts=prompts, recipe=recipe or {}, others=others, name=name, tokenizer=tokenizer
    )
    parts: dict[str, nn.Module] = {} if isinstance(target, TargetReference) else {TARGET: target}
    parts |= {"drafter.": drafter}
    parts |= {f"{_OTHERS}{key}.": other for key, other in (others or {}).items()}
    weights = {prefix + key: value for prefix, part in parts.items() for key, value in part.state_dict().items()}
    if dtype is not None and weights:
        described["computes_in"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    archive.write(path, {KEY: described, "state_dict": stored_as(weights, dtype)})


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
        found = short(repr(found), 40)
        raise ValueError(f"{path} has checkpoint format {found}, this version reads {FORMAT}: update or train anew")
    weights = content.get("state_dict")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in weights.items()
    ):
        raise ValueError(f"{path} holds no weights: the run that wrote it was cut off; make it again")
    return content


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a checkpoint as `save` writes it: of this program, and with nothing of a training in it."""
    try:
        return os.path.isfile(path) and read(path).keys() == {KEY, "state_dict"}
    except ValueError:
        return False


def load(path: str | os.PathLike[str], *, target: str | LanguageModel | None = None) -> Checkpoint:
    """Build what a checkpoint describes, with its weights.

    Args:
        target: of a checkpoint whose target lies elsewhere, where that is now, or the target itself.

    Raises:
        FileNotFoundError, ValueError: as `read`; and for descriptions out of range or weights that do not fit them.
    """
    content = read(path)
    described, weights = content[KEY], content["state_dict"]
    if target is not None and not _is_elsewhere(described):
        raise ValueError(f"{path} holds its target itself, and decodes with no other: leave --target out")
    try:
        others, name = described.get("others", {}), described.get("name", MAIN)
        _check_names(others, name)
        if foreign := [key for key in weights if key.startswith(_OTHERS) and key.split(".")[1] not in others]:
            raise ValueError(f"among its weights is {short(foreign[0], 80)!r}, and it describes no such draft")
        reference, held = reference_of(content), None
        if reference is None:
            held = _part("target", described.get("target"), MODELS, weights)
        drafter = _part("drafter", described.get("drafter"), DRAFTERS, weights)
        built = {key: _part(_OTHERS + key, other, DRAFTERS, weights) for key, other in others.items()}
        drafters = (drafter, *built.values())
        if (kind := described.get("computes_in")) is not None:
            for each in drafters if held is None else (held, *drafters):
                each.to(_kind(kind))
        for each in drafters if held is not None else ():
            each.check_target(held)
        known = reference or held
        assert known is not None
        prompts = described.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(prompt, list) for prompt in prompts):
            raise ValueError("its prompts are no lists of tokens")
        for prompt in prompts:
            check_prompt(prompt, known.vocab_size, "a stored prompt")
        recipe = plain(described.get("recipe"))
        tokenizer = described.get("tokenizer")
        if tokenizer is not None and not isinstance(tokenizer, str):
            raise ValueError("its tokenizer is no name")
    except BROKEN as error:
        reason = short(" ".join(str(error).split()), 300)
        raise ValueError(f"{path} is no usable checkpoint, train another: {reason}") from error
    training = {key: content[key] for key in ("epoch", "global_step") if type(content.get(key)) is int}

    def the_target() -> LanguageModel:
        if held is not None:
            return held
        assert reference is not None
        found = reference.load(target, str(path))
        for each in drafters:
            each.check_target(found)
        return found

    return Checkpoint(the_target, drafter, prompts, recipe, training, built, name, tokenizer, reference)


def _is_elsewhere(described: Mapping[str, Any]) -> bool:
    return isinstance(described.get("target"), dict) and "sha256" in described["target"]


def reference_of(content: Mapping[str, Any]) -> TargetReference | None:
    """Which target a checkpoint means, where it holds none itself.

    Args:
        content: of the file; an empty one means none.

    Raises:
        ValueError: it does not say that clearly, or holds one all the same.
    """
    if not _is_elsewhere(described := content.get(KEY, {})):
        return None
    reference = TargetReference.read(described["target"])
    if reference.source is None or reference.sha256 is None:
        raise ValueError("it holds no target and does not say which one it means")
    if foreign := [key for key in content["state_dict"] if key.startswith(TARGET)]:
        raise ValueError(f"among its weights is {short(foreign[0], 80)!r}, and its target lies elsewhere")
    return reference


def _kind(name: object) -> torch.dtype:
    """The type that a checkpoint's networks compute in."""
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"it computes in {short(repr(name), 40)}, which is none of {', '.join(sorted(KINDS))}")
    return KINDS[name]


def _check_names(others: object, name: object) -> None:
    """Raise ValueError unless these can be the names of drafters: weights are found by them."""
    names = [name, *others] if isinstance(others, dict) else [None]
    if not all(isinstance(each, str) and each.isidentifier() and len(each) <= 80 for each in names):
        raise ValueError("its drafts' names are no words")
    if len(set(names)) < len(names):
        raise ValueError(f"it has two drafts of the name {name}")


def _part(name: str, described: object, registry: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """A target or a drafter as it is described, with its weights."""
    owner, prefix = name.replace(_OTHERS, "draft "), f"{name}."
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    module = with_weights(partial(build, described, registry), owner, own).eval()
    try_out(owner, module)
    return module
