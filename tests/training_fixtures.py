"""One run of the shipped config, made once for all tests that read it; trainer verbs run inside the test process."""

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
"""Of the shipped config's 100: enough for its losses to fall below 1."""
TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class TrainedRun(NamedTuple):
    """A finished `fit` of the shipped config: where it ran, and what it printed."""

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
    """Begin to train the shipped config (about 8 s) where no worker has; gives its directory. The process that trains
    inherits the lock beside it, which is free when it has ended."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shipped-run"
    lock = os.open(f"{made}.lock", os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not made.exists():
            made.mkdir()
            program = "from lightning_specdec.training.cli import run; run()"
            command = [sys.executable, "-c", program, "fit", "--config", str(RNN_CONFIG)]
            command += ["--trainer.accelerator", "cpu", "--trainer.max_epochs", str(EPOCHS)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with (made / "printed.txt").open("w") as out, (made / "warned.txt").open("w") as err:
                subprocess.Popen(
                    command, cwd=made, env=environment, stdout=out, stderr=err, pass_fds=[lock]
                )
    os.close(lock)
    return made


@pytest.fixture(scope="session")
def shipped_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """The finished run of configs/rnn.yaml, made once for all workers, a copy for each. Read it, do not write to it."""
    made, own = begin_training(tmp_path_factory), tmp_path_factory.mktemp("shipped") / "run"
    with open(f"{made}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    shutil.copytree(made, own)
    run = TrainedRun(own, (own / "printed.txt").read_text() + (own / "warned.txt").read_text())
    assert run.last.exists(), run.output[-2000:]
    return run


def verb(
    monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str, logger: bool = False
) -> None:
    """Run a trainer verb in this process, in that directory, on the CPU; logs are written only if they are wanted."""
    from lightning_specdec.training.cli import run

    monkeypatch.chdir(directory)
    options = ["--trainer.accelerator", "cpu", *([] if logger else ["--trainer.logger", "false"])]
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
        sizes: of the networks, where they are not those of `TINY`.
    """
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    arguments = values["model"]["init_args"]
    if "exit_weights" in arguments:
        sizes = {"num_hidden_layers": len(arguments["exit_weights"]), **sizes}
    for model in (
        arguments["target"],
        arguments.get("draft"),
        *arguments.get("drafts", {}).values(),
    ):
        if model is not None:
            model["init_args"]["model"] = {**model["init_args"]["model"], **TINY, **sizes}
    values["data"]["init_args"] |= {
        "batch_size": 16,
        "vocab_size": 24,
        "length": 14,
        "num_train": 32,
        "num_val": 4,
        "num_test": 2,
    }
    values["trainer"] |= {"max_epochs": 1, "accelerator": "cpu", "logger": False}
    for callback in values["trainer"]["callbacks"]:
        if callback["class_path"] == "DecodeHeldOut":
            callback["init_args"] = {"num_prompts": 1, "max_new_tokens": 4}
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
