"""What a benchmark measures, as a YAML says it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_specdec.bench.rows import HUGGING_FACE
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import RULES, Choice
from lightning_specdec.config.models import DraftSource, PairSource, TargetSource
from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.config.yaml_text import read_yaml

OWN, SHIPPED = "own", "shipped"
"""Prompts that belong to a pair, and those that ship with this package; anything else names a file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FORMER = {
    "rolled": "drop it: the baseline is always the packed target",
    "outside": "it is called baselines now",
    "exit_layer": "write drafter: {class_path: EarlyExitDrafter, init_args: {exit_layer: N}}",
    "drafter_arguments": "write drafter: {class_path: NAME, init_args: {...}}",
}
"""Former entries, and what takes their place."""
_FORMER_DRAFT = {"dtype": "it is called draft_dtype now", "quantization": "it is called draft_quantization now"}


@dataclass(frozen=True, kw_only=True)
class PairEntry(TargetSource):
    """A target, and the drafters that are measured with it, by the names that results give them."""

    drafts: Any = field(default_factory=lambda: {OWN: DraftSource()})

    def source(self, draft: str, device: str) -> PairSource:
        """The pair with one of its drafts."""
        own = {name: value for name, value in vars(self).items() if name not in ("drafts", "device")}
        return PairSource(**own, **vars(self.drafts[draft]), device=device)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, those that differ from the defaults alone."""
        given = {name: value for name, value in super().to_dict().items() if value and name not in ("drafts", "device")}
        drafts = {n: {k: v for k, v in each.to_dict().items() if v is not None} for n, each in self.drafts.items()}
        return {**given, "drafts": drafts}


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Settings):
    """A matrix of cases, and how often each of them runs. Standard decoding is always in it."""

    name: str = setting(help="name of the results; default: the file's name")
    pairs: Any = setting(help="by name: fields of a target, and `drafts` by name")
    prompts: str = setting(OWN, "own, shipped, or a file of prompts")
    domains: tuple[str, ...] | None = setting(None, "domains of the prompts; default: all")
    num_prompts: int = setting(8, "prompts of each domain; an interval over fewer than eight is wide", minimum=1)
    other_prompts: str | None = setting(None, "where predictions take the acceptance rate from; default: prompts")
    num_other_prompts: int = setting(4, "of each domain; none of those that are measured", minimum=1)
    num_draft_tokens: tuple[int | str, ...] = setting(
        (1, 2, 4, 8, "auto"), "draft tokens per round, or auto", minimum=1, maximum=MAX_TOKENS
    )
    temperatures: tuple[float, ...] = setting((0.0,), "temperatures", minimum=0)
    batch_sizes: tuple[int, ...] = setting((1,), "prompts decoded together", minimum=1)
    rules: tuple[Any, ...] = setting(("ExactMatch",), "rules, by name or as {EpsilonThreshold: {epsilon: 0.2}}")
    baselines: tuple[str, ...] = setting(
        HUGGING_FACE, "methods of transformers to measure too, where the target is one of its models"
    )
    max_new_tokens: int = setting(64, "new tokens per prompt at most", minimum=1, maximum=MAX_TOKENS)
    ignore_eos: bool = setting(False, "let no token end a row")
    repeats: int = setting(5, "timed runs of each case; each has a seed of its own", minimum=1)
    warmup: int = setting(1, "runs before them", minimum=0)
    seed: int = setting(0, "seed of the first repeat", minimum=0, maximum=2**62)
    device: str = setting("cpu", "where all of it runs")
    threads: int | None = setting(None, "CPU threads; default: torch's own choice", minimum=1, maximum=1024)

    def __post_init__(self) -> None:
        for name in ("domains", "num_draft_tokens", "temperatures", "batch_sizes", "rules", "baselines"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple):
                object.__setattr__(self, name, (value,))
        super().__post_init__()
        _check_name("name", self.name)
        object.__setattr__(self, "rules", tuple(_rule(each) for each in self.rules))
        object.__setattr__(self, "pairs", _named("pairs", self.pairs, _pair))
        for name in ("domains", "num_draft_tokens", "temperatures", "batch_sizes", "rules", "baselines"):
            values = getattr(self, name) or ()
            if not values and name not in ("baselines", "domains"):
                raise ValueError(f"{name} is empty: give at least one, or leave it out")
            if twice := [value for i, value in enumerate(values) if value in values[:i]]:
                raise ValueError(f"{name} names {getattr(twice[0], 'label', twice[0])} twice: give each once")
        for window in self.num_draft_tokens:
            if isinstance(window, str) and window != "auto":
                advice = "write each one, as [4, 5, 6]" if re.fullmatch(r"\d+-\d+", window) else "give integers or auto"
                raise ValueError(f"num_draft_tokens takes no {window!r}: {advice}")
        for temperature in self.temperatures:
            DecodingConfig(temperature=temperature)
        if foreign := [each for each in self.baselines if each not in HUGGING_FACE]:
            raise ValueError(f"baselines must be among {', '.join(HUGGING_FACE)}, got {foreign[0]!r}")

    @classmethod
    def from_dict(cls, values: object, where: str = "") -> BenchConfig:
        """A config of plain values. Raises ValueError: an entry is unknown, missing or wrong."""
        if isinstance(values, Mapping):
            _check_former("", values, _FORMER)
            values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return super().from_dict(values, where)


def read_config(path: str | os.PathLike[str], **changes: Any) -> BenchConfig:
    """The config of a YAML file, with changes. Nothing in it is run.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no YAML, or has an unknown, missing or wrong entry.
    """
    path = Path(path).expanduser()
    values = read_yaml(path)
    try:
        if not isinstance(values, Mapping):
            raise ValueError("a benchmark's config must be a mapping of pairs, prompts, ...")
        return BenchConfig.from_dict({"name": path.stem, **values, **changes})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _rule(value: Any) -> Choice:
    choice = Choice.read(value, "rules")
    RULES.load(choice.name, trusted=False)(**choice.settings)
    return choice


def _pair(name: str, value: Any) -> PairEntry:
    if isinstance(value, PairEntry):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a mapping of ckpt, pair or target, and drafts, got {value!r}")
    _check_former(name, value, {**_FORMER, "device": "it stands once, beside pairs"})
    given = dict(value)
    if given.get("drafts") is not None:
        given["drafts"] = _named(f"{name}.drafts", given["drafts"], _draft)
    entry = PairEntry.from_dict({key: each for key, each in given.items() if each is not None}, f"{name}.")
    for draft in entry.drafts:
        entry.source(draft, "cpu")
    return entry


def _draft(name: str, value: Any) -> DraftSource:
    if isinstance(value, Mapping):
        _check_former(name, value, {**_FORMER, **_FORMER_DRAFT})
    return value if isinstance(value, DraftSource) else DraftSource.from_dict(value or {}, f"{name}.")


def _named(where: str, values: Any, each: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A mapping of names, one at least."""
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"{where} must be a mapping of names, at least one, got {values!r}")
    for name in values:
        _check_name(where, name)
    return {name: each(f"{where}.{name}", value) for name, value in values.items()}


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where} must be named by letters, digits, '.', '_' and '-', got {name!r}")


def _check_former(where: str, values: Mapping[Any, Any], former: Mapping[str, str]) -> None:
    for key in values:
        if key in former:
            raise ValueError(f"there is no {f'{where}.' if where else ''}{key} any more: {former[key]}")
