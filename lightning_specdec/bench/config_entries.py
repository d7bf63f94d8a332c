"""What the entries of a benchmark's config may be: rules, drafts and pairs by name, lists and ranges; each checked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lightning_specdec.checks import require_int, require_number
from lightning_specdec.rules import RULES, AcceptanceRule, Sampling

STANDARD, ROLLED, SPECULATIVE = OURS = ("standard", "rolled", "speculative")
"""Our ways to decode."""
GENERATE, ASSISTED, PROMPT_LOOKUP = OUTSIDE = ("generate", "assisted", "prompt_lookup")
"""Ways of transformers to decode."""
OWN, SHIPPED = "own", "shipped"
"""Prompts that belong to a pair, and those that ship with this package; anything else names a file."""
MAX_TOKENS = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RANGE = re.compile(r"([0-9]{1,7})-([0-9]{1,7})")


@dataclass(frozen=True)
class RuleChoice:
    """An acceptance rule by its name, with its arguments."""

    rule: str
    arguments: Mapping[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, with the arguments that were given."""
        given = ", ".join(f"{name}={value:g}" for name, value in self.arguments.items())
        return f"{self.rule}({given})" if given else self.rule

    def make(self) -> AcceptanceRule:
        """The rule."""
        return RULES[self.rule](**self.arguments)


@dataclass(frozen=True)
class DraftChoice:
    """What guesses, as the options of `decode` name it; nothing at all means the pair's own draft.

    Args:
        draft: a model, the file of a trained draft, or of a checkpoint's drafts one by name.
        drafter: the class that guesses.
        drafter_arguments: its arguments.
        exit_layer: of an early exit, how many layers guess.
        dtype, quantization: the draft's.
    """

    draft: str | None = None
    drafter: str | None = None
    drafter_arguments: Mapping[str, Any] = field(default_factory=dict)
    exit_layer: int | None = None
    dtype: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class PairChoice:
    """A target, by one of `ckpt`, `pair` and `target`, and what guesses for it.

    Args:
        ckpt: a checkpoint; `target` beside it is where its target lies.
        pair: a pair of the registry.
        target: a pretrained model.
        dtype, quantization: the target's.
        drafts: by the names that the results give them.
    """

    ckpt: str | None = None
    pair: str | None = None
    target: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    drafts: Mapping[str, DraftChoice] = field(default_factory=lambda: {OWN: DraftChoice()})


def entries(prefix: str, values: object, kind: type[Any]) -> dict[str, Any]:
    """A mapping whose keys are fields of a dataclass."""
    if not isinstance(values, dict):
        what = prefix.rstrip(".") or "a benchmark's config"
        raise ValueError(f"{what} must be a mapping of {', '.join(each.name for each in fields(kind)[:3])}, ...")
    known = [each.name for each in fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise ValueError(f"unknown entry {prefix}{key}: {advice}")
    return dict(values)


def a_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text, got {value!r}")
    return value


def a_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def a_name(name: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{name} must be a name of letters, digits, '.', '_' and '-', got {value!r}")
    return value


def a_count(low: int, high: int | None = None) -> Callable[[str, object], int]:
    return lambda name, value: require_int(name, value, low, high)


def several(each: Callable[[str, object], Any], *, least: int = 1) -> Callable[[str, object], tuple[Any, ...]]:
    """One or several, all different."""

    def check(name: str, value: object) -> tuple[Any, ...]:
        found = tuple(each(name, one) for one in (value if isinstance(value, list | tuple) else [value]))
        if len(found) < least:
            raise ValueError(f"{name} is empty: give one at least, or leave it out")
        if twice := [one for i, one in enumerate(found) if one in found[:i]]:
            shown = twice[0].label if isinstance(twice[0], RuleChoice) else twice[0]
            raise ValueError(f"{name} names {shown} twice: give each once")
        return found

    return check


def windows(name: str, value: object) -> tuple[int | str, ...]:
    """Numbers, ranges such as 2-6, and auto."""
    found: list[object] = []
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str) and (ends := _RANGE.fullmatch(one)):
            first, last = int(ends[1]), int(ends[2])
            if not 1 <= first <= last <= MAX_TOKENS:
                raise ValueError(f"{name} must be ranges that rise from 1 or more, as 1-8, got {one!r}")
            found += range(first, last + 1)
        elif isinstance(one, str) and one != "auto":
            raise ValueError(f"{name} must be integers, ranges such as 1-8, or auto, got {one!r}")
        else:
            found.append(one)
    return several(lambda key, one: one if one == "auto" else require_int(key, one, 1, MAX_TOKENS))(name, found)


def a_temperature(name: str, value: object) -> float:
    return Sampling(require_number(name, value, low=0)).temperature


def a_rule(name: str, value: object) -> RuleChoice:
    chosen: object = value
    arguments: object = {}
    if isinstance(value, dict) and len(value) == 1:
        chosen, arguments = next(iter(value.items()))
    if not isinstance(chosen, str) or chosen not in RULES or not isinstance(arguments, dict):
        raise ValueError(
            f"{name} must be among {', '.join(RULES)}, or one as {{NAME: {{epsilon: 0.1}}}}, got {value!r}"
        )
    choice = RuleChoice(chosen, arguments)
    try:
        choice.make()
    except TypeError as error:
        raise ValueError(f"{chosen} takes no such arguments as {', '.join(map(str, arguments))}: drop them") from error
    return choice


def a_way(name: str, value: object) -> str:
    if value not in OUTSIDE:
        raise ValueError(f"{name} must be among {', '.join(OUTSIDE)}, got {value!r}")
    return str(value)


def a_draft(name: str, value: object) -> DraftChoice:
    given = {key: each for key, each in entries(f"{name}.", value or {}, DraftChoice).items() if each is not None}
    for key, each in given.items():
        if key == "exit_layer":
            require_int(f"{name}.{key}", each, 1)
        elif key != "drafter_arguments":
            a_text(f"{name}.{key}", each)
        elif not isinstance(each, dict) or not all(isinstance(one, str) for one in each):
            raise ValueError(f"{name}.{key} must be a mapping of names, got {each!r}")
    return DraftChoice(**given)


def a_pair(name: str, value: object) -> PairChoice:
    given = {key: each for key, each in entries(f"{name}.", value, PairChoice).items() if each is not None}
    for key, each in given.items():
        if key != "drafts":
            a_text(f"{name}.{key}", each)
    named = [key for key in ("ckpt", "pair", "target") if key in given]
    if len(named) != 1 and named != ["ckpt", "target"]:
        raise ValueError(f"{name} must name its models by one of ckpt, pair and target, got {named or 'none'}")
    if "drafts" in given:
        given["drafts"] = by_name(a_draft)(f"{name}.drafts", given["drafts"])
    return PairChoice(**given)


def by_name(each: Callable[[str, object], Any]) -> Callable[[str, object], dict[str, Any]]:
    """A mapping of names, one at least."""

    def check(name: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{name} must be a mapping of names, one at least, got {value!r}")
        return {a_name(name, key): each(f"{name}.{key}", one) for key, one in value.items()}

    return check
