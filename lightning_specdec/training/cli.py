"""The verbs fit, validate, test, predict and generate: YAML and options become a Trainer, a model and data."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
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
from lightning_specdec.data import TokenData
from lightning_specdec.data.corpus import tell
from lightning_specdec.models import MODELS
from lightning_specdec.terminal import say
from lightning_specdec.threads import limit_threads
from lightning_specdec.training.base import SpeculativeTraining
from lightning_specdec.training.checkpoint_io import SafeCheckpointIO
from lightning_specdec.training.generate import GenerateText
from lightning_specdec.training.generation_bar import GenerationBar
from lightning_specdec.training.outputs import ReplacedCheckpoints, check_source, seen_from_here
from lightning_specdec.training.parse_errors import one_line
from lightning_specdec.training.resume import check_trainer_state
from lightning_specdec.yaml_text import check_yaml

_UNUSED = ("trainer.logger", "trainer.enable_checkpointing", "trainer.enable_model_summary", "seed_everything")
_GIVE = "take a config such as configs/smollm2_generate.yaml"
_TAKES_YAML = ("--config", "--trainer", "--model", "--data")
_PROMISES = ("acceptance_rate", "block_efficiency", "walltime_speedup")
VERBS = ("fit", "validate", "test", "predict", "generate")
ALLOWED_IMPORTS = (
    "lightning_specdec",
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
)
"""Where the classes that a config names may come from; a config from a stranger builds nothing else."""


class ConfigWithTheRun(SaveConfigCallback):
    """Saves the resolved config beside the logs of a training run; the other verbs change nothing."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class CliTrainer(Trainer):
    """A Trainer with the verbs of the command line that Lightning has not."""

    def generate(self, model: LightningModule, datamodule: LightningDataModule) -> None:
        """Write the target's own text; see `GenerateText`."""
        self.predict(model, datamodule=datamodule, return_predictions=False)


class TrainingCLI(LightningCLI):
    """LightningCLI with its doors closed: no class but ours and Lightning's, no checkpoint that runs code.

    Theory: the constructor of every class owns its defaults, YAML says what differs, options on the command line come
    last. `sys.argv` stays as it is, because distributed runs start their other processes from it.

    - `--ckpt_path` takes a file, `last` (the run's newest state) or `best` (the default of all verbs but fit); the file
      is checked before anything starts, and its hyperparameters are never parsed.
    - The vocabulary is stated once, by the data; target and drafts take it from there.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for model in ("target", "draft"):
            parser.link_arguments("data.init_args.vocab_size", f"model.init_args.{model}.init_args.vocab_size")

    def before_instantiate_classes(self) -> None:
        """Give drafts with names of their own the data's vocabulary, as links do for a target and a draft."""
        config = self.config[self.subcommand]
        drafts = config.get("model.init_args.drafts")
        for draft in (drafts or {}).values():
            if (given := draft.get("init_args")) is not None:
                given["vocab_size"] = config["data.init_args.vocab_size"]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        verbs = {verb: skipped | {"weights_only"} for verb, skipped in LightningCLI.subcommands().items()}
        return {**verbs, "generate": {"model", "datamodule"}}

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "generate":  # its shards are all that it leaves behind
            parser.set_defaults({name: False for name in _UNUSED})
        elif subcommand != "fit":
            parser.set_defaults({"ckpt_path": "best"})
        return parser

    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: what a checkpoint says of classes and arguments is not for the parser."""

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._get(self.config_init, "trainer")
        plugins = given.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        shown = not given.get("callbacks") and given["enable_progress_bar"] is not False
        if shown and isinstance(self.model, GenerateText):
            kwargs["callbacks"] = [GenerationBar()]
        self.checkpoints = SafeCheckpointIO()
        trainer = super().instantiate_trainer(plugins=[*plugins, self.checkpoints], **kwargs)
        trainer.callbacks.insert(0, ReplacedCheckpoints())  # type: ignore[attr-defined]  # speaks before a bar is drawn
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Look at all that the user gave before the Trainer starts, so that a fault leaves nothing behind."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand == "generate":
            if not isinstance(self.model, GenerateText):
                raise ValueError(f"generate needs GenerateText as its model, got {type(self.model).__name__}: {_GIVE}")
            return kwargs  # the target is not there yet: it is loaded and checked when the Trainer starts
        limit_threads(sum(parameter.numel() for parameter in self.model.parameters()))
        if isinstance(self.datamodule, TokenData):
            self.datamodule.setup(subcommand)
            if isinstance(self.model, SpeculativeTraining):
                self.model.check_data(self.datamodule)
        source = getattr(self.model, "target_checkpoint", None)
        if subcommand == "fit" and source is not None:
            check_source(self.trainer, source)
        if kwargs.get("ckpt_path"):
            path = find_checkpoint(self.trainer, str(kwargs["ckpt_path"]))
            check_trainer_state(path, self.trainer, self.model, self.datamodule, resume=subcommand == "fit")
            kwargs["ckpt_path"] = path
        return {**kwargs, "weights_only": True}

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as stop:
            if subcommand == "fit" and isinstance(stop.__context__, KeyboardInterrupt):
                with contextlib.suppress(ValueError, FileNotFoundError):
                    last = find_checkpoint(self.trainer, "last")
                    if Path(last).resolve() in self.checkpoints.written:
                        tell(f"{seen_from_here(last)} is where it was: the same command with --ckpt_path last goes on")
            raise

    def after_fit(self) -> None:
        """Say what was reached and where it lies."""
        if not self.trainer.is_global_zero:
            return
        values = {name: float(value) for name, value in self.trainer.callback_metrics.items() if _is_told(name)}
        lines: dict[str, list[str]] = {}
        for name in sorted(values, key=lambda name: (name.count("/"), not name.endswith("_loss"), name)):
            lines.setdefault(name.rpartition("/")[0], []).append(f"{name} {values[name]:.3f}")
        for line in lines.values():
            say("  ".join(line))
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and Path(callback.best_model_path).is_file():
                say(f"{callback.filename} checkpoint: {seen_from_here(callback.best_model_path)}")
        if self.trainer.logger and self.trainer.log_dir:
            say(f"curves: tensorboard --logdir {seen_from_here(self.trainer.log_dir)}")


def _is_told(name: str) -> bool:
    """Whether a metric is told at a run's end: losses, and what greedy decoding comes to, estimated for the exits."""
    rate = name.rpartition("/")[2]
    hidden = ("sampling_",) if "/exit_" in name else ("sampling_", "teacher_forced_")
    return rate.endswith(("_loss", *_PROMISES)) and not rate.startswith(hidden)


def find_checkpoint(trainer: Trainer, name: str) -> str:
    """The file behind `last`, `best` or a path.

    Raises:
        FileNotFoundError: there is no such checkpoint yet.
        ValueError: the config does not say where checkpoints lie.
    """
    if name not in ("last", "best"):
        return name
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
        raise ValueError(f"--ckpt_path {name} needs a ModelCheckpoint with a dirpath in the config: give a file")
    path = str(Path(callback.dirpath) / f"{name}{callback.FILE_EXTENSION}")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no {name} checkpoint ({seen_from_here(path)} does not exist): train one with "
            "`lightning_specdec fit`, or give a file with --ckpt_path"
        )
    return path


def import_named(arguments: list[str]) -> None:
    """Import the models that wait to be asked for and that the command line or its configs name, so that the parser
    finds them by their short names.

    Raises:
        ValueError: a config is nested so deeply or repeats so much that the parser could not take it.
    """
    texts = list(arguments)
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, _, joined = option.partition("=")
        path = Path(joined or value)
        if name in _TAKES_YAML and path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            try:
                check_yaml(texts[-1])
            except yaml.YAMLError:
                pass  # the parser says where it is wrong
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
    for name, import_it in MODELS.waiting.items():
        if any(name in text for text in texts):
            import_it()


def run() -> None:
    """Run the trainer verb that `sys.argv` names.

    Raises:
        ValueError: a fault of the command line, the config, the data or the checkpoint, in one line.
        FileNotFoundError: a file that is not there, in one line.
        SystemExit: the run was interrupted; its last checkpoint is whole.
    """
    quiet_lightning()
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=list(ALLOWED_IMPORTS),
        instantiate_subclass_spec_in_any=False,
    )
    import_named(sys.argv[1:])
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
            save_config_callback=ConfigWithTheRun,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={**parser_kwargs, **{verb: dict(parser_kwargs) for verb in VERBS}},
        )
    except ArgumentError as error:
        raise ValueError(one_line(str(error))) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"a config is no text ({error.reason}): give a YAML file, as configs/rnn.yaml") from error
    except SIGTERMException:  # which is a SystemExit, of code 0
        raise SystemExit(128 + signal.SIGTERM) from None
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # the Trainer ends with 1 then, like a failure
            raise SystemExit(128 + signal.SIGINT) from None
        raise
    except MisconfigurationException as error:
        raise ValueError(one_line(str(error))) from error
    except ValueError as error:
        if "\n" not in str(error):
            raise
        raise ValueError(one_line(str(error))) from error
    except RuntimeError as error:
        if not str(error).startswith("Early stopping conditioned on metric"):  # a fault of the config's
            raise
        raise ValueError(one_line(str(error))) from error


def quiet_lightning() -> None:
    """Drop the tips and warnings that say nothing about the user's own run."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_is_worth_reading)
    for message in (
        ".*does not have many workers.*",
        "The dirpath has changed from.*",
        r"(?s)\s.*was deprecated in v4\.49\.0 and will be removed in v5.*",
        r"(?s)\s.*only one JsonargparseDeprecationWarning per type is shown.*",
        "Checkpoint directory .* exists and is not empty.*",
        ".*is smaller than the logging interval.*",
        r"Found \d+ module\(s\) in eval mode at the start of training.*",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    ):
        warnings.filterwarnings("ignore", message=message)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or "Detected KeyboardInterrupt" in record.getMessage()
