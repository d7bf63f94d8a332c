"""Heads <-> the files of other programs: EAGLE-3 as speculators and SpecForge write it, and Medusa's heads; block
drafters -> DSpark as vLLM reads it.

A directory holds `config.json` and safetensors files; nothing in it is run. speculators (and vLLM) count the target's
layers by their inputs and name the head's layer `layers.0`; SpecForge (and SGLang) count by outputs and name it
`midlayer`. This package counts by outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor

from lightning_specdec.checkpoints.archive import BROKEN
from lightning_specdec.checkpoints.networks import with_weights
from lightning_specdec.checkpoints.target_reference import TargetReference
from lightning_specdec.config.checks import require_int
from lightning_specdec.config.decoding import MAX_TOKENS
from lightning_specdec.config.terminal import one_line, short
from lightning_specdec.drafters import BlockDrafter, Drafter, EagleDrafter, MultiTokenDrafter
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.drafters.eagle_network import EagleSettings
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.model_config import to_config
from lightning_specdec.models.safetensors_file import read_header, weight_files

_LAYER = {
    "input_layernorm": "token_norm",
    "hidden_norm": "feature_norm",
    "post_attention_layernorm": "inner_norm",
    "self_attn.o_proj": "attention_output",
    "mlp.down_proj": "down",
}
_BLOCK_LAYER = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "inner_norm",
    "self_attn.q_proj": "query",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "self_attn.o_proj": "attention_output",
    "mlp.down_proj": "down",
}
_WHOLE = {"fc": "join", "norm": "output_norm", "lm_head": "output"}
_QUERY_KEY_VALUE, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
ORIGIN = "lightning_specdec.json"
"""What this package notes beside what engines read: whose draft it is and how many tokens a round should draft."""
_LARGEST_CONFIG, _POSITIONS = 2**20, 2**20
_REFUSED = {
    "norm_before_fc": "normalizes the joined features (norm_before_fc)",
    "attention_bias": "has biases in its attention (attention_bias)",
    "mlp_bias": "has biases in its inner network (mlp_bias)",
    "quantization_config": "is quantized (quantization_config)",
}
"""What a head may have and `EagleNetwork` has not."""
_SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
]
_MEDUSA = ("num_heads", "num_heads"), ("num_layers", "num_hidden_layers")


def eagle_tensors(drafter: EagleDrafter, layer: str) -> dict[str, Tensor]:
    """The weights of an autoregressive head by their names there; its layer is called `layer`."""
    network, own = drafter.network, drafter.settings
    weights = {name: value.detach() for name, value in network.named_parameters()}
    found = _renamed(weights, _WHOLE) | _renamed(weights, _LAYER, f"{layer}.")
    keys = own.num_key_heads * network.head_size
    rows = own.num_heads * network.head_size, keys, keys
    found |= _split(weights["query_key_value.weight"], f"{layer}.self_attn", _QUERY_KEY_VALUE, rows)
    found |= _split(weights["gate_up.weight"], f"{layer}.mlp", _GATE_UP)
    if own.feature_norms:
        order = sorted(range(len(own.feature_layers)), key=own.feature_layers.__getitem__)
        found |= {
            f"fc_norm.{i}.weight": weights[f"layer_norms.{old}.weight"]
            for i, old in enumerate(order)
        }
    return _stored(found, drafter)


def _renamed(
    weights: dict[str, Tensor], names: dict[str, str], theirs: str = "", ours: str = ""
) -> dict[str, Tensor]:
    """Weights by an engine's names, behind these prefixes."""
    return {f"{theirs}{new}.weight": weights[f"{ours}{old}.weight"] for new, old in names.items()}


def _split(
    joined: Tensor, room: str, names: Sequence[str], rows: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """The weights that were joined, which are alike in size unless `rows` says how large each is."""
    parts = joined.chunk(len(names)) if rows is None else joined.split(list(rows))
    return {f"{room}.{name}.weight": part for name, part in zip(names, parts, strict=True)}


def _stored(found: dict[str, Tensor], drafter: FeatureDrafter) -> dict[str, Tensor]:
    """Weights as engines have them: layers of the target in order, and which tokens the draft scores."""
    layers = drafter.settings.feature_layers
    blocks = found["fc.weight"].chunk(len(layers), dim=1)
    found["fc.weight"] = torch.cat(
        [blocks[i] for i in sorted(range(len(layers)), key=layers.__getitem__)], dim=1
    )
    if (vocabulary := drafter.draft_vocabulary) is not None:
        tokens = vocabulary.tokens.cpu()
        found["d2t"] = tokens - torch.arange(len(tokens))
        found["t2d"] = torch.zeros(drafter.settings.vocab_size, dtype=torch.bool).index_fill_(
            0, tokens, True
        )
    return {name: value.cpu().contiguous().clone() for name, value in found.items()}


def block_tensors(drafter: BlockDrafter, table: Tensor) -> dict[str, Tensor]:
    """The weights of a block drafter by DSpark's names.

    The mask is a token more than the target has, so its embeddings, `table`, are stored with it, scaled. A Markov head
    of rank 0 is one of rank 1 that adds nothing.
    """
    network, own = drafter.network, drafter.settings
    weights = {name: value.detach() for name, value in network.named_parameters()}
    found = _renamed(weights, {**_WHOLE, "hidden_norm": "context_norm"})
    for i in range(own.num_layers):
        layer = f"layers.{i}"
        found |= _renamed(weights, _BLOCK_LAYER, f"{layer}.", f"{layer}.")
        found |= _split(
            weights[f"{layer}.key_value.weight"], f"{layer}.self_attn", _QUERY_KEY_VALUE[1:]
        )
        found |= _split(weights[f"{layer}.gate_up.weight"], f"{layer}.mlp", _GATE_UP)
    mask = weights["mask"]
    found["embed_tokens.weight"] = torch.cat([weights["anchor_scale"] * table.to(mask), mask[None]])
    rank, scored = max(1, own.markov_rank), weights["output.weight"]
    before = scored.new_zeros(own.vocab_size + 1, rank)
    if own.markov_rank:
        tokens = (
            torch.arange(own.vocab_size)
            if drafter.draft_vocabulary is None
            else drafter.draft_vocabulary.tokens
        )
        before[tokens] = weights["markov_input.weight"]
    found["markov_head.markov_w1.weight"] = before
    found["markov_head.markov_w2.weight"] = weights.get(
        "markov_output.weight", scored.new_zeros(len(scored), rank)
    )
    found |= {
        f"confidence_head.proj.{name}": weights[f"confidence.{name}"] for name in ("weight", "bias")
    }
    return _stored(found, drafter)


def block_config(drafter: BlockDrafter, target: str) -> dict[str, Any]:
    """The config of a block drafter as speculators writes DSpark's."""
    own = drafter.settings
    layer = _layer_config(drafter, "qwen3", own.num_layers) | {"vocab_size": own.vocab_size + 1}
    kind = "full_attention" if own.attention_window is None else "sliding_attention"
    layer |= {
        "is_causal": False,
        "layer_types": [kind] * own.num_layers,
    }  # else vLLM takes windows for causal
    markov = {"markov_rank": max(1, own.markov_rank), "markov_head_type": "vanilla"}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "speculators_model_type": "dspark",
        "draft_vocab_size": drafter.num_tokens,
        "target_hidden_size": own.hidden_size,
        "aux_hidden_state_layer_ids": [each + 1 for each in sorted(own.feature_layers)],
        "use_aux_hidden_state": True,
        "mask_token_id": own.vocab_size,
        "sample_from_anchor": True,
        "block_size": own.block_size,
        **markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": own.markov_rank > 0,
        "dtype": str(drafter.network.dtype).removeprefix("torch."),
        "transformer_layer_config": layer,
        "speculators_config": _speculators("dspark", target, own.block_size),
    }


def eagle_config(
    drafter: EagleDrafter, target: str, num_draft_tokens: int, *, nested: bool
) -> dict[str, Any]:
    """The config of an autoregressive head, as speculators writes it (`nested`) or as SpecForge does."""
    own, layers = drafter.settings, sorted(drafter.settings.feature_layers)
    layer = _layer_config(drafter, "llama", 1) | {"num_aux_hidden_states": len(layers)}
    if own.attention_window is not None:
        layer["layer_types"] = ["sliding_attention"]
    head = {
        "draft_vocab_size": drafter.num_tokens,
        "target_hidden_size": own.hidden_size,
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": own.feature_norms,
        "norm_output": own.norm_output,
        "dtype": str(drafter.network.dtype).removeprefix("torch."),
    }
    if not nested:
        counted = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **head,
            "eagle_config": counted,
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **head,
        "eagle_aux_hidden_state_layer_ids": [each + 1 for each in layers],
        "transformer_layer_config": layer,
        "speculators_config": _speculators("eagle3", target, num_draft_tokens),
    }


def _layer_config(drafter: FeatureDrafter, kind: str, num_layers: int) -> dict[str, Any]:
    """The sizes of a draft's layers: vLLM has no defaults for a nested config, and readers differ in theirs, so
    everything is stated."""
    own = drafter.settings
    return {
        "model_type": kind,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_key_heads,
        "head_dim": drafter.network.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": own.vocab_size,
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": own.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": own.rotary_base},
        **({} if own.attention_window is None else {"sliding_window": own.attention_window}),
    }


def _speculators(algorithm: str, target: str, num_draft_tokens: int) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": num_draft_tokens,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {"name_or_path": target, "architectures": []},
    }


def medusa_files(drafter: MultiTokenDrafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of heads, in Medusa's names."""
    own = drafter.settings
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": own.num_heads,
        "medusa_num_layers": own.num_blocks,
        "medusa_fc_bias": True,
        "hidden_size": own.hidden_size,
        "vocab_size": own.vocab_size,
        "dtype": str(next(drafter.parameters()).dtype).removeprefix("torch."),
    }
    return config, {
        name: value.cpu().contiguous().clone() for name, value in drafter.heads.state_dict().items()
    }


def is_head(directory: Path) -> bool:
    """Whether a directory holds a head rather than a language model."""
    try:
        config = _read_config(directory)
    except (OSError, ValueError):
        return False
    names = ("speculators_model_type", "draft_vocab_size", "eagle_config", "medusa_num_heads")
    return any(name in config for name in names) or config.get("model_type") == "medusa"


def read_head(directory: Path, target: LanguageModel) -> tuple[Drafter, dict[str, int]]:
    """The head of a directory, for this target, and its recipe: how many tokens a round should draft, if it says so.

    Raises:
        ValueError: the directory is torn or no head, the head has something that `EagleDrafter` has not, or it is for
            another target.
    """
    try:
        config = _read_config(directory)
        note = _read_config(directory, ORIGIN) if (directory / ORIGIN).is_file() else {}
        if "target" in note:
            TargetReference.from_dict(note["target"], "its target.").check(target, "it")
        weights = _read_weights(directory)
        kind = config.get("speculators_model_type", config.get("model_type"))
        if kind == "medusa" or "medusa_num_heads" in config:
            make, weights = _medusa(config, weights)
        else:
            make, weights = _eagle(config, weights, target)
        drafter: Drafter = with_weights(make, "head", weights)
        drafter.check_target(target)
        return drafter, _recipe(config | note)
    except BROKEN as error:
        reason = f"its config has no {error}" if isinstance(error, KeyError) else one_line(error)
        raise ValueError(f"{directory} cannot be used as a draft: {short(reason, 300)}") from error


def _recipe(config: dict[str, Any]) -> dict[str, int]:
    """How many tokens a round should draft, by this package's note or by speculators' config; or nothing."""
    try:
        window = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (LookupError, TypeError):
        window = None
    window = config.get("num_draft_tokens", window)
    return (
        {}
        if window is None
        else {"num_draft_tokens": require_int("its num_draft_tokens", window, 1, MAX_TOKENS)}
    )


def _read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    with (directory / name).open(encoding="utf-8") as file:
        text = file.read(_LARGEST_CONFIG + 1)
    try:
        config = json.loads(text) if len(text) <= _LARGEST_CONFIG else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"its {name} is damaged or too large: copy or download it again")
    return config


def _read_weights(directory: Path) -> dict[str, Tensor]:
    published = directory / "medusa_lm_head.safetensors"
    if not any(directory.glob("*.safetensors")):
        pickles = [
            path.name for pattern in ("*.pt", "*.bin") for path in sorted(directory.glob(pattern))
        ]
        if pickles:
            raise ValueError(
                f"{pickles[0]} could run code and is not read: convert it to model.safetensors"
            )
    files = [published] if published.is_file() else weight_files(directory)
    for file in files:
        read_header(file)
    return {name: value for file in files for name, value in safetensors.load_file(file).items()}


def _eagle(
    config: dict[str, Any], weights: dict[str, Tensor], target: LanguageModel
) -> tuple[Callable[[], Drafter], dict[str, Tensor]]:
    """How to build an autoregressive head, and its weights by the names here."""
    if (kind := config.get("speculators_model_type", "eagle3")) != "eagle3":
        raise ValueError(
            f"it is a {short(str(kind), 40)} draft, and only EAGLE-3 and Medusa's heads are read"
        )
    nested, eagle = config.get("transformer_layer_config"), config.get("eagle_config") or {}
    both = {**config, **(nested if isinstance(nested, dict) else {}), **eagle}
    if (family := both.get("model_type", "llama")) not in ("llama", "speculators"):
        raise ValueError(
            f"its layer is of {short(str(family), 40)}, and only layers of llama are read"
        )
    if lacking := [what for name, what in _REFUSED.items() if both.get(name)]:
        raise ValueError(f"it {lacking[0]}, which the heads of this package cannot")
    sizes = to_config(
        {**{name: both[name] for name in _SIZES if name in both}, "model_type": "llama"}
    )
    rotary: Any = sizes.rope_parameters
    if (scaling := rotary.get("rope_type", "default")) != "default":
        raise ValueError(
            f"it scales its rotary positions ({short(str(scaling), 40)}), and heads of this package do not"
        )
    if sizes.num_hidden_layers != 1 or sizes.hidden_act != "silu":
        raise ValueError("it has several layers or another activation than silu")
    layers = eagle.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        depth = target.num_layers or 0
        inputs = config.get("eagle_aux_hidden_state_layer_ids") or [2, depth // 2, depth - 3]
        layers = [each - 1 for each in inputs]
    if (target.num_layers or 0) - 1 in layers:
        raise ValueError(
            "it reads the target's last layer before the final norm, this package after it"
        )
    tokens = _draft_vocabulary(
        weights.pop("d2t", None), sizes.vocab_size, weights["lm_head.weight"]
    )
    weights.pop("t2d", None)
    embedding = weights.pop("embed_tokens.weight", None)
    weights = _joined(
        {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    )
    settings = EagleSettings(
        feature_layers=tuple(layers),
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        num_heads=sizes.num_attention_heads,
        num_key_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size,
        attention_window=both.get("sliding_window")
        if both.get("layer_types") == ["sliding_attention"]
        else None,
        draft_vocabulary=tokens,
        feature_norms=bool(both.get("fc_norm")),
        norm_output=bool(both.get("norm_output")),
        norm_before_residual=bool(both.get("norm_before_residual", nested is not None)),
        head_size=sizes.head_dim,
        rotary_base=rotary["rope_theta"],
        norm_eps=sizes.rms_norm_eps,
    )
    make = partial(EagleDrafter, **settings.to_dict())
    if embedding is not None:
        make().check_target(target)
        theirs = (
            target.embeddings(torch.arange(sizes.vocab_size, device=target.device)[None])[0]
            .float()
            .cpu()
        )
        if embedding.shape != theirs.shape or not torch.allclose(
            embedding.float(), theirs, rtol=0.01, atol=1e-3
        ):
            raise ValueError(
                "it has embeddings of its own, and the heads of this package share the target's"
            )
    return make, weights


def _draft_vocabulary(
    offsets: Tensor | None, vocab_size: int, output: Tensor
) -> tuple[int, ...] | None:
    """The target's numbers of the tokens that a head scores, from d2t; None where it scores all."""
    numbers = torch.arange(len(output))
    if offsets is not None:
        if offsets.shape != numbers.shape or offsets.is_floating_point():
            raise ValueError(
                f"its d2t has the shape {list(offsets.shape)}, and it scores {len(output)} tokens"
            )
        numbers = numbers + offsets.long()
    elif len(output) != vocab_size:
        raise ValueError(
            f"it scores {len(output)} of {vocab_size} tokens and has no d2t that says which"
        )
    if numbers.min() < 0 or numbers.max() >= vocab_size:
        raise ValueError(f"its d2t leaves the target's vocabulary of {vocab_size} tokens")
    return None if torch.equal(numbers, torch.arange(vocab_size)) else tuple(numbers.tolist())


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """An EAGLE-3 head's weights by the names here, in one type."""
    layer = "layers.0"
    found = {
        "query_key_value": torch.cat(
            [weights.pop(f"{layer}.self_attn.{each}.weight") for each in _QUERY_KEY_VALUE]
        )
    }
    found["gate_up"] = torch.cat([weights.pop(f"{layer}.mlp.{each}.weight") for each in _GATE_UP])
    names = {**_WHOLE, **{f"{layer}.{theirs}": ours for theirs, ours in _LAYER.items()}}
    for name, value in weights.items():
        own = name.removesuffix(".weight")
        found[names.get(own, own.replace("fc_norm.", "layer_norms."))] = value
    kinds = {value.dtype for value in found.values()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    return {f"network.{name}.weight": value.to(dtype) for name, value in found.items()}


def _medusa(
    config: dict[str, Any], weights: dict[str, Tensor]
) -> tuple[Callable[[], Drafter], dict[str, Tensor]]:
    """How to build heads, and their weights by the names here."""
    if "token_map" in weights:
        raise ValueError("its heads score only some tokens (token_map), in an unsupported order")
    weights = {name.removeprefix("medusa_heads."): value for name, value in weights.items()}
    num_heads, num_blocks = (
        require_int(f"medusa_{name}", config.get(f"medusa_{name}", config.get(other)), 1, 64)
        for name, other in _MEDUSA
    )
    output = weights[f"0.{num_blocks}.weight"]
    vocab_size, hidden_size = output.shape
    for i in range(num_heads):
        for j in range(num_blocks):
            weights.setdefault(f"{i}.{j}.linear.bias", output.new_zeros(hidden_size))
    make = partial(
        MultiTokenDrafter,
        num_heads,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
    )
    return make, {f"heads.{name}": value for name, value in weights.items()}
