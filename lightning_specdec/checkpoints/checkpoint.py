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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.checkpoints import archive
from lightning_specdec.checkpoints.archive import BROKEN, FORMAT, KEY, read
from lightning_specdec.checkpoints.networks import FLOATS, build, check_parts, spec, with_weights
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import DRAFTERS, MODELS, Kinds
from lightning_specdec.config.settings import check
from lightning_specdec.config.terminal import one_line, short
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
    """

    make_target: Callable[[], LanguageModel]
    drafter: Drafter
    drafts: dict[str, Drafter]
    prompts: list[list[int]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    num_draft_tokens: int | str | None = None
    reference: TargetReference | None = None

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
            told = f"it has {', '.join(self.drafts)}; a draft file goes with --target"
            raise ValueError(f"the checkpoint has no draft {short(chosen, 80)!r}: {told}")
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
        "target": target.to_dict() if isinstance(target, TargetReference) else spec(target),
        "drafter": spec(drafter),
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "recipe": _plain(dict(recipe or {})),
    }
    if others or name != MAIN:
        _check_names([name, *dict(others)])
        document |= {"name": name, "others": {key: spec(other) for key, other in others}}
    return {**document, "tokenizer": tokenizer}


def save(
    path: str | os.PathLike[str],
    target: LanguageModel | TargetReference,
    drafts: Drafter | Mapping[str, Drafter],
    *,
    dtype: str | None = None,
    **described: Any,
) -> None:
    """Write a pair for decoding, or a draft file if `target` is a reference: whole or not at all, as safetensors.

    Args:
        target, drafts, described: the arguments of `describe`. Paths are written as of `portable`.
        dtype: store weights in this type, for a smaller file: a floating-point type, or int8 (a scale for each row of
            a matrix; vectors stay as they are). Whoever reads the file computes in the type that they had.

    Raises:
        ValueError: a part cannot be built again, a weight does not fit the type, or no file can be put there.
    """
    document = describe(target, drafts, **described)
    names = (
        ("recipe", "target", "tokenizer") if isinstance(target, TargetReference) else ("recipe",)
    )
    document |= {name: portable(document[name]) for name in names}
    drafter, *others = _named(drafts).items()
    parts: dict[str, nn.Module] = {} if isinstance(target, TargetReference) else {TARGET: target}
    parts |= {_DRAFTER: drafter[1], **{f"{_OTHERS}{key}.": other for key, other in others}}
    weights: dict[str, Tensor] = {}
    for prefix, part in parts.items():
        values = part.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(values.items())}
        for name in sorted(first.values()):  # a weight of several names is written once
            if values[name].dtype not in FLOATS.values():
                raise ValueError(
                    f"{prefix}{name} is packed or quantized: save the models as they were loaded"
                )
            weights[prefix + name] = values[name].detach().cpu().contiguous().clone()
    if dtype is not None and weights:
        document["computes_in"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
        weights = _stored_as(weights, dtype)
    archive.write_document(path, document, weights)


def portable(value: Any) -> Any:
    """Plain values without this machine's directories: absolute paths from the current one, or the last part alone."""
    if isinstance(value, dict):
        return {name: portable(each) for name, each in value.items()}
    if not isinstance(value, str) or not os.path.isabs(value):
        return [portable(each) for each in value] if isinstance(value, list) else value
    return os.path.relpath(value) if Path(value).is_relative_to(Path.cwd()) else Path(value).name


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file as `save` writes it: of this program, and without a training state."""
    try:
        return os.path.isfile(path) and read(path).keys() == {KEY, "state_dict"}
    except ValueError:
        return False


def load(
    path: str | os.PathLike[str],
    *,
    target: str | LanguageModel | None = None,
    drafter: str | None = None,
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
    try:
        reference = reference_of(content)
        if target is not None and reference is None:
            raise ValueError(
                "it holds its target itself, and decodes with no other: leave --target out"
            )
        others, name = document.get("others", {}), document.get("name", MAIN)
        _check_names([name, *others])
        check_parts([document.get("target"), document.get("drafter"), others])
        _check_owners(
            weights,
            ([TARGET] if reference is None else []) + [f"{_OTHERS}{key}." for key in others],
        )
        weights = _dequantized(weights, document.get("computes_in"))
        part = partial(_part, weights=weights, trusted=drafter)
        held = None if reference is not None else part("target", document.get("target"), MODELS)
        drafts = {name: part("drafter", document.get("drafter"), DRAFTERS)}
        drafts |= {key: part(_OTHERS + key, other, DRAFTERS) for key, other in others.items()}
        prompts = [list(prompt) for prompt in document["prompts"]]
        recipe, tokenizer = _plain(document.get("recipe")), document.get("tokenizer")
        for prompt in prompts:
            check_prompt(prompt, (reference or held).vocab_size, "a stored prompt")  # type: ignore[union-attr]
        check("its tokenizer", tokenizer, str | None, {})
        window = recipe.get("num_draft_tokens")
        check(
            "num_draft_tokens of its recipe",
            window,
            int | None,
            {"minimum": 1, "maximum": MAX_TOKENS},
        )
        for each in drafts.values() if held is not None else ():
            each.check_target(held)
    except BROKEN as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{path} cannot be used: {short(reason, 300)}") from error

    def find_target() -> LanguageModel:
        if held is not None:
            return held
        assert reference is not None
        found = reference.load(target, str(path))
        for each in drafts.values():
            each.check_target(found)
            _check_ends(each, found)
        return found

    return LoadedPair(
        find_target, drafts[name], drafts, prompts, recipe, tokenizer, window, reference
    )


def _check_ends(drafter: Drafter, target: LanguageModel) -> None:
    """Raise ValueError for a draft that has some tokens only, and not all that end a text of this target."""
    ends = (
        []
        if target.tokenizer is None
        else [token for token in target.tokenizer.eos if token < target.vocab_size]
    )
    for part in drafter.modules():
        vocabulary: Any = getattr(part, "draft_vocabulary", None)
        if vocabulary is not None:
            vocabulary.check_has(ends, "tokens that end a text")


def reference_of(content: Mapping[str, Any]) -> TargetReference | None:
    """Which target a checkpoint means, where it holds none itself.

    Args:
        content: of the file; an empty one means none.

    Raises:
        ValueError: it does not say that clearly.
    """
    target = content.get(KEY, {}).get("target")
    is_elsewhere = isinstance(target, dict) and "sha256" in target
    return TargetReference.from_dict(target, "its target.") if is_elsewhere else None


def _named(drafts: Drafter | Mapping[str, Drafter]) -> dict[str, Drafter]:
    return {MAIN: drafts} if isinstance(drafts, Drafter) else dict(drafts)


def _check_names(names: list[Any]) -> None:
    """Raise ValueError unless these can be the names of drafters: weights are found by them."""
    if not all(isinstance(each, str) and each.isidentifier() and len(each) <= 80 for each in names):
        raise ValueError("draft names must be identifiers of at most 80 characters")
    if len(set(names)) < len(names):
        raise ValueError(f"it has two drafts of the name {names[0]}")


def _check_owners(weights: Mapping[str, Tensor], owners: list[str]) -> None:
    """Raise ValueError for weights of a target or another draft that the file does not describe."""
    for name in weights:
        if name.startswith((TARGET, _OTHERS)) and not name.startswith(tuple(owners)):
            raise ValueError(
                f"among its weights is {short(name, 80)!r}, and it describes no network that has it"
            )


def _plain(recipe: object) -> dict[str, Any]:
    """The recipe, if it is a dictionary of plain values and nothing else."""
    try:
        copied = json.loads(json.dumps(recipe))
    except (TypeError, ValueError, RecursionError):
        copied = None
    if not isinstance(copied, dict):
        raise ValueError("its recipe is not a dictionary of plain values")
    return copied


def _part(
    name: str,
    described: object,
    kinds: Kinds,
    *,
    weights: Mapping[str, Tensor],
    trusted: str | None,
) -> Any:
    """A target or a drafter as it is described, with its weights."""
    prefix = f"{name}."
    own = {
        key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)
    }
    return with_weights(
        partial(build, described, (kinds,), trusted), name.replace(_OTHERS, "draft "), own
    )


def _stored_as(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights in another type; of a matrix in int8 the scales of its rows too."""
    check("dtype", dtype, str, {"choices": (*FLOATS, "int8")})
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        if dtype == "int8" and value.dim() > 1:
            rows = value.float().flatten(1)
            scales = rows.abs().amax(1).clamp_min(1e-30) / 127
            stored[name + _SCALE] = scales
            stored[name] = (rows / scales[:, None]).round().to(torch.int8).view(value.shape)
        else:
            stored[name] = value.to(FLOATS.get(dtype, value.dtype))
            if stored[name].isinf().any():
                raise ValueError(f"{name} is too large for {dtype}: take bfloat16 or float32")
    return stored


def _dequantized(weights: Mapping[str, Tensor], computes_in: object) -> dict[str, Tensor]:
    """The weights in the type that the networks compute in, where the file stores another."""
    check("the type that it computes in", computes_in, str | None, {"choices": (*FLOATS,)})
    if computes_in is None:
        return dict(weights)
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.dtype == torch.int8:
            scales = weights.get(name + _SCALE, value[:0])
            value = value.float() * scales.view(len(value), *[1] * (value.dim() - 1))
        elif value.dtype not in FLOATS.values():
            raise ValueError(
                f"its weight {short(name, 80)!r} is of {value.dtype}: expected int8 or {', '.join(FLOATS)}"
            )
        if not name.endswith(_SCALE):
            found[name] = value.to(FLOATS[str(computes_in)])
    return found
