"""The command line: find the verb, run it, and turn every error into one line and an exit code.

Imports nothing heavy before the verb is known, so `--help` and a misspelled flag answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import sysconfig
import traceback
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from lightning_specdec import __version__
from lightning_specdec.cli.common import set_up_logs
from lightning_specdec.cli.options import KINDS, Parser, UsageError, kind_help
from lightning_specdec.config.activity import Reporter
from lightning_specdec.config.memory import is_out_of_memory
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import one_line, say

TRAINER_VERBS = ("fit", "validate", "test", "generate")
VERBS = (
    *TRAINER_VERBS,
    "decode",
    "chat",
    "serve",
    "sweep",
    "bench",
    "report",
    "audit",
    "info",
    "export",
)

_MOST_CHARACTERS = 200
"""Of an allocator's message."""
EXIT_OK = 0
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Entry point of the installed script.

    Exits with 0 (success), 1 (a check failed), 2 (a user's mistake), or 130 (interrupted).
    """
    # These log warnings while transformers is imported.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)

    # The Trainer's verbs replace the words of the command line.
    shows_traceback = "--debug" in sys.argv
    # The caller may have closed stdout, as `>&-` does in a shell.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    try:
        exit_code = _run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has exited, as `| head` does. Python would flush stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_code = EXIT_OK
    except (ValueError, OSError) as error:
        if shows_traceback:
            raise
        say(f"error: {_error_text(error)}", file=sys.stderr)
        exit_code = EXIT_USER_ERROR
    except Exception as error:
        text = _failure_text(error)
        if text is None or shows_traceback:
            raise
        say(f"error: {text} (--debug shows the traceback)", file=sys.stderr)
        exit_code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        # The terminal has echoed ^C.
        say("\ninterrupted", file=sys.stderr)
        exit_code = EXIT_INTERRUPTED
    sys.exit(exit_code)


def _error_text(error: ValueError | OSError) -> str:
    """An error's message on one line; for one of the operating system, the file and the reason."""
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return error.strerror
        return f"{error.filename}: {error.strerror}"
    return one_line(error)


def _failure_text(error: Exception) -> str | None:
    """One line about a lack of memory or an error in the user's own code; None for other errors."""
    if is_out_of_memory(error):
        reason = one_line(error)[:_MOST_CHARACTERS]
        return f"out of memory ({reason}): use smaller batches, shorter texts, or a smaller model"
    location = _user_code_of(error)
    if location is None:
        return None
    return f"{location}: {type(error).__name__}: {one_line(error)}"


def _user_code_of(error: Exception) -> str | None:
    """The user's own line in which an error was raised; None for an error of installed code.

    A user's class, named by its import path, may raise anything.
    """
    installed = [Path(__file__).parents[1]]
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        installed.append(Path(sysconfig.get_path(name)))

    location = None
    for frame, line_number in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        is_installed = any(path.is_relative_to(directory) for directory in installed)
        if path.is_file() and not is_installed:
            location = f"{path}, line {line_number}, in {frame.f_code.co_name}"
    return location


def _run(words: list[str]) -> int:
    """Run the command line; returns the exit code."""
    verb, *arguments = words or [""]
    if verb in ("", "-h", "--help") or words == ["help"]:
        say(_overview())
        return EXIT_OK if words else EXIT_USER_ERROR
    if verb in ("-V", "--version"):
        say(__version__)
        return EXIT_OK
    if verb == "--completion":
        say(_completion(*arguments[:1]))
        return EXIT_OK
    if verb == "help":
        verb = arguments[0]
        arguments = ["--help"]
    if verb not in VERBS:
        advice = nearest(verb, VERBS) or f": choose from {', '.join(VERBS)}"
        raise UsageError(f"unknown verb {verb!r}{advice}")

    module = _module(verb)
    if verb in TRAINER_VERBS:
        reporter = Reporter()
        reporter.start()
        try:
            reporter.show("starting: importing libraries")
            return module.run(verb, arguments)
        finally:
            reporter.stop()
    return _run_verb(verb, module, arguments)


def _run_verb(verb: str, module: ModuleType, arguments: list[str]) -> int:
    """Run a verb that is not one of the Trainer's; returns the exit code."""
    if "-h" in arguments or "--help" in arguments:
        say(make_parser(verb).format_help(), end="")
        return EXIT_OK

    kind_help_flags = [f"--{kind}.help" for kind in KINDS]
    for flag, name in pairwise(arguments):
        if flag in kind_help_flags:
            say(kind_help(flag, name))
            return EXIT_OK

    options = make_parser(verb).read(arguments)
    set_up_logs(options)
    reporter = Reporter(is_quiet="quiet" in options)
    reporter.start()
    try:
        reporter.show("starting: importing libraries")
        return module.run(options)
    finally:
        reporter.stop()


def _module(verb: str) -> ModuleType:
    name = "train" if verb in TRAINER_VERBS else verb
    return import_module(f"lightning_specdec.cli.{name}")


def make_parser(verb: str) -> Parser:
    """Return the parser of a verb that is not one of the Trainer's."""
    module = _module(verb)
    parser = Parser(verb, module.SUMMARY, module.EXAMPLES)
    module.add_arguments(parser)
    quiet_help = "print only errors on stderr"
    if verb == "decode":
        quiet_help = "print only the model's text, and errors on stderr"
    parser.add_argument("-q", "--quiet", action="store_true", help=quiet_help)
    parser.add_argument("-v", "--verbose", action="store_true", help="print more details on stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _overview() -> str:
    lines = [
        f"lightning_specdec {__version__}: train the draft, decode speculatively, measure the gain",
        "",
        "usage: lightning_specdec VERB [options]",
        "",
    ]
    for verb in VERBS:
        module = _module(verb)
        summary = module.SUMMARIES[verb] if verb in TRAINER_VERBS else module.SUMMARY
        lines.append(f"  {verb:<8}  {summary}")
    lines += [
        "",
        "lightning_specdec VERB --help              the options of a verb",
        "lightning_specdec --completion bash        a completion script for bash, zsh or fish",
    ]
    return "\n".join(lines)


def _completion(shell: str = "") -> str:
    """The completion script of a shell."""
    from lightning_specdec.cli.completion import completion

    parsers: dict[str, argparse.ArgumentParser] = {}
    for verb in VERBS:
        if verb in TRAINER_VERBS:
            parsers[verb] = _module(verb).parser_of_common_options(verb)
        else:
            parsers[verb] = make_parser(verb)
    return completion(shell, parsers)
