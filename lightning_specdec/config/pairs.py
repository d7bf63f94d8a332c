"""The registry of pairs: one YAML file `configs/pairs/NAME.yaml` for each. `sweep --save` adds one.

Two directories are read: the one that ships with this package, and `configs/pairs` below the
current directory, whose files override shipped ones of the same name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.files import replaced
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import ModelSize, peak_bytes
from lightning_specdec.config.models import (
    BACKENDS,
    CHECKPOINTS,
    DTYPES,
    MAKE_TARGETS,
    QUANTIZATIONS,
    PairSource,
)
from lightning_specdec.config.settings import Settings, nearest, nearest_path, setting
from lightning_specdec.config.yaml_text import read_yaml

log = logging.getLogger(__name__)

OWN = Path("configs/pairs")
"""Directory of the user's pairs, relative to the current directory."""
LOOKUP_FIRST = ("NGramWithFallback", "SuffixCorpusWithFallback")
"""Drafters that try a lookup before another draft."""
MOST_THREADS = 1024
"""Largest number of CPU threads."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"


@dataclass(frozen=True, kw_only=True)
class PairModel(Settings):
    """One model of a pair: its location, storage, and size."""

    source: str = setting(help="name on the Hub, or a directory")
    dtype: str = setting(help="compute in this dtype", choices=DTYPES)
    size: ModelSize = setting(help="the counts that determine its memory")
    local: str | None = setting(None, "directory to use instead of the source if it exists")
    quantization: str | None = setting(None, "quantize its weight matrices", choices=QUANTIZATIONS)
    revision: str | None = setting(None, "branch, tag or commit on the Hub")
    adapter: str | None = setting(None, "adapter of PEFT to merge: a directory or a Hub name")

    @property
    def local_copy(self) -> str | None:
        """The local directory if it exists, in the current directory or in the clone."""
        if self.local is None:
            return None
        path = shipped_file(self.local)
        return path if Path(path, "config.json").is_file() else None

    @property
    def make_target(self) -> str:
        """Target of the Makefile that writes the local directory."""
        directory = Path(self.local or self.source).name
        return MAKE_TARGETS.get(directory, directory)

    @property
    def location(self) -> str:
        """Where to load it from, relative to the current directory."""
        return self.local_copy or self.source

    @property
    def location_revision(self) -> str | None:
        """The revision to load from `location`; a local copy has none."""
        return None if self.local_copy is not None else self.revision


@dataclass(frozen=True, kw_only=True)
class Pair(Settings):
    """A target with its drafter, as a file of the registry describes them.

    `SpeculativeDecoder.from_pair` loads it.

    Raises:
        ValueError: a field is wrong, or there is no such drafter.
    """

    description: str = setting(help="one line")
    target: PairModel | None = setting(None, "the model whose output is wanted")
    ckpt: str | None = setting(None, "checkpoint that holds target and draft, instead of a target")
    drafter: Any = setting(
        None,
        "drafter class, by name, or with its settings as {class_path: ..., init_args: ...}; "
        "default: the kind of the draft file, or the checkpoint's own",
    )
    num_draft_tokens: int | str = setting(
        help="draft tokens per round, or auto", minimum=1, maximum=MAX_TOKENS, choices=("auto",)
    )
    draft: PairModel | None = setting(None, "the draft model, for drafters that need one")
    draft_file: str | None = setting(
        None,
        "draft file or directory that was trained for the target, or the name of one of the "
        "checkpoint's drafts. If the target names a local copy, the draft belongs to that copy: "
        "without it, prompt lookup runs alone",
    )
    backend: str | None = setting(None, "backend of the target", choices=BACKENDS)
    device: str | None = setting(
        None, "device to decode on, for example cuda:0; default: the CPU", metavar="DEVICE"
    )
    threads: int | None = setting(
        None,
        "CPU threads, which are set when the pair is loaded; default: unchanged",
        minimum=1,
        maximum=MOST_THREADS,
    )
    name: str = setting("", "name of its file, without the extension")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is None and self.ckpt is None:
            raise ValueError("target is missing: name a target, or a checkpoint as ckpt")
        if self.target is not None and self.ckpt is not None:
            raise ValueError("target and ckpt exclude each other: the checkpoint has its target")
        if self.drafter is not None:
            object.__setattr__(self, "drafter", Choice.read(self.drafter, "drafter"))
            DRAFTERS.check(self.drafter.name)
        elif self.draft_file is None and self.ckpt is None:
            raise ValueError("drafter is missing: name a drafter class")

    @property
    def models(self) -> tuple[PairModel, ...]:
        """The target, and the draft model if the pair has one; none of a checkpoint."""
        return tuple(model for model in (self.target, self.draft) if model is not None)

    @property
    def has_trained_draft(self) -> bool:
        """Whether `draft_file` is used: it belongs to the target's local copy, if there is one."""
        if self.draft_file is None:
            return False
        if self.target is None or self.target.local is None:
            return True
        draft_path = Path(shipped_file(self.draft_file)).expanduser()
        return self.target.local_copy is not None and draft_path.exists()

    @property
    def own_drafter(self) -> Choice | None:
        """The drafter to build; None for the one that the draft is."""
        if self.draft_file is not None and not self.has_trained_draft:
            return Choice("NGramDrafter")
        choice: Choice | None = self.drafter
        return choice

    @property
    def needs_gpu(self) -> bool:
        """Whether the pair runs only on a GPU, because a model has int4 weights."""
        return any(model.quantization == "int4" for model in self.models)

    def needed_bytes(self, *, packed: bool) -> int:
        """Peak bytes of memory while weights load, without KV caches.

        Args:
            packed: whether weights are laid out for a CPU's kernels.
        """
        models = [(model.size, model.dtype, model.quantization) for model in self.models]
        return peak_bytes(models, packed=packed)

    def complete(self, source: PairSource) -> PairSource:
        """Fill in the unset fields of a source that names this pair.

        A source with its own draft, or with another drafter class than the pair's, does not get
        the pair's draft model. `NGramWithFallback` and `SuffixCorpusWithFallback` are the
        exceptions, since they try a lookup before that model, and `ModelDrafter`, which uses the
        model without a lookup.
        """
        self._announce_hub_models()
        own_drafter = self.own_drafter
        drafter: Choice | None = source.drafter
        is_pairs_drafter = drafter is None or (
            own_drafter is not None and drafter.name == own_drafter.name
        )
        is_lookup_first = drafter is not None and drafter.name in LOOKUP_FIRST
        is_model_alone = drafter is not None and drafter.name == "ModelDrafter"
        uses_model = is_lookup_first or (is_model_alone and self.draft is not None)

        defaults = self._target_defaults()
        if source.draft is None and (is_pairs_drafter or uses_model):
            defaults.update(self._draft_defaults(source))
            if is_pairs_drafter and own_drafter is not None:
                settings = {} if drafter is None else drafter.settings
                drafter = Choice(own_drafter.name, {**own_drafter.settings, **settings})

        defaults["device"] = self.device
        missing = {name: value for name, value in defaults.items() if getattr(source, name) is None}
        if source.backend == "auto" and self.backend is not None:
            missing["backend"] = self.backend
        return source.changed(**missing | {"pair": None, "drafter": drafter})

    def _draft_defaults(self, source: PairSource) -> dict[str, Any]:
        """Fields of a source that name the draft; none if the pair has no model that drafts."""
        if self.draft is not None:
            return {
                "draft": self.draft.location,
                "draft_dtype": source.dtype or self.draft.dtype,
                "draft_quantization": self.draft.quantization,
                "draft_revision": self.draft.location_revision,
                "draft_adapter": self.draft.adapter,
            }
        if self.has_trained_draft:
            assert self.draft_file is not None
            return {"draft": shipped_file(self.draft_file)}
        return {}

    @property
    def models_without_copy(self) -> list[PairModel]:
        """Models with a local directory that is not here, so that they come from the Hub."""
        models = []
        for model in self.models:
            if model.local is not None and model.local_copy is None:
                models.append(model)
        return models

    def _announce_hub_models(self) -> None:
        """Warn of models that come from the Hub because their local copies are not here."""
        for model in self.models_without_copy:
            log.warning(
                "the pair %s is loaded from %s on the Hub, since there is no %s here (in a "
                "clone of the repository, `make %s` writes it)",
                self.name,
                model.source,
                model.local,
                model.make_target,
            )

    def _target_defaults(self) -> dict[str, Any]:
        """Fields of a source that name the target."""
        if self.target is None:
            return {"ckpt": self.ckpt}
        return {
            "target": self.target.location,
            "dtype": self.target.dtype,
            "quantization": self.target.quantization,
            "revision": self.target.location_revision,
            "adapter": self.target.adapter,
        }


def list_pairs() -> list[Pair]:
    """Return all pairs of the registry, sorted by name: shipped ones and the user's.

    Raises:
        ValueError: a file does not describe a pair.
    """
    return [read_pair(path) for _, path in sorted(_pair_files().items())]


def get_pair(name: str) -> Pair:
    """Look up a pair of the registry by name.

    Raises:
        ValueError: there is no such pair, or its file does not describe a pair.
    """
    files = _pair_files()
    if name not in files:
        advice = nearest(name, files) or f": choose from {', '.join(sorted(files))}"
        raise ValueError(f"there is no pair {name!r}{advice}")
    return read_pair(files[name])


def pair_path(name: str) -> Path:
    """The file of a new pair, in the current directory.

    Raises:
        ValueError: this cannot be a pair's name, or there is a pair of that name.
    """
    if not re.fullmatch(_NAME, name):
        raise ValueError(
            f"a pair is named by letters, digits, '.', '_' and '-', got {name!r}: give another name"
        )
    if name in _pair_files():
        raise ValueError(f"there is a pair {name} already: give another name")
    return OWN / f"{name}.yaml"


def write_pair(name: str, values: Mapping[str, Any]) -> Path:
    """Write a new pair to the registry of the current directory; returns its file.

    Args:
        values: fields of a `Pair` as plain values.

    Raises:
        ValueError: the name or a value is wrong, or there is a pair of that name.
        OSError: the file cannot be written.
    """
    path = pair_path(name)
    Pair.from_dict({**values, "name": name})
    with replaced(path) as file:
        file.write(yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).encode())
    return path


def shipped_directory() -> Path:
    """The registry that ships: inside an installed package, or next to it in a source tree."""
    inside_package = Path(__file__).parents[1] / "configs" / "pairs"
    if inside_package.is_dir():
        return inside_package
    return Path(__file__).parents[2] / "configs" / "pairs"


def shipped_config(word: str) -> str:
    """Resolve `configs/NAME.yaml` to a shipped config if the current directory has none."""
    if not word.startswith("configs/") or Path(word).exists():
        return word
    shipped = shipped_directory().parent / word.removeprefix("configs/")
    return str(shipped) if shipped.is_file() else word


def shipped_file(word: str) -> str:
    """Resolve `checkpoints/NAME` to what is in the clone, if the current directory has none.

    Only models and exported files are found there. Runs belong to the directory where they ran.
    """
    if not word.startswith(f"{CHECKPOINTS}/") or Path(word).exists():
        return word
    path = shipped_directory().parents[1] / word
    is_model = (path / "config.json").is_file()
    is_exported = path.suffix == ".safetensors" and path.is_file()
    return str(path) if is_model or is_exported else word


def nearest_config(path: str) -> str:
    """Return ": did you mean ...?" for the most similar config, beside a path or shipped."""
    shipped = shipped_directory().parent
    names = [f"configs/{config.relative_to(shipped)}" for config in shipped.glob("**/*.yaml")]
    neighbors = Path(path).expanduser().parent.glob("*.yaml")
    names += [str(neighbor) for neighbor in neighbors]
    return nearest_path(path, names)


def read_pair(path: Path) -> Pair:
    """Return the pair that a file describes. Nothing in the file is executed.

    Raises:
        ValueError: it is not YAML, or has an unknown, missing, or wrong entry.
    """
    values = read_yaml(path)
    try:
        if isinstance(values, dict):
            if "name" in values:
                raise ValueError("name follows from the file's name: drop it")
            values["name"] = path.stem
        return Pair.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _pair_files() -> dict[str, Path]:
    """The registry's files by pair name."""
    files = {}
    for directory in (shipped_directory(), OWN):
        for path in sorted(directory.glob("*.yaml")):
            files[path.stem] = path
    return files
