"""From names to models: the target and the drafter that a `PairSource` describes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_specdec.checkpoints.checkpoint import MAIN, LoadedPair, load
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import available_bytes, peak_bytes, require_memory
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.pairs import get_pair
from lightning_specdec.drafters import CrossVocabulary, Drafter, EarlyExitDrafter, NGramDrafter, NGramWithFallback
from lightning_specdec.models import LanguageModel
from lightning_specdec.text.tokenizer import named_tokenizer


def load_pair(source: PairSource, *, target: LanguageModel | None = None, pack: bool = True) -> LoadedPair:
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
    try:
        loaded = _pretrained(pair.complete(source), target, pack)
    except ValueError as error:
        advice = "".join(model.advice for model in pair.models if model.source in str(error))
        raise ValueError(f"{error}{advice}") from error
    if loaded.num_draft_tokens is None:
        loaded.num_draft_tokens = pair.num_draft_tokens
    return loaded


def find_device(name: str) -> torch.device:
    """The device of that name, if this machine has it and torch can use it; ValueError otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that torch deprecates
            device = torch.device(name)
            torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"there is no usable device {name!r} here: try --device cpu (`lightning_specdec env`)"
        ) from error
    return device


def _from_file(source: PairSource, target: LanguageModel | None) -> LoadedPair:
    """The pair of a file, with the drafter that the source names."""
    path, choice = str(source.ckpt), source.drafter
    loaded = load(path, target=source.target, drafter=None if choice is None else choice.name)
    dtype = None if source.dtype is None else getattr(torch, source.dtype)
    model = target or loaded.target.to(source.device, dtype)
    for drafter in loaded.drafts.values():
        drafter.to(source.device, dtype or (None if loaded.reference is None else dtype_of(model)))
    if loaded.tokenizer is not None and model.tokenizer is None:
        try:
            model.tokenizer = named_tokenizer(loaded.tokenizer)
        except ValueError as error:
            raise ValueError(f"{path} was trained on the text of a tokenizer that is not here: {error}") from error
        model.vocabulary = model.tokenizer.vocabulary
    own = loaded.draft(source.draft)
    loaded.drafter = _choose(choice, model, own, None, keep=source.draft is not None)
    if choice is not None and choice.name not in ("NGramWithFallback", DRAFTERS.name_of(type(own))):
        loaded.num_draft_tokens = None  # the recipe's is of the other drafter
    loaded.target = model
    return loaded


def _pretrained(source: PairSource, target: LanguageModel | None, pack: bool) -> LoadedPair:
    """A pretrained target, and a draft model, a draft file, a drafter or none."""
    draft = _wrapped(source.draft)
    file = Path(draft).expanduser() if isinstance(draft, str) and Path(draft).expanduser().is_file() else None
    name, window = _wrapped(source.target), None
    recipe: dict[str, Any] = {}
    wanted: dict[str, tuple[Any, str | None, str | None, str | None]] = {}
    if target is None and not isinstance(name, LanguageModel):
        wanted["target"] = name, source.dtype, source.quantization, source.revision
    if file is not None or isinstance(draft, nn.Module):
        if source.draft_quantization or source.draft_revision:
            raise ValueError("only a draft model that is named is quantized or has a revision: drop those settings")
    elif draft is not None:
        wanted["draft"] = draft, source.draft_dtype or source.dtype, source.draft_quantization, source.draft_revision
    elif source.draft_quantization is not None:
        if isinstance(name, LanguageModel):
            raise ValueError("a quantized copy is made of the target's files: name the target by its source")
        wanted["draft"] = name, source.draft_dtype or source.dtype, source.draft_quantization, source.revision
    models = _load_models(wanted, source, pack, 0 if file is None else file.stat().st_size)
    model = target or models.get("target", name)
    own = draft if isinstance(draft, Drafter) else None
    if file is not None:
        loaded = load(file, target=model, drafter=None if source.drafter is None else source.drafter.name)
        assert loaded.target is model
        recipe, window = loaded.recipe, loaded.num_draft_tokens
        dtype = dtype_of(model) if source.draft_dtype is None else getattr(torch, source.draft_dtype)
        own = loaded.drafter.to(source.device, dtype)
    draft_model = models.get("draft", draft if isinstance(draft, LanguageModel) else None)
    drafter = _choose(source.drafter, model, own, draft_model, keep=own is not None)
    return LoadedPair(lambda: model, drafter, {MAIN: drafter}, recipe=recipe, num_draft_tokens=window)


def _load_models(
    wanted: Mapping[str, tuple[Any, str | None, str | None, str | None]], source: PairSource, pack: bool, beside: int
) -> dict[str, LanguageModel]:
    """Load models that are named by source, dtype, quantization and revision, if all of them fit the memory.

    Args:
        beside: bytes of what is loaded besides.
    """
    from lightning_specdec.models import loading

    examined = {
        role: loading.examine(
            name,
            dtype=dtype,
            device=source.device,
            quantization=quantization,
            revision=revision,
            trust_remote_code=source.trust_remote_code,
        )
        for role, (name, dtype, quantization, revision) in wanted.items()
    }
    if examined:
        packed = pack and torch.device(source.device).type == "cpu"
        parts = [(model.size, model.dtype, model.quantization) for model in examined.values()]
        require_memory(
            " with ".join(model.source for model in examined.values()),
            weights=peak_bytes(parts, packed=packed)[1] + beside,
            device=source.device,
            available=available_bytes(source.device),
        )
    loaded = {role: loading.load(model) for role, model in examined.items()}
    return {role: model.pack() if pack else model for role, model in loaded.items()}


def _choose(
    choice: Choice | None, target: LanguageModel, own: Drafter | None, model: LanguageModel | None, *, keep: bool
) -> Drafter:
    """The drafter of that kind for a target; without a choice, the one that follows from the draft.

    Args:
        own: a drafter that is there already, from a file.
        model: a draft model.
        keep: whether the user named `own`, so that a kind without use for it is an error.
    """
    if choice is None:
        if own is None:
            own = NGramDrafter() if model is None else CrossVocabulary.for_target(target, model)
        own.check_target(target)
        return own
    kind, settings = DRAFTERS.load(choice.name), choice.settings
    if issubclass(kind, NGramWithFallback):
        if own is None and model is None:
            raise ValueError(f"{choice.name} needs a draft to join lookup to: give --draft")
        return kind.for_target(target, own or model, **settings)
    if own is None or type(own) is not kind:
        if keep:
            raise ValueError(f"the draft is a {type(own).__name__} already: drop --drafter {choice.name}")
        found: Drafter = kind.for_target(target, model, **settings)
        return found
    if isinstance(own, EarlyExitDrafter) and settings:
        own = own.at(**settings)
    elif settings:
        raise ValueError(
            f"the draft is a {choice.name} with settings of its own: drop --drafter.{next(iter(settings))}"
        )
    own.check_target(target)
    return own


def _wrapped(source: Any) -> Any:
    """A loaded module of transformers as a `HuggingFaceLM`; anything else as it is."""
    if not isinstance(source, nn.Module) or isinstance(source, LanguageModel | Drafter):
        return source
    from lightning_specdec.models.huggingface import HuggingFaceLM

    return HuggingFaceLM(source)  # type: ignore[arg-type]
