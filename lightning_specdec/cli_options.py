"""The verbs and their options as plain data, and the parser made of them.

Knows nothing of torch, so that `--help` answers at once. A test compares it with the constructors, which own the
defaults.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

RULES: dict[str, dict[str, float]] = {
    "ExactMatch": {},
    "RejectionSampling": {},
    "EpsilonThreshold": {"epsilon": 0.1},
    "TypicalAcceptance": {"epsilon": 0.09, "delta": 0.3},
}
"""The acceptance rules and the defaults of their arguments."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Option:
    """One option of a verb: its name, what it means, and how argparse reads it."""

    name: str
    help: str
    type: type = str
    default: Any = None
    choices: Sequence[str] | None = None
    action: str | None = None
    required: bool = False
    metavar: str | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verb:
    """One verb: what it does, its options, and examples for its help."""

    summary: str
    options: tuple[Option, ...]
    epilog: str = ""


_CKPT = Option("ckpt", "checkpoint of a trained pair", required=True, metavar="FILE")
_DEBUG = Option("debug", "show the traceback of an error", action="store_true")
_LOGS = (
    Option("log_level", "least severe message to show on stderr", default="info", choices=LOG_LEVELS),
    Option("log_json", "messages on stderr as JSON lines", action="store_true"),
    _DEBUG,
)
_CONFIG = (
    Option("config", "YAML of the run; repeat to lay one over another", metavar="FILE"),
    Option("ckpt_path", "'last', 'best' or a checkpoint file; fit resumes from it, the others use it", metavar="FILE"),
    Option("seed_everything", "seed of initialization and data order", metavar="INT"),
    Option("trainer.KEY", "any argument of Lightning's Trainer, as --trainer.max_epochs 10", metavar="VALUE"),
    Option("model.KEY", "any argument of the training module, as --model.learning_rate 0.01", metavar="VALUE"),
    Option("data", "data module: ArithmeticProgressions or SequenceFile", metavar="CLASS"),
    Option("data.KEY", "any of its arguments, as --data.path mine.csv", metavar="VALUE"),
    Option("print_config", "print the resolved configuration and stop"),
    Option("trainer.help", "every argument of the Trainer (slow: imports it)"),
    _DEBUG,
)
_MORE = "every argument of a class: --model.help PairTraining, --data.help SequenceFile, --trainer.help"

VERBS: dict[str, Verb] = {
    "fit": Verb(
        "train draft and target from a YAML",
        _CONFIG,
        "lightning_specdec fit --config configs/rnn.yaml\n"
        "lightning_specdec fit --config configs/rnn.yaml --ckpt_path last --trainer.max_epochs 200\n"
        "lightning_specdec fit --config configs/rnn.yaml --data SequenceFile --data.path mine.csv\n" + _MORE,
    ),
    "validate": Verb("measure on the validation sequences", _CONFIG, _MORE),
    "test": Verb("measure on the held-out sequences", _CONFIG, _MORE),
    "predict": Verb("continue the held-out prompts, as JSON lines", _CONFIG, _MORE),
    "decode": Verb(
        "decode both ways, compare the outputs, report the speedup",
        (
            _CKPT,
            Option(
                "prompt",
                "tokens, as '1 2 3'; repeat for more; '-' (or a bare -) reads lines from stdin",
                action="append",
            ),
            Option("prompts_file", "prompts, one a line: tokens, or a JSON list; '-' is stdin", metavar="FILE"),
            Option("num_draft_tokens", "guesses per round (the window)", int, 3),
            Option("max_new_tokens", "new tokens of each prompt at most", int, 7),
            Option("rule", "what keeps or rejects a guess", default="ExactMatch", choices=tuple(RULES)),
            Option(
                "rule.epsilon", "of EpsilonThreshold (0.1) and TypicalAcceptance (0.09)", float, aliases=("epsilon",)
            ),
            Option("rule.delta", "of TypicalAcceptance (0.3)", float, aliases=("delta",)),
            Option("temperature", "0 is greedy", float, 0.0),
            Option("top_k", "only the k likeliest tokens", int),
            Option("top_p", "only the likeliest tokens that hold this much probability", float),
            Option("min_p", "only tokens this times as likely as the likeliest", float),
            Option("seed", "the same seed gives the same tokens", int, 0),
            Option("eos", "token that ends a row; repeat for more", int, action="append"),
            Option("mode", "which ways to run", default="both", choices=("both", "standard", "speculative")),
            Option("repeats", "timed runs each way", int, 10),
            Option("batch_size", "prompts decoded together", int, 1),
            Option("compile", "compile the draft: slow once, then faster", action="store_true"),
            Option("device", "where to decode, as cpu or cuda:0", default="cpu"),
            Option("dtype", "what the models compute in; as stored when not given", choices=DTYPES),
            Option("threads", "CPU threads of torch; one for small models when not given", int),
            Option("logprobs", "show each token's log probability under the target", action="store_true"),
            Option("output", "a report, or one JSON document", default="text", choices=("text", "json")),
            *_LOGS,
        ),
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --prompt '1 2 3' --prompt '10 14 18'\n"
        "lightning_specdec decode --ckpt checkpoints/rnn.ckpt --rule RejectionSampling --temperature 1 --output json",
    ),
    "info": Verb("say what a checkpoint holds and how it was made", (_CKPT, _DEBUG)),
    "export": Verb(
        "write a training checkpoint as one for decoding alone",
        (
            Option("ckpt", "checkpoint of a training run", required=True, metavar="FILE"),
            Option("output", "file to write", required=True, metavar="FILE"),
            _DEBUG,
        ),
    ),
    "env": Verb("print versions, device, threads and dtypes, for a bug report", (_DEBUG,)),
}
TRAINER_VERBS = ("fit", "validate", "test", "predict")


class UsageError(ValueError):
    """The command line itself is at fault."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._advice(message)} (see `{self.prog} --help`)")

    def _advice(self, message: str) -> str:
        """What was probably meant by arguments that are not known."""
        words = message.removeprefix("unrecognized arguments: ").split() if message.startswith("unrecognized") else []
        for word in words:
            if near := difflib.get_close_matches(word.split("=")[0], list(self._option_string_actions), n=1):
                return f": did you mean {near[0]}?"
            if word.isdigit():
                return ': quote a prompt, as --prompt "1 2 3"'
        return ""


def make_parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    described = VERBS[verb]
    parser = _Parser(
        prog=f"lightning_specdec {verb}",
        description=described.summary,
        epilog=described.epilog and f"examples:\n{described.epilog}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in described.options:
        names = [f"--{name}" for name in (option.name, *option.aliases)]
        names += [dashed for name in names if (dashed := name.replace("_", "-")) != name]
        shown = "" if option.default in (None, False) else f" (default: {option.default})"
        settings: dict[str, Any] = {"help": option.help + shown, "dest": option.name, "required": option.required}
        if option.action != "store_true":
            settings |= {"type": option.type, "default": option.default, "metavar": option.metavar}
            settings["choices"] = option.choices
            if option.choices is None and option.metavar is None:
                settings["metavar"] = option.type.__name__.upper()
        if option.action:
            settings["action"] = option.action
        parser.add_argument(*names, **settings)
    return parser


def overview(version: str) -> str:
    """What `lightning_specdec --help` prints."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
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
