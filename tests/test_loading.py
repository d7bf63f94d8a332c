"""Laws of loading: every architecture loads as it was saved, or is refused in one line."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import COMMIT, serve
from families import FAMILIES, tiny
from tiny_models import cut, drop, edit_config, put, write, write_text_model
from tiny_tokenizers import byte_level

from lightning_specdec.config import memory
from lightning_specdec.config.files import cache_home
from lightning_specdec.config.memory import available_bytes, gigabytes, require_memory
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import examine, load_model
from lightning_specdec.models.safetensors_file import Origin, weights_sha256

TOKENS = torch.tensor([[1, 2, 3, 60, 5]])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama's directory. Copy it, do not write to it."""
    return Path(write(tmp_path_factory.mktemp("models") / "llama"))


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are the test's own, and no token of the user's goes anywhere."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def refusal(source: object, **options: Any) -> str:
    """The one line that refuses a model within five seconds."""
    started = time.perf_counter()
    with pytest.raises(ValueError) as raised:
        load_model(source, **options)  # type: ignore[arg-type]
    message = str(raised.value)
    assert "\n" not in message and len(message) < 500 and time.perf_counter() - started < 5, message
    return message


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_directory_of_every_architecture_gives_the_model_that_was_saved(
    family: str, tmp_path: Path
) -> None:
    loaded = load_model(write(tmp_path / family, family))
    expected = tiny(family)(TOKENS).logits
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer is None and loaded.vocabulary is None and not loaded.training
    assert loaded.vocab_size == 67 and loaded.max_positions == 96


@pytest.mark.parametrize("shard_size", [None, "20KB"])
def test_weights_in_one_or_several_files_are_one_model_and_one_sha256(
    shard_size: str | None,
    plain: Path,
    tmp_path: Path,
) -> None:
    path = Path(write(tmp_path / "llama", shard_size=shard_size))
    files = sorted(path.glob("model*.safetensors"))
    assert (len(files) > 1) == (shard_size is not None)
    (path / "another.safetensors").write_bytes(b"not among the weights")
    assert (
        weights_sha256(path)
        == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    )
    assert torch.equal(load_model(path)(TOKENS).logits, load_model(plain)(TOKENS).logits)


def test_the_sha256_is_cached_until_a_file_changes(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = weights_sha256(copied)
    (remembered,) = cache_home().iterdir()
    remembered.write_text("a" * 64)
    assert weights_sha256(copied) == "a" * 64
    monkeypatch.setenv("XDG_CACHE_HOME", str(remembered))  # a file: nothing can be cached below it
    assert weights_sha256(copied) == first
    write(copied, seed=2)
    assert weights_sha256(copied) not in (first, "a" * 64)


def test_a_loaded_model_knows_its_files_packed_or_not_and_a_new_one_has_none(plain: Path) -> None:
    model = load_model(plain)
    assert model.origin == Origin(str(plain), plain) and model.packed().origin == model.origin
    assert model.origin is not None and model.origin.sha256 == weights_sha256(plain)
    assert HuggingFaceLM(model.model.config).origin is None


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_model_computes_in_its_stored_dtype_by_default(
    stored: torch.dtype, tmp_path: Path
) -> None:
    path = write(tmp_path / "model", dtype=stored)
    assert load_model(path).dtype == stored
    assert load_model(path, dtype="float16").dtype == torch.float16
    assert load_model(path, dtype=torch.float64).dtype == torch.float64


def test_a_tokenizer_comes_along_with_all_that_ends_an_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_text_model(tmp_path / "text", chat=True)
    put("generation_config.json", '{"eos_token_id": [1, 300]}')(Path(path))
    capfd.readouterr()
    model = load_model(path)
    assert capfd.readouterr() == ("", ""), "loading writes nothing"
    assert model.tokenizer is not None and model.vocabulary == model.tokenizer.vocabulary
    assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"
    assert (
        model.tokenizer.eos == {byte_level().eos_token_id, 300}
        and model.tokenizer.has_chat_template
    )


def renamed(name: str, new: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).rename(path / new)


def indexed(files: str) -> Callable[[Path], Any]:
    """Weights by an index of files instead of one file."""
    return lambda path: (
        renamed("model.safetensors", "../elsewhere.safetensors")(path),
        put("model.safetensors.index.json", files)(path),
    )


MINE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (drop("config.json"), "it has no config.json"),
    "config is cut off": (put("config.json", '{"model_type": '), "config.json describes no model"),
    "unknown model": (edit_config(model_type="llama9"), "llama9"),
    "code of its own": (edit_config(model_type="mine", auto_map=MINE), "--trust_remote_code"),
    "an encoder": (
        edit_config(model_type="bert", architectures=["BertForMaskedLM"]),
        "not a causal language model",
    ),
    "an encoder and a decoder": (
        edit_config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        "cannot be decoded here",
    ),
    "a size that is none": (edit_config(hidden_size="wide"), "expected int, got str"),
    "a million layers": (
        edit_config(num_hidden_layers=1_000_000),
        "far larger than its weight files",
    ),
    "a million experts": (
        edit_config(
            model_type="mixtral", architectures=["MixtralForCausalLM"], num_local_experts=1_000_000
        ),
        "far larger than its weight files",
    ),
    "a width of a trillion": (
        edit_config(intermediate_size=10**12),
        "far larger than its weight files",
    ),
    "other sizes than the weights": (
        edit_config(intermediate_size=64),
        "another shape than its config for",
    ),
    "more layers than weights": (edit_config(num_hidden_layers=4), "lack model.layers.3."),
    "no weights": (drop("model.safetensors"), "no weights in safetensors files"),
    "weights cut off": (cut(0.9), "truncated or damaged"),
    "a header of garbage": (
        put("model.safetensors", (8).to_bytes(8, "little") + b"{{{{{{{{"),
        "header",
    ),
    "a shard is missing": (
        indexed('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "model-00001-of-00002.safetensors is missing",
    ),
    "an index that leads out": (
        indexed('{"weight_map": {"a": "../elsewhere.safetensors"}}'),
        "is incomplete",
    ),
    "a tokenizer that is none": (put("tokenizer.json", "{}"), "tokenizer"),
    "no cache": (
        edit_config(model_type="openai-gpt", architectures=["OpenAIGPTLMHeadModel"]),
        "keeps no key-value cache, which speculative decoding needs",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_one_line(name: str, copied: Path) -> None:
    change, expected_message = BROKEN[name]
    change(copied)
    message = refusal(copied)
    assert expected_message in message and str(copied) in message, message


def test_code_of_a_model_never_runs_unless_it_is_trusted(copied: Path, tmp_path: Path) -> None:
    edit_config(model_type="mine", auto_map={"AutoConfig": "mine.Config"})(copied)
    put("mine.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n")(copied)
    assert "--trust_remote_code" in refusal(copied)
    edit_config(model_type="llama")(
        copied
    )  # what transformers knows needs no code, whatever comes along
    load_model(copied)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./nowhere", "there is no directory ./nowhere"),
        ("lab/..", "there is no directory lab/.."),
        (__file__, "is a file"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused(source: str, message: str) -> None:
    assert message in refusal(source)


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
    assert "revision v9" in refusal("lab/model", revision="v9")


def test_nothing_big_is_downloaded_for_a_memory_that_cannot_hold_it(
    on_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 50_000)
    assert "not enough memory for lab/model" in refusal("lab/model")
    assert on_hub and not any("safetensors" in request for request in on_hub)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gated", "gated"), ("private", "401"), ("unknown", "404"), ("broken", "500")],
)
def test_an_error_of_the_hub_is_reported_in_one_line_immediately(
    on_hub: list[str],
    name: str,
    message: str,
) -> None:
    assert message in refusal(f"lab/{name}")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_model_takes_what_was_foretold_without_reading_its_weights(
    family: str,
    tied: bool,
    tmp_path: Path,
) -> None:
    path = write(tmp_path / family, family, tie_word_embeddings=tied)
    examined, model = examine(path, dtype="bfloat16"), load_model(path, dtype="bfloat16")
    assert examined.size.parameters == model.num_parameters
    assert examined.size.weight_bytes("bfloat16") == sum(
        weight.nbytes for weight in model.parameters()
    )
    int8 = load_model(path, dtype="bfloat16", quantization="int8").pack()
    if family in ("llama", "gpt2"):
        foretold = examined.size.weight_bytes("bfloat16", "int8")
        scales = sum(weight.nbytes for weight in int8.parameters()) - foretold
        assert 0 < scales < 0.1 * foretold


def test_too_little_memory_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (available_bytes() or 0) > 10**7
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    require_memory("a model", 10**15, "cpu")
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 * 10**9)
    require_memory("a model", 10, "cpu")
    with pytest.raises(
        ValueError, match=r"for a model: it needs 3\.5 GB, but 3\.0 GB are free on cpu"
    ):
        require_memory("a model", 35 * 10**8, "cpu")
    assert gigabytes(16_060_000_000) == "16.1 GB"


def test_a_containers_limit_counts_where_it_leaves_less(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "900\n",
        "sys/fs/cgroup/memory.stat": "anon 500\ninactive_file 300\n",
    }
    assert available_bytes(root=tmp_path) is None
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_bytes(root=tmp_path) == 8000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1000\n")
    assert available_bytes(root=tmp_path) == 1000 - 900 + 300
