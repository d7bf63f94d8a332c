"""The registry of pairs: one YAML each under configs/pairs, by the file's name.

Two directories are read: the one that ships with this package, and `configs/pairs` of the current directory, whose
files win over shipped ones of the same name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lightning_specdec.checks import require_int
from lightning_specdec.memory import BYTES, QUANTIZATIONS, ModelSize, peak_bytes

OWN = Path("configs/pairs")
"""Below the current directory, for pairs of the user's own."""
DRAFTERS = {
    "ModelDrafter": True,
    "CrossVocabulary": True,
    "NGramDrafter": False,
    "LookupFirstDrafter": True,
    "EarlyExitDrafter": False,
}
"""The kinds of drafters that a pair may name, and whether they need a draft model."""


@dataclass(frozen=True)
class PairModel:
    """A model of a pair.

    Args:
        source: its name on the hub, or a directory.
        dtype: what it computes in.
        size: what decides its memory.
        local: a directory that is taken instead of the source where it is there.
        hint: the command that makes this directory, told where the source cannot be had.
        quantization: how its matrices are stored: int8, int4, or None.
        revision: branch, tag or commit on the hub.
        gated: whether the hub wants a token (HF_TOKEN) of an account that accepted its terms.
    """

    source: str
    dtype: str
    size: ModelSize
    local: str | None = None
    hint: str | None = None
    quantization: str | None = None
    revision: str | None = None
    gated: bool = False

    @property
    def place(self) -> str:
        """Where to load it from, as seen from the current directory."""
        return self.local if self.local is not None and Path(self.local, "config.json").is_file() else self.source

    @property
    def advice(self) -> str:
        """What to do where the source cannot be had; empty where nothing is known."""
        return "" if self.hint is None or self.place == self.local else f"; or make {self.local}: `{self.hint}`"


@dataclass(frozen=True)
class Pair:
    """A target and what guesses for it.

    Args:
        name: of its file, without the ending.
        description: one line.
        target: the model whose output is wanted.
        drafter: the class that guesses.
        num_draft_tokens: guesses per round; "auto" for a window that adapts.
        draft: the model that it guesses with, for drafters that need one.
        drafter_arguments: the drafter's other arguments.
        path: the file.
    """

    name: str
    description: str
    target: PairModel
    drafter: str
    num_draft_tokens: int | str
    path: Path
    draft: PairModel | None = None
    drafter_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> tuple[PairModel, ...]:
        """Target and draft, or the target alone."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def needs_gpu(self) -> bool:
        """Whether a model's weights have a kernel on GPUs only."""
        return any(model.quantization == "int4" for model in self.models)

    def weight_bytes(self, *, packed: bool) -> tuple[int, int]:
        """Bytes of all weights, and the most that is there while they are loaded; `packed`: as on a CPU."""
        return peak_bytes([(model.size, model.dtype, model.quantization) for model in self.models], packed=packed)

    def cache_bytes(self, *, batch_size: int, length: int) -> int:
        """Bytes of all keys and values for so many rows and tokens; computing takes a little more."""
        return sum(model.size.cache_bytes(model.dtype, batch_size=batch_size, length=length) for model in self.models)


def list_pairs() -> list[Pair]:
    """All pairs, by name.

    Raises:
        ValueError: a file is no description of a pair.
    """
    return [read_pair(path) for _, path in sorted(_files().items())]


def get_pair(name: str) -> Pair:
    """The pair of that name.

    Raises:
        ValueError: there is none, or its file is no description of a pair.
    """
    files = _files()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(sorted(files))}"
        raise ValueError(f"there is no pair {name!r}: {advice}")
    return read_pair(files[name])


def shipped_directory() -> Path:
    """Where the registry that comes with this package is: inside an installed one, beside it in a source tree."""
    inside = Path(__file__).parent / "configs" / "pairs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs" / "pairs"


def _files() -> dict[str, Path]:
    return {path.stem: path for directory in (shipped_directory(), OWN) for path in sorted(directory.glob("*.yaml"))}


def read_pair(path: Path) -> Pair:
    """The pair that a file describes.

    Raises:
        ValueError: it is no YAML, or has an unknown, missing or wrong entry. Nothing in it is run.
    """
    import yaml

    from lightning_specdec.yaml_text import check_yaml

    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{path} is no YAML{place}: see the pairs that ship for how one looks") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return _pair(path, _checked(values, Pair, "", derived={"name", "path"}))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _pair(path: Path, values: dict[str, Any]) -> Pair:
    drafter, window = values["drafter"], values["num_draft_tokens"]
    if drafter not in DRAFTERS:
        raise ValueError(f"drafter must be one of {', '.join(DRAFTERS)}, got {drafter!r}")
    if DRAFTERS[drafter] != ("draft" in values):
        raise ValueError(f"{drafter} needs a draft model" if DRAFTERS[drafter] else f"{drafter} takes no draft model")
    if window != "auto":
        require_int("num_draft_tokens", window, 1)
    arguments = values.get("drafter_arguments", {})
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise ValueError(f"drafter_arguments must be a mapping of names, got {arguments!r}")
    for role in ("target", "draft"):
        if role in values:
            values[role] = _model(values[role], role)
    return Pair(name=path.stem, path=path, **values)


def _model(values: object, role: str) -> PairModel:
    checked = _checked(values, PairModel, f"{role}.")
    for name, choices in (("dtype", tuple(BYTES)), ("quantization", (None, *QUANTIZATIONS))):
        if checked.get(name) not in choices:
            listed = ", ".join(str(choice) for choice in choices if choice is not None)
            raise ValueError(f"{role}.{name} must be one of {listed}, got {checked[name]!r}")
    sizes = _checked(checked["size"], ModelSize, f"{role}.size.")
    try:
        size = ModelSize(**sizes)
    except ValueError as error:
        raise ValueError(f"{role}.size: {error}") from error
    return PairModel(**{**checked, "size": size})


_TYPES = {"str": str, "bool": bool, "int": int, "str | None": str, "int | None": int}
"""What an entry must be, by its field's annotation; the others are checked where they are used."""


def _checked(values: object, kind: type[Any], prefix: str, *, derived: set[str] | None = None) -> dict[str, Any]:
    """A mapping whose keys are fields of a dataclass, with all that have no default, of the right types."""
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.rstrip('.') or 'a pair'} must be a mapping, got {type(values).__name__}")
    known = {each.name: each for each in fields(kind) if each.name not in (derived or set())}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise ValueError(f"unknown entry {prefix}{key}: {advice}")
    for name, each in known.items():
        required = each.default is each.default_factory  # both are MISSING
        if required and name not in values:
            raise ValueError(f"{prefix}{name} is missing")
        wanted = _TYPES.get(str(each.type))
        if name in values and wanted is not None and type(values[name]) is not wanted:
            raise ValueError(f"{prefix}{name} must be of type {wanted.__name__}, got {values[name]!r}")
    return dict(values)
