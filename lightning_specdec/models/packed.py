"""Linear layers whose weights lie as this processor's matrix kernels want them, for decoding on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_specdec.models.quantization import unpack_int8

NUM_TOKENS = 8
"""How many tokens a call is packed for: rounds verify about as many. The layout serves any number."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


def _packed_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """The product with a packed weight."""
    output: Tensor = _PRODUCT(inputs, weight, bias, "none", [], "")
    return output


# The compiler takes packed weights for constants of its own making; behind an operator of ours they can be arguments.
_LIBRARY = torch.library.Library("lightning_specdec", "DEF")
_LIBRARY.define("packed_linear(Tensor inputs, Tensor weight, Tensor? bias, int out_features) -> Tensor")
_LIBRARY.impl("packed_linear", _packed_linear, "CPU")
_LIBRARY.impl("packed_linear", _packed_linear, "MkldnnCPU")
_LIBRARY.impl("packed_linear", lambda x, weight, bias, number: x.new_empty((*x.shape[:-1], number)), "Meta")
_OPAQUE = torch.ops.lightning_specdec.packed_linear.default


class PackedLinear(nn.Module):
    """A linear layer over a weight that was laid out once for oneDNN's kernels.

    Theory: a product of a few tokens with a large matrix is bound by the reading of the matrix. On a CPU a plain
    `nn.Linear` reads it in an order that suits training, or lays it out anew at each call; packed once, it streams
    from memory. The product is the same up to the order of its sums.

    Args:
        weight: `[out, in]`, of float32, bfloat16 or float16.
        bias: `[out]`, or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Plain attributes: a packed tensor is opaque, so it can neither be saved nor moved like a parameter.
        self.weight_packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), NUM_TOKENS)
        self.bias_plain = None if bias is None else bias.detach().clone()

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return _OPAQUE(inputs, self.weight_packed, self.bias_plain, self.out_features)
        return _packed_linear(inputs, self.weight_packed, self.bias_plain, self.out_features)

    @property
    def weight(self) -> Tensor:
        """The plain weight, laid out anew each time: for models that read a small layer's instead of calling it."""
        plain: Tensor = self.weight_packed.to_dense()
        return plain

    @property
    def memory_bytes(self) -> int:
        """Bytes of the packed weight and the bias."""
        packed: int = torch.ops.mkldnn._nbytes(self.weight_packed)
        return packed + (0 if self.bias_plain is None else self.bias_plain.nbytes)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack(layer: nn.Module) -> bool:
    """Whether a layer is a plain linear one, on a CPU, of a type that the kernels know."""
    if type(layer) is not nn.Linear and type(layer).__name__ != "Conv1D":
        return False
    weight = layer.weight
    if not isinstance(weight, Tensor) or type(weight.data) is not Tensor or weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if weight.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        return False
    return weight.dtype in _FLOATS and torch.backends.mkldnn.is_available()


def pack_linears(module: nn.Module) -> None:
    """Put a `PackedLinear` in the place of every linear layer below `module` that can be packed, and an `Int8Linear` in
    the place of those whose weights are quantized to int8.

    Each layer's own weight is let go as soon as its packed form is there, so no more than one layer is held twice; a
    weight that something else uses too, as an output head tied to the embedding, stays beside its packed form.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (int8 := unpack_int8(child)) is not None:
                setattr(parent, name, int8)
            elif can_pack(child):
                weight, bias = child.weight, child.bias
                assert isinstance(weight, Tensor)
                # GPT-2's Conv1D is a linear layer that keeps its weight the other way round.
                packed = PackedLinear(weight if isinstance(child, nn.Linear) else weight.t(), bias)  # type: ignore[arg-type]
                setattr(parent, name, packed)
