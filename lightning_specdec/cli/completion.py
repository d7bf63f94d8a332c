"""The script with which a shell completes verbs, their flags, the values of flags, and files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from lightning_specdec.cli.options import UsageError
from lightning_specdec.config.kinds import DRAFTERS, RULES
from lightning_specdec.config.pairs import list_pairs

SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "lightning_specdec"
_OTHER_NAME = {
    "bash": "complete -o filenames -F _shtab_lightning_specdec lightning-specdec",
    "zsh": "compdef _shtab_lightning_specdec lightning-specdec",
    "fish": "complete --command lightning-specdec --wraps lightning_specdec",
}
"""By shell, the line that completes the program under its second name in the same way."""
_METAVARS_OF_PATHS = ("ADAPTER", "DIR", "FILE", "FILE|DIR", "MODEL", "MODEL|FILE|NAME", "PATH")
_POSITIONALS_OF_PATHS = ("MODEL", "RESULTS")


def completion(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """A shell's completion script.

    Args:
        shell: one of `SHELLS`.
        parsers: by verb.

    Raises:
        UsageError: there is no such shell here.
    """
    if shell not in SHELLS:
        raise UsageError(f"--completion takes bash, zsh or fish, got {shell!r}")

    program = argparse.ArgumentParser(prog=_PROGRAM)
    verbs = program.add_subparsers(dest="verb")
    for verb, parser in parsers.items():
        _add_values(parser)
        verbs.add_parser(verb, parents=[parser], add_help=False, help=parser.description)
    script = shtab.complete(program, shell=shell)
    return f"{script}\n{_OTHER_NAME[shell]}"


def _add_values(parser: argparse.ArgumentParser) -> None:
    """Name the values of flags, which our parsers check themselves."""
    names_by_flag = {
        "drafter": tuple(DRAFTERS),
        "rule": tuple(RULES),
        "pair": tuple(pair.name for pair in list_pairs()),
    }
    for action in parser._actions:
        metavar = action.metavar
        if not action.option_strings:
            if action.dest in _POSITIONALS_OF_PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest in names_by_flag:
            action.choices = names_by_flag[action.dest]
        elif metavar in _METAVARS_OF_PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif isinstance(metavar, str) and metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
