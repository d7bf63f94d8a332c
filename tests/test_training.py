"""Laws of training: the shipped config learns, its logs hold what they promise, its metrics are their formulas."""

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
from tensorboard.summary.writer.record_writer import RecordWriter
from training_fixtures import CONFIGS, EPOCHS, RNN_CONFIG, TrainedRun, shipped_run, shrunk, verb

from lightning_specdec.checkpoints import checkpoint, runs
from lightning_specdec.data import ArithmeticProgressions, PromptSource, QuadraticProgressions
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.training import PairTraining, SafeCheckpointIO, SpeculativeTraining
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
        assert len(losses) == EPOCHS and 3.6 < losses[0] < 4.1, (
            "it begins a little below log(50) = 3.9"
        )
        assert losses[-1] < 1
    tags = events.Tags()
    wanted = {f"val/{rate}" for rate in RATES} | {
        "train/loss",
        "train/draft_loss",
        "train/target_loss",
        "train/epoch",
    }
    assert set(tags["scalars"]) == wanted, "a second copy of metrics is no curve"
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


def test_checkpoints_are_enough_by_themselves_and_say_how_they_were_made(
    shipped_run: TrainedRun, events: EventAccumulator
) -> None:
    assert "best checkpoint: checkpoints/rnn/version_0/best.ckpt" in shipped_run.output
    assert "arning" not in shipped_run.output and "tip" not in shipped_run.output.lower()
    made = checkpoint.load(shipped_run.last)
    assert made.prompts == ArithmeticProgressions(seed=26).prompts()
    assert made.recipe["epochs"] == EPOCHS and made.recipe["data"] == "ArithmeticProgressions"
    assert made.recipe["reached"]["val/target_loss"] == events.Scalars("val/target_loss")[-1].value
    best = checkpoint.load(shipped_run.best).recipe["reached"]["val/loss"]
    assert best == min(event.value for event in events.Scalars("val/loss"))


@pytest.mark.parametrize("name", ["validate", "test"])
def test_validate_and_test_read_the_same_yaml_and_the_best_checkpoint(
    shipped_run: TrainedRun,
    events: EventAccumulator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    verb(monkeypatch, shipped_run.directory, name, logger=True)
    shown = capsys.readouterr().out
    prefix = {"validate": "val", "test": "test"}[name]
    assert all(f"{prefix}/{rate}" in shown for rate in RATES)
    assert [path.name for path in (shipped_run.directory / "logs" / "rnn").iterdir()] == [
        "version_0"
    ]
    if name == "validate":
        assert str(min(event.value for event in events.Scalars("val/loss")))[:6] in shown


def test_a_strangers_checkpoint_deletes_nothing(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning restores from a checkpoint which file it believes it has to replace."""
    precious = tmp_path / "precious.ckpt"
    shutil.copy(shipped_run.best, precious)
    content = torch.load(shipped_run.last, weights_only=True)
    for victim in (str(precious), "checkpoints/rnn/../../precious.ckpt"):
        (state,) = (state for name, state in content["callbacks"].items() if "val/loss" in name)
        state.pop("dirpath", None)
        state |= {"best_k_models": {victim: torch.tensor(99.0)}, "kth_value": torch.tensor(99.0)}
        state |= {
            "kth_best_model_path": victim,
            "best_model_path": victim,
            "best_model_score": torch.tensor(99.0),
        }
        torch.save(content, tmp_path / "stranger.ckpt")
        options = ["--ckpt_path", "stranger.ckpt", "--trainer.max_epochs", str(EPOCHS + 2)]
        verb(monkeypatch, tmp_path, "fit", *options)
        assert precious.read_bytes() == shipped_run.best.read_bytes()


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_is_parsed_and_built(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    generates = "class_path: GenerateText" in config.read_text()
    if (
        "target_checkpoint: checkpoints/smollm2" in config.read_text()
    ):  # built on a tiny target by `fit_shipped`
        monkeypatch.setattr(
            sys, "argv", ["lightning_specdec", "fit", "--config", str(config), "--print_config"]
        )
        with pytest.raises(SystemExit, match="0"):
            run()
        return
    options = [
        "--trainer.max_epochs",
        "0",
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    ]
    verb = "generate" if generates else "fit"
    monkeypatch.setattr(sys, "argv", ["lightning_specdec", verb, "--config", str(config), *options])
    started: list[object] = []
    if generates:  # its target is a real model, which starting would load
        monkeypatch.setattr(
            CliTrainer, "predict", lambda *_, **given: started.append(given["datamodule"])
        )
    run()
    assert [isinstance(data, PromptSource) for data in started] == [True] * generates


@pytest.mark.parametrize(
    ("arguments", "told"),
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
            "dirpath memory://a is no directory",
        ),
        (["--weights_only", "false"], "unrecognized arguments: --weights_only"),
    ],
)
def test_a_fault_of_the_command_line_is_one_line_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        verb(monkeypatch, tmp_path, "fit", *arguments, logger=True)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_checkpoint_is_refused_before_anything_runs(
    shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    before = sorted(tmp_path.iterdir())
    for path in before:
        for name in ("fit", "test") if path.stem != "smaller" else ("fit",):
            with pytest.raises((ValueError, FileNotFoundError), match=path.name) as caught:
                verb(monkeypatch, tmp_path, name, "--ckpt_path", path.name, logger=True)
            assert "\n" not in str(caught.value)
    best, last = str(shipped_run.best), str(shipped_run.last)
    with pytest.raises(ValueError, match="has networks of other shapes .*embedding"):
        verb(
            monkeypatch,
            tmp_path,
            "test",
            "--ckpt_path",
            best,
            "--data.vocab_size",
            "60",
            logger=True,
        )
    with pytest.raises(
        ValueError, match=f"{EPOCHS} finished epochs and the run ends after {EPOCHS - 1}"
    ):
        verb(
            monkeypatch,
            tmp_path,
            "fit",
            "--ckpt_path",
            last,
            "--trainer.max_epochs",
            str(EPOCHS - 1),
            logger=True,
        )
    with pytest.raises(
        ValueError, match="is at step [0-9]+, the run ends after 2: raise --trainer.max_steps"
    ):
        verb(
            monkeypatch,
            tmp_path,
            "fit",
            "--ckpt_path",
            last,
            "--trainer.max_steps",
            "2",
            logger=True,
        )
    assert sorted(tmp_path.iterdir()) == before


def test_an_exported_checkpoint_is_validated_but_not_resumed(
    shipped_run: TrainedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = checkpoint.load(shipped_run.best)
    checkpoint.save(tmp_path / "models.ckpt", made.target, made.drafter)
    verb(monkeypatch, tmp_path, "validate", "--ckpt_path", "models.ckpt")
    assert str(made.recipe["reached"]["val/loss"])[:6] in capsys.readouterr().out
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
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            SafeCheckpointIO().save_checkpoint({"epoch": 2, "weights": torch.ones(2**18)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["best.ckpt"]
    assert SafeCheckpointIO().load_checkpoint(path)["epoch"] == 1


def test_a_full_disk_ends_a_run_with_one_line_and_it_goes_on_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = (
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    )
    succeed(*fit, "--trainer.max_epochs", "1")
    last = tmp_path / "checkpoints/rnn/version_0/last.ckpt"
    content, before = last.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        outcome = call(*fit, "--trainer.max_epochs", "2", "--ckpt_path", "last")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    assert (
        outcome.err.splitlines()[-1].startswith("error: ")
        and "last.ckpt" in outcome.err.splitlines()[-1]
    )
    assert (
        last.read_bytes() == content
        and sorted(each.name for each in last.parent.iterdir()) == FILES
    )
    succeed(*fit, "--trainer.max_epochs", "2", "--ckpt_path", "last")


def test_a_disk_that_fills_under_tensorboard_is_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = (
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--trainer.accelerator",
        "cpu",
        "--trainer.max_epochs",
        "3",
    )
    write, numbers = RecordWriter.write, itertools.count()

    def until_full(self: Any, data: bytes) -> None:
        if next(numbers) >= 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    with monkeypatch.context() as full:
        full.setattr(RecordWriter, "write", until_full)
        outcome = call(*fit, "--save_seconds", "0")
    assert outcome.code == 2 and outcome.err.splitlines()[-1] == "error: No space left on device"
    assert "Traceback" not in outcome.err
    succeed(*fit, "--ckpt_path", "last")


class Stop:
    """Ends a run at its third or another step, or within its first validation: by Ctrl-C, a signal, or an error."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        how: str,
        hook: str = "on_train_batch_end",
        step: int = 3,
    ) -> None:
        def stop(module: SpeculativeTraining, *_: object) -> None:
            if module.trainer.global_step == step or hook != "on_train_batch_end":
                if how in ("SIGTERM", "SIGKILL"):
                    os.kill(os.getpid(), signal.Signals[how])
                else:
                    raise KeyboardInterrupt if how == "SIGINT" else RuntimeError("broken")

        monkeypatch.setattr(SpeculativeTraining, hook, stop)


def end_of(start: Callable[[], object]) -> int:
    """The exit code of a process of its own that runs this; the signal's negative number where one killed it."""
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
        verb(patch, home, "fit", "--trainer.max_epochs", "2")
    return checkpoint.read(home / "checkpoints/rnn")


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
    """After its first epoch, or stopped within it; killed, it goes on from the newest checkpoint."""
    (tmp_path / "halves").mkdir()
    if how == "finished":
        verb(monkeypatch, tmp_path / "halves", "fit", "--trainer.max_epochs", "1", logger=True)
    elif how in ("SIGTERM", "SIGKILL", "last batch", "validation"):
        often = (
            "fit",
            "--trainer.max_epochs",
            "2",
            *(("--save_seconds", "0") if how != "SIGTERM" else ()),
        )
        with monkeypatch.context() as stopped:
            number, step = (
                "SIGTERM" if how == "SIGTERM" else "SIGKILL",
                50 if how == "last batch" else 3,
            )
            Stop(
                stopped,
                number,
                "validation_step" if how == "validation" else "on_train_batch_end",
                step,
            )
            end = end_of(lambda: verb(stopped, tmp_path / "halves", *often, logger=True))
        assert end == (128 + signal.SIGTERM if how == "SIGTERM" else -signal.SIGKILL)
        left = checkpoint.read(tmp_path / "halves" / "checkpoints/rnn/version_0/last.ckpt")
        assert left["global_step"] == {"validation": 50, "last batch": 49}.get(how, 3)
    else:
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
        with monkeypatch.context() as stopped, pytest.raises((SystemExit, RuntimeError)):
            Stop(stopped, how)
            verb(stopped, tmp_path / "halves", "fit", "--trainer.max_epochs", "2", logger=True)
        for each, handler in handlers.items():
            signal.signal(each, handler)
    told = "stopped at step 3: repeat with --ckpt_path last\n" in capfd.readouterr().out
    assert told == (how in ("SIGINT", "SIGTERM"))
    verb(
        monkeypatch,
        tmp_path / "halves",
        "fit",
        "--trainer.max_epochs",
        "2",
        "--ckpt_path",
        "last",
        logger=True,
    )
    halves = checkpoint.read(tmp_path / "halves" / "checkpoints/rnn")
    assert (
        whole["epoch"] == halves["epoch"] == 1
        and whole["global_step"] == halves["global_step"] == 100
    )
    assert whole["lightning_specdec"]["recipe"] == halves["lightning_specdec"]["recipe"]
    assert all(
        torch.equal(weight, halves["state_dict"][name])
        for name, weight in whole["state_dict"].items()
    )
    assert [path.name for path in (tmp_path / "halves" / "logs" / "rnn").iterdir()] == ["version_0"]
    curves = (
        EventAccumulator(str(path)).Reload() for path in (tmp_path / "halves").rglob("events.out*")
    )
    losses = (each.Scalars("val/loss") for each in curves if "val/loss" in each.Tags()["scalars"])
    assert [
        event.step for event in sorted(itertools.chain(*losses), key=lambda event: event.step)
    ] == [49, 99]


def test_a_run_that_stopped_early_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit = (
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--trainer.accelerator",
        "cpu",
        "--trainer.logger",
        "false",
    )
    stopping = ("EarlyStopping", "monitor=val/loss", "min_delta=100", "patience=1")
    early = [
        f"--trainer.callbacks{at}{each}"
        for at, each in zip(("+=", ".", ".", "."), stopping, strict=True)
    ]
    succeed(*fit, *early)
    last = tmp_path / "checkpoints/rnn/version_0/last.ckpt"
    content = last.read_bytes()
    outcome = call(*fit, *early, "--ckpt_path", "last")
    line = "is over, EarlyStopping ended the run (val/loss, patience 1): resume without it"
    assert (
        outcome.code == 2 and line in outcome.err.splitlines()[-1] and last.read_bytes() == content
    )
    (last.parent.parent / "version_1").mkdir()  # of a run that ended before its first checkpoint
    outcome = succeed(*fit, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert "resuming checkpoints/rnn/version_0/last.ckpt at step 100\n" in outcome.out
    assert checkpoint.read(last)["epoch"] == 2


def test_a_run_whose_time_is_used_up_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = (
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--trainer.accelerator",
        "cpu",
        "--trainer.callbacks+=TimeLimit",
    )
    succeed(*fit, "--trainer.callbacks.minutes", "9", "--trainer.max_epochs", "1")
    outcome = call(*fit, "--trainer.callbacks.minutes", "0.0001", "--ckpt_path", "last")
    assert outcome.code == 2 and "resuming" not in outcome.out
    told = "last.ckpt is over, the run's time is used up: give more --minutes or --trainer.max_time, or begin a new run"
    assert told in outcome.err.splitlines()[-1]
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
    "multi_token": {"val/position_4/acceptance_rate", "val/walltime_speedup"},
    "staged": {"val/small/acceptance_rate"},
    "transformer": {"val/walltime_speedup"},
}
"""Scalars of each config that the others do not have."""


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_resumes_after_kill_9_and_its_checkpoint_decodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config, last = (
        shrunk(name, tmp_path),
        tmp_path / "checkpoints" / name / "version_0" / "last.ckpt",
    )
    monkeypatch.chdir(tmp_path)
    logged = (
        "--trainer.logger",
        "TensorBoardCurves",
        "--trainer.logger.name",
        name,
        "--trainer.log_every_n_steps",
        "1",
    )
    fit = ("fit", "--config", str(config), "--data.batch_size", "4", *logged)
    with monkeypatch.context() as stopped:
        Stop(stopped, "SIGKILL")
        assert end_of(lambda: call(*fit, "--save_seconds", "0")) == -signal.SIGKILL
    (last.parent / ".last.ckpt.half").write_text("half")
    assert checkpoint.read(last)["global_step"] == 3
    outcome = call(*fit, "--ckpt_path", "last")
    assert outcome.code == 0 and "Warning" not in outcome.err, outcome.err
    assert (
        "loss=" in outcome.err
        and "tokens/s=" in outcome.err
        and not list(last.parent.glob(".last*"))
    )
    assert checkpoint.read(last)["global_step"] == 8
    events = [EventAccumulator(str(path)).Reload() for path in tmp_path.rglob("events.out*")]
    tags = {tag for each in events for tag in each.Tags()["scalars"]}
    assert SHIPPED[name] <= tags and {tag.split("/")[0] for tag in tags} == {"train", "val"}
    steps = [
        event.step
        for each in events
        if "train/loss" in each.Tags()["scalars"]
        for event in each.Scalars("train/loss")
    ]
    assert sorted({*steps}) == list(range(8))[-len({*steps}) :] and len({*steps}) >= 5, (
        "the curve by step"
    )
    if "DecodeHeldOut" in config.read_text():
        (samples,) = (tmp_path / "logs" / name / "version_0").glob("samples.md")
        assert samples.read_text().startswith("| prompt | standard | speculative |")
        assert any("val/samples/text_summary" in each.Tags()["tensors"] for each in events)
    config.unlink()
    assert "output identical" in succeed("decode", "--ckpt", str(last), "--repeats", "0").out


def test_a_metric_that_is_not_there_to_stop_by_is_one_line_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stopping = ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "val/los"]
    outcome = call("fit", "--config", str(shrunk("multi_token", tmp_path)), *stopping)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    line = outcome.err.splitlines()[-1]
    assert line.startswith("error: ") and "`val/los`" in line and "`val/loss`" in line


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

    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1", logger=True)
    before = files()
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "2", logger=True)
    assert files() == before and len(before) == 5
    home = tmp_path / "checkpoints" / "rnn"
    assert runs.find(home) == home / "version_1" / "best.ckpt"
    assert checkpoint.load(home).recipe["epochs"] == 2
    (home / "version_10").mkdir()
    shutil.copy(home / "version_0" / "best.ckpt", home / "version_10" / "last.ckpt")
    assert runs.find(home) == home / "version_10" / "last.ckpt", "numbers, not words"


def test_curves_may_lie_beside_the_checkpoints_and_a_finished_run_leaves_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = (
        "fit",
        "--config",
        str(RNN_CONFIG),
        "--trainer.accelerator",
        "cpu",
        "--trainer.max_epochs",
        "1",
    )
    for version, steps in enumerate(
        ("2", "0")
    ):  # none are counted either where another process has trained
        succeed(
            *fit, "--trainer.logger.init_args.save_dir", "checkpoints", "--trainer.max_steps", steps
        )
        home = tmp_path / f"checkpoints/rnn/version_{version}"
        assert (home / "config.yaml").is_file() and (home / "last.ckpt").is_file() == (steps == "2")


def test_a_directory_has_one_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb(monkeypatch, tmp_path, "fit", "--trainer.max_epochs", "1")
    directory = os.open(tmp_path / "checkpoints" / "rnn" / "version_0", os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    resumed = ("fit", "--trainer.max_epochs", "2", "--ckpt_path", "last")
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
