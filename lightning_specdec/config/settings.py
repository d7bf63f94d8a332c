"""Settings: frozen dataclasses whose fields carry a default, limits and one line of help.

Flags, YAML entries, checkpoints, hashes and the Python API are all made from these fields.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from lightning_specdec.config.checks import require_int, require_number

S = TypeVar("S", bound="Settings")  # not `Self`: the tests' shape checker refuses it


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A field of a settings class.

    Args:
        default: the field is required if there is none.
        help: one line for `--help`; without it the field has no flag.
        minimum: inclusive lower limit of a number.
        maximum: inclusive upper limit of a number.
        above: exclusive lower limit, instead of `minimum`.
        choices: allowed words of a string.
        metavar: placeholder of the value in `--help`.
    """
    limits = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "choices": choices,
    }
    return field(default=default, metadata={**limits, "metavar": metavar})


@cache
def hints(settings: type) -> dict[str, Any]:
    """The resolved type of each field."""
    return typing.get_type_hints(settings)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a single type alone."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def check(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """The value of a field, converted where that loses nothing (list to tuple, int to float).

    Raises:
        ValueError: its type, range or choice is wrong.
    """
    kinds = options_of(hint)
    if Any in kinds or (value is None and type(None) in kinds):
        return value
    for kind in kinds:
        outer = typing.get_origin(kind) or kind
        if outer is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(kind)[0]
            return tuple(check(name, each, inner, limits) for each in value)
        if outer in (dict, Mapping) and isinstance(value, Mapping):
            return dict(value)
        if isinstance(outer, type) and outer not in (int, float) and isinstance(value, outer):
            choices = limits.get("choices")
            if choices is not None and value not in choices:
                ends = (("from", limits.get("minimum")), ("to", limits.get("maximum")))
                span = "".join(f" {word} {end}" for word, end in ends if end is not None)
                words = ", ".join(choices)
                allowed = f"{words} or an integer{span}" if int in kinds else f"one of {words}"
                raise ValueError(
                    f"{name} must be {allowed}, got {value!r}{nearest(value, choices)}"
                )
            return value
    low, high, above = limits.get("minimum"), limits.get("maximum"), limits.get("above")
    if int in kinds and not isinstance(value, float):
        return require_int(
            name, value, -(2**63) if low is None else int(low), None if high is None else int(high)
        )
    if float in kinds:
        bottom = above if above is not None else -float("inf") if low is None else low
        top = float("inf") if high is None else high
        return require_number(name, value, low=bottom, high=top, low_open=above is not None)
    raise ValueError(f"{name} must be {_in_words(kinds)}, got {value!r}")


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}


def _in_words(kinds: Iterable[Any]) -> str:
    """Types as a user calls them."""

    def words(kind: Any) -> str:
        if typing.get_origin(kind) is tuple:
            inner = words(typing.get_args(kind)[0]).partition(" ")[2]
            return f"a list of {inner}s" if inner else "a list"
        return _WORDS.get(kind, getattr(kind, "__name__", str(kind)))

    return " or ".join(map(words, kinds))


def nearest(name: object, known: Iterable[str]) -> str:
    """Advice that names the known name that was probably meant; empty where none is similar."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class Settings:
    """Base of all settings: checks every field, and converts from and to plain values.

    Raises:
        ValueError: a field has the wrong type or is out of range.
    """

    def __post_init__(self) -> None:
        known = hints(type(self))  # type: ignore[arg-type]
        for each in setting_fields(type(self)):
            value = check(each.name, getattr(self, each.name), known[each.name], each.metadata)
            object.__setattr__(self, each.name, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `from_dict` is the inverse."""
        return {key: plain(value) for key, value in vars(self).items() if not key.startswith("_")}

    def changed(self: S, **changes: Any) -> S:
        """The same settings with some fields replaced. Raises ValueError for a wrong name or value."""
        check_names(changes, type(self))
        return replace(self, **changes)

    @classmethod
    def from_dict(cls: type[S], values: object, where: str = "") -> S:
        """Settings from plain values; a field that holds settings takes a mapping.

        Args:
            where: prefix of field names in messages, such as "target.".

        Raises:
            ValueError: an entry is unknown, missing or wrong.
        """
        if not isinstance(values, Mapping):
            raise ValueError(
                f"{where.rstrip('.') or cls.__name__} must be a mapping, got {values!r}"
            )
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        check_names(given, cls, where)
        for each in fields(cls):
            if (
                each.default is MISSING
                and each.default_factory is MISSING
                and each.name not in given
            ):
                raise ValueError(f"{where}{each.name} is missing")
            inner = given.get(each.name)
            for kind in options_of(hints(cls)[each.name]):  # type: ignore[arg-type]
                if (
                    isinstance(kind, type)
                    and issubclass(kind, Settings)
                    and not isinstance(inner, kind | None)
                ):
                    given[each.name] = kind.from_dict(inner, f"{where}{each.name}.")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    @classmethod
    def arguments(cls: type[S], *values: Any, **named: Any) -> S:
        """Settings from a constructor's arguments: the first ones by position, others by name."""
        names = [each.name for each in setting_fields(cls)][: len(values)]
        return cls.from_dict({**dict(zip(names, values, strict=True)), **named})


@dataclass(frozen=True)
class NoSettings(Settings):
    """Settings of a kind that has none."""


def setting_fields(settings: type[Settings]) -> list[Field[Any]]:
    """The fields that a user may set, in order."""
    return [each for each in fields(settings) if each.init]


def check_names(values: Mapping[str, Any], settings: type[Settings], where: str = "") -> None:
    """Raise ValueError for a name that is not a field, with the nearest field name."""
    known = [each.name for each in setting_fields(settings)]
    for name in values:
        if name not in known:
            choice = f"choose from {', '.join(known)}" if known else "it has none"
            advice = nearest(name, known) or f": {choice}"
            raise ValueError(f"unknown setting {where}{name}{advice}")


def plain(value: Any) -> Any:
    """A value as JSON and YAML hold it."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return value


_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False}.__getitem__,
    type(None): {"null": None, "none": None}.__getitem__,
}


def parse(text: str, hint: Any) -> Any:
    """The value that a word of a command line stands for, by a field's type; ranges are checked by the class.

    Raises:
        ValueError: the word is no such value.
    """
    kinds = [
        typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        for kind in options_of(hint)
    ]
    is_text, word = str in kinds or Any in kinds, text.lower()
    # Python reads numbers with underscores, blanks and digits of other scripts too.
    is_plain = re.fullmatch(r"[-+.0-9a-z]+", word) is not None
    for kind, parser in _PARSERS.items():
        if is_plain and kind in kinds and not (is_text and kind is type(None)):
            try:
                return parser(word)
            except (ValueError, KeyError):
                pass  # another kind may fit
    if is_text:
        return text
    raise ValueError(f"must be {_in_words(kinds)}, got {text!r}")
