"""The command line, called inside the test process as the installed script calls it."""

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

SCRIPT = str(Path(sys.executable).parent / "lightning_specdec")


class Outcome(NamedTuple):
    """What a call came to."""

    code: object
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON document and nothing else."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def call(*arguments: str, stdin: str = "") -> Outcome:
    """`lightning_specdec ARGUMENTS`, without a process of its own; a traceback is the test's own."""
    out, err = io.StringIO(), io.StringIO()
    code: object = "returned"
    with (
        mock.patch.object(sys, "argv", ["lightning_specdec", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    return Outcome(code, out.getvalue(), err.getvalue())


def succeed(*arguments: str, stdin: str = "") -> Outcome:
    """As `call`, for what must work."""
    outcome = call(*arguments, stdin=stdin)
    assert outcome.code == 0, outcome.err
    return outcome


QUICK = ("--repeats", "1")
BRIEF = ("--repeats", "1", "--max_new_tokens", "4", "--temperature", "1")
TRAINER = (
    "--config",
    str(RNN_CONFIG),
    "--trainer.accelerator",
    "cpu",
    "--trainer.max_epochs",
    str(EPOCHS + 1),
)
OF_A_CHECKPOINT: dict[str, Callable[[str], tuple[str, ...]]] = {
    "decode": lambda path: ("decode", *BRIEF, "--ckpt", path),
    "info": lambda path: ("info", "--ckpt", path),
    "export": lambda path: ("export", "--output", "exported.ckpt", "--ckpt", path),
    "fit": lambda path: ("fit", *TRAINER, "--ckpt_path", path),
    "test": lambda path: ("test", *TRAINER, "--ckpt_path", path),
}


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file below, by size and time of change, but for Python's compiled files."""
    found = (path for path in sorted(directory.rglob("*")) if "__pycache__" not in path.parts)
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def refused(*arguments: str, told: str = "", stdin: str = "") -> Outcome:
    """Check that a call is refused as it should be and writes nothing here; `here` or the like says where that is."""
    assert not (Path.cwd() / "pyproject.toml").exists(), (
        "others write in the checkout meanwhile: run in a directory"
    )
    before, outcome = listing(Path.cwd()), call(*arguments, stdin=stdin)
    assert outcome.code == 2, (arguments, outcome)
    assert outcome.out == "" and outcome.err.startswith("error: ") and told in outcome.err, (
        arguments,
        outcome,
    )
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n") and len(outcome.err) < 600, (
        outcome.err
    )
    assert listing(Path.cwd()) == before
    return outcome


class Bomb:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def ckpt(shipped_run: TrainedRun) -> str:
    """The last checkpoint of the shipped config's run. Read it, do not write to it."""
    return str(shipped_run.last)


__all__ = ["OF_A_CHECKPOINT", "QUICK", "SCRIPT", "TRAINER", "Bomb", "Outcome"]
__all__ += ["call", "ckpt", "here", "listing", "refused", "shipped_run", "succeed"]
