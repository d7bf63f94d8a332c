"""What a sweep tries: engines that compute the target, and drafts that belong to it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lightning_specdec.bench.candidates import exits
from lightning_specdec.checkpoints import runs
from lightning_specdec.checkpoints.archive import BROKEN, KEY
from lightning_specdec.checkpoints.checkpoint import is_draft_for
from lightning_specdec.checkpoints.engine_heads import is_head
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.models import MOST_SMALL, PairSource
from lightning_specdec.config.pairs import shipped_directory
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.drafters import (
    Drafter,
    EarlyExitDrafter,
    NGramDrafter,
    NGramWithFallback,
)
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.loading import check_openvino
from lightning_specdec.models.packed import SMALL_MODEL, check_quantization
from lightning_specdec.models.safetensors_file import read_header
from lightning_specdec.models.threads import is_busy

log = logging.getLogger(__name__)

LOOKUP = Choice("NGramDrafter")
LOOKUP_FIRST = Choice("NGramWithFallback")
LOOKUP_NAME = "prompt lookup"
MTP_NAME = "prediction layers"
_BACKEND_NAMES = {"torch": "torch", "openvino": "OpenVINO"}


@dataclass(frozen=True)
class Engine:
    """What computes the target.

    Args:
        backend: "torch" or "openvino".
        num_threads: CPU threads; None on a GPU.
        quantization: of the weights; None as they are stored.
    """

    backend: str
    num_threads: int | None
    quantization: str | None = None

    @property
    def name(self) -> str:
        """The engine in a few words, without what is the same for all."""
        words = [_BACKEND_NAMES[self.backend]]
        if self.quantization is not None:
            words.append(f"{self.quantization} weights")
        if self.num_threads is not None:
            plural = "" if self.num_threads == 1 else "s"
            words.append(f"{self.num_threads} thread{plural}")
        return ", ".join(words)


@dataclass(frozen=True)
class Drafting:
    """One kind of draft.

    Args:
        name: what tables call it.
        fields: fields of a `PairSource` that load it: `draft`, `drafter`, `draft_dtype`, ...
        found: where it was found, and what it is; empty if the user named it.
        is_trained_exit: whether it is an early exit that was trained for the target.
        backend: the only backend that computes it on a CPU; None if every one does.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict, hash=False)
    found: str = field(default="", compare=False)
    is_trained_exit: bool = field(default=False, compare=False)
    backend: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Way:
    """A way to decode that a user can choose.

    Args:
        drafting: None for standard decoding.
        num_draft_tokens: per round; None for standard decoding.
    """

    engine: Engine
    drafting: Drafting | None = None
    num_draft_tokens: int | str | None = None

    @property
    def name(self) -> str:
        """The way in a few words."""
        if self.drafting is None:
            return f"standard decoding in {self.engine.name}"
        return f"{self.draft_name}, in {self.engine.name}"

    @property
    def draft_name(self) -> str:
        """The draft with its window, without the engine."""
        if self.drafting is None:
            return "standard decoding"
        return f"{self.drafting.name}, {self.num_draft_tokens} draft tokens"

    def source(self, source: PairSource) -> PairSource:
        """What loads it.

        Args:
            source: the target, and settings that all ways share.
        """
        fields: dict[str, Any] = {"backend": self.engine.backend}
        if self.engine.quantization is not None:
            fields["quantization"] = self.engine.quantization
        if self.drafting is not None:
            fields.update(self.drafting.fields)
        return source.changed(**fields)


def engines(
    target: LanguageModel,
    source: PairSource,
    *,
    num_threads: int | None = None,
    any_quantization: bool = False,
) -> list[Engine]:
    """The engines that can compute a target here. The first one is the default.

    Args:
        target: as `source` loads it with torch.
        source: names the target; a backend other than "auto" is the only one.
        num_threads: the only number of CPU threads; if None, several are tried.
        any_quantization: whether to try int8 weights too, which make it another model.
    """
    if target.device.type != "cpu":
        return [Engine("torch", None, source.quantization)]

    backends = [source.backend]
    if source.backend == "auto":
        backends = ["torch"]
        if _can_use_openvino(target, source):
            backends.append("openvino")
    quantizations = [source.quantization]
    if any_quantization and source.quantization is None and _can_quantize(target):
        quantizations.append("int8")

    thread_counts = [num_threads] if num_threads else _thread_counts(target)
    all_engines = []
    # Backends differ most, so they are tried before other numbers of threads.
    for quantization in quantizations:
        for count in thread_counts:
            for backend in backends:
                all_engines.append(Engine(backend, count, quantization))
    return all_engines


def _thread_counts(target: LanguageModel) -> list[int]:
    """Numbers of CPU threads to try: torch's present number first, or one on a busy machine.

    Threads wait for each other, so a core that is busy slows all of them down, and with them
    everything that is compared.
    """
    default = torch.get_num_threads()
    if target.num_parameters < SMALL_MODEL:
        return [default]
    num_cores = len(os.sched_getaffinity(0))
    counts = [default, num_cores, 1]
    if is_busy():
        counts = [1, default, num_cores]
    return list(dict.fromkeys(counts))


def reason_against_openvino(target: LanguageModel, source: PairSource) -> str | None:
    """Why OpenVINO is not tried for a small model, if it is installed and could compute it."""
    is_small = target.num_parameters <= MOST_SMALL
    if source.backend != "auto" or not is_small or not _openvino_computes(target, source):
        return None
    return (
        f"it is not tried for models of at most {MOST_SMALL / 1e6:.0f}M parameters: "
        "--backend openvino tries it"
    )


def _can_use_openvino(target: LanguageModel, source: PairSource) -> bool:
    return target.num_parameters > MOST_SMALL and _openvino_computes(target, source)


def _openvino_computes(target: LanguageModel, source: PairSource) -> bool:
    takes_apart = getattr(target, "takes_apart", False)
    if not takes_apart:
        return False
    try:
        check_openvino(source.chosen_device)
    except ValueError:
        return False
    return True


def _can_quantize(target: LanguageModel) -> bool:
    if not hasattr(target, "model"):
        return False
    try:
        check_quantization("int8", target.device)
    except ValueError as error:
        log.warning("int8 weights are not tried: %s", error)
        return False
    return True


def draftings(
    decoder: SpeculativeDecoder,
    source: PairSource,
    drafts: Sequence[str] = (),
) -> list[Drafting]:
    """The drafts to try with a target: each alone, and after prompt lookup.

    Without a choice of the user these are prompt lookup, the drafts of a checkpoint, the prediction
    layers in the target's own checkpoint, and draft files that belong to the target: beside it,
    among runs, and among those that ship.

    Args:
        decoder: has the target, and a checkpoint's drafts.
        source: what loaded it.
        drafts: drafts to try instead of those that are found: names among the drafts of a
            checkpoint; or files, directories of runs, heads or models, and names on the Hub.
    """
    if source.drafter is not None:
        return _chosen_draftings(source, drafts)
    if source.ckpt is not None:
        return [Drafting(LOOKUP_NAME, {"drafter": LOOKUP}), *_checkpoint_draftings(decoder, drafts)]

    lookup = Drafting(LOOKUP_NAME, {"drafter": LOOKUP, **NO_DRAFT})
    if source.draft_quantization is not None and source.draft is None and not drafts:
        # Without a draft model, a quantized copy of the target drafts.
        return [lookup, *both_ways(f"{source.draft_quantization} copy", {})]

    sources = [draft_source(draft) for draft in drafts]
    if source.draft is not None:
        # A pair's own draft.
        sources.insert(0, source.draft)
    places = [""] * len(sources)
    if not drafts:
        for path in matching_drafts(decoder.target, sources):
            sources.append(str(path))
            places.append(f"{_place(path, decoder.target)}: {path}")
    draftings = [lookup]
    if not drafts:
        draftings += _mtp_draftings(decoder.target)
    for draft, name, found in zip(sources, _distinct_names(sources), places, strict=True):
        layers = trained_exits(Path(draft).expanduser()) if found else ()
        if layers:
            draftings += _exits_of_file(draft, name, found, layers)
            continue
        draftings += both_ways(name, {"draft": draft}, found)
        if _is_model(draft) and source.draft_quantization is None:
            draftings += in_int4(name, {"draft": draft}, found)
    return draftings


def _mtp_draftings(target: LanguageModel) -> list[Drafting]:
    """The prediction layers in the target's own checkpoint, alone and after lookup, if it has any.

    They were trained with the target.
    """
    if target.origin is None:
        return []
    from lightning_specdec.models.mtp_files import count_stored_layers, reason_against_mtp

    if reason_against_mtp(target) is not None:
        return []
    count = count_stored_layers(target)
    plural = "" if count == 1 else "s"
    found = f"in the target's checkpoint: {count} multi-token prediction layer{plural}"
    alone = {**NO_DRAFT, "drafter": Choice("MtpDrafter")}
    joined = {**NO_DRAFT, "drafter": Choice(LOOKUP_FIRST.name, {"mtp": True})}
    return [
        Drafting(MTP_NAME, alone, found),
        Drafting(f"{LOOKUP_NAME}, then {MTP_NAME}", joined, found),
    ]


def _exits_of_file(draft: str, name: str, found: str, layers: Sequence[int]) -> list[Drafting]:
    """The trained exits of a draft file, each alone and after lookup."""
    draftings = []
    for layer in layers:
        settings = {"exit_layer": layer}
        kinds = both_ways(f"{name}, exit {layer}", {"draft": draft}, found, settings)
        draftings += [replace(kind, is_trained_exit=True) for kind in kinds]
    return draftings


def trained_exits(path: Path) -> list[int]:
    """The exits that have an output head in a draft file; none if it is of another kind."""
    if path.suffix != ".safetensors" or not path.is_file():
        return []
    try:
        metadata, _ = read_header(path)
        drafter = json.loads(metadata.get(KEY, "{}"))["drafter"]
        if drafter["class"] != "EarlyExitDrafter":
            return []
        return [int(layer) for layer in drafter["arguments"]["head_layers"]]
    except BROKEN as error:
        log.debug("%s has no early exits: %s", path, error)
        return []


def _place(path: Path, target: LanguageModel) -> str:
    """Where a draft file was found, in words."""
    assert target.origin is not None
    directory = Path(target.origin.path)
    if path.parent.resolve() in (directory.resolve(), directory.parent.resolve()):
        return "beside the target"
    return "among the drafts that ship" if path.is_absolute() else "in the current directory"


NO_DRAFT: Mapping[str, None] = {
    "draft": None,
    "draft_quantization": None,
    "draft_dtype": None,
    "draft_revision": None,
    "draft_adapter": None,
}
"""Fields of a source without a draft model."""


def draft_source(draft: str) -> str:
    """A draft as decoding loads it: for a directory of runs, the best checkpoint of the newest."""
    path = Path(draft).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        return str(runs.find(path))
    return draft


def both_ways(
    name: str,
    fields: Mapping[str, Any],
    found: str = "",
    exit_settings: Mapping[str, Any] | None = None,
) -> list[Drafting]:
    """A draft alone and after prompt lookup.

    Args:
        name, fields, found: as of a `Drafting`.
        exit_settings: settings of an early exit; None if it is another kind of draft.
    """
    alone = dict(fields)
    joined = {**fields, "drafter": LOOKUP_FIRST}
    if exit_settings is not None:
        alone["drafter"] = Choice("EarlyExitDrafter", exit_settings)
        joined["drafter"] = Choice(LOOKUP_FIRST.name, exit_settings)
    return [
        Drafting(name, alone, found),
        Drafting(f"{LOOKUP_NAME}, then {name}", joined, found),
    ]


def in_int4(name: str, fields: Mapping[str, Any], found: str = "") -> list[Drafting]:
    """A draft model with weights in int4, alone and after prompt lookup.

    The weights of a draft change no output, and it reads them once for each draft token. In torch,
    int4 needs a GPU.

    Args:
        name, fields, found: as of a `Drafting`, for the model as it is stored.
    """
    kinds = both_ways(f"{name} in int4", {**fields, "draft_quantization": "int4"}, found)
    return [replace(kind, backend="openvino") for kind in kinds]


def _is_model(draft: str) -> bool:
    """Whether a draft is a model with an output head of its own: a directory, or on the Hub."""
    path = Path(draft).expanduser()
    if not path.exists():
        return path.suffix not in (".safetensors", ".ckpt", ".gguf")
    return (path / "config.json").is_file() and not is_head(path)


def _distinct_names(drafts: Sequence[str]) -> list[str]:
    """The drafts' names in tables: short ones, unless several drafts have the same.

    Ways are told apart by their names.
    """
    short_names = [_short_name(draft) for draft in drafts]
    names = []
    for draft, short_name in zip(drafts, short_names, strict=True):
        names.append(short_name if short_names.count(short_name) == 1 else draft)
    return names


def _short_name(draft: str) -> str:
    """A draft's name in tables: that of its file, of the directory of its run, or of a model."""
    path = Path(draft)
    if path.suffix == ".ckpt":
        directory = path.parent
        return directory.parent.name if directory.name.startswith("version_") else directory.name
    return path.stem if path.suffix == ".safetensors" else path.name


def _chosen_draftings(source: PairSource, drafts: Sequence[str]) -> list[Drafting]:
    """The drafter that the user named, with each of the drafts."""
    if not drafts:
        return [Drafting(source.drafter.label)]
    names = drafts if source.ckpt is not None else [draft_source(draft) for draft in drafts]
    draftings = []
    for draft, name in zip(names, _distinct_names(names), strict=True):
        draftings.append(Drafting(f"{source.drafter.label} with {name}", {"draft": draft}))
    return draftings


def _checkpoint_draftings(decoder: SpeculativeDecoder, names: Sequence[str]) -> Iterable[Drafting]:
    """The drafts of a checkpoint, and the exits of those that exit early."""
    known: dict[str | None, Drafter] = {}
    known.update(decoder.drafts)
    if not known:
        # A single drafter has no name.
        known[None] = decoder.drafter
    for name in names:
        if name not in known:
            choices = ", ".join(decoder.drafts)
            if not choices:
                kind = DRAFTERS.name_of(type(decoder.drafter))
                choices = f"one {kind}, which has no name"
            raise ValueError(f"there is no draft {name!r} to choose: there is {choices}")

    chosen_names: Iterable[str | None] = names or known
    for chosen_name in chosen_names:
        yield from _named_draftings(decoder, chosen_name, known[chosen_name])


def _named_draftings(
    decoder: SpeculativeDecoder,
    name: str | None,
    drafter: Drafter,
) -> Iterable[Drafting]:
    """A draft of a checkpoint alone and after lookup; of one that exits early, all exits."""
    label = name or DRAFTERS.name_of(type(drafter))
    fields = {} if name is None else {"draft": name}
    if isinstance(drafter, EarlyExitDrafter):
        prefix = "" if name is None else f"{name}, "
        for exit_layer in exits(decoder.target, drafter):
            choice = Choice("EarlyExitDrafter", {"exit_layer": exit_layer})
            yield Drafting(f"{prefix}exit {exit_layer}", {**fields, "drafter": choice})
        label = f"{label}, exit {drafter.exit_layer}"
        yield Drafting(f"{LOOKUP_NAME}, then {label}", {**fields, "drafter": LOOKUP_FIRST})
    elif isinstance(drafter, NGramDrafter | NGramWithFallback):
        yield Drafting(label, fields)
    else:
        yield from both_ways(label, fields)


def matching_drafts(target: LanguageModel, known: Sequence[str] = ()) -> list[Path]:
    """Draft files that were trained for a target, by the sha256 of its weights.

    They are looked for beside the target, in the current directory's `checkpoints`, the newest
    runs there included, and among those that ship.

    Args:
        known: drafts that need not be found.
    """
    if target.origin is None:
        return []
    directory = Path(target.origin.path)
    shipped = shipped_directory().parents[1] / "checkpoints"
    paths: list[Path] = []
    for place in (directory, directory.parent, Path("checkpoints"), shipped):
        paths += sorted(place.glob("*.safetensors"))
    for run_directory in sorted(Path("checkpoints").glob("*/version_*")):
        paths += _newest_checkpoint(run_directory.parent)

    # The same file may be found in several places.
    seen = {Path(draft).expanduser().resolve() for draft in known}
    nearby_paths = []
    for path in paths:
        if path.resolve() not in seen and is_draft_for(path, target.origin):
            nearby_paths.append(_from_here(path))
        seen.add(path.resolve())
    return nearby_paths


def _newest_checkpoint(directory: Path) -> list[Path]:
    try:
        return [runs.find(directory)]
    except OSError:
        return []


def _from_here(path: Path) -> Path:
    """A path as short as it can be given in the current directory."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def ways(engine: Engine, kinds: Iterable[Drafting], windows: Sequence[int | str]) -> list[Way]:
    """Standard decoding in an engine, and each kind of draft with each window."""
    result = [Way(engine)]
    for kind in kinds:
        for window in windows:
            result.append(Way(engine, kind, window))
    return result
