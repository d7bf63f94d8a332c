"""Calls the command line inside the test process, as the installed script does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from training_fixtures import EPOCHS, RNN_CONFIG, TrainedRun, shipped_run

from lightning_specdec.cli.main import main
from lightning_specdec.config import activity

# On a busy machine, a call may take longer than the usual time between two reports.
activity.REPORT_SECONDS = 600.0

SCRIPT = str(Path(sys.executable).parent / "lightning_specdec")


class Outcome(NamedTuple):
    """Exit code and output of a call."""

    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def call(*arguments: str, stdin: str = "") -> Outcome:
    """Run `lightning_specdec ARGUMENTS` in this process. Other exceptions propagate."""
    out = io.StringIO()
    err = io.StringIO()
    exit_code: object = "returned"
    with (
        mock.patch.object(sys, "argv", ["lightning_specdec", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            exit_code = stop.code
    return Outcome(exit_code, out.getvalue(), err.getvalue())


def succeed(*arguments: str, stdin: str = "") -> Outcome:
    """Like `call`, and check that the exit code is 0."""
    outcome = call(*arguments, stdin=stdin)
    assert outcome.code == 0, outcome.err
    return outcome


QUICK = ("--repeats", "1")
BRIEF = ("--repeats", "0", "--max_new_tokens", "2", "--temperature", "1")
TRAINER = (
    "--config",
    str(RNN_CONFIG),
    "--trainer.accelerator",
    "cpu",
    "--trainer.max_epochs",
    str(EPOCHS + 1),
)
# Each verb's command line for the checkpoint at a path.
OF_A_CHECKPOINT: dict[str, Callable[[str], tuple[str, ...]]] = {
    "decode": lambda path: ("decode", *BRIEF, "--ckpt", path),
    "info": lambda path: ("info", "--ckpt", path),
    "export": lambda path: ("export", "--output", "exported.ckpt", "--ckpt", path),
    "fit": lambda path: ("fit", *TRAINER, "--ckpt_path", path),
    "test": lambda path: ("test", *TRAINER, "--ckpt_path", path),
}


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file in a directory, except compiled Python files."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if "__pycache__" not in path.parts:
            status = path.stat()
            files[str(path)] = (status.st_size, status.st_mtime_ns)
    return files


def refused(*arguments: str, message: str = "", stdin: str = "") -> Outcome:
    """Check that a call is refused in one line and writes nothing in the current directory.

    Args:
        arguments: words of the command line.
        message: text that the error message contains.
        stdin: what the call reads from standard input.
    """
    directory = Path.cwd()
    # Other processes may write in the checkout at the same time.
    is_checkout = (directory / "pyproject.toml").exists()
    assert not is_checkout, "run in a directory of the test, as the fixture `here` does"

    files_before = listing(directory)
    outcome = call(*arguments, stdin=stdin)
    assert outcome.code == 2, (arguments, outcome)
    assert outcome.out == "", (arguments, outcome)

    assert outcome.err.startswith("error: "), (arguments, outcome)
    assert message in outcome.err, (arguments, outcome)
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n"), outcome.err
    assert len(outcome.err) < 600, outcome.err

    assert listing(directory) == files_before
    return outcome


class Bomb:
    """An object that creates a directory when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def ckpt(shipped_run: TrainedRun) -> str:
    """The last checkpoint of the shipped config's run, read-only."""
    return str(shipped_run.last)


__all__ = ["OF_A_CHECKPOINT", "QUICK", "SCRIPT", "TRAINER", "Bomb", "Outcome"]
__all__ += ["call", "ckpt", "here", "listing", "refused", "shipped_run", "succeed"]
