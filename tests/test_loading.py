"""Laws of loading: every architecture comes as it was saved; what cannot be loaded says so in one line, at once."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import COMMIT, serve
from families import FAMILIES, tiny
from tiny_models import CHAT, cut, drop, drop_weight, edit_config, put, write, write_text_model
from tiny_tokenizers import byte_level

from lightning_specdec.models import hub, loading
from lightning_specdec.models.loading import examine, load_model

TOKENS = torch.tensor([[1, 2, 3, 60, 5]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama's directory. Copy it, do not write to it."""
    return Path(write(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads go to a directory of the test's own, and no token of the user's goes anywhere."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_directory_of_every_architecture_gives_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path / family, family))
    expected = tiny(family)(TOKENS).logits
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer is None and loaded.vocabulary is None and not loaded.training
    assert loaded.vocab_size == 67 and loaded.max_positions == 96


def test_weights_in_several_files_are_one_model(plain: Path, tmp_path: Path) -> None:
    sharded = write(tmp_path / "shards", shard_size="30KB")
    assert len(list(Path(sharded).glob("model-*.safetensors"))) > 1
    assert torch.equal(load_model(sharded)(TOKENS).logits, load_model(plain)(TOKENS).logits)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_model_computes_as_it_is_stored_unless_told(stored: torch.dtype, tmp_path: Path) -> None:
    path = write(tmp_path / "model", dtype=stored)
    assert load_model(path).dtype == stored
    assert load_model(path, dtype="float16").dtype == torch.float16
    assert load_model(path, dtype=torch.float64).dtype == torch.float64
    (tmp_path / "model" / "config.json").write_text(
        (tmp_path / "model" / "config.json").read_text().replace('"dtype"', '"former_dtype"')
    )
    assert examine(path).dtype == str(stored).removeprefix("torch.")


def test_a_tokenizer_comes_along_with_all_that_ends_an_answer(tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "text", chat=True)
    put("generation_config.json", '{"eos_token_id": [1, 300]}')(Path(path))
    model = load_model(path)
    assert model.tokenizer is not None and model.vocabulary == model.tokenizer.vocabulary
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"
    assert model.tokenizer.eos == {byte_level().eos_token_id, 300}
    assert model.tokenizer.has_chat_template and CHAT


def test_int8_weights_are_near_the_plain_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    plain_logits, int8_logits = load_model(path)(TOKENS).logits, load_model(path, quantization="int8")(TOKENS).logits
    assert not torch.equal(plain_logits, int8_logits)
    assert torch.nn.functional.cosine_similarity(plain_logits, int8_logits, dim=-1).min() > 0.98


def test_loading_says_nothing_on_stderr(plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(plain)
    load_model(write_text_model(tmp_path / "text"))
    assert capfd.readouterr() == ("", "")


Change = Callable[[Path], Any]
BROKEN: dict[str, tuple[Change, str]] = {
    "no config": (drop("config.json"), "it has no config.json (it holds generation_config.json, model.safetensors)"),
    "an adapter": (
        lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        "holds an adapter, not a whole model: merge it",
    ),
    "config is no JSON": (put("config.json", '{"model_type": '), "config.json is no JSON (line 1, column 16)"),
    "config is binary": (put("config.json", b"\xff\xfe\x00"), "config.json is no JSON (not text)"),
    "config is a list": (put("config.json", "[1, 2]"), "expected a JSON object, got list"),
    "config is empty": (put("config.json", "{}"), "names no model_type"),
    "unknown model": (edit_config(model_type="llama9"), "is a 'llama9' model, which transformers 5"),
    "code of its own": (
        edit_config(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}),
        "comes with Python code of its own, which is not run unless you trust it",
    ),
    "an encoder": (edit_config(model_type="bert", architectures=["BertForMaskedLM"]), "is a BertForMaskedLM, which is"),
    "an encoder and a decoder": (
        edit_config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        "is a T5ForConditionalGeneration, which is no causal language model",
    ),
    "a vision model": (
        edit_config(model_type="vit", architectures=None),
        "is a vit, which is no causal language model",
    ),
    "a size that is none": (edit_config(hidden_size="wide"), "expected int, got str"),
    "sizes that do not fit": (edit_config(num_attention_heads=3), "config.json describes no model"),
    "no heads": (edit_config(num_attention_heads=0), "config.json describes no model"),
    "other sizes than the weights": (edit_config(intermediate_size=64), "its config says (32, 64)"),
    "more layers than weights": (edit_config(num_hidden_layers=4), "lack model.layers.3."),
    "a weight is missing": (drop_weight("model.norm.weight"), "lack model.norm.weight (1 are missing)"),
    "no weights": (drop("model.safetensors"), "holds no weights in safetensors files (no model.safetensors)"),
    "weights of another kind": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        "only pytorch_model.bin, which is not read here",
    ),
    "weights cut off": (cut(0.9), "is truncated or damaged (it has"),
    "header cut off": (cut(0.001), "is truncated or damaged (its header is cut off or is none)"),
    "weights empty": (cut(0.0), "is truncated or damaged (its header is cut off or is none)"),
    "weights are text": (
        put("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        "is truncated or damag",
    ),
    "a header of garbage": (
        put("model.safetensors", (8).to_bytes(8, "little") + b"{{{{{{{{"),
        "(its header cannot be read)",
    ),
    "a shard is missing": (
        lambda path: (
            drop("model.safetensors")(path),
            put("model.safetensors.index.json", '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')(path),
        ),
        "model-00001-of-00002.safetensors is missing (1 of 1 files of weights)",
    ),
    "an index that leads out": (
        lambda path: (
            (path / "model.safetensors").rename(path.parent / "elsewhere.safetensors"),
            put("model.safetensors.index.json", '{"weight_map": {"a": "../elsewhere.safetensors"}}')(path),
        ),
        "is incomplete",
    ),
    "an index of nothing": (
        lambda path: (drop("model.safetensors")(path), put("model.safetensors.index.json", "[]")(path)),
        "it names no files",
    ),
    "a tokenizer that is none": (put("tokenizer.json", "{}"), "tokenizer"),
    "a state that cannot go back": (
        edit_config(model_type="mamba", architectures=["MambaForCausalLM"], state_size=4),
        "and such a state cannot go back: speculative decoding needs attention",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_one_line(name: str, plain: Path, tmp_path: Path) -> None:
    change, told = BROKEN[name]
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    change(path)
    with pytest.raises(ValueError) as raised:
        load_model(path)
    message = str(raised.value)
    assert told in message and str(path) in message, message
    assert "\n" not in message and len(message) < 500, message


def test_code_of_a_model_never_runs_unless_it_is_trusted(plain: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    edit_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})(path)
    put("mine.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n")(path)
    with pytest.raises(ValueError, match="--trust_remote_code"):
        load_model(path)
    assert not (tmp_path / "ran").exists()
    edit_config(model_type="llama")(path)  # what transformers knows needs no code, whatever comes along
    load_model(path)
    assert not (tmp_path / "ran").exists()


def test_weights_without_a_place_are_told(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(shutil.copytree(plain, tmp_path / "model"))
    edit_config(num_hidden_layers=2)(path)
    load_model(path)
    assert "9 weights that its config has no place for, as model.layers.2." in caplog.text


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("./nowhere", "./nowhere: there is no such directory"),
        ("/nowhere/at/all", "there is no such directory"),
        ("a/b/c", "there is no such directory"),
        ("two words", "'two words' is neither a directory here nor a name on the hub"),
        ("", "neither a directory here"),
        ("lab/..", "neither a directory here"),
        (__file__, "is a file: name the directory of a model"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused(source: str, told: str) -> None:
    with pytest.raises(ValueError, match=".") as raised:
        load_model(source)
    assert told in str(raised.value)


def test_arguments_out_of_range_are_refused_before_anything_is_read(plain: Path) -> None:
    for options, told in (
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, float64, got 'int8'"),
        ({"quantization": "int2"}, "quantization must be one of int8, int4, got 'int2'"),
        ({"quantization": "int4"}, "int4 weights have a kernel on a CUDA GPU only, not on cpu"),
        ({"revision": "main"}, "only a model of the hub has revisions"),
    ):
        with pytest.raises(ValueError, match=told):
            load_model(plain, **options)  # type: ignore[arg-type]


def test_too_little_memory_is_told_before_a_weight_is_read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device: 50_000)
    monkeypatch.setattr(loading, "load", lambda *arguments, **options: pytest.fail("weights were read"))
    needed = examine(plain).weight_bytes
    with pytest.raises(
        ValueError, match=rf"not enough memory for .*: it needs {needed / 1e6:.1f} MB .* 0\.1 MB are free"
    ):
        load_model(plain)


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(ValueError, match="the hub cannot be reached at http://127.0.0.1:9: check the network"):
        load_model("lab/model")
    assert time.perf_counter() - started < 5


@pytest.fixture
def on_hub(plain: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests to a hub that has a model `lab/model`, and many that cannot be had."""
    with serve({"lab/model": plain}) as (address, requests):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield requests


def test_a_model_of_the_hub_is_the_directory_that_it_serves(on_hub: list[str], plain: Path) -> None:
    expected = load_model(plain)(TOKENS).logits
    assert torch.equal(load_model("lab/model")(TOKENS).logits, expected)
    assert f"GET /lab/model/resolve/{COMMIT}/model.safetensors" in on_hub
    on_hub.clear()
    assert torch.equal(load_model("lab/model", revision=COMMIT)(TOKENS).logits, expected)
    assert not any(request.startswith("GET /lab") for request in on_hub), "it was downloaded before"


def test_a_hub_that_is_gone_leaves_what_was_downloaded(
    plain: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serve({"lab/model": plain}) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        load_model("lab/model")
    assert torch.equal(load_model("lab/model")(TOKENS).logits, load_model(plain)(TOKENS).logits)
    assert "so the copy of lab/model from an earlier download is taken" in caplog.text


def test_nothing_big_is_downloaded_for_a_memory_that_cannot_hold_it(
    on_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_bytes", lambda device: 50_000)
    with pytest.raises(ValueError, match="not enough memory for lab/model"):
        load_model("lab/model")
    assert on_hub and not any("safetensors" in request for request in on_hub)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lab/gated", "lab/gated is gated: accept its terms at "),
        ("lab/gated-no-token", "then set HF_TOKEN to a token of your account"),
        (
            "lab/private",
            "there is no model 'lab/private' on the hub, or it is private: check the name, or set HF_TOKEN",
        ),
        ("lab/unknown", "there is no model 'lab/unknown' on the hub"),
        ("lab/plain404", "there is no model 'lab/plain404' on the hub"),
        ("lab/forbidden", "the hub refuses lab/forbidden (403): set HF_TOKEN"),
        ("lab/broken", "the hub answered 500 for lab/broken: try again later"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line_at_once(on_hub: list[str], name: str, told: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ValueError) as raised:
        load_model(name)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert time.perf_counter() - started < 5, "retries help nobody here"


def test_an_unknown_revision_is_told(on_hub: list[str]) -> None:
    with pytest.raises(ValueError, match="lab/model has no revision 'v9'"):
        load_model("lab/model", revision="v9")


def test_an_address_that_is_no_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve({}) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", f"{address}/wrong")
        with pytest.raises(ValueError, match="there is no model 'lab/model' on the hub"):
            hub.find("lab/model")
