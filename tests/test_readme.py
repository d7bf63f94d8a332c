"""Law 10: every command line and every line of Python in the README works."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import tiny_models
from cli_fixtures import SCRIPT, shipped_run, succeed
from training_fixtures import TrainedRun

__all__ = ["shipped_run"]
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines() if line.strip()]
SHORT = ["--trainer.max_epochs", "101", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "1"]
SHORT += ["--trainer.accelerator", "cpu", "--trainer.logger", "false"]


def arguments_of(program: str) -> list[list[str]]:
    """The arguments of each of the README's calls of a program."""
    calls = [shlex.split(command, comments=True) for command in COMMANDS]
    return [words[1:] for words in calls if Path(words[0]).name == program]


def test_the_readme_calls_nothing_else() -> None:
    assert {Path(shlex.split(command)[0]).name for command in COMMANDS} <= {"lightning_specdec", "make", "tensorboard"}
    assert len(arguments_of("lightning_specdec")) >= 5


@pytest.mark.parametrize("arguments", arguments_of("make"), ids=" ".join)
def test_every_make_target_of_the_readme_is_there(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(arguments) <= set(targets)


@pytest.mark.parametrize("arguments", arguments_of("lightning_specdec"), ids=" ".join)
def test_every_call_of_the_readme_works(
    arguments: list[str], shipped_run: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CXX", "PATH"):  # without a compiler --compile says so and goes on, which takes no 15 seconds
        monkeypatch.setenv(name, "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(shipped_run.directory / "checkpoints", tmp_path / "checkpoints")
    for path in (ROOT / "checkpoints").glob("*.ckpt"):
        shutil.copy(path, tmp_path / "checkpoints" / path.name)
    rows = (",".join(str(start + i) for i in range(3 + start % 4)) for start in range(40))
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    tiny_models.write_text_model(tmp_path / "checkpoints" / "smollm2", chat=True)  # the real one is a download
    monkeypatch.chdir(tmp_path)
    trains = arguments[0] in ("fit", "validate", "test", "predict")
    outcome = succeed(*arguments, *(SHORT if trains else []), stdin="Hello\n")
    assert outcome.out or arguments[0] == "predict"


def test_tensorboard_is_installed_beside_the_script() -> None:
    assert not arguments_of("tensorboard") or Path(SCRIPT).with_name("tensorboard").exists()


@pytest.mark.parametrize("number", range(sum(language == "python" for language, _ in BLOCKS)))
def test_every_block_of_python_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.write_text_model(tmp_path / "checkpoints" / "smollm2", chat=True)
    for path in (ROOT / "checkpoints").glob("*.ckpt"):
        shutil.copy(path, tmp_path / "checkpoints" / path.name)
    monkeypatch.chdir(tmp_path)
    program = [text for language, text in BLOCKS if language == "python"][number]
    exec(compile(program, f"README.md, block {number}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def test_every_file_that_the_readme_points_to_is_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert sys.version_info >= (3, 11)
