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
from lightning_specdec.config.settings import Settings, plain, setting
from lightning_specdec.config.yaml_text import read_yaml

OWN, SHIPPED = "own", "shipped"
"""Prompts that belong to a pair, and those that ship with this package; anything else names a file."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LISTS = ("num_draft_tokens", "temperatures", "batch_sizes", "rules")


@dataclass(frozen=True, kw_only=True)
class PairEntry(TargetSource):
    """A target, and the drafters that are measured with it, by the names that results give them."""

    drafts: Any = field(default_factory=lambda: {OWN: DraftSource()})

    def source(self, draft: str, device: str) -> PairSource:
        """The pair with one of its drafts."""
        own = {
            name: value for name, value in vars(self).items() if name not in ("drafts", "device")
        }
        return PairSource(**own, **vars(self.drafts[draft]), device=device)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `_pair` is the inverse."""
        return {name: value for name, value in super().to_dict().items() if name != "device"}


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Settings):
    """A matrix of cases, and how often each of them runs. Standard decoding is always in it."""

    name: str = setting(help="name of the results; default: the file's name")
    pairs: Any = setting(help="by name: fields of a target, and `drafts` by name")
    prompts: str = setting(OWN, "own, shipped, or a file of prompts")
    domains: tuple[str, ...] | None = setting(None, "domains of the prompts; default: all")
    num_prompts: int = setting(
        8, "prompts of each domain; an interval over fewer than eight is wide", minimum=1
    )
    num_draft_tokens: tuple[int | str, ...] = setting(
        (1, 2, 4, 8, "auto"),
        "draft tokens per round, or auto",
        minimum=1,
        maximum=MAX_TOKENS,
        choices=("auto",),
    )
    temperatures: tuple[float, ...] = setting((0.0,), "temperatures", minimum=0)
    batch_sizes: tuple[int, ...] = setting((1,), "prompts decoded together", minimum=1)
    rules: tuple[Any, ...] = setting(
        ("ExactMatch",), "rules, by name or as {EpsilonThreshold: {epsilon: 0.2}}"
    )
    baselines: tuple[str, ...] = setting(
        HUGGING_FACE,
        "methods of transformers to compare with, for targets that are its models",
        choices=HUGGING_FACE,
    )
    max_new_tokens: int = setting(
        64, "maximum number of new tokens per prompt", minimum=1, maximum=MAX_TOKENS
    )
    ignore_eos: bool = setting(False, "do not stop at EOS: no token ends a row")
    repeats: int = setting(5, "timed runs of each case, each with its own seed", minimum=1)
    warmup: int = setting(1, "untimed runs before them", minimum=0)
    seed: int = setting(0, "seed of the first repeat", minimum=0, maximum=2**62)
    device: str = setting("cpu", "device to run on")
    threads: int | None = setting(
        None, "CPU threads; default: torch's own choice", minimum=1, maximum=1024
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name("name", self.name)
        object.__setattr__(self, "rules", tuple(_rule(each) for each in self.rules))
        object.__setattr__(self, "pairs", _named("pairs", self.pairs, _pair))
        for name in _LISTS:
            values = getattr(self, name)
            if not values or any(value in values[:i] for i, value in enumerate(values)):
                raise ValueError(
                    f"{name} must be different values, at least one, got {plain(values)}"
                )
        for temperature in self.temperatures:
            DecodingConfig(temperature=temperature)


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
    if not isinstance(value, Mapping) or "device" in value:
        raise ValueError(
            f"{name} must be a mapping of ckpt, pair or target, and drafts, got {value!r}"
        )
    given = {key: each for key, each in value.items() if each is not None}
    if "drafts" in given:
        given["drafts"] = _named(f"{name}.drafts", given["drafts"], _draft)
    entry = PairEntry.from_dict(given, f"{name}.")
    for draft in entry.drafts:
        entry.source(draft, "cpu")
    return entry


def _draft(name: str, value: Any) -> DraftSource:
    return (
        value if isinstance(value, DraftSource) else DraftSource.from_dict(value or {}, f"{name}.")
    )


def _named(where: str, values: Any, each: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A mapping of names, one at least."""
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"{where} must be a mapping of names, at least one, got {values!r}")
    for name in values:
        _check_name(where, name)
    return {name: each(f"{where}.{name}", value) for name, value in values.items()}


def _check_name(where: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where} must be named by letters, digits, '.', '_' and '-', got {name!r}"
        )
