"""Some of a transformers model's own layers as a smaller model, with weights of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_specdec.checks import require_int
from lightning_specdec.models.config_file import first_line
from lightning_specdec.models.config_values import to_values
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack


def with_layers(target: HuggingFaceLM, layers: Sequence[int]) -> HuggingFaceLM:
    """A copy of a model with these of its layers, one behind the other, in float32: ready to be trained.

    Theory: most layers of a trained transformer change the hidden states a little, so it says something sensible
    without some of them, and learns quickly to make up for them (Sanh et al. 2019, "DistilBERT"; Men et al. 2024,
    "ShortGPT"). Embeddings, final norm and output head are copied too, and stay tied where they are.

    Args:
        target: the model; it stays as it is.
        layers: ascending numbers of its layers, from 0.

    Raises:
        ValueError: it has no such layers, they are not ascending, or its layers cannot be put together so.
    """
    stack = LayerStack(target.model)
    chosen = [require_int("a layer", layer, 0, stack.num_layers - 1) for layer in layers]
    if not chosen or any(after <= before for before, after in zip(chosen, chosen[1:], strict=False)):
        raise ValueError(f"layers must ascend, each once, got {list(layers)}: as [0, {stack.num_layers - 1}]")
    (prefix,) = (name for name, module in target.model.named_modules() if module is stack.layers)
    model = HuggingFaceLM(_config(target, chosen), tokenizer=target.tokenizer).float()
    try:
        model.model.load_state_dict(_weights(target.model.state_dict(), prefix, chosen))
    except RuntimeError as error:
        raise ValueError(
            f"{type(target.model).__name__} with the layers {chosen} cannot be built: {first_line(error)}; take plain "
            "weights, and layers of one kind"
        ) from error
    return model.eval()


def _config(target: HuggingFaceLM, layers: Sequence[int]) -> Mapping[str, Any]:
    """The model's config with fewer layers: lists that have a value for each layer have these layers' values."""
    config = target.model.config
    values, number = to_values(config), config.num_hidden_layers
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, list | tuple) and len(value) == number:
            values[name] = [value[layer] for layer in layers]
    return {**values, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"): len(layers)}


def _weights(weights: Mapping[str, Tensor], prefix: str, layers: Sequence[int]) -> dict[str, Tensor]:
    """The weights of these layers under their new numbers, and all that belong to no layer."""
    places = {layer: place for place, layer in enumerate(layers)}
    found = {}
    for name, weight in weights.items():
        inside = re.match(rf"{re.escape(prefix)}\.(\d+)\.", name)
        if inside is None:
            found[name] = weight
        elif int(inside[1]) in places:
            found[f"{prefix}.{places[int(inside[1])]}.{name[inside.end() :]}"] = weight
    return found
