"""Kinds of drafters, acceptance rules and models: classes found by name, without importing them.

A room is scanned for top-level classes; what a user types may also be an import path (`my_package.MyDrafter`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_specdec.config.settings import nearest, plain

_CLASS = re.compile(
    r'^class (_?[A-Z]\w*)\(([\w, .\[\]]*)\):\n(?:    r?"""(.*?)(?:"""|\n))?', re.MULTILINE
)
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Kinds:
    """The classes of one room that derive from a base.

    Args:
        noun: how messages call one of them.
        room: the package's folder that is scanned.
        base: name of the abstract base class.
        renamed: former names, by what they are called now.
        aliases: other names of a class, which mean the same everywhere.
        internal: classes that nobody builds by name.
    """

    noun: str
    room: str
    base: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    internal: tuple[str, ...] = ()

    @cached_property
    def _found(self) -> dict[str, tuple[str, str]]:
        """Module and summary by class name; a class counts if a base of it does."""
        classes: dict[str, tuple[str, list[str], str]] = {}
        for path in sorted((_PACKAGE / self.room).glob("*.py")):
            for name, bases, summary in _CLASS.findall(path.read_text(encoding="utf-8")):
                classes[name] = (
                    f"lightning_specdec.{self.room}.{path.stem}",
                    re.findall(r"\w+", bases),
                    summary,
                )

        def derives(name: str) -> bool:
            return any(
                base == self.base or (base in classes and derives(base))
                for base in classes[name][1]
            )

        return {
            name: (module, summary) for name, (module, bases, summary) in classes.items()
            if "ABC" not in bases and not name.startswith("_") and name not in self.internal and derives(name)
        }  # fmt: skip

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._found))

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self.aliases

    def summary(self, name: str) -> str:
        """The first line of a kind's docstring."""
        return self._found[self.aliases.get(name, name)][1]

    def check(self, name: str) -> None:
        """Raise ValueError unless this is a known kind, or looks like an import path."""
        if name in self or ("." in name and all(part.isidentifier() for part in name.split("."))):
            return
        if name in self.renamed:
            raise ValueError(
                f"{self.noun} {name} is called {self.renamed[name]} now: use that name"
            )
        advice = nearest(name, self) or f": choose from {', '.join(self)}, or give an import path"
        raise ValueError(f"there is no {self.noun} {name!r}{advice}")

    def load(self, name: str, *, trusted: bool = True) -> type[Any]:
        """The class of that name.

        Args:
            trusted: whether an import path may be imported: true for what a user typed, false for what a file says.

        Raises:
            ValueError: there is none, or it cannot be imported, or may not.
        """
        self.check(name)
        name = self.aliases.get(name, name)
        if name in self._found:
            return getattr(import_module(self._found[name][0]), name)
        if not trusted:
            raise ValueError(
                f"the file names the {self.noun} {name} by its import path, which is never imported from a file: "
                f"give it yourself, as --{self.noun} {name} (Python: {self.noun}=)"
            )
        module, _, attribute = name.rpartition(".")
        search_here()
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"cannot import the {self.noun} {name}: {error}") from error
        base = getattr(import_module(f"lightning_specdec.{self.room}"), self.base)
        if not isinstance(found, type) or not issubclass(found, base):
            raise ValueError(
                f"{name} is not a {self.base}: derive it from lightning_specdec.{self.base}"
            )
        if missing := getattr(found, "__abstractmethods__", ()):
            raise ValueError(
                f"{name} has no {', '.join(sorted(missing))}: write it as {self.base} describes it"
            )
        return found

    def name_of(self, kind: type[Any]) -> str:
        """The name that `load` finds a class by: short for our own, the import path for others."""
        own = self._found.get(kind.__name__)
        return (
            kind.__name__
            if own and own[0] == kind.__module__
            else f"{kind.__module__}.{kind.__qualname__}"
        )


def search_here() -> None:
    """Let what a user names by import path lie in the current directory, behind all that is installed."""
    if "" not in sys.path:
        sys.path.append("")


_ALIASES = {"MultiTokenDrafter": "MedusaDrafter"}
"""Other names of classes, in files and as users type them."""

DRAFTERS = Kinds(
    "drafter",
    "drafters",
    "Drafter",
    renamed={"LookupFirstDrafter": "NGramWithFallback"},
    aliases=_ALIASES,
)
RULES = Kinds("rule", "rules", "AcceptanceRule")
MODELS = Kinds("model", "models", "LanguageModel", internal=("FusedRNN", "OpenVINOLM"))


@dataclass(frozen=True)
class Choice:
    """A kind by name or import path, with the settings that were given for it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, and the given settings in brackets."""
        given = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name}({given})" if given else self.name

    def to_dict(self) -> dict[str, Any]:
        """`class_path` and `init_args`; `read` is the inverse."""
        return {"class_path": self.name, "init_args": plain(self.settings)}

    @classmethod
    def read(cls, value: object, where: str) -> Choice:
        """From a name or `{class_path: NAME, init_args: {...}}`.

        Raises:
            ValueError: it is none of these.
        """
        if isinstance(value, Choice):
            return value
        if isinstance(value, str):
            value = {"class_path": value}
        if isinstance(value, Mapping) and not value.keys() - {"class_path", "init_args"}:
            name, settings = value.get("class_path"), value.get("init_args") or {}
            if name and isinstance(name, str) and isinstance(settings, Mapping):
                return cls(_ALIASES.get(name, name), dict(settings))
        raise ValueError(
            f"{where} must be a name, or {{class_path: NAME, init_args: {{...}}}}, got {value!r}"
        )
