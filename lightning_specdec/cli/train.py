"""The Trainer's verbs: a short help without imports; everything else is LightningCLI's, in `training.cli`."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lightning_specdec.config.pairs import shipped_config, shipped_directory
from lightning_specdec.config.terminal import say

SUMMARIES = {
    "fit": "train target and drafts from a YAML or a recipe",
    "validate": "measure on the validation sequences",
    "test": "measure on the held-out sequences",
    "generate": "let a target write text to train drafts on; repeat the command to resume",
}
_EXAMPLES = {
    "fit": """\
lightning_specdec fit --recipe eagle --target checkpoints/smollm2 --text shipped --minutes 5
lightning_specdec fit --recipe medusa --target ./llama --text data/llama --print_config > mine.yaml
lightning_specdec fit --config configs/rnn.yaml
lightning_specdec fit --config configs/rnn.yaml --ckpt_path last --trainer.max_epochs 200
lightning_specdec fit --config configs/rnn.yaml --data SequenceFile --data.path mine.csv
lightning_specdec fit --model.help PairTraining""",
    "generate": """\
lightning_specdec generate --config configs/smollm2_generate.yaml
lightning_specdec generate --model GenerateText --model.target ./llama --model.output data/llama \\
    --data PromptFiles --data.paths prompts.txt
lightning_specdec generate --model.help GenerateText""",
}
_RECIPE = """\
  --recipe NAME         a draft for a pretrained target without a YAML: eagle, block, medusa, exit, layers or pair
  --target DIR          its directory; all that depends on it follows from it
  --text PATH...        directories that generate wrote, or text files; shipped is SmolLM2's own text
  --minutes M           how long the run takes, start-up included (default: three epochs)
"""
_ENGINE = """\
  --engine ENGINE       vLLM: a server's address, or the Python of its environment (--model.engine)
"""
_OPTIONS = """\
  --config FILE         YAML of the run; repeat to lay one over another
  --ckpt_path FILE      last, best or a checkpoint: fit resumes from it, the others use it
  --save_seconds X      seconds between checkpoints while fit runs (default 60)
  --seed_everything INT seed of initialization and data order
  --trainer.KEY VALUE   any argument of Lightning's Trainer, as --trainer.max_epochs 10
  --model CLASS         training module, as PairTraining; --model.KEY VALUE sets its arguments
  --data CLASS          data module, as SequenceFile; --data.KEY VALUE sets its arguments
  --model.help CLASS    every argument of a module; likewise --data.help CLASS
  --print_config        print the resolved configuration and stop
  --help_all            every argument of the Trainer (slow: imports it)
  --debug               show the traceback of an error"""

_ENOUGH = ("--config", "--model", "--data", "--print_config")
"""Options without one of which nothing is described that could run."""


def run(verb: str, words: list[str]) -> int:
    """Show the help, or hand over to LightningCLI, which reads `sys.argv`."""
    if {"-h", "--help"} & set(words):
        configs = sorted(path.stem for path in shipped_directory().parent.glob("*.yaml"))
        example = _EXAMPLES.get(
            verb, f"lightning_specdec {verb} --config configs/rnn.yaml --ckpt_path last"
        )
        say(
            f"usage: lightning_specdec {verb} --config FILE [options]\n\n{SUMMARIES[verb]}\n\noptions:"
        )
        say(_RECIPE * (verb == "fit") + _ENGINE * (verb == "generate") + _OPTIONS + "\n")
        say(f"configs that ship (configs/NAME.yaml): {', '.join(configs)}\n\nexamples:\n{example}")
        return 0
    if verb == "generate":
        words = [re.sub(r"^--engine(?==|$)", "--model.engine", word) for word in words]
    words = ["--help" if word == "--help_all" else word for word in words if word != "--debug"]
    sys.argv[2:] = ["=".join(map(shipped_config, word.split("=", 1))) for word in words]
    began = time.monotonic()
    if verb == "fit" and any(word.partition("=")[0] == "--recipe" for word in sys.argv[2:]):
        values, rest = _by_recipe(sys.argv[2:])
        if rest == ["--print_config"]:  # with further options LightningCLI resolves and prints them
            say(yaml.safe_dump(values, sort_keys=False), end="")
            return 0
        sys.argv[2:] = ["--config", yaml.safe_dump(values, sort_keys=False), *rest]
    _check(verb, sys.argv[2:])
    from lightning_specdec.training.cli import run

    run(began)
    return 0


def _check(verb: str, words: list[str]) -> None:
    """Refuse, before Lightning is imported, what cannot be a run."""
    options = [
        (*word.split("=", 1), after)[:2]
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]
    names = {name for name, _ in options}
    if unused := sorted(names & {"--target", "--text", "--minutes"}):
        raise ValueError(f"{unused[0]} is an option of --recipe NAME")
    if not any(name.endswith("help") or name.startswith(_ENOUGH) for name in names):
        example = "configs/smollm2_generate.yaml" if verb == "generate" else "configs/rnn.yaml"
        raise ValueError(
            f"{verb} needs --config FILE, as {example}{', or --recipe NAME' * (verb == 'fit')}"
        )
    for name, value in options:
        if name == "--config" and value.endswith((".yaml", ".yml")) and not Path(value).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), value)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: fit --recipe NAME --target DIR --text PATH... [--minutes M]")


def _by_recipe(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The config that a recipe's options stand for, and the options that are not the recipe's."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--recipe", "--target"):
        parser.add_argument(name, required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--minutes", type=float)
    given, rest = parser.parse_known_args(words)
    from lightning_specdec.training.draft_recipes import config_for

    return config_for(given.recipe, given.target, given.text, minutes=given.minutes), rest
