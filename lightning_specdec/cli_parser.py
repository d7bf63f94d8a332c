"""What an option and a verb are, and the parser made of them.

Knows neither the verbs nor torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn


@dataclass(frozen=True)
class Option:
    """One option of a verb: its name, what it means, and how argparse reads it.

    `type` makes a value of a word and raises ValueError for one that it cannot read; `nargs` and `const` are
    argparse's own. A `positional` one is given by its place.
    """

    name: str
    help: str
    type: Any = str
    default: Any = None
    choices: Sequence[str] | None = None
    action: str | None = None
    required: bool = False
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: str | None = None
    const: Any = None
    positional: bool = False


@dataclass(frozen=True)
class Verb:
    """One verb: what it does, its options, examples for its help, and the module whose function of the verb's name
    does it (None for the Trainer's verbs). `refusals` say why it has not got an option that others have."""

    summary: str
    options: tuple[Option, ...]
    epilog: str = ""
    home: str | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)


class UsageError(ValueError):
    """The command line itself is at fault."""


class _Parser(argparse.ArgumentParser):
    refusals: Mapping[str, str]

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._advice(message)} (see `{self.prog} --help`)")

    def _advice(self, message: str) -> str:
        """What was probably meant by arguments that are not known."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
        for word in words:
            if (reason := self.refusals.get(word.split("=")[0])) is not None:
                return f": {reason}"
            if near := difflib.get_close_matches(word.split("=")[0], list(self._option_string_actions), n=1):
                return f": did you mean {near[0]}?"
            if word.isdigit():
                return ': quote a prompt, as --prompt "1 2 3"'
        return ""


def build(verb: str, described: Verb) -> argparse.ArgumentParser:
    """The parser of a verb."""
    parser = _Parser(
        prog=f"lightning_specdec {verb}",
        description=described.summary,
        epilog=described.epilog and f"examples:\n{described.epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.refusals = described.refusals
    for option in described.options:
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
        shown = "" if default in (None, False) else f" (default: {default})"
        settings: dict[str, Any] = {"help": option.help + shown}
        if option.action != "store_true":
            settings |= {"type": option.type, "default": option.default, "metavar": option.metavar}
            settings["choices"] = option.choices
            if option.choices is None and option.metavar is None and not option.positional:
                settings["metavar"] = option.type.__name__.upper()
        if option.action:
            settings["action"] = option.action
        if option.nargs:
            settings |= {"nargs": option.nargs, "const": option.const}
        if option.positional:
            parser.add_argument(option.name, **settings)
            continue
        names = [f"--{name}" for name in (option.name, *option.aliases)]
        names += [dashed for name in names if (dashed := name.replace("_", "-")) != name]
        parser.add_argument(*names, dest=option.name, required=option.required, **settings)
    return parser


def overview(version: str, verbs: Mapping[str, Verb]) -> str:
    """What `lightning_specdec --help` prints."""
    width = max(map(len, verbs))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.items()]
    return "\n".join(
        (
            f"lightning_specdec {version}: train the draft, decode speculatively, measure the gain",
            "",
            "usage: lightning_specdec VERB [options]",
            "",
            *lines,
            "",
            "`lightning_specdec VERB --help` shows the options of a verb.",
        )
    )
