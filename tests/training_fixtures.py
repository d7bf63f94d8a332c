"""One run of the shipped config, made once for all tests that read it; trainer verbs run inside the test process."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

CONFIGS = Path(__file__).parent.parent / "configs"
RNN_CONFIG = CONFIGS / "rnn.yaml"


class TrainedRun(NamedTuple):
    """A finished `fit` of the shipped config: where it ran, and what it printed."""

    directory: Path
    output: str

    @property
    def best(self) -> Path:
        return self.directory / "checkpoints" / "rnn" / "best.ckpt"

    @property
    def last(self) -> Path:
        return self.directory / "checkpoints" / "rnn" / "last.ckpt"

    @property
    def events(self) -> Path:
        return self.directory / "logs" / "rnn" / "version_0"


@functools.cache
def trained_run() -> TrainedRun:
    """Train the shipped config in a process of its own (about 12 s); the same run on every call."""
    directory = Path(tempfile.mkdtemp(prefix="rnn-run-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program = "from lightning_specdec.training.cli import run; run()"
    command = [sys.executable, "-c", program, "fit", "--config", str(RNN_CONFIG), "--trainer.accelerator", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return TrainedRun(directory, done.stdout + done.stderr)


@pytest.fixture(scope="session")
def shipped_run() -> TrainedRun:
    """The finished run of configs/rnn.yaml. Read it, do not write to it."""
    return trained_run()


def verb(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str, logger: bool = False) -> None:
    """Run a trainer verb in this process, in that directory, on the CPU; logs are written only if they are wanted."""
    from lightning_specdec.training.cli import run

    monkeypatch.chdir(directory)
    options = ["--trainer.accelerator", "cpu", *([] if logger else ["--trainer.logger", "false"])]
    command = ["lightning_specdec", arguments[0], "--config", str(RNN_CONFIG), *options, *arguments[1:]]
    monkeypatch.setattr(sys, "argv", command)
    run()
