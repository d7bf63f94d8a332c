"""Build multi-token prediction layers of the form that a config describes, by transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import (
    FOREIGN,
    first_line,
    quiet,
    to_config,
    to_values,
)
from lightning_specdec.models.mtp import BLOCK_KINDS, KINDS, Blocks, MtpNetwork

with quiet():
    from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_WITHOUT_POST_NORM = ("ernie4_5_moe",)
"""Families whose prediction layers end with the decoder layer."""


def new_mtp(target: HuggingFaceLM, num_layers: int) -> MtpNetwork:
    """Prediction layers of this target with random weights, on its device.

    Raises:
        ValueError: none can be built from the decoder layers of the target's family.
    """
    try:
        config = with_layers(target.config, num_layers)
        network = MtpNetwork(build_layers(target.model, config, num_layers))
    except FOREIGN as error:
        raise ValueError(
            f"no prediction layers can be built for {type(target.model).__name__}: "
            f"{first_line(error)}"
        ) from error
    # The class of transformers leaves weights of experts uninitialized.
    standard_deviation = getattr(config, "initializer_range", None) or 0.02
    for weight in network.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=standard_deviation)
    return network.to(target.device)


def transformers_drafts(target: HuggingFaceLM) -> bool:
    """Whether transformers itself builds prediction layers for a target, and drafts with them."""
    try:
        target.config.get_mtp_config()
    except FOREIGN:
        return False
    return True


def with_layers(
    config: PreTrainedConfig,
    num_layers: int,
    kinds: Mapping[str, Sequence[str]] | None = None,
) -> PreTrainedConfig:
    """A copy of a config that also describes its prediction layers.

    Args:
        kinds: of the layers, by the setting of the model's layers that lists them. Where neither
            they nor the config say it, layers are like the last one of the model that can draft.
    """
    completed = deepcopy(config)
    completed.num_mtp_layers = num_layers
    block_kinds = getattr(completed, BLOCK_KINDS, None)
    for name in ("layer_types", "mlp_layer_types"):
        model_kinds = getattr(completed, name, None)
        # Some families compute the kinds of their prediction layers from other settings.
        is_computed = isinstance(getattr(type(completed), f"mtp_{name}", None), property)
        if not model_kinds or is_computed:
            continue
        if name == "layer_types" and block_kinds is not None:
            completed.mtp_layer_types = list(block_kinds) * num_layers
        elif kinds is not None and name in kinds:
            setattr(completed, f"mtp_{name}", list(kinds[name]))
        elif getattr(completed, f"mtp_{name}", None) is None:
            usable_kinds = [kind for kind in model_kinds if name != "layer_types" or kind in KINDS]
            last_kind = [*model_kinds[-1:], *usable_kinds][-1]
            setattr(completed, f"mtp_{name}", [last_kind] * num_layers)
        else:
            listed_kinds = getattr(completed, f"mtp_{name}")
            setattr(completed, f"mtp_{name}", list(listed_kinds)[:num_layers])

    # Layers are counted from 0, and experts are in every one of them.
    if hasattr(completed, "mlp_only_layers"):
        completed.mlp_only_layers = []
        completed.decoder_sparse_step = 1
    if completed.model_type in _WITHOUT_POST_NORM:
        completed.chain_hidden_post_norm = False
        completed.moe_layer_start_index = num_layers
    if getattr(completed, "rms_norm_eps", None) is None:
        completed.rms_norm_eps = getattr(completed, "layer_norm_epsilon", None)
    return completed


def described(network: MtpNetwork) -> dict[str, Any]:
    """The config of the layers in plain values, from which `from_values` builds them again.

    Raises:
        ValueError: their weights are of several dtypes, and a file holds one.
    """
    dtypes = {weight.dtype for weight in network.state_dict().values()}
    if len(dtypes) > 1:
        raise ValueError(
            "prediction layers keep some weights in float32, and a draft file holds one dtype: "
            "load the target with dtype='float32' to save them"
        )
    return to_values(network.config)


def from_values(values: Mapping[str, Any], num_layers: int) -> MtpNetwork:
    """Layers whose config is described by plain values, with random weights.

    Raises:
        ValueError: the values describe no model with prediction layers.
    """
    described_config = to_config(values)
    kinds = {}
    for name in ("layer_types", "mlp_layer_types"):
        # They are those of the prediction layers.
        if getattr(described_config, name, None):
            kinds[name] = getattr(described_config, name)
    config = with_layers(described_config, num_layers, kinds)
    try:
        # Only the classes of this model's layers are needed.
        with torch.device("meta"):
            main_model = AutoModelForCausalLM.from_config(config)
        return MtpNetwork(build_layers(main_model, config, num_layers))
    except FOREIGN as error:
        raise ValueError(f"no prediction layers can be built: {first_line(error)}") from error


class _MainModel:
    """What transformers asks of a model to build its prediction layers, without its weights.

    transformers would initialize weights that are shared with the layers again.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self.config = config
        self.lm_head = nn.Identity()
        decoder: Any = model.get_decoder()
        layers = _example_layers([*decoder.layers], config)
        self._decoder = SimpleNamespace(layers=layers)

    def get_decoder(self) -> SimpleNamespace:
        return self._decoder

    def get_input_embeddings(self) -> nn.Module:
        return nn.Identity()


def _example_layers(layers: Sequence[nn.Module], config: PreTrainedConfig) -> list[nn.Module]:
    """Layers of a model, of which the last has the classes that prediction layers have.

    transformers takes the class of norms from the first one within this layer, which may be a
    special one in layers of another kind.
    """
    if getattr(config, BLOCK_KINDS, None) is not None:
        block_class = type(layers[-1])
        blocks = type("Blocks", (Blocks,), {"block_class": block_class})
        # Only its class and the norm of a block are read.
        example: Any = nn.Module.__new__(blocks)
        nn.Module.__init__(example)
        example.blocks = nn.ModuleList(layers[-1:])
        return [example]
    kinds = getattr(config, "layer_types", None) or []
    wanted_kinds = getattr(config, "mtp_layer_types", None) or []
    for layer, kind in reversed([*zip(layers, kinds, strict=False)]):
        if kind in wanted_kinds:
            return [layer]
    return list(layers)


def build_layers(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    num_layers: int,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The prediction layers of a model as transformers builds them, an `MtpModel`.

    Args:
        model: has layers of the same class.
        config: describes the layers.
        dtype: of layers without memory, for weights that are loaded next; if None, the layers have
            random weights.

    Raises:
        ValueError: this version of transformers builds none.
    """
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError as error:
        raise ValueError(
            "multi-token prediction layers need transformers 5.23 or later: update it"
        ) from error

    main_model: Any = _MainModel(model, config)
    with ExitStack() as contexts:
        if dtype is not None:
            for context in MtpModel.get_init_context(dtype, False, False, None):
                contexts.enter_context(context)
        return MtpModel(main_model, num_layers)
