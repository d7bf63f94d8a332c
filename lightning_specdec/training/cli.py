"""The verbs fit, validate, test and generate: YAML and options become a Trainer, a model and data."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from lightning_specdec import training as _training  # noqa: F401  # YAML can name a class once it is imported
from lightning_specdec.config.checks import require_number
from lightning_specdec.config.kinds import MODELS, search_here
from lightning_specdec.config.terminal import say
from lightning_specdec.config.yaml_text import check_yaml
from lightning_specdec.data import *  # noqa: F403  # likewise
from lightning_specdec.models.packed import limit_threads
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.callbacks import RunProgressBar, SaveNewest
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.optimizers import TimeLimit
from lightning_specdec.training.runs import (
    CheckOptimizers,
    RunFiles,
    SafeCheckpointIO,
    check_checkpoint,
    seen_from_here,
)

_TAKES_YAML = ("--config", "--trainer", "--model", "--data")
_SUMMARY = ("loss", "acceptance_rate", "block_efficiency", "walltime_speedup")
_SCAFFOLD = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Given value( type)?:|Problem with given class_path '[^']*':$"
    r"|Expected a path but|Expected a <class 'NoneType'>|Parser key"
)


class SaveConfig(SaveConfigCallback):
    """Saves the resolved config beside a training run's checkpoints, or its logs; the other verbs change nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir
        if stage == "fit" and trainer.is_global_zero:
            callbacks = [
                each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)
            ]
            for place in {str(each.dirpath) for each in callbacks if each.dirpath} or {log_dir} - {
                None
            }:
                Path(str(place)).mkdir(parents=True, exist_ok=True)
                path = Path(str(place)) / self.config_filename
                self.parser.save(
                    self.config, path, skip_none=False, overwrite=True, multifile=False
                )


class CliTrainer(Trainer):
    """A Trainer with the verbs of the command line that Lightning has not."""

    def generate(self, model: LightningModule, datamodule: LightningDataModule) -> None:
        """Write the target's own text; see `GenerateText`."""
        if self.world_size > 1 and "://" not in (getattr(model, "engine", None) or "://"):
            raise ValueError(
                "several processes share one server: start vLLM and give its address as model.engine"
            )
        self.predict(model, datamodule=datamodule, return_predictions=False)


class TrainingCLI(LightningCLI):
    """LightningCLI with versioned checkpoints that never run code.

    What the user gives (`--config`, options) may name classes of any module by their import paths. A checkpoint is
    checked before anything starts, and its hyperparameters are never parsed.

    - `--ckpt_path` takes a file, a directory of runs, `last` or `best` (the newest run's; the default but for fit).
    - The vocabulary is stated once, by the data; target and drafts take it from there.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for model in ("target", "draft"):
            parser.link_arguments(
                "data.init_args.vocab_size", f"model.init_args.{model}.init_args.vocab_size"
            )
        parser.add_argument(
            "--save_seconds", type=float, default=60.0, help="seconds between checkpoints of a run"
        )

    def before_instantiate_classes(self) -> None:
        """Give drafts by name the data's vocabulary, as links do for a target and a draft."""
        config = self.config[self.subcommand]
        size = config.get("data.init_args.vocab_size")
        drafts = config.get("model.init_args.drafts") or {}
        models = [
            draft["init_args"] for draft in drafts.values() if draft.get("init_args") is not None
        ]
        for given in models if size is not None else ():
            given["vocab_size"] = size
        models += [
            config.get(f"model.init_args.{name}.init_args") or {} for name in ("target", "draft")
        ]
        for given in models:
            if given.get("vocab_size", 0) is None:
                raise ValueError(
                    "the data module has no argument vocab_size to size the networks by: give it one, or state "
                    "vocab_size in the init_args of target and draft"
                )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verb of this call and the arguments to skip: a parser for each verb would take as long as the rest."""
        verbs = {**LightningCLI.subcommands(), "generate": {"model", "datamodule"}}
        return {sys.argv[1]: verbs[sys.argv[1]] | {"weights_only"}}

    def _prepare_subcommand_parser(
        self, klass: type, subcommand: str, **kwargs: Any
    ) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand not in ("fit", "generate"):
            parser.set_defaults({"ckpt_path": "best"})
        return parser

    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: what a checkpoint says of classes and arguments is not for the parser."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._get(self.config_init, "trainer")
        if self.subcommand != "fit":
            kwargs["logger"] = False  # only training runs have curves
        plugins = given.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if isinstance(self.model, GenerateText) and not given.get("callbacks"):
            kwargs["callbacks"] = (
                [] if given["enable_progress_bar"] is False else [RunProgressBar()]
            )
        trainer = super().instantiate_trainer(plugins=[*plugins, SafeCheckpointIO()], **kwargs)
        self.files = RunFiles(trainer)
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Look at all that the user gave before the Trainer starts, so that a fault leaves nothing behind."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand == "generate":
            if not isinstance(self.model, GenerateText):
                raise ValueError(
                    f"generate needs GenerateText as its model, got {type(self.model).__name__}"
                )
            return kwargs  # the target is not there yet: it is loaded and checked when the Trainer starts
        limit_threads(sum(parameter.numel() for parameter in self.model.parameters()))
        if isinstance(self.model, SpeculativeTraining):
            self.datamodule.setup(subcommand)
            self.model.check_data(self.datamodule)
        files, name = self.files, kwargs.get("ckpt_path")
        if name:
            path = kwargs["ckpt_path"] = files.find(str(name))
            step = check_checkpoint(
                path, self.trainer, self.model, self.datamodule, resume=subcommand == "fit"
            )
            self.trainer.callbacks.append(CheckOptimizers())  # type: ignore[attr-defined]
        if subcommand == "fit":
            files.claim(kwargs["ckpt_path"] if name == "last" else None)
            if name and self.trainer.is_global_zero:
                say(f"resuming {seen_from_here(path)} at step {step}")
            seconds = require_number(
                "save_seconds", self._get(self.config, "save_seconds"), low=0.0
            )
            self.trainer.callbacks.append(SaveNewest(files.newest, seconds))  # type: ignore[attr-defined]
        return {**kwargs, "weights_only": True}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit:  # Ctrl-C or SIGTERM
            step, places = (
                self.trainer.global_step,
                (str(each.dirpath) for each in self.files.newest),
            )
            if (
                step
                and self.trainer.is_global_zero
                and any(Path(each, "last.ckpt").is_file() for each in places)
            ):
                say(f"stopped at step {step}: repeat with --ckpt_path last")
            raise
        finally:
            self.files.release(keep=self.trainer.state.finished or self.trainer.global_step > 0)

    def after_fit(self) -> None:
        """Report what was reached and where it is."""
        if not self.trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        shown = [
            name for name in sorted(values) if name.endswith(_SUMMARY) and name.count("/") == 1
        ]
        say("  ".join(f"{name} {values[name]:.3f}" for name in shown))
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and Path(callback.best_model_path).is_file():
                name = f"{callback.filename} checkpoint" if callback.filename else "checkpoint"
                say(f"{name}: {seen_from_here(callback.best_model_path)}")
        # The Trainer's log_dir is a question to all processes.
        if self.trainer.logger and (
            curves := self.trainer.logger.log_dir or self.trainer.logger.save_dir
        ):
            say(f"curves: tensorboard --logdir {seen_from_here(curves)}")


def prepare(arguments: list[str]) -> None:
    """Check the YAML that a command line names, and import what it names by import paths or lazily known names.

    Raises:
        ValueError: a config is nested so deeply or repeats so much that the parser could not take it.
    """
    texts = list(arguments)
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        path = Path(joined or value)
        if name in _TAKES_YAML and "\n" not in str(path) and path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            try:
                check_yaml(texts[-1])
            except yaml.YAMLError:
                pass  # the parser says where it is wrong
    for name in MODELS:
        if any(name in text for text in texts):
            MODELS.load(name)
    search_here()


def one_line(report: str) -> str:
    """The reasons of a jsonargparse error, without the types and alternatives around them."""
    keys = dict.fromkeys(re.findall(r'Parser key "([^"]+)"', report))
    lines = [
        re.sub(r'^(- )?(Parser key "[^"]+":? ?)?', "", line.strip()) for line in report.splitlines()
    ]
    reasons = dict.fromkeys(line for line in lines if line and not _SCAFFOLD.match(line))
    return ": ".join(
        [*(".".join(keys),) * bool(keys), "; ".join(reasons) or " ".join(report.split())]
    )


def _advice(report: str) -> str:
    """A suggestion for an unknown option, or for a verb without a config."""
    if "arguments are required" in report:
        verb = sys.argv[1]
        return f": give --config FILE, as configs/{'smollm2_generate' if verb == 'generate' else 'rnn'}.yaml"
    unknown = re.search(r"[Uu]nrecognized arguments: (--[\w.]+)", report)
    known = (
        "--config",
        "--ckpt_path",
        "--model",
        "--data",
        "--save_seconds",
        "--seed_everything",
        "--print_config",
    )
    options = [*known, *(f"--trainer.{name}" for name in inspect.signature(Trainer).parameters)]
    names = {option.rpartition(".")[2].lstrip("-"): option for option in options}
    near = (
        difflib.get_close_matches(unknown[1].rpartition(".")[2].lstrip("-"), names, n=1)
        if unknown
        else []
    )
    return f": did you mean {names[near[0]]}?" if near else ""


def run(began: float | None = None) -> None:
    """Run the trainer verb that `sys.argv` names.

    Args:
        began: when the process began, on the clock of `time.monotonic`, for runs of a given time.

    Raises:
        ValueError: a fault of the command line, the config, the data or the checkpoint, in one line.
        FileNotFoundError: a file that is not there, in one line.
        SystemExit: the run was interrupted; its last checkpoint is whole.
    """
    quiet_lightning()
    threading.excepthook = tell_once
    if began is not None:
        TimeLimit.began = began
    # A model of transformers is described by plain values, which the parser would build itself.
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
    except SIGTERMException:  # which is a SystemExit, of code 0
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as stop:
        if isinstance(
            stop.__context__, KeyboardInterrupt
        ):  # the Trainer ends with 1 then, like a failure
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    except (ArgumentError, MisconfigurationException, ValueError, RuntimeError) as error:
        is_config = not isinstance(error, RuntimeError) or str(error).startswith(
            "Early stopping conditioned on metric"
        )
        if not is_config or (type(error) is ValueError and "\n" not in str(error)):
            raise
        raise ValueError(f"{one_line(str(error))}{_advice(str(error))}") from error


def tell_once(failed: threading.ExceptHookArgs) -> None:
    """A full disk ends TensorBoard's writer in its thread, and then the run, which says so."""
    if not (
        isinstance(failed.exc_value, OSError)
        and type(failed.thread).__module__.startswith("tensorboard")
    ):
        threading.__excepthook__(failed)


def quiet_lightning() -> None:
    """Drop the tips and warnings that say nothing about the user's own run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(
            lambda record: (
                record.levelno >= logging.WARNING
                or "Detected KeyboardInterrupt" in record.getMessage()
            )
        )
    for message in (
        ".*does not have many workers.*",
        "The dirpath has changed from.*",
        r"(?s)\s.*was deprecated in v4\.49\.0 and will be removed in v5.*",
        r"(?s)\s.*only one JsonargparseDeprecationWarning per type is shown.*",
        "Checkpoint directory .* exists and is not empty.*",
        ".*is smaller than the logging interval.*",
        # A run killed in a validation goes on behind it; a name that no validation logs is an error of its own.
        r".*could not find the monitored key in the returned metrics: \['epoch', 'step'\].*",
        r"Found \d+ module\(s\) in eval mode at the start of training.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)
