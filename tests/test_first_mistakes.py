"""Laws of messages: what is wrong names what to type instead."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from cli_fixtures import call, refused, succeed

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # No request leaves this machine.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def test_a_config_without_its_flag_is_recognized() -> None:
    refused("bench", "mine.yaml", message="did you mean --config mine.yaml?")
    refused("fit", "mine.yaml", message="fit takes its config as an option: --config mine.yaml")


def test_a_recipe_belongs_to_fit() -> None:
    refused("test", "--recipe", "eagle", message="--recipe is an option of fit --recipe NAME")


def test_a_pair_belongs_to_the_verbs_that_decode() -> None:
    message = "generate takes no --pair: name the pair's target by --model GenerateText --model.tar"
    refused("generate", "--pair", "tiny", message=message)
    refused("generate", "--config", "smollm2_generate.yaml", "--pair=tiny", message=message)
    refused("fit", "--pair", "tiny", message="fit takes no --pair: give --config FILE, or --recipe")
    refused("test", "--pair", "tiny", message="test takes no --pair: give --config FILE")


def test_an_argument_that_is_missing_or_misspelled_is_named() -> None:
    config = str(ROOT / "configs" / "rnn.yaml")
    words = ("fit", "--config", config)
    refused(*words, "--data", "SequenceFile", message="arguments are required: path: give --data.p")
    refused(*words, "--minute", "3", message="did you mean --minutes?")


def test_a_config_of_training_is_no_benchmark() -> None:
    message = "this is a config of training: use it with `lightning_specdec fit --config`"
    refused("bench", "--config", str(ROOT / "configs" / "rnn.yaml"), message=message)


def test_a_misspelled_model_of_this_directory_is_suggested() -> None:
    Path("my_qwen3").mkdir()
    Path("my_qwen3/config.json").write_text("{}")
    refused("decode", "--target", "my_qwen", message="did you mean my_qwen3?")


def test_no_verb_makes_more_than_the_last_directory_of_its_output(tmp_path: Path) -> None:
    missing = tmp_path / "nodir"
    message = f"there is no directory {missing}: make it first"
    checkpoint = str(ROOT / "checkpoints" / "rnn.safetensors")
    output = ("--output", str(missing / "x"))
    refused("export", checkpoint, *output, message=message)
    of_engine = ("--format", "vllm", "--target", "target")
    refused("export", "--draft", checkpoint, *of_engine, *output, message=message)
    refused("report", "results", *output, message=message)
    config = str(ROOT / "configs" / "bench" / "rnn.yaml")
    refused("bench", "--config", config, *output, message=message)
    assert not missing.exists()


def test_an_export_of_a_directory_of_runs_names_the_checkpoint() -> None:
    exported = str(ROOT / "checkpoints" / "rnn.safetensors")
    for number in (0, 1):
        directory = Path(f"runs/version_{number}")
        directory.mkdir(parents=True)
        shutil.copy(exported, directory / "best.ckpt")
        outcome = succeed("export", "--ckpt", "runs", "--output", f"of_{number}.safetensors")
        is_named = "exporting runs/version_1/best.ckpt, of 2 runs in runs\n" in outcome.err
        assert is_named == (number == 1), outcome.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            f"fit --config {ROOT}/configs/rnn.yaml --ckpt_path nope.ckpt",
            "nope.ckpt: no such checkpoint: check the path, or train one with",
        ),
        (
            f"test --config {ROOT}/configs/rnn.yaml --ckpt_path=nope.ckpt",
            "nope.ckpt: no such checkpoint: check the path, or train one with",
        ),
        (
            "fit --recipe eagle --target target --text nofile.txt",
            "nofile.txt does not exist: check the path",
        ),
        (
            "fit --recipe eagle --target target --text target *.txt hub/name#text story.tx",
            "story.tx does not exist: did you mean story.txt?",
        ),
    ],
)
def test_a_path_that_does_not_exist_is_refused_before_lightning_is_imported(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning_specdec.training", "lightning_specdec.training.draft_recipes"):
        monkeypatch.setitem(sys.modules, name, None)
    Path("target").mkdir()
    if "story" in words:
        Path("story.txt").write_text("once upon a time")
    refused(*words.split(), message=message)


@pytest.mark.parametrize("checkpoint", ["last", "best", "null", "target", "s3://bucket/x.ckpt"])
def test_what_may_be_a_checkpoint_is_left_to_the_run(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning_specdec.training", None)
    Path("target").mkdir()
    config = str(ROOT / "configs" / "rnn.yaml")
    # The run begins with this import.
    outcome = call("fit", "--config", config, "--ckpt_path", checkpoint)
    assert "ModuleNotFoundError: import of lightning_specdec.training halted" in outcome.err


def test_a_suggested_path_has_its_directory() -> None:
    Path("runs/story/version_0").mkdir(parents=True)
    Path("runs/story/version_0/best.ckpt").touch()
    for flag in ("--ckpt", "--draft"):
        words = ("decode", "--target", "gpt2") if flag == "--draft" else ("decode",)
        refused(*words, flag, "runs/stor", message="did you mean runs/story?")
    refused("decode", "--target", "gpt5", message="check the name and the network")
