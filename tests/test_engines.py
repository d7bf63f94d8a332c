"""Drafts for other engines and from other programs: both sides compute the same, or it fails."""

from __future__ import annotations

import errno
import json
import shutil
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
    ModelDrafter,
    MultiTokenDrafter,
    NGramDrafter,
    NGramWithFallback,
    StagedDrafter,
)
from lightning_specdec.models import RNN
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.safetensors_file import Origin
from lightning_specdec.training import EagleTraining, MultiTokenTraining
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
    """A directory for an engine; the shipped kind of head by default."""
    directory = folder / "exported"
    engines.export(directory, drafter or head(**VARIANTS["as it ships"]), TARGET, engine)
    return directory


def change(directory: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """A directory with other values in its config and other tensors (None: without)."""
    path, weights = directory / "config.json", load_file(directory / "model.safetensors")
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    changed = {**weights, **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file(
        {name: value for name, value in changed.items() if value is not None},
        directory / "model.safetensors",
    )
    return directory


def same(first: Drafter, second: Drafter) -> bool:
    """Whether two heads draft the same tokens, with the target's output."""
    runs = [
        speculative_decode(TARGET, drafter, PROMPTS, max_new_tokens=12, num_draft_tokens=3)
        for drafter in (first, second)
    ]
    assert runs[0].tokens == autoregressive_decode(TARGET, PROMPTS, max_new_tokens=12).tokens
    return runs[0].tokens == runs[1].tokens and runs[0].counts == runs[1].counts


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_head_comes_back_as_it_went(name: str, engine: str, tmp_path: Path) -> None:
    drafter = head(**VARIANTS[name])
    made = engines.export(tmp_path / "out", drafter, TARGET, engine)
    assert made.difference < 1e-5 and made.num_compared == 12 and made.loaded == (engine == "vllm")
    assert str(tmp_path / "out") in made.commands[0]
    back, _ = read_head(tmp_path / "out", TARGET)
    assert same(drafter, back)
    if "layers" not in VARIANTS[name]:
        assert all(
            torch.equal(value, back.state_dict()[key])
            for key, value in drafter.state_dict().items()
        )


@pytest.mark.parametrize("name", list(BLOCKS))
def test_a_block_drafter_is_written_as_dspark(name: str, tmp_path: Path) -> None:
    made = engines.export(tmp_path / "out", blocks(**BLOCKS[name]), TARGET, "vllm")
    assert made.difference < 1e-5 and made.num_compared == 12 and not made.loaded
    assert (
        '"method": "dspark"' in made.commands[0]
        and '"num_speculative_tokens": 6' in made.commands[0]
    )
    config, weights = (
        json.loads((tmp_path / "out/config.json").read_text()),
        load_file(tmp_path / "out/model.safetensors"),
    )
    assert weights["embed_tokens.weight"].shape == (24, 32) and config["mask_token_id"] == 23
    assert (
        len(weights["markov_head.markov_w1.weight"])
        == config["transformer_layer_config"]["vocab_size"]
        == 24
    )
    with pytest.raises(ValueError, match="it is a dspark draft"):
        read_head(tmp_path / "out", TARGET)


@pytest.mark.parametrize("fault", ["embed_tokens", "k_norm", "v_proj", "markov_w1", "hidden_norm"])
def test_what_dspark_would_compute_otherwise_is_not_written(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = engine_heads.block_tensors

    def wrong(*arguments: Any) -> dict[str, torch.Tensor]:
        return {
            name: value * (1.5 if fault in name else 1.0)
            for name, value in tensors(*arguments).items()
        }

    monkeypatch.setattr(engine_heads, "block_tensors", wrong)
    drafter = blocks()
    with pytest.raises(ValueError, match="scores other tokens"):
        engines.export(tmp_path / "out", drafter, TARGET, "vllm")


def test_a_fitted_head_drafts_as_well_as_before(tmp_path: Path) -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=11, num_hidden_layers=4, sharpness=14.0))
    drafter = fitted_eagle(target, layers=(0, 1, 2), norm_output=True)
    engines.export(tmp_path / "out", drafter, target, "vllm")
    runs = [
        speculative_decode(target, each, PROMPTS, max_new_tokens=16, num_draft_tokens=3)
        for each in (drafter, read_head(tmp_path / "out", target)[0])
    ]
    assert (
        runs[0].counts == runs[1].counts
        and runs[0].counts is not None
        and runs[0].counts.num_accepted > 5
    )


def test_layers_are_counted_as_each_engine_counts_them(tmp_path: Path) -> None:
    inputs = json.loads((written(tmp_path / "a") / "config.json").read_text())[
        "eagle_aux_hidden_state_layer_ids"
    ]
    plain = json.loads((written(tmp_path / "b", engine="sglang") / "config.json").read_text())[
        "eagle_config"
    ]
    assert inputs == [1, 3, 4] and plain["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3]


def test_nothing_is_left_to_defaults_that_readers_do_not_have(tmp_path: Path) -> None:
    """vLLM gives a nested layer no defaults."""
    config = json.loads((written(tmp_path) / "config.json").read_text())
    layer = {
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "head_dim",
        "rope_parameters",
        "rms_norm_eps",
        "layer_types",
    }
    assert layer <= config["transformer_layer_config"].keys()
    assert {
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "draft_vocab_size",
    } <= config.keys()


def test_medusa_heads_come_back_as_they_went(tmp_path: Path) -> None:
    drafter = heads(TARGET)
    assert engines.export(tmp_path / "out", drafter, TARGET, "vllm").difference < 1e-5
    assert same(drafter, read_head(tmp_path / "out", TARGET)[0])
    without = {f"{i}__0__linear__bias": None for i in range(3)}
    other, _ = read_head(change(tmp_path / "out", {"medusa_fc_bias": False}, **without), TARGET)
    assert isinstance(other, MultiTokenDrafter) and same(other, other)


def test_a_draft_model_is_one_of_transformers_with_its_tokenizer(tmp_path: Path) -> None:
    path = tiny_models.write_text_model(tmp_path / "target", num_hidden_layers=1)
    target = load_model(path)
    for engine in ENGINES:
        made = engines.export(
            tmp_path / engine, ModelDrafter(target), target, engine, dtype="bfloat16"
        )
        assert (
            made.difference < 1e-5
            and (tmp_path / engine / "tokenizer.json").is_file()
            and made.commands
        )
    assert (
        load_file(tmp_path / "vllm" / "model.safetensors")["model.norm.weight"].dtype
        == torch.bfloat16
    )
    draft, ids = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "transformers"),
        torch.tensor([[5, 6, 7]]),
    )
    options, model = {"max_new_tokens": 12, "do_sample": False}, cast(Any, target.model)
    alone, assisted = (
        model.generate(ids, **options, **more) for more in ({}, {"assistant_model": draft})
    )
    assert alone.tolist() == assisted.tolist()


@pytest.mark.parametrize(
    "fault", ["queries for keys", "another layer", "no norms", "a token further"]
)
def test_what_an_engine_would_compute_otherwise_is_not_written(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds a writer's fault: it shares no code with it."""
    tensors, config = engine_heads.eagle_tensors, engine_heads.eagle_config

    def wrong_tensors(drafter: EagleDrafter, layer: str) -> dict[str, torch.Tensor]:
        found = tensors(drafter, layer)
        if fault == "queries for keys":
            query = f"{layer}.self_attn.q_proj.weight"
            found[query] = found[query].flip(0)
        if fault == "a token further":
            found["d2t"] = found["d2t"] - 1
        return found

    def wrong_config(*arguments: Any, **options: Any) -> dict[str, Any]:
        found = config(*arguments, **options)
        if fault == "another layer":
            found["eagle_aux_hidden_state_layer_ids"][0] += 1
        return found | ({"fc_norm": False} if fault == "no norms" else {})

    monkeypatch.setattr(engine_heads, "eagle_tensors", wrong_tensors)
    monkeypatch.setattr(engine_heads, "eagle_config", wrong_config)
    drafter = head(draft_vocabulary=[1, 3, 4, 7, 20, 22])
    if fault == "no norms":
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
    ("llama.cpp", head(), "train with feature_norms: false,"),
    ("llama.cpp", head(**PLAIN, attention_window=5), "train with no attention_window,"),
    ("llama.cpp", head(**PLAIN, norm_output=True), "train with norm_output: false,"),
    ("llama.cpp", head(**PLAIN, layers=[0, 1]), "three layers"),
    ("vllm", blocks(feature_norms=True), "train with feature_norms: false"),
    ("vllm", blocks(layers=[0, 4]), "last layer"),
    ("sglang", blocks(), "no block drafters"),
    ("llamafile", head(), "format must be one of"),
]


@pytest.mark.parametrize("engine, drafter, told", REFUSED)
def test_what_an_engine_cannot_run_is_refused_with_what_is_needed(
    engine: str, drafter: Drafter, told: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=told) as error:
        engines.export(tmp_path / "out", drafter, TARGET, engine)
    assert (
        engine in str(error.value) and "\n" not in str(error.value) and not list(tmp_path.iterdir())
    )


def test_plain_heads_go_to_llama_cpp(tmp_path: Path) -> None:
    made = engines.export(tmp_path / "out", head(**PLAIN), TARGET, "llama.cpp")
    assert made.loaded
    assert (
        "--target-model-dir" in made.commands[0]
        and " --spec-type draft-eagle3 " in made.commands[1]
    )
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("fc_norm" in name for name in names) and "layers.0.hidden_norm.weight" in names


def test_a_head_says_whose_it_is_and_how_many_tokens_to_draft(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        tiny_models.write_text_model(tmp_path / name, num_hidden_layers=5, seed=len(name))
    mine, other = (load_model(str(tmp_path / name)) for name in ("mine", "other"))
    head, medusa = eagle(mine, layers=[0, 2, 3]), heads(mine)
    for engine, drafter, window in (("vllm", head, 5), ("sglang", head, 5), ("vllm", medusa, 3)):
        out = tmp_path / f"{engine}-{type(drafter).__name__}"
        engines.export(out, drafter, mine, engine, num_draft_tokens=5)
        assert read_head(out, mine)[1] == {"num_draft_tokens": window}
        assert str(tmp_path) not in (out / ORIGIN).read_text(), "no directory of this machine"
        with pytest.raises(ValueError, match="mine .sha256.*other .sha256.*has another sha256"):
            read_head(out, other)
        (out / ORIGIN).unlink()
        assert read_head(out, other)[1].get("num_draft_tokens") == (
            window if "vllm-Eagle" in out.name else None
        )


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
    assert "base_model" not in metadata_load(tmp_path / "out" / "README.md")


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


HOSTILE: dict[str, tuple[Any, str]] = {
    "a torn file": (
        lambda path: (path / "model.safetensors").write_bytes(b"\0" * 50),
        "truncated or damaged",
    ),
    "a pickle": (
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        "could run code",
    ),
    "a broken config": (
        lambda path: (path / "config.json").write_text("{"),
        "config.json is damaged",
    ),
    "an endless config": (
        lambda path: (path / "config.json").write_text("[" * 2**21),
        "config.json is damaged",
    ),
    "tokens out of the vocabulary": (
        lambda path: change(path, d2t=torch.full((6,), 99)),
        "leaves the target's",
    ),
    "tokens in disorder": (
        lambda path: change(path, d2t=torch.tensor([9, 0, 0, 0, 0, 0])),
        "must ascend",
    ),
    "no mapping": (lambda path: change(path, d2t=None), "has no d2t"),
    "a weight too few": (lambda path: change(path, fc__weight=None), "join"),
    "a weight too many": (
        lambda path: change(path, layers__0__self_attn__q_norm__weight=torch.ones(8)),
        "q_norm",
    ),
    "another shape": (lambda path: change(path, norm__weight=torch.ones(3)), "output_norm"),
    "no numbers": (
        lambda path: change(path, norm__weight=torch.full((32,), torch.nan)),
        "not finite",
    ),
    "embeddings of its own": (
        lambda path: change(path, embed_tokens__weight=torch.ones(23, 32)),
        "of its own",
    ),
    "another program's draft": (
        lambda path: change(path, {"speculators_model_type": "dflash"}),
        "dflash",
    ),
    "another norm": (lambda path: change(path, {"norm_before_fc": True}), "norm_before_fc"),
    "quantized": (lambda path: change(path, {"quantization_config": {"bits": 4}}), "quantized"),
    "absurd sizes": (lambda path: nested(path, {"intermediate_size": 2**40}), "intermediate_size"),
    "many layers": (lambda path: nested(path, {"num_hidden_layers": 2}), "several layers"),
    "code": (lambda path: nested(path, {"model_type": "stranger"}), "stranger"),
    "the last layer": (
        lambda path: change(path, {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
        "last layer",
    ),
    "layers that are none": (
        lambda path: change(path, {"eagle_aux_hidden_state_layer_ids": "abc"}),
        "cannot be used",
    ),
    "another target": (lambda path: nested(path, {"vocab_size": 24}), "vocabulary of 24"),
    "another target's note": (
        lambda path: (path / ORIGIN).write_text('{"target": 3}'),
        "its target must be a mapping",
    ),
    "no number of draft tokens": (
        lambda path: (path / ORIGIN).write_text('{"num_draft_tokens": 0}'),
        "num_draft_tokens",
    ),
    "a broken note": (lambda path: (path / ORIGIN).write_text("{"), f"{ORIGIN} is damaged"),
}


def nested(directory: Path, values: dict[str, Any]) -> Path:
    config = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
    return change(directory, {"transformer_layer_config": {**config, **values}})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_directory_that_is_torn_or_lies_is_refused_in_one_line(
    name: str, exported: Path, tmp_path: Path
) -> None:
    spoil, told = HOSTILE[name]
    spoil(Path(shutil.copytree(exported, tmp_path / "head")))
    with pytest.raises(ValueError, match=told) as error:
        read_head(tmp_path / "head", TARGET)
    assert str(tmp_path / "head") in str(error.value) and "\n" not in str(error.value)


def test_names_of_specforge_and_the_defaults_of_engines_are_read(
    exported: Path, tmp_path: Path
) -> None:
    """SpecForge's names, its own embeddings left in, its layers where the config names none."""
    drafter = head(layers=[1, 1, 0], **PLAIN)
    drafter.settings.__dict__["feature_layers"] = (1, 1, 1)  # of five layers, the inputs 2, 2 and 2
    config = engine_heads.eagle_config(drafter, "", 3, nested=False)
    del config["eagle_config"], config["head_dim"], config["norm_before_residual"]
    tensors = engine_heads.eagle_tensors(drafter, "midlayer") | {
        "embed_tokens.weight": TARGET.embeddings(torch.arange(23)[None])[0].clone()
    }
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    back: Any = read_head(tmp_path, TARGET)[0]
    assert back.settings.feature_layers == (1, 1, 1) and same(drafter, back)


def foreign(name: str) -> tuple[Path, HuggingFaceLM]:
    """Return a head that another program made (benchmarks/foreign_heads.py), and its target."""
    directory = Path(__file__).parent / "data" / "heads" / name
    model = tiny("llama", vocab_size=23, num_hidden_layers=5, sharpness=14.0)
    model.get_input_embeddings().weight.data = load_file(directory / "model.safetensors")[
        "embed_tokens.weight"
    ]
    return directory, HuggingFaceLM(model)


@pytest.mark.parametrize("name", ["speculators", "speculators_31", "specforge"])
def test_heads_of_other_programs_compute_what_they_compute_there(name: str) -> None:
    directory, target = foreign(name)
    drafter: Any = read_head(directory, target)[0]
    assert drafter.settings.feature_layers == (0, 2, 3)
    assert drafter.draft_vocabulary.tokens.tolist() == [1, 3, 4, 7, 20, 22]
    theirs = load_file(directory / "expected.safetensors")
    features = drafter.network.features(theirs["features"][None].chunk(3, -1))
    outputs = rollouts(drafter.network, target.embeddings(theirs["tokens"][None]), features, 2)
    for step, logits in enumerate(theirs["logits"]):  # of a round that starts at each entry
        ours = drafter.network.logits(outputs[step][0, step:])
        torch.testing.assert_close(ours, logits[: len(ours)], rtol=1e-4, atol=1e-4)
    runs = speculative_decode(target, drafter, PROMPTS, max_new_tokens=12, num_draft_tokens=3)
    assert runs.tokens == autoregressive_decode(target, PROMPTS, max_new_tokens=12).tokens


@pytest.mark.parametrize(
    "name, told", [("speculators_qwen3", "of qwen3"), ("specforge_llama3", "positions .llama3.")]
)
def test_heads_of_other_programs_with_other_parts_are_refused_by_name(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_head(*foreign(name))


def test_training_goes_on_from_an_imported_head(tmp_path: Path) -> None:
    target = HuggingFaceLM(tiny("llama", vocab_size=11, num_hidden_layers=4, sharpness=14.0))
    drafter = eagle(
        target, layers=[0, 1, 2], norm_output=True, draft_vocabulary=[1, 2, 3, 4, 5, 7, 8, 10]
    )
    engines.export(tmp_path / "out", drafter, target, "vllm")
    training = EagleTraining(
        target, draft=str(tmp_path / "out"), draft_vocabulary=3, num_draft_tokens=3
    )
    begun(training)
    assert all(
        torch.equal(each, training.drafter.state_dict()[key])
        for key, each in drafter.state_dict().items()
    )
    assert training.drafter.arguments() == read_head(tmp_path / "out", target)[0].arguments()
    check_that_it_learns(training, 12)
    with pytest.raises(ValueError, match="this trains a MultiTokenDrafter"):
        MultiTokenTraining(target, draft=str(tmp_path / "out"), num_heads=2)


def test_the_command_line_exports_imports_audits_and_writes_a_draft_file(here: None) -> None:
    tiny_models.write_text_model(Path("target"), num_hidden_layers=5)
    target = load_model("target")
    recipe = {"data_arguments": {"paths": ["/home/me/notes.txt"]}}
    engines.export(
        Path("first"),
        eagle(target, layers=[0, 2, 3]),
        target,
        "sglang",
        recipe=recipe,
        num_draft_tokens=5,
    )
    assert 'Trained on: ["notes.txt"]' in Path("first/README.md").read_text(), (
        "no directory of this machine"
    )
    models = "--draft", "first", "--target", "target"
    succeed("export", *models, "--output", "head.safetensors")
    done = succeed(
        "export",
        "--draft",
        "head.safetensors",
        *models[2:],
        "--format",
        "vllm",
        "--output",
        "second",
    )
    assert "vllm serve target --spec" in done.out and '"num_speculative_tokens": 5' in done.out
    assert "license" not in metadata_load("second/README.md")
    assert (
        "not run in sglang"
        in succeed("export", *models, "--format", "sglang", "--output", "third").out
    )
    assert torch.equal(
        *(load_file(f"{name}/model.safetensors")["fc.weight"] for name in ("first", "second"))
    )
    shown = [
        succeed(
            "decode",
            "--target",
            "target",
            "--draft",
            draft,
            "--max_new_tokens",
            "6",
            "--repeats",
            "0",
        ).out
        for draft in ("second", "head.safetensors")
    ]
    assert shown[0] == shown[1]
    succeed(
        "audit",
        "--target",
        "target",
        "--draft",
        "second",
        "--max_new_tokens",
        "4",
        "--num_prompts",
        "1",
        "--num_places",
        "1",
    )
    refused("export", *models, "--format", "vllm", "--output", "second", told="is there already")
    refused(
        "export",
        "--target",
        "target",
        "--draft",
        "first",
        "--format",
        "llama.cpp",
        "--output",
        "x",
        told="feature_norms",
    )
    refused(
        "export",
        "--draft",
        "first",
        "--format",
        "vllm",
        "--output",
        "x",
        told="--target is missing",
    )
    Path("first/model.safetensors").write_bytes(b"")
    refused("decode", "--target", "target", "--draft", "first", told="truncated or damaged")
