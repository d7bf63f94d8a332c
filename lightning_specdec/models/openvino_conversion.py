"""Convert a transformers model to OpenVINO files, with `Attention` in place of its attention.

Shapes: D hidden size, H query heads, G key heads, E size of a query's head, F size of a value's
head; S scored tokens; P tokens of one call.
"""

from __future__ import annotations

import math
import shutil
import warnings
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from xml.etree import ElementTree

import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.frontend import GeneralFailure, OpConversionFailure
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from lightning_specdec.config.activity import Activity
from lightning_specdec.config.memory import gigabytes
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.layers import LayerStack
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet
from lightning_specdec.models.paged_state import shared_tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FORMAT = 5
"""Version of the converted files. Raise it when their content changes, so that cached ones are
converted again."""
GROUP = 64
"""Weights that share a scale in the int4 quantization."""
_ATTENTION = "lightning_specdec_openvino"
"""Name of `Attention` in transformers and in OpenVINO while a model is converted."""


class Attention(ov.Op):
    """One layer's attention in a converted file.

    A compiled network has OpenVINO's paged attention in its place, which OpenVINO writes to files
    but cannot read.
    """

    def __init__(self, inputs: Any = None) -> None:
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs: Any) -> Attention:
        return Attention(new_inputs)

    def get_type_info(self) -> ov.DiscreteTypeInfo:
        return ov.DiscreteTypeInfo("Attention", "lightning_specdec")


class _TracedAttention(nn.Module):
    """Becomes `Attention` when a network is traced. It only returns the right shape."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sizes: Tensor,
        scale: Tensor,
        *past: Tensor,
    ) -> Tensor:
        return query + key.sum() + value.sum()


class _OpenAttention(nn.Module):
    """The attention of a traced network: on P tokens, whose keys and values a state keeps.

    Each token is a separate batch row, so that moving the heads after it moves no numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traced = _TracedAttention()

    def forward(
        self,
        query: Float[Tensor, "P H 1 E"],
        key: Float[Tensor, "P G 1 E"],
        value: Float[Tensor, "P G 1 F"],
        *,
        window: int | None = None,
        scale: float | None = None,
        past: Int[Tensor, "P"] | None = None,
    ) -> Float[Tensor, "P H 1 F"]:
        """Attend to the tokens of each token's own row.

        Args:
            window: how many tokens a token attends to, itself included; None for all.
            scale: factor of the scores; None for the inverse root of the head size.
            past: how many tokens precede each one, if it follows tokens of its row that the same
                layer reads earlier in the same call.
        """
        # int() makes the sizes constants of the traced network.
        num_heads = int(query.shape[1])
        head_size = int(query.shape[3])
        num_key_heads = int(key.shape[1])
        value_size = int(value.shape[3])
        sizes = torch.tensor([num_key_heads, head_size, value_size, window or 0], dtype=torch.int32)
        scale_input = torch.tensor(scale or 1 / math.sqrt(head_size))

        # The heads of each token side by side.
        joined_query = query.transpose(1, 2).reshape(-1, num_heads * head_size)
        joined_key = key.transpose(1, 2).reshape(-1, num_key_heads * head_size)
        joined_value = value.transpose(1, 2).reshape(-1, num_key_heads * value_size)

        inputs = [joined_query, joined_key, joined_value, sizes, scale_input]
        if past is not None:
            inputs.append(past)
        outputs: Tensor = self.traced(*inputs)
        return outputs.reshape(-1, 1, num_heads, value_size).transpose(1, 2)


open_attention = _OpenAttention()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls while a model is traced, on P rows of one
    token."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"its attention has a {name}, which OpenVINO's paged attention does not compute"
            )
    outputs = open_attention(
        query, key, value, window=options.get("sliding_window"), scale=options.get("scaling")
    )
    return outputs.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


class _NoCache(Cache):
    """Passes on a layer's new keys and values: the converted attention keeps the earlier ones."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _WholeModel(nn.Module):
    """All layers, the final norm, and the output head for some tokens. Returns the output of
    each.

    It is a copy of a model that shares its matrices.

    Raises:
        ValueError: the model cannot be taken apart.
    """

    def __init__(self, model: HuggingFaceLM) -> None:
        super().__init__()
        _ = model.stack  # Checks that the parts compute what the model does.
        self.model = _traceable(model.model)
        self.stack = LayerStack(self.model)
        self.attention = open_attention

    def forward(
        self,
        hidden: Float[Tensor, "P 1 D"],
        positions: Int[Tensor, "P 1"],
        scored: Int[Tensor, "S"],
    ) -> tuple[Tensor, ...]:
        outputs = []
        shared_arguments = self.stack.begin(hidden, positions, None, _NoCache())
        for layer in range(self.stack.num_layers):
            hidden = self.stack.run(hidden, shared_arguments, layer, layer + 1)
            outputs.append(hidden)
        normed = self.stack.norm(hidden)
        logits = self.stack.head(normed[:, 0].index_select(0, scored))
        return *outputs, normed, logits


_MATRIX_LAYERS = (nn.Linear, Conv1D, nn.Embedding)
"""Layers whose matrices are converted in their own dtype."""
_STORED_WEIGHT = "stored_weight"
"""Attribute of such a layer in a traceable copy: the original's weight."""


def _traceable(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that is traced in float32. It shares the matrices, whatever their dtype.

    In place of these, its layers have matrices of zeros that take no memory: a model may read their
    dtype.
    """
    matrices: dict[int, Any] = {}
    for module in model.modules():
        if type(module) in _MATRIX_LAYERS:
            matrices[id(module.weight)] = module.weight
    copy = deepcopy(model, matrices)

    for module in copy.modules():
        if type(module) in _MATRIX_LAYERS:
            weight: Any = module.weight
            module.register_buffer(_STORED_WEIGHT, weight.detach())
            zeros = torch.zeros((), dtype=torch.float32).expand(weight.shape)
            module.weight = nn.Parameter(zeros, requires_grad=False)
        # Other layers may share a matrix with the original, so nothing is written in place.
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                values = parameter.detach().float()
                module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in module._buffers.items():
            if name != _STORED_WEIGHT and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
    return copy


def _matrix_extension(layer: type[nn.Module], operation: str) -> ModuleExtension:
    """How layers of a traceable copy are traced: as an operation on the original's weight.

    Args:
        operation: OpenVINO's name of the layer's operation on matrices of any dtype.
    """

    def emit(module: Any, operation: Any, inputs: Tensor) -> Tensor:
        return operation(inputs, getattr(module, _STORED_WEIGHT), module.bias)

    def compute(module: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Only the shape counts.
        num_outputs = weight.shape[0 if layer is nn.Linear else 1]
        return inputs.new_full((*inputs.shape[:-1], num_outputs), 0.5)

    return ModuleExtension(
        layer,
        operation,
        convert=emit,
        evaluate=compute,
        condition=lambda module: hasattr(module, _STORED_WEIGHT),
    )


def convert(
    model: HuggingFaceLM,
    directory: Path,
    quantization: str | None = None,
) -> None:
    """Write a model to a directory as `model.xml`, with its weights in `model.bin`.

    Its outputs are those of each layer, of the final norm, and the logits. It is traced in float32,
    as OpenVINO's fused operations expect, over matrices in the model's dtype; whether it computes
    in bfloat16 is chosen when it is compiled.

    Args:
        model: the model, in a dtype that OpenVINO runs. Where they are not quantized, the matrices
            in the files have this dtype.
        quantization: of the weights, by NNCF: "int8" with a scale for each output, "int4" with one
            for each group of `GROUP` weights, or fewer where these do not divide a layer (the
            output head in int8); None for plain ones.

    Raises:
        ValueError: OpenVINO cannot run it, or the files cannot be written.
    """
    try:
        network = _WholeModel(model)
        network.model.set_attn_implementation(_ATTENTION)
        hidden = torch.zeros(4, 1, model.hidden_size or 0)
        positions = torch.arange(4)[:, None]
        scored = torch.arange(2)
        with Activity("converting the model to OpenVINO, once"):
            converted = traced(network, (hidden, positions, scored), model.dtype, quantization)
    except (*FOREIGN, GeneralFailure, OpConversionFailure) as error:
        name = type(model.model).__name__
        raise ValueError(
            f"OpenVINO cannot run {name}: {first_line(error)}: use --backend torch"
        ) from error
    with Activity("writing the converted model"):
        save(converted, directory)


def save(model: ov.Model, directory: Path) -> None:
    """Write a network as `model.xml` and `model.bin`.

    Raises:
        ValueError: the disk is full, or it cannot be written for another reason.
    """
    try:
        ov.save_model(model, directory / "model.xml", compress_to_fp16=False)
        _keep_bfloat16(directory / "model.xml")
    except (RuntimeError, OSError) as error:
        # OpenVINO reports a full disk as "basic_ios::clear: iostream error", without a path.
        needed_bytes = 0
        for node in model.get_ops():
            if node.get_type_name() == "Constant":
                needed_bytes += node.get_byte_size()
        free_bytes = shutil.disk_usage(directory).free
        raise ValueError(
            f"the converted model cannot be written to {directory.parent}: it needs "
            f"{gigabytes(needed_bytes)}, and {gigabytes(free_bytes)} are free: free some space, or "
            "set XDG_CACHE_HOME to another directory"
        ) from error


def _keep_bfloat16(path: Path) -> None:
    """Mark the conversions of bfloat16 weights in a network's file, so that they are not computed
    when it is compiled.

    OpenVINO would keep a copy of the weights in float32. It reads this mark in files alone.
    """
    tree = ElementTree.parse(path)
    for layer in tree.iterfind("layers/layer[@type='Convert']"):
        entry = layer.find("input/port")
        if entry is None or entry.get("precision") != "BF16":
            continue
        marks = layer.find("rt_info")
        if marks is None:
            marks = ElementTree.Element("rt_info")
            layer.insert(1, marks)
        if marks.find("attribute[@name='decompression']") is None:
            ElementTree.SubElement(marks, "attribute", name="decompression", version="0")
    tree.write(path)


def traced(
    network: nn.Module,
    example: tuple[Tensor, ...],
    dtype: torch.dtype,
    quantization: str | None,
) -> ov.Model:
    """A torch network in OpenVINO's operations and `Attention`. Other arguments as of `convert`.

    Args:
        example: its inputs. The first dimension of each may have another size later.
    """
    replaced_modules = {
        _TracedAttention: ModuleExtension(
            _TracedAttention,
            _ATTENTION,
            evaluate=call,
            convert=lambda _, *arguments: call(*arguments),
        ),
        nn.Linear: _matrix_extension(nn.Linear, "ov_ext::linear"),
        Conv1D: _matrix_extension(Conv1D, "ov_ext::conv1d"),
    }
    # OpenVINO and NNCF report their use over the network, each time from a new fork of this
    # process.
    no_reports = patch("openvino_telemetry.utils.sender.TelemetrySender.send")
    with quiet(), warnings.catch_warnings(), torch.no_grad(), no_reports:
        warnings.simplefilter("ignore")
        decoder = TorchScriptPythonDecoder(
            network,
            None,
            example,
            module_extensions=replaced_modules,
            trace_kwargs={"check_trace": False},
        )
        shapes = [ov.PartialShape([-1, *tensor.shape[1:]]) for tensor in example]
        extension = ConversionExtension(_ATTENTION, _to_attention)
        converted = ov.convert_model(decoder, input=shapes, extension=extension)
        if quantization is not None:
            return _quantized(converted, quantization)
    if dtype == torch.bfloat16:
        _store_in_bfloat16(converted)
    return converted


def _to_attention(context: Any) -> Any:
    """The outputs of an `Attention` with the inputs of a traced one."""
    inputs = [context.get_input(index) for index in range(context.get_input_size())]
    return Attention(inputs).outputs()


def _store_in_bfloat16(model: ov.Model) -> None:
    """Keep a network's matrices in bfloat16, the dtype that they were loaded in."""
    for node in model.get_ordered_ops():
        is_float32 = node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32
        is_matrix = is_float32 and len(node.shape) == 2
        if not is_matrix:
            continue

        values = torch.from_numpy(node.data.copy()).to(torch.bfloat16)
        stored = ops.constant(shared_tensor(values), shared_memory=False)
        converted = ops.convert(stored, "f32")
        node.output(0).replace(converted.output(0))


def _quantized(model: ov.Model, quantization: str) -> ov.Model:
    """A network with weights quantized by NNCF."""
    import nncf

    nncf.set_log_level("ERROR")
    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if quantization == "int4":
        options = {
            "mode": nncf.CompressWeightsMode.INT4_SYM,
            "group_size": GROUP,
            "advanced_parameters": nncf.AdvancedCompressionParameters(
                group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
            ),
        }
    # NNCF writes its progress to standard output.
    with redirect_stdout(StringIO()):
        return nncf.compress_weights(model, **options)
