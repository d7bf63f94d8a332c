"""What a benchmark measures, as its YAML describes it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_specdec.bench.records import HUGGING_FACE
from lightning_specdec.config.decoding import MAX_TOKENS, DecodingConfig
from lightning_specdec.config.kinds import RULES, Choice
from lightning_specdec.config.models import DraftSource, PairSource, TargetSource
from lightning_specdec.config.pairs import MOST_THREADS
from lightning_specdec.config.settings import Settings, plain, setting
from lightning_specdec.config.yaml_text import read_yaml

OWN = "own"
"""Prompts that belong to a pair."""
SHIPPED = "shipped"
"""Prompts that ship with this package. Any value but these two names a file."""
_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LIST_SETTINGS = ("num_draft_tokens", "temperatures", "batch_sizes", "rules")


@dataclass(frozen=True, kw_only=True)
class PairEntry(TargetSource):
    """A target, and the drafters that are measured with it, by the names that results use."""

    drafts: Any = field(default_factory=lambda: {OWN: DraftSource()})

    def source(self, draft: str, device: str | None) -> PairSource:
        """The pair with one of its drafts."""
        target_values = dict(vars(self))
        # The benchmark chooses one device for all of its pairs.
        for name in ("drafts", "device"):
            del target_values[name]
        return PairSource(**target_values, **vars(self.drafts[draft]), device=device)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `_read_pair` is the inverse."""
        values = super().to_dict()
        return {name: value for name, value in values.items() if name != "device"}


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
        ("ExactMatch",), "rules, by name or as {class_path: NAME, init_args: {...}}"
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
    device: str | None = setting(
        None, "device to run on; default: that of the registered pairs, else the CPU"
    )
    threads: int | None = setting(
        None,
        "CPU threads; default: those of the registered pairs, else torch's own choice",
        minimum=1,
        maximum=MOST_THREADS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_name("name", self.name)
        # The dataclass is frozen, and both settings are read into objects once.
        object.__setattr__(self, "rules", tuple(_read_rule(rule) for rule in self.rules))
        object.__setattr__(self, "pairs", _read_named("pairs", self.pairs, _read_pair))
        for name in _LIST_SETTINGS:
            _check_different(name, getattr(self, name))
        for temperature in self.temperatures:
            DecodingConfig(temperature=temperature)


def read_config(path: str | os.PathLike[str], **changes: Any) -> BenchConfig:
    """The config of a YAML file, with changes. Reading it runs no code.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not YAML, or has an unknown, missing or wrong entry.
    """
    config_path = Path(path).expanduser()
    values = read_yaml(config_path)
    try:
        if not isinstance(values, Mapping):
            raise ValueError("a benchmark's config must be a mapping of pairs, prompts, ...")
        if "trainer" in values and "pairs" not in values:
            raise ValueError(
                "this is a config of training: use it with `lightning_specdec fit --config`; those "
                "of benchmarks are in configs/bench"
            )
        return BenchConfig.from_dict({"name": config_path.stem, **values, **changes})
    except ValueError as error:
        raise ValueError(f"{config_path}: {error}") from error


def _check_different(name: str, values: tuple[Any, ...]) -> None:
    """Check that there is at least one value and none is repeated. Values may not be hashable."""
    is_repeated = any(value in values[:i] for i, value in enumerate(values))
    if not values or is_repeated:
        raise ValueError(f"{name} must be different values, at least one, got {plain(values)}")


def _read_rule(value: Any) -> Choice:
    choice = Choice.read(value, "rules")
    # Creating the rule checks its settings.
    rule_class = RULES.load(choice.name, trusted=False)
    rule_class(**choice.settings)
    return choice


def _read_pair(name: str, value: Any) -> PairEntry:
    if isinstance(value, PairEntry):
        return value
    if not isinstance(value, Mapping) or "device" in value:
        raise ValueError(
            f"{name} must be a mapping of ckpt, pair or target, and drafts, got {value!r}"
        )

    values = {key: entry for key, entry in value.items() if entry is not None}
    if "drafts" in values:
        values["drafts"] = _read_named(f"{name}.drafts", values["drafts"], _read_draft)
    pair = PairEntry.from_dict(values, f"{name}.")
    for draft in pair.drafts:
        # Creating the source checks that target and draft go together.
        pair.source(draft, "cpu")
    return pair


def _read_draft(name: str, value: Any) -> DraftSource:
    if isinstance(value, DraftSource):
        return value
    return DraftSource.from_dict(value or {}, f"{name}.")


def _read_named(
    setting_name: str,
    values: Any,
    read_value: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Read a mapping of names, at least one."""
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"{setting_name} must be a mapping of names, at least one, got {values!r}")
    for name in values:
        _check_name(setting_name, name)
    return {name: read_value(f"{setting_name}.{name}", value) for name, value in values.items()}


def _check_name(setting_name: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{setting_name} must be named by letters, digits, '.', '_' and '-', got {name!r}"
        )
