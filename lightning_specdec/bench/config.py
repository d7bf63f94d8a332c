"""What a benchmark measures, as a YAML says it: plain values, and the defaults of those that it does not name."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_specdec.bench import config_entries as entry
from lightning_specdec.bench.config_entries import OUTSIDE, OWN, PairChoice, RuleChoice
from lightning_specdec.yaml_text import check_yaml


@dataclass(frozen=True)
class BenchConfig:
    """A matrix, and how often each of its cells runs. Standard decoding is always in it.

    Args:
        name: of the results; that of the file when the YAML says none.
        pairs: by name.
        prompts: `own`, `shipped`, or the file of a prompt set.
        domains: those of its domains that are measured; all when None.
        num_prompts: of each domain, the first ones; an interval over fewer than eight is wide.
        other_prompts: where the prompts come from that alpha is taken from: as `prompts`, and the same when None. No
            prompt that is measured is among them.
        num_other_prompts: of each domain.
        num_draft_tokens: windows, as `[1, 2, "4-8", auto]`.
        temperatures, batch_sizes, rules: of each cell one; a rule is a name, or `{EpsilonThreshold: {epsilon: 0.2}}`.
        rolled: whether the target alone runs once more as fused as a draft is, several tokens between two reads.
        outside: which ways of transformers run beside ours, where the target is one of its models.
        max_new_tokens: of each prompt at most.
        ignore_eos: whether no token ends a row.
        repeats: runs that are timed; each has a seed of its own, from `seed` on.
        warmup: runs before them that are not.
        device: where all of it runs.
        threads: of the CPU; torch's own choice when None (by OMP_NUM_THREADS, or one for each core), whatever the
            model's size.
    """

    name: str
    pairs: Mapping[str, PairChoice]
    prompts: str = OWN
    domains: Sequence[str] | None = None
    num_prompts: int = 8
    other_prompts: str | None = None
    num_other_prompts: int = 4
    num_draft_tokens: Sequence[int | str] = (1, 2, 4, 8, "auto")
    temperatures: Sequence[float] = (0.0,)
    batch_sizes: Sequence[int] = (1,)
    rules: Sequence[RuleChoice] = (RuleChoice("ExactMatch"),)
    rolled: bool = False
    outside: Sequence[str] = OUTSIDE
    max_new_tokens: int = 64
    ignore_eos: bool = False
    repeats: int = 5
    warmup: int = 1
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        plain: dict[str, Any] = asdict(self)
        plain["rules"] = [{rule.rule: dict(rule.arguments)} if rule.arguments else rule.rule for rule in self.rules]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, values: object, *, name: str = "") -> BenchConfig:
        """A config of plain values, checked.

        Args:
            name: where the values have none.

        Raises:
            ValueError: an entry is unknown, missing or of the wrong kind.
        """
        given = entry.entries("", values, cls)
        if name:
            given = {"name": name, **given}
        for wanted in ("name", "pairs"):
            if not given.get(wanted):
                raise ValueError(f"{wanted} is missing: every benchmark has a name and pairs")
        return cls(**{key: _CHECKS[key](key, value) for key, value in given.items() if value is not None})


def read_config(path: str | os.PathLike[str]) -> BenchConfig:
    """The config of a YAML file. Nothing in it is run.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no YAML, or has an unknown, missing or wrong entry.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{path} is no YAML{place}: see configs/bench for how one looks") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    try:
        return BenchConfig.from_dict(values, name=path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Loader(yaml.SafeLoader):
    """Refuses what YAML's own takes in silence: one name twice, of which the first is lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"{twice[0]} is there twice (line {node.start_mark.line + 1}): give each its own name")
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "name": entry.a_name,
    "pairs": entry.by_name(entry.a_pair),
    "prompts": entry.a_text,
    "domains": entry.several(entry.a_text),
    "num_prompts": entry.a_count(1),
    "other_prompts": entry.a_text,
    "num_other_prompts": entry.a_count(1),
    "num_draft_tokens": entry.windows,
    "temperatures": entry.several(entry.a_temperature),
    "batch_sizes": entry.several(entry.a_count(1)),
    "rules": entry.several(entry.a_rule),
    "rolled": entry.a_flag,
    "outside": entry.several(entry.a_way, least=0),
    "max_new_tokens": entry.a_count(1, entry.MAX_TOKENS),
    "ignore_eos": entry.a_flag,
    "repeats": entry.a_count(1),
    "warmup": entry.a_count(0),
    "seed": entry.a_count(0, 2**62),
    "device": entry.a_text,
    "threads": entry.a_count(1, 1024),
}
