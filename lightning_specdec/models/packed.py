"""Linear layers in a processor's layout: packed for a CPU's kernels, or quantized."""

from __future__ import annotations

import logging
import os
import platform
import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.models import QUANTIZATIONS
from lightning_specdec.models.changes import has_user_code

NUM_TOKENS = 8
"""Number of tokens of a call that weights are packed for, about that of a round. The layout works
for any number."""
MIN_WIDE_ROWS = 128
"""From this number of tokens on, converting a weight to float32 costs less than computing in a type
that the processor does not have."""
MAX_INT8_ROWS = 4
"""Up to this number of tokens, the int8 kernel is faster than converting the weight to floats."""
SMALL_MODEL = 1_000_000
"""Parameters below which a product finishes before a second thread has woken up."""
_INT8_INPUT_SETTINGS = ("act_quant_scale", "act_pre_scale", "act_quant_kwargs")
"""What torchao's int8 weights have if their layer's inputs are quantized or scaled as well."""

_LINEAR = torch.ops.mkldnn._linear_pointwise.default
_NO_ACTIVATION: tuple[str, list[float], str] = ("none", [], "")
"""Last arguments of `_LINEAR`, which could apply an activation to the output."""


def _pack(weight: Tensor) -> Tensor:
    """The weight in oneDNN's layout, in which only `_LINEAR` can read it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_TOKENS)
    return packed


def limit_threads(num_parameters: int) -> None:
    """Use one CPU thread for a small network, unless OMP_NUM_THREADS is set.

    For a small product, waiting for other threads takes longer than they save.
    """
    if num_parameters < SMALL_MODEL and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


@cache
def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this processor has instructions for products of a type.

    oneDNN computes the others with conversions in its inner loops, several times slower than
    float32.
    """
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    if dtype != torch.bfloat16:
        return True
    if platform.machine() not in ("x86_64", "AMD64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    # On these processors, oneDNN supports bfloat16 without instructions for it as well.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class PackedLinear(nn.Module):
    """A linear layer over a weight that was laid out once for oneDNN's kernels.

    A product of a few tokens with a large matrix is bound by reading the matrix, and a packed one
    streams from memory. The product is the same up to the order of its sums.

    Args:
        weight: `[out, in]`, of float32, bfloat16 or float16.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._is_native = computes_natively(weight.dtype)
        # Plain attributes: a packed tensor is opaque, so it cannot be moved like a parameter.
        self.weight_packed = _pack(weight.detach().contiguous())
        self.bias_plain = None if bias is None else bias.detach().clone()

    def forward(self, inputs: Tensor) -> Tensor:
        # Inside torch.autocast, other layers return another type than the kernel accepts.
        if inputs.dtype != self.dtype:
            inputs = inputs.to(self.dtype)
        if not self._is_native and inputs.numel() >= MIN_WIDE_ROWS * self.in_features:
            return self._in_float32(inputs)
        return _LINEAR(inputs, self.weight_packed, self.bias_plain, *_NO_ACTIVATION)

    def _in_float32(self, inputs: Tensor) -> Tensor:
        """The same product, whose sums are in float32 either way."""
        bias = None if self.bias_plain is None else self.bias_plain.float()
        output = nn.functional.linear(inputs.float(), self.weight.float(), bias)
        return output.to(self.dtype)

    @property
    def weight(self) -> Tensor:
        """The plain weight, computed at each access. Some models read a small layer's weight."""
        return self.weight_packed.to_dense()

    @property
    def bias(self) -> Tensor | None:
        """The bias, for modules that read a layer's parameters, as adapters of PEFT do."""
        return self.bias_plain

    def __getstate__(self) -> dict[str, Any]:
        # A packed weight cannot be pickled, so the plain one stands in its place.
        return {**self.__dict__, "weight_packed": self.weight}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        plain_weight = self.weight_packed
        self.weight_packed = _pack(plain_weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        # A packed weight never changes, so copies share it.
        layer = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(layer)
        layer.__dict__.update(self.__dict__)
        memo[id(self)] = layer
        return layer


class Int8Linear(nn.Module):
    """A linear layer over int8 weights with a scale for each output, on a CPU.

    Args:
        weight: `[out, in]`, int8.
        scale: `[out]`, of the inputs' type.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale.detach().contiguous(), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if rows.shape[0] <= MAX_INT8_ROWS and inputs.dtype == torch.bfloat16:
            output = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            # The scale of an output applies to its whole sum, so it is multiplied afterwards.
            weight = self.weight.to(inputs.dtype)
            output = (rows @ weight.t()) * self.scale

        output = output.reshape(*inputs.shape[:-1], self.out_features)
        if self.bias is not None:
            output = output + self.bias
        return output


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is torch's linear layer or GPT-2's Conv1D (with a transposed weight)."""
    layer_class = type(layer)
    if layer_class is nn.Linear:
        return True
    # By name, because importing transformers takes seconds.
    qualified_name = f"{layer_class.__module__}.{layer_class.__name__}"
    return qualified_name == "transformers.pytorch_utils.Conv1D"


def can_pack(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one, on a CPU, of a type that the kernels support.

    A layer with hooks or with a replaced forward function is not plain.
    """
    if not is_linear(layer) or has_user_code(layer):
        return False

    # A subclass of Tensor, such as a quantized weight, has no plain values to pack.
    weight: Any = layer.weight
    if type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False

    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(weight.dtype == torch.float32)


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers inside `module` in place.

    A layer becomes a `PackedLinear`, or an `Int8Linear` if torchao has quantized it to int8. Its
    plain weight is freed as soon as the packed form exists, so only one layer is held twice. A
    weight with a second use, as an output head tied to the embedding, stays next to its packed
    form. Layers with hooks or a replaced forward function stay unchanged.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _has_int8_rows(child):
                setattr(parent, name, _int8_linear(child))
            elif can_pack(child):
                setattr(parent, name, _packed_layer(child))


def _has_int8_rows(layer: nn.Module) -> bool:
    """Whether torchao has quantized a layer's weight to int8 with one scale for each output.

    Other forms of int8 quantize the inputs as well, or have more scales, or a zero point.
    """
    weight: Any = getattr(layer, "weight", None)
    int8_values: Any = getattr(weight, "qdata", None)
    if not isinstance(layer, nn.Linear) or int8_values is None or has_user_code(layer):
        return False
    if int8_values.dtype != torch.int8 or int8_values.shape != weight.shape:
        return False
    if any(getattr(weight, name, None) is not None for name in _INT8_INPUT_SETTINGS):
        return False
    # A symmetric quantization may store zeros.
    zero_point: Any = getattr(weight, "zero_point", None)
    if zero_point is not None and zero_point.any():
        return False
    return bool(weight.scale.numel() == layer.out_features)


def _int8_linear(layer: Any) -> Int8Linear:
    weight = layer.weight
    # torchao keeps its scales in float32; the kernel needs the type of the inputs.
    scale = weight.scale.reshape(-1).to(weight.dtype)
    return Int8Linear(weight.qdata, scale, layer.bias)


def _packed_layer(layer: Any) -> PackedLinear:
    if isinstance(layer, nn.Linear):
        return PackedLinear(layer.weight, layer.bias)
    # GPT-2's Conv1D holds its weight transposed.
    return PackedLinear(layer.weight.t(), layer.bias)


def check_quantization(kind: str | None, device: str | torch.device) -> None:
    """Raise ValueError if a device has no kernel for a quantization, or torchao is missing."""
    if kind not in (None, *QUANTIZATIONS):
        raise ValueError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, got {kind!r}")
    if kind is not None and find_spec("torchao") is None:
        raise ValueError(
            f"quantized weights need torchao: {sys.executable} -m pip install torchao==0.18.0"
        )
    if kind == "int4" and torch.device(device).type != "cuda":
        raise ValueError(
            f"int4 weights have a kernel on a CUDA GPU only, not on {device}: use int8"
        )


def quantize(module: nn.Module, kind: str) -> None:
    """Quantize the weights of every linear layer inside `module` in place, with torchao.

    Args:
        kind: "int8": one scale for each output; "int4": a scale and a zero point for each 128
            weights.

    Raises:
        ValueError: the kind is unknown, torchao is missing, or this machine has no kernel for it.
    """
    check_quantization(kind, next(module.parameters()).device)

    # torchao logs every GPU kernel that it could not load.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    # torchao quantizes nn.Linear only, so that GPT-2's transposed layers are rewritten first.
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child) and not isinstance(child, nn.Linear):
                setattr(parent, name, _as_linear(child))

    config = Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(group_size=128)
    try:
        quantize_(module, config)
    except (ImportError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"this machine cannot hold {kind} weights: {reason}") from error
    module.requires_grad_(False)


def _as_linear(layer: nn.Module) -> nn.Linear:
    """GPT-2's Conv1D as torch's linear layer."""
    weight: Any = layer.weight
    bias: Any = layer.bias
    num_inputs, num_outputs = weight.shape
    linear = nn.Linear(num_inputs, num_outputs, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach().t().contiguous())
    linear.bias = bias
    return linear
