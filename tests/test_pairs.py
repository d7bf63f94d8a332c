"""Laws of the registry: every file is checked to the last entry, and says of its models what they are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from lightning_specdec.config import pairs
from lightning_specdec.config.pairs import get_pair, list_pairs, read_pair, shipped_directory
from lightning_specdec.models.loading import measure, without_memory

PATHS = sorted(shipped_directory().glob("*.yaml"))
LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "EleutherAI/pythia-1.4b-deduped": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
        "vocab_size": 50304,
    },
    "EleutherAI/pythia-160m-deduped": {
        "model_type": "gpt_neox",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 50304,
    },
    "openai-community/gpt2": {"model_type": "gpt2"},
    "openai-community/gpt2-large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "openai-community/gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "meta-llama/Meta-Llama-3-8B-Instruct": LLAMA3,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "microsoft/Phi-3-mini-4k-instruct": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
"""Of the registered models, as their config.json on the hub says it, without what is transformers' default."""


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_shipped_pair_is_read_and_its_sizes_are_its_models_own(path: Path) -> None:
    pair = read_pair(path)
    assert pair.name == path.stem and pair.description and "\n" not in pair.description
    for model in pair.models:
        config = AutoConfig.for_model(**ARCHITECTURES[model.source])
        assert measure(without_memory(config)) == model.size
        assert model.gated == model.source.startswith("meta-llama/")


def test_the_registry_holds_the_pairs_that_the_project_promises() -> None:
    found = {pair.name: pair for pair in list_pairs()}
    assert set(found) == {"pythia", "gpt2", "gpt2_dev", "tinyllama_llama3", "phi3_llama3", "llama3_self", "smollm2"}
    assert (found["pythia"].num_draft_tokens, found["gpt2"].num_draft_tokens) == (15, 9)
    assert found["tinyllama_llama3"].drafter.name == found["phi3_llama3"].drafter.name == "CrossVocabulary"
    own, copy = found["llama3_self"].models
    assert own.source == copy.source and copy.quantization == "int4"
    assert found["smollm2"].drafter.name == "NGramDrafter" and found["smollm2"].draft is None
    assert get_pair("gpt2") == found["gpt2"]


def test_a_pair_needs_weights_and_caches_of_all_its_models() -> None:
    pair = get_pair("gpt2")
    assert pair.draft is not None
    assert pair.weight_bytes(packed=False) == (4 * (774_030_080 + 124_439_808),) * 2
    heads = 50257 * (1280 + 768)  # which share their weights with the tables, and are laid out by themselves on a CPU
    assert pair.weight_bytes(packed=True)[0] == 4 * (774_030_080 + 124_439_808 + heads)
    assert pair.cache_bytes(batch_size=2, length=100) == 4 * 2 * 2 * 100 * 64 * (36 * 20 + 12 * 12)


def test_what_is_quantized_is_read_as_it_is_first() -> None:
    pair = get_pair("llama3_self")
    weights, loading = pair.weight_bytes(packed=False)
    assert pair.needs_gpu and not get_pair("gpt2").needs_gpu
    assert 20 * 10**9 < weights < 22 * 10**9 and loading == 2 * 2 * 8_030_261_248


def test_an_unknown_name_gets_the_one_that_was_meant() -> None:
    with pytest.raises(ValueError, match="there is no pair 'gpt2_develop': did you mean gpt2_dev"):
        get_pair("gpt2_develop")
    with pytest.raises(ValueError, match="choose from gpt2, gpt2_dev, llama3_self"):
        get_pair("xyz")


def test_a_local_copy_is_taken_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = get_pair("smollm2").target
    assert target.place == "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "checkpoints" / "smollm2").mkdir(parents=True)
    assert target.place == "HuggingFaceTB/SmolLM2-135M-Instruct", "an empty directory is no copy"
    (tmp_path / "checkpoints" / "smollm2" / "config.json").write_text("{}")
    assert target.place == "checkpoints/smollm2"


def test_pairs_of_the_current_directory_are_added_and_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "configs" / "pairs"
    own.mkdir(parents=True)
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    (own / "mine.yaml").write_text(yaml.safe_dump({**values, "num_draft_tokens": "auto"}))
    (own / "gpt2.yaml").write_text(yaml.safe_dump({**values, "num_draft_tokens": 3}))
    assert get_pair("mine").num_draft_tokens == "auto" and get_pair("gpt2").num_draft_tokens == 3
    assert {"mine", "gpt2", "pythia"} <= {pair.name for pair in list_pairs()}
    assert len(list_pairs()) == len(PATHS) + 1


def changed(*keys: str, value: Any) -> Any:
    """A pair's content with one entry changed; None takes it away."""
    values = yaml.safe_load((shipped_directory() / "gpt2.yaml").read_text())
    part = values
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    if value is None:
        del part[keys[-1]]
    return values


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ([1], "mapping"),
        (changed("num_draft_token", value=3), "num_draft_token: did you mean num_draft_tokens?"),
        (changed("target", "sourc", value="x"), "target.sourc: did you mean source?"),
        (changed("name", value="x"), "name follows from the file's name"),
        (changed("target", "size", "heads", value=1), "target.size.heads: did you mean kv_heads?"),
        (changed("target", "trust_remote_code", value=True), "target.trust_remote_code"),
        (changed("target", value=None), "target is missing"),
        (changed("draft", "dtype", value=None), "draft.dtype is missing"),
        (changed("draft", "size", "layers", value=None), "draft.size.layers is missing"),
        (changed("drafter", value="Oracle"), "no drafter 'Oracle'"),
        (changed("drafter", value=["ModelDrafter"]), "drafter must be a name"),
        (changed("drafter_arguments", value={}), "class_path: NAME"),
        (changed("description", value=3), "description must be text"),
        (changed("draft", value="gpt2"), "draft must be a mapping"),
        (changed("target", "source", value=5), "target.source must be text"),
        (changed("target", "dtype", value="int8"), "target.dtype must be one of float32, bfloat16"),
        (changed("target", "quantization", value="int2"), "target.quantization must be one of int8, int4"),
        (changed("target", "gated", value="yes"), "target.gated must be"),
        (changed("target", "size", "layers", value=-1), "target.size.layers must be"),
        (changed("target", "size", "layers", value="x"), "target.size.layers must be"),
        (changed("target", "size", "matrix_parameters", value=5), "target.size.kept_parameters"),
        (changed("num_draft_tokens", value=0), "num_draft_tokens must be"),
        (changed("num_draft_tokens", value="many"), "num_draft_tokens must be"),
    ],
)
def test_a_wrong_entry_is_told_with_its_file_in_one_line(content: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError) as raised:
        read_pair(path)
    assert str(raised.value).startswith(f"{path}: ") and told in str(raised.value), str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1,\n", "is no YAML (line 2, column 1)"),
        ("a: !!python/object/apply:os.mkdir [exploded]\n", "is no YAML"),
        ("a: 1\na: 2\n", "a is there twice"),
        (b"\xff\xfe\x00", "is no YAML"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_and_runs_nothing(
    text: str | bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as raised:
        read_pair(path)
    assert told in str(raised.value) and not (tmp_path / "exploded").exists()


def test_the_registry_is_read_without_torch() -> None:
    program = "import lightning_specdec, sys; lightning_specdec.list_pairs(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_installed_package_brings_its_pairs_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a wheel they are inside the package; beside it is nothing then."""
    package = tmp_path / "site" / "lightning_specdec"
    shutil.copytree(shipped_directory(), package / "configs" / "pairs")
    monkeypatch.setattr(pairs, "__file__", str(package / "config" / "pairs.py"))
    monkeypatch.chdir(tmp_path)
    assert shipped_directory() == package / "configs" / "pairs" and len(list_pairs()) == len(PATHS)
    settings = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'force-include = { "configs" = "lightning_specdec/configs" }' in settings
