"""Settings: frozen dataclasses whose fields carry a default, limits, and one line of help.

Command-line flags, YAML entries, checkpoints, hashes, and the Python API are all generated from
these fields. The standard library is used instead of pydantic or jsonargparse because importing
those adds 0.14 to 0.17 seconds to every `--help`.
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from lightning_specdec.config.checks import require_int, require_number

# Not `typing.Self`: the shape checker of the tests refuses it.
S = TypeVar("S", bound="Settings")

LOWEST_INTEGER = -(2**63)
"""Lower limit of integer fields that set none, so that values fit a 64-bit tensor."""


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
    """Define a field of a settings class.

    Args:
        default: the default value; without one the field is required.
        help: one line for `--help`; without it the field has no flag.
        minimum: inclusive lower limit of a number.
        maximum: inclusive upper limit of a number.
        above: exclusive lower limit, instead of `minimum`.
        choices: allowed words of a string.
        metavar: placeholder of the value in `--help`.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "above": above,
        "choices": choices,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)


@cache
def hints(settings: type) -> dict[str, Any]:
    """The resolved type of each field."""
    return typing.get_type_hints(settings)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the single type itself."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def check(name: str, value: Any, hint: Any, limits: Mapping[str, Any]) -> Any:
    """Return the value of a field, converted if that loses nothing (list to tuple, int to float).

    Raises:
        ValueError: its type, range, or choice is wrong.
    """
    allowed_types = options_of(hint)
    if Any in allowed_types or (value is None and type(None) in allowed_types):
        return value

    for allowed_type in allowed_types:
        container = typing.get_origin(allowed_type) or allowed_type
        if container is tuple and isinstance(value, list | tuple):
            item_type = typing.get_args(allowed_type)[0]
            return tuple(check(name, item, item_type, limits) for item in value)
        if container in (dict, Mapping) and isinstance(value, Mapping):
            return dict(value)
        if _is_instance(value, container):
            _check_choice(name, value, allowed_types, limits)
            return value

    # Numbers come last: True is an integer for Python, and 1 is a valid float here.
    if int in allowed_types and not isinstance(value, float):
        return _check_int(name, value, limits)
    if float in allowed_types:
        return _check_float(name, value, limits)
    raise ValueError(f"{name} must be {_describe_types(allowed_types)}, got {value!r}")


def _is_instance(value: Any, container: Any) -> bool:
    """Whether a value is of a type that is not a number."""
    return (
        isinstance(container, type)
        and container not in (int, float)
        and isinstance(value, container)
    )


def _check_choice(
    name: str,
    value: Any,
    allowed_types: Iterable[Any],
    limits: Mapping[str, Any],
) -> None:
    """Raise ValueError unless the value is one of the choices, if there are any."""
    choices = limits.get("choices")
    if choices is None or value in choices:
        return

    words = ", ".join(choices)
    allowed = f"one of {words}"
    if int in allowed_types:
        allowed = f"{words} or an integer"
        if limits.get("minimum") is not None:
            allowed += f" from {limits['minimum']}"
        if limits.get("maximum") is not None:
            allowed += f" to {limits['maximum']}"
    raise ValueError(f"{name} must be {allowed}, got {value!r}{_nearest_choice(value, choices)}")


def _nearest_choice(value: Any, choices: Sequence[str]) -> str:
    """Advice on the nearest choice; none on one that differs in its number, as float8 and float64.

    Such a value is no misspelling, and the message lists all choices.
    """
    word = str(value).rstrip("0123456789")
    if any(choice.rstrip("0123456789") == word for choice in choices):
        return ""
    return nearest(value, choices)


def _check_int(name: str, value: object, limits: Mapping[str, Any]) -> int:
    minimum = limits.get("minimum")
    maximum = limits.get("maximum")
    low = LOWEST_INTEGER if minimum is None else int(minimum)
    high = None if maximum is None else int(maximum)
    return require_int(name, value, low, high)


def _check_float(name: str, value: object, limits: Mapping[str, Any]) -> float:
    maximum = limits.get("maximum")
    high = float("inf") if maximum is None else maximum
    if limits.get("above") is not None:
        return require_number(name, value, low=limits["above"], high=high, low_open=True)
    minimum = limits.get("minimum")
    low = -float("inf") if minimum is None else minimum
    return require_number(name, value, low=low, high=high)


_TYPE_DESCRIPTIONS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}


def _describe_types(allowed_types: Iterable[Any]) -> str:
    """Names of types in messages, such as "an integer or none"."""
    return " or ".join(_describe_type(allowed_type) for allowed_type in allowed_types)


def _describe_type(allowed_type: Any) -> str:
    if typing.get_origin(allowed_type) is tuple:
        item_type = typing.get_args(allowed_type)[0]
        # "an integer" becomes "a list of integers".
        _, _, noun = _describe_type(item_type).partition(" ")
        return f"a list of {noun}s" if noun else "a list"
    type_name = getattr(allowed_type, "__name__", str(allowed_type))
    return _TYPE_DESCRIPTIONS.get(allowed_type, type_name)


def nearest(name: object, known_names: Iterable[str]) -> str:
    """Return ": did you mean NAME?" for the most similar known name, or "" if none is similar."""
    matches = difflib.get_close_matches(str(name), list(known_names), n=1)
    return f": did you mean {matches[0]}?" if matches else ""


def nearest_path(path: str, known_paths: Iterable[str]) -> str:
    """Return ": did you mean PATH?" for the path with the most similar name, or "".

    Endings and directories, which many paths share, do not make names similar. Of files with the
    same name, the nearest path is returned.
    """
    paths_by_stem: dict[str, list[str]] = {}
    for known_path in known_paths:
        paths_by_stem.setdefault(_stem(known_path), []).append(known_path)
    stems = difflib.get_close_matches(_stem(path), paths_by_stem, n=1)
    if not stems:
        return ""
    candidates = paths_by_stem[stems[0]]
    nearest_candidate = max(
        candidates, key=lambda known: difflib.SequenceMatcher(None, path, known).ratio()
    )
    return f": did you mean {nearest_candidate}?"


def _stem(path: str) -> str:
    """The name of a path without an ending such as .yaml; the number in Qwen2.5 is none."""
    return re.sub(r"\.[A-Za-z]+$", "", path.rpartition("/")[2])


@dataclass(frozen=True)
class Settings:
    """Base of all settings. Checks every field, and converts from and to plain values.

    Raises:
        ValueError: a field has the wrong type or is out of range.
    """

    def __new__(cls: type[S], *_: Any, **named: Any) -> S:
        # Python's own error about an unknown argument would not name the nearest field.
        check_names(named, cls)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        field_types = hints(type(self))  # type: ignore[arg-type]
        for field_ in setting_fields(type(self)):
            name = field_.name
            value = check(name, getattr(self, name), field_types[name], field_.metadata)
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `from_dict` is the inverse."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: plain(value) for name, value in public.items()}

    def changed(self: S, **changes: Any) -> S:
        """Return the same settings with some fields replaced.

        Raises:
            ValueError: a name is not a field, or a value is wrong.
        """
        check_names(changes, type(self))
        return replace(self, **changes)

    @classmethod
    def from_dict(cls: type[S], values: object, where: str = "") -> S:
        """Build settings from plain values. A field that holds settings accepts a mapping.

        Args:
            where: prefix of field names in messages, such as "target.".

        Raises:
            ValueError: an entry is unknown, missing, or wrong.
        """
        if not isinstance(values, Mapping):
            described = where.rstrip(".") or cls.__name__
            raise ValueError(f"{described} must be a mapping, got {values!r}")
        check_names(values, cls, where)

        arguments = {}
        for name, value in values.items():
            arguments[name] = tuple(value) if isinstance(value, list) else value

        for field_ in fields(cls):
            is_required = field_.default is MISSING and field_.default_factory is MISSING
            if is_required and field_.name not in arguments:
                explanation = field_.metadata.get("help")
                meaning = f" ({explanation})" if explanation else ""
                raise ValueError(f"{where}{field_.name} is missing{meaning}")

            value = arguments.get(field_.name)
            for field_type in options_of(hints(cls)[field_.name]):  # type: ignore[arg-type]
                holds_settings = isinstance(field_type, type) and issubclass(field_type, Settings)
                if holds_settings and not isinstance(value, field_type | None):
                    prefix = f"{where}{field_.name}."
                    arguments[field_.name] = field_type.from_dict(value, prefix)

        try:
            return cls(**arguments)
        except ValueError as error:
            raise ValueError(_located(str(error), where, cls)) from error

    @classmethod
    def arguments(
        cls: type[S],
        values: Sequence[Any],
        named: Mapping[str, Any],
        *,
        owner: str,
    ) -> S:
        """Build settings from a constructor's arguments.

        Args:
            values: the arguments by position.
            named: the arguments by name.
            owner: name of the class whose constructor it is, for messages.

        Raises:
            ValueError: an argument is unknown, missing, wrong, or given twice.
        """
        names = [field_.name for field_ in setting_fields(cls)]
        accepted = f"it takes {', '.join(names)}" if names else "it has no settings"
        if len(values) > len(names):
            raise ValueError(f"{owner} got {len(values)} arguments: {accepted}")
        positional = dict(zip(names, values, strict=False))
        for name in named:
            if name in positional:
                raise ValueError(f"{owner} got {name} twice: by position and by name")
            if name not in names:
                advice = nearest(name, names) or f": {accepted}"
                raise ValueError(f"{owner} has no setting {name}{advice}")
        return cls.from_dict({**positional, **named})


@dataclass(frozen=True)
class NoSettings(Settings):
    """Settings of a kind that has none."""


def show_settings(kind: Any) -> None:
    """Replace `*values` and `**settings` in the signature of a class by the fields of its settings.

    `help` and editors show the result. The constructor itself passes these arguments to
    `Settings.arguments`.
    """
    own_parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    names = {parameter.name for parameter in own_parameters}
    if "settings" not in names:
        # A base class may have a signature, which this class would inherit.
        kind.__signature__ = inspect.Signature(own_parameters)
        return

    accepts_positions = "values" in names
    field_kind: Any = inspect.Parameter.KEYWORD_ONLY
    if accepts_positions:
        field_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    setting_parameters = []
    for field_ in setting_fields(kind.Settings):
        default = inspect.Parameter.empty if field_.default is MISSING else field_.default
        parameter = inspect.Parameter(
            field_.name, field_kind, default=default, annotation=field_.type
        )
        setting_parameters.append(parameter)

    replaced_name = "values" if accepts_positions else "settings"
    parameters = []
    for own_parameter in own_parameters:
        if own_parameter.name == replaced_name:
            parameters += setting_parameters
        elif own_parameter.name != "settings":
            parameters.append(own_parameter)
    kind.__signature__ = inspect.Signature(parameters)


def accepts_fields(
    settings: type[Settings], *, skip: Sequence[str]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Show the fields of settings in the signature and docstring of a function with `**options`.

    Args:
        settings: the settings that the function builds from its options.
        skip: fields that are no options of the function.
    """

    def show(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.append(parameter)
        lines = ["", f"        Fields of `{settings.__name__}`:"]
        for field_ in setting_fields(settings):
            if field_.name in skip:
                continue
            parameter = inspect.Parameter(
                field_.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field_.default,
                annotation=field_.type,
            )
            parameters.append(parameter)
            lines.append(f"            {field_.name}: {field_.metadata.get('help', '')}")
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__doc__ = "\n".join([(function.__doc__ or "").rstrip(), *lines, "        "])
        return function

    return show


def _located(message: str, where: str, settings: type[Settings]) -> str:
    """A message about an entry, with the place of the entry before it.

    Most messages begin with the name of a field, which the place completes to a path.
    """
    first_word = message.partition(" ")[0]
    names = {field_.name for field_ in setting_fields(settings)}
    if where and first_word not in names:
        return f"{where.rstrip('.')}: {message}"
    return f"{where}{message}"


def limits_of(field_: Field[Any]) -> str:
    """The limits of a field's value in words, as "1 to 64"; "" if it has none."""
    choices = field_.metadata.get("choices")
    if choices:
        return " or ".join(choices)
    minimum = field_.metadata.get("minimum")
    maximum = field_.metadata.get("maximum")
    above = field_.metadata.get("above")
    low = ""
    if minimum is not None:
        low = f"{minimum:g}"
    elif above is not None:
        low = f"more than {above:g}"
    if maximum is None:
        return f"{low} or more" if minimum is not None else low
    return f"{low} to {maximum:g}" if low else f"up to {maximum:g}"


def setting_fields(settings: type[Settings]) -> list[Field[Any]]:
    """The fields that a user may set, in order."""
    return [field_ for field_ in fields(settings) if field_.init]


def check_names(values: Mapping[str, Any], settings: type[Settings], where: str = "") -> None:
    """Raise ValueError for a name that is not a field, with the nearest field name."""
    known_names = [field_.name for field_ in setting_fields(settings)]
    for name in values:
        if name in known_names:
            continue
        advice = nearest(name, known_names)
        if not advice and known_names:
            advice = f": choose from {', '.join(known_names)}"
        elif not advice:
            raise ValueError(f"{where.rstrip('.') or settings.__name__} has no settings")
        raise ValueError(f"unknown setting {where}{name}{advice}")


def plain(value: Any) -> Any:
    """Convert a value to what JSON and YAML can store."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


_PARSERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False}.__getitem__,
    type(None): {"null": None, "none": None}.__getitem__,
}


def parse(text: str, hint: Any) -> Any:
    """Convert a word of the command line to a field's type. The settings class checks ranges.

    Raises:
        ValueError: the word is no such value.
    """
    # A repeatable flag reads one item of its tuple at a time.
    item_types: list[Any] = []
    for option in options_of(hint):
        is_tuple = typing.get_origin(option) is tuple
        item_types += options_of(typing.get_args(option)[0]) if is_tuple else [option]

    accepts_text = str in item_types or Any in item_types
    word = text.lower()
    # int() and float() also accept underscores, blanks, and digits of other scripts.
    is_plain_word = re.fullmatch(r"[-+.0-9a-z]+", word) is not None
    for item_type, parser in _PARSERS.items():
        if not is_plain_word or item_type not in item_types:
            continue
        # "none" is an ordinary word where text is allowed.
        if accepts_text and item_type is type(None):
            continue
        try:
            return parser(word)
        except (ValueError, KeyError):
            # Another type may accept the word.
            continue

    if accepts_text:
        return text
    raise ValueError(f"must be {_describe_types(item_types)}, got {text!r}")
