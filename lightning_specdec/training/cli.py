"""The verbs fit, validate, test and generate, as a LightningCLI."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import yaml
from jsonargparse import ArgumentError, Namespace, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

# YAML can name the classes of these packages once they are imported.
from lightning_specdec import data as _data
from lightning_specdec import training as _training
from lightning_specdec.config.activity import show_activity
from lightning_specdec.config.checks import require_number
from lightning_specdec.config.kinds import DRAFTERS, MODELS, search_here
from lightning_specdec.config.settings import nearest
from lightning_specdec.config.terminal import say, short
from lightning_specdec.config.yaml_text import check_yaml, not_yaml
from lightning_specdec.data import *  # noqa: F403
from lightning_specdec.data import TokenData
from lightning_specdec.models.packed import limit_threads
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import RunProgressBar, SaveNewest, ShowActivity
from lightning_specdec.training.final_verdict import final_verdict, next_command
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.optimizers import TimeLimit, check_start_up
from lightning_specdec.training.run_names import (
    name_of_path,
    number_of_resumed,
    number_of_runs,
    numbered,
)
from lightning_specdec.training.runs import (
    CheckOptimizers,
    RunFiles,
    SafeCheckpointIO,
    check_checkpoint,
    is_trial,
    seen_from_here,
)
from lightning_specdec.training.target_outputs import is_sharded

log = logging.getLogger(__name__)

_YAML_OPTIONS = ("--config", "--trainer", "--model", "--data")
"""Options whose values may be YAML files."""
_UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (\w+)")
"""What jsonargparse says of a name that is no class of the right type."""
_EXPECTED_TYPE = re.compile(
    r"Expected a (?:<class '(?P<type>int|float|bool|str)'>)(?:\. Got value: (?P<value>.*))?"
)
"""What jsonargparse says of a value of the wrong type."""
_TYPE_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
_UNKNOWN_SETTING = re.compile(r"Subcommand '\w+' does not accept option '([\w.]+)'")
"""What jsonargparse says of an entry of a config that does not exist."""
_SECTIONS = ("model", "data", "trainer", "ckpt_path", "save_seconds", "seed_everything")
"""Entries at the top of a config."""
_SUMMARY = ("loss", "acceptance_rate", "block_efficiency", "walltime_speedup")
"""Metrics that are printed at the end of a run."""
_SCAFFOLD = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value( type)?:"
    r"|Problem with given class_path '[^']*':$|Expected a path but"
    r"|Expected a <class 'NoneType'>|Parser key"
)
"""Lines of a jsonargparse error that do not name a reason."""


class SaveConfig(SaveConfigCallback):
    """Saves the resolved config of a training run next to its checkpoints, or its logs.

    The saved config begins a new run, also if this run was resumed from a checkpoint.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # all processes take part in this
        if stage != "fit" or not trainer.is_global_zero:
            return
        directories = set()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath:
                directories.add(Path(str(callback.dirpath)))
        if not directories and log_dir is not None:
            directories.add(Path(log_dir))

        config = self.config.clone()
        config["ckpt_path"] = None
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
            self.parser.save(
                config,
                directory / self.config_filename,
                skip_none=False,
                overwrite=True,
                multifile=False,
            )


class CliTrainer(Trainer):
    """A Trainer with the verbs of the command line that Lightning does not have."""

    def generate(self, model: LightningModule, datamodule: LightningDataModule) -> None:
        """Write the target's own text; see `GenerateText`."""
        engine = getattr(model, "engine", None)
        if self.world_size > 1 and engine and "://" not in engine:
            raise ValueError(
                "several processes share one server: start vLLM and give its address as "
                "model.engine"
            )
        self.predict(model, datamodule=datamodule, return_predictions=False)


class TrainingCLI(LightningCLI):
    """LightningCLI with versioned checkpoints that never run code.

    Values from the user (`--config`, options) may name classes of any module by their import paths.
    A checkpoint is checked before anything starts, and its hyperparameters are never parsed.

    - `--ckpt_path` accepts a file, a directory of runs, or `last` or `best` of the newest run. The
      default is `best` for validate and test, and nothing for fit and generate.
    - The vocabulary size is set once, in the data; target and drafts take it from there.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for model in ("target", "draft"):
            parser.link_arguments(
                "data.init_args.vocab_size", f"model.init_args.{model}.init_args.vocab_size"
            )
        parser.add_argument(
            "--save_seconds", type=float, default=60.0, help="seconds between checkpoints of a run"
        )
        parser.add_argument(
            "--name", type=str | None, default=None, help="name of the run's directories"
        )

    def before_instantiate_classes(self) -> None:
        """Pass the data's vocabulary size to drafts by name, as links do for a single draft."""
        show_activity("loading models and data")
        self._name_run()
        self._check_minutes()
        config = self.config[self.subcommand]
        vocab_size = config.get("data.init_args.vocab_size")
        drafts = config.get("model.init_args.drafts") or {}
        model_arguments = []
        for draft in drafts.values():
            if draft.get("init_args") is not None:
                model_arguments.append(draft["init_args"])
        if vocab_size is not None:
            for arguments in model_arguments:
                arguments["vocab_size"] = vocab_size

        for name in ("target", "draft"):
            model_arguments.append(config.get(f"model.init_args.{name}.init_args") or {})
        for arguments in model_arguments:
            if arguments.get("vocab_size", 0) is None:
                raise ValueError(
                    "the data module has no argument vocab_size to size the networks by: give it "
                    "one, or state vocab_size in the init_args of target and draft"
                )

    def _name_run(self) -> None:
        """Name the run's directories by `--name`, or by the data that replace the config's.

        So a run of other data never stands among those of the config. Without a name, a new run
        gets a number if there are runs of another target or of other data.
        """
        name = self._get(self.config, "name")
        suffix = _data_name(sys.argv[2:])
        number = 1
        if name is None:
            number = self._number_of_runs(suffix)

        def named(configured_name: str) -> str:
            if name is not None:
                return str(name)
            base = configured_name if suffix is None else f"{configured_name}_{suffix}"
            return numbered(Path(base), number).name

        sections = [*(self._get(self.config, "trainer.callbacks") or [])]
        logger = self._get(self.config, "trainer.logger")
        if isinstance(logger, dict | Namespace):
            sections.append(logger)
        for section in sections:
            arguments = section.get("init_args") or {}
            dirpath = str(arguments.get("dirpath") or "")
            if "://" in dirpath:
                # This is no local directory, and `runs` refuses it.
                continue
            if dirpath:
                directory = Path(dirpath)
                arguments["dirpath"] = str(directory.with_name(named(directory.name)))
            elif "save_dir" in arguments and arguments.get("name"):
                arguments["name"] = named(arguments["name"])

    def _number_of_runs(self, suffix: str | None) -> int:
        """The number of the run's name, see `number_of_runs`; says so if it is not the first."""
        for section in self._get(self.config, "trainer.callbacks") or []:
            dirpath = (section.get("init_args") or {}).get("dirpath")
            if not dirpath or "://" in str(dirpath):
                continue
            directory = Path(dirpath)
            if suffix is not None:
                directory = directory.with_name(f"{directory.name}_{suffix}")
            checkpoint = self._get(self.config, "ckpt_path")
            if self.subcommand == "fit" and checkpoint not in (None, "last", "best"):
                number = number_of_resumed(directory, Path(checkpoint).expanduser())
                if number is not None:
                    return number
            is_new = self.subcommand == "fit" and checkpoint != "last"
            number = number_of_runs(
                directory, self.config[self.subcommand].as_dict(), is_resumed=not is_new
            )
            if number > 1:
                log.info(
                    "%s has runs of other data or of another target, so this run is named %s; "
                    "--name gives it another name",
                    directory,
                    numbered(directory, number).name,
                )
            return number
        return 1

    def _check_minutes(self) -> None:
        """Refuse a new run whose time will be used up before its first step."""
        if self.subcommand != "fit" or self._get(self.config, "ckpt_path"):
            return
        for callback in self._get(self.config, "trainer.callbacks") or []:
            arguments = callback.get("init_args") or {}
            if str(callback.get("class_path")).endswith(".TimeLimit") and "minutes" in arguments:
                check_start_up(arguments["minutes"])

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verb of this command and the arguments to skip.

        Building a parser for each verb would take as long as everything else at the start.
        """
        verbs = {**LightningCLI.subcommands(), "generate": {"model", "datamodule"}}
        return {sys.argv[1]: verbs[sys.argv[1]] | {"weights_only"}}

    def _prepare_subcommand_parser(
        self,
        klass: type,
        subcommand: str,
        **kwargs: Any,
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand not in ("fit", "generate"):
            parser.set_defaults({"ckpt_path": "best"})
        return parser

    def _parse_ckpt_path(self) -> None:
        """Leave the config unchanged: the parser must not read a checkpoint's arguments."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if self.subcommand != "fit":
            kwargs["logger"] = False  # only training runs have curves
        if isinstance(self.model, GenerateText) and not config.get("callbacks"):
            has_bar = config["enable_progress_bar"] is not False
            kwargs["callbacks"] = [RunProgressBar()] if has_bar else []
        plugins = config.get("plugins") or []
        if not isinstance(plugins, list):
            plugins = [plugins]
        trainer = super().instantiate_trainer(plugins=[*plugins, SafeCheckpointIO()], **kwargs)
        self.files = RunFiles(trainer)
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Return the arguments of the Trainer's method.

        All input is checked first, so that a wrong command leaves no files. Then the run's
        directories are claimed.
        """
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        self._add_callback(ShowActivity())
        if subcommand == "generate":
            # The target is loaded and checked when the Trainer starts.
            if not isinstance(self.model, GenerateText):
                raise ValueError(
                    f"generate needs GenerateText as its model, got {type(self.model).__name__}"
                )
            return kwargs

        limit_threads(sum(parameter.numel() for parameter in self.model.parameters()))
        if isinstance(self.model, SpeculativeTraining):
            self.datamodule.setup(subcommand)
            self.model.check_data(self.datamodule)
        checkpoint_name = kwargs.get("ckpt_path")
        path: str | None = None
        step = 0
        if checkpoint_name:
            path = self.files.find(str(checkpoint_name), fit_command=_fit_command(sys.argv[2:]))
            kwargs["ckpt_path"] = path
            step = check_checkpoint(
                path, self.trainer, self.model, self.datamodule, resume=subcommand == "fit"
            )
            self._add_callback(CheckOptimizers())
        if subcommand == "fit" and not is_trial(self.trainer):
            # Only `last` continues in the directory of its run.
            self._begin_run(path, step, is_last=checkpoint_name == "last")
        if subcommand in ("validate", "test"):
            # Lightning's table shows all digits of a float; `_print_metrics` rounds.
            self._shows_metrics = bool(kwargs.get("verbose"))
            kwargs["verbose"] = False
        # Reads checkpoints without executing code from them.
        return {**kwargs, "weights_only": True}

    def _begin_run(self, checkpoint_path: str | None, step: int, *, is_last: bool) -> None:
        """Claim the run's directories and save its newest state into them."""
        self.files.claim(checkpoint_path if is_last else None, step)
        if checkpoint_path and self.trainer.is_global_zero:
            say(f"resuming {seen_from_here(checkpoint_path)} at step {step}")
        seconds = require_number("save_seconds", self._get(self.config, "save_seconds"), low=0.0)
        self._add_callback(SaveNewest(self.files.newest, seconds))

    def _add_callback(self, callback: Callback) -> None:
        self.trainer.callbacks.append(callback)  # type: ignore[attr-defined]

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit:
            # Ctrl-C or SIGTERM
            step = self.trainer.global_step
            has_checkpoint = any(
                Path(str(callback.dirpath), "last.ckpt").is_file() for callback in self.files.newest
            )
            if step and self.trainer.is_global_zero and has_checkpoint:
                say(f"stopped at step {step}: repeat with --ckpt_path last")
            raise
        finally:
            self.files.release(keep=self.trainer.state.finished or self.trainer.global_step > 0)

    def after_validate(self) -> None:
        """Print all metrics of the validation."""
        self._print_metrics()

    def after_test(self) -> None:
        """Print all metrics of the test."""
        self._print_metrics()

    def _print_metrics(self) -> None:
        if not self._shows_metrics or not self.trainer.is_global_zero:
            return
        metrics = sorted(self.trainer.callback_metrics.items())
        width = max((len(name) for name, _ in metrics), default=0)
        for name, value in metrics:
            say(f"{name:<{width}}  {float(value):.3f}")

    def after_fit(self) -> None:
        """Print the last metrics, and where checkpoints and curves are."""
        if not self.trainer.is_global_zero:
            return
        summary = []
        for name, value in sorted(self.trainer.callback_metrics.items()):
            if name.endswith(_SUMMARY) and name.count("/") == 1:
                summary.append(f"{name} {float(value):.3f}")
        say("  ".join(summary))

        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and Path(callback.best_model_path).is_file():
                label = f"{callback.filename} checkpoint" if callback.filename else "checkpoint"
                say(f"{label}: {seen_from_here(callback.best_model_path)}")

        self._print_verdict()

        # Ask the logger: all processes would have to take part in the Trainer's `log_dir`.
        logger = self.trainer.logger
        curves = (logger.log_dir or logger.save_dir) if logger else None
        if curves:
            say(f"curves: tensorboard --logdir {seen_from_here(curves)}")

    def _print_verdict(self) -> None:
        """Decode a few held-out prompts, and print whether the draft pays and what to do next."""
        is_ours = isinstance(self.model, SpeculativeTraining) and isinstance(
            self.datamodule, TokenData
        )
        if not is_ours or is_trial(self.trainer) or is_sharded(self.trainer):
            return
        if self.trainer.global_step == 0:
            return  # Nothing was trained.
        show_activity("measuring the draft as it decodes")
        try:
            verdict = final_verdict(
                self.model,
                self.datamodule,
                self.trainer.callbacks,  # type: ignore[attr-defined]
            )
        except (ValueError, RuntimeError) as error:
            # The run has succeeded all the same.
            say(f"verdict: none, the draft cannot be decoded here: {error}")
            return
        say(f"verdict: {verdict}")
        source = self._checkpoint_source()
        if source is None:
            say("next: nothing was saved: add a ModelCheckpoint to trainer.callbacks")
        else:
            say(f"next: {next_command(self.model, seen_from_here(source))}")

    def _checkpoint_source(self) -> Path | None:
        """The directory of this name's runs, or a file that Lightning saved; None without any."""
        directories = list(self.files.checkpoints)
        if directories:
            return Path(str(directories[0].dirpath)).parent
        for callback in self.trainer.checkpoint_callbacks:
            path = Path(str(getattr(callback, "best_model_path", "")))
            if path.is_file():
                return path
        return None


def _data_name(words: Sequence[str]) -> str | None:
    """A name for data that the options of a command put in place of a config's; None without any.

    It is that of the file or the directory, or else of the class. A command that names the run's
    directories itself keeps their names.
    """
    option_names = {word.partition("=")[0] for word in words}
    has_config = "--config" in option_names
    if not has_config or any(name.endswith("dirpath") for name in option_names):
        return None

    name = None
    for word, next_word in pairwise([*words, ""]):
        option, separator, joined_value = word.partition("=")
        value = joined_value if separator else next_word
        if option in ("--data.path", "--data.paths"):
            path_name = name_of_path(value)
            if path_name is not None:
                return path_name
        elif option in ("--data", "--data.class_path") and not value.endswith((".yaml", ".yml")):
            name = value.rpartition(".")[2]
    return name if name and name.isidentifier() else None


def _fit_command(words: Sequence[str]) -> str:
    """The command that trains what the configs of a command line describe."""
    command = ["lightning_specdec", "fit"]
    for word, next_word in pairwise([*words, ""]):
        option, separator, joined_value = word.partition("=")
        if option == "--config":
            command += [option, joined_value if separator else next_word]
    return shlex.join(command)


def prepare(arguments: list[str]) -> None:
    """Check the YAML files of a command line, and import the classes that it names.

    Raises:
        ValueError: a config is no YAML, or is nested so deeply or repeats so much that the parser
            would fail.
    """
    texts = list(arguments)
    for option, next_argument in pairwise([*arguments, ""]):
        name, _, joined_value = option.partition("=")
        path = Path(joined_value or next_argument)
        if name not in _YAML_OPTIONS or "\n" in str(path) or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text)
        try:
            check_yaml(text)
        except yaml.YAMLError as error:
            raise not_yaml(path, error) from error
    for name in MODELS:
        if any(name in text for text in texts):
            MODELS.load(name)
    search_here()


def one_line(report: str) -> str:
    """Return the reasons of a jsonargparse error, without its types and alternatives."""
    # dict.fromkeys drops repetitions and keeps the order.
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', report))
    reasons: dict[str, None] = {}
    for line in report.splitlines():
        reason = re.sub(r'^(- )?(Parser key "[^"]+":? ?)?', "", line.strip())
        if reason and not _SCAFFOLD.match(reason):
            reasons[reason] = None
    text = _describe_types(list(reasons), report) or " ".join(report.split())
    text = _UNKNOWN_SETTING.sub(_describe_unknown_setting, text)
    text = _UNKNOWN_CLASS.sub(_describe_unknown_class, text)
    if keys:
        return f"{'.'.join(keys)}: {text}"
    return text


def _describe_types(reasons: list[str], report: str) -> str:
    """The reasons in one sentence, with the types that a value may have in plain words."""
    type_words = []
    other_reasons = []
    got = re.search(r"^ *Given value: (.*)$", report, re.MULTILINE)
    value = got[1] if got else None
    for reason in reasons:
        match = _EXPECTED_TYPE.fullmatch(reason)
        if match is None:
            other_reasons.append(reason)
            continue
        type_name = match["type"]
        type_words.append(_TYPE_WORDS.get(type_name, type_name))
        value = match["value"] or value
    if not type_words:
        return "; ".join(other_reasons)

    # The other reasons are advice on classes, which the value could name as well.
    sentence = f"must be {' or '.join(type_words)}"
    if value is None:
        return sentence
    is_word = value.replace("_", "").isalpha()
    return f"{sentence}, got {short(repr(value) if is_word else value, 60)}"


def _describe_unknown_class(match: re.Match[str]) -> str:
    """The message about a name that is neither a known class nor an import path."""
    name = match[1]
    advice = nearest(name, _known_classes()) or ": give an import path, for example my_data.MyData"
    return f"there is no class {name!r}{advice}"


def _known_classes() -> dict[str, type]:
    """The classes that YAML can name without an import path, by name."""
    modules = [_training, _data, lightning.pytorch.callbacks, lightning.pytorch.loggers]
    classes: dict[str, type] = {}
    for module in modules:
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            if isinstance(value, type) and not name.startswith("_"):
                classes[name] = value
    for registry in (MODELS, DRAFTERS):
        for name in registry:
            classes[name] = registry.load(name)
    return classes


def _known_arguments(command: Sequence[str], *, of_data: bool) -> list[str]:
    """The arguments of all classes that a command or one of its YAML files names.

    Args:
        of_data: whether to look at data modules, and not at all other classes.
    """
    texts = list(command)
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.suffix in (".yaml", ".yml") and path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    names: list[str] = []
    for name, known_class in _known_classes().items():
        is_data = issubclass(known_class, LightningDataModule)
        is_named = any(re.search(rf"\b{name}\b", text) for text in texts)
        if is_named and is_data == of_data:
            for base in known_class.__mro__:
                # `**options` of a class are arguments of its bases.
                if "__init__" in vars(base) and base is not object:
                    names += inspect.signature(base).parameters
    return names


def _describe_unknown_setting(match: re.Match[str]) -> str:
    """The message about an entry of a config that does not exist, with the nearest name."""
    section, _, rest = match[1].partition(".")
    if section == "trainer" and rest:
        name = rest.partition(".")[0]
        known_names = list(inspect.signature(Trainer).parameters)
        advice = nearest(name, known_names) or ": see `lightning_specdec fit --help_all`"
        return f"unknown setting trainer.{name}{advice}"
    if section in _SECTIONS:
        return f"unknown setting {match[1]}"
    advice = nearest(section, _SECTIONS) or f": choose from {', '.join(_SECTIONS)}"
    return f"unknown setting {section}{advice}"


def _advice(report: str) -> str:
    """Return a suggestion for an unknown option, or for a verb without a config."""
    unknown_argument = re.search(r"Option '([\w.]+)' is not accepted", report)
    if unknown_argument:
        of_data = 'Parser key "data' in report
        return nearest(unknown_argument[1], _known_arguments(sys.argv[2:], of_data=of_data))
    section = re.search(r'Parser key "(data|model)', report)
    required = re.search(r"arguments are required: ([\w.]+)", report)
    if section and required:
        return f": give --{section[1]}.{required[1].rpartition('.')[2]}"
    if "arguments are required" in report:
        example = "smollm2_generate" if sys.argv[1] == "generate" else "rnn"
        return f": give --config FILE, for example configs/{example}.yaml"
    unknown_option = re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", report)
    if not unknown_option:
        return ""

    options = [
        "--config",
        "--ckpt_path",
        "--model",
        "--data",
        "--save_seconds",
        "--seed_everything",
        "--print_config",
        "--minutes",
        "--target",
        "--text",
        "--name",
    ]
    for name in inspect.signature(Trainer).parameters:
        options.append(f"--trainer.{name}")
    # Compare the last parts of dotted names: `--max_epochs` means `--trainer.max_epochs`.
    option_by_name = {option.rpartition(".")[2].lstrip("-"): option for option in options}
    unknown_name = unknown_option[1].rpartition(".")[2].lstrip("-")
    similar_names = difflib.get_close_matches(unknown_name, option_by_name, n=1)
    if not similar_names:
        return ""
    return f": did you mean {option_by_name[similar_names[0]]}?"


def run(began: float | None = None) -> None:
    """Run the trainer verb that `sys.argv` names.

    Args:
        began: when the process began, on the clock of `time.monotonic`, for runs of a given time.

    Raises:
        ValueError: the command line, the config, the data or the checkpoint is wrong; one line.
        FileNotFoundError: a file does not exist; one line.
        SystemExit: the run was interrupted; its last checkpoint is complete.
    """
    quiet_lightning()
    threading.excepthook = report_thread_error
    if began is not None:
        TimeLimit.began = began
    # A transformers model is described by plain values, from which the parser must not build it.
    set_parsing_settings(
        import_path_denylist=["transformers"], instantiate_subclass_spec_in_any=False
    )
    prepare(sys.argv[1:])
    parser_kwargs: dict[str, Any] = {"allow_abbrev": False, "exit_on_error": False}
    try:
        TrainingCLI(
            LightningModule,
            LightningDataModule,
            trainer_class=CliTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"log_every_n_steps": 10},
            parser_kwargs={**parser_kwargs, sys.argv[1]: dict(parser_kwargs)},
        )
    except SIGTERMException:
        # It is a SystemExit with code 0.
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as stop:
        # After Ctrl-C the Trainer exits with code 1, as after a failure.
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    except (ArgumentError, MisconfigurationException, ValueError, RuntimeError) as error:
        text = str(error)
        if _is_parser_report(error):
            text = f"{one_line(text)}{_advice(text)}"
        place = config_at_fault(str(error), sys.argv[2:])
        if place is None and not _is_parser_report(error):
            raise
        raise ValueError(text if place is None else f"{place}: {text}") from error


def config_at_fault(report: str, words: Sequence[str]) -> Path | None:
    """The YAML file of a command line that an error is about; None if it is about an option.

    Args:
        report: a report of the parser, or the message of a class about one of its arguments.
        words: the command line after the verb.
    """
    configs, option_keys = _configs_and_option_keys(words)
    if configs and "Unexpected config" in report:
        return configs[-1]
    key = _key_at_fault(report)
    if not configs or key is None:
        return None
    for option_key in option_keys:
        # The option replaces the value of the file, or a section around it.
        if key == option_key or key.startswith(f"{option_key}.") or option_key.endswith(f".{key}"):
            return None
    names = key.split(".")
    for path in reversed(configs):
        text = path.read_text(encoding="utf-8", errors="replace")
        if re.search(rf"^[\s-]*[\"']?{re.escape(names[-1])}\b", text, re.MULTILINE):
            return path
    # What is missing is in no file. A message of a class may be about anything.
    is_missing = "arguments are required" in report or "Parser key" in report
    return configs[-1] if is_missing else None


def _configs_and_option_keys(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The YAML files of a command line, and the entries that its other options set."""
    configs: list[Path] = []
    option_keys: list[str] = []
    for word, next_word in pairwise([*words, ""]):
        option, separator, joined_value = word.partition("=")
        path = Path(joined_value if separator else next_word)
        if option in _YAML_OPTIONS and path.suffix in (".yaml", ".yml") and path.is_file():
            configs.append(path)
        elif option.startswith("--"):
            option_keys.append(_plain_key(option.removeprefix("--")))
    return configs, option_keys


def _key_at_fault(report: str) -> str | None:
    """The entry that an error is about, by its name or its path in a config; None if unknown."""
    if "nrecognized arguments: --" in report:
        return None
    unknown_setting = _UNKNOWN_SETTING.search(report)
    if unknown_setting:
        return _plain_key(unknown_setting[1])
    keys = re.findall(r'Parser key "([^"]+)"', report)
    unknown_argument = re.search(r"Option '([\w.]+)' is not accepted", report)
    if keys:
        key = ".".join(dict.fromkeys(keys))
        return _plain_key(f"{key}.{unknown_argument[1]}" if unknown_argument else key)
    required = re.search(r"arguments are required: ([\w.]+)", report)
    if required:
        return _plain_key(required[1])
    # The message of a class begins with the argument's name.
    argument = re.match(r"(\w+) must be ", one_line(report))
    return None if argument is None else argument[1]


def _plain_key(key: str) -> str:
    """A path in a config as messages show it, without the levels of a class and its arguments."""
    names = [name for name in key.split(".") if name not in ("init_args", "class_path")]
    return ".".join(names)


def _is_parser_report(error: Exception) -> bool:
    """Whether an error is of several lines about the config, which `one_line` shortens."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("Early stopping conditioned on metric")
    # A ValueError of one line is ours.
    return type(error) is not ValueError or "\n" in str(error)


def report_thread_error(failure: threading.ExceptHookArgs) -> None:
    """Print no traceback if a full disk ends TensorBoard's writer thread: the run reports it."""
    is_writer = type(failure.thread).__module__.startswith("tensorboard")
    if not (is_writer and isinstance(failure.exc_value, OSError)):
        threading.__excepthook__(failure)


def _is_relevant(record: logging.LogRecord) -> bool:
    is_interrupt = "Detected KeyboardInterrupt" in record.getMessage()
    return record.levelno >= logging.WARNING or is_interrupt


def quiet_lightning() -> None:
    """Silence tips and warnings that do not concern the user's run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_is_relevant)
    for message in (
        ".*does not have many workers.*",
        "The dirpath has changed from.*",
        r"(?s)\s.*was deprecated in v4\.49\.0 and will be removed in v5.*",
        r"(?s)\s.*only one JsonargparseDeprecationWarning per type is shown.*",
        "Checkpoint directory .* exists and is not empty.*",
        ".*is smaller than the logging interval.*",
        # A run that was killed in a validation resumes after it, without that validation's metrics.
        # A monitored name that no validation logs is a separate error.
        r".*could not find the monitored key in the returned metrics: \['epoch', 'step'\].*",
        r"Found \d+ module\(s\) in eval mode at the start of training.*",
        # The help names the default.
        "No seed found, seed set to 0",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
