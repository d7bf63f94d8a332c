"""One run of the shipped config for all tests, and trainer verbs inside the test process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

CONFIGS = Path(__file__).parent.parent / "configs"
RNN_CONFIG = CONFIGS / "rnn.yaml"
EPOCHS = 30
"""The shipped config has 100; after these its losses are below 1."""
FIT = ("fit", "--config", str(RNN_CONFIG), "--trainer.accelerator", "cpu")
"""A command line that trains the shipped config."""
NO_LOGGER = ("--trainer.logger", "false")
TEN_STEPS = ("--data.batch_size", "10")
"""An epoch of ten optimizer steps; the shipped config has fifty."""
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class TrainedRun(NamedTuple):
    """A finished `fit` of the shipped config: its directory, and what it printed."""

    directory: Path
    output: str

    @property
    def best(self) -> Path:
        return self.directory / "checkpoints" / "rnn" / "version_0" / "best.ckpt"

    @property
    def last(self) -> Path:
        return self.directory / "checkpoints" / "rnn" / "version_0" / "last.ckpt"

    @property
    def events(self) -> Path:
        return self.directory / "logs" / "rnn" / "version_0"


def begin_training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Begin to train the shipped config (8 s) unless another worker has; return its directory.

    The training process inherits the lock file next to the directory and frees it when it ends.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    directory = base / "shipped-run"
    lock = os.open(f"{directory}.lock", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not directory.exists():
            directory.mkdir()
            program = "from lightning_specdec.training.cli import run; run()"
            command = [sys.executable, "-c", program, "fit", "--config", str(RNN_CONFIG)]
            command += ["--trainer.accelerator", "cpu", "--trainer.max_epochs", str(EPOCHS)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with (
                (directory / "printed.txt").open("w") as out,
                (directory / "warned.txt").open("w") as err,
            ):
                subprocess.Popen(
                    command, cwd=directory, env=environment, stdout=out, stderr=err, pass_fds=[lock]
                )
    os.close(lock)
    return directory


@pytest.fixture(scope="session")
def shipped_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """The finished run of configs/rnn.yaml. Do not write to it."""
    directory = begin_training(tmp_path_factory)
    with open(f"{directory}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    copy = tmp_path_factory.mktemp("shipped") / "run"
    shutil.copytree(directory, copy)
    output = (copy / "printed.txt").read_text() + (copy / "warned.txt").read_text()
    run = TrainedRun(copy, output)
    assert run.last.exists(), run.output[-2000:]
    return run


def verb(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    *arguments: str,
    logger: bool = False,
) -> None:
    """Run a trainer verb in this process, in that directory, on the CPU."""
    from lightning_specdec.training.cli import run

    monkeypatch.chdir(directory)
    options = ["--trainer.accelerator", "cpu"]
    if not logger:
        options += ["--trainer.logger", "false"]
    command = [
        "lightning_specdec",
        arguments[0],
        "--config",
        str(RNN_CONFIG),
        *options,
        *arguments[1:],
    ]
    monkeypatch.setattr(sys, "argv", command)
    run()


def shrunk(name: str, directory: Path, **sizes: int) -> Path:
    """A shipped config with networks and data that train in a second.

    Args:
        name: the name of the config.
        directory: where the new config is written.
        sizes: sizes of the networks that differ from `TINY`.
    """
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    arguments = config["model"]["init_args"]
    if "exit_weights" in arguments:
        sizes = {"num_hidden_layers": len(arguments["exit_weights"]), **sizes}
    models = [arguments["target"], *arguments.get("drafts", {}).values()]
    if arguments.get("draft") is not None:
        models.append(arguments["draft"])
    for model in models:
        model["init_args"]["model"] = {**model["init_args"]["model"], **TINY, **sizes}

    config["data"]["init_args"].update(
        {
            "batch_size": 16,
            "vocab_size": 24,
            "length": 14,
            "num_train": 32,
            "num_val": 4,
            "num_test": 2,
        }
    )
    config["trainer"].update({"max_epochs": 1, "accelerator": "cpu", "logger": False})
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"] == "DecodeHeldOut":
            callback["init_args"] = {"num_prompts": 1, "max_new_tokens": 4}
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
