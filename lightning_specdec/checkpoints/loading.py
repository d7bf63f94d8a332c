"""Load the target and the drafter that a `PairSource` names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_specdec.checkpoints import runs
from lightning_specdec.checkpoints.checkpoint import (
    MAIN,
    DraftOrigin,
    LoadedPair,
    check_end_tokens,
    is_draft_for,
    load,
    stored_target_digest,
)
from lightning_specdec.checkpoints.engine_heads import is_head, read_head
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.files import file_sha256
from lightning_specdec.config.hub import NotFoundError, is_gguf
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import peak_bytes, require_memory
from lightning_specdec.config.models import (
    MOST_SMALL,
    PairSource,
    check_draft,
    is_run,
    other_drafter,
)
from lightning_specdec.config.pairs import Pair, get_pair
from lightning_specdec.drafters import (
    CrossVocabulary,
    Drafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.safetensors_file import Origin
from lightning_specdec.text.tokenizer import named_tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ModelRequest:
    """A pretrained model to load.

    Args:
        name: its directory or Hub name.
        dtype: what it computes in; None for the dtype of its files.
        quantization: how its weights are quantized; None for not at all.
        revision: a branch, tag or commit on the Hub; None for the default branch.
        adapter: an adapter to merge into its weights.
    """

    name: str
    dtype: str | None
    quantization: str | None
    revision: str | None
    adapter: str | None


def load_pair(
    source: PairSource,
    *,
    target: LanguageModel | None = None,
    pack: bool = True,
    mapped: bool = True,
) -> LoadedPair:
    """Load the target and the drafter that a source names.

    A draft model with the target's vocabulary drafts directly, another one through
    `CrossVocabulary`. Without a draft, tokens are copied from the text itself (`NGramDrafter`), or,
    with `draft_quantization`, a quantized copy of the target drafts. `NGramWithFallback` and
    `SuffixCorpusWithFallback` try a lookup before the draft, whichever it is.

    Args:
        source: names of the models; `target` and `draft` may also be loaded modules, and `draft` a
            drafter.
        target: the target of that name, if it is already loaded.
        pack: whether weights of pretrained models are laid out for this processor (CPU), which is
            faster but only for inference.
        mapped: whether a draft file or checkpoint may be used as mapped memory. It must then not
            be written to. Otherwise the pair has its `draft_origin`.

    Raises:
        FileNotFoundError, ValueError: a model cannot be loaded, or the models do not fit the memory
            or each other. Nothing in a file is run.
    """
    if source.pair is None:
        find_device(source.chosen_device)
        # Before the file is read: content that comes later counts as another one.
        draft_origin = None if mapped else _draft_origin(source)
        loaded = _load_named(source, target, pack=pack, mapped=mapped)
        loaded.draft_origin = draft_origin
        return loaded

    # A named pair fills in the models and settings that the source leaves open.
    pair = get_pair(source.pair)
    find_device(source.device or pair.device or source.chosen_device)
    completed = _without_foreign_draft(pair, pair.complete(source))
    try:
        loaded = load_pair(completed, target=target, pack=pack, mapped=mapped)
    except NotFoundError as error:
        # Either model may be the one that the Hub did not return.
        models = pair.models_without_copy
        if not models:
            raise
        directories = " and ".join(str(model.local) for model in models)
        raise ValueError(
            f"there is no {directories} here, and the Hub cannot be read: run "
            f"`make {models[0].make_target}` in a clone of the repository"
        ) from error
    # The number that a draft stores is for the draft alone, on another machine.
    if source.draft is None or loaded.num_draft_tokens is None:
        loaded.num_draft_tokens = pair.num_draft_tokens
    return loaded


def _load_named(
    source: PairSource,
    target: LanguageModel | None,
    *,
    pack: bool,
    mapped: bool,
) -> LoadedPair:
    """As `load_pair`, of a source that names no pair."""
    if source.ckpt is not None:
        return _load_file(source, target, mapped)
    return _load_pretrained(source, target, pack, mapped)


def _draft_origin(source: PairSource) -> DraftOrigin | None:
    """The file that a source's drafter is read from; None if it comes from no single file.

    Of a directory of runs, it is the checkpoint that is loaded now.
    """
    name = source.draft if source.ckpt is None else source.ckpt
    if not isinstance(name, str):
        return None
    path = Path(name).expanduser()
    if is_run(path):
        path = runs.find(path)
    if not path.is_file() or is_gguf(path):
        return None

    sha256 = file_sha256(path)
    if source.ckpt is None:
        return DraftOrigin(source.changed(draft=str(path)), path, sha256, None)
    source = source.changed(ckpt=str(path))
    return DraftOrigin(source, path, sha256, stored_target_digest(path))


def load_draft(origin: DraftOrigin, target: LanguageModel) -> Drafter:
    """Load a drafter again whose file has changed.

    Args:
        origin: where the drafter was read from before.
        target: the target in use, as it was loaded.

    Raises:
        FileNotFoundError, ValueError: the file cannot be read, or has a drafter of another target.
    """
    is_checkpoint = origin.source.ckpt is not None
    if is_checkpoint and stored_target_digest(origin.path) != origin.target_digest:
        raise ValueError(f"{origin.path} has another target now: start again to use it")
    loaded = _load_named(origin.source, target, pack=True, mapped=False)
    if is_checkpoint and loaded.reference is not None:
        loaded.reference.check(target, str(origin.path))
        check_end_tokens(loaded.drafter, target)
    return loaded.drafter


def _without_foreign_draft(pair: Pair, source: PairSource) -> PairSource:
    """The source without the draft file of the pair, if the local copy of its target has other
    weights than the draft was trained for."""
    has_copy = pair.target is not None and pair.target.local is not None
    if not has_copy or source.draft is None or source.draft != pair.draft_file:
        return source
    origin = Origin(source.target, Path(source.target).expanduser())
    if is_draft_for(Path(source.draft), origin):
        return source
    log.warning(
        "%s was not trained for %s, so prompt lookup runs alone", source.draft, source.target
    )
    return source.changed(draft=None, drafter=Choice("NGramDrafter"))


def find_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        ValueError: this machine does not have it, or torch cannot use it.
    """
    try:
        device = torch.device(name)
        # The first use of a device fails where its driver or build of torch is missing.
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"no usable device {name!r}: try --device cpu (`lightning_specdec info`)"
        ) from error
    return device


def _in_backend(model: LanguageModel, source: PairSource) -> LanguageModel:
    """Return the model in the backend that the source asks for."""
    is_small = model.num_parameters <= MOST_SMALL
    if source.backend == "torch" or (source.backend == "auto" and is_small):
        return model
    from lightning_specdec.models import loading
    from lightning_specdec.models.huggingface import HuggingFaceLM

    if source.backend == "openvino":
        loading.check_openvino(source.chosen_device)
    if not isinstance(model, HuggingFaceLM):
        return model
    return loading.in_backend(model, source.backend)


def _load_file(source: PairSource, target: LanguageModel | None, mapped: bool) -> LoadedPair:
    """Load a checkpoint or draft file, `source.ckpt`."""
    choice = source.drafter
    trusted_class = None if choice is None else choice.name
    loaded = load(
        str(source.ckpt),
        target=source.target,
        adapter=source.adapter,
        drafter=trusted_class,
        mapped=mapped,
    )

    dtype = None if source.dtype is None else getattr(torch, source.dtype)
    if target is None:
        target = _in_backend(loaded.target.to(source.chosen_device, dtype), source)

    draft_dtype = dtype
    if dtype is None and loaded.reference is not None:
        # A draft that was stored without its target computes in the target's dtype.
        draft_dtype = dtype_of(target)
    for drafter in loaded.drafts.values():
        drafter.to(source.chosen_device, draft_dtype)
        if isinstance(drafter, ModelDrafter):
            drafter.model = _in_backend(drafter.model, source)

    if loaded.tokenizer is not None and target.tokenizer is None:
        _set_tokenizer(target, loaded.tokenizer, source)

    stored_drafter = loaded.draft(source.draft)
    loaded.drafter = _choose_drafter(
        _choice_beside_file(choice, loaded, source.draft),
        target,
        stored_drafter,
        is_named=source.draft is not None,
    )
    adds_lookup = isinstance(loaded.drafter, NGramWithFallback)
    if not adds_lookup and type(loaded.drafter) is not type(stored_drafter):
        # The recommendation is for the stored drafter.
        loaded.num_draft_tokens = None
    # Replaces the cached property, which would load the target again.
    loaded.target = target
    return loaded


def _set_tokenizer(target: LanguageModel, name: str, source: PairSource) -> None:
    """Give a target the tokenizer that its file names."""
    try:
        target.tokenizer = named_tokenizer(name)
    except ValueError as error:
        raise ValueError(
            f"{source.ckpt} needs its tokenizer {name}: put it there ({error})"
        ) from error
    target.vocabulary = target.tokenizer.vocabulary


def _load_pretrained(source: PairSource, target: Any, pack: bool, mapped: bool) -> LoadedPair:
    """Load a pretrained target, with a draft model, a draft file, a drafter or no draft."""
    if target is None:
        target = wrap_model(source.target)
    draft: Any = wrap_model(source.draft)
    draft_request = _draft_request(source, draft)

    # Target and draft are loaded together, because their sum must fit the memory.
    requests: list[_ModelRequest] = []
    if isinstance(target, str):
        target_request = _ModelRequest(
            target, source.dtype, source.quantization, source.revision, source.adapter
        )
        requests.append(target_request)
    elif source.adapter is not None and not isinstance(source.target, str):
        raise ValueError("--adapter needs the name of a target: merge it into a loaded model first")
    if draft_request is not None:
        requests.append(draft_request)
    models = _load_models(requests, source, pack)
    if isinstance(target, str):
        target = models.pop(0)
    if draft_request is not None:
        draft = models.pop(0)

    choice = source.drafter
    recipe: dict[str, Any] = {}
    if isinstance(draft, str):
        trained_draft = _load_trained_draft(Path(draft).expanduser(), source, target, mapped)
        draft = trained_draft.drafter
        recipe = trained_draft.recipe
        choice = trained_draft.choice

    drafter = _choose_drafter(choice, target, draft, is_named=True)
    return LoadedPair(
        make_target=lambda: target,
        drafter=drafter,
        drafts={MAIN: drafter},
        recipe=recipe,
        num_draft_tokens=recipe.get("num_draft_tokens"),
    )


def _draft_request(source: PairSource, draft: Any) -> _ModelRequest | None:
    """Return the draft model to load; None if the draft is not a named model."""
    revision = source.draft_revision
    adapter = source.draft_adapter
    if draft is None and source.draft_quantization is not None:
        # A quantized copy of the target drafts.
        draft = wrap_model(source.target)
        revision = source.revision
        adapter = adapter or source.adapter

    if isinstance(draft, str):
        check_draft(draft)
    if isinstance(draft, str) and not _is_trained_draft(draft):
        dtype = source.draft_dtype or source.dtype
        return _ModelRequest(draft, dtype, source.draft_quantization, revision, adapter)
    if source.draft_quantization or revision or adapter:
        raise ValueError(
            "quantization, revision and adapter of a draft need a named draft model: drop those "
            "settings"
        )
    return None


def _is_trained_draft(name: str) -> bool:
    """Whether a name is that of a draft file, a directory with a head, or one of runs."""
    path = Path(name).expanduser()
    if is_gguf(path):
        return False
    return path.is_file() or is_run(path) or is_head(path)


@dataclass(frozen=True)
class _TrainedDraft:
    """A drafter that was trained for the target.

    Args:
        drafter: the drafter, with its weights.
        recipe: how it was trained.
        choice: the drafter to build from it; None for itself.
    """

    drafter: Drafter
    recipe: dict[str, Any]
    choice: Choice | None


def _load_trained_draft(
    path: Path,
    source: PairSource,
    target: LanguageModel,
    mapped: bool,
) -> _TrainedDraft:
    """Load a draft file or a directory with a head, for this target."""
    choice = source.drafter
    if is_run(path):
        path = runs.find(path)
    if path.is_file():
        trusted_class = None if choice is None else choice.name
        loaded = load(path, target=target, drafter=trusted_class, mapped=mapped)
        # The first use of the target checks that the draft was trained for it.
        assert loaded.target is target
        drafter = loaded.drafter
        recipe = loaded.recipe
        choice = _choice_beside_file(choice, loaded)
    else:
        drafter, recipe = read_head(path, target)

    dtype = dtype_of(target) if source.draft_dtype is None else getattr(torch, source.draft_dtype)
    return _TrainedDraft(drafter.to(source.chosen_device, dtype), recipe, choice)


def _load_models(
    requests: Sequence[_ModelRequest],
    source: PairSource,
    pack: bool,
) -> list[LanguageModel]:
    """Load pretrained models if all of them together fit the memory."""
    if not requests:
        return []
    from lightning_specdec.models import loading

    # All are examined before any is loaded, which can take minutes.
    examined_models = [
        loading.examine(
            request.name,
            dtype=request.dtype,
            quantization=request.quantization,
            revision=request.revision,
            adapter=request.adapter,
            device=source.chosen_device,
            trust_remote_code=source.trust_remote_code,
            backend=source.backend,
        )
        for request in requests
    ]
    sizes = [(model.size, model.dtype, model.quantization) for model in examined_models]
    is_packed = pack and torch.device(source.chosen_device).type == "cpu"
    require_memory(
        " with ".join(model.source for model in examined_models),
        peak_bytes(sizes, packed=is_packed, in_openvino=source.backend == "openvino"),
        source.chosen_device,
    )

    models = [loading.load(examined) for examined in examined_models]
    if not pack:
        return list(models)

    packed_models: list[LanguageModel] = []
    for model, examined in zip(models, examined_models, strict=True):
        in_backend = loading.in_backend(
            model, source.backend, examined.quantization, is_unchanged=True
        )
        packed_models.append(in_backend.pack())
    return packed_models


def _choice_beside_file(
    choice: Choice | None,
    loaded: LoadedPair,
    draft: str | None = None,
) -> Choice | None:
    """Return the drafter to build in addition to a file's drafts.

    It is None if the choice names a class outside this package that a draft in the file has: the
    name then only allows the file to be read.

    Args:
        draft: name of the chosen draft; None for the first one.
    """
    if choice is None or choice.name in DRAFTERS:
        return choice

    draft_names = [
        name for name, drafter in loaded.drafts.items() if _contains(drafter, choice.name)
    ]
    if not draft_names:
        return choice
    if choice.settings:
        setting_name = next(iter(choice.settings))
        raise ValueError(
            f"the draft is a {choice.name} with its own settings: drop --drafter.{setting_name}"
        )
    if draft is None and next(iter(loaded.drafts)) not in draft_names:
        raise ValueError(
            f"{choice.name} is the class of the draft {draft_names[0]}: "
            "say which draft to take with --draft"
        )
    return None


def _contains(drafter: Drafter, class_name: str) -> bool:
    """Whether a drafter or a part of it is of a class."""
    return any(DRAFTERS.name_of(type(module)) == class_name for module in drafter.modules())


def _choose_drafter(
    choice: Choice | None,
    target: LanguageModel,
    draft: Drafter | LanguageModel | None,
    *,
    is_named: bool,
) -> Drafter:
    """Return the chosen kind of drafter; without a choice, the one that suits the draft.

    Args:
        draft: a draft model, or a complete drafter.
        is_named: whether the user named this draft, so that a kind without use for it is an error.
    """
    if choice is None:
        return _default_drafter(target, draft)

    drafter_class = DRAFTERS.load(choice.name)
    joins_lookup = issubclass(drafter_class, NGramWithFallback)
    names_part_of_target = "exit_layer" in choice.settings or choice.settings.get("mtp")
    if joins_lookup and draft is None and not names_part_of_target:
        raise ValueError(
            f"{choice.name} needs a draft to join lookup to: give --draft, "
            "--drafter.exit_layer N to draft with the target's first N layers, or "
            "--drafter.mtp true to draft with its prediction layers"
        )
    if joins_lookup or not isinstance(draft, Drafter):
        return drafter_class.for_target(target, draft, **choice.settings)

    if type(draft) is not drafter_class:
        # A checkpoint's default draft may be replaced, a draft that the user named may not.
        if is_named:
            raise other_drafter(type(draft).__name__, choice.name)
        return drafter_class.for_target(target, **choice.settings)

    drafter = _with_settings(draft, choice)
    drafter.check_target(target)
    return drafter


def _default_drafter(target: LanguageModel, draft: Drafter | LanguageModel | None) -> Drafter:
    """Return the drafter that suits a draft."""
    if draft is None:
        return NGramDrafter()
    if not isinstance(draft, Drafter):
        return CrossVocabulary.for_target(target, draft)
    draft.check_target(target)
    return draft


def _with_settings(drafter: Drafter, choice: Choice) -> Drafter:
    """Return a trained drafter with the setting that may change after training."""
    for name, value in choice.settings.items():
        if name != drafter.free:
            raise ValueError(
                f"the draft is a {choice.name} with its own settings: drop --drafter.{name}"
            )
        drafter = drafter.at(value)
    return drafter


def wrap_model(source: Any) -> Any:
    """Return a loaded module of transformers as a `HuggingFaceLM`, and anything else unchanged."""
    if not isinstance(source, nn.Module) or isinstance(source, LanguageModel | Drafter):
        return source
    from lightning_specdec.models.huggingface import HuggingFaceLM

    return HuggingFaceLM(source)  # type: ignore[arg-type]
