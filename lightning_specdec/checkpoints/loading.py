"""From names to models: the target and the drafter that a `PairSource` describes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_specdec.checkpoints.checkpoint import MAIN, LoadedPair, load
from lightning_specdec.checkpoints.engine_heads import is_head, read_head
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import peak_bytes, require_memory
from lightning_specdec.config.models import MOST_SMALL, PairSource
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.drafters import (
    CrossVocabulary,
    Drafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.text.tokenizer import named_tokenizer


def load_pair(
    source: PairSource, *, target: LanguageModel | None = None, pack: bool = True
) -> LoadedPair:
    """The target and the drafter that a source names.

    A draft model of the target's vocabulary drafts directly, another one through `CrossVocabulary`; without a draft the
    text itself is looked up (`NGramDrafter`), or, with `draft_quantization`, a quantized copy of the target drafts.
    `NGramWithFallback` puts lookup before whatever draft there is.

    Args:
        source: what the models are called; `target` and `draft` may be loaded modules too, and `draft` a drafter.
        target: the target of that name, where it is loaded already.
        pack: whether weights of pretrained models are laid out for this processor (CPU): faster, for inference only.

    Raises:
        FileNotFoundError, ValueError: a model cannot be loaded, the models do not fit the memory, or do not fit each
            other. Nothing in a file is run.
    """
    find_device(source.device)
    if source.ckpt is not None:
        return _from_file(source, target)
    if source.pair is None:
        return _pretrained(source, target, pack)
    pair = get_pair(source.pair)
    loaded = _pretrained(pair.complete(source), target, pack)
    if loaded.num_draft_tokens is None:
        loaded.num_draft_tokens = pair.num_draft_tokens
    return loaded


def _in_backend(model: LanguageModel, source: PairSource) -> LanguageModel:
    if source.backend == "torch" or (
        source.backend == "auto" and model.num_parameters <= MOST_SMALL
    ):
        return model
    from lightning_specdec.models import loading
    from lightning_specdec.models.huggingface import HuggingFaceLM

    if source.backend == "openvino":
        loading.check_openvino(source.device)
    return loading.in_backend(model, source.backend) if isinstance(model, HuggingFaceLM) else model


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it and torch can use it; ValueError otherwise."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"no usable device {name!r}: try --device cpu (`lightning_specdec info`)"
        ) from error
    return device


def _from_file(source: PairSource, target: LanguageModel | None) -> LoadedPair:
    choice = source.drafter
    loaded = load(
        str(source.ckpt), target=source.target, drafter=None if choice is None else choice.name
    )
    dtype = None if source.dtype is None else getattr(torch, source.dtype)
    model = target or _in_backend(loaded.target.to(source.device, dtype), source)
    for drafter in loaded.drafts.values():
        drafter.to(source.device, dtype or (None if loaded.reference is None else dtype_of(model)))
        if isinstance(drafter, ModelDrafter):
            drafter.model = _in_backend(drafter.model, source)
    if loaded.tokenizer is not None and model.tokenizer is None:
        try:
            model.tokenizer = named_tokenizer(loaded.tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{source.ckpt} needs its tokenizer {loaded.tokenizer}: put it there ({error})"
            ) from error
        model.vocabulary = model.tokenizer.vocabulary
    own = loaded.draft(source.draft)
    loaded.drafter = _choose(
        _asked(choice, loaded, source.draft), model, own, keep=source.draft is not None
    )
    if type(loaded.drafter) not in (NGramWithFallback, type(own)):
        loaded.num_draft_tokens = None  # the recipe's is of the other drafter
    loaded.target = model
    return loaded


def _pretrained(source: PairSource, target: LanguageModel | None, pack: bool) -> LoadedPair:
    """A pretrained target, and a draft model, a draft file, a drafter or none."""
    model, draft, revision = (
        target or wrapped(source.target),
        wrapped(source.draft),
        source.draft_revision,
    )
    if draft is None and source.draft_quantization is not None:
        draft, revision = wrapped(source.target), source.revision
    place = Path(draft).expanduser() if isinstance(draft, str) else None
    is_file = place is not None and place.is_file()
    has_head = place is not None and is_head(place)
    wanted: list[tuple[str, str | None, str | None, str | None]] = []
    if isinstance(model, str):
        wanted.append((model, source.dtype, source.quantization, source.revision))
    if isinstance(draft, str) and not (is_file or has_head):
        wanted.append(
            (draft, source.draft_dtype or source.dtype, source.draft_quantization, revision)
        )
    elif source.draft_quantization or revision:
        raise ValueError("quantization and revision need a named draft model: drop those settings")
    models = _load_models(wanted, source, pack) if wanted else []
    if isinstance(model, str):
        model = models.pop(0)
    recipe: dict[str, Any] = {}
    choice = source.drafter
    if place is not None and has_head:
        head, recipe = read_head(place, model)
        draft = head.to(source.device, _draft_dtype(source, model))
    if is_file:
        loaded = load(draft, target=model, drafter=None if choice is None else choice.name)
        assert loaded.target is model
        recipe = loaded.recipe
        draft, choice = (
            loaded.drafter.to(source.device, _draft_dtype(source, model)),
            _asked(choice, loaded),
        )
    drafter = _choose(choice, model, models[0] if models else draft, keep=True)
    window = recipe.get("num_draft_tokens")
    return LoadedPair(
        lambda: model, drafter, {MAIN: drafter}, recipe=recipe, num_draft_tokens=window
    )


def _draft_dtype(source: PairSource, target: LanguageModel) -> torch.dtype:
    """What a trained draft computes in: by default as its target."""
    return dtype_of(target) if source.draft_dtype is None else getattr(torch, source.draft_dtype)


def _load_models(
    wanted: Sequence[tuple[str, str | None, str | None, str | None]], source: PairSource, pack: bool
) -> list[LanguageModel]:
    """Load models that are named by source, dtype, quantization and revision, if all of them fit the memory."""
    from lightning_specdec.models import loading

    options: dict[str, Any] = {
        name: getattr(source, name) for name in ("device", "trust_remote_code", "backend")
    }
    examined = [
        loading.examine(name, dtype=dtype, quantization=quantization, revision=revision, **options)
        for name, dtype, quantization, revision in wanted
    ]
    parts = [(model.size, model.dtype, model.quantization) for model in examined]
    packed = pack and torch.device(source.device).type == "cpu"
    require_memory(
        " with ".join(model.source for model in examined),
        peak_bytes(parts, packed=packed),
        source.device,
    )
    loaded = [loading.load(each) for each in examined]
    if not pack:
        return list(loaded)
    pairs = zip(loaded, examined, strict=True)
    return [
        loading.in_backend(model, source.backend, each.quantization).pack() for model, each in pairs
    ]


def _asked(choice: Choice | None, loaded: LoadedPair, draft: str | None = None) -> Choice | None:
    """What a choice asks of a file: nothing where it names a foreign class that is in it, so that it may be read."""
    if choice is None or choice.name in DRAFTERS:
        return choice
    held = [
        name
        for name, drafter in loaded.drafts.items()
        if any(DRAFTERS.name_of(type(part)) == choice.name for part in drafter.modules())
    ]
    if held and choice.settings:
        setting = next(iter(choice.settings))
        raise ValueError(
            f"the draft is a {choice.name} with its own settings: drop --drafter.{setting}"
        )
    if held and draft is None and next(iter(loaded.drafts)) not in held:
        raise ValueError(
            f"{choice.name} is the class of the draft {held[0]}: say which draft to take with --draft"
        )
    return None if held else choice


def _choose(
    choice: Choice | None,
    target: LanguageModel,
    draft: Drafter | LanguageModel | None,
    *,
    keep: bool,
) -> Drafter:
    """The drafter of that kind for a target; without a choice, the one that follows from the draft.

    Args:
        draft: a draft model, or a drafter that is there already.
        keep: whether the user named this drafter, so that a kind without use for it is an error.
    """
    own = draft if isinstance(draft, Drafter) else None
    if choice is None:
        if own is None:
            return NGramDrafter() if draft is None else CrossVocabulary.for_target(target, draft)
        own.check_target(target)
        return own
    kind, settings = DRAFTERS.load(choice.name), choice.settings
    joins = issubclass(kind, NGramWithFallback)
    if joins and draft is None:
        raise ValueError(f"{choice.name} needs a draft to join lookup to: give --draft")
    if own is None or joins:
        return kind.for_target(target, draft, **settings)
    if type(own) is not kind:
        if keep:
            raise ValueError(
                f"the draft is a {type(own).__name__} already: drop --drafter {choice.name}"
            )
        return kind.for_target(target, **settings)
    for name, value in settings.items():
        if name != own.free:
            raise ValueError(
                f"the draft is a {choice.name} with its own settings: drop --drafter.{name}"
            )
        own = own.at(value)
    own.check_target(target)
    return own


def wrapped(source: Any) -> Any:
    """A loaded module of transformers as a `HuggingFaceLM`; anything else as it is."""
    if not isinstance(source, nn.Module) or isinstance(source, LanguageModel | Drafter):
        return source
    from lightning_specdec.models.huggingface import HuggingFaceLM

    return HuggingFaceLM(source)  # type: ignore[arg-type]
