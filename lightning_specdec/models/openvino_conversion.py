"""Convert a transformers model to a file of OpenVINO's, with attention left open.

Shapes: B rows, D hidden size, N scored tokens, P tokens of one call, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from contextlib import redirect_stdout
from io import StringIO
from operator import call
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import openvino as ov
import torch
from openvino import opset13 as ops
from openvino.frontend import GeneralFailure, OpConversionFailure
from openvino.frontend.pytorch import ConversionExtension, ModuleExtension
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.model_config import FOREIGN, first_line, quiet

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FORMAT = 4
"""Of the converted files: a change of what they hold raises it, so that kept ones are made anew."""
GROUP = 64
"""Weights of a group of the int4 quantization, which share a scale."""
_ATTENTION = "lightning_specdec_openvino"
"""The attention of a model that is converted: its name in transformers and in OpenVINO."""
SIZES = (6, 10, 16)
"""Tokens that calls on a few compute: up to six cost what one costs, and another size than before 6 ms."""
MOST_PADDING = 5
"""Tokens that other calls compute in vain, at most, to have the shape of the last one."""
MOST_ATTENDED = 10_000
"""Tokens that padding attends to at most: 6 ms, as much as another size costs."""
MOST_PADDED = 25_000
"""Tokens that the padding of calls in a row attends to at most: as much as another size costs, and the way back."""
ROW, QUANTIZED_ROW = 125, 1_500
"""Attended tokens that cost as much as what else is computed for a token of padding."""


class Attention(ov.Op):
    """One layer's attention in a converted file. A compiled model has `_paged_attention` in its place, which OpenVINO
    writes to files but cannot read."""

    def __init__(self, inputs: Any = None) -> None:
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        self.set_output_type(0, self.get_input_element_type(0), self.get_input_partial_shape(0))

    def clone_with_new_inputs(self, new_inputs: Any) -> Attention:
        return Attention(new_inputs)

    def get_type_info(self) -> ov.DiscreteTypeInfo:
        return ov.DiscreteTypeInfo("Attention", "lightning_specdec")


class _Traced(nn.Module):
    """`Attention` while a model is traced: it only gives the right shape."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, sizes: Tensor, scale: Tensor, *past: Tensor
    ) -> Tensor:
        return query + key.sum() + value.sum()


class _OpenAttention(nn.Module):
    """Stands for attention where a network is traced: of P tokens, whose keys and values a state keeps.

    Each token is a row of its own, so that moving the heads behind it moves no numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traced = _Traced()

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
        """
        Args:
            past: how many tokens lie before each one, where it is the next one of its row and follows tokens that the
                same layer reads earlier in the same call.
        """
        shapes = [
            [int(each.shape[i]) for i in (1, 3)] for each in (query, key, value)
        ]  # constants of the graph
        (heads, size), (groups, _), (_, value_size) = shapes
        flat = [
            each.transpose(1, 2).reshape(-1, math.prod(shape))
            for each, shape in zip((query, key, value), shapes, strict=True)
        ]
        sizes = torch.tensor([groups, size, value_size, window or 0], dtype=torch.int32)
        more = () if past is None else (past,)
        found: Tensor = self.traced(*flat, sizes, torch.tensor(scale or size**-0.5), *more)
        return found.reshape(-1, 1, heads, value_size).transpose(1, 2)


open_attention = _OpenAttention()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls while a model is traced, on P rows of a token."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"its attention has a {name}, which OpenVINO's paged attention does not compute"
            )
    given = open_attention(
        query, key, value, window=options.get("sliding_window"), scale=options.get("scaling")
    )
    return given.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


class _NewTokens(Cache):
    """Hands on a layer's new keys and values: the converted attention keeps them."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _Model(nn.Module):
    """All layers in turn, the final norm, and the output head for some tokens; gives the output of each."""

    def __init__(self, model: HuggingFaceLM) -> None:
        super().__init__()
        self.model, self.stack, self.attention = model.model, model.stack, open_attention

    def forward(
        self,
        hidden: Float[Tensor, "P 1 D"],
        positions: Int[Tensor, "P 1"],
        scored: Int[Tensor, "N"],
    ) -> tuple[Tensor, ...]:
        outputs = []
        begun = self.stack.begin(hidden, positions, None, _NewTokens())
        for layer in range(self.stack.num_layers):
            hidden = self.stack.run(hidden, begun, layer, layer + 1)
            outputs.append(hidden)
        normed = self.stack.norm(hidden)
        return *outputs, normed, self.stack.head(normed[:, 0].index_select(0, scored))


def convert(
    model: HuggingFaceLM, directory: Path, dtype: torch.dtype, quantization: str | None = None
) -> None:
    """Write a model to a directory, as `model.xml` with its weights beside.

    Its outputs are those of each layer, of the final norm, and the logits.

    It is traced in float32, as OpenVINO's fused operations expect it; what computes in bfloat16 is chosen when it is
    compiled.

    Args:
        model: the model in float32.
        dtype: of the weights in the files, where they are not quantized.
        quantization: of the weights, by NNCF: "int8" with a scale for each output, "int4" with one for each group of
            `GROUP` weights, or fewer where these do not divide a layer (the output head in int8); None for plain ones.

    Raises:
        ValueError: OpenVINO cannot run it.
    """
    before = model.model.config._attn_implementation
    try:
        network = _Model(model)  # its parts are checked with its own attention
        model.model.set_attn_implementation(_ATTENTION)
        example = (
            torch.zeros(4, 1, model.hidden_size or 0),
            torch.arange(4)[:, None],
            torch.arange(2),
        )
        converted = traced(network, example, dtype, quantization)
        ov.save_model(converted, directory / "model.xml", compress_to_fp16=False)
    except (*FOREIGN, GeneralFailure, OpConversionFailure) as error:
        what = type(model.model).__name__
        raise ValueError(
            f"OpenVINO cannot run {what}: {first_line(error)}: use --backend torch"
        ) from error
    finally:
        model.model.set_attn_implementation(before)


def traced(
    network: nn.Module, example: tuple[Tensor, ...], dtype: torch.dtype, quantization: str | None
) -> ov.Model:
    """A network in OpenVINO's operations, `Attention` among them; arguments as of `convert`.

    Args:
        example: its inputs, whose first dimensions may be others later.
    """
    modules = {
        _Traced: ModuleExtension(
            _Traced, _ATTENTION, evaluate=call, convert=lambda _, *args: call(*args)
        )
    }
    attention = ConversionExtension(
        _ATTENTION,
        lambda context: Attention(
            [context.get_input(i) for i in range(context.get_input_size())]
        ).outputs(),
    )
    # OpenVINO and NNCF report their use over the network, each time from a new fork of this process.
    unreported = patch("openvino_telemetry.utils.sender.TelemetrySender.send")
    with quiet(), warnings.catch_warnings(), torch.no_grad(), unreported:
        warnings.simplefilter("ignore")
        once = {"check_trace": False}
        decoder = TorchScriptPythonDecoder(
            network, None, example, module_extensions=modules, trace_kwargs=once
        )
        shapes = [ov.PartialShape([-1, *each.shape[1:]]) for each in example]
        converted = ov.convert_model(decoder, input=shapes, extension=attention)
        if quantization is not None:
            return _quantized(converted, quantization)
    if dtype == torch.bfloat16:
        _narrow(converted)
    return converted


def _narrow(model: ov.Model) -> None:
    """Keep the matrices in bfloat16, from which they were made."""
    for node in model.get_ordered_ops():
        if (
            node.get_type_name() == "Constant"
            and node.get_element_type() == ov.Type.f32
            and len(node.shape) == 2
        ):
            values = torch.from_numpy(node.data.copy()).to(torch.bfloat16)
            narrow = ops.constant(shared_tensor(values), shared_memory=False)
            node.output(0).replace(ops.convert(narrow, "f32").output(0))


def shared_tensor(tensor: Tensor) -> ov.Tensor:
    """The same memory as a tensor of OpenVINO."""
    if tensor.dtype == torch.bfloat16:  # numpy has none
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _quantized(model: ov.Model, quantization: str) -> ov.Model:
    import nncf

    nncf.set_log_level("ERROR")
    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_SYM}
    if quantization == "int4":
        adjusted = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST
        )
        options = {
            "mode": nncf.CompressWeightsMode.INT4_SYM,
            "group_size": GROUP,
            "advanced_parameters": adjusted,
        }
    with redirect_stdout(StringIO()):  # it shows its progress there
        return nncf.compress_weights(model, **options)


class Sizes:
    """One dimension of a network's inputs from call to call: a new shape costs OpenVINO milliseconds (docs/log.md).

    Args:
        row: see `ROW`.
    """

    def __init__(self, row: int = ROW) -> None:
        self._row, self._size, self._padded = row, 0, 0

    def padded(self, number: int, context: int = 0) -> int:
        """The size of `SIZES` that holds it; that of the last call where it is near, until it would have been cheaper
        to change. Padding attends to the context too, so behind a long one there is none."""
        size = next((each for each in SIZES if 1 < number <= each), number)
        most = SIZES[-1] if number <= SIZES[-1] else number + MOST_PADDING
        padded = self._padded + (self._size - number) * (context + self._row)
        if size < self._size <= most and padded <= MOST_PADDED:
            self._padded = padded
        else:
            self._size, self._padded = (
                size if (size - number) * context <= MOST_ATTENDED else number,
                0,
            )
        return self._size
