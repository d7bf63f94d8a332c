"""Weights of fewer bits: int8 and int4, by torchao."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("int8", "int4")
INSTALL = f"{sys.executable} -m pip install torchao==0.18.0"
"""How this Python gets torchao, in the version that these weights were tried with."""
MOST_ROWS = 4
"""Tokens up to which the int8 kernel, which takes them one by one, beats turning the weight back into floats."""


class Int8Linear(nn.Module):
    """A linear layer over int8 weights with a scale for each output, on a CPU.

    Theory: one token's product is bound by the reading of the weight, and a byte an entry is half of bfloat16's. The
    inputs stay as they are (weight-only quantization), so only the weights are rounded.

    Args:
        weight: `[out, in]`, int8.
        scale: `[out]`, what an output's weights are multiples of.
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


def quantize(module: nn.Module, kind: str) -> None:
    """Turn the weights of every linear layer below `module` to `kind`, in place.

    Args:
        kind: "int8": weights rounded to 127 levels a side of each output's largest; "int4": to 7 by groups of 128.

    Raises:
        ValueError: for another kind, where torchao is missing, or where this machine has no kernel for it.
    """
    if kind not in KINDS:
        raise ValueError(f"quantization must be one of {', '.join(KINDS)}, got {kind!r}")
    device = next(module.parameters()).device
    if kind == "int4" and device.type != "cuda":
        raise ValueError(f"int4 weights have a kernel on a CUDA GPU only, this model is on {device}: use int8")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it tells of every GPU kernel that it could not load
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError(f"quantized weights need torchao: {INSTALL}") from error
    _linearize(module)
    try:
        quantize_(module, Int8WeightOnlyConfig() if kind == "int8" else Int4WeightOnlyConfig(group_size=128))
    except (ImportError, RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"this machine cannot hold {kind} weights: {reason}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def unpack_int8(layer: nn.Linear) -> Int8Linear | None:
    """A layer that torchao has quantized to int8 as an `Int8Linear`; None for any other."""
    weight: Any = layer.weight
    if not hasattr(weight, "qdata") or weight.qdata.dtype != torch.int8 or weight.qdata.shape != weight.shape:
        return None
    # torchao keeps its scales in float32; the kernel wants them in the inputs' type.
    return Int8Linear(weight.qdata, weight.scale.reshape(-1).to(weight.dtype), layer.bias)


def _linearize(module: nn.Module) -> None:
    """Put a plain linear layer in the place of GPT-2's Conv1D, which keeps its weight the other way round."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Conv1D":
                weight, bias = child.weight, child.bias
                assert isinstance(weight, Tensor)
                inputs, outputs = weight.shape
                linear = nn.Linear(inputs, outputs, device="meta", dtype=weight.dtype)
                linear.weight, linear.bias = nn.Parameter(weight.detach().t().contiguous()), bias  # type: ignore[assignment]
                setattr(parent, name, linear)
