"""The command line: find the verb, hand over, turn every error into one line and an exit code.

Imports nothing heavy before the verb is known, so `--help` and a misspelled flag answer at once.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from types import ModuleType

from lightning_specdec import __version__
from lightning_specdec.cli.common import set_up_logs
from lightning_specdec.cli.options import KINDS, Parser, UsageError, kind_help
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import one_line, say

TRAINER_VERBS = ("fit", "validate", "test", "generate")
VERBS = (*TRAINER_VERBS, "decode", "chat", "sweep", "bench", "report", "audit", "info", "export")


def main() -> None:
    """Entry point of the installed script; exits with 0, 1 (failed), 2 (user's error) or 130 (interrupted)."""
    for name in ("torchao", "torch.utils._pytree"):  # they warn while transformers is imported
        logging.getLogger(name).setLevel(logging.ERROR)
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as behind `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        text = one_line(error)
        if isinstance(error, OSError) and error.strerror:
            text = (
                error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
            )
        say(f"error: {text}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(words: list[str]) -> int:
    verb, *rest = words or [""]
    if verb in ("", "-h", "--help") or words == ["help"]:
        say(_overview())
        return 0 if words else 2
    if verb in ("-V", "--version"):
        say(__version__)
        return 0
    if verb == "--completion":
        say(completion(*rest[:1]))
        return 0
    if verb == "help":
        verb, rest = rest[0], ["--help"]
    if verb not in VERBS:
        advice = nearest(verb, VERBS) or f": choose from {', '.join(VERBS)}"
        raise UsageError(f"unknown verb {verb!r}{advice}")
    module = _module(verb)
    if verb in TRAINER_VERBS:
        return module.run(verb, rest)
    if {"-h", "--help"} & set(rest):
        say(make_parser(verb).format_help(), end="")
        return 0
    for flag, name in zip(rest, rest[1:], strict=False):
        if flag in [f"--{kind}.help" for kind in KINDS]:
            say(kind_help(flag, name))
            return 0
    options = make_parser(verb).read(rest)
    set_up_logs(options)
    return module.run(options)


def _module(verb: str) -> ModuleType:
    return import_module(f"lightning_specdec.cli.{'train' if verb in TRAINER_VERBS else verb}")


def make_parser(verb: str) -> Parser:
    """The parser of a verb that is not the Trainer's."""
    module = _module(verb)
    parser = Parser(verb, module.SUMMARY, module.EXAMPLES)
    module.add_arguments(parser)
    parser.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="show only errors on stderr, and only the answer of decode",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show more, on stderr too")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _overview() -> str:
    lines = [
        f"lightning_specdec {__version__}: train the draft, decode speculatively, measure the gain",
        "",
    ]
    lines += ["usage: lightning_specdec VERB [options]", ""]
    for verb in VERBS:
        module = _module(verb)
        lines.append(
            f"  {verb:<8}  {module.SUMMARIES[verb] if verb in TRAINER_VERBS else module.SUMMARY}"
        )
    lines += ["", "lightning_specdec VERB --help              the options of a verb"]
    return "\n".join(
        [
            *lines,
            "lightning_specdec --completion bash        a completion script for bash, zsh or fish",
        ]
    )


def completion(shell: str = "") -> str:
    """A completion script: verbs, then a verb's flags, else file names.

    Raises:
        UsageError: the shell is none of bash, zsh and fish.
    """
    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f"--completion takes bash, zsh or fish, got {shell!r}")
    flags = dict.fromkeys(TRAINER_VERBS, ["--config", "--ckpt_path", "--help", "--help_all"])
    flags |= {
        verb: sorted(make_parser(verb)._option_string_actions)
        for verb in VERBS
        if verb not in TRAINER_VERBS
    }
    if shell == "fish":
        start = "complete -c lightning_specdec -n"
        lines = [f"{start} __fish_use_subcommand -f -a '{' '.join(VERBS)}'"]
        lines += [
            f"{start} '__fish_seen_subcommand_from {verb}' -a '{' '.join(flags[verb])}'"
            for verb in VERBS
        ]
        return "\n".join(lines)
    cases = "\n".join(
        f"    {verb}) words='{' '.join(several)}' ;;" for verb, several in flags.items()
    )
    script = (
        "_lightning_specdec() {\n"
        f"  local words='{' '.join(VERBS)}'\n"
        f'  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in\n{cases}\n  esac\n'
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))\n'
        "}\n"
        "complete -o default -F _lightning_specdec lightning_specdec lightning-specdec"
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script
