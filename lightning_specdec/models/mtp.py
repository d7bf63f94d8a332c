"""Multi-token prediction layers, which some checkpoints hold beside the layers of their model.

transformers leaves them out of the model, and builds and loads them for its own `use_mtp`. Here
they read ragged rows over the buffers of a `KVState`.

Entry j of layer i combines the embedding of token j + 1 + i with a hidden state that predicts this
token: the target's at token j for i = 0, else the output of layer i - 1 at entry j. The output of
layer i scores token j + 2 + i (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

Shapes: B rows, T entries, D hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.hub import is_gguf
from lightning_specdec.models.base import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import quantization_settings
from lightning_specdec.models.model_config import (
    FOREIGN,
    first_line,
    quiet,
    to_config,
    to_values,
)
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
from lightning_specdec.models.state import KVState, KVStorage, Slots

with quiet():
    from transformers import AutoModelForCausalLM

    from lightning_specdec.models.attention import StateCache
    from lightning_specdec.models.layers import additive, cache_name

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from transformers import PreTrainedConfig, PreTrainedModel

_FULL = "full_attention"
# In transformers 5.24, the masks of "hybrid_sliding" prediction layers have no window, so that
# their output depends on how a text is cut into calls. Here the window of the layer holds.
_SLIDING = ("sliding_attention", "hybrid_sliding")
_WITH_CONVOLUTIONS = ("hybrid", "hybrid_sliding")
"""Kinds of layers that also have short convolutions, and positions relative to each row's."""
_KINDS = (_FULL, *_SLIDING, *_WITH_CONVOLUTIONS)
_WITHOUT_MEMORY = ("moe", "mlp")
"""Kinds of blocks that read each token alone."""
_BLOCK_KINDS = "mtp_layers_block_type"
"""The setting of Nemotron-H that lists the blocks of a prediction layer."""
_WITHOUT_POST_NORM = ("ernie4_5_moe",)
"""Families whose prediction layers end with the decoder layer."""
_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64")
_EIGHT_BIT_FLOATS = ("F8_E4M3", "F8_E5M2")
_DEFAULT_BLOCK_SHAPE = (128, 128)
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_FIRST_CONVOLUTION = -2
"""Number of the buffer of a first convolution among the layers of a storage; others follow below.
"""
_MOST_CONVOLUTIONS = 16
"""Most convolutions of a layer."""


class _RowCache(StateCache):
    """The cache of a layer with convolutions, for a single row.

    A convolution's inputs are kept for each entry, like keys, so that entries can be read again.

    Args:
        start: position of the first entry.
    """

    def __init__(self, storage: KVStorage, slots: Slots, start: int) -> None:
        super().__init__(storage, slots)
        self.start = start

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None, so that the inputs before the first entry are asked for by `update_conv_state`."""

    def update_conv_state(
        self,
        conv_states: Float[Tensor, "1 D T"],
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int = 1,
        **options: Any,
    ) -> Float[Tensor, "1 D _"]:
        """Store a convolution's inputs. Returns them after those of the entries before."""
        number = _FIRST_CONVOLUTION - (layer_idx * _MOST_CONVOLUTIONS + state_idx)
        # Stored as keys of one head; there are no values.
        keys = conv_states.transpose(1, 2)[:, None]
        all_keys, _ = self.storage.update(number, self.slots, keys, keys[..., :0])
        first_before = max(0, self.start - conv_kernel_size)
        before = all_keys[:, 0, first_before : self.start].transpose(1, 2)
        return torch.cat((before, conv_states), dim=-1)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Keys are at the positions of their entries' tokens, as queries are.
        return self.slots.span, layer_idx + 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.start + layer_idx + 1


class _Blocks(nn.Module):
    """Blocks of a model that make up one prediction layer, as in Nemotron-H.

    Args:
        config: names the kinds of the blocks of all prediction layers.
        index: of the prediction layer.
    """

    block_class: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        num_blocks = len(config.layer_types) // config.num_mtp_layers
        first = index * num_blocks
        self.blocks = nn.ModuleList(
            self.block_class(config, number) for number in range(first, first + num_blocks)
        )

    def forward(self, hidden: Float[Tensor, "B T D"], **options: Any) -> Float[Tensor, "B T D"]:
        for block in self.blocks:
            hidden = block(hidden, **options)
        return hidden


def _kinds(config: PreTrainedConfig, num_layers: int) -> list[str]:
    """The kind of the attention of each prediction layer.

    Raises:
        ValueError: a kind that these layers cannot have here.
    """
    kinds = list(getattr(config, "layer_types", None) or [_FULL] * num_layers)
    if getattr(config, _BLOCK_KINDS, None) is not None:
        # A block without attention needs no mask.
        kinds = [kind for kind in kinds if kind not in _WITHOUT_MEMORY]
    other_kinds = sorted({*kinds} - {*_KINDS})
    if other_kinds:
        raise ValueError(f"prediction layers of the kind {other_kinds[0]} are not supported")
    if len(kinds) != num_layers:
        raise ValueError("prediction layers with several or no attentions are not supported")
    return kinds


class MtpNetwork(nn.Module):
    """The multi-token prediction layers of a checkpoint.

    Embedding, rotary positions, and output head are the target's, which each call names.

    Args:
        model: the layers as transformers builds them, an `MtpModel`.

    Raises:
        ValueError: a layer is of another kind than attention and short convolutions.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config = model.config
        self.layers: nn.ModuleList = model.layers
        self.shared_norm: nn.Module | None = getattr(model, "shared_post_norm", None)
        """Norm that all layers share; None if each has its own."""
        rotary_settings = getattr(self.config, "rope_parameters", None) or {}
        self.has_rotary_kinds = bool(self.config.nested_rope_parameter_keys(rotary_settings))
        """Whether the rotary positions depend on the kind of the layer."""
        self.kinds = _kinds(self.config, len(self.layers))
        self.reads_rows = any(kind in _WITH_CONVOLUTIONS for kind in self.kinds)
        """Whether each row is read in a separate call."""
        self._cache_name = cache_name(type(self.layers[0]).forward) or "past_key_values"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the layers compute in."""
        first_layer: Any = self.layers[0]
        return first_layer.enorm.weight.dtype

    def window(self, index: int) -> int | None:
        """The attention window of a layer, in entries; None if it is unlimited."""
        if self.kinds[index] not in _SLIDING:
            return None
        return getattr(self.config, "sliding_window", None)

    def check_target(self, target: LanguageModel) -> None:
        """Raise ValueError unless these layers can read the hidden states of this target."""
        if not isinstance(target, HuggingFaceLM):
            raise ValueError(f"{type(target).__name__} has no multi-token prediction layers")
        if target.hidden_size != self.config.hidden_size:
            raise ValueError(
                f"the prediction layers are for a hidden size of {self.config.hidden_size}, the "
                f"target has {target.hidden_size}: use the target of their checkpoint"
            )

    def slots(self, state: KVState, num_entries: int) -> list[Slots]:
        """The slots of the next entries of every row, for each call that reads them."""
        if not self.reads_rows:
            return [state.slots(num_entries)]
        return [
            state.slots(num_entries, [length], row) for row, length in enumerate(state.consumed)
        ]

    def read(
        self,
        target: HuggingFaceLM,
        index: int,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
        slots: Sequence[Slots],
        storage: KVStorage,
    ) -> Float[Tensor, "B T D"]:
        """One layer's output for T entries of each row.

        Args:
            index: number of the layer, whose keys and values are those of this layer of `storage`.
            tokens: token j + 1 + index for each entry j.
            hidden: the target's hidden states at tokens j, or the output of the layer before.
            slots: of the entries, as `slots` returns them.
        """
        outputs = []
        for part in slots:
            part_tokens = tokens[part.rows]
            part_hidden = hidden[part.rows]
            outputs.append(self._call(target, index, part_tokens, part_hidden, part, storage))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _call(
        self,
        target: HuggingFaceLM,
        index: int,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
        slots: Slots,
        storage: KVStorage,
    ) -> Float[Tensor, "B T D"]:
        """One call of a layer."""
        embedded = _embeddings(target, tokens).to(self.dtype)
        # The position of an entry is that of its token.
        positions = slots.positions + 1 + index
        if target.max_positions is not None:
            positions = positions.clamp(max=target.max_positions - 1)

        cache = StateCache(storage, slots)
        if self.reads_rows:
            cache = _RowCache(storage, slots, int(slots.positions[0, 0]))
        output: Tensor = self.layers[index](
            embedded,
            hidden.to(self.dtype),
            position_embeddings=self._rotation(target, index, embedded, positions),
            attention_mask=additive(storage.mask(slots, self.window(index)), self.dtype),
            position_ids=positions,
            **{self._cache_name: cache},
        )
        if self.shared_norm is not None:
            output = self.shared_norm(output)
        return output

    def _rotation(
        self,
        target: HuggingFaceLM,
        index: int,
        embedded: Float[Tensor, "B T D"],
        positions: Int[Tensor, "B T"],
    ) -> Any:
        """The rotation of positions that the target computes; None if it has none."""
        decoder: Any = target.model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        if rotary is None:
            return None
        if self.has_rotary_kinds:
            return rotary(embedded, position_ids=positions, layer_type=self.kinds[index])
        return rotary(embedded, position_ids=positions)

    def logits(
        self,
        target: HuggingFaceLM,
        hidden: Float[Tensor, "B N D"],
    ) -> Float[Tensor, "B N V"]:
        """Scores of the next token by the target's output head, from a layer's output."""
        head: Any = target.model.get_output_embeddings()
        multiplier = getattr(self.config, "logits_mup_width_multiplier", None)
        if multiplier is not None:
            hidden = hidden / multiplier
        logits: Tensor = head(hidden.to(target.dtype))
        num_tokens = getattr(self.config, "unpadded_vocab_size", None)
        return logits if num_tokens is None else logits[..., :num_tokens]

    def read_text(
        self,
        target: HuggingFaceLM,
        tokens: Int[Tensor, "B T"],
        hidden: Float[Tensor, "B T D"],
    ) -> list[Float[Tensor, "B _ D"]]:
        """Each layer's output on whole texts, for training.

        Output j of layer i scores token j + 2 + i. A layer has one entry less than the one before.

        Args:
            hidden: the target's hidden states at these tokens.
        """
        outputs = []
        batch_size, num_tokens = tokens.shape
        for index in range(self.num_layers):
            num_entries = num_tokens - 1 - index
            if num_entries < 1:
                outputs.append(hidden[:, :0])
                continue
            state = KVState(batch_size, num_entries, device=tokens.device)
            hidden = self.read(
                target,
                index,
                tokens[:, 1 + index :],
                hidden[:, :num_entries],
                self.slots(state, num_entries),
                state.storage,
            )
            outputs.append(hidden)
        return outputs


def new_mtp(target: HuggingFaceLM, num_layers: int) -> MtpNetwork:
    """Prediction layers of this target with random weights, on its device.

    Raises:
        ValueError: none can be built from the decoder layers of the target's family.
    """
    try:
        config = _completed(target.config, num_layers)
        network = MtpNetwork(_build(target.model, config, num_layers))
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


def _completed(
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
    block_kinds = getattr(completed, _BLOCK_KINDS, None)
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
            usable_kinds = [kind for kind in model_kinds if name != "layer_types" or kind in _KINDS]
            last_kind = [*model_kinds[-1:], *usable_kinds][-1]
            setattr(completed, f"mtp_{name}", [last_kind] * num_layers)

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
    config = _completed(described_config, num_layers, kinds)
    try:
        # Only the classes of this model's layers are needed.
        with torch.device("meta"):
            main_model = AutoModelForCausalLM.from_config(config)
        return MtpNetwork(_build(main_model, config, num_layers))
    except FOREIGN as error:
        raise ValueError(f"no prediction layers can be built: {first_line(error)}") from error


def _embeddings(target: HuggingFaceLM, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """The target's embeddings, without a norm that some models have inside of them."""
    embedding: Any = target.model.get_input_embeddings()
    if hasattr(embedding, "embed_norm"):
        return nn.functional.embedding(tokens, embedding.weight)
    return target.embeddings(tokens)


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
        num_blocks = len(getattr(self.config, _BLOCK_KINDS, None) or [_FULL])
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

    def by_path(self) -> dict[str, str]:
        """Names of the weights, by the names that transformers reads them under.

        These are those of further layers of the model, whose layout transformers converts.
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
        return _completed(self.config, num_layers, kinds)


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
    return _build(target.model, config, num_layers, dtype=target.dtype)


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
    if getattr(config, _BLOCK_KINDS, None) is not None:
        block_class = type(layers[-1])
        blocks = type("Blocks", (_Blocks,), {"block_class": block_class})
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


def _build(
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
        for readable_name, name in layers.by_path().items():
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
    """A weight of 8-bit floats times the scale of each block of rows and columns."""
    if scale.dim() >= 2:
        for axis in (-2, -1):
            # Blocks at the end may be cut off.
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
    block_kinds = getattr(target.config, _BLOCK_KINDS, None)
    patterns = getattr(target.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return default_layout(target.config.model_type, patterns, len(block_kinds or [_FULL]))
