"""Laws of training runs: the shipped configs learn and log, and runs resume, or refuse to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
import shutil
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_fixtures import Bomb, call, succeed
from families import tiny
from lightning.pytorch import Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.summary.writer.record_writer import RecordWriter
from training_fixtures import (
    CONFIGS,
    EPOCHS,
    FIT,
    NO_LOGGER,
    TEN_STEPS,
    TrainedRun,
    shipped_run,
    shrunk,
    verb,
)

from lightning_specdec.checkpoints import checkpoint, runs
from lightning_specdec.data import ArithmeticProgressions, PromptSource, QuadraticProgressions
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import PairTraining, SafeCheckpointIO, SpeculativeTraining
from lightning_specdec.training.callbacks import TensorBoardCurves
from lightning_specdec.training.cli import CliTrainer, run
from lightning_specdec.training.optimizers import TimeLimit, time_left

__all__ = ["shipped_run"]
FILES = ["best.ckpt", "config.yaml", "last.ckpt"]
RATES = ["loss", "draft_loss", "target_loss", "draft_accuracy"]
RATES += ["target_accuracy", "acceptance_rate", "block_efficiency"]
RATES += ["sampling_acceptance_rate", "sampling_block_efficiency"]


@pytest.fixture(scope="module")
def events(shipped_run: TrainedRun) -> EventAccumulator:
    accumulator = EventAccumulator(
        str(shipped_run.events), size_guidance={"histograms": 0, "scalars": 0}
    )
    accumulator.Reload()
    return accumulator


def test_the_losses_fall_and_tensorboard_holds_every_promised_tag(events: EventAccumulator) -> None:
    for model in ("draft", "target"):
        losses = [event.value for event in events.Scalars(f"train/{model}_loss")]
        assert len(losses) == EPOCHS
        # Guessing among 50 tokens gives log(50) = 3.9.
        assert 3.6 < losses[0] < 4.1
        assert losses[-1] < 1
    tags = events.Tags()
    expected_tags = {f"val/{rate}" for rate in RATES}
    expected_tags.update(("train/loss", "train/draft_loss", "train/target_loss", "train/epoch"))
    expected_tags.add("train/learning_rate")
    layout = events.PluginTagToContent("custom_scalars")
    assert list(layout) == ["custom_scalars__config__"]
    (chart_event,) = events.Tensors("custom_scalars__config__")
    assert b"train/.*loss" in chart_event.tensor_proto.string_val[0]
    assert set(tags["scalars"]) == expected_tags
    assert set(tags["histograms"]) == {"val/accepted_per_round", "val/sampling_accepted_per_round"}
    histogram = events.Histograms("val/accepted_per_round")[-1].histogram_value
    efficiency = events.Scalars("val/block_efficiency")[-1].value
    assert histogram.bucket_limit == [0.5, 1.5, 2.5, 3.5]
    # Every round adds the draft tokens that it keeps and one token of the target.
    assert (histogram.sum + histogram.num) / histogram.num == pytest.approx(efficiency)
    hparams = events.PluginTagToContent("hparams")
    assert b"target/hidden_size" in hparams["_hparams_/session_start_info"]
    assert b"val/block_efficiency" in hparams["_hparams_/experiment"], (
        "the tab shows the last value of that scalar"
    )


def test_each_chart_says_what_it_shows(events: EventAccumulator) -> None:
    shown_descriptions = {}
    for tag in events.Tags()["scalars"]:
        shown_descriptions[tag] = events.SummaryMetadata(tag).summary_description
    assert all(shown_descriptions.values()), shown_descriptions
    assert len(set(shown_descriptions.values())) == len(shown_descriptions)
    assert shown_descriptions["val/sampling_block_efficiency"] == (
        "New tokens per target call. Standard decoding has 1. At temperature 1. Charts without "
        "`sampling` are at temperature 0. On validation data."
    )
    assert "training data" in shown_descriptions["train/draft_loss"]
    assert "`draft`" in shown_descriptions["train/draft_loss"]
    for tag in shown_descriptions:
        # Without a class, TensorBoard's data server shows an empty description.
        assert events.SummaryMetadata(tag).data_class == DATA_CLASS_SCALAR


def test_several_curves_of_one_chart_are_logged_together(tmp_path: Path) -> None:
    logger = TensorBoardCurves(str(tmp_path))
    metrics: dict[str, Any] = {"val/loss": 2.0, "losses": {"target": 1.0, "draft": 3.0}}
    logger.log_metrics(metrics, 1)
    logger.finalize("success")
    logged = {}
    for directory in (logger.log_dir, f"{logger.log_dir}/losses_target"):
        accumulator = EventAccumulator(directory).Reload()
        for tag in accumulator.Tags()["scalars"]:
            logged[tag] = accumulator.Scalars(tag)[0].value
    assert logged == {"val/loss": 2.0, "losses": 1.0}


def test_checkpoints_are_enough_by_themselves_and_say_how_they_were_made(
    shipped_run: TrainedRun, events: EventAccumulator
) -> None:
    assert "best checkpoint: checkpoints/rnn/version_0/best.ckpt" in shipped_run.output
    assert "arning" not in shipped_run.output
    assert "tip" not in shipped_run.output.lower()
    pair = checkpoint.load(shipped_run.last)
    assert pair.prompts == ArithmeticProgressions(seed=26).prompts()
    assert pair.recipe["epochs"] == EPOCHS
    assert pair.recipe["data"] == "ArithmeticProgressions"
    target_losses = [event.value for event in events.Scalars("val/target_loss")]
    assert pair.recipe["reached"]["val/target_loss"] == target_losses[-1]
    best_loss = checkpoint.load(shipped_run.best).recipe["reached"]["val/loss"]
    assert best_loss == min(event.value for event in events.Scalars("val/loss"))


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_read_the_same_yaml_and_the_best_checkpoint(
    shipped_run: TrainedRun,
    events: EventAccumulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    verb(monkeypatch, shipped_run.directory, name, logger=True)
    output = capsys.readouterr().out
    prefix = {"validate": "val", "test": "test"}[name]
    assert all(f"{prefix}/{rate}" in output for rate in RATES)
    assert [path.name for path in (shipped_run.directory / "logs" / "rnn").iterdir()] == [
        "version_0"
    ]
    if name == "validate":
        best_loss = min(event.value for event in events.Scalars("val/loss"))
        assert f"{best_loss:.3f}" in output


def test_a_strangers_checkpoint_deletes_nothing(
    shipped_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning restores from a checkpoint which file it believes it has to replace."""
    precious = tmp_path / "precious.ckpt"
    shutil.copy(shipped_run.best, precious)
    content = torch.load(shipped_run.last, weights_only=True)
    for victim in (str(precious), "checkpoints/rnn/../../precious.ckpt"):
        (name,) = (name for name in content["callbacks"] if "val/loss" in name)
        state = content["callbacks"][name]
        state.pop("dirpath", None)
        state.update(
            {
                "best_k_models": {victim: torch.tensor(99.0)},
                "kth_value": torch.tensor(99.0),
                "kth_best_model_path": victim,
                "best_model_path": victim,
                "best_model_score": torch.tensor(99.0),
            }
        )
        torch.save(content, tmp_path / "stranger.ckpt")
        options = ["--ckpt_path", "stranger.ckpt", "--trainer.max_epochs", str(EPOCHS + 2)]
        verb(monkeypatch, tmp_path, "fit", *options)
        assert precious.read_bytes() == shipped_run.best.read_bytes()


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed_and_built(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = config.read_text()

    def run_verb(verb: str, *options: str) -> None:
        command = ["lightning_specdec", verb, "--config", str(config), *options]
        monkeypatch.setattr(sys, "argv", command)
        run()

    if "target_checkpoint: checkpoints/smollm2" in text:
        # `fit_shipped` trains these on a tiny target.
        with pytest.raises(SystemExit, match="0"):
            run_verb("fit", "--print_config")
        return

    short_run = ("--trainer.max_epochs", "0", "--trainer.accelerator", "cpu", *NO_LOGGER)
    if "class_path: GenerateText" in text:
        # The target is a real model, which the prediction would load.
        prompt_sources: list[object] = []

        def record(
            trainer: CliTrainer,
            *arguments: Any,
            datamodule: object,
            **options: Any,
        ) -> None:
            prompt_sources.append(datamodule)

        monkeypatch.setattr(CliTrainer, "predict", record)
        run_verb("generate", *short_run)
        (prompt_source,) = prompt_sources
        assert isinstance(prompt_source, PromptSource)
    else:
        run_verb("fit", *short_run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.max_epoch", "3"], "unrecognized arguments: --trainer.max_epoch"),
        (["--config", "nowhere.yaml"], "config: File does not exist"),
        (["--model.target.hiden_size", "3"], "hiden_size"),
        (["--model.target", "subprocess.Popen"], "Popen"),
        (["--trainer.callbacks+=torch.nn.Linear"], "not correspond to a subclass of Callback"),
        (["--model.target.hidden_size", "-3"], "hidden_size must be from 1 to 16384, got -3"),
        (["--data.num_train", "104"], "115 distinct sequences, and the splits need 119"),
        (["--data", "SequenceFile", "--data.path", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt: no such checkpoint"),
        (
            ["--trainer.callbacks", "ModelCheckpoint", "--trainer.callbacks.dirpath", "memory://a"],
            "dirpath memory://a is not a local directory",
        ),
        (["--weights_only", "false"], "unrecognized arguments: --weights_only"),
    ],
)
def test_a_fault_of_the_command_line_is_one_line_and_runs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        verb(monkeypatch, tmp_path, "fit", *arguments, logger=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_checkpoint_is_refused_before_anything_runs(
    shipped_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = checkpoint.read(shipped_run.last)
    (tmp_path / "text.ckpt").write_text("hello")
    (tmp_path / "folder.ckpt").mkdir()
    (tmp_path / "half.ckpt").write_bytes(shipped_run.last.read_bytes()[:50_000])
    torch.save({**good, "callbacks": Bomb()}, tmp_path / "bomb.ckpt")
    torch.save({"state_dict": good["state_dict"]}, tmp_path / "foreign.ckpt")
    optimizer = good["optimizer_states"][0]
    entry = {name: value.flatten()[:1] for name, value in optimizer["state"][0].items()}
    smaller = {**optimizer, "state": {**optimizer["state"], 0: entry}}
    torch.save({**good, "optimizer_states": [smaller]}, tmp_path / "smaller.ckpt")
    bad_paths = sorted(tmp_path.iterdir())
    for path in bad_paths:
        # `test` reads no optimizer.
        verbs = ["fit"] if path.stem == "smaller" else ["fit", "test"]
        for name in verbs:
            with pytest.raises((ValueError, FileNotFoundError), match=path.name) as caught:
                verb(monkeypatch, tmp_path, name, "--ckpt_path", path.name, logger=True)
            assert "\n" not in str(caught.value)

    best_path = str(shipped_run.best)
    other_networks = ("test", "--ckpt_path", best_path, "--data.vocab_size", "60")
    with pytest.raises(ValueError, match="has networks of other sizes .*embedding"):
        verb(monkeypatch, tmp_path, *other_networks, logger=True)

    resume = ("fit", "--ckpt_path", str(shipped_run.last))
    max_epochs = EPOCHS - 1
    message = f"{EPOCHS} finished epochs and the run ends after {max_epochs}"
    with pytest.raises(ValueError, match=message):
        verb(monkeypatch, tmp_path, *resume, "--trainer.max_epochs", str(max_epochs), logger=True)
    message = "is at step [0-9]+, the run ends after 2: raise --trainer.max_steps"
    with pytest.raises(ValueError, match=message):
        verb(monkeypatch, tmp_path, *resume, "--trainer.max_steps", "2", logger=True)
    assert sorted(tmp_path.iterdir()) == bad_paths


def test_an_exported_checkpoint_is_validated_but_not_resumed(
    shipped_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = checkpoint.load(shipped_run.best)
    checkpoint.save(tmp_path / "models.ckpt", pair.target, pair.drafter)
    verb(monkeypatch, tmp_path, "validate", "--ckpt_path", "models.ckpt")
    assert f"{pair.recipe['reached']['val/loss']:.3f}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="models.ckpt holds no training run to resume"):
        verb(monkeypatch, tmp_path, "fit", "--ckpt_path", "models.ckpt")


def test_a_run_killed_at_any_moment_leaves_a_whole_checkpoint(
    shipped_run: TrainedRun, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    shutil.copy(shipped_run.last, path)
    content = checkpoint.read(shipped_run.last)
    for attempt in range(12):
        child = os.fork()
        if not child:
            while True:
                SafeCheckpointIO().save_checkpoint(content, path)
        time.sleep(0.02 + 0.003 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert checkpoint.read(path)["epoch"] == EPOCHS - 1


def test_a_full_disk_names_the_file_and_leaves_the_old_checkpoint_alone(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    SafeCheckpointIO().save_checkpoint({"epoch": 1}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            SafeCheckpointIO().save_checkpoint({"epoch": 2, "weights": torch.ones(2**18)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.filename == str(path)
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line_and_it_goes_on_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = (*FIT, *NO_LOGGER, *TEN_STEPS)
    succeed(*fit_command, "--trainer.max_epochs", "1")
    last_path = tmp_path / "checkpoints/rnn/version_0/last.ckpt"
    content = last_path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        outcome = call(*fit_command, "--trainer.max_epochs", "2", "--ckpt_path", "last")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    error_line = outcome.err.splitlines()[-1]
    assert error_line.startswith("error: ")
    assert "last.ckpt" in error_line
    assert last_path.read_bytes() == content
    assert sorted(file.name for file in last_path.parent.iterdir()) == FILES
    succeed(*fit_command, "--trainer.max_epochs", "2", "--ckpt_path", "last")


def test_a_disk_that_fills_under_tensorboard_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = (*FIT, *TEN_STEPS, "--trainer.max_epochs", "3")
    write = RecordWriter.write
    numbers = itertools.count()

    def until_full(self: Any, data: bytes) -> None:
        if next(numbers) >= 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    with monkeypatch.context() as full:
        full.setattr(RecordWriter, "write", until_full)
        outcome = call(*fit_command, "--save_seconds", "0")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in outcome.err
    succeed(*fit_command, "--ckpt_path", "last")


class Stop:
    """Ends a run at a step, or in its first validation: by Ctrl-C, a signal, or an error."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
        hook: str = "on_train_batch_end",
        step: int = 3,
    ) -> None:
        def stop(module: SpeculativeTraining, *_: object) -> None:
            if hook == "on_train_batch_end" and module.trainer.global_step != step:
                return
            if how == "SIGINT":
                raise KeyboardInterrupt
            if how == "error":
                raise RuntimeError("broken")
            os.kill(os.getpid(), signal.Signals[how])

        monkeypatch.setattr(SpeculativeTraining, hook, stop)


def end_of(start: Callable[[], object]) -> int:
    """Run this in another process; return its exit code, or the negative number of a signal."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                start()
            except SystemExit as stop:
                code = int(stop.code or 0)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint of two epochs in one run."""
    home = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        verb(patch, home, *FIT_TWO_EPOCHS)
    return checkpoint.read(home / "checkpoints/rnn")


FIT_ONE_EPOCH = ("fit", *TEN_STEPS, "--trainer.max_epochs", "1")
FIT_TWO_EPOCHS = ("fit", *TEN_STEPS, "--trainer.max_epochs", "2")


def stop_run(how: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a run of two epochs early: after its first epoch, by a signal, or by an error."""
    if how == "finished":
        verb(monkeypatch, directory, *FIT_ONE_EPOCH, logger=True)
    elif how in ("SIGINT", "error"):
        stop_in_process(how, directory, monkeypatch)
    else:
        stop_by_signal(how, directory, monkeypatch)


def stop_in_process(how: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patch, pytest.raises((SystemExit, RuntimeError)):
        Stop(patch, how)
        verb(patch, directory, *FIT_TWO_EPOCHS, logger=True)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stop_by_signal(how: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM or SIGKILL at the third step, at the last batch of an epoch, or in a
    validation."""
    signal_name = "SIGTERM" if how == "SIGTERM" else "SIGKILL"
    # Without a last save, a killed run needs a recent checkpoint.
    save_often = () if how == "SIGTERM" else ("--save_seconds", "0")
    hook = "validation_step" if how == "validation" else "on_train_batch_end"
    step = 10 if how == "last batch" else 3
    with monkeypatch.context() as patch:
        Stop(patch, signal_name, hook, step)
        exit_code = end_of(
            lambda: verb(patch, directory, *FIT_TWO_EPOCHS, *save_often, logger=True)
        )
    expected_code = 128 + signal.SIGTERM if how == "SIGTERM" else -signal.SIGKILL
    assert exit_code == expected_code
    newest = checkpoint.read(directory / "checkpoints/rnn/version_0/last.ckpt")
    assert newest["global_step"] == {"validation": 10, "last batch": 9}.get(how, 3)


@pytest.mark.quick_cases("SIGKILL")
@pytest.mark.parametrize(
    "how", ["finished", "SIGINT", "SIGTERM", "SIGKILL", "last batch", "validation", "error"]
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    how: str,
) -> None:
    """After its first epoch, or stopped within it; a killed run continues from its newest
    checkpoint."""
    directory = tmp_path / "halves"
    directory.mkdir()
    stop_run(how, directory, monkeypatch)
    has_advice = "stopped at step 3: repeat with --ckpt_path last\n" in capfd.readouterr().out
    assert has_advice == (how in ("SIGINT", "SIGTERM"))

    verb(monkeypatch, directory, *FIT_TWO_EPOCHS, "--ckpt_path", "last", logger=True)
    halves = checkpoint.read(directory / "checkpoints/rnn")
    assert whole["epoch"] == halves["epoch"] == 1
    assert whole["global_step"] == halves["global_step"] == 20
    assert whole["lightning_specdec"]["recipe"] == halves["lightning_specdec"]["recipe"]
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, halves["state_dict"][name])

    assert [path.name for path in (directory / "logs/rnn").iterdir()] == ["version_0"]
    # TensorBoard reads a run's directory as one.
    keep_all = {"histograms": 0, "scalars": 0}
    curves = EventAccumulator(str(directory / "logs/rnn/version_0"), keep_all).Reload()
    assert [event.step for event in curves.Scalars("val/loss")] == [9, 19]
    assert [event.step for event in curves.Histograms("val/accepted_per_round")] == [9, 19]
    steps = [event.step for event in curves.Scalars("train/loss")]
    assert steps == sorted(set(steps))
    config = yaml.safe_load((directory / "checkpoints/rnn/version_0/config.yaml").read_text())
    assert config["ckpt_path"] is None, "it begins a new run"


def test_a_crashed_run_that_resumes_shows_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It crashes ten steps after its newest checkpoint."""
    every_step = ("--trainer.log_every_n_steps", "1", "--trainer.max_epochs", "1")
    log_loss = SpeculativeTraining.on_train_batch_end

    def crash(module: SpeculativeTraining, *arguments: Any) -> None:
        log_loss(module, *arguments)
        if module.global_step == 11:
            for logger in module.loggers:
                logger.experiment.flush()  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as stopped:
        stopped.setattr(SpeculativeTraining, "on_train_batch_end", crash)
        end = end_of(lambda: verb(stopped, tmp_path, "fit", *every_step, logger=True))
    assert end == -signal.SIGKILL
    assert checkpoint.read(tmp_path / "checkpoints/rnn/version_0/last.ckpt")["global_step"] == 1
    # TensorBoard orders files of events by the second in which they were begun.
    time.sleep(1.1)
    verb(monkeypatch, tmp_path, "fit", *every_step, "--ckpt_path", "last", logger=True)
    curves = EventAccumulator(
        str(tmp_path / "logs/rnn/version_0"), size_guidance={"scalars": 0}
    ).Reload()
    assert [event.step for event in curves.Scalars("train/loss")] == list(range(50))
    # Lightning adds the epoch to every kind of metric, so several times to a step.
    for tag in set(curves.Tags()["scalars"]) - {"train/epoch"}:
        steps = [event.step for event in curves.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag


@pytest.mark.slow
def test_a_development_run_leaves_nothing_to_resume(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def files() -> list[Path]:
        return sorted(tmp_path.rglob("*"))

    development_run = ("fit", *TEN_STEPS, "--trainer.fast_dev_run", "true")
    verb(monkeypatch, tmp_path, *development_run, logger=True)
    assert files() == []

    verb(monkeypatch, tmp_path, *FIT_ONE_EPOCH, logger=True)
    files_of_the_run = files()
    verb(monkeypatch, tmp_path, *development_run, logger=True)
    assert files() == files_of_the_run

    capsys.readouterr()
    verb(monkeypatch, tmp_path, *FIT_TWO_EPOCHS, "--ckpt_path", "last")
    assert "resuming checkpoints/rnn/version_0/last.ckpt at step 10\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_config_that_a_resumed_run_saved_begins_a_new_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = tmp_path / "checkpoints/rnn"
    verb(monkeypatch, tmp_path, *FIT_ONE_EPOCH)
    last_path = "checkpoints/rnn/version_0/last.ckpt"
    verb(monkeypatch, tmp_path, *FIT_TWO_EPOCHS, "--ckpt_path", last_path)
    assert checkpoint.read(home / "version_1/last.ckpt")["global_step"] == 20

    capsys.readouterr()
    saved_config = str(home / "version_1/config.yaml")
    verb(monkeypatch, tmp_path, "fit", "--config", saved_config, "--trainer.max_epochs", "1")
    assert "resuming" not in capsys.readouterr().out
    assert checkpoint.read(home / "version_2/last.ckpt")["global_step"] == 10


@pytest.mark.quick_cases("accumulated")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("edited", "the texts of the data changed, or their order"),
        ("reversed", "the texts of the data changed, or their order"),
        ("clipped", "gradients.gradient_clip_val changed from None to 0.5"),
        ("accumulated", "gradients.accumulate_grad_batches changed from 1 to 2"),
    ],
)
def test_a_run_does_not_resume_with_other_texts_or_gradients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    message: str,
) -> None:
    lines = [f"{row}, {row + 1}, {row + 3}, {row + 4}" for row in range(40)]
    path = tmp_path / "sequences.txt"
    path.write_text("\n".join(lines))
    data = ["--data", "SequenceFile", "--data.path", str(path), "--data.vocab_size", "50"]
    data += ["--data.num_val", "4", "--data.num_test", "2"]
    verb(monkeypatch, tmp_path, "fit", *data, "--trainer.max_epochs", "1")
    resumed = ("fit", *data, "--trainer.max_epochs", "2", "--ckpt_path", "last")
    options: tuple[str, ...] = ()
    if change == "edited":
        path.write_text("\n".join([*lines[:20], "20, 21, 23, 25", *lines[21:]]))
    elif change == "reversed":
        path.write_text("\n".join(reversed(lines)))
    elif change == "clipped":
        options = ("--trainer.gradient_clip_val", "0.5")
    else:
        options = ("--trainer.accumulate_grad_batches", "2")
    with pytest.raises(ValueError, match=f"last.ckpt cannot resume: {message}"):
        verb(monkeypatch, tmp_path, *resumed, *options)
    path.write_text("\n".join(lines))
    verb(monkeypatch, tmp_path, *resumed)


def test_ctrl_c_within_an_optimizer_step_saves_no_half_step(
    whole: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights have changed then, and the step is not counted."""
    step = torch.optim.AdamW.step
    steps = itertools.count(1)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = step(*arguments, **options)
        if next(steps) == 3:
            raise KeyboardInterrupt
        return result

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        verb(patch, tmp_path, *FIT_TWO_EPOCHS)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    verb(monkeypatch, tmp_path, *FIT_TWO_EPOCHS, "--ckpt_path", "last")
    resumed = checkpoint.read(tmp_path / "checkpoints/rnn/version_0/last.ckpt")
    for name, weight in whole["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name])


@pytest.mark.slow
def test_a_run_that_stopped_early_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = (*FIT, *NO_LOGGER, *TEN_STEPS)
    early = [
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/loss",
        "--trainer.callbacks.min_delta=100",
        "--trainer.callbacks.patience=1",
    ]
    succeed(*fit_command, *early)
    last_path = tmp_path / "checkpoints/rnn/version_0/last.ckpt"
    content = last_path.read_bytes()
    outcome = call(*fit_command, *early, "--ckpt_path", "last")
    message = "is over, EarlyStopping ended the run (val/loss, patience 1): resume without it"
    assert outcome.code == 2
    assert message in outcome.err.splitlines()[-1]
    assert last_path.read_bytes() == content
    # A run that ended before its first checkpoint leaves an empty directory.
    (last_path.parent.parent / "version_1").mkdir()
    outcome = succeed(*fit_command, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert "resuming checkpoints/rnn/version_0/last.ckpt at step 20\n" in outcome.out
    assert checkpoint.read(last_path)["epoch"] == 2


def test_a_run_whose_time_is_used_up_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = (*FIT, *TEN_STEPS, "--trainer.callbacks+=TimeLimit")
    succeed(*fit_command, "--trainer.callbacks.minutes", "9", "--trainer.max_epochs", "1")
    outcome = call(*fit_command, "--trainer.callbacks.minutes", "0.0001", "--ckpt_path", "last")
    assert outcome.code == 2
    assert "resuming" not in outcome.out
    message = (
        "last.ckpt is over, the run's time is used up: give more --minutes or --trainer.max_time, "
        "or begin a new run"
    )
    assert message in outcome.err.splitlines()[-1]
    monkeypatch.setattr(TimeLimit, "began", time.monotonic() - 1000)
    assert time_left(Trainer(max_time="00:00:01:00", logger=False)) == 60, (
        "Lightning's own limit begins with training"
    )


SHIPPED: dict[str, set[str]] = {
    "draft_sizes": {"val/small/acceptance_rate"},
    "early_exit": {
        "val/exit_5/teacher_forced_block_efficiency",
        "val/exit_1/loss",
        "train/exit_3/loss",
    },
    "medusa": {"val/position_4/acceptance_rate", "val/walltime_speedup"},
    "staged": {"val/small/acceptance_rate"},
    "transformer": {"val/walltime_speedup"},
}
"""Scalars that only this config has."""


def check_curves(name: str, directory: Path, config: str) -> None:
    """Check the curves of a run of eight steps, of which three may be lost with a killed
    process."""
    curves = EventAccumulator(str(directory)).Reload()
    tags = set(curves.Tags()["scalars"])
    assert SHIPPED[name] <= tags
    assert {tag.split("/")[0] for tag in tags} == {"train", "val"}
    steps = [event.step for event in curves.Scalars("train/loss")]
    assert len(steps) >= 5
    assert steps == list(range(8))[-len(steps) :]
    if "DecodeHeldOut" in config:
        samples = (directory / "samples.md").read_text()
        assert samples.startswith("| prompt | standard | speculative |")
        assert "val/samples/text_summary" in curves.Tags()["tensors"]


@pytest.mark.quick_cases("early_exit")
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_resumes_after_kill_9_and_its_checkpoint_decodes_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    config = shrunk(name, tmp_path)
    last_path = tmp_path / "checkpoints" / name / "version_0" / "last.ckpt"
    monkeypatch.chdir(tmp_path)
    logged = (
        "--trainer.logger",
        "TensorBoardCurves",
        "--trainer.logger.name",
        name,
        "--trainer.log_every_n_steps",
        "1",
    )
    fit_command = ("fit", "--config", str(config), "--data.batch_size", "4", *logged)
    with monkeypatch.context() as stopped:
        Stop(stopped, "SIGKILL")
        assert end_of(lambda: call(*fit_command, "--save_seconds", "0")) == -signal.SIGKILL
    (last_path.parent / ".last.ckpt.half").write_text("half")
    assert checkpoint.read(last_path)["global_step"] == 3
    outcome = call(*fit_command, "--ckpt_path", "last")
    assert outcome.code == 0, outcome.err
    assert "Warning" not in outcome.err
    assert "loss=" in outcome.err
    assert "tokens/s=" in outcome.err
    assert not list(last_path.parent.glob(".last*"))
    assert checkpoint.read(last_path)["global_step"] == 8
    check_curves(name, tmp_path / "logs" / name / "version_0", config.read_text())
    config.unlink()
    assert "output identical" in succeed("decode", "--ckpt", str(last_path), "--repeats", "0").out


def test_a_metric_that_is_not_there_to_stop_by_is_one_line_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopping = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/los"]
    outcome = call("fit", "--config", str(shrunk("medusa", tmp_path)), *stopping)
    assert outcome.code == 2
    assert "Traceback" not in outcome.err
    error_line = outcome.err.splitlines()[-1]
    assert error_line.startswith("error: ")
    assert "`val/los`" in error_line
    assert "`val/loss`" in error_line


def test_of_several_drafts_the_one_that_reads_too_little_is_named() -> None:
    small = HuggingFaceLM(tiny("llama", vocab_size=24, max_position_embeddings=10))
    module = PairTraining(RNN(24), drafts={"small": small, "medium": RNN(24, hidden_size=96)})
    with pytest.raises(ValueError, match="sequences have 14 tokens, and small reads 10"):
        module.check_data(QuadraticProgressions(24, 14, num_train=4, num_val=2, num_test=2))


def test_a_new_run_leaves_the_files_of_the_one_before_and_decode_takes_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        return {
            str(path): path.read_bytes() for path in tmp_path.rglob("version_0/*") if path.is_file()
        }

    verb(monkeypatch, tmp_path, *FIT_ONE_EPOCH, logger=True)
    first_files = files()
    verb(monkeypatch, tmp_path, *FIT_TWO_EPOCHS, logger=True)
    assert files() == first_files
    assert len(first_files) == 5
    home = tmp_path / "checkpoints" / "rnn"
    assert runs.find(home) == home / "version_1" / "best.ckpt"
    assert checkpoint.load(home).recipe["epochs"] == 2
    (home / "version_10").mkdir()
    shutil.copy(home / "version_0" / "best.ckpt", home / "version_10" / "last.ckpt")
    assert runs.find(home) == home / "version_10" / "last.ckpt", "numbers, not words"


@pytest.mark.slow
def test_curves_may_lie_beside_the_checkpoints_and_a_finished_run_leaves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit_command = (*FIT, *TEN_STEPS, "--trainer.max_epochs", "1")
    # Nothing is counted where another process has trained, as after zero steps.
    for version, max_steps in enumerate((2, 0)):
        options = ("--trainer.logger.init_args.save_dir", "checkpoints")
        succeed(*fit_command, *options, "--trainer.max_steps", str(max_steps))
        home = tmp_path / f"checkpoints/rnn/version_{version}"
        assert (home / "config.yaml").is_file()
        assert (home / "last.ckpt").is_file() == (max_steps == 2)


def test_a_directory_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, tmp_path, *FIT_ONE_EPOCH)
    directory = os.open(tmp_path / "checkpoints" / "rnn" / "version_0", os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    resumed = (*FIT_TWO_EPOCHS, "--ckpt_path", "last")
    with pytest.raises(ValueError, match="another run writes to checkpoints/rnn/version_0"):
        verb(monkeypatch, tmp_path, *resumed)
    os.close(directory)
    verb(monkeypatch, tmp_path, *resumed)


OWN = """
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

class Mine(LightningDataModule):
    def loader(self):
        rows = [{"tokens": torch.arange(i, i + 6), "lengths": torch.tensor(6)} for i in range(20)]
        return DataLoader(rows, batch_size=5)

    train_dataloader = val_dataloader = test_dataloader = loader
"""


def test_a_users_own_data_module_is_named_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text(OWN)
    config = yaml.safe_load((CONFIGS / "rnn.yaml").read_text())
    for model in ("target", "draft"):
        config["model"]["init_args"][model]["init_args"]["vocab_size"] = 50
    config["data"] = {"class_path": "own_data.Mine"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    options = ("--config", "own.yaml", "--trainer.accelerator", "cpu", "--trainer.logger", "false")
    assert call("fit", *options, "--trainer.max_epochs", "2").code == 0
    assert call("fit", *options, "--trainer.max_epochs", "3", "--ckpt_path", "last").code == 0
    assert checkpoint.load(tmp_path / "checkpoints" / "rnn").recipe["data"] == "Mine"


def test_a_checkpoint_is_written_without_a_copy_of_it_in_memory(tmp_path: Path) -> None:
    weights = torch.ones(2**22)
    tracemalloc.start()
    SafeCheckpointIO().save_checkpoint({"weights": weights}, tmp_path / "large.ckpt")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < weights.nbytes / 2
