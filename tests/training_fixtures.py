"""One run of the shipped config, made once for all tests that read it; trainer verbs run inside the test process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from filelock import FileLock

CONFIGS = Path(__file__).parent.parent / "configs"
RNN_CONFIG = CONFIGS / "rnn.yaml"
EPOCHS = 40
"""Of the shipped config's 100: enough for its losses to fall below 1, and its best epoch is not its last one."""
TINY: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


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


def train_shipped(directory: Path) -> None:
    """Train the shipped config in a process of its own (about 8 s), and keep what it prints beside its files."""
    program = "from lightning_specdec.training.cli import run; run()"
    command = [sys.executable, "-c", program, "fit", "--config", str(RNN_CONFIG), "--trainer.accelerator", "cpu"]
    command += ["--trainer.max_epochs", str(EPOCHS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (directory / "printed.txt").write_text(done.stdout + done.stderr)


@pytest.fixture(scope="session")
def shipped_run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """The finished run of configs/rnn.yaml, made once for all workers, a copy for each. Read it, do not write to it."""
    base, own = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("shipped") / "run"
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shipped-run"
    with FileLock(f"{made}.lock"):
        if not made.exists():
            begun = tmp_path_factory.mktemp("training")
            train_shipped(begun)
            begun.rename(made)
    shutil.copytree(made, own)
    return TrainedRun(own, (own / "printed.txt").read_text())


def verb(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str, logger: bool = False) -> None:
    """Run a trainer verb in this process, in that directory, on the CPU; logs are written only if they are wanted."""
    from lightning_specdec.training.cli import run

    monkeypatch.chdir(directory)
    options = ["--trainer.accelerator", "cpu", *([] if logger else ["--trainer.logger", "false"])]
    command = ["lightning_specdec", arguments[0], "--config", str(RNN_CONFIG), *options, *arguments[1:]]
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
    for model in (arguments["target"], arguments.get("draft"), *arguments.get("drafts", {}).values()):
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
