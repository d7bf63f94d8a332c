"""Find, load, and store multi-token prediction layers in the checkpoint of a target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.hub import is_gguf
from lightning_specdec.models.base import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import quantization_settings
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet
from lightning_specdec.models.mtp import BLOCK_KINDS, FULL, MtpNetwork
from lightning_specdec.models.mtp_building import build_layers, with_layers
from lightning_specdec.models.mtp_layout import (
    BLOCK,
    SCALE,
    Layout,
    attention_kind,
    default_layout,
    is_of_prediction_layer,
    is_shared,
    layout_of,
    num_stored_layers,
)
from lightning_specdec.models.safetensors_file import StoredTensor, stored_tensors, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64")
_EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2")
_DEFAULT_BLOCK_SHAPE = (128, 128)
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def num_mtp_layers(target: LanguageModel) -> int:
    """How many prediction layers the config of a target lists; 0 if it does not list any."""
    if not isinstance(target, HuggingFaceLM):
        return 0
    return int(getattr(target.config, "num_mtp_layers", None) or 0)


@dataclass(frozen=True)
class StoredLayers:
    """The prediction layers in a checkpoint's files.

    Args:
        weights: of these layers, by name.
        others: shapes of all other weights, by name.
        num_listed: how many layers the config lists; 0 if transformers does not build them.
    """

    directory: Path
    config: PreTrainedConfig
    weights: Mapping[str, StoredTensor]
    others: Mapping[str, list[int]]
    num_listed: int

    @property
    def layout(self) -> Layout:
        """The names of their weights.

        Raises:
            ValueError: there are layers under other names than those of any known family.
        """
        num_blocks = len(getattr(self.config, BLOCK_KINDS, None) or [FULL])
        layout = layout_of(self.weights, num_blocks)
        if layout is None or num_stored_layers(self.weights, layout, self._first_number) == 0:
            raise ValueError(f"the form of these layers is not known (as {min(self.weights)})")
        return layout

    @property
    def num_layers(self) -> int:
        return self.num_listed or num_stored_layers(self.weights, self.layout, self._first_number)

    @property
    def _first_number(self) -> int:
        return int(self.config.num_hidden_layers)

    def by_path(self, num_layers: int) -> dict[str, str]:
        """Names of the weights, by the names that transformers reads them under.

        These are those of further layers of the model, whose layout transformers converts.

        Args:
            num_layers: how many of the layers are read, from the first one on.
        """
        layout = self.layout
        names = {}
        for name in self.weights:
            if is_shared(name):
                continue
            path = layout.path(name, self.num_layers, self._first_number)
            readable_name = name
            if path is not None:
                index, weight_name = path
                if index >= num_layers:
                    continue
                weight_name = weight_name.removeprefix(f"{BLOCK}.")
                readable_name = f"model.layers.{self._first_number + index}.{weight_name}"
            names[readable_name] = name
        return names

    def completed_config(self, num_layers: int) -> PreTrainedConfig:
        """The config of the model with the kinds of these layers.

        Where the config does not list them, they follow from the names and shapes of the weights.
        """
        layout = self.layout
        layers: list[dict[str, list[int]]] = [{} for _ in range(num_layers)]
        for name, weight in self.weights.items():
            path = layout.path(name, num_layers, self._first_number)
            if path is not None:
                index, weight_name = path
                layers[index][weight_name.removeprefix(f"{BLOCK}.")] = weight.shape

        kinds = {}
        has_kinds = bool(getattr(self.config, "layer_types", None))
        if has_kinds and getattr(self.config, "mtp_layer_types", None) is None:
            kinds["layer_types"] = [
                attention_kind(self.config, layer, self.others) for layer in layers
            ]
        if getattr(self.config, "mtp_mlp_layer_types", None) is None:
            kinds["mlp_layer_types"] = [
                "sparse" if any("experts" in name for name in layer) else "dense"
                for layer in layers
            ]
        return with_layers(self.config, num_layers, kinds)


def find_layers(target: HuggingFaceLM) -> StoredLayers | None:
    """The prediction layers in the checkpoint of a target; None if there are none."""
    directory = _directory(target)
    if directory is None:
        return None
    num_layers = getattr(target.config, "num_hidden_layers", None)
    weights: dict[str, StoredTensor] = {}
    others: dict[str, list[int]] = {}
    for path in weight_files(directory):
        for name, weight in stored_tensors(path).items():
            if is_of_prediction_layer(name, num_layers):
                weights[name] = weight
            else:
                others[name] = weight.shape
    if not weights:
        return None
    return StoredLayers(directory, target.config, weights, others, num_mtp_layers(target))


def reason_against_mtp(target: LanguageModel) -> str | None:
    """Why no prediction layers of its checkpoint can draft for a target; None if they can."""
    if not isinstance(target, HuggingFaceLM):
        return f"{type(target).__name__} has no multi-token prediction layers"
    directory = _directory(target)
    if directory is None:
        return (
            f"{type(target.model).__name__} was not loaded from a checkpoint in safetensors files, "
            "so there are no multi-token prediction layers to load"
        )
    layers = find_layers(target)
    if layers is None:
        return f"{directory} holds no multi-token prediction layers"
    try:
        _check_form(layers, target)
    except FOREIGN as error:
        return (
            f"the multi-token prediction layers of {directory} cannot be used: {first_line(error)}"
        )
    return None


def _check_form(layers: StoredLayers, target: HuggingFaceLM) -> None:
    """Raise an error unless layers of this form can be built, and their weights can be read."""
    for name, weight in layers.weights.items():
        is_scaled = weight.dtype in _EIGHT_BIT_FLOATS and name + SCALE in layers.weights
        if weight.dtype not in _PLAIN_DTYPES and not is_scaled:
            raise ValueError(
                f"they are quantized ({name} is stored as {weight.dtype}), and only plain weights "
                f"and 8-bit floats with a {SCALE[1:]} are read"
            )
    with quiet():
        MtpNetwork(_build_empty(layers, target, layers.num_layers))


def unusable_layers(target: LanguageModel) -> str | None:
    """Why the prediction layers in a target's checkpoint cannot draft.

    None if they can, or there are none.
    """
    if not isinstance(target, HuggingFaceLM) or find_layers(target) is None:
        return None
    return reason_against_mtp(target)


def count_stored_layers(target: LanguageModel) -> int:
    """How many prediction layers there are in a target's checkpoint."""
    layers = find_layers(target) if isinstance(target, HuggingFaceLM) else None
    return 0 if layers is None else layers.num_layers


def _directory(target: HuggingFaceLM) -> Path | None:
    """The directory of the safetensors files that a target was loaded from, if there is one."""
    name = target.model.config.name_or_path
    if target.origin is not None:
        directory = Path(target.origin.path)
    elif name:
        directory = Path(name)
    else:
        return None
    has_weights = directory.is_dir() and any(directory.glob("*.safetensors"))
    return directory if has_weights and not is_gguf(directory) else None


def load_mtp(target: LanguageModel, num_layers: int | None = None) -> MtpNetwork:
    """Load the prediction layers from the checkpoint of a target.

    Args:
        num_layers: how many of them; all when None.

    Raises:
        ValueError: the checkpoint holds none, or transformers cannot build or load them.
    """
    reason = reason_against_mtp(target)
    if reason is not None:
        raise ValueError(f"{reason}: use another drafter")
    assert isinstance(target, HuggingFaceLM)
    layers = find_layers(target)
    assert layers is not None

    num_stored = layers.num_layers
    if num_layers is not None and num_layers > num_stored:
        raise ValueError(f"num_layers must be from 1 to {num_stored}, got {num_layers}")
    directory = layers.directory
    try:
        with quiet(), Activity(f"reading the multi-token prediction layers of {directory}"):
            model = _build_empty(layers, target, num_layers or num_stored)
            _load_weights(model, target, layers)
            network = MtpNetwork(model)
    except FOREIGN as error:
        raise ValueError(
            f"the multi-token prediction layers of {directory} cannot be loaded: "
            f"{first_line(error)}"
        ) from error
    # Some weights keep float32, whatever the dtype of the others.
    return network.to(target.device).eval()


def _build_empty(layers: StoredLayers, target: HuggingFaceLM, num_layers: int) -> Any:
    """The form of prediction layers in a checkpoint, without memory for their weights."""
    config = layers.completed_config(num_layers)
    return build_layers(target.model, config, num_layers, dtype=target.dtype)


def _load_weights(model: Any, target: HuggingFaceLM, layers: StoredLayers) -> None:
    """Read the weights of the layers, under the names that the checkpoint has for them.

    Raises:
        ValueError: weights are missing, have another shape, or have no place in the layers.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        weight_mapping=model.get_weight_conversions(target.model),
        device_map={"": target.device},
        dtype=target.dtype,
    )
    block_shape = _block_shape(target.model.config)
    with ExitStack() as files:
        opened: dict[Path, Any] = {}
        for weight in layers.weights.values():
            if weight.path not in opened:
                opened[weight.path] = files.enter_context(safe_open(weight.path, framework="pt"))
        # Slices of open files: a weight is read when it is converted.
        stored: dict[str, Any] = {}
        for readable_name, name in layers.by_path(len(model.layers)).items():
            weight = layers.weights[name]
            scale = layers.weights.get(name + SCALE)
            if name.endswith(SCALE):
                continue
            if scale is None:
                stored[readable_name] = opened[weight.path].get_slice(name)
                continue
            stored[readable_name] = dequantized(
                opened[weight.path].get_tensor(name),
                opened[scale.path].get_tensor(name + SCALE),
                block_shape,
                target.dtype,
            )
        report, _ = convert_and_load_state_dict_in_model(model, stored, config)

    problems = [*sorted(report.missing_keys), *sorted(report.mismatched_keys, key=str)]
    if problems:
        raise ValueError(f"they lack {problems[0]} ({len(problems)} in all)")
    unexpected_keys = sorted(report.unexpected_keys)
    # Where transformers describes the layers, what it ignores is of no use.
    if unexpected_keys and layers.num_listed == 0:
        raise ValueError(
            f"they are not like the layers of {type(target.model).__name__}, which have no "
            f"{unexpected_keys[0]}"
        )


def dequantized(
    weight: Tensor,
    scale: Tensor,
    block_shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """A weight of 8-bit floats times the scale of each block of rows and columns.

    Raises:
        ValueError: there are scales for blocks of another shape.
    """
    if scale.numel() == 1:
        return (weight.float() * scale.float().item()).to(dtype)

    num_blocks = []
    for axis in (-2, -1):
        # Blocks at the end may be cut off.
        num_blocks.append(math.ceil(weight.shape[axis] / block_shape[axis]))
    if list(scale.shape) != [*weight.shape[:-2], *num_blocks]:
        raise ValueError(
            f"scales {list(scale.shape)} of weights {list(weight.shape)} are not those of blocks "
            f"{list(block_shape)}"
        )
    for axis in (-2, -1):
        scale = scale.repeat_interleave(block_shape[axis], dim=axis)
        scale = scale.narrow(axis, 0, weight.shape[axis])
    return (weight.float() * scale.float()).to(dtype)


def _block_shape(config: PreTrainedConfig) -> Sequence[int]:
    """Rows and columns of a block of 8-bit floats that share a scale."""
    settings = quantization_settings(config)
    values = settings if isinstance(settings, dict) else vars(settings or SimpleNamespace())
    return values.get("weight_block_size") or _DEFAULT_BLOCK_SHAPE


def stored_weights(network: MtpNetwork, target: HuggingFaceLM) -> dict[str, Tensor]:
    """The layers' weights under the names and in the layout of a checkpoint of this target.

    transformers' `use_mtp` and other engines read them from there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    layout = _layout(target)
    num_model_layers = int(target.config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    blocks: dict[str, Tensor] = {}
    for index, layer in enumerate(network.layers):
        for name, weight in layer.state_dict().items():
            if name.startswith(f"{BLOCK}."):
                # Named like further layers of the model, whose layout transformers knows.
                block_name = name.removeprefix(f"{BLOCK}.")
                blocks[f"model.layers.{num_model_layers + index}.{block_name}"] = weight
            else:
                stored[layout.stored_name(index, name, num_model_layers)] = weight
    if network.shared_norm is not None:
        assert layout.shared_norm is not None
        shared_norm: Any = network.shared_norm
        stored[layout.shared_norm] = shared_norm.weight

    for name, weight in revert_weight_conversion(target.model, blocks).items():
        match = _LAYER_NUMBER.search(name)
        assert match is not None, f"{name} is of no layer"
        index = int(match[1]) - num_model_layers
        path = f"{BLOCK}.{name[match.end() :]}"
        stored[layout.stored_name(index, path, num_model_layers)] = weight
    return {name: weight.detach().contiguous() for name, weight in stored.items()}


def _layout(target: HuggingFaceLM) -> Layout:
    """The layout of the layers in the target's checkpoint, or else that of its family."""
    layers = find_layers(target)
    if layers is not None:
        return layers.layout
    block_kinds = getattr(target.config, BLOCK_KINDS, None)
    patterns = getattr(target.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return default_layout(target.config.model_type, patterns, len(block_kinds or [FULL]))
