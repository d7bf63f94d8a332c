"""Laws of mistakes in YAML files: the message names the file, and not for values of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_fixtures import here, refused

__all__ = ["here"]
RNN = (Path(__file__).parent.parent / "configs" / "rnn.yaml").read_text()

CHANGES = [
    ("vocab_size: 50", "vocab_size: many", "data.vocab_size: must be an integer, got 'many'"),
    ("vocab_size: 50", "vocab_size: -3", "vocab_size must be from 2 to 1048576, got -3"),
    ("vocab_size: 50", "vocab_siz: 50", "did you mean vocab_size?"),
    (
        "ArithmeticProgressions",
        "ArithmeticProgression",
        "there is no class 'ArithmeticProgression'",
    ),
    ("hidden_size: 64", "hidden_size: [1]", "must be an integer, got [1]"),
    ("max_epochs: 100", "max_epochs: soon", "trainer.max_epochs: must be an integer, got 'soon'"),
    ("max_epochs: 100", "max_epoch: 100", "unknown setting trainer.max_epoch"),
    ("\ntrainer:", "\ntrainr:", "unknown setting trainr: did you mean trainer?"),
    ("learning_rate: 0.001", "learning_rate: -1", "learning_rate must be"),
    ("class_path: PairTraining", "class_path: RNN", "model"),
    ("class_path: ModelCheckpoint", "class_path: [1]", "trainer.callbacks"),
]


@pytest.mark.parametrize(("old", "new", "message"), CHANGES)
@pytest.mark.usefixtures("here")
def test_a_mistake_in_a_config_names_its_file(old: str, new: str, message: str) -> None:
    assert old in RNN
    Path("mine.yaml").write_text(RNN.replace(old, new, 1))
    refused("fit", "--config", "mine.yaml", message=message)
    refused("fit", "--config", "mine.yaml", message="error: mine.yaml: ")


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "data: [1, 2]\nmodel: 3\n",
        "hello\n",
        "model: {}\n",
        "data:\n  class_path: 3\n",
    ],
)
@pytest.mark.usefixtures("here")
def test_a_file_that_is_no_config_is_named(text: str) -> None:
    Path("mine.yaml").write_text(text)
    refused("fit", "--config", "mine.yaml", message="mine.yaml")


@pytest.mark.usefixtures("here")
def test_of_several_files_the_one_with_the_entry_is_named() -> None:
    Path("mine.yaml").write_text(RNN)
    Path("other.yaml").write_text("trainer:\n  max_epochs: soon\n")
    words = ("fit", "--config", "other.yaml", "--config", "mine.yaml")
    refused("fit", "--config", "mine.yaml", "--config", "other.yaml", message="other.yaml: trainer")
    Path("other.yaml").write_text("trainer:\n  max_steps: soon\n")
    refused(*words, message="other.yaml: trainer.max_steps")


@pytest.mark.parametrize(
    "option",
    ["--data.vocab_size=many", "--trainer.max_epochs=soon", "--model.learning_rate=-1", "--sed=1"],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_in_an_option_names_no_file(option: str) -> None:
    Path("mine.yaml").write_text(RNN)
    with pytest.raises(AssertionError, match="mine.yaml"):
        refused("fit", "--config", "mine.yaml", option, message="mine.yaml: ")
    name = re.split(r"[.=]", option)[-2].lstrip("-")
    refused("fit", "--config", "mine.yaml", option, message=name)
