"""The registry of pairs: one YAML file `configs/pairs/NAME.yaml` for each.

Two directories are read: the one that ships with this package, and `configs/pairs` below the
current directory, whose files override shipped ones of the same name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import ModelSize, peak_bytes
from lightning_specdec.config.models import CHECKPOINTS, DTYPES, QUANTIZATIONS, PairSource
from lightning_specdec.config.settings import Settings, nearest, setting
from lightning_specdec.config.yaml_text import read_yaml

log = logging.getLogger(__name__)

OWN = Path("configs/pairs")
"""Directory of the user's pairs, relative to the current directory."""


@dataclass(frozen=True, kw_only=True)
class PairModel(Settings):
    """One model of a pair: its location, storage, and size."""

    source: str = setting(help="name on the Hub, or a directory")
    dtype: str = setting(help="compute in this dtype", choices=DTYPES)
    size: ModelSize = setting(help="the counts that determine its memory")
    local: str | None = setting(None, "directory to use instead of the source if it exists")
    quantization: str | None = setting(None, "quantize its weight matrices", choices=QUANTIZATIONS)
    revision: str | None = setting(None, "branch, tag or commit on the Hub")

    @property
    def local_copy(self) -> str | None:
        """The local directory if it exists, in the current directory or in the clone."""
        if self.local is None:
            return None
        path = shipped_file(self.local)
        return path if Path(path, "config.json").is_file() else None

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
    target: PairModel = setting(help="the model whose output is wanted")
    drafter: Any = setting(
        help="drafter class, by name, or with its settings as {class_path: ..., init_args: ...}"
    )
    num_draft_tokens: int | str = setting(
        help="draft tokens per round, or auto", minimum=1, maximum=MAX_TOKENS, choices=("auto",)
    )
    draft: PairModel | None = setting(None, "the draft model, for drafters that need one")
    name: str = setting("", "name of its file, without the extension")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drafter", Choice.read(self.drafter, "drafter"))
        DRAFTERS.check(self.drafter.name)

    @property
    def models(self) -> tuple[PairModel, ...]:
        """The target, and the draft model if the pair has one."""
        if self.draft is None:
            return (self.target,)
        return (self.target, self.draft)

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
        the pair's draft model. `NGramWithFallback` is the exception: it runs prompt lookup before
        that model.
        """
        for model in self.models:
            if model.local is not None and model.local_copy is None:
                log.warning(
                    "the pair %s is loaded from %s on the Hub, since there is no %s here (in a "
                    "clone of the repository, `make %s` writes it)",
                    self.name,
                    model.source,
                    model.local,
                    Path(model.local).name,
                )
        defaults: dict[str, Any] = {
            "target": self.target.location,
            "dtype": self.target.dtype,
            "quantization": self.target.quantization,
            "revision": self.target.location_revision,
        }

        drafter: Choice | None = source.drafter
        is_pairs_drafter = drafter is None or drafter.name == self.drafter.name
        is_lookup_first = drafter is not None and drafter.name == "NGramWithFallback"
        if source.draft is None and (is_pairs_drafter or is_lookup_first):
            if is_pairs_drafter:
                settings = {} if drafter is None else drafter.settings
                drafter = Choice(self.drafter.name, {**self.drafter.settings, **settings})
            if self.draft is not None:
                defaults.update(
                    draft=self.draft.location,
                    draft_dtype=source.dtype or self.draft.dtype,
                    draft_quantization=self.draft.quantization,
                    draft_revision=self.draft.location_revision,
                )

        missing = {name: value for name, value in defaults.items() if getattr(source, name) is None}
        return source.changed(**missing | {"pair": None, "drafter": drafter})


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


def shipped_directory() -> Path:
    """The registry that ships: inside an installed package, or beside it in a source tree."""
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
    return nearest(path, names)


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
