"""Prediction layers whose form follows from a checkpoint: they draft what a loop by hand drafts.

transformers does not build these layers. The loop runs the last layer of a model with one layer
more, whose weights are stored under the names that the family's checkpoints have for them.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LATENT, SIZES, tiny
from multimodal import multimodal
from resumed_rows import check_resumed_conversation
from safetensors.torch import load_file, save_file
from test_mtp import NUM_NEW, PROMPTS, Recording, decoder_of, their_proposals
from tiny_heads import examples
from tiny_mtp import fit
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.ways import draftings
from lightning_specdec.checkpoints.engines import export
from lightning_specdec.config.models import PairSource
from lightning_specdec.decoding import autoregressive_decode, speculative_decode
from lightning_specdec.drafters import MtpDrafter
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import load_model
from lightning_specdec.models.model_config import quiet
from lightning_specdec.models.mtp_building import new_mtp
from lightning_specdec.models.mtp_files import dequantized, load_mtp, stored_weights

NUM_LAYERS = 4
"""Layers of a model without its prediction layer."""
_SIZES: dict[str, Any] = {**SIZES, "num_hidden_layers": NUM_LAYERS, "head_dim": 8}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
_DELTA_RULE = {
    **_SIZES,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_HYBRID = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_SPARSE = ["dense", "sparse", "sparse", "sparse"]
_NUMBERED = {
    "enorm": "model.layers.4.enorm.weight",
    "hnorm": "model.layers.4.hnorm.weight",
    "eh_proj": "model.layers.4.eh_proj.weight",
    "post_norm": "model.layers.4.shared_head.norm.weight",
}
_SINGLE = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj": "mtp.fc.weight",
    "post_norm": "mtp.norm.weight",
}


@dataclass(frozen=True)
class Family:
    """How the checkpoints of a family keep a prediction layer.

    Args:
        sizes: of the model.
        layer: what a model with a further layer has instead, so that this one is like the
            prediction layer.
        around: names of the modules around the decoder layer.
        block: prefix of the names of the decoder layer's weights, by those in the larger model.
        renamed: parts of these names, by those in the larger model.
    """

    sizes: dict[str, Any]
    layer: dict[str, Any]
    around: dict[str, str]
    block: dict[str, str]
    renamed: dict[str, str] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        {
            **_SIZES,
            **_EXPERTS,
            **LATENT,
            "head_dim": 8,
            "layer_types": _HYBRID,
            "mlp_layer_types": _SPARSE,
            "num_nextn_predict_layers": 1,
        },
        {
            "layer_types": [*_HYBRID, "full_attention"],
            "mlp_layer_types": [*_SPARSE, "sparse"],
            "num_nextn_predict_layers": 0,
        },
        {**_NUMBERED, "post_norm": "model.layers.4.final_layernorm.weight"},
        {"model.layers.4.": "model.layers.4."},
    ),
    "qwen3_next": Family(
        {**_DELTA_RULE, **_EXPERTS, "layer_types": _HYBRID, "mlp_only_layers": [0]},
        {"layer_types": [*_HYBRID, "full_attention"]},
        _SINGLE,
        {"model.layers.4.": "mtp.layers.0."},
    ),
    "qwen3_5_text": Family(
        {**_DELTA_RULE, "layer_types": _HYBRID},
        {"layer_types": [*_HYBRID, "full_attention"]},
        _SINGLE,
        {"model.layers.4.": "mtp.layers.0."},
    ),
    "qwen3_5_moe_text": Family(
        {**_DELTA_RULE, **_EXPERTS, "layer_types": _HYBRID},
        {"layer_types": [*_HYBRID, "full_attention"]},
        _SINGLE,
        {"model.layers.4.": "mtp.layers.0."},
    ),
    "exaone_moe": Family(
        {
            **_SIZES,
            **_EXPERTS,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": _SPARSE,
        },
        {
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
            "mlp_layer_types": [*_SPARSE, "dense"],
        },
        _SINGLE,
        {"model.layers.4.": "mtp.layers.0."},
    ),
    "mimo_v2_flash": Family(
        {
            **_SIZES,
            **_EXPERTS,
            "v_head_dim": 6,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": _SPARSE,
        },
        {
            "layer_types": [*["full_attention", "sliding_attention"] * 2, "sliding_attention"],
            "mlp_layer_types": [*_SPARSE, "dense"],
        },
        {
            "enorm": "model.mtp.layers.0.enorm.weight",
            "hnorm": "model.mtp.layers.0.hnorm.weight",
            "eh_proj": "model.mtp.layers.0.eh_proj.weight",
            "post_norm": "model.mtp.layers.0.final_layernorm.weight",
        },
        {"model.layers.4.": "model.mtp.layers.0."},
        {"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    "glm4_moe_lite": Family(
        {
            **_SIZES,
            **_EXPERTS,
            **LATENT,
            "head_dim": 8,
            "mlp_layer_types": _SPARSE,
            "num_nextn_predict_layers": 1,
        },
        {"mlp_layer_types": [*_SPARSE, "sparse"]},
        _NUMBERED,
        {"model.layers.4.": "model.layers.4."},
    ),
    "hy_v3": Family(
        {**_SIZES, **_EXPERTS, "mlp_layer_types": _SPARSE, "num_nextn_predict_layers": 1},
        {"mlp_layer_types": [*_SPARSE, "sparse"]},
        {**_NUMBERED, "post_norm": "model.layers.4.final_layernorm.weight"},
        {"model.layers.4.": "model.layers.4."},
    ),
    "ernie4_5_moe": Family(
        {
            **{name: size for name, size in _SIZES.items() if name != "head_dim"},
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
        },
        {},
        {
            "enorm": "model.mtp_emb_norm.0.weight",
            "hnorm": "model.mtp_hidden_norm.0.weight",
            "eh_proj": "model.mtp_linear_proj.0.weight",
        },
        {"model.layers.4.": "model.mtp_block.0."},
    ),
    "nemotron_h": Family(
        {
            **{name: size for name, size in _SIZES.items() if name != "num_hidden_layers"},
            **_EXPERTS,
            "moe_shared_expert_intermediate_size": 24,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mtp_layers_block_type": ["full_attention", "moe"],
            "num_nextn_predict_layers": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "use_mamba_kernels": False,
        },
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "linear_attention"),
                *("full_attention", "moe"),
            ],
        },
        {
            "enorm": "mtp.layers.0.enorm.weight",
            "hnorm": "mtp.layers.0.hnorm.weight",
            "eh_proj": "mtp.layers.0.eh_proj.weight",
            "post_norm": "mtp.layers.1.final_layernorm.weight",
        },
        {"backbone.layers.4.": "mtp.layers.0.", "backbone.layers.5.": "mtp.layers.1."},
    ),
}
some_of_them_quickly = pytest.mark.quick_cases("qwen3_5_text", "nemotron_h", "mimo_v2_flash")
every_family = pytest.mark.parametrize("family", FAMILIES)


def larger_model(family: str) -> Any:
    """A model with a further layer, which is like the prediction layer."""
    sizes = {**FAMILIES[family].sizes, "num_hidden_layers": NUM_LAYERS + 1}
    if family == "nemotron_h":
        del sizes["num_hidden_layers"]
    return tiny(family, 2, **{**sizes, **FAMILIES[family].layer})


def to_stored(family: str, name: str) -> str | None:
    """The name of a weight of the further layer in a checkpoint; None for weights of others."""
    for prefix, stored_prefix in FAMILIES[family].block.items():
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            for part, stored_part in FAMILIES[family].renamed.items():
                rest = rest.replace(part, stored_part)
            return stored_prefix + rest
    return None


def write_checkpoint(home: Path, family: str) -> Path:
    """Write a model with a fitted prediction layer, under the names of the family's checkpoints."""
    path = home / family
    layout = FAMILIES[family]
    with quiet():
        tiny(family, 2, **layout.sizes).save_pretrained(path)
        larger_model(family).save_pretrained(home / f"{family}-larger")

    # Random weights of the larger model's last layer, under the names of a prediction layer.
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, weight in load_file(home / f"{family}-larger" / "model.safetensors").items():
        stored_name = to_stored(family, name)
        if stored_name is not None:
            weights[stored_name] = weight
    generator = torch.Generator().manual_seed(1)
    width = layout.sizes["hidden_size"]
    for module, name in layout.around.items():
        shape = (width, 2 * width) if module == "eh_proj" else (width,)
        weights[name] = torch.randn(shape, generator=generator)
    save_file(weights, file, {"format": "pt"})

    # After a few steps it is often right.
    target = load_model(str(path))
    assert isinstance(target, HuggingFaceLM)
    network = load_mtp(target)
    texts, hidden = examples(target)
    fit(network, target, texts, hidden, 8)
    trained = stored_weights(network, target)
    names = {name for name in weights if is_of_layer(family, name)}
    assert {*trained} == names
    save_file({**weights, **trained}, file, {"format": "pt"})
    return path


def is_of_layer(family: str, name: str) -> bool:
    prefixes = (*FAMILIES[family].block.values(), *FAMILIES[family].around.values())
    return name.startswith(prefixes)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def directory(home: Path, family: str) -> Path:
    path = home / family
    if not path.exists():
        write_checkpoint(home, family)
    return path


@functools.cache
def target_of(directory: Path) -> HuggingFaceLM:
    target = load_model(str(directory))
    assert isinstance(target, HuggingFaceLM)
    return target


class Loop:
    """A prediction layer by hand, which reads whole texts without a cache."""

    def __init__(self, directory: Path) -> None:
        self.family = directory.name
        layout = FAMILIES[self.family]
        stored = load_file(directory / "model.safetensors")
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()

        # The larger model gets its last layer from the prediction layer.
        larger = directory.parent / f"{self.family}-larger"
        weights = load_file(larger / "model.safetensors")
        for name in weights:
            stored_name = to_stored(self.family, name)
            if stored_name is not None:
                weights[name] = stored[stored_name]
        path = directory.parent / f"{self.family}-loop"
        path.mkdir(exist_ok=True)
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text((larger / "config.json").read_text())
        self.larger: Any = AutoModelForCausalLM.from_pretrained(path).eval()

        decoder = self.larger.get_decoder()
        self.blocks = decoder.layers[NUM_LAYERS:]
        self.norms: dict[str, nn.Module] = {}
        for name in ("enorm", "hnorm", "post_norm"):
            if name in layout.around:
                norm = decoder.norm if hasattr(decoder, "norm") else decoder.norm_f
                self.norms[name] = type(norm)(layout.sizes["hidden_size"], eps=norm_eps(norm))
                self.norms[name].load_state_dict({"weight": stored[layout.around[name]]})
        self.projection = stored[layout.around["eh_proj"]]
        kinds = getattr(self.larger.config, "layer_types", None) or ["full_attention"]
        self.kind = "full_attention" if self.family == "nemotron_h" else kinds[-1]

    def _output(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """The layer's outputs, for the tokens after those of the hidden states."""
        embedded = self.model.get_input_embeddings()(torch.tensor([tokens]))
        both = (self.norms["enorm"](embedded), self.norms["hnorm"](hidden))
        states = torch.cat(both, dim=-1) @ self.projection.T
        num_tokens = len(tokens)
        positions = torch.arange(1, num_tokens + 1)[None]
        mask = torch.ones(num_tokens, num_tokens).tril()
        if self.kind == "sliding_attention":
            mask = mask.triu(1 - self.larger.config.sliding_window)
        mask = torch.where(mask.bool(), 0.0, float("-inf"))[None, None]

        options = {"attention_mask": mask, "position_ids": positions}
        rotary = getattr(self.larger.get_decoder(), "rotary_emb", None)
        if rotary is not None:
            kinds = {"layer_type": self.kind} if self.family == "mimo_v2_flash" else {}
            options["position_embeddings"] = rotary(states, position_ids=positions, **kinds)
        for block in self.blocks:
            states = block(states, **options)
        if "post_norm" in self.norms:
            states = self.norms["post_norm"](states)
        return states

    @torch.no_grad()
    def proposals(self, text: Sequence[int], num_draft_tokens: int) -> list[int]:
        """What the layer drafts after a text, greedily; it reads its own output after the first."""
        ids = torch.tensor([text])
        model_output = self.model(ids[:, :-1], output_hidden_states=True, use_cache=False)
        hidden = model_output.hidden_states[-1]
        tokens = list(text[1:])
        drafted: list[int] = []
        for _ in range(num_draft_tokens):
            last_output = self._output(tokens, hidden)[:, -1:]
            drafted.append(int(self.model.get_output_embeddings()(last_output).argmax()))
            tokens.append(drafted[-1])
            hidden = torch.cat((hidden, last_output), dim=1)
        return drafted


def norm_eps(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


@functools.cache
def loop_of(directory: Path) -> Loop:
    return Loop(directory)


@some_of_them_quickly
@every_family
def test_a_sweep_finds_the_layer_and_loading_leaves_no_weight_over(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_model(str(directory))
    assert "no place for" not in caplog.text
    kinds = draftings(SpeculativeDecoder(target), PairSource(target=str(directory)))
    assert kinds[1].name == "prediction layers"
    assert kinds[1].found == "in the target's checkpoint: 1 multi-token prediction layer"


@pytest.mark.quick_cases("4-qwen3_5_text", "4-nemotron_h", "4-mimo_v2_flash")
@every_family
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_ragged_rounds_propose_what_the_loop_proposes_for_each_text(
    directory: Path, num_draft_tokens: int
) -> None:
    """With keys and values that are kept over rounds, rejections, and rows that end."""
    target = target_of(directory)
    drafter = Recording(network=load_mtp(target))
    result = speculative_decode(
        target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=num_draft_tokens
    )
    assert result.acceptance_rate is not None and 0.02 < result.acceptance_rate < 1
    assert len(drafter.proposals) > 10
    for text, tokens in drafter.proposals:
        assert tokens == loop_of(directory).proposals(text, len(tokens))


@some_of_them_quickly
@every_family
def test_output_equals_standard_decoding(directory: Path) -> None:
    """Greedy and sampled, in a ragged batch and alone."""
    decoder = decoder_of(directory)
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 4}
    for sampling in ({}, sampled):
        options = {**sampling, "rule": "ExactMatch"}
        standard = decoder.decode_standard(PROMPTS, max_new_tokens=NUM_NEW, **sampling)
        for num_draft_tokens in (1, 3, 8):
            result = decoder.decode(
                PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=num_draft_tokens, **options
            )
            assert result.tokens == standard.tokens
        for index, prompt in enumerate(PROMPTS):
            alone = decoder.decode(
                [prompt], indices=[index], max_new_tokens=NUM_NEW, num_draft_tokens=3, **options
            )
            assert alone.tokens[0] == standard.tokens[index]


@some_of_them_quickly
@every_family
def test_a_resumed_conversation_equals_a_fresh_one(directory: Path) -> None:
    target = target_of(directory)
    check_resumed_conversation(target, MtpDrafter.for_target(target), PROMPTS[1])


@some_of_them_quickly
@every_family
def test_a_draft_file_keeps_the_layer(directory: Path, tmp_path: Path) -> None:
    decoder = decoder_of(directory)
    decoder.save_draft(tmp_path / "layers.safetensors")
    loaded = SpeculativeDecoder.from_pretrained(
        str(directory), str(tmp_path / "layers.safetensors"), pack=False
    )
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "num_draft_tokens": 4}
    expected = decoder.decode(PROMPTS, **options)
    result = loaded.decode(PROMPTS, **options)
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "nemotron_h", "mimo_v2_flash", "bailing_hybrid"]
)
def test_a_trained_layer_is_written_back_into_the_checkpoint(
    directory: Path, tmp_path: Path
) -> None:
    target = load_model(str(directory))
    network = load_mtp(target)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1.1)
    output = tmp_path / "trained"
    exported = export(output, MtpDrafter(network=network), target, "transformers")
    assert exported.commands == (
        f"lightning_specdec decode --target {output} --drafter MtpDrafter",
    )
    written = load_mtp(load_model(str(output)))
    expected = network.state_dict()
    for name, weight in written.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@some_of_them_quickly
@every_family
def test_new_layers_can_be_trained_where_a_checkpoint_has_none(family: str) -> None:
    target = HuggingFaceLM(tiny(family, 2, **FAMILIES[family].sizes))
    network = new_mtp(target, 2)
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert target.num_layers is not None
    layer = target.num_layers - 1
    hidden = target(tokens, features=(layer,)).features[layer]
    outputs = network.read_text(target, tokens, hidden)
    assert [output.shape[1] for output in outputs] == [3, 2]
    outputs[1].sum().backward()


def test_layers_of_a_model_that_reads_images_are_those_of_its_text_part(
    home: Path, tmp_path: Path
) -> None:
    text_path = home / "qwen3_5_text"
    if not text_path.exists():
        write_checkpoint(home, "qwen3_5_text")
    sizes = FAMILIES["qwen3_5_text"].sizes
    with quiet():
        multimodal("qwen3_5", **sizes).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    for name, weight in load_file(text_path / "model.safetensors").items():
        stored_name = name.replace("model.", "model.language_model.")
        assert name.startswith("mtp.") or stored_name in weights
        weights[stored_name] = weight
    save_file(weights, file, {"format": "pt"})

    decoder = SpeculativeDecoder.from_pretrained(str(tmp_path), drafter="MtpDrafter", pack=False)
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "num_draft_tokens": 4, "eos": ()}
    result = decoder.decode(PROMPTS, **options)
    expected = decoder_of(text_path).decode(PROMPTS, **options)
    assert result.tokens == expected.tokens
    assert [row.rounds for row in result.rows] == [row.rounds for row in expected.rows]


def test_a_model_with_images_drafts_what_transformers_drafts(tmp_path: Path) -> None:
    """Step-3.7, whose layers transformers builds: two, of which the second has no window."""
    settings: dict[str, Any] = {
        "num_nextn_predict_layers": 2,
        "mtp_layer_types": ["sliding_attention", "full_attention"],
        "mtp_mlp_layer_types": ["sparse", "dense"],
    }
    with quiet():
        multimodal("step3p7", **settings).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    target = load_model(str(tmp_path))
    assert isinstance(target, HuggingFaceLM)
    network = new_mtp(target, 2)
    texts, hidden = examples(target)
    fit(network, target, texts, hidden, 8)
    save_file({**load_file(file), **stored_weights(network, target)}, file, {"format": "pt"})

    drafter = Recording(network=load_mtp(target))
    assert [drafter.network.window(index) for index in range(2)] == [6, None]
    result = speculative_decode(
        target, drafter, PROMPTS, max_new_tokens=NUM_NEW, num_draft_tokens=4
    )
    standard = autoregressive_decode(target, PROMPTS, max_new_tokens=NUM_NEW)
    assert result.tokens == standard.tokens
    assert len(drafter.proposals) > 10
    for text, tokens in drafter.proposals:
        assert tokens == their_proposals(tmp_path, text, len(tokens))


def test_a_layer_that_is_not_like_those_of_the_model_is_refused(home: Path, tmp_path: Path) -> None:
    path = home / "glm4_moe_lite"
    if not path.exists():
        write_checkpoint(home, "glm4_moe_lite")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.4.self_attn.hyper.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(
        ValueError,
        match=r"are not like the layers of Glm4MoeLiteForCausalLM, .*self_attn\.hyper\.weight",
    ):
        MtpDrafter.for_target(load_model(str(tmp_path)))


def test_a_layer_of_a_kind_without_a_way_back_is_refused(tmp_path: Path) -> None:
    """Nemotron-H may list recurrent blocks."""
    sizes = {
        **FAMILIES["nemotron_h"].sizes,
        "mtp_layers_block_type": ["linear_attention", "full_attention"],
    }
    with quiet():
        tiny("nemotron_h", 2, **sizes).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {name: torch.ones(2) for name in FAMILIES["nemotron_h"].around.values()}
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["mtp_layers_block_type"]
    with pytest.raises(ValueError, match="of the kind linear_attention are not supported"):
        MtpDrafter.for_target(load_model(str(tmp_path)))


def test_the_first_of_several_layers_drafts_alone(home: Path, tmp_path: Path) -> None:
    """Of layers that the config lists with their kinds, and of layers that only the files show."""
    listed_path = tmp_path / "listed"
    settings: dict[str, Any] = {
        "num_nextn_predict_layers": 2,
        "mtp_layer_types": ["sliding_attention", "full_attention"],
        "mtp_mlp_layer_types": ["sparse", "dense"],
    }
    with quiet():
        multimodal("step3p7", **settings).save_pretrained(listed_path)
    check_first_layer(listed_path)

    stored_path = tmp_path / "stored"
    family_path = home / "mimo_v2_flash"
    if not family_path.exists():
        write_checkpoint(home, "mimo_v2_flash")
    shutil.copytree(family_path, stored_path)
    file = stored_path / "model.safetensors"
    weights = load_file(file)
    model_weights = {
        name: weight for name, weight in weights.items() if not is_of_layer("mimo_v2_flash", name)
    }
    save_file(model_weights, file, {"format": "pt"})
    check_first_layer(stored_path)


def check_first_layer(path: Path) -> None:
    """Write two prediction layers beside the model of a checkpoint, and read one of them."""
    target = load_model(str(path))
    assert isinstance(target, HuggingFaceLM)
    network = new_mtp(target, 2)
    file = path / "model.safetensors"
    save_file({**load_file(file), **stored_weights(network, target)}, file, {"format": "pt"})

    written = load_model(str(path))
    assert load_mtp(written).num_layers == 2
    first = load_mtp(written, 1)
    assert first.num_layers == 1
    assert first.kinds == network.kinds[:1]
    expected = network.layers[0].state_dict()
    weights = first.layers[0].state_dict()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (4,), (2, 2)])
def test_scales_of_other_blocks_are_refused(shape: tuple[int, ...]) -> None:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
    with pytest.raises(ValueError, match="are not those of blocks"):
        dequantized(weight, scale, (4, 3), torch.float32)
    expected = torch.tensor([[1.0, 1, 1, 2]] * 4)
    assert torch.equal(
        dequantized(weight, torch.tensor([[1.0, 2]]), (4, 3), torch.float32), expected
    )
