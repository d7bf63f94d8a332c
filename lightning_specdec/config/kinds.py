"""Registries of drafters, acceptance rules, and models: classes found by name without imports.

The files of a subpackage are scanned for class statements, so that `--help` lists every kind in
milliseconds. Users may also name a class by its import path (`my_package.MyDrafter`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_specdec.config.settings import nearest, plain

_CLASS_STATEMENT = re.compile(
    r'^class (_?[A-Z]\w*)\(([\w, .\[\]]*)\):\n(?:    r?"""(.*?)(?:"""|\n))?', re.MULTILINE
)
"""Matches a top-level class: its name, its bases, and the first line of its docstring."""

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class _ClassStatement:
    """A class as its source file declares it."""

    module: str
    bases: tuple[str, ...]
    summary: str


@dataclass(frozen=True)
class Kinds:
    """The classes of one subpackage that derive from a base class.

    Args:
        noun: what messages call one of them.
        subpackage: the subpackage that is scanned.
        base: name of the abstract base class.
        aliases: other names of classes, which files and users may use.
        internal: classes that nobody builds by name.
    """

    noun: str
    subpackage: str
    base: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    internal: tuple[str, ...] = ()

    @cached_property
    def _statements(self) -> dict[str, _ClassStatement]:
        """All top-level classes of the subpackage, by name."""
        statements = {}
        for path in sorted((_PACKAGE / self.subpackage).glob("*.py")):
            module = f"lightning_specdec.{self.subpackage}.{path.stem}"
            source = path.read_text(encoding="utf-8")
            for name, bases, summary in _CLASS_STATEMENT.findall(source):
                base_names = tuple(re.findall(r"\w+", bases))
                statements[name] = _ClassStatement(module, base_names, summary)
        return statements

    def _derives_from_base(self, name: str) -> bool:
        for base in self._statements[name].bases:
            if base == self.base:
                return True
            if base in self._statements and self._derives_from_base(base):
                return True
        return False

    @cached_property
    def _kinds(self) -> dict[str, _ClassStatement]:
        """The concrete public classes that derive from the base, by name."""
        kinds = {}
        for name, statement in self._statements.items():
            is_abstract = "ABC" in statement.bases
            is_hidden = name.startswith("_") or name in self.internal
            if not is_abstract and not is_hidden and self._derives_from_base(name):
                kinds[name] = statement
        return kinds

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._kinds))

    def __contains__(self, name: object) -> bool:
        return name in self._kinds or name in self.aliases

    def summary(self, name: str) -> str:
        """The first line of a kind's docstring."""
        return self._kinds[self.aliases.get(name, name)].summary

    def check(self, name: str) -> None:
        """Raise ValueError unless this is a known kind or looks like an import path."""
        if name in self:
            return
        parts = name.split(".")
        if len(parts) > 1 and all(part.isidentifier() for part in parts):
            return
        advice = nearest(name, self) or f": choose from {', '.join(self)}, or give an import path"
        raise ValueError(f"there is no {self.noun} {name!r}{advice}")

    def load(self, name: str, *, trusted: bool = True) -> type[Any]:
        """Import and return the class of that name.

        Args:
            trusted: whether an import path may be imported. True for a name that the user typed,
                false for a name from a file, which could execute code.

        Raises:
            ValueError: there is no such class, it cannot be imported, or it may not be.
        """
        self.check(name)
        name = self.aliases.get(name, name)
        if name in self._kinds:
            return getattr(import_module(self._kinds[name].module), name)

        if not trusted:
            raise ValueError(
                f"the file names the {self.noun} {name} by its import path, which is never "
                f"imported from a file: give it yourself, as --{self.noun} {name} "
                f"(Python: {self.noun}=)"
            )
        return self._load_foreign(name)

    def _load_foreign(self, path: str) -> type[Any]:
        """Import a class of the user by its import path."""
        module, _, attribute = path.rpartition(".")
        search_here()
        base = getattr(import_module(f"lightning_specdec.{self.subpackage}"), self.base)
        try:
            imported = import_module(module)
        except (ImportError, ValueError) as error:
            raise ValueError(f"cannot import the {self.noun} {path}: {error}") from error
        if not hasattr(imported, attribute):
            names = [
                name
                for name, value in vars(imported).items()
                if isinstance(value, type) and issubclass(value, base) and value is not base
            ]
            advice = nearest(attribute, names) or f": it has {', '.join(names) or 'none'}"
            raise ValueError(
                f"cannot import the {self.noun} {path}: {module} has no {attribute}{advice}"
            )
        kind = getattr(imported, attribute)
        if not isinstance(kind, type) or not issubclass(kind, base):
            raise ValueError(
                f"{path} is not a {self.base}: derive it from lightning_specdec.{self.base}"
            )
        missing_methods = sorted(getattr(kind, "__abstractmethods__", ()))
        if missing_methods:
            raise ValueError(
                f"{path} has no {', '.join(missing_methods)}: write it as {self.base} describes it"
            )
        return kind

    def name_of(self, kind: type[Any]) -> str:
        """The name that `load` accepts: short for our own classes, the import path for others."""
        statement = self._kinds.get(kind.__name__)
        if statement is not None and statement.module == kind.__module__:
            return kind.__name__
        return path_of(kind)


def path_of(kind: type[Any]) -> str:
    """The import path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def is_user_class(kind: type[Any]) -> bool:
    """Whether a class is not of this package, so that what it returns is checked."""
    return kind.__module__.partition(".")[0] != _PACKAGE.name


def described(value: object) -> str:
    """A value of a user's class in a few words, for messages: its type, and a tensor's shape."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{type(value).__name__} {list(shape)} of {dtype}"
    return f"a value of type {type(value).__name__}"


def search_here() -> None:
    """Let import paths refer to the current directory, after everything that is installed."""
    if "" not in sys.path:
        sys.path.append("")


_ALIASES = {"MultiTokenDrafter": "MedusaDrafter"}
"""Other names of classes."""

DRAFTERS = Kinds("drafter", "drafters", "Drafter", aliases=_ALIASES)
RULES = Kinds("rule", "rules", "AcceptanceRule")
MODELS = Kinds("model", "models", "LanguageModel", internal=("FusedRNN", "OpenVINOLM"))


@dataclass(frozen=True)
class Choice:
    """A kind, by name or import path, with its settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, followed by the settings in parentheses."""
        if not self.settings:
            return self.name
        arguments = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.name}({arguments})"

    def to_dict(self) -> dict[str, Any]:
        """Return `class_path` and `init_args`; `read` is the inverse."""
        return {"class_path": self.name, "init_args": plain(self.settings)}

    @classmethod
    def read(cls, value: object, where: str) -> Choice:
        """Build a choice from a name or from `{class_path: NAME, init_args: {...}}`.

        Args:
            where: what messages call the value.

        Raises:
            ValueError: the value is neither.
        """
        if isinstance(value, Choice):
            return value
        if isinstance(value, str) and value:
            return cls(_ALIASES.get(value, value))
        if isinstance(value, Mapping) and not value.keys() - {"class_path", "init_args"}:
            name = value.get("class_path")
            settings = value.get("init_args") or {}
            if name and isinstance(name, str) and isinstance(settings, Mapping):
                return cls(_ALIASES.get(name, name), dict(settings))

        if isinstance(value, type):
            raise ValueError(
                f"{where} must be an object, and {value.__name__} is a class: call it, as "
                f"{value.__name__}()"
            )
        # An empty name is reported in the form of a specification.
        reported = {"class_path": value} if isinstance(value, str) else value
        raise ValueError(
            f"{where} must be a name, {{class_path: NAME, init_args: {{...}}}}, or in Python an "
            f"object, got {reported!r}"
        )
