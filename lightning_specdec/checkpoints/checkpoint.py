"""A checkpoint or draft file <-> a target and its drafters, without running anything that the file says.

A file names its classes and gives their arguments as plain values, beside the weights. A target has one drafter that
drafts unless another is asked for, and may have others, each with a name. A target that was not trained may lie
elsewhere: the file then says which one it is (`TargetReference`) and holds none of its weights, as every draft file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec import __version__
from lightning_specdec.checkpoints import archive
from lightning_specdec.checkpoints.archive import BROKEN, FORMAT, KEY, read
from lightning_specdec.checkpoints.networks import FLOATS, build, spec, with_weights
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import DRAFTERS, MODELS, Kinds
from lightning_specdec.config.terminal import short
from lightning_specdec.decoding.rows import check_prompt
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

MAIN = "main"
"""Name of the drafter that drafts unless another is asked for, where it has no other."""
TARGET, _DRAFTER, _OTHERS = "target.", "drafter.", "others."
"""Prefixes of the weights' names, which are those of the training modules."""
_SCALE = ".int8_scale"
"""Suffix of the scales of a matrix in int8, one for each row."""


@dataclass
class LoadedPair:
    """A target and its drafter, as a file or names gave them.

    Args:
        make_target: gives the target; called when it is first asked for.
        drafter: the drafter that was chosen.
        drafts: all drafters by name; the first one drafts unless another is asked for.
        prompts: held-out prompts to try it on.
        recipe: how it was made, as plain values.
        tokenizer: name or directory of the tokenizer; None where tokens are not text.
        num_draft_tokens: draft tokens per round that the pair recommends; None where it says nothing.
        reference: which target it is, where that lies elsewhere; None where the file holds it.
        training: epoch and step of a training run.
    """

    make_target: Callable[[], LanguageModel]
    drafter: Drafter
    drafts: dict[str, Drafter]
    prompts: list[list[int]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    num_draft_tokens: int | str | None = None
    reference: TargetReference | None = None
    training: dict[str, int] = field(default_factory=dict)

    @cached_property
    def target(self) -> LanguageModel:
        """The target; one that lies elsewhere is loaded when it is first asked for.

        Raises:
            ValueError: it is not there, or is another.
        """
        return self.make_target()

    def draft(self, name: str | None = None) -> Drafter:
        """The drafter of that name, the first one when None.

        Raises:
            ValueError: there is none.
        """
        chosen = next(iter(self.drafts)) if name is None else name
        if chosen not in self.drafts:
            raise ValueError(f"the checkpoint has no draft {short(chosen, 80)!r}: it has {', '.join(self.drafts)}")
        return self.drafts[chosen]


def describe(
    target: LanguageModel | TargetReference,
    drafts: Drafter | Mapping[str, Drafter],
    *,
    prompts: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """The document of a checkpoint, beside weights named `target.*`, `drafter.*` and `others.NAME.*`.

    Args:
        target: the target; or which one it is, where its weights are not stored.
        drafts: the drafter; or several by name, the first of which drafts unless another is asked for.
    """
    (name, drafter), *others = _named(drafts).items()
    document: dict[str, Any] = {
        "format": FORMAT,
        "target": target.described() if isinstance(target, TargetReference) else spec(target),
        "drafter": spec(drafter),
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "recipe": _plain(dict(recipe or {})),
        "versions": {"lightning_specdec": __version__, "torch": str(torch.__version__)},
    }
    if others or name != MAIN:
        document |= {"name": name, "others": {key: spec(other) for key, other in others}}
        _check_names(document["others"], name)
    return document if tokenizer is None else {**document, "tokenizer": tokenizer}


def save(
    path: str | os.PathLike[str],
    target: LanguageModel | TargetReference,
    drafts: Drafter | Mapping[str, Drafter],
    *,
    prompts: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
) -> None:
    """Write a pair for decoding, or a draft file if `target` is a reference: whole or not at all, as safetensors.

    Args:
        prompts, recipe, tokenizer, drafts: as of `describe`, `LoadedPair`.
        dtype: store weights in this type, for a smaller file: a floating-point type, or int8 (a scale for each row of
            a matrix; vectors stay as they are). Whoever reads the file computes in the type that they had.

    Raises:
        ValueError: a part cannot be built again, a weight does not fit the type, or no file can be put there.
    """
    document = describe(target, drafts, prompts=prompts, recipe=recipe, tokenizer=tokenizer)
    first, *others = _named(drafts).items()
    parts: dict[str, nn.Module] = {} if isinstance(target, TargetReference) else {TARGET: target}
    parts |= {_DRAFTER: first[1], **{f"{_OTHERS}{key}.": other for key, other in others}}
    weights: dict[str, Tensor] = {}
    places = set()
    for prefix, part in parts.items():
        for name, value in part.state_dict().items():
            if value.dtype not in FLOATS.values() or value.layout != torch.strided:
                raise ValueError(f"{prefix}{name} is packed or quantized: save the models as they were loaded")
            place = (prefix, value.data_ptr(), value.shape, value.stride())
            if value.numel() == 0 or place not in places:  # a weight of several names is written once
                weights[prefix + name] = value.detach().cpu().contiguous().clone()
            places.add(place)
    if dtype is not None and weights:
        document["computes_in"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        weights = _stored_as(weights, dtype)
    archive.write_document(path, document, weights)


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file as `save` writes it: of this program, and with nothing of a training in it."""
    try:
        return os.path.isfile(path) and read(path).keys() == {KEY, "state_dict"}
    except ValueError:
        return False


def load(
    path: str | os.PathLike[str], *, target: str | LanguageModel | None = None, drafter: str | None = None
) -> LoadedPair:
    """Build what a file describes, with its weights.

    Args:
        target: of a file whose target lies elsewhere, where that is now, or the target itself.
        drafter: import path of a drafter of your own. A file that names one is read only if it is the same.

    Raises:
        FileNotFoundError, ValueError: as `archive.read`; and for descriptions out of range or weights that do not fit.
    """
    content = read(path)
    document, weights = content[KEY], content["state_dict"]
    if target is not None and not _is_elsewhere(document):
        raise ValueError(f"{path} holds its target itself, and decodes with no other: leave --target out")
    try:
        others, name = document.get("others", {}), document.get("name", MAIN)
        _check_names(others, name)
        if foreign := [key for key in weights if key.startswith(_OTHERS) and key.split(".")[1] not in others]:
            raise ValueError(f"among its weights is {short(foreign[0], 80)!r}, and it describes no such draft")
        dtype = _dtype(document)
        weights = _dequantized(weights, dtype)
        part = partial(_part, weights=weights, dtype=dtype, trusted=drafter)
        reference = reference_of(content)
        held = None if reference is not None else part("target", document.get("target"), MODELS)
        drafts = {name: part("drafter", document.get("drafter"), DRAFTERS)}
        drafts |= {key: part(_OTHERS + key, other, DRAFTERS) for key, other in others.items()}
        for each in drafts.values() if held is not None else ():
            each.check_target(held)
        vocab_size, prompts = (reference or held).vocab_size, document.get("prompts")  # type: ignore[union-attr]
        if not isinstance(prompts, list) or not all(isinstance(prompt, list) for prompt in prompts):
            raise ValueError("its prompts are no lists of tokens")
        for prompt in prompts:
            check_prompt(prompt, vocab_size, "a stored prompt")
        recipe, tokenizer = _plain(document.get("recipe")), document.get("tokenizer")
        if tokenizer is not None and not isinstance(tokenizer, str):
            raise ValueError("its tokenizer is no name")
        window = recipe.get("num_draft_tokens")
        if window is not None:
            require_int("num_draft_tokens of its recipe", window, 1, MAX_TOKENS)
    except BROKEN as error:
        reason = short(" ".join(str(error).split()), 300)
        raise ValueError(f"{path} is no usable checkpoint: {reason}") from error

    def find_target() -> LanguageModel:
        if held is not None:
            return held
        assert reference is not None
        found = reference.load(target, str(path))
        for each in drafts.values():
            try:
                each.check_target(found)
                _check_ends(each, found)
            except ValueError as error:
                raise ValueError(f"{path} does not fit its target: {error}") from error
        return found

    training = {key: content[key] for key in ("epoch", "global_step") if type(content.get(key)) is int}
    return LoadedPair(find_target, drafts[name], drafts, prompts, recipe, tokenizer, window, reference, training)


def reference_of(content: Mapping[str, Any]) -> TargetReference | None:
    """Which target a checkpoint means, where it holds none itself.

    Args:
        content: of the file; an empty one means none.

    Raises:
        ValueError: it does not say that clearly, or holds one all the same.
    """
    if not _is_elsewhere(document := content.get(KEY, {})):
        return None
    if foreign := [key for key in content["state_dict"] if key.startswith(TARGET)]:
        raise ValueError(f"among its weights is {short(foreign[0], 80)!r}, and its target lies elsewhere")
    return TargetReference.read(document["target"])


def _is_elsewhere(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("target"), dict) and "sha256" in document["target"]


def _named(drafts: Drafter | Mapping[str, Drafter]) -> dict[str, Drafter]:
    return {MAIN: drafts} if isinstance(drafts, Drafter) else dict(drafts)


def _check_names(others: object, name: object) -> None:
    """Raise ValueError unless these can be the names of drafters: weights are found by them."""
    names = [name, *others] if isinstance(others, dict) else [None]
    if not all(isinstance(each, str) and each.isidentifier() and len(each) <= 80 for each in names):
        raise ValueError("draft names must be identifiers of at most 80 characters")
    if len(set(names)) < len(names):
        raise ValueError(f"it has two drafts of the name {name}")


def _plain(recipe: object) -> dict[str, Any]:
    """The recipe, if it is a dictionary of plain values and nothing else."""
    try:
        copied = json.loads(json.dumps(recipe))
    except (TypeError, ValueError, RecursionError):
        copied = None
    if not isinstance(copied, dict):
        raise ValueError("its recipe is no dictionary of plain values")
    return copied


def _part(
    name: str,
    described: object,
    kinds: Kinds,
    *,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    trusted: str | None,
) -> Any:
    """A target or a drafter as it is described, with its weights."""
    owner, prefix = name.replace(_OTHERS, "draft "), f"{name}."
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    module = with_weights(partial(build, described, (kinds,), trusted), owner, own)
    return module if dtype is None else module.to(dtype)


def _dtype(document: Mapping[str, Any]) -> torch.dtype | None:
    """The type that the networks compute in, where the file stores another."""
    name = document.get("computes_in")
    if name is not None and (not isinstance(name, str) or name not in FLOATS):
        raise ValueError(f"it computes in {short(repr(name), 40)}, which is none of {', '.join(FLOATS)}")
    return None if name is None else FLOATS[name]


def _stored_as(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights in another type; of a matrix in int8 the scales of its rows too."""
    if dtype not in (*FLOATS, "int8"):
        raise ValueError(f"weights cannot be stored as {short(repr(dtype), 40)}: take {', '.join(FLOATS)} or int8")
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        if dtype == "int8":
            if value.dim() < 2:
                stored[name] = value
                continue
            scales = value.float().flatten(1).abs().amax(1).clamp_min(1e-30) / 127
            stored[name + _SCALE] = scales
            stored[name] = (value.float().flatten(1) / scales[:, None]).round().to(torch.int8).view(value.shape)
            continue
        stored[name] = value.to(FLOATS[dtype])
        if stored[name].isinf().any():
            raise ValueError(f"{name} is too large for {dtype}: take bfloat16 or float32")
    return stored


def _dequantized(weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights with int8 matrices in the type that the networks compute in."""
    if not any(name.endswith(_SCALE) for name in weights):
        return dict(weights)
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith(_SCALE):
            continue
        scale = weights.get(name + _SCALE)
        if scale is None and not value.is_floating_point():
            raise ValueError(f"{short(name, 80)} is no plain floating-point tensor, and has no scales")
        if scale is not None:
            if value.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != value.shape[:1]:
                raise ValueError(f"the scales of {short(name, 80)} do not fit it")
            value = (value.flatten(1).float() * scale[:, None]).view(value.shape)
        found[name] = value if dtype is None else value.to(dtype)
    return found


def _check_ends(drafter: Drafter, target: LanguageModel) -> None:
    """Raise ValueError for a draft that can say only some tokens, and none that end a text of this target."""
    ends = () if target.tokenizer is None else target.tokenizer.eos
    for part in drafter.modules():
        vocabulary: Any = getattr(part, "draft_vocabulary", None)
        if vocabulary is not None:
            vocabulary.check_has(
                sorted(token for token in ends if token < target.vocab_size), "the tokens that end a text"
            )
