"""Multi-token prediction layers, which some checkpoints hold beside the layers of their model.

transformers leaves them out of the model, and builds and loads them for its own `use_mtp`. Here
they read ragged rows over the buffers of a `KVState`.

Entry j of layer i combines the embedding of token j + 1 + i with a hidden state that predicts this
token: the target's at token j for i = 0, else the output of layer i - 1 at entry j. The output of
layer i scores token j + 2 + i (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2).

Shapes: B rows, T entries, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.hub import is_gguf
from lightning_specdec.models.base import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.loading import quantization_method
from lightning_specdec.models.model_config import (
    FOREIGN,
    NUMBERED_LAYER,
    first_line,
    is_of_prediction_layer,
    quiet,
    to_config,
    to_values,
)
from lightning_specdec.models.safetensors_file import read_header, weight_files
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
        self.kinds = list(getattr(self.config, "layer_types", None) or [_FULL] * len(self.layers))
        other_kinds = sorted({*self.kinds} - {*_KINDS})
        if other_kinds:
            raise ValueError(f"prediction layers of the kind {other_kinds[0]} are not supported")
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
        ValueError: the target's family has none in transformers.
    """
    config = _completed(target.config, num_layers)
    try:
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


def _completed(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of a config that also describes its prediction layers.

    Where it does not say of which kind they are, they are of that of the model's last layer.
    """
    completed = deepcopy(config)
    completed.num_mtp_layers = num_layers
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(completed, name, None)
        if kinds and getattr(completed, f"mtp_{name}", None) is None:
            setattr(completed, f"mtp_{name}", [kinds[-1]] * num_layers)
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
    config = _completed(to_config(values), num_layers)
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
    """How many prediction layers the config of a target lists; 0 if transformers builds none."""
    if not isinstance(target, HuggingFaceLM):
        return 0
    return int(getattr(target.config, "num_mtp_layers", None) or 0)


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
    names = stored_names(target, directory)
    if not names:
        return f"{directory} holds no multi-token prediction layers"
    if num_mtp_layers(target) == 0:
        return ignored_layers(target)
    method = quantization_method(target.model.config)
    if method is not None:
        return (
            f"the multi-token prediction layers of {directory} are quantized (by {method}), and "
            "only plain ones are read"
        )
    return None


def ignored_layers(target: LanguageModel) -> str | None:
    """Names the prediction layers that a checkpoint has and transformers does not build.

    None if there are none.
    """
    if not isinstance(target, HuggingFaceLM) or num_mtp_layers(target) > 0:
        return None
    directory = _directory(target)
    names = [] if directory is None else stored_names(target, directory)
    if not names:
        return None
    name = type(target.model).__name__
    return (
        f"{directory} holds multi-token prediction layers (as {names[0]}) that transformers "
        f"does not build for {name}, so they are not used"
    )


def stored_names(target: HuggingFaceLM, directory: Path) -> list[str]:
    """Names of the weights of prediction layers in a checkpoint's files, sorted."""
    names: list[str] = []
    for file in weight_files(directory):
        _, shapes = read_header(file)
        names += [name for name in shapes if is_of_prediction_layer(target.config, name)]
    return sorted(names)


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
    directory = _directory(target)
    assert directory is not None

    num_stored = num_mtp_layers(target)
    if num_layers is not None and num_layers > num_stored:
        raise ValueError(f"num_layers must be from 1 to {num_stored}, got {num_layers}")
    try:
        with quiet(), Activity(f"reading the multi-token prediction layers of {directory}"):
            model = _build(
                target.model, target.config, num_layers or num_stored, dtype=target.dtype
            )
            _load_weights(model, target, directory)
            network = MtpNetwork(model)
    except FOREIGN as error:
        raise ValueError(
            f"the multi-token prediction layers of {directory} cannot be loaded: "
            f"{first_line(error)}"
        ) from error
    # Some weights keep float32, whatever the dtype of the others.
    return network.to(target.device).eval()


class _MainModel:
    """What transformers asks of a model to build its prediction layers, without its weights.

    transformers would initialize weights that are shared with the layers again.
    """

    def __init__(self, model: PreTrainedModel, config: PreTrainedConfig) -> None:
        self.config = config
        self.lm_head = nn.Identity()
        decoder: Any = model.get_decoder()
        self._decoder = SimpleNamespace(layers=decoder.layers)

    def get_decoder(self) -> SimpleNamespace:
        return self._decoder

    def get_input_embeddings(self) -> nn.Module:
        return nn.Identity()


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


def _load_weights(model: Any, target: HuggingFaceLM, directory: Path) -> None:
    """Read the weights of the layers, under the names that the checkpoint has for them.

    Raises:
        ValueError: weights are missing or have another shape.
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(
        weight_mapping=model.get_weight_conversions(target.model),
        device_map={"": target.device},
        dtype=target.dtype,
    )
    with ExitStack() as files:
        # Slices of open files: a weight is read when it is converted.
        stored: dict[str, Any] = {}
        for path in weight_files(directory):
            file = files.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 (the file object is not iterable)
                if is_of_prediction_layer(target.config, name):
                    stored[name] = file.get_slice(name)
        report, _ = convert_and_load_state_dict_in_model(model, stored, config)

    problems = [*sorted(report.missing_keys), *sorted(report.mismatched_keys, key=str)]
    if problems:
        raise ValueError(f"they lack {problems[0]} ({len(problems)} in all)")


@dataclass(frozen=True)
class _Layout:
    """Names of the weights of prediction layers in a checkpoint.

    Args:
        block: prefix of the weights of decoder layer `index`, which would be layer `number` of the
            model.
        modules: names of the modules around a decoder layer.
    """

    block: str
    modules: dict[str, str]


_NUMBERED = _Layout(
    "model.layers.{number}.",
    {
        "enorm": "model.layers.{number}.enorm",
        "hnorm": "model.layers.{number}.hnorm",
        "eh_proj": "model.layers.{number}.eh_proj",
        "post_norm": "model.layers.{number}.shared_head.norm",
    },
)
"""The layout of DeepSeek-V3 and most others."""
_SINGLE = _Layout(
    "mtp.layers.{index}.",
    {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "post_norm": "mtp.norm",
    },
)
"""The layout of Mellum, which has one layer."""
_NESTED = _Layout(
    "model.mtp.layers.{index}.transformer_block.",
    {
        "enorm": "model.mtp.layers.{index}.embed_norm",
        "hnorm": "model.mtp.layers.{index}.hidden_norm",
        "eh_proj": "model.mtp.layers.{index}.input_proj",
    },
)
"""The layout of Inkling."""
_SHARED_NORM = "model.mtp.chain_norm.weight"


def stored_weights(network: MtpNetwork, target: HuggingFaceLM) -> dict[str, Tensor]:
    """The layers' weights under the names and in the layout of a checkpoint of this target.

    transformers' `use_mtp` and other engines read them from there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    layout = _layout(target)
    num_layers = int(target.config.num_hidden_layers)
    stored: dict[str, Tensor] = {}
    blocks: dict[str, Tensor] = {}
    for index, layer in enumerate(network.layers):
        places = {"index": index, "number": num_layers + index}
        for name, module_name in layout.modules.items():
            module: Any = getattr(layer, name)
            if module is not None:
                stored[f"{module_name.format(**places)}.weight"] = module.weight
        # Named like further layers of the model, whose layout transformers knows.
        block: Any = layer.mtp_block
        for name, weight in block.state_dict().items():
            blocks[f"model.layers.{num_layers + index}.{name}"] = weight
    if network.shared_norm is not None:
        shared_norm: Any = network.shared_norm
        stored[_SHARED_NORM] = shared_norm.weight

    for name, weight in revert_weight_conversion(target.model, blocks).items():
        match = NUMBERED_LAYER.match(name)
        assert match is not None, f"{name} is of no layer"
        number = int(match[1])
        prefix = layout.block.format(index=number - num_layers, number=number)
        stored[prefix + name[match.end() :]] = weight
    return {name: weight.detach().contiguous() for name, weight in stored.items()}


def _layout(target: HuggingFaceLM) -> _Layout:
    """The layout that transformers leaves out when it loads the model."""
    patterns = getattr(target.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if any("model" in pattern and "mtp" in pattern for pattern in patterns):
        return _NESTED
    if any("mtp" in pattern for pattern in patterns):
        return _SINGLE
    return _NUMBERED
