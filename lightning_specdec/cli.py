"""The command line: finds the verb, hands over, and turns every fault of the user's into one line and exit code 2.

Imports nothing heavy before the verb is known, so that `--help` and a misspelt option answer at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from lightning_specdec import __version__
from lightning_specdec.cli_options import TRAINER_VERBS, VERBS, make_parser
from lightning_specdec.cli_parser import UsageError, overview
from lightning_specdec.terminal import say


def main() -> None:
    """The entry point of the installed script; exits with 0, 1 (failed), 2 (user's fault) or 130 (interrupted)."""
    debug = "--debug" in sys.argv
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if debug:
            raise
        say(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    return text or type(error).__name__


def _spell_out_stdin(arguments: list[str]) -> list[str]:
    """A bare `-` as `--prompt -`. (A positional argument would take the value of any misspelt option.)"""
    spelt: list[str] = []
    for i, argument in enumerate(arguments):
        bare = argument == "-" and not (i and arguments[i - 1].startswith("--"))
        spelt += ["--prompt", "-"] if bare else [argument]
    return spelt


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(overview(__version__, VERBS))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        say(__version__)
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise UsageError(f"unknown verb {verb!r}: choose from {', '.join(VERBS)}")
    if any(flag in rest for flag in ("-h", "--help")):
        say(make_parser(verb).format_help(), end="")
        return 0
    if verb in TRAINER_VERBS:
        if "--debug" in sys.argv:
            sys.argv.remove("--debug")  # ours; everything else there is read by LightningCLI itself
        from lightning_specdec.training.cli import run

        run()
        return 0
    options = make_parser(verb).parse_args(_spell_out_stdin(rest) if verb == "decode" else rest)
    from lightning_specdec.cli_early import check_models

    check_models(options)
    code: int = getattr(import_module(f"lightning_specdec.{VERBS[verb].home}"), verb)(options)
    return code
