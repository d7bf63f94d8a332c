"""Drafts for other engines and from other programs: both sides compute the same, or it fails."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_models
import torch
from cli_fixtures import here, refused, succeed
from families import tiny
from huggingface_hub import metadata_load
from safetensors.torch import load_file, save_file
from tiny_block import block
from tiny_distillation import begun, check_that_it_learns
from tiny_eagle import eagle, fitted_eagle
from tiny_heads import heads
from transformers import AutoModelForCausalLM

from lightning_specdec.checkpoints import engine_heads, engines
from lightning_specdec.checkpoints.engine_heads import ORIGIN, read_head
from lightning_specdec.config.models import ENGINES
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import (
    BlockDrafter,
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    MedusaDrafter,
    ModelDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
)
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.safetensors_file import Origin
from lightning_specdec.training import EagleTraining, MedusaTraining
from lightning_specdec.training.eagle import rollouts

__all__ = ["here"]

TARGET = HuggingFaceLM(
    tiny("llama", vocab_size=23, num_hidden_layers=5, sharpness=14.0, max_position_embeddings=512)
)
PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7]]
PLAIN: dict[str, Any] = {"feature_norms": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it ships": {"attention_window": 6, "draft_vocabulary": [1, 3, 4, 7, 20, 22]},
    "3.1": {"norm_output": True},
    "plain": PLAIN,
    "layers in another order": {"layers": [3, 0, 1]},
    "other sizes": {
        "head_size": 6,
        "rotary_base": 5e5,
        "norm_eps": 1e-3,
        "norm_before_residual": True,
    },
}


def head(**changes: Any) -> EagleDrafter:
    return eagle(TARGET, **{"layers": [0, 2, 3], **changes})


BLOCKS: dict[str, dict[str, Any]] = {
    "as trained": {"attention_window": 7, "reduced": True, "min_confidence": 0.9},
    "no Markov head": {"markov_rank": 0, "num_layers": 1},
    "layers in another order": {
        "layers": [3, 0, 1],
        "head_size": 6,
        "rotary_base": 5e5,
        "norm_eps": 1e-3,
    },
}


def blocks(**changes: Any) -> BlockDrafter:
    return block(TARGET, **{"layers": [0, 2, 3], **changes})


def written(folder: Path, drafter: Drafter | None = None, engine: str = "vllm") -> Path:
    """Return a directory exported for an engine, by default with the shipped kind of head."""
    directory = folder / "exported"
    if drafter is None:
        drafter = head(**VARIANTS["as it ships"])
    engines.export(directory, drafter, TARGET, engine)
    return directory


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def change(directory: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Change entries of a directory's config, and its tensors; None removes a tensor."""
    changed_config = {**read_config(directory), **(config or {})}
    (directory / "config.json").write_text(json.dumps(changed_config))

    weights = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        # Keyword arguments cannot contain dots.
        weight_name = name.replace("__", ".")
        if value is None:
            del weights[weight_name]
        else:
            weights[weight_name] = value
    save_file(weights, directory / "model.safetensors")
    return directory


def drafts_alike(drafter: Drafter, other_drafter: Drafter) -> bool:
    """Whether two heads draft the same tokens, with the target's output."""
    options: dict[str, Any] = {"max_new_tokens": 12, "num_draft_tokens": 3}
    result = speculative_decode(TARGET, drafter, PROMPTS, **options)
    other_result = speculative_decode(TARGET, other_drafter, PROMPTS, **options)
    expected = autoregressive_decode(TARGET, PROMPTS, max_new_tokens=12)
    assert result.tokens == expected.tokens
    return result.tokens == other_result.tokens and result.counts == other_result.counts


def check_same_weights(module: Drafter, other_module: Drafter) -> None:
    other_weights = other_module.state_dict()
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, other_weights[name]), name


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_head_comes_back_as_it_went(name: str, engine: str, tmp_path: Path) -> None:
    drafter = head(**VARIANTS[name])
    exported = engines.export(tmp_path / "out", drafter, TARGET, engine)
    assert exported.difference < 1e-5
    assert exported.num_compared == 12
    assert exported.loaded == (engine == "vllm")
    assert str(tmp_path / "out") in exported.commands[0]

    read_drafter, _ = read_head(tmp_path / "out", TARGET)
    assert drafts_alike(drafter, read_drafter)
    # Layers in another order are written sorted, with the columns of `fc`.
    if "layers" not in VARIANTS[name]:
        check_same_weights(drafter, read_drafter)


@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_block_drafter_is_written_as_dspark(name: str, tmp_path: Path) -> None:
    exported = engines.export(tmp_path / "out", blocks(**BLOCKS[name]), TARGET, "vllm")
    assert exported.difference < 1e-5
    assert exported.num_compared == 12
    assert not exported.loaded
    assert '"method": "dspark"' in exported.commands[0]
    assert '"num_speculative_tokens": 6' in exported.commands[0]

    # The mask is one token more than the target's 23.
    config = read_config(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert config["mask_token_id"] == 23
    assert config["transformer_layer_config"]["vocab_size"] == 24
    assert weights["embed_tokens.weight"].shape == (24, 32)
    assert len(weights["markov_head.markov_w1.weight"]) == 24
    with pytest.raises(ValueError, match="it is a dspark draft"):
        read_head(tmp_path / "out", TARGET)


@pytest.mark.parametrize("fault", ["embed_tokens", "k_norm", "v_proj", "markov_w1", "hidden_norm"])
def test_what_dspark_would_compute_otherwise_is_not_written(
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block_tensors = engine_heads.block_tensors

    def wrong_tensors(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors = block_tensors(*arguments)
        for name in tensors:
            if fault in name:
                tensors[name] = tensors[name] * 1.5
        return tensors

    monkeypatch.setattr(engine_heads, "block_tensors", wrong_tensors)
    drafter = blocks()
    with pytest.raises(ValueError, match="scores other tokens"):
        engines.export(tmp_path / "out", drafter, TARGET, "vllm")


def test_a_fitted_head_drafts_as_well_as_before(tmp_path: Path) -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=11, num_hidden_layers=4, sharpness=14.0))
    drafter = fitted_eagle(target, layers=(0, 1, 2), norm_output=True)
    engines.export(tmp_path / "out", drafter, target, "vllm")
    read_drafter, _ = read_head(tmp_path / "out", target)

    options: dict[str, Any] = {"max_new_tokens": 16, "num_draft_tokens": 3}
    counts = speculative_decode(target, drafter, PROMPTS, **options).counts
    assert counts is not None
    assert counts.num_accepted > 5
    assert speculative_decode(target, read_drafter, PROMPTS, **options).counts == counts


def test_layers_are_counted_as_each_engine_counts_them(tmp_path: Path) -> None:
    vllm_config = read_config(written(tmp_path / "vllm"))
    sglang_config = read_config(written(tmp_path / "sglang", engine="sglang"))
    assert vllm_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert sglang_config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]


def test_nothing_is_left_to_defaults_that_readers_do_not_have(tmp_path: Path) -> None:
    """vLLM has no defaults for a nested layer."""
    config = read_config(written(tmp_path))
    layer_entries = {
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "head_dim",
        "rope_parameters",
        "rms_norm_eps",
        "layer_types",
    }
    head_entries = {
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "draft_vocab_size",
    }
    assert layer_entries <= config["transformer_layer_config"].keys()
    assert head_entries <= config.keys()


def test_medusa_heads_come_back_as_they_went(tmp_path: Path) -> None:
    drafter = heads(TARGET)
    assert engines.export(tmp_path / "out", drafter, TARGET, "vllm").difference < 1e-5
    assert drafts_alike(drafter, read_head(tmp_path / "out", TARGET)[0])

    no_biases = {f"{i}__0__linear__bias": None for i in range(3)}
    change(tmp_path / "out", {"medusa_fc_bias": False}, **no_biases)
    heads_without_biases, _ = read_head(tmp_path / "out", TARGET)
    assert isinstance(heads_without_biases, MedusaDrafter)
    assert drafts_alike(heads_without_biases, heads_without_biases)


def test_a_draft_model_is_one_of_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    path = tiny_models.write_text_model(tmp_path / "target", num_hidden_layers=1)
    target = load_model(path)
    for engine in ENGINES:
        output = tmp_path / engine
        exported = engines.export(output, ModelDrafter(target), target, engine, dtype="bfloat16")
        assert exported.difference < 1e-5
        assert exported.commands
        assert (output / "tokenizer.json").is_file()
    weights = load_file(tmp_path / "vllm" / "model.safetensors")
    assert weights["model.norm.weight"].dtype == torch.bfloat16

    model = cast(Any, target.model)
    draft_model = AutoModelForCausalLM.from_pretrained(tmp_path / "transformers")
    tokens = torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(tokens, **options)
    assisted = model.generate(tokens, **options, assistant_model=draft_model)
    assert assisted.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "fault", ["queries for keys", "another layer", "no norms", "a token further"]
)
def test_what_an_engine_would_compute_otherwise_is_not_written(
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader detects an error of the writer, because it shares no code with it."""
    eagle_tensors = engine_heads.eagle_tensors
    eagle_config = engine_heads.eagle_config

    def wrong_tensors(drafter: EagleDrafter, layer: str) -> dict[str, torch.Tensor]:
        tensors = eagle_tensors(drafter, layer)
        if fault == "queries for keys":
            query_name = f"{layer}.self_attn.q_proj.weight"
            tensors[query_name] = tensors[query_name].flip(0)
        if fault == "a token further":
            tensors["d2t"] = tensors["d2t"] - 1
        return tensors

    def wrong_config(*arguments: Any, **options: Any) -> dict[str, Any]:
        config = eagle_config(*arguments, **options)
        if fault == "another layer":
            config["eagle_aux_hidden_state_layer_ids"][0] += 1
        if fault == "no norms":
            config["fc_norm"] = False
        return config

    monkeypatch.setattr(engine_heads, "eagle_tensors", wrong_tensors)
    monkeypatch.setattr(engine_heads, "eagle_config", wrong_config)
    drafter = head(draft_vocabulary=[1, 3, 4, 7, 20, 22])
    if fault == "no norms":
        # Norms of weight 1 would hardly matter.
        for weight in drafter.network.layer_norms.parameters():
            weight.data.mul_(3.0)
    with pytest.raises(ValueError, match="scores other tokens"):
        engines.export(tmp_path / "out", drafter, TARGET, "vllm")
    assert not list(tmp_path.iterdir())


REFUSED: list[tuple[str, Any, str]] = [
    ("vllm", NGramDrafter(), "method ngram"),
    ("vllm", NGramWithFallback(NGramDrafter(), head()), "export the draft alone"),
    ("vllm", StagedDrafter([NGramDrafter(), ModelDrafter(TARGET)]), "one of the stages"),
    ("vllm", EarlyExitDrafter(1), "share their state"),
    ("vllm", ModelDrafter(RNN(23)), "models of transformers"),
    ("vllm", head(layers=[0, 1, 4]), "last layer"),
    ("vllm", heads(TARGET, reduced=True), "without draft_vocabulary"),
    ("sglang", heads(TARGET), "no Medusa heads"),
    ("sglang", head(layers=[0, 1]), "three layers"),
    ("transformers", head(), "export a draft model"),
    ("llama.cpp", head(), "train with feature_norms: false"),
    ("llama.cpp", head(**PLAIN, attention_window=5), "train with no attention_window"),
    ("llama.cpp", head(**PLAIN, norm_output=True), "train with norm_output: false"),
    ("llama.cpp", head(**PLAIN, layers=[0, 1]), "three layers"),
    ("vllm", blocks(feature_norms=True), "train with feature_norms: false"),
    ("vllm", blocks(layers=[0, 4]), "last layer"),
    ("sglang", blocks(), "no block drafters"),
    ("llamafile", head(), "format must be one of"),
]


@pytest.mark.parametrize("engine, drafter, message", REFUSED)
def test_what_an_engine_cannot_run_is_refused_with_what_is_needed(
    engine: str,
    drafter: Drafter,
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        engines.export(tmp_path / "out", drafter, TARGET, engine)
    assert engine in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_plain_heads_go_to_llama_cpp(tmp_path: Path) -> None:
    exported = engines.export(tmp_path / "out", head(**PLAIN), TARGET, "llama.cpp")
    assert exported.loaded
    convert_command, serve_command = exported.commands
    assert "--target-model-dir" in convert_command
    assert " --spec-type draft-eagle3 " in serve_command

    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("fc_norm" in name for name in weights)
    assert "layers.0.hidden_norm.weight" in weights


def test_a_head_says_whose_it_is_and_how_many_tokens_to_draft(tmp_path: Path) -> None:
    for seed, name in enumerate(("mine", "other"), start=4):
        tiny_models.write_text_model(tmp_path / name, num_hidden_layers=5, seed=seed)
    target = load_model(str(tmp_path / "mine"))
    other_target = load_model(str(tmp_path / "other"))
    eagle_head = eagle(target, layers=[0, 2, 3])
    medusa_heads = heads(target)

    for engine, drafter, recommended, without_note in (
        ("vllm", eagle_head, 5, 5),
        ("sglang", eagle_head, 5, None),
        ("vllm", medusa_heads, 3, None),
    ):
        output = tmp_path / f"{engine}-{type(drafter).__name__}"
        engines.export(output, drafter, target, engine, num_draft_tokens=5)
        assert read_head(output, target)[1] == {"num_draft_tokens": recommended}
        assert str(tmp_path) not in (output / ORIGIN).read_text(), "no directory of this machine"
        with pytest.raises(ValueError, match="mine .sha256.*other .sha256.*has another sha256"):
            read_head(output, other_target)

        # Without the note, the target is not known, and only speculators' config has a number.
        (output / ORIGIN).unlink()
        assert read_head(output, other_target)[1].get("num_draft_tokens") == without_note


def test_a_head_is_read_for_its_target_in_several_files(tmp_path: Path) -> None:
    path = Path(tiny_models.write_text_model(tmp_path / "target", num_hidden_layers=5))
    target = load_model(str(path))
    engines.export(tmp_path / "of_one", eagle(target, layers=[0, 2, 3]), target, "vllm")
    sharded_path = tmp_path / "sharded"
    target.model.save_pretrained(sharded_path, max_shard_size="20KB")
    for tokenizer_file in path.glob("token*"):
        shutil.copy(tokenizer_file, sharded_path)

    sharded_target = load_model(str(sharded_path))
    read_head(tmp_path / "of_one", sharded_target)
    drafter = eagle(sharded_target, layers=[0, 2, 3])
    engines.export(tmp_path / "of_several", drafter, sharded_target, "vllm")
    read_head(tmp_path / "of_several", target)


CARDS: dict[str, tuple[str, dict[str, Any]]] = {
    "in quotes": ('license: "apache-2.0"', {"license": "apache-2.0"}),
    "plain, after a byte-order mark": ("license: mit", {"license": "mit"}),
    "a license with a name": (
        "license: other\nlicense_name: llama3 # Meta's\nlicense_link: LICENSE",
        {
            "license": "other",
            "license_name": "llama3",
            "license_link": "https://huggingface.co/owner/name/blob/main/LICENSE",
        },
    ),
    "a link elsewhere": (
        "license: other\nlicense_link: 'https://example.org/license'",
        {"license": "other", "license_link": "https://example.org/license"},
    ),
    "none": ("language: en", {}),
    "no text": ("license: no", {}),
    "not YAML": ("license: [", {}),
    "an attack": (
        "a: &a [x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{new}: &{new} [{', '.join([f'*{old}'] * 8)}]\n"
            for old, new in zip("abcdefg", "bcdefgh", strict=True)
        )
        + "license: mit",
        {},
    ),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_card_names_the_target_and_its_license(name: str, tmp_path: Path) -> None:
    metadata, license_fields = CARDS[name]
    path = tiny_models.write_text_model(tmp_path / "target", num_hidden_layers=5)
    mark = "\ufeff" if "mark" in name else ""
    card = f"{mark}---\ntags:\n- text\n{metadata}\n---\n# A model, \xe9\n"
    (tmp_path / "target" / "README.md").write_bytes(card.encode("utf-8") + b"\xff")
    target = load_model(path)
    target.origin = Origin("owner/name", tmp_path / "target")

    drafter = eagle(target, layers=[0, 2, 3])
    exported = engines.export(tmp_path / "out", drafter, target, "vllm")
    assert metadata_load(exported.directory / "README.md") == {
        "base_model": "owner/name",
        "library_name": "lightning_specdec",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "eagle3", "vllm"],
        **license_fields,
    }
    text = (exported.directory / "README.md").read_text()
    license_text = ", ".join(license_fields.values()) or "not stated by the target"
    assert f"- License: {license_text}" in text


def test_a_local_target_has_no_base_model_on_the_hub(tmp_path: Path) -> None:
    path = tiny_models.write_text_model(tmp_path / "target", num_hidden_layers=5)
    target = load_model(path)
    engines.export(tmp_path / "out", eagle(target, layers=[0, 2, 3]), target, "vllm")
    assert "base_model" not in (metadata_load(tmp_path / "out" / "README.md") or {})


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engines.safetensors, "save", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is there already"):
        written(written(tmp_path).parent)


def write(name: str, content: str) -> Callable[[Path], object]:
    """Return a function that overwrites a file in a directory."""
    return lambda path: (path / name).write_text(content)


def with_config(**values: Any) -> Callable[[Path], object]:
    return lambda path: change(path, values)


def with_layer(**values: Any) -> Callable[[Path], object]:
    """Return a function that changes entries of the layer's config."""

    def change_layer(path: Path) -> None:
        layer = {**read_config(path)["transformer_layer_config"], **values}
        change(path, {"transformer_layer_config": layer})

    return change_layer


def with_tensors(**tensors: Any) -> Callable[[Path], object]:
    return lambda path: change(path, **tensors)


def make_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def tear(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\0" * 50)


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a torn file": (tear, "truncated or damaged"),
    "a pickle": (make_pickle, "could run code"),
    "a broken config": (write("config.json", "{"), "config.json is damaged"),
    "an endless config": (write("config.json", "[" * 2**21), "config.json is damaged"),
    "tokens out of the vocabulary": (
        with_tensors(d2t=torch.full((6,), 99)),
        "leaves the target's",
    ),
    "tokens in disorder": (with_tensors(d2t=torch.tensor([9, 0, 0, 0, 0, 0])), "must ascend"),
    "no mapping": (with_tensors(d2t=None), "has no d2t"),
    "a weight too few": (with_tensors(fc__weight=None), "join"),
    "a weight too many": (
        with_tensors(layers__0__self_attn__q_norm__weight=torch.ones(8)),
        "q_norm",
    ),
    "another shape": (with_tensors(norm__weight=torch.ones(3)), "output_norm"),
    "no numbers": (with_tensors(norm__weight=torch.full((32,), torch.nan)), "not finite"),
    "separate embeddings": (with_tensors(embed_tokens__weight=torch.ones(23, 32)), "separate"),
    "another program's draft": (with_config(speculators_model_type="dflash"), "dflash"),
    "another norm": (with_config(norm_before_fc=True), "norm_before_fc"),
    "quantized": (with_config(quantization_config={"bits": 4}), "quantized"),
    "absurd sizes": (with_layer(intermediate_size=2**40), "intermediate_size"),
    "many layers": (with_layer(num_hidden_layers=2), "several layers"),
    "code": (with_layer(model_type="stranger"), "stranger"),
    "the last layer": (with_config(eagle_aux_hidden_state_layer_ids=[1, 2, 5]), "last layer"),
    "layers that are none": (
        with_config(eagle_aux_hidden_state_layer_ids="abc"),
        "cannot be used",
    ),
    "another target": (with_layer(vocab_size=24), "vocabulary of 24"),
    "another target's note": (write(ORIGIN, '{"target": 3}'), "its target must be a mapping"),
    "no number of draft tokens": (write(ORIGIN, '{"num_draft_tokens": 0}'), "num_draft_tokens"),
    "a broken note": (write(ORIGIN, "{"), f"{ORIGIN} is damaged"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_directory_that_is_torn_or_lies_is_refused_in_one_line(
    name: str,
    exported: Path,
    tmp_path: Path,
) -> None:
    damage, message = HOSTILE[name]
    directory = Path(shutil.copytree(exported, tmp_path / "head"))
    damage(directory)
    with pytest.raises(ValueError, match=message) as error:
        read_head(directory, TARGET)
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)


def test_names_of_specforge_and_the_defaults_of_engines_are_read(
    exported: Path, tmp_path: Path
) -> None:
    """SpecForge's names, its own embeddings left in, its layers where the config names none."""
    drafter = head(layers=[1, 1, 0], **PLAIN)
    # By default, engines read the inputs of layers 2, 2 and 2 of five, the outputs of layer 1.
    drafter.settings.__dict__["feature_layers"] = (1, 1, 1)
    config = engine_heads.eagle_config(drafter, "", 3, nested=False)
    del config["eagle_config"], config["head_dim"], config["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(config))

    tensors = engine_heads.eagle_tensors(drafter, "midlayer")
    tensors["embed_tokens.weight"] = TARGET.embeddings(torch.arange(23)[None])[0].clone()
    save_file(tensors, tmp_path / "model.safetensors")

    read_drafter: Any = read_head(tmp_path, TARGET)[0]
    assert read_drafter.settings.feature_layers == (1, 1, 1)
    assert drafts_alike(drafter, read_drafter)


def foreign(name: str) -> tuple[Path, HuggingFaceLM]:
    """Return a head that another program made (benchmarks/foreign_heads.py), and its target."""
    directory = Path(__file__).parent / "data" / "heads" / name
    model = tiny("llama", vocab_size=23, num_hidden_layers=5, sharpness=14.0)
    weights = load_file(directory / "model.safetensors")
    model.get_input_embeddings().weight.data = weights["embed_tokens.weight"]
    return directory, HuggingFaceLM(model)


@pytest.mark.parametrize("name", ["speculators", "speculators_31", "specforge"])
def test_heads_of_other_programs_compute_what_they_compute_there(name: str) -> None:
    directory, target = foreign(name)
    drafter: Any = read_head(directory, target)[0]
    assert drafter.settings.feature_layers == (0, 2, 3)
    assert drafter.draft_vocabulary.tokens.tolist() == [1, 3, 4, 7, 20, 22]

    # Logits of the other program, for rounds that start at each entry, step by step.
    expected = load_file(directory / "expected.safetensors")
    features = drafter.network.features(expected["features"][None].chunk(3, -1))
    embeddings = target.embeddings(expected["tokens"][None])
    outputs = rollouts(drafter.network, embeddings, features, 2)
    for step, expected_logits in enumerate(expected["logits"]):
        logits = drafter.network.logits(outputs[step][0, step:])
        torch.testing.assert_close(logits, expected_logits[: len(logits)], rtol=1e-4, atol=1e-4)

    result = speculative_decode(target, drafter, PROMPTS, max_new_tokens=12, num_draft_tokens=3)
    assert result.tokens == autoregressive_decode(target, PROMPTS, max_new_tokens=12).tokens


@pytest.mark.parametrize(
    "name, message",
    [("speculators_qwen3", "of qwen3"), ("specforge_llama3", "positions .llama3.")],
)
def test_heads_of_other_programs_with_other_parts_are_refused_by_name(
    name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_head(*foreign(name))


def test_training_goes_on_from_an_imported_head(tmp_path: Path) -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=11, num_hidden_layers=4, sharpness=14.0))
    draft_vocabulary = [1, 2, 3, 4, 5, 7, 8, 10]
    drafter = eagle(target, layers=[0, 1, 2], norm_output=True, draft_vocabulary=draft_vocabulary)
    engines.export(tmp_path / "out", drafter, target, "vllm")

    training = EagleTraining(
        target, draft=str(tmp_path / "out"), draft_vocabulary=3, num_draft_tokens=3
    )
    begun(training)
    check_same_weights(drafter, training.drafter)
    assert training.drafter.arguments() == read_head(tmp_path / "out", target)[0].arguments()
    check_that_it_learns(training, 12)
    with pytest.raises(ValueError, match="this trains a MedusaDrafter"):
        MedusaTraining(target, draft=str(tmp_path / "out"), num_heads=2)


@pytest.mark.slow
def test_the_command_line_exports_imports_audits_and_writes_a_draft_file(here: None) -> None:
    tiny_models.write_text_model(Path("target"), num_hidden_layers=5)
    target = load_model("target")
    engines.export(
        Path("first"),
        eagle(target, layers=[0, 2, 3]),
        target,
        "sglang",
        recipe={"data_arguments": {"paths": ["/home/me/notes.txt"]}},
        num_draft_tokens=5,
    )
    card = Path("first/README.md").read_text()
    assert 'Trained on: ["notes.txt"]' in card, "no directory of this machine"

    # A directory becomes a draft file, which becomes a directory again.
    target_option = ("--target", "target")
    first = ("--draft", "first", *target_option)
    succeed("export", *first, "--output", "head.safetensors")
    outcome = succeed(
        *("export", "--draft", "head.safetensors", *target_option),
        *("--format", "vllm", "--output", "second"),
    )
    assert "vllm serve target --spec" in outcome.out
    assert '"num_speculative_tokens": 5' in outcome.out
    assert "license" not in (metadata_load("second/README.md") or {})
    outcome = succeed("export", *first, "--format", "sglang", "--output", "third")
    assert "not run in sglang" in outcome.out
    first_weights = load_file("first/model.safetensors")
    second_weights = load_file("second/model.safetensors")
    assert torch.equal(first_weights["fc.weight"], second_weights["fc.weight"])

    outputs = []
    for draft in ("second", "head.safetensors"):
        decode = ("decode", *target_option, "--draft", draft, "--max_new_tokens", "6")
        outputs.append(succeed(*decode, "--repeats", "0").out)
    assert outputs[0] == outputs[1]
    succeed(
        *("audit", *target_option, "--draft", "second", "--max_new_tokens", "4"),
        *("--num_prompts", "1", "--num_places", "1"),
    )

    refused(
        *("export", *first, "--format", "vllm", "--output", "second"),
        message="is there already",
    )
    refused(
        *("export", *first, "--format", "llama.cpp", "--output", "x"),
        message="feature_norms",
    )
    refused(
        *("export", "--draft", "first", "--format", "vllm", "--output", "x"),
        message="--target is missing",
    )
    Path("first/model.safetensors").write_bytes(b"")
    refused("decode", *first, message="truncated or damaged")
