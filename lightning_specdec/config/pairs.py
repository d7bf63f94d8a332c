"""The registry of pairs: one YAML file `configs/pairs/NAME.yaml` for each.

It reads the directory that ships with this package and the one below the current directory, whose files win over
shipped ones of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.kinds import DRAFTERS, Choice
from lightning_specdec.config.memory import ModelSize, peak_bytes
from lightning_specdec.config.models import DTYPES, QUANTIZATIONS, PairSource
from lightning_specdec.config.settings import Settings, nearest, setting
from lightning_specdec.config.yaml_text import read_yaml

OWN = Path("configs/pairs")
"""Below the current directory, for pairs of the user's own."""


@dataclass(frozen=True, kw_only=True)
class PairModel(Settings):
    """One model of a pair: where it is, its storage and its size."""

    source: str = setting(help="name on the hub, or a directory")
    dtype: str = setting(help="compute in this dtype", choices=DTYPES)
    size: ModelSize = setting(help="what decides its memory")
    local: str | None = setting(None, "directory to use instead of the source if it exists")
    quantization: str | None = setting(None, "quantize its matrices", choices=QUANTIZATIONS)
    revision: str | None = setting(None, "branch, tag or commit on the hub")

    @property
    def place(self) -> str:
        """Where to load it from, as seen from the current directory."""
        return (
            self.local
            if self.local is not None and Path(self.local, "config.json").is_file()
            else self.source
        )

    @property
    def place_revision(self) -> str | None:
        """The revision to load from that place; a local copy has none."""
        return None if self.place == self.local else self.revision


@dataclass(frozen=True, kw_only=True)
class Pair(Settings):
    """A target with its drafter, as a file of the registry describes them. `SpeculativeDecoder.from_pair` loads it.

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
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def needs_gpu(self) -> bool:
        """Whether the pair runs on a GPU only: a model has int4 weights."""
        return any(model.quantization == "int4" for model in self.models)

    def needed_bytes(self, *, packed: bool) -> int:
        """Peak bytes of memory while weights load, without caches; `packed`: with weights laid out for a CPU."""
        return peak_bytes(
            [(model.size, model.dtype, model.quantization) for model in self.models], packed=packed
        )

    def complete(self, source: PairSource) -> PairSource:
        """The source, which names this pair, with its unset fields filled in from the pair.

        A source with another draft, or with another drafter class than the pair's, does not get the pair's draft model.
        The class `NGramWithFallback` is the exception: it puts lookup before that model.
        """
        own: dict[str, Any] = {
            "target": self.target.place,
            "dtype": self.target.dtype,
            "quantization": self.target.quantization,
            "revision": self.target.place_revision,
        }
        choice, names = source.drafter, (self.drafter.name, "NGramWithFallback")
        if source.draft is None and (choice is None or choice.name in names):
            if choice is None or choice.name == self.drafter.name:
                given = {} if choice is None else choice.settings
                choice = Choice(self.drafter.name, {**self.drafter.settings, **given})
            if self.draft is not None:
                own |= {
                    "draft": self.draft.place,
                    "draft_dtype": source.dtype or self.draft.dtype,
                    "draft_quantization": self.draft.quantization,
                    "draft_revision": self.draft.place_revision,
                }
        missing = {name: value for name, value in own.items() if getattr(source, name) is None}
        return source.changed(**{**missing, "pair": None, "drafter": choice})


def list_pairs() -> list[Pair]:
    """All pairs of the registry, sorted by name: shipped ones and those in `configs/pairs` of the current directory.

    Raises:
        ValueError: a file does not describe a pair.
    """
    return [read_pair(path) for _, path in sorted(_files().items())]


def get_pair(name: str) -> Pair:
    """Look up a pair of the registry by name.

    Raises:
        ValueError: there is no such pair, or its file does not describe a pair.
    """
    files = _files()
    if name not in files:
        advice = nearest(name, files) or f": choose from {', '.join(sorted(files))}"
        raise ValueError(f"there is no pair {name!r}{advice}")
    return read_pair(files[name])


def shipped_directory() -> Path:
    """Where the registry that comes with this package is: inside an installed one, beside it in a source tree."""
    inside = Path(__file__).parents[1] / "configs" / "pairs"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "configs" / "pairs"


def shipped_config(word: str) -> str:
    """A shipped config by its name `configs/NAME.yaml`, where the current directory has no such file."""
    shipped = shipped_directory().parent / word.removeprefix("configs/")
    return (
        str(shipped)
        if word.startswith("configs/") and not Path(word).exists() and shipped.is_file()
        else word
    )


def read_pair(path: Path) -> Pair:
    """The pair that a file describes.

    Raises:
        ValueError: it is no YAML, or has an unknown, missing or wrong entry. Nothing in it is run.
    """
    values = read_yaml(path)
    try:
        if isinstance(values, dict) and "name" in values:
            raise ValueError("name follows from the file's name: drop it")
        return Pair.from_dict({**values, "name": path.stem} if isinstance(values, dict) else values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _files() -> dict[str, Path]:
    return {
        path.stem: path
        for directory in (shipped_directory(), OWN)
        for path in sorted(directory.glob("*.yaml"))
    }
