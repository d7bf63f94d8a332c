"""Laws of messages: what is wrong names what to type instead."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_fixtures import refused, succeed

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


def test_a_suggested_path_has_its_directory() -> None:
    Path("runs/story/version_0").mkdir(parents=True)
    Path("runs/story/version_0/best.ckpt").touch()
    for flag in ("--ckpt", "--draft"):
        words = ("decode", "--target", "gpt2") if flag == "--draft" else ("decode",)
        refused(*words, flag, "runs/stor", message="did you mean runs/story?")
    refused("decode", "--target", "gpt5", message="check the name and the network")
