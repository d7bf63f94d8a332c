"""The trainer verbs: a short help without imports. `training.cli` does everything else."""

from __future__ import annotations

import argparse
import errno
import glob
import os
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lightning_specdec.cli.options import join_template_variables
from lightning_specdec.config.checks import require_number
from lightning_specdec.config.models import advice_on_path, missing_checkpoint
from lightning_specdec.config.pairs import nearest_config, shipped_config, shipped_directory
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import say

SUMMARIES = {
    "fit": "train target and drafts from a YAML file or a recipe",
    "validate": "measure on the validation sequences",
    "test": "measure on the held-out sequences",
    "generate": "let a target write text to train drafts on; a stopped run resumes",
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
  --recipe NAME         a draft for a pretrained target without a YAML file: eagle, block, medusa,
                        mtp, exit, layers, or pair
  --target DIR          the target's directory; settings that depend on it follow from it
  --adapter DIR         an adapter of PEFT to merge into the target
  --text PATH...        directories that generate wrote, or text files; shipped is SmolLM2's text
  --minutes M           duration of the run (default: three epochs). Start-up, the last
                        validation, and the verdict count. Give 5 or more for a model of SmolLM2's
                        size; a time without room for a step is refused
"""
_ENGINE = """\
  --engine ENGINE       vLLM: a server's address, or the Python of its environment (--model.engine)
"""
_OPTIONS = """\
  --config FILE         YAML file of the run; a further file overrides values of those before it
  --chat_template_kwargs.NAME VALUE
                        variable of the chat template that writes conversations or prompts
  --ckpt_path FILE      last, best or a checkpoint: fit resumes from it, the others use it
  --name NAME           name of the run's directories; default: the config's, and that of other data
  --save_seconds X      seconds between checkpoints while fit runs (default 60)
  --seed_everything INT seed of initialization and data order (default 0)
  --trainer.KEY VALUE   any argument of Lightning's Trainer, for example --trainer.max_epochs 10
  --model CLASS         training module, for example PairTraining; --model.KEY VALUE sets its
                        arguments
  --data CLASS          data module, for example SequenceFile; --data.KEY VALUE sets its arguments
  --model.help CLASS    every argument of a module; likewise --data.help CLASS
  --print_config        print the resolved configuration and stop
  --help_all            every argument of the Trainer (slow: imports it)
  --debug               show the traceback of an error"""

RECIPE_NAMES = ("eagle", "block", "medusa", "mtp", "exit", "layers", "pair")
"""Values of --recipe. Importing the recipes themselves takes seconds."""
_NO_CHECKPOINT_FILES = ("", "last", "best", "null", "~")
"""Values of --ckpt_path that are no paths: chosen by the run, or none in YAML."""
_CONFIG_OPTIONS = ("--config", "--model", "--data", "--print_config")
"""Options without any of which a command describes no run."""


def parser_of_common_options(verb: str) -> argparse.ArgumentParser:
    """The options that a shell completes. All others belong to Lightning, which imports slowly."""
    parser = argparse.ArgumentParser(prog=verb, description=SUMMARIES[verb])
    parser.add_argument("--config", metavar="FILE", help="YAML file of the run")
    parser.add_argument("--ckpt_path", metavar="FILE", help="last, best or a checkpoint")
    parser.add_argument("--name", metavar="NAME", help="name of the run's directories")
    parser.add_argument("--print_config", action="store_true", help="print the configuration")
    parser.add_argument("--help_all", action="store_true", help="every argument of the Trainer")
    if verb == "fit":
        parser.add_argument("--recipe", choices=RECIPE_NAMES, help="a draft without a YAML file")
        parser.add_argument("--target", metavar="DIR", help="the target's directory")
        parser.add_argument("--text", nargs="+", metavar="PATH", help="texts to train on")
        parser.add_argument("--minutes", type=float, metavar="M", help="duration of the run")
    return parser


def run(verb: str, words: list[str]) -> int:
    """Show the help, or hand over to LightningCLI, which reads `sys.argv`.

    Args:
        verb: one of `SUMMARIES`.
        words: the arguments after the verb.
    """
    if {"-h", "--help"} & set(words):
        _print_help(verb)
        return 0
    start = time.monotonic()
    arguments = _translate(verb, join_template_variables(words))
    if verb == "fit" and any(word.partition("=")[0] == "--recipe" for word in arguments):
        config, other_arguments = _from_recipe(arguments)
        # With further options LightningCLI resolves the config and prints it.
        if other_arguments == ["--print_config"]:
            say(yaml.safe_dump(config, sort_keys=False), end="")
            return 0
        arguments = ["--config", yaml.safe_dump(config, sort_keys=False), *other_arguments]
    _check(verb, arguments)
    sys.argv[2:] = arguments
    from lightning_specdec.training import cli

    cli.run(start)
    return 0


def _print_help(verb: str) -> None:
    config_names = _config_names(verb)
    options = _OPTIONS
    if verb == "fit":
        options = _RECIPE + options
    if verb == "generate":
        options = _ENGINE + options
    default_example = f"lightning_specdec {verb} --config configs/rnn.yaml --ckpt_path last"
    say(
        f"usage: lightning_specdec {verb} --config FILE [options]\n\n{SUMMARIES[verb]}\n\n"
        f"options:\n{options}\n"
    )
    say(
        f"configs that ship (configs/NAME.yaml): {', '.join(config_names)}\n\n"
        f"examples:\n{_EXAMPLES.get(verb, default_example)}"
    )


def _config_names(verb: str) -> list[str]:
    """The shipped configs that a verb can use."""
    names = []
    for path in sorted(shipped_directory().parent.glob("*.yaml")):
        generates = "GenerateText" in path.read_text(encoding="utf-8")
        if generates == (verb == "generate"):
            names.append(path.stem)
    return names


def _translate(verb: str, words: list[str]) -> list[str]:
    """Replace our short options and the names of shipped configs by what LightningCLI reads."""
    arguments = []
    for word in words:
        if word == "--debug":
            continue
        if word == "--help_all":
            word = "--help"
        word = re.sub(r"^--chat_template_kwargs(?==|$)", "--data.chat_template_kwargs", word)
        if verb == "generate":
            word = re.sub(r"^--engine(?==|$)", "--model.engine", word)
        # `--option=value` has the name of a config after the first equals sign.
        parts = [shipped_config(part) for part in word.split("=", 1)]
        arguments.append("=".join(parts))
    return arguments


def _check(verb: str, words: list[str]) -> None:
    """Refuse a command that cannot be a run, before the slow import of Lightning."""
    options = _options(words)
    names = {name for name, _ in options}
    if "--pair" in names:
        raise ValueError(_pair_advice(verb))
    recipe_options = sorted(names & {"--adapter", "--target", "--text", "--minutes", "--recipe"})
    if recipe_options:
        raise ValueError(_recipe_advice(verb, recipe_options[0]))

    if not any(_describes_run(name) for name in names):
        yaml_word = next((word for word in words[:1] if word.endswith((".yaml", ".yml"))), None)
        if yaml_word is not None:
            raise ValueError(f"{verb} takes its config as an option: --config {yaml_word}")
        example = "configs/smollm2_generate.yaml" if verb == "generate" else "configs/rnn.yaml"
        alternative = ", or --recipe NAME" if verb == "fit" else ""
        raise ValueError(f"{verb} needs --config FILE, for example {example}{alternative}")

    for name, value in options:
        is_yaml = value.endswith((".yaml", ".yml"))
        if name == "--config" and is_yaml and not Path(value).exists():
            reason = f"{os.strerror(errno.ENOENT)}{nearest_config(value)}"
            raise FileNotFoundError(errno.ENOENT, reason, value)
    # The verb generate has no such option, and a printed config is no run.
    if verb != "generate" and "--print_config" not in names:
        _check_checkpoint(dict(options).get("--ckpt_path"))


def _check_checkpoint(name: str | None) -> None:
    """Refuse a checkpoint that does not exist; the run finds out about other mistakes."""
    if name is None or name in _NO_CHECKPOINT_FILES or "://" in name:
        return
    path = Path(name)
    if not path.exists():
        raise missing_checkpoint(path)


def _pair_advice(verb: str) -> str:
    """What to type instead of --pair, which belongs to the verbs that decode."""
    if verb == "generate":
        alternative = (
            "name the pair's target by --model GenerateText --model.target DIR --model.output DIR "
            "--data PromptFiles --data.paths FILE"
        )
    elif verb == "fit":
        alternative = "give --config FILE, or --recipe NAME --target DIR --text PATH"
    else:
        alternative = "give --config FILE"
    return f"{verb} takes no --pair: {alternative}"


def _recipe_advice(verb: str, option: str) -> str:
    """What to type instead of an option that belongs to `fit --recipe`."""
    if verb == "generate" and option == "--target":
        return (
            "--target is an option of fit --recipe NAME; here, give --model GenerateText "
            "--model.target DIR --model.output DIR --data PromptFiles --data.paths FILE"
        )
    if verb == "fit":
        return f"{option} is an option of --recipe NAME, which is missing"
    return f"{option} is an option of fit --recipe NAME; {verb} takes --config FILE"


def _options(words: list[str]) -> list[tuple[str, str]]:
    """Each word as the name of an option, with its value: `--name=value`, or the next word."""
    options = []
    for word, next_word in pairwise([*words, ""]):
        name, separator, joined_value = word.partition("=")
        options.append((name, joined_value if separator else next_word))
    return options


def _describes_run(option_name: str) -> bool:
    return option_name.endswith("help") or option_name.startswith(_CONFIG_OPTIONS)


class _RecipeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: fit --recipe NAME --target DIR --text PATH... [--minutes M]")


def _from_recipe(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The config that a recipe's options stand for, and all other options."""
    parser = _RecipeParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--adapter")
    options, other_arguments = parser.parse_known_args(words)
    _check_recipe(options)
    from lightning_specdec.training.draft_recipes import config_for

    config = config_for(
        options.recipe,
        options.target,
        options.text,
        minutes=options.minutes,
        adapter=options.adapter,
    )
    return config, other_arguments


def _check_recipe(options: argparse.Namespace) -> None:
    """Refuse what is wrong in itself, before the slow import of the recipes."""
    if options.recipe not in RECIPE_NAMES:
        advice = nearest(options.recipe, RECIPE_NAMES) or f": give one of {', '.join(RECIPE_NAMES)}"
        raise ValueError(f"there is no recipe {options.recipe!r}{advice}")
    if options.minutes is not None:
        require_number("minutes", options.minutes, low=0.0, high=1e6, low_open=True)
    # A file may hold a model too. What is in it, the recipe finds out.
    if not Path(options.target).expanduser().exists():
        raise FileNotFoundError(
            f"{options.target}: no such model directory; --target takes one that `save_pretrained` "
            "wrote"
        )
    if options.text != ["shipped"]:
        for path in options.text:
            _check_text(path)


def _check_text(source: str) -> None:
    """Refuse a text that does not exist, unless it is a pattern or may be on the Hub."""
    path = Path(source).expanduser()
    if not path.exists() and not glob.has_magic(source) and "#" not in source:
        raise FileNotFoundError(f"{source} does not exist{advice_on_path(path)}")
