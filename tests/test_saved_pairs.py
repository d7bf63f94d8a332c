"""Laws of pairs with a trained draft or a checkpoint: what is saved is what is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fixtures import refused, succeed
from tiny_models import write_text_model

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.config import pairs
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.pairs import get_pair, pair_path, write_pair
from lightning_specdec.drafters import NGramDrafter, NGramWithFallback

ROOT = Path(__file__).parent.parent
RNN = str(ROOT / "checkpoints" / "rnn.safetensors")
TARGET = {
    "source": "target",
    "dtype": "float32",
    "size": {"parameters": 10, "matrix_parameters": 5, "kept_parameters": 5},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def completed(name: str, **fields: Any) -> PairSource:
    return get_pair(name).complete(PairSource(pair=name, **fields))


def test_a_pair_of_a_checkpoint_is_loaded_by_its_name_with_its_window() -> None:
    values = {
        "description": "the recurrent pair",
        "ckpt": RNN,
        "drafter": {"class_path": "NGramWithFallback", "init_args": {"min_ngram": 3}},
        "num_draft_tokens": 5,
    }
    path = write_pair("mine", values)
    assert path == Path("configs/pairs/mine.yaml")
    decoder = SpeculativeDecoder.from_pair("mine")
    assert isinstance(decoder.drafter, NGramWithFallback)
    assert decoder.drafter.lookup.settings.min_ngram == 3
    assert decoder.num_draft_tokens == 5
    assert decoder.prompts, "the checkpoint's own"

    replaced = SpeculativeDecoder.from_pair("mine", drafter="NGramDrafter")
    assert isinstance(replaced.drafter, NGramDrafter)


def test_a_pair_names_a_draft_of_its_checkpoint_and_may_leave_the_drafter_open() -> None:
    write_pair("own", {"description": "x", "ckpt": RNN, "num_draft_tokens": 2})
    assert completed("own") == PairSource(ckpt=RNN)
    decoder = SpeculativeDecoder.from_pair("own")
    original = SpeculativeDecoder.from_checkpoint(RNN)
    assert type(decoder.drafter) is type(original.drafter)


def test_a_trained_draft_its_backend_and_its_threads_are_part_of_a_pair() -> None:
    values = {
        "description": "x",
        "target": TARGET,
        "draft_file": "head.safetensors",
        "drafter": "NGramWithFallback",
        "backend": "openvino",
        "threads": 2,
        "num_draft_tokens": "auto",
    }
    write_pair("head", values)
    assert get_pair("head").threads == 2
    source = completed("head")
    assert source.draft == "head.safetensors", "a file that is missing is an error, not a fallback"
    assert source.backend == "openvino"
    assert source.drafter.name == "NGramWithFallback"

    assert completed("head", backend="torch").backend == "torch"
    assert completed("head", draft="other.safetensors").draft == "other.safetensors"
    assert completed("head", drafter="NGramDrafter").draft is None


def test_a_draft_of_the_local_copy_is_used_with_that_copy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = get_pair("smollm2")
    assert pair.draft_file is not None
    # The clone of the tests may have the model.
    monkeypatch.setattr(pairs, "shipped_directory", lambda: tmp_path / "clone/configs/pairs")
    asked = PairSource(pair="smollm2")
    assert not pair.has_trained_draft
    source = pair.complete(asked)
    assert source.draft is None
    assert source.drafter.name == "NGramDrafter"

    Path("checkpoints/smollm2").mkdir(parents=True)
    Path("checkpoints/smollm2/config.json").write_text("{}")
    assert not pair.has_trained_draft, "the draft file is missing"
    Path(pair.draft_file).touch()
    source = pair.complete(asked)
    assert source.draft == pair.draft_file
    assert source.drafter.name == "NGramWithFallback"
    assert source.target == "checkpoints/smollm2"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a b", "a pair is named by letters"), ("gpt2", "there is a pair gpt2 already")],
)
def test_a_name_that_is_wrong_or_taken_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pair_path(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drafter": "NGramDrafter"}, "target is missing"),
        ({"drafter": "NGramDrafter", "target": TARGET, "ckpt": RNN}, "target and ckpt exclude"),
        ({"target": TARGET}, "drafter is missing"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_written(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_pair("bad", {"description": "x", "num_draft_tokens": 2, **values})
    assert not Path("configs").exists()


def test_a_local_copy_with_other_weights_decodes_with_lookup_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_text_model(Path("checkpoints/smollm2"))
    shipped_head = ROOT / "checkpoints" / "smollm2_eagle.safetensors"
    shutil.copy(shipped_head, "checkpoints")
    decoder = SpeculativeDecoder.from_pair("smollm2", dtype="float32", backend="torch")
    assert isinstance(decoder.drafter, NGramDrafter)
    assert "was not trained for checkpoints/smollm2, so prompt lookup runs alone" in caplog.text


def test_a_pairs_threads_are_set_in_python_and_the_command_line_alike() -> None:
    values = {"description": "x", "ckpt": RNN, "num_draft_tokens": 2, "threads": 2}
    write_pair("mine", values)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        SpeculativeDecoder.from_checkpoint(RNN)
        assert torch.get_num_threads() == 1
        SpeculativeDecoder.from_pair("mine")
        assert torch.get_num_threads() == 2
        SpeculativeDecoder.from_pair("mine", threads=1)
        assert torch.get_num_threads() == 1
        for options, expected in (((), 2), (("--threads", "1"), 1)):
            words = ("decode", "--pair", "mine", "--repeats", "0", "--output", "json")
            document = json.loads(succeed(*words, *options).out)
            assert document["manifest"]["threads"] == expected
    finally:
        torch.set_num_threads(num_threads)
    with pytest.raises(ValueError, match="threads must be from 1 to 1024, got 0"):
        SpeculativeDecoder.from_pair("mine", threads=0)


def test_a_pairs_device_is_used_unless_another_one_is_asked_for() -> None:
    values = {"description": "x", "ckpt": RNN, "num_draft_tokens": 2, "device": "meta"}
    write_pair("there", values)
    assert completed("there").device == "meta"
    assert completed("there", device="cpu").device == "cpu"
    with pytest.raises(ValueError, match="no usable device 'meta'"):
        SpeculativeDecoder.from_pair("there")
    assert SpeculativeDecoder.from_pair("there", device="cpu").target.device.type == "cpu"
    refused("decode", "--pair", "there", message="no usable device 'meta'")
    succeed("decode", "--pair", "there", "--device", "cpu", "--repeats", "0")
