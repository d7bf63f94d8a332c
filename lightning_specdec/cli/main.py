"""The command line: find the verb, hand over, turn every error into one line and an exit code.

Imports nothing heavy before the verb is known, so `--help` and a misspelt flag answer at once.
"""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module
from types import ModuleType

from lightning_specdec import __version__
from lightning_specdec.cli.options import KINDS, Parser, UsageError, kind_help
from lightning_specdec.config.terminal import say

TRAINER_VERBS = ("fit", "validate", "test", "predict", "generate")
VERBS = (*TRAINER_VERBS, "decode", "chat", "sweep", "bench", "report", "audit", "pairs", "info", "export")
FORMER_VERBS = {"check": "info MODEL", "env": "info", "prompts": "bench --config FILE"}


def main() -> None:
    """Entry point of the installed script; exits with 0, 1 (failed), 2 (user's error) or 130 (interrupted)."""
    debug = "--debug" in sys.argv
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")
    try:
        code = _run(sys.argv[1:])
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # nobody reads our output any more, as behind `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        if debug:
            raise
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            text = f"{error.filename}: {error.strerror}"
        say(f"error: {text or type(error).__name__}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        say("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(code)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        say(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        say(__version__)
        return 0
    if words[0] == "--completion":
        say(completion(words[1] if len(words) > 1 else ""))
        return 0
    verb, rest = (words[1], ["--help"]) if words[0] == "help" else (words[0], words[1:])
    if verb not in VERBS:
        if verb in FORMER_VERBS:
            raise UsageError(f"`{verb}` is now `lightning_specdec {FORMER_VERBS[verb]}`")
        near = difflib.get_close_matches(verb, VERBS, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
        raise UsageError(f"unknown verb {verb!r}: {advice}")
    if verb in TRAINER_VERBS:
        return _module(verb).run(verb, rest)
    if {"-h", "--help"} & set(rest):
        say(make_parser(verb).format_help(), end="")
        return 0
    for flag, name in zip(rest, rest[1:], strict=False):
        if flag in [f"--{kind}.help" for kind in KINDS]:
            say(kind_help(flag, name))
            return 0
    options = make_parser(verb).read(rest)
    code: int = _module(verb).run(options)
    return code


def _module(verb: str) -> ModuleType:
    return import_module(f"lightning_specdec.cli.{'train' if verb in TRAINER_VERBS else verb}")


def _summary(verb: str) -> str:
    module = _module(verb)
    return str(module.SUMMARIES[verb] if verb in TRAINER_VERBS else module.SUMMARY)


def make_parser(verb: str) -> Parser:
    """The parser of a verb that is not the Trainer's."""
    module = _module(verb)
    parser = Parser(verb, module.SUMMARY, module.EXAMPLES)
    module.add_arguments(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="show errors alone on stderr")
    parser.add_argument("-v", "--verbose", action="store_true", help="show more, on stderr too")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _overview() -> str:
    width = max(map(len, VERBS))
    return "\n".join(
        (
            f"lightning_specdec {__version__}: train the draft, decode speculatively, measure the gain",
            "",
            "usage: lightning_specdec VERB [options]",
            "",
            *(f"  {verb:<{width}}  {_summary(verb)}" for verb in VERBS),
            "",
            "lightning_specdec VERB --help              the options of a verb",
            "lightning_specdec --completion bash        a completion script for bash, zsh or fish",
        )
    )


def completion(shell: str) -> str:
    """A completion script: verbs, then a verb's flags, else file names.

    Raises:
        ValueError: the shell is none of bash, zsh and fish.
    """
    flags = {verb: sorted(make_parser(verb)._option_string_actions) for verb in VERBS if verb not in TRAINER_VERBS}
    flags |= {verb: ["--config", "--ckpt_path", "--help", "--help_all"] for verb in TRAINER_VERBS}
    if shell == "fish":
        seen = "complete -c lightning_specdec -n"
        lines = [f"{seen} __fish_use_subcommand -f -a {verb} -d {_quoted(_summary(verb))}" for verb in VERBS]
        for verb, several in flags.items():
            lines += [
                f"{seen} '__fish_seen_subcommand_from {verb}' -l {flag[2:]}" for flag in several if flag[:2] == "--"
            ]
        return "\n".join(lines)
    if shell not in ("bash", "zsh"):
        raise UsageError(f"--completion takes bash, zsh or fish, got {shell!r}")
    cases = "\n".join(f"    {verb}) words='{' '.join(several)}' ;;" for verb, several in flags.items())
    script = (
        "_lightning_specdec() {\n"
        f"  local words='{' '.join(VERBS)}'\n"
        f'  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in\n{cases}\n  esac\n'
        '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))\n'
        "}\n"
        "complete -o default -F _lightning_specdec lightning_specdec lightning-specdec"
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"
