"""Weights as a processor wants them: packed for a CPU's kernels, quantized to int8 or int4; and its threads."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.models import QUANTIZATIONS

NUM_TOKENS = 8
"""Tokens of a call that weights are packed for: rounds verify about as many. The layout serves any number."""
MOST_ROWS = 4
"""Tokens up to which the int8 kernel, which takes them one by one, beats converting the weight to floats."""
SMALL_MODEL = 1_000_000
"""Parameters below which a product is done before a second thread has woken up."""

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


def limit_threads(num_parameters: int) -> None:
    """Use one CPU thread for a small network, unless OMP_NUM_THREADS is set: waiting for others costs more."""
    if num_parameters < SMALL_MODEL and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


class PackedLinear(nn.Module):
    """A linear layer over a weight that was laid out once for oneDNN's kernels.

    A product of a few tokens with a large matrix is bound by reading the matrix, and a packed one streams from memory.
    The product is the same up to the order of its sums.

    Args:
        weight: `[out, in]`, of float32, bfloat16 or float16.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Plain attributes: a packed tensor is opaque, so it can neither be saved nor moved like a parameter.
        self.weight_packed = torch.ops.mkldnn._reorder_linear_weight(
            weight.detach().contiguous(), NUM_TOKENS
        )
        self.bias_plain = None if bias is None else bias.detach().clone()

    def forward(self, inputs: Tensor) -> Tensor:
        return _PRODUCT(inputs, self.weight_packed, self.bias_plain, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """The plain weight, laid out anew each time: for models that read a small layer's instead of calling it."""
        return self.weight_packed.to_dense()


class Int8Linear(nn.Module):
    """A linear layer over int8 weights with a scale for each output, on a CPU; inputs stay as they are.

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
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if rows.shape[0] <= MOST_ROWS and inputs.dtype == torch.bfloat16:
            output = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            output = (rows @ self.weight.to(inputs.dtype).t()) * self.scale
        output = output.reshape(*inputs.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one: torch's, or GPT-2's Conv1D, which has its weight transposed."""
    return type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"


def can_pack(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one, on a CPU, of a type that the kernels know."""
    weight: Any = getattr(layer, "weight", None)
    if not is_linear(layer) or type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(weight.dtype == torch.float32)


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers below `module` in place: by `PackedLinear`, or `Int8Linear` where quantized to int8.

    Each layer's own weight is let go as soon as its packed form is there, so only one layer is held twice; a weight
    that something else uses too, as an output head tied to the embedding, stays beside its packed form.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            weight: Any = getattr(child, "weight", None)
            int8 = getattr(weight, "qdata", None)
            if isinstance(child, nn.Linear) and int8 is not None and int8.shape == weight.shape:
                # torchao keeps its scales in float32; the kernel wants them in the inputs' type.
                scale = weight.scale.reshape(-1).to(weight.dtype)
                setattr(parent, name, Int8Linear(int8, scale, child.bias))
            elif can_pack(child):
                plain = weight if isinstance(child, nn.Linear) else weight.t()
                setattr(parent, name, PackedLinear(plain, child.bias))  # type: ignore[arg-type]


def check_quantization(kind: str | None, device: str | torch.device) -> None:
    """Raise ValueError for a quantization that this device has no kernel for, or without torchao."""
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
    """Quantize the weights of every linear layer below `module` in place, by torchao.

    Args:
        kind: "int8": one scale for each output; "int4": a scale and a zero point for each 128 weights.

    Raises:
        ValueError: for another kind, where torchao is missing, or where this machine has no kernel for it.
    """
    check_quantization(kind, next(module.parameters()).device)
    logging.getLogger("torchao").setLevel(
        logging.ERROR
    )  # it logs every GPU kernel that it could not load
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if is_linear(child) and not isinstance(
                child, nn.Linear
            ):  # torchao does not know Conv1D
                weight: Any = child.weight
                linear: Any = nn.Linear(
                    weight.shape[0], weight.shape[1], device="meta", dtype=weight.dtype
                )
                linear.weight, linear.bias = (
                    nn.Parameter(weight.detach().t().contiguous()),
                    child.bias,
                )
                setattr(parent, name, linear)
    try:
        quantize_(
            module,
            Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(group_size=128),
        )
    except (ImportError, RuntimeError, AssertionError) as error:
        raise ValueError(
            f"this machine cannot hold {kind} weights: {str(error).partition(chr(10))[0]}"
        ) from error
    module.requires_grad_(False)
