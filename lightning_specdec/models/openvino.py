"""A transformers model whose layers and output head run in OpenVINO on a CPU.

The layers are converted once. Each one's attention becomes OpenVINO's paged attention: a call reads
the tokens of all rows one row after the other, and each row's keys and values lie in blocks (as in
vLLM, Kwon et al. 2023). Rolling back lowers a length and copies nothing.

Shapes: B rows, T tokens, D hidden size, K scored positions of a row, V vocabulary; N tokens of all
rows in one call; P the same with the call's padding.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.op import _PagedAttentionExtension
from torch import Tensor, nn

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.files import cache_home, new_directory, remove_abandoned
from lightning_specdec.config.memory import available_bytes, require_memory
from lightning_specdec.models.agreement import agreement_of
from lightning_specdec.models.base import ExitStates, ModelOutput, weights_digest, weights_stamp
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack, additive
from lightning_specdec.models.loading import check_openvino
from lightning_specdec.models.openvino_conversion import (
    FORMAT,
    GROUP,
    Attention,
    convert,
    save,
    traced,
)
from lightning_specdec.models.paged_state import (
    ATTENTION_INPUTS,
    BLOCK,
    COSTLY_TOKEN_COST,
    TOKEN_COST,
    CallSizes,
    PagedCall,
    PagedState,
    flatten_rows,
    shared_tensor,
)
from lightning_specdec.models.state import DecodeState, Lengths, as_list
from lightning_specdec.models.weights import WeightIdentity, fixed_tensors, weights_checksum

if TYPE_CHECKING:
    from jaxtyping import Float, Int

PRECISIONS = {torch.float32: ("f32", ov.Type.f32), torch.bfloat16: ("bf16", ov.Type.bf16)}
"""OpenVINO's names of the dtypes that networks compute in and keep their keys and values in."""
DYNAMIC_GROUP = 32
"""Activations that share a scale where they meet quantized weights. OpenVINO quantizes them in
calls on several tokens; 0 does not quantize them."""
COMPILING_SPACE = 1.5
"""Free memory for which the model is compiled again beside the one in use, in multiples of its
converted weights. Otherwise the one in use is freed first, and its callers wait."""
LONG_CALL_TOKENS = 1024
"""Tokens from which on a call may take seconds, so that it is reported."""
FEWEST_QUANTIZED_TOKENS = 2
"""Tokens that a call computes at least for each row and at least scores, where weights are
quantized.

OpenVINO does not quantize the activations of a single token, and a row's attention adds up in
another order for one token than for several. From two tokens on, a token's numbers are the same
bits in every call (docs/log/2026-11.md).
"""

log = logging.getLogger(__name__)
_CONVERTING = Lock()
"""Held while a network is converted: torch traces one network at a time."""


def converted(
    model: HuggingFaceLM,
    quantization: str | None = None,
    *,
    is_unchanged: bool = False,
) -> Path:
    """The directory of a model's converted files: made at the first use, then read from the cache
    directory.

    Args:
        quantization: as of `convert`.
        is_unchanged: see `weights_digest`.

    Raises:
        ValueError: OpenVINO cannot run the model; or as `_cached_files`.
    """

    def write(directory: Path) -> None:
        require_memory("converting the model to OpenVINO", _conversion_bytes(model), "cpu")
        convert(model, directory, quantization)
        if quantization is None:
            with Activity("comparing the converted model with torch"):
                _check(model, OpenVINOLM(model, directory, compute_dtype=torch.float32))
        # Objects with references to themselves hold copies of the weights.
        gc.collect()

    digest = weights_digest(model, is_unchanged=is_unchanged)
    settings = (digest, model.arguments(), model.dtype, quantization)
    return _cached_files(settings, write)


def _conversion_bytes(model: HuggingFaceLM) -> int:
    """Bytes that a conversion needs beside the model: the converted weights, and the largest matrix
    in float32."""
    sizes = [weight.numel() for weight in model.parameters()]
    return sum(sizes) * model.dtype.itemsize + 4 * max(sizes)


def _cached_files(settings: object, write: Callable[[Path], None]) -> Path:
    """A directory of converted files in the cache, named by their settings: written once, checked
    when read.

    Args:
        settings: everything that decides what the files contain.
        write: writes the files to a new directory.

    Raises:
        ValueError: the files are damaged or cannot be written.
    """
    key = repr((settings, GROUP, DYNAMIC_GROUP, FORMAT, ov.get_version()))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    directory = cache_home() / f"openvino-{digest}"
    if directory.is_symlink() and not directory.exists():
        raise ValueError(f"{directory} is a link to a directory that is gone: delete the link")

    remove_abandoned(directory.parent, "openvino-")
    if not directory.exists():
        try:
            with _CONVERTING, new_directory(directory) as temporary:
                write(temporary)
                digests = json.dumps(_file_digests(temporary))
                (temporary / "sha256.json").write_text(digests, encoding="ascii")
        except OSError as error:
            # Another process may have written the same files first.
            if not directory.exists():
                raise ValueError(
                    f"the converted model cannot be written to {directory.parent}: "
                    f"{error.strerror}: set XDG_CACHE_HOME to a directory that can be written"
                ) from error
        except ValueError:
            if not directory.exists():
                raise

    with Activity("checking the converted model's files"):
        is_whole = _is_whole(directory)
    if not is_whole:
        raise ValueError(f"{directory} is damaged: delete it to have it rebuilt")
    return directory


def _is_whole(directory: Path) -> bool:
    """Whether a directory contains a converted network, and every file is as it was written."""
    try:
        recorded_digests = json.loads((directory / "sha256.json").read_text(encoding="ascii"))
        present_digests = _file_digests(directory)
    except (OSError, ValueError):
        return False
    has_network = "model.xml" in present_digests and "model.bin" in present_digests
    return has_network and recorded_digests == present_digests


def _file_digests(directory: Path) -> dict[str, str]:
    """The sha256 of each file of a converted network, by name."""
    digests = {}
    for path in sorted(directory.glob("*.xml")) + sorted(directory.glob("*.bin")):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


@torch.no_grad()
def _check(model: HuggingFaceLM, converted_model: OpenVINOLM) -> None:
    """Raise ValueError unless a converted model returns the model's logits, both computed in
    float32."""
    # Tokens from all parts of the vocabulary.
    tokens = torch.arange(12)[None] * 7919 % model.vocab_size
    expected = _logits_in_float32(model, tokens)
    computed = converted_model(tokens).logits
    difference = (computed - expected).abs().max()
    tolerance = 1e-3 * expected.abs().max()
    # `not <=` also catches NaN.
    if not difference <= tolerance:
        name = type(model.model).__name__
        raise ValueError(
            f"OpenVINO computes other logits for {name} than torch does: use --backend torch"
        )


def _logits_in_float32(
    model: HuggingFaceLM,
    tokens: Int[Tensor, "B T"],
) -> Float[Tensor, "B T V"]:
    """The logits of a model's weights in float32, of which only one layer's exist at a time."""
    if model.dtype == torch.float32:
        return model(tokens).logits
    stack = model.stack
    num_tokens = tokens.shape[1]
    positions = torch.arange(num_tokens)[None]
    distances = positions[0, :, None] - positions
    window = min(span or num_tokens for span in model.windows.values())
    mask = additive(((distances >= 0) & (distances < window))[None], torch.float32)

    hidden = stack.embed(tokens, positions).float()
    arguments = stack.begin(hidden, positions, mask, None)
    for layer in stack.layers:
        hidden = deepcopy(layer).float()(hidden, **arguments)
    hidden = deepcopy(stack.norm_module).float()(hidden)
    head: Any = model.model.get_output_embeddings()
    return deepcopy(head).float()(hidden)


@cache
def _core() -> ov.Core:
    core = ov.Core()
    core.add_extension(Attention)
    return core


@cache
def _has_bfloat16() -> bool:
    """Whether OpenVINO computes in bfloat16 on this processor."""
    return "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a network of that dtype computes in here: float32 where the processor has no bfloat16
    instructions.

    Its weights stay in bfloat16 all the same, so that reading them takes half the time.
    """
    if dtype == torch.bfloat16 and not _has_bfloat16():
        return torch.float32
    return dtype


class Compiled:
    """A network compiled for this CPU, with OpenVINO's paged attention in place of `Attention`.

    Args:
        model: the network; it is changed. All its inputs are read, and the last one contains the
            positions if it has attention.
        dtype: a dtype of `PRECISIONS`.
        memory: what the network reads without owning it.
        dynamic_group: see `DYNAMIC_GROUP`.

    Attributes:
        sizes: see `PagedState`.
    """

    def __init__(
        self,
        model: ov.Model,
        dtype: torch.dtype,
        memory: object = None,
        *,
        dynamic_group: int = DYNAMIC_GROUP,
    ) -> None:
        self._memory = memory
        precision_name, precision = PRECISIONS[computing_dtype(dtype)]
        model, self.sizes = _with_paged_attention(model, precision)
        options = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": precision_name,
            # By default, OpenVINO keeps the keys and values of a float32 network in float16.
            "KV_CACHE_PRECISION": precision_name,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic_group,
        }
        compiled_model = _core().compile_model(model, "CPU", options)
        self.request = compiled_model.create_infer_request()
        self._is_bfloat16 = [output.get_element_type() == ov.Type.bf16 for output in model.outputs]
        self._bound_caches: object = None
        """`caches` of the state whose keys and values are inputs now."""
        self._input_arrays: dict[int, np.ndarray] = {}
        """The memory that each other input is read from, by the input's index."""
        self._lock = Lock()
        """Held for a call: inputs and outputs have one memory, and threads may share the
        network."""

    @classmethod
    def of(
        cls,
        network: nn.Module,
        example: tuple[Tensor, ...],
        dtype: torch.dtype,
        quantization: str | None,
        settings: object,
        *,
        shared: bool = False,
    ) -> Compiled:
        """Convert a small torch network, once, and compile it. Other arguments as of `convert`.

        Args:
            example: inputs of the shapes that the network reads.
            settings: what determines the network, in addition to its class and weights.
            shared: whether the first input is always the tensor in `example`, whose memory is used
                without a copy.

        Raises:
            ValueError: see `_cached_files`.
        """

        def write(directory: Path) -> None:
            network_in_float32 = deepcopy(network).float()
            save(traced(network_in_float32, example, dtype, quantization), directory)

        key = (type(network).__name__, weights_digest(network), settings, dtype, quantization)
        directory = _cached_files(key, write)
        model = _core().read_model(directory / "model.xml")
        if not shared:
            return cls(model, dtype)

        # Replace the first input by a constant over the tensor's memory.
        memory = shared_tensor(example[0].detach())
        parameter = model.get_parameters()[0]
        constant = ops.constant(memory, shared_memory=True)
        typed_constant = ops.convert(constant, parameter.get_element_type())
        parameter.output(0).replace(typed_constant.output(0))
        model.remove_parameter(parameter)
        return cls(model, dtype, memory)

    def run(
        self,
        inputs: Sequence[Any],
        state: PagedState | None = None,
        first_layer: int = 0,
    ) -> list[Tensor]:
        """Compute the network's outputs.

        Args:
            inputs: its inputs, as numpy arrays or contiguous tensors; `PagedCall.inputs` last if it
                has attention.
            state: the keys and values of its layers, from `first_layer` on.
        """
        with self._lock:
            if state is not None and self._bound_caches is not state.caches:
                self._bind_caches(state, first_layer, len(inputs))
            for index, value in enumerate(inputs):
                array = value.numpy() if isinstance(value, Tensor) else value
                self._set_input(index, array)

            self.request.infer()

            # Copies, since the next call overwrites the memory of the outputs.
            outputs = []
            for index, is_bfloat16 in enumerate(self._is_bfloat16):
                array = self.request.get_output_tensor(index).data
                if is_bfloat16:
                    # numpy has no bfloat16, so its bits travel as integers.
                    bits = torch.from_numpy(array.view(np.int16).copy())
                    outputs.append(bits.view(torch.bfloat16))
                else:
                    outputs.append(torch.from_numpy(array.copy()))
            return outputs

    def _bind_caches(self, state: PagedState, first_layer: int, num_inputs: int) -> None:
        """Use a state's keys and values as the inputs after the others."""
        # An error half way must not leave some layers with another state's memory.
        self._bound_caches = None
        # Each layer has two: its keys and its values.
        first_cache = 2 * first_layer
        num_caches = 2 * len(self.sizes)
        caches = state.caches[first_cache : first_cache + num_caches]
        for index, cache_tensor in enumerate(caches):
            self.request.set_input_tensor(num_inputs + index, cache_tensor)
        self._bound_caches = state.caches

    def _set_input(self, index: int, array: np.ndarray) -> None:
        """Copy an input to the memory that the network reads."""
        memory = self._input_arrays.get(index)
        if memory is not None and memory.shape == array.shape:
            memory[...] = array
            return
        # Setting a tensor costs as much as ten copies of a few integers, so it is done only for a
        # new shape.
        self._input_arrays.pop(index, None)
        memory = array.copy()
        self.request.set_input_tensor(index, ov.Tensor(memory, shared_memory=True))
        self._input_arrays[index] = memory


def _with_paged_attention(
    model: ov.Model, precision: ov.Type
) -> tuple[ov.Model, list[tuple[int, int, int]]]:
    """Replace each `Attention` of a network by OpenVINO's paged attention.

    Args:
        precision: of keys and values.

    Returns:
        The network, whose inputs are followed by those of `ATTENTION_INPUTS` and by each layer's
        keys and values; and `PagedState.sizes`.
    """
    attention_inputs = []
    for name in ATTENTION_INPUTS:
        shape = [] if name == "max_context_len" else [-1]
        attention_inputs.append(ops.parameter(shape, ov.Type.i32, name))

    caches: list[Any] = []
    sizes = []
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Attention":
            continue
        layer_sizes = node.input_value(3).get_node().data
        num_heads, key_size, value_size, window = [int(value) for value in layer_sizes]

        node_inputs = attention_inputs
        follows_in_same_call = node.get_input_size() > 5
        if follows_in_same_call:
            # It reads the keys and values of the only layer.
            past_lengths = node.input_value(5)
            node_inputs = [*_next_token_inputs(past_lengths), *attention_inputs[2:]]
        else:
            for head_size in (key_size, value_size):
                caches.append(ops.parameter([-1, num_heads, BLOCK, head_size], precision))
            sizes.append((num_heads, key_size, value_size))

        paged = _paged_attention(node, caches[-2:], node_inputs, window)
        paged.set_rt_info(num_heads, "num_k_heads")
        paged.set_rt_info(key_size, "k_head_size")
        paged.set_rt_info(num_heads, "num_v_heads")
        paged.set_rt_info(value_size, "v_head_size")
        node.output(0).replace(paged.output(0))

    if caches:
        parameters = [*model.get_parameters(), *attention_inputs, *caches]
        model = ov.Model(model.get_results(), parameters, "paged")
    model.validate_nodes_and_infer_types()
    return model, sizes


def _next_token_inputs(past_lengths: Any) -> list[Any]:
    """The first two of `ATTENTION_INPUTS` in a network that reads one more token of each row."""
    zero = ops.constant(np.int32(0))
    step = ops.constant(np.int32(1))
    num_rows = ops.gather(ops.shape_of(past_lengths, "i32"), zero, zero)
    row_starts = ops.range(zero, ops.add(num_rows, step), step, "i32")
    return [ops.convert(past_lengths, "i32"), row_starts]


def _paged_attention(
    node: Any,
    caches: Sequence[Any],
    attention_inputs: Sequence[Any],
    window: int,
) -> Any:
    """OpenVINO's paged attention for an `Attention`, without sinks, eviction and sparsity."""

    def constant(value: Any, kind: type = np.int32) -> Any:
        return ops.constant(np.array(value, dtype=kind)).output(0)

    def empty(kind: type = np.int32) -> Any:
        return constant(np.zeros(0), kind)

    query, key, value, _, scale = node.input_values()[:5]
    *row_inputs, max_context_length = [parameter.output(0) for parameter in attention_inputs]
    cache_inputs = [parameter.output(0) for parameter in caches]
    empty_floats = empty(np.float32)
    inputs = [
        query,
        key,
        value,
        *cache_inputs,
        *row_inputs,
        scale,
        constant(window),
        # Slopes by position; number of tokens to aggregate scores over.
        empty_floats,
        max_context_length,
        empty(),
        # Rotation of the keys that move when blocks are evicted.
        empty(),
        empty(),
        empty_floats,
        # Sparse attention: threshold, block size, stride.
        empty_floats,
        constant(0),
        constant(0),
        # Sinks.
        empty_floats,
        # Eviction: number of tokens to keep, then which blocks may go.
        constant(0),
        empty(),
        empty(),
        empty(),
        # Types of tokens, and masks of token trees.
        empty(),
        empty(np.uint8),
        empty(),
    ]
    return _PagedAttentionExtension(inputs)


class _Graph:
    """Some consecutive layers of a model, compiled; the last ones with the final norm and the
    output head.

    Args:
        model: the whole model, as `convert` wrote it; it is taken apart.
        first_layer, end_layer: the layers from `first_layer` to before `end_layer`; none where they
            are equal.
        features: layers whose output is returned too.
        dtype: a dtype of `PRECISIONS`.
        fewest_scored: fewest positions that the output head computes.
        dynamic_group: see `DYNAMIC_GROUP`.
    """

    def __init__(
        self,
        model: ov.Model,
        first_layer: int,
        end_layer: int,
        features: Collection[int],
        dtype: torch.dtype,
        *,
        fewest_scored: int,
        dynamic_group: int,
    ) -> None:
        # The model's outputs are those of its layers, of the final norm, and the logits.
        num_layers = len(model.outputs) - 2
        norm_output = num_layers
        logits_output = num_layers + 1
        self.first_layer = first_layer
        self.end_layer = end_layer
        self._fewest_scored = fewest_scored
        self._has_head = end_layer == num_layers
        self.features = sorted(layer for layer in features if first_layer <= layer < end_layer)

        # The last layer's feature includes the final norm, as the output head reads it.
        outputs = [norm_output if layer == num_layers - 1 else layer for layer in self.features]
        main_output = logits_output if self._has_head else end_layer - 1
        # OpenVINO breaks down where an output is named twice.
        if main_output not in outputs:
            outputs.append(main_output)

        # The main output is the last one. The others are features, and in another dtype they would
        # make OpenVINO add up all layers in that dtype.
        results = [model.outputs[index].get_node() for index in outputs]
        _, feature_type = PRECISIONS[computing_dtype(dtype)]
        for result in results[:-1]:
            feature = ops.convert(result.input_value(0), feature_type)
            result.input(0).replace_source_output(feature.output(0))

        hidden, positions, scored = [model_input.get_node() for model_input in model.inputs]
        if first_layer > 0:
            hidden = _entry_after(model, first_layer - 1)
        inputs = [hidden]
        if self._has_head:
            inputs.append(scored)
        if first_layer < end_layer:
            inputs.append(positions)
        part = ov.Model(results, inputs, "layers")
        self.compiled = Compiled(part, dtype, dynamic_group=dynamic_group)

    def run(
        self,
        hidden: Any,
        scored: np.ndarray,
        state: PagedState | None,
        call_inputs: Sequence[np.ndarray],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the logits of the scored positions, or the last layer's output `[P, 1, D]`; and
        the features.

        Args:
            hidden: the first layer's input, `[P, 1, D]`.
            scored: indices among the P tokens.
            state: keys and values; None for the output head alone.
            call_inputs: `PagedCall.inputs`; empty for the output head alone.
        """
        if not self._has_head:
            outputs = self.compiled.run([hidden, *call_inputs], state, self.first_layer)
        else:
            num_scored = len(scored)
            if num_scored:
                size = self._fewest_scored
                if state is not None:
                    size = state.num_scored.padded(num_scored)
                if size > num_scored:
                    # Pad with positions that are scored twice.
                    scored = np.resize(scored, size)
            outputs = self.compiled.run([hidden, scored, *call_inputs], state, self.first_layer)
            outputs[-1] = outputs[-1][:num_scored]
        return outputs[-1], dict(zip(self.features, outputs, strict=False))


@dataclass(frozen=True)
class _CompiledLayers:
    """All layers of a model, compiled.

    Args:
        graphs: in their order.
        features: the layers whose outputs they return.
        exit_layers: numbers of layers after which they are divided.
    """

    graphs: list[_Graph]
    features: frozenset[int]
    exit_layers: tuple[int, ...]

    def serves(self, features: Sequence[int], exit_layers: Sequence[int]) -> bool:
        """Whether they return these features, and are divided after these numbers of layers."""
        is_divided = all(layer in self.exit_layers for layer in exit_layers)
        return is_divided and self.features.issuperset(features)


def _entry_after(model: ov.Model, layer: int) -> Any:
    """A new input in place of a layer's output.

    It replaces the model's own input too, whose shape later layers may read.
    """
    layer_output = model.outputs[layer].get_node().input_value(0)
    entry = ops.parameter(layer_output.get_partial_shape(), ov.Type.f32)
    for source in (layer_output, model.inputs[0].get_node().output(0)):
        for reader in source.get_target_inputs():
            if reader.get_node().get_type_name() != "Result":
                reader.replace_source_output(entry.output(0))
    return entry


_CHANGED = "the weights changed after the model was converted: convert it again with OpenVINOLM.of"


class OpenVINOLM(HuggingFaceLM):
    """A transformers model on a CPU whose layers and output head run in OpenVINO; for decoding
    only.

    Args:
        model: the model, of a dtype of `PRECISIONS`; its weights are shared.
        directory: its converted files, as `converted` returns them.
        quantization: of these files' weights.
        dynamic_group: see `DYNAMIC_GROUP`.
        compute_dtype: a dtype of `PRECISIONS` for the layers; None for the model's own.
        is_unchanged: whether nobody else holds the model, so that its weights need not be watched,
            and these files show that its parts compute what it does.

    Attributes:
        compute_dtype: what the layers compute in.
    """

    backend = "openvino"

    def __init__(
        self,
        model: HuggingFaceLM,
        directory: Path,
        quantization: str | None = None,
        *,
        dynamic_group: int = DYNAMIC_GROUP,
        compute_dtype: torch.dtype | None = None,
        is_unchanged: bool = False,
    ) -> None:
        super().__init__(model.model, tokenizer=model.tokenizer)
        self.origin = model.origin
        self.directory = directory
        self.quantization = quantization
        self.dynamic_group = dynamic_group
        # A calibration belongs to these settings too, and heads are quantized like their target.
        self.settings = quantization
        self.compute_dtype = computing_dtype(compute_dtype or model.dtype)
        self._dtype = model.dtype
        self._is_unchanged = is_unchanged
        self._stamp = self._present_stamp()
        self._checksum: list[int] = []
        if self.origin is None:
            self._checksum = weights_checksum(self._tensors())
        if is_unchanged:
            # To compare the parts with the whole model would read all weights.
            self._parts = LayerStack(self.model)
        self._fewest_tokens = 1 if quantization is None else FEWEST_QUANTIZED_TOKENS
        self._head: _Graph | None = None
        self._compiling = Lock()
        # Replaced as a whole, since other threads may read it. None while it is compiled again.
        self._compiled: _CompiledLayers | None = None
        self._compiled_for()

    @classmethod
    def of(
        cls,
        model: HuggingFaceLM,
        quantization: str | None = None,
        *,
        is_unchanged: bool = False,
    ) -> OpenVINOLM:
        """The model in OpenVINO: converted at the first use, then read from the cache directory.

        With quantized weights, activations are quantized too if this processor computes the same
        bits in calls of all widths; otherwise they are not quantized, which is slower for several
        tokens.

        Args:
            quantization: as of `convert`.
            is_unchanged: whether the model has just been loaded, and nobody else holds it.

        Raises:
            ValueError: see `converted` and `check_openvino`.
        """
        check_openvino(model.device, model.dtype)
        directory = converted(model, quantization, is_unchanged=is_unchanged)
        decoded = cls(model, directory, quantization, is_unchanged=is_unchanged)
        if quantization is None:
            return decoded

        agreement = agreement_of(decoded)
        if agreement is None or agreement.difference == 0:
            return decoded
        # Quantized activations amplify rounding: a difference in the last bit becomes one percent
        # after 30 layers.
        if decoded.compute_dtype == torch.float32 or not agreement.holds:
            log.info("this processor rounds differently by width: activations are not quantized")
            # Its memory is free before that of the other one is needed.
            del decoded
            gc.collect()
            return cls(model, directory, quantization, dynamic_group=0, is_unchanged=is_unchanged)
        return decoded

    def _compiled_for(
        self,
        features: Sequence[int] = (),
        exit_layers: Sequence[int] = (),
    ) -> _CompiledLayers:
        """The compiled layers, which return these features and are divided after these numbers of
        layers. They are compiled again if they are not.

        Other threads go on with the present ones in the meantime, if there is memory for both.
        """
        present = self._compiled
        if present is not None and present.serves(features, exit_layers):
            return present
        with self._compiling:
            present = self._compiled
            if present is not None and present.serves(features, exit_layers):
                return present

            all_features = frozenset(features)
            all_exits = set(exit_layers)
            if present is not None:
                all_features |= present.features
                all_exits |= {*present.exit_layers}
            if not self._has_room_for_two():
                # Each holds the weights in the layout of this processor.
                present = None
                self._compiled = None
            self._compiled = self._compile_layers(all_features, tuple(sorted(all_exits)))
            return self._compiled

    def _has_room_for_two(self) -> bool:
        """Whether the layers may be compiled while those that are compiled already are in use."""
        num_bytes = (self.directory / "model.bin").stat().st_size
        available = available_bytes("cpu")
        return available is not None and available > COMPILING_SPACE * num_bytes

    def _compile_layers(
        self, features: frozenset[int], exit_layers: tuple[int, ...]
    ) -> _CompiledLayers:
        """Compile the layers, divided after each number of layers in `exit_layers`."""
        borders = (0, *exit_layers, self.stack.num_layers)
        with Activity("compiling the model for this processor"):
            graphs = [self._compile_part(*layers, features) for layers in pairwise(borders)]
        return _CompiledLayers(graphs, features, exit_layers)

    def _compile_part(
        self, first_layer: int, end_layer: int, features: frozenset[int] = frozenset()
    ) -> _Graph:
        return _Graph(
            _core().read_model(self.directory / "model.xml"),
            first_layer,
            end_layer,
            features,
            self.compute_dtype,
            fewest_scored=self._fewest_tokens,
            dynamic_group=self.dynamic_group,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HuggingFaceLM:
        return HuggingFaceLM(deepcopy(self.model, memo), tokenizer=self.tokenizer)

    def packed(self) -> OpenVINOLM:
        return self

    fused = pack = packed

    def _read_config(self) -> None:
        super()._read_config()
        if self.position_switch is not None:
            # The converted layers choose one side for all rows of a call.
            self.longer_texts_with = (
                f'backend="torch" (--backend torch), which reads up to {self.max_positions} tokens'
            )
            self.max_positions = self.position_switch
            self.position_switch = None

    def _tensors(self) -> Iterator[Tensor]:
        """All weights and buffers that the converted model holds as copies."""
        return iter(fixed_tensors(self.model))

    def _present_stamp(self) -> tuple[list[WeightIdentity], bytes]:
        return weights_stamp(self, reads_values=not self._is_unchanged)

    def refresh(self) -> None:
        super().refresh()
        # torch does not count all writes, and a sample of the values may miss one. A model that was
        # loaded by name is held by nobody else, so its calls need not read all weights.
        is_loaded_by_name = self.origin is not None
        if not is_loaded_by_name and weights_checksum(self._tensors()) != self._checksum:
            raise ValueError(_CHANGED)

    def init_state(self, batch_size: int, max_length: int) -> PagedState:
        if self._present_stamp() != self._stamp:
            raise ValueError(_CHANGED)
        sizes = []
        for graph in self._compiled_for().graphs:
            sizes += graph.compiled.sizes
        return PagedState(
            batch_size,
            max_length,
            sizes=sizes,
            dtype=self.compute_dtype,
            token_cost=self._token_cost,
            fewest_tokens=self._fewest_tokens,
        )

    @property
    def _token_cost(self) -> int:
        """Cost of a padding token; see `CallSizes`."""
        # Only processors with instructions for bfloat16 compute in it.
        has_spare_arithmetic = self.compute_dtype == torch.bfloat16 and self.quantization is None
        return TOKEN_COST if has_spare_arithmetic else COSTLY_TOKEN_COST

    def check_exit(self, num_layers: int) -> None:
        super().check_exit(num_layers)
        self._compiled_for(exit_layers=[num_layers])

    def prepare_features(self, layers: Sequence[int]) -> None:
        self._compiled_for(layers)

    @torch.no_grad()
    def exit_logits(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            num_layers = self.stack.num_layers
            self._head = self._compile_part(num_layers, num_layers)
        vectors = hidden.flatten(0, -2)
        inputs = vectors[:, None].float().contiguous()
        all_vectors = np.arange(len(vectors))
        logits, _ = self._head.run(inputs, all_vectors, None, ())
        return logits.unflatten(0, hidden.shape[:-1])

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Tensor | slice | None = None,
        features: Sequence[int] = (),
        exit_states: ExitStates | None = None,
    ) -> ModelOutput:
        batch_size, num_tokens = tokens.shape
        if state is None:
            state = self.init_state(batch_size, num_tokens)
        compiled = self._compiled_for(features)

        lengths = [num_tokens] * batch_size
        if valid_lengths is not None:
            lengths = as_list(valid_lengths)
        first_layer = 0
        inputs = tokens
        if exit_states is not None:
            first_layer = exit_states.num_layers
            inputs = self._completed(tokens, state, valid_lengths, exit_states)

        scored = _scored_indices(lengths, num_tokens, logits_for)
        with _shown(sum(lengths)):
            layers = (first_layer, self.stack.num_layers)
            logits, hidden = self._run(
                compiled, layers, inputs, state, state.consumed, lengths, scored
            )
        state.advance(num_tokens, valid_lengths)
        requested_features = {layer: hidden[layer] for layer in features}
        return ModelOutput(logits, requested_features, logits_for)

    @torch.no_grad()
    def lower(
        self,
        tokens: Tensor,
        state: DecodeState,
        starts: Sequence[int],
        num_layers: int,
    ) -> Tensor:
        assert isinstance(state, PagedState)
        # Tokens after a row's last slot are padding to the length of longer rows.
        num_slots = state.num_blocks * BLOCK
        lengths = [max(0, min(tokens.shape[1], num_slots - start)) for start in starts]
        no_scores = np.zeros((len(tokens), 0), dtype=np.int64)
        compiled = self._compiled_for(exit_layers=[num_layers])
        hidden, _ = self._run(compiled, (0, num_layers), tokens, state, starts, lengths, no_scores)
        return hidden

    def _run(
        self,
        compiled: _CompiledLayers,
        layers: tuple[int, int],
        inputs: Tensor,
        state: DecodeState,
        starts: Sequence[int],
        lengths: Sequence[int],
        scored: np.ndarray,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run some consecutive layers.

        Args:
            compiled: divided where these layers begin and end.
            layers: the first layer, and the first one after the last.
            inputs: tokens `[B, T]`, or the input of `first_layer`, `[B, T, D]`.
            starts: position of each row's first token.
            lengths: how many of each row's T tokens are real.
            scored: indices `[B, K]` among the N tokens.

        Returns:
            The logits `[B, K, V]` of the scored positions, or the last layer's output `[B, T, D]`
            if layers follow; and the features by layer. Padding is zero.
        """
        assert isinstance(state, PagedState), f"OpenVINO needs a PagedState, got {state}"
        first_layer, end_layer = layers
        graphs = [
            graph
            for graph in compiled.graphs
            if first_layer <= graph.first_layer and graph.end_layer <= end_layer
        ]
        call_sizes = state.num_tokens[graphs[0].first_layer]
        call = _plan(state, starts, lengths, call_sizes)

        hidden = call.pad(flatten_rows(inputs, lengths))
        if not inputs.is_floating_point():
            # These are tokens, which the embedding turns into the first layer's input.
            positions = torch.from_numpy(call.positions)
            if self.max_positions is not None:
                positions = positions.clamp(max=self.max_positions - 1)
            hidden = self.stack.embed(hidden, positions)
        hidden = hidden.float().contiguous()

        features: dict[int, Tensor] = {}
        scored_indices = call.indices(scored.reshape(-1))
        for graph in graphs:
            hidden, graph_features = graph.run(hidden, scored_indices, state, call.inputs)
            features |= graph_features

        shape = inputs.shape[:2]
        padded_features: dict[int, Tensor] = {}
        for layer, feature in features.items():
            padded_features[layer] = self._as_rows(feature, call, lengths, shape)

        if end_layer == self.stack.num_layers:
            # The output head has turned the scored positions into logits.
            logits = hidden.view(*scored.shape, hidden.shape[-1])
            return logits, padded_features
        return self._as_rows(hidden, call, lengths, shape), padded_features

    def _as_rows(
        self,
        outputs: Tensor,
        call: PagedCall,
        lengths: Sequence[int],
        shape: torch.Size,
    ) -> Tensor:
        """A layer's output `[P, 1, D]` as rows `[B, T, D]` in the model's dtype, with zeros at
        padding."""
        vectors = call.unpad(outputs[:, 0]).to(self._dtype)
        is_padded = len(vectors) < shape.numel()
        if not is_padded:
            return vectors.view(*shape, -1)

        rows = vectors.new_zeros(*shape, vectors.shape[-1])
        vectors_by_row = vectors.split(list(lengths))
        for row, row_vectors in zip(rows, vectors_by_row, strict=True):
            row[: len(row_vectors)] = row_vectors
        return rows


@contextmanager
def _shown(num_tokens: int) -> Iterator[None]:
    """Show that a long prompt is read. One call reads all of it, so no part of it can be."""
    if num_tokens < LONG_CALL_TOKENS:
        yield
        return
    with Activity(f"reading {num_tokens:,} tokens of the prompt in one call") as activity:
        activity.announce()
        yield


def _plan(
    state: PagedState,
    starts: Sequence[int],
    lengths: Sequence[int],
    sizes: CallSizes,
) -> PagedCall:
    """Plan a call, padded to a size that keeps the network's shapes."""
    context = 0
    num_tokens = 0
    for start, length in zip(starts, lengths, strict=True):
        context = max(context, start + length)
        if length:
            num_tokens += max(length, state.fewest_tokens)
    size = sizes.padded(num_tokens, context)
    return state.plan_call(starts, lengths, size)


def _scored_indices(
    lengths: Sequence[int],
    num_tokens: int,
    logits_for: Tensor | slice | None,
) -> np.ndarray:
    """Indices `[B, K]` among the N tokens of the positions to score; 0 for those at padding."""
    if isinstance(logits_for, Tensor):
        positions = logits_for.numpy()
    else:
        columns = slice(None) if logits_for is None else logits_for
        positions = np.arange(num_tokens)[None, columns]

    # The N tokens are the rows' real tokens, one row after the other.
    row_ends = np.cumsum(lengths)
    row_starts = row_ends - lengths
    is_real = positions < np.array(lengths)[:, None]
    return np.where(is_real, row_starts[:, None] + positions, 0)
