"""Checkpoints and draft files: write a target with its drafters, and build them again.

A file names its classes and their arguments as plain values, next to the weights; no code in it is
run. A target has one main drafter and may have others, each with a name. The weights of a target
that was not trained may be elsewhere: the file then identifies it by a `TargetReference`, as every
draft file does.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import sha256
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
from lightning_specdec.config.models import PairSource, holds_its_target
from lightning_specdec.config.settings import check
from lightning_specdec.config.terminal import one_line, short
from lightning_specdec.decoding.requests import check_prompt
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import Origin, read_header

log = logging.getLogger(__name__)

MAIN = "main"
"""Name of the main drafter in files that name none."""
TARGET = "target."
"""Prefix of the target's weights; the prefixes are those of the training modules."""
_DRAFTER = "drafter."
"""Prefix of the main drafter's weights."""
_OTHERS = "others."
"""Prefix of the other drafters' weights, before their names."""
_SCALE = ".int8_scale"
"""Suffix of the scales of an int8 matrix, one for each row."""
_INT8_LIMIT = 127
_SMALLEST_SCALE = 1e-30
_MAX_NAME_LENGTH = 80


@dataclass(frozen=True)
class DraftOrigin:
    """The file that a drafter was read from, which may have another content later.

    Args:
        source: the names of the models, without that of a pair.
        path: the file.
        sha256: of the content that was read.
        target_digest: the `stored_target_digest` of the target that the content has; None if the
            target is elsewhere.
    """

    source: PairSource
    path: Path
    sha256: str
    target_digest: str | None


@dataclass
class LoadedPair:
    """A target and its drafter, loaded from a file or by their names.

    Args:
        make_target: returns the target; called when the target is first used.
        drafter: the drafter that was chosen.
        drafts: all drafters by name; the first one is the default.
        prompts: held-out prompts to try it on.
        recipe: how it was trained, as plain values.
        tokenizer: name or directory of the tokenizer; None if tokens are not text.
        num_draft_tokens: draft tokens per round that the pair recommends; None without a
            recommendation.
        reference: identifies a target that is not in the file; None if it is.
        draft_origin: the file of the drafter; None unless `load_pair` was called with
            `mapped=False`, or if there is no single file.
    """

    make_target: Callable[[], LanguageModel]
    drafter: Drafter
    drafts: dict[str, Drafter]
    prompts: list[list[int]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    num_draft_tokens: int | str | None = None
    reference: TargetReference | None = None
    draft_origin: DraftOrigin | None = None

    @cached_property
    def target(self) -> LanguageModel:
        """The target; one that is not in the file is loaded at the first use.

        Raises:
            ValueError: it is missing, or has other weights.
        """
        return self.make_target()

    def draft(self, name: str | None = None) -> Drafter:
        """Return the drafter of that name, the first one by default.

        Raises:
            ValueError: there is none.
        """
        if name is None:
            name = next(iter(self.drafts))
        if name not in self.drafts:
            raise ValueError(
                f"the checkpoint has no draft {short(name, 80)!r}: "
                f"it has {', '.join(self.drafts)}; a draft file goes with --target"
            )
        return self.drafts[name]


def describe(
    target: LanguageModel | TargetReference,
    drafts: Drafter | Mapping[str, Drafter],
    *,
    prompts: Sequence[Sequence[int]] = (),
    recipe: Mapping[str, Any] | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's document, for weights named `target.*`, `drafter.*`, `others.NAME.*`.

    Args:
        target: the target, or the reference to it if its weights are not stored.
        drafts: the drafter, or several by name, of which the first one is the default.
        prompts: tokens of example prompts, on which the drafter can be tried.
        recipe: how the drafter was trained.
        tokenizer: name of the tokenizer; None if the tokens are not text.
    """
    drafters = _named(drafts)
    main_name, *other_names = drafters
    document: dict[str, Any] = {
        "format": FORMAT,
        "drafter": spec(drafters[main_name]),
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "recipe": _plain(dict(recipe or {})),
        "tokenizer": tokenizer,
    }
    if isinstance(target, TargetReference):
        document.update(target.to_document())
    else:
        document["target"] = spec(target)

    # A single drafter needs no name.
    if other_names or main_name != MAIN:
        _check_names([main_name, *other_names])
        document["name"] = main_name
        document["others"] = {name: spec(drafters[name]) for name in other_names}
    return document


def save(
    path: str | os.PathLike[str],
    target: LanguageModel | TargetReference,
    drafts: Drafter | Mapping[str, Drafter],
    *,
    dtype: str | None = None,
    **described: Any,
) -> None:
    """Write a pair for decoding as safetensors, or a draft file if `target` is a reference.

    The file is written completely or not at all.

    Args:
        target, drafts, described: the arguments of `describe`. Paths are written as `portable`
            returns them.
        dtype: store weights in this dtype, for a smaller file: a floating-point dtype, or int8
            (with a scale for each row of a matrix; vectors stay unchanged). The loaded models
            compute in their original dtype.

    Raises:
        ValueError: a part cannot be built again, a weight does not fit the dtype, or no file can
            be written there.
    """
    document = describe(target, drafts, **described)
    portable_entries = ["recipe"]
    if isinstance(target, TargetReference):
        # A draft file is meant for other machines.
        portable_entries += [*target.to_document(), "tokenizer"]
    for name in portable_entries:
        document[name] = portable(document[name])

    weights: dict[str, Tensor] = {}
    if isinstance(target, LanguageModel):
        weights.update(_weights_to_store(target, TARGET))
    (_, main_drafter), *other_drafters = _named(drafts).items()
    weights.update(_weights_to_store(main_drafter, _DRAFTER))
    for name, drafter in other_drafters:
        weights.update(_weights_to_store(drafter, f"{_OTHERS}{name}."))

    # Whoever loads the file computes in the dtype that the weights have now.
    if dtype is not None and weights:
        first_weight = next(iter(weights.values()))
        document["computes_in"] = str(first_weight.dtype).removeprefix("torch.")
        weights = _stored_as(weights, dtype)
    archive.write_document(path, document, weights)


def _weights_to_store(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return a network's weights on the CPU, with a prefix before their names."""
    values = module.state_dict(keep_vars=True)
    # A weight with several names is stored once, under the first one.
    first_names: dict[int, str] = {}
    for name, value in values.items():
        first_names.setdefault(id(value), name)

    weights = {}
    for name in sorted(first_names.values()):
        if values[name].dtype not in FLOATS.values():
            raise ValueError(
                f"{prefix}{name} is packed or quantized: save the models as they were loaded"
            )
        weights[prefix + name] = values[name].detach().cpu().contiguous().clone()
    return weights


def portable(value: Any) -> Any:
    """Return plain values without directories of this machine.

    Absolute paths become relative to the current directory if they are inside it; of others only
    the last part remains.
    """
    if isinstance(value, dict):
        return {name: portable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [portable(entry) for entry in value]
    if not isinstance(value, str) or not os.path.isabs(value):
        return value
    path = Path(value)
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path.name


def is_exported(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file that `save` wrote: of this package, and without a training state."""
    try:
        return os.path.isfile(path) and read(path).keys() == {KEY, "state_dict"}
    except ValueError:
        return False


def load(
    path: str | os.PathLike[str],
    *,
    target: str | LanguageModel | None = None,
    adapter: str | None = None,
    drafter: str | None = None,
    mapped: bool = True,
) -> LoadedPair:
    """Build the networks that a file describes, with its weights.

    Args:
        target: the directory or Hub name of a target that is not in the file, or the loaded target.
        adapter: an adapter to merge into that target; the recorded one when None.
        drafter: import path of your own drafter class. A file that names an import path is read
            only if it is this one.
        mapped: whether the networks may use the file as mapped memory, so that it must not be
            written to.

    Raises:
        FileNotFoundError, ValueError: as `archive.read`; and for descriptions out of range or
            weights that do not fit.
    """
    content = read(path, mapped=mapped)
    try:
        return _build_pair(content, str(path), target, adapter, drafter)
    except BROKEN as error:
        reason = one_line(error)
        if isinstance(error, KeyError):
            reason = f"it has no {error}"
        raise ValueError(f"{path} cannot be used: {short(reason, 300)}") from error


def _build_pair(
    content: Mapping[str, Any],
    path: str,
    target: str | LanguageModel | None,
    adapter: str | None,
    trusted: str | None,
) -> LoadedPair:
    """Build a pair from a file's content; raises one of `BROKEN` where the content is wrong."""
    document = content[KEY]
    reference = reference_of(content)
    if target is not None and reference is None:
        raise ValueError(holds_its_target(path))

    other_descriptions = document.get("others", {})
    main_name = document.get("name", MAIN)
    _check_names([main_name, *other_descriptions])
    check_parts([document.get("target"), document.get("drafter"), other_descriptions])
    _check_owners(content["state_dict"], reference is None, other_descriptions)

    # Everything above is cheap; building networks begins here.
    weights = _dequantized(content["state_dict"], document.get("computes_in"))
    build_part = partial(_build_part, weights=weights, trusted=trusted)
    stored_target: LanguageModel | None = None
    if reference is None:
        stored_target = build_part("target", document.get("target"), MODELS)
    drafts = {main_name: build_part("drafter", document.get("drafter"), DRAFTERS)}
    for name, description in other_descriptions.items():
        drafts[name] = build_part(_OTHERS + name, description, DRAFTERS)

    prompts = [list(prompt) for prompt in document["prompts"]]
    recipe = _plain(document.get("recipe"))
    vocab_size = (reference or stored_target).vocab_size  # type: ignore[union-attr]
    for prompt in prompts:
        check_prompt(prompt, vocab_size, "a stored prompt")
    tokenizer = document.get("tokenizer")
    check("its tokenizer", tokenizer, str | None, {})
    num_draft_tokens = recipe.get("num_draft_tokens")
    limits = {"minimum": 1, "maximum": MAX_TOKENS}
    check("num_draft_tokens of its recipe", num_draft_tokens, int | None, limits)

    if stored_target is not None:
        for drafter in drafts.values():
            drafter.check_target(stored_target)

    def find_target() -> LanguageModel:
        if stored_target is not None:
            return stored_target
        assert reference is not None
        found_target = reference.load(target, path, adapter=adapter)
        for drafter in drafts.values():
            drafter.check_target(found_target)
            check_end_tokens(drafter, found_target)
        return found_target

    return LoadedPair(
        make_target=find_target,
        drafter=drafts[main_name],
        drafts=drafts,
        prompts=prompts,
        recipe=recipe,
        tokenizer=tokenizer,
        num_draft_tokens=num_draft_tokens,
        reference=reference,
    )


def check_end_tokens(drafter: Drafter, target: LanguageModel) -> None:
    """Raise ValueError if a reduced draft vocabulary lacks a token that ends the target's texts."""
    end_tokens: list[int] = []
    if target.tokenizer is not None:
        end_tokens = [token for token in target.tokenizer.eos if token < target.vocab_size]
    for module in drafter.modules():
        vocabulary: Any = getattr(module, "draft_vocabulary", None)
        if vocabulary is not None:
            vocabulary.check_has(end_tokens, "tokens that end a text")


def stored_target_digest(path: Path) -> str | None:
    """Return a sha256 of the target that a file contains; None if the target is elsewhere.

    Raises:
        FileNotFoundError, ValueError: as `archive.read`.
    """
    content = read(path, mapped=False)
    if reference_of(content) is not None:
        return None
    digest = sha256(json.dumps(content[KEY].get("target"), sort_keys=True).encode())
    for name, value in sorted(content["state_dict"].items()):
        if name.startswith(TARGET):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def reference_of(content: Mapping[str, Any]) -> TargetReference | None:
    """Return the reference to a checkpoint's target; None if the checkpoint contains the target.

    Args:
        content: the file's content; an empty one has no reference.

    Raises:
        ValueError: the reference has wrong values.
    """
    document = content.get(KEY, {})
    target = document.get("target")
    # The description of a stored target has no sha256.
    if isinstance(target, dict) and "sha256" in target:
        return TargetReference.from_document(document)
    return None


def is_draft_for(path: Path, origin: Origin) -> bool:
    """Whether a file is a draft that was trained for the weights of a target.

    A file of another program, and one that cannot be read, is none.
    """
    try:
        if path.suffix == ".safetensors":
            # The weights need not be read.
            metadata, _ = read_header(path)
            content = {KEY: json.loads(metadata.get(KEY, "{}"))}
        else:
            content = read(path)
        reference = reference_of(content)
        return reference is not None and reference.has_weights_of(origin)
    except BROKEN as error:
        log.debug("%s is taken for no draft: %s", path, error)
        return False


def _named(drafts: Drafter | Mapping[str, Drafter]) -> dict[str, Drafter]:
    return {MAIN: drafts} if isinstance(drafts, Drafter) else dict(drafts)


def _check_names(names: list[Any]) -> None:
    """Raise ValueError unless these can be names of drafters, which prefix their weights' names."""
    for name in names:
        is_valid = isinstance(name, str) and name.isidentifier() and len(name) <= _MAX_NAME_LENGTH
        if not is_valid:
            raise ValueError(
                f"draft names must be identifiers of at most {_MAX_NAME_LENGTH} characters"
            )
    if len(set(names)) < len(names):
        raise ValueError(f"it has two drafts named {names[0]}")


def _check_owners(
    weights: Mapping[str, Tensor],
    has_target: bool,
    other_names: Iterable[str],
) -> None:
    """Raise ValueError for weights of a target or drafter that the file does not describe."""
    prefixes = [f"{_OTHERS}{name}." for name in other_names]
    if has_target:
        prefixes.append(TARGET)
    for name in weights:
        if name.startswith((TARGET, _OTHERS)) and not name.startswith(tuple(prefixes)):
            raise ValueError(
                f"among its weights is {short(name, 80)!r}, and it describes no network that has it"
            )


def _plain(recipe: object) -> dict[str, Any]:
    """Return a copy of a recipe if it is a dictionary of plain values; ValueError otherwise."""
    # JSON has exactly the plain values.
    try:
        copied = json.loads(json.dumps(recipe))
    except (TypeError, ValueError, RecursionError):
        copied = None
    if not isinstance(copied, dict):
        raise ValueError("its recipe is not a dictionary of plain values")
    return copied


def _build_part(
    name: str,
    description: object,
    kinds: Kinds,
    *,
    weights: Mapping[str, Tensor],
    trusted: str | None,
) -> Any:
    """Build the target or a drafter from its description, with its weights.

    Args:
        name: what the names of its weights start with, up to a dot.
        trusted: as for `networks.build`.
    """
    prefix = f"{name}."
    part_weights = {}
    for weight_name, value in weights.items():
        if weight_name.startswith(prefix):
            part_weights[weight_name.removeprefix(prefix)] = value
    make_part = partial(build, description, (kinds,), trusted)
    return with_weights(make_part, name.replace(_OTHERS, "draft "), part_weights)


def _stored_as(weights: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return the weights in another dtype; int8 matrices with the scales of their rows."""
    check("dtype", dtype, str, {"choices": (*FLOATS, "int8")})
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        if dtype == "int8" and value.dim() > 1:
            # One scale for each row keeps rows of small values precise.
            rows = value.float().flatten(1)
            scales = rows.abs().amax(1).clamp_min(_SMALLEST_SCALE) / _INT8_LIMIT
            quantized = (rows / scales[:, None]).round().to(torch.int8)
            stored[name + _SCALE] = scales
            stored[name] = quantized.view(value.shape)
            continue

        stored[name] = value.to(FLOATS.get(dtype, value.dtype))
        if stored[name].isinf().any():
            raise ValueError(f"{name} is too large for {dtype}: use bfloat16 or float32")
    return stored


def _dequantized(weights: Mapping[str, Tensor], computes_in: object) -> dict[str, Tensor]:
    """Return the weights in the dtype that the networks compute in, if the file stores another."""
    check("the type that it computes in", computes_in, str | None, {"choices": (*FLOATS,)})
    if computes_in is None:
        return dict(weights)

    dequantized: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.dtype == torch.int8:
            # Without its scales, an empty tensor makes the product below fail.
            scales = weights.get(name + _SCALE, value[:0])
            row_shape = [1] * (value.dim() - 1)
            value = value.float() * scales.view(len(value), *row_shape)
        elif value.dtype not in FLOATS.values():
            raise ValueError(
                f"its weight {short(name, 80)!r} is of {value.dtype}: "
                f"expected int8 or {', '.join(FLOATS)}"
            )
        if not name.endswith(_SCALE):
            dequantized[name] = value.to(FLOATS[str(computes_in)])
    return dequantized
