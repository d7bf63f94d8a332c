"""Laws of the names of runs: no run of other data takes the name or the place of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from generated import corpus, target
from tiny_models import write_text_model
from training_fixtures import verb

from lightning_specdec.training.draft_recipes import config_for
from lightning_specdec.training.run_names import name_of_text, number_of_resumed, number_of_runs

__all__ = ["corpus", "target"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        (["notes.txt"], "notes"),
        (["notes/**/*.md"], "notes"),
        (["data/llama"], "llama"),
        (["a.txt", "b.txt", "c.txt"], "a_and_2_more"),
        (["*"], "text"),
    ],
)
def test_a_text_has_a_name(paths: list[str], name: str) -> None:
    assert name_of_text(paths) == name


def run_name(config: dict[str, Any]) -> str:
    """The name of a recipe's logs, which is that of its checkpoints."""
    name: str = config["trainer"]["logger"]["init_args"]["name"]
    dirpaths = set()
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"] == "ModelCheckpoint":
            dirpaths.add(callback["init_args"]["dirpath"])
    assert dirpaths == {f"checkpoints/{name}"}
    return name


def test_a_recipes_run_is_named_after_its_text_unless_it_is_the_shipped_one(corpus: Path) -> None:
    write_text_model(Path("llama"))
    Path("notes.txt").write_text("a text of some words. " * 2000)
    assert run_name(config_for("eagle", "llama", ["shipped"])) == "llama_eagle"
    assert run_name(config_for("eagle", "llama", ["notes.txt"])) == "llama_eagle_notes"
    assert run_name(config_for("eagle", "llama", [str(corpus)])) == "llama_eagle_text"


def config_of(paths: list[str], target: str = "llama") -> dict[str, Any]:
    """The parts of a config that decide where its runs belong."""
    return {
        "data": {"class_path": "lightning_specdec.data.TextFiles", "init_args": {"paths": paths}},
        "model": {"class_path": "EagleTraining", "init_args": {"target_checkpoint": target}},
    }


def store(directory: str, config: dict[str, Any]) -> None:
    """A run that has saved its config."""
    path = Path(directory, "version_0")
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))


def test_runs_of_other_data_or_of_another_target_get_a_number_of_their_own() -> None:
    directory = Path("checkpoints/llama_eagle_notes")
    first = config_of(["a/notes.txt"])
    second = config_of(["b/notes.txt"])
    third = config_of(["a/notes.txt"], target="other/llama")
    assert number_of_runs(directory, first, is_resumed=False) == 1
    store("checkpoints/llama_eagle_notes", first)
    assert number_of_runs(directory, first, is_resumed=False) == 1
    assert number_of_runs(directory, second, is_resumed=False) == 2
    store("checkpoints/llama_eagle_notes_2", second)
    assert number_of_runs(directory, third, is_resumed=False) == 3
    assert number_of_runs(directory, second, is_resumed=True) == 2, "`last` finds its run"
    assert number_of_runs(directory, third, is_resumed=True) == 1, "the base has the message"


def test_a_resumed_run_stays_where_its_checkpoint_is() -> None:
    store("runs", config_of(["a.txt"]))
    store("runs_2", config_of(["b.txt"]))
    assert number_of_resumed(Path("runs"), Path("runs/version_0/last.ckpt")) == 1
    assert number_of_resumed(Path("runs"), Path("runs_2/version_0/last.ckpt").absolute()) == 2
    assert number_of_resumed(Path("runs"), Path("other/version_0/last.ckpt")) is None


def test_two_files_of_one_name_are_two_names_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [f"{row}, {row + 1}, {row + 3}, {row + 4}" for row in range(40)]
    commands = {}
    for folder in ("a", "b"):
        path = tmp_path / folder / "mine.txt"
        path.parent.mkdir()
        path.write_text("\n".join(lines))
        data = ["--data", "SequenceFile", "--data.path", str(path), "--data.vocab_size", "50"]
        commands[folder] = [*data, "--data.num_val", "4", "--data.num_test", "2"]

    caplog.set_level("INFO", "lightning_specdec")
    for folder, epochs in (("a", "1"), ("b", "1"), ("b", "1")):
        verb(monkeypatch, tmp_path, "fit", *commands[folder], "--trainer.max_epochs", epochs)
    runs = sorted(str(path.parent) for path in Path("checkpoints").rglob("last.ckpt"))
    assert runs == [
        "checkpoints/rnn_mine/version_0",
        "checkpoints/rnn_mine_2/version_0",
        "checkpoints/rnn_mine_2/version_1",
    ]
    assert "this run is named rnn_mine_2; --name gives it another name" in caplog.text
    resumed = ["--trainer.max_epochs", "2", "--ckpt_path", "last"]
    verb(monkeypatch, tmp_path, "fit", *commands["b"], *resumed)
    assert not Path("checkpoints/rnn_mine_2/version_2").exists()
