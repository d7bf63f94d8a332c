"""Convert drafts between this package's weights and the files of other programs.

EAGLE-3 heads as speculators and SpecForge write them and Medusa heads are written and read; block
drafters are written as DSpark, in the form that vLLM reads.

A directory contains `config.json` and safetensors files; nothing in it is run. speculators (and
vLLM) count the target's layers by their inputs and name the head's layer `layers.0`; SpecForge (and
SGLang) count them by their outputs and name it `midlayer`. This package counts by outputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
from lightning_specdec.drafters import BlockDrafter, Drafter, EagleDrafter, MedusaDrafter
from lightning_specdec.drafters.eagle import FeatureDrafter
from lightning_specdec.drafters.eagle_network import EagleSettings
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.model_config import to_config
from lightning_specdec.models.safetensors_file import read_header, weight_files

ORIGIN = "lightning_specdec.json"
"""This package's file among an engine's: the draft's target and recommended draft tokens."""

_MAX_CONFIG_CHARACTERS = 2**20
_MAX_POSITIONS = 2**20
_MAX_MEDUSA_HEADS = 64

# Names of weights: those of the engines, then those of this package.
_HEAD_NAMES = {"fc": "join", "norm": "output_norm", "lm_head": "output"}
_EAGLE_LAYER_NAMES = {
    "input_layernorm": "token_norm",
    "hidden_norm": "feature_norm",
    "post_attention_layernorm": "inner_norm",
    "self_attn.o_proj": "attention_output",
    "mlp.down_proj": "down",
}
_BLOCK_LAYER_NAMES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "inner_norm",
    "self_attn.q_proj": "query",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "self_attn.o_proj": "attention_output",
    "mlp.down_proj": "down",
}
# Weights that this package joins into one matrix.
_QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
_KEY_VALUE = ("k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")

_UNSUPPORTED = {
    "norm_before_fc": "normalizes the joined features (norm_before_fc)",
    "attention_bias": "has biases in its attention (attention_bias)",
    "mlp_bias": "has biases in its MLP (mlp_bias)",
    "quantization_config": "is quantized (quantization_config)",
}
"""Settings of other programs' heads that `EagleNetwork` does not support."""
_LAYER_SETTINGS = (
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
)


def eagle_tensors(drafter: EagleDrafter, layer: str) -> dict[str, Tensor]:
    """Return an EAGLE-3 head's weights by the engines' names; `layer` is the name of its layer."""
    network = drafter.network
    settings = drafter.settings
    weights = {name: value.detach() for name, value in network.named_parameters()}

    query_rows = settings.num_heads * network.head_size
    key_rows = settings.num_key_heads * network.head_size
    query_key_value = weights["query_key_value.weight"].split([query_rows, key_rows, key_rows])

    tensors = {
        **_renamed(weights, _HEAD_NAMES),
        **_renamed(weights, _EAGLE_LAYER_NAMES, engine_prefix=f"{layer}."),
        **_named_parts(query_key_value, f"{layer}.self_attn", _QUERY_KEY_VALUE),
        **_named_parts(weights["gate_up.weight"].chunk(2), f"{layer}.mlp", _GATE_UP),
    }
    if settings.feature_norms:
        for i, feature_index in enumerate(_sorted_indices(settings.feature_layers)):
            tensors[f"fc_norm.{i}.weight"] = weights[f"layer_norms.{feature_index}.weight"]
    return _stored(tensors, drafter)


def _renamed(
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
    *,
    engine_prefix: str = "",
    prefix: str = "",
) -> dict[str, Tensor]:
    """Return weights by an engine's names, each with a prefix."""
    return {
        f"{engine_prefix}{engine_name}.weight": weights[f"{prefix}{name}.weight"]
        for engine_name, name in names.items()
    }


def _named_parts(parts: Sequence[Tensor], module: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the parts of a joined matrix by their names within a module."""
    return {f"{module}.{name}.weight": part for name, part in zip(names, parts, strict=True)}


def _sorted_indices(values: Sequence[int]) -> list[int]:
    """Return the indices that sort the values, like `argsort`."""
    return sorted(range(len(values)), key=values.__getitem__)


def _stored(tensors: dict[str, Tensor], drafter: FeatureDrafter) -> dict[str, Tensor]:
    """Return tensors as engines store them.

    Engines sort the target's layers that a draft reads, and list the tokens that it scores.
    """
    layers = drafter.settings.feature_layers
    columns = tensors["fc.weight"].chunk(len(layers), dim=1)
    tensors["fc.weight"] = torch.cat([columns[i] for i in _sorted_indices(layers)], dim=1)

    if drafter.draft_vocabulary is not None:
        target_ids = drafter.draft_vocabulary.tokens.cpu()
        # d2t has the distance from each draft token's id to its id in the target's vocabulary.
        tensors["d2t"] = target_ids - torch.arange(len(target_ids))
        is_scored = torch.zeros(drafter.settings.vocab_size, dtype=torch.bool)
        is_scored[target_ids] = True
        tensors["t2d"] = is_scored
    return {name: value.cpu().contiguous().clone() for name, value in tensors.items()}


def block_tensors(drafter: BlockDrafter, table: Tensor) -> dict[str, Tensor]:
    """Return a block drafter's weights by DSpark's names.

    Args:
        table: the target's embeddings. They are stored with the draft, because the mask is a token
            that the target does not have.
    """
    network = drafter.network
    settings = drafter.settings
    weights = {name: value.detach() for name, value in network.named_parameters()}

    tensors = _renamed(weights, {**_HEAD_NAMES, "hidden_norm": "context_norm"})
    for i in range(settings.num_layers):
        layer = f"layers.{i}"
        prefix = f"{layer}."
        key_value = weights[f"{layer}.key_value.weight"].chunk(2)
        gate_up = weights[f"{layer}.gate_up.weight"].chunk(2)
        tensors.update(_renamed(weights, _BLOCK_LAYER_NAMES, engine_prefix=prefix, prefix=prefix))
        tensors.update(_named_parts(key_value, f"{layer}.self_attn", _KEY_VALUE))
        tensors.update(_named_parts(gate_up, f"{layer}.mlp", _GATE_UP))

    # DSpark does not scale the anchor's embedding, so the stored embeddings are scaled.
    mask = weights["mask"]
    scaled_embeddings = weights["anchor_scale"] * table.to(mask)
    tensors["embed_tokens.weight"] = torch.cat([scaled_embeddings, mask[None]])

    tensors.update(_markov_tensors(drafter, weights))
    tensors["confidence_head.proj.weight"] = weights["confidence.weight"]
    tensors["confidence_head.proj.bias"] = weights["confidence.bias"]
    return _stored(tensors, drafter)


def _markov_tensors(drafter: BlockDrafter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a block drafter's Markov head.

    DSpark requires one, so a draft without it gets one of rank 1 that adds nothing.
    """
    settings = drafter.settings
    output = weights["output.weight"]
    rank = max(1, settings.markov_rank)

    # DSpark looks up the previous token by its id in the target's vocabulary, or the mask's id.
    embeddings = output.new_zeros(settings.vocab_size + 1, rank)
    projection = output.new_zeros(len(output), rank)
    if settings.markov_rank:
        if drafter.draft_vocabulary is None:
            target_ids = torch.arange(settings.vocab_size)
        else:
            target_ids = drafter.draft_vocabulary.tokens
        embeddings[target_ids] = weights["markov_input.weight"]
        projection = weights["markov_output.weight"]
    return {
        "markov_head.markov_w1.weight": embeddings,
        "markov_head.markov_w2.weight": projection,
    }


def block_config(drafter: BlockDrafter, target: str) -> dict[str, Any]:
    """Return the config of a block drafter as speculators writes DSpark's."""
    settings = drafter.settings
    has_window = settings.attention_window is not None
    layer_type = "sliding_attention" if has_window else "full_attention"
    layer = {
        **_layer_config(drafter, "qwen3", settings.num_layers),
        # The mask is one more token.
        "vocab_size": settings.vocab_size + 1,
        # Without it, vLLM takes attention windows for causal ones.
        "is_causal": False,
        "layer_types": [layer_type] * settings.num_layers,
    }
    return {
        "architectures": ["Qwen3DSparkModel"],
        "speculators_model_type": "dspark",
        "draft_vocab_size": drafter.num_tokens,
        "target_hidden_size": settings.hidden_size,
        "aux_hidden_state_layer_ids": _input_layers(settings.feature_layers),
        "use_aux_hidden_state": True,
        "mask_token_id": settings.vocab_size,
        "sample_from_anchor": True,
        "block_size": settings.block_size,
        "markov_rank": max(1, settings.markov_rank),
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": settings.markov_rank > 0,
        "dtype": _dtype_name(drafter.network.dtype),
        "transformer_layer_config": layer,
        "speculators_config": _speculators_config("dspark", target, settings.block_size),
    }


def eagle_config(
    drafter: EagleDrafter,
    target: str,
    num_draft_tokens: int,
    *,
    nested: bool,
) -> dict[str, Any]:
    """Return the config of an EAGLE-3 head, as speculators writes it (`nested`) or as SpecForge."""
    settings = drafter.settings
    layer = {
        **_layer_config(drafter, "llama", 1),
        "num_aux_hidden_states": len(settings.feature_layers),
    }
    if settings.attention_window is not None:
        layer["layer_types"] = ["sliding_attention"]
    head = {
        "draft_vocab_size": drafter.num_tokens,
        "target_hidden_size": settings.hidden_size,
        "norm_before_residual": settings.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": settings.feature_norms,
        "norm_output": settings.norm_output,
        "dtype": _dtype_name(drafter.network.dtype),
    }

    if not nested:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **head,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": sorted(settings.feature_layers),
                "use_aux_hidden_state": True,
            },
        }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        **head,
        "eagle_aux_hidden_state_layer_ids": _input_layers(settings.feature_layers),
        "transformer_layer_config": layer,
        "speculators_config": _speculators_config("eagle3", target, num_draft_tokens),
    }


def _input_layers(feature_layers: Sequence[int]) -> list[int]:
    """Return layers as speculators counts them: the output of layer i is the input of i + 1."""
    return [layer + 1 for layer in sorted(feature_layers)]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_config(drafter: FeatureDrafter, model_type: str, num_layers: int) -> dict[str, Any]:
    """Return the sizes of a draft's layers.

    Everything is stated: vLLM has no defaults for a nested config, and those of others differ.
    """
    settings = drafter.settings
    config = {
        "model_type": model_type,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_key_heads,
        "head_dim": drafter.network.head_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": _MAX_POSITIONS,
        "rms_norm_eps": settings.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rotary_base},
    }
    if settings.attention_window is not None:
        config["sliding_window"] = settings.attention_window
    return config


def _speculators_config(algorithm: str, target: str, num_draft_tokens: int) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": target, "architectures": []},
    }


def medusa_files(drafter: MedusaDrafter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of Medusa heads."""
    settings = drafter.settings
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": settings.num_heads,
        "medusa_num_layers": settings.num_blocks,
        "medusa_fc_bias": True,
        "hidden_size": settings.hidden_size,
        "vocab_size": settings.vocab_size,
        "dtype": _dtype_name(next(drafter.parameters()).dtype),
    }
    weights = drafter.heads.state_dict()
    tensors = {name: value.cpu().contiguous().clone() for name, value in weights.items()}
    return config, tensors


def is_head(directory: Path) -> bool:
    """Whether a directory contains a head rather than a language model."""
    try:
        config = _read_config(directory)
    except (OSError, ValueError):
        return False
    if config.get("model_type") == "medusa":
        return True
    names = ("speculators_model_type", "draft_vocab_size", "eagle_config", "medusa_num_heads")
    return any(name in config for name in names)


def read_head(directory: Path, target: LanguageModel) -> tuple[Drafter, dict[str, int]]:
    """Return the head in a directory, and how many draft tokens its files recommend, if any.

    Args:
        target: the model that it drafts for.

    Raises:
        ValueError: the directory is damaged or contains no head, the head has parts that this
            package does not support, or it belongs to another target.
    """
    try:
        config = _read_config(directory)
        note = {}
        if (directory / ORIGIN).is_file():
            note = _read_config(directory, ORIGIN)
        # Directories of other programs do not say which weights the head was trained for.
        if "target" in note:
            TargetReference.from_document(note).check(target, "it")

        weights = _read_weights(directory)
        model_type = config.get("speculators_model_type", config.get("model_type"))
        if model_type == "medusa" or "medusa_num_heads" in config:
            make_drafter, weights = _medusa(config, weights)
        else:
            make_drafter, weights = _eagle(config, weights, target)

        drafter: Drafter = with_weights(make_drafter, "head", weights)
        drafter.check_target(target)
        return drafter, _recipe(config, note)
    except BROKEN as error:
        reason = one_line(error)
        if isinstance(error, KeyError):
            reason = f"its config has no {error}"
        raise ValueError(f"{directory} cannot be used as a draft: {short(reason, 300)}") from error


def _recipe(config: Mapping[str, Any], note: Mapping[str, Any]) -> dict[str, int]:
    """Return the recommended number of draft tokens, if this package or speculators noted it."""
    settings = {**config, **note}
    try:
        method = settings["speculators_config"]["proposal_methods"][0]
        num_draft_tokens = method["speculative_tokens"]
    except (LookupError, TypeError):
        num_draft_tokens = None

    num_draft_tokens = settings.get("num_draft_tokens", num_draft_tokens)
    if num_draft_tokens is None:
        return {}
    require_int("its num_draft_tokens", num_draft_tokens, 1, MAX_TOKENS)
    return {"num_draft_tokens": num_draft_tokens}


def _read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """Return the values in a JSON file of bounded size."""
    with (directory / name).open(encoding="utf-8") as file:
        text = file.read(_MAX_CONFIG_CHARACTERS + 1)
    config = None
    if len(text) <= _MAX_CONFIG_CHARACTERS:
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            config = None
    if not isinstance(config, dict):
        raise ValueError(f"its {name} is damaged or too large: copy or download it again")
    return config


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the tensors in a directory's safetensors files."""
    if not any(directory.glob("*.safetensors")):
        pickles = [*sorted(directory.glob("*.pt")), *sorted(directory.glob("*.bin"))]
        if pickles:
            raise ValueError(
                f"{pickles[0].name} could run code and is not read: convert it to model.safetensors"
            )

    # The name that Medusa's authors publish heads under.
    medusa_file = directory / "medusa_lm_head.safetensors"
    files = [medusa_file] if medusa_file.is_file() else weight_files(directory)

    # Check every file before the weights of any are read.
    for file in files:
        read_header(file)
    weights: dict[str, Tensor] = {}
    for file in files:
        weights.update(safetensors.load_file(file))
    return weights


def _eagle(
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    target: LanguageModel,
) -> tuple[Callable[[], Drafter], dict[str, Tensor]]:
    """Return a function that builds an EAGLE-3 head, and its weights by this package's names."""
    merged = _merged_config(config)
    _check_supported(config, merged)
    layer = _layer_sizes(merged)
    feature_layers = _feature_layers(config, target)

    # t2d follows from d2t. The embeddings are the target's, which `_check_embeddings` verifies.
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    embeddings = weights.pop("embed_tokens.weight", None)
    draft_vocabulary = _draft_vocabulary(offsets, layer.vocab_size, weights["lm_head.weight"])

    has_window = merged.get("layer_types") == ["sliding_attention"]
    is_nested = config.get("transformer_layer_config") is not None
    settings = EagleSettings(
        feature_layers=feature_layers,
        hidden_size=layer.hidden_size,
        vocab_size=layer.vocab_size,
        num_heads=layer.num_attention_heads,
        num_key_heads=layer.num_key_value_heads,
        intermediate_size=layer.intermediate_size,
        attention_window=merged.get("sliding_window") if has_window else None,
        draft_vocabulary=draft_vocabulary,
        feature_norms=bool(merged.get("fc_norm")),
        norm_output=bool(merged.get("norm_output")),
        # Without this setting, heads of speculators do it and those of SpecForge do not.
        norm_before_residual=bool(merged.get("norm_before_residual", is_nested)),
        head_size=layer.head_dim,
        rotary_base=layer.rope_parameters["rope_theta"],
        norm_eps=layer.rms_norm_eps,
    )
    make_drafter = partial(EagleDrafter, **settings.to_dict())

    if embeddings is not None:
        # A wrong vocabulary is reported before the embeddings of both are compared.
        make_drafter().check_target(target)
        _check_embeddings(embeddings, target, layer.vocab_size)
    return make_drafter, _joined(weights)


def _merged_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a head's config on one level; speculators and SpecForge nest different parts of it."""
    merged = dict(config)
    layer_config = config.get("transformer_layer_config")
    if isinstance(layer_config, dict):
        merged.update(layer_config)
    merged.update(config.get("eagle_config") or {})
    return merged


def _check_supported(config: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Raise ValueError if a head is of another kind, or has parts that `EagleNetwork` lacks."""
    algorithm = config.get("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        raise ValueError(
            f"it is a {short(str(algorithm), 40)} draft, and only EAGLE-3 and Medusa heads are read"
        )
    model_type = merged.get("model_type", "llama")
    if model_type not in ("llama", "speculators"):
        raise ValueError(
            f"its layer is of {short(str(model_type), 40)}, and only Llama layers are read"
        )
    for name, description in _UNSUPPORTED.items():
        if merged.get(name):
            raise ValueError(f"it {description}, which this package's heads do not support")


def _layer_sizes(merged: Mapping[str, Any]) -> Any:
    """Return the sizes of a head's layer as a transformers config, with its defaults."""
    values = {name: merged[name] for name in _LAYER_SETTINGS if name in merged}
    layer = to_config({**values, "model_type": "llama"})

    rotary: Any = layer.rope_parameters
    scaling = rotary.get("rope_type", "default")
    if scaling != "default":
        raise ValueError(
            f"it scales its rotary positions ({short(str(scaling), 40)}), "
            "which this package's heads do not support"
        )
    if layer.num_hidden_layers != 1 or layer.hidden_act != "silu":
        raise ValueError("it has several layers or another activation than silu")
    return layer


def _feature_layers(config: Mapping[str, Any], target: LanguageModel) -> tuple[int, ...]:
    """Return the target's layers that a head reads, counted by their outputs."""
    num_layers = target.num_layers or 0
    eagle_config = config.get("eagle_config") or {}
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        input_layers = config.get("eagle_aux_hidden_state_layer_ids")
        if not input_layers:
            # The default of engines.
            input_layers = [2, num_layers // 2, num_layers - 3]
        layers = [layer - 1 for layer in input_layers]

    if num_layers - 1 in layers:
        raise ValueError(
            "it reads the target's last layer before the final norm, this package after it"
        )
    return tuple(layers)


def _check_embeddings(embeddings: Tensor, target: LanguageModel, vocab_size: int) -> None:
    """Raise ValueError unless a head's embeddings are the target's."""
    target_ids = torch.arange(vocab_size, device=target.device)
    target_embeddings = target.embeddings(target_ids[None])[0].float().cpu()

    # Files may store them in half precision.
    is_same = embeddings.shape == target_embeddings.shape and torch.allclose(
        embeddings.float(), target_embeddings, rtol=0.01, atol=1e-3
    )
    if not is_same:
        raise ValueError("it has separate embeddings, and this package's heads share the target's")


def _draft_vocabulary(
    offsets: Tensor | None,
    vocab_size: int,
    output: Tensor,
) -> tuple[int, ...] | None:
    """Return the target's ids of the tokens that a head scores, or None if it scores all.

    Args:
        offsets: d2t, the distance from each draft token's id to its id in the target's vocabulary.
        vocab_size: size of the target's vocabulary.
        output: the head's output matrix, one row for each token.
    """
    draft_ids = torch.arange(len(output))
    target_ids = draft_ids
    if offsets is not None:
        if offsets.shape != draft_ids.shape or offsets.is_floating_point():
            raise ValueError(
                f"its d2t has the shape {list(offsets.shape)}, and it scores {len(output)} tokens"
            )
        target_ids = draft_ids + offsets.long()
    elif len(output) != vocab_size:
        raise ValueError(
            f"it scores {len(output)} of {vocab_size} tokens and has no d2t that maps them"
        )

    if target_ids.min() < 0 or target_ids.max() >= vocab_size:
        raise ValueError(f"its d2t leaves the target's vocabulary of {vocab_size} tokens")
    if torch.equal(target_ids, torch.arange(vocab_size)):
        return None
    return tuple(target_ids.tolist())


def _joined(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an EAGLE-3 head's weights by this package's names, in one dtype."""
    layer = "layers.0"
    # SpecForge's name of the layer.
    weights = {name.replace("midlayer.", f"{layer}."): value for name, value in weights.items()}
    query_key_value = [weights.pop(f"{layer}.self_attn.{name}.weight") for name in _QUERY_KEY_VALUE]
    gate_up = [weights.pop(f"{layer}.mlp.{name}.weight") for name in _GATE_UP]
    tensors = {
        "query_key_value": torch.cat(query_key_value),
        "gate_up": torch.cat(gate_up),
    }

    names = dict(_HEAD_NAMES)
    for engine_name, name in _EAGLE_LAYER_NAMES.items():
        names[f"{layer}.{engine_name}"] = name
    for weight_name, value in weights.items():
        engine_name = weight_name.removesuffix(".weight")
        # A name that is neither in the table nor a norm stays, and loading reports it.
        name = names.get(engine_name, engine_name.replace("fc_norm.", "layer_norms."))
        tensors[name] = value

    # A network computes in one dtype; files may mix them, such as norms in float32.
    dtypes = {value.dtype for value in tensors.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {f"network.{name}.weight": value.to(dtype) for name, value in tensors.items()}


def _medusa(
    config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[Callable[[], Drafter], dict[str, Tensor]]:
    """Return a function that builds Medusa heads, and their weights by this package's names."""
    if "token_map" in weights:
        raise ValueError("its heads score only some tokens (token_map), in an unsupported order")
    weights = {name.removeprefix("medusa_heads."): value for name, value in weights.items()}
    num_heads = _medusa_count(config, "medusa_num_heads", "num_heads")
    num_blocks = _medusa_count(config, "medusa_num_layers", "num_hidden_layers")

    output = weights[f"0.{num_blocks}.weight"]
    vocab_size, hidden_size = output.shape
    for head_index in range(num_heads):
        for block_index in range(num_blocks):
            # Heads may have no biases, the blocks of this package have.
            bias_name = f"{head_index}.{block_index}.linear.bias"
            weights.setdefault(bias_name, output.new_zeros(hidden_size))

    make_drafter = partial(
        MedusaDrafter,
        num_heads,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
    )
    return make_drafter, {f"heads.{name}": value for name, value in weights.items()}


def _medusa_count(config: Mapping[str, Any], name: str, vllm_name: str) -> int:
    """Return a number from Medusa's config, or from vLLM's, which has other names."""
    count = config.get(name, config.get(vllm_name))
    return require_int(name, count, 1, _MAX_MEDUSA_HEADS)
