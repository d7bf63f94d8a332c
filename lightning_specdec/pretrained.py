"""Names and directories of pretrained models -> a target, and what guesses for it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from lightning_specdec import draft_file
from lightning_specdec.drafters import (
    DRAFTERS,
    Drafter,
    EarlyExitDrafter,
    LookupFirstDrafter,
    ModelDrafter,
    NGramDrafter,
)
from lightning_specdec.drafters.cross_vocabulary import CrossVocabulary, make_drafter
from lightning_specdec.drafters.lookup_first import sure_lookup
from lightning_specdec.memory import available_bytes, peak_bytes, require_memory
from lightning_specdec.models import LanguageModel

if TYPE_CHECKING:
    from lightning_specdec.models.huggingface import HuggingFaceLM
    from lightning_specdec.models.loading import Examined
    from lightning_specdec.pairs import Pair

KINDS: dict[str, type[Drafter]] = {
    kind.__name__: kind for kind in (ModelDrafter, CrossVocabulary, NGramDrafter, LookupFirstDrafter, EarlyExitDrafter)
}
"""What may guess for a pretrained model."""
_WITHOUT_A_MODEL = ("NGramDrafter", "EarlyExitDrafter")
"""Those that guess from the text, or with the target itself."""
_LOOKS_UP_FIRST = LookupFirstDrafter.__name__
"""What joins a look-up, whose arguments it takes, to whatever else guesses."""
_OBJECTS = ("model", "target_vocabulary", "vocabulary", "encode", "start", "sampling")
"""Arguments of drafters that are no plain values."""
_TRAINED = ("head_layers", "hidden_size", "vocab_size", "num_blocks", "draft_vocabulary")
"""Those that describe weights of a drafter's own, which only a checkpoint has."""

Source = str | os.PathLike[str]
Dtype = str | torch.dtype | None


class PretrainedOptions(TypedDict, total=False):
    """The optional arguments of `load_pair`, for callers that pass them on."""

    drafter: str | None
    drafter_arguments: Mapping[str, Any]
    dtype: Dtype
    draft_dtype: Dtype
    device: str | torch.device
    quantization: str | None
    draft_quantization: str | None
    revision: str | None
    draft_revision: str | None
    trust_remote_code: bool
    pack: bool


@dataclass(frozen=True)
class _Wanted:
    """A model to load: see `models.loading.load_model`."""

    source: Source
    dtype: Dtype
    quantization: str | None
    revision: str | None


def load_pair(
    target: Source | torch.nn.Module,
    draft: Source | torch.nn.Module | None = None,
    *,
    drafter: str | None = None,
    drafter_arguments: Mapping[str, Any] | None = None,
    dtype: Dtype = None,
    draft_dtype: Dtype = None,
    device: str | torch.device = "cpu",
    quantization: str | None = None,
    draft_quantization: str | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    trust_remote_code: bool = False,
    pack: bool = True,
) -> tuple[LanguageModel, Drafter]:
    """A target and what guesses for it.

    Without a draft the text itself is looked up for guesses (`NGramDrafter`), or, with `draft_quantization`, a
    quantized copy of the target guesses, or, by name, the target's own first layers (`EarlyExitDrafter`). A draft of
    the target's vocabulary guesses directly, another one through the tokens that both have (`CrossVocabulary`). By name
    again, look-up goes before any draft (`LookupFirstDrafter`), for matches of two
    tokens and more if not told otherwise.

    Args:
        target: a directory, a name on the hub, or a model.
        draft: the same for the draft; or a drafter, or the file of a trained one (`draft_file`).
        drafter: the class that guesses, by name, where it shall not follow from the models.
        drafter_arguments: its arguments besides the model.
        dtype, draft_dtype: what they compute in; as stored when None, the draft as the target.
        device: where they go.
        quantization, draft_quantization: "int8" or "int4" for weights stored so.
        revision, draft_revision: branches, tags or commits on the hub.
        trust_remote_code: whether a model's own Python code may run.
        pack: whether weights are laid out for this processor, on a CPU: faster, and for decoding only.

    Raises:
        ValueError: a model cannot be loaded, the models do not fit the memory, or do not fit each other; or a draft
            file is of another target.
    """
    arguments, lookup = drafter_arguments or {}, None
    if drafter == _LOOKS_UP_FIRST:
        _check(drafter, arguments, has_model=draft is not None or draft_quantization is not None)
        lookup, drafter, arguments = sure_lookup(**arguments), None, {}
    wrapped, given = _wrapped(target), _wrapped(draft)
    file = given if is_file(given) else None
    own: _Wanted | LanguageModel
    own = wrapped if isinstance(wrapped, LanguageModel) else _Wanted(wrapped, dtype, quantization, revision)
    guess: _Wanted | LanguageModel | None = None
    if isinstance(given, LanguageModel):
        guess = given
    elif given is None and draft_quantization is not None:
        if not isinstance(own, _Wanted):
            raise ValueError("a quantized copy is made of the target's files: name the target by its source")
        guess = _Wanted(own.source, draft_dtype or dtype, draft_quantization, revision)
    elif given is not None and file is None and not isinstance(given, Drafter):
        guess = _Wanted(given, draft_dtype or dtype, draft_quantization, draft_revision)
    if isinstance(given, Drafter):
        name = type(given).__name__
    elif file is not None:
        if draft_quantization is not None or draft_revision is not None:
            raise ValueError(f"{file} is a draft file, which is neither quantized nor of the hub: drop those settings")
        name = str(draft_file.read(file).drafter["class"])
    else:
        name = None
        _check(drafter, arguments, has_model=guess is not None)
    if name is not None and (drafter is not None or arguments):
        raise ValueError(f"the draft is a {name} already: name no other drafter")
    wanted = [model for model in (own, guess) if isinstance(model, _Wanted)]
    examined = _examine(wanted, device, trust_remote_code)
    beside = 0 if file is None else draft_file.stored_bytes(file)
    _require_memory([examined[model] for model in wanted], device, pack, beside)
    loaded = [_load(examined[model], device, pack) if isinstance(model, _Wanted) else model for model in (own, guess)]
    assert loaded[0] is not None
    if isinstance(given, Drafter):
        guessing = given
    elif file is not None:
        computed = None if draft_dtype is None else getattr(torch, str(draft_dtype).removeprefix("torch."))
        guessing, _ = draft_file.load_draft(file, loaded[0], dtype=computed)
    else:
        guessing = _make(drafter, arguments, loaded[0], loaded[1])
    return loaded[0], guessing if lookup is None else LookupFirstDrafter(lookup, guessing)


def is_file(draft: object) -> bool:
    """Whether this names a draft file, and neither a directory nor a model of the hub."""
    return isinstance(draft, str | os.PathLike) and os.path.isfile(os.path.expanduser(draft))


def pair_options(pair: Pair, draft: object, options: PretrainedOptions) -> tuple[Source | None, PretrainedOptions]:
    """A pair's draft and its arguments of `load_pair`; what is given goes before what the pair says.

    Args:
        draft: what guesses instead of the pair's own, which is then left out with its settings.
        options: other settings than the pair's.
    """
    own: PretrainedOptions = {
        "dtype": pair.target.dtype,
        "quantization": pair.target.quantization,
        "revision": None if pair.target.place == pair.target.local else pair.target.revision,
    }
    source: Source | None = None
    joined = options.get("drafter") == _LOOKS_UP_FIRST and pair.draft is not None
    if draft is None and (joined or options.get("drafter") in (None, pair.drafter)):
        if not joined:
            own |= {"drafter": pair.drafter, "drafter_arguments": pair.drafter_arguments}
        if pair.draft is not None:
            source = pair.draft.place
            own |= {
                "draft_dtype": pair.draft.dtype,
                "draft_quantization": pair.draft.quantization,
                "draft_revision": None if source == pair.draft.local else pair.draft.revision,
            }
            if options.get("dtype") is not None:  # one type for both, unless the draft's is given too
                own["draft_dtype"] = options["dtype"]
    given: PretrainedOptions = {key: value for key, value in options.items() if value is not None}  # type: ignore[assignment]
    return source, {**own, **given}


def _wrapped(source: Any) -> Any:
    """A loaded model of transformers as a `HuggingFaceLM`; anything else as it is."""
    if not isinstance(source, torch.nn.Module) or isinstance(source, LanguageModel | Drafter):
        return source
    from lightning_specdec.models.huggingface import HuggingFaceLM

    return HuggingFaceLM(source)  # type: ignore[arg-type]


def _check(kind: str | None, arguments: Mapping[str, Any], *, has_model: bool) -> None:
    """Raise ValueError for a drafter that there is not, or that cannot be made of what is given."""
    if kind is None:
        if has_model and arguments:
            raise ValueError("a drafter's arguments need the drafter's name: say which one is meant")
        kind = "CrossVocabulary" if has_model else "NGramDrafter"
    if kind in DRAFTERS.keys() - KINDS.keys():
        raise ValueError(
            f"a {kind} is trained beside its target: give its draft file as the draft, or decode its checkpoint"
        )
    if kind not in KINDS:
        raise ValueError(f"drafter must be one of {', '.join(KINDS)}, got {kind!r}")
    if (kind in _WITHOUT_A_MODEL) == has_model:
        raise ValueError(
            f"{kind} guesses without a model: drop the draft" if has_model else f"{kind} needs a model: give a draft"
        )
    parameters = inspect.signature(NGramDrafter if kind == _LOOKS_UP_FIRST else KINDS[kind]).parameters
    known = [name for name in parameters if name not in (*_OBJECTS, *_TRAINED)]
    if foreign := sorted(arguments.keys() - set(known)):
        raise ValueError(f"{kind} takes no {foreign[0]}: " + (f"it takes {', '.join(known)}" if known else "drop it"))
    needed = [name for name in known if parameters[name].default is inspect.Parameter.empty]
    if missing := [name for name in needed if name not in arguments]:
        raise ValueError(f"{kind} needs {missing[0]}: give it")


def _examine(models: list[_Wanted], device: str | torch.device, trust_remote_code: bool) -> dict[_Wanted, Examined]:
    from lightning_specdec.models.loading import check_quantization, examine

    for model in models:
        check_quantization(model.quantization, device)
    return {
        model: examine(
            model.source,
            dtype=model.dtype,
            quantization=model.quantization,
            revision=model.revision,
            trust_remote_code=trust_remote_code,
        )
        for model in dict.fromkeys(models)
    }


def _require_memory(models: list[Examined], device: str | torch.device, pack: bool, beside: int) -> None:
    """Raise ValueError unless the models fit beside each other, and each while it is loaded too.

    Args:
        beside: bytes of what is loaded besides.
    """
    if not models:
        return
    parts = [(model.size, model.dtype, model.quantization) for model in models]
    _, needed = peak_bytes(parts, packed=pack and torch.device(device).type == "cpu")
    names = " with ".join(model.source for model in models)
    require_memory(names, weights=needed + beside, device=str(device), available=available_bytes(str(device)))


def _load(examined: Examined, device: str | torch.device, pack: bool) -> HuggingFaceLM:
    from lightning_specdec.models.loading import load

    model = load(examined, device=device)
    return model.pack() if pack else model


def _make(
    kind: str | None, arguments: Mapping[str, Any], target: LanguageModel, draft: LanguageModel | None
) -> Drafter:
    """The drafter, which may still find that its model does not fit the target."""
    if draft is None:
        return EarlyExitDrafter(**arguments) if kind == "EarlyExitDrafter" else NGramDrafter(**arguments)
    if kind == "ModelDrafter":
        return ModelDrafter(draft)
    if not arguments:
        return make_drafter(target, draft)
    tokenizer = getattr(draft, "tokenizer", None)
    if tokenizer is None or target.vocabulary is None:
        raise ValueError("CrossVocabulary needs the tokenizers of both models: load both with theirs")
    return CrossVocabulary(draft, target.vocabulary, encode=tokenizer.encode_plain, start=tokenizer.start, **arguments)
