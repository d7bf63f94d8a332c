"""Medusa's heads as a network, and their fused form for decoding.

Shapes: H heads, B rows, T tokens, D width of the hidden state, W tokens that they score; E is W, or D where no head has
an output layer of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from jaxtyping import Float

MOST_STACKED = 4096
"""Tokens up to which output layers are stacked; larger ones are packed one by one, where that works."""


class Block(nn.Module):
    """Medusa's residual block: the hidden state, and a linear layer's activation on top.

    Its weights begin at zero, so that a new head says what its output layer makes of the target's own hidden state.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The next block's input."""
        return hidden + nn.functional.silu(self.linear(hidden))


class Heads(nn.ModuleList):
    """Heads that all look at the same hidden state: blocks, then an output layer each.

    Args:
        num_heads: H.
        hidden_size: D.
        num_tokens: W; None for heads without an output layer.
        num_blocks: of each head.
    """

    def __init__(self, num_heads: int, hidden_size: int, num_tokens: int | None, num_blocks: int) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        for _ in range(num_heads):
            head: list[nn.Module] = [Block(hidden_size) for _ in range(num_blocks)]
            if num_tokens is not None:
                head.append(nn.Linear(hidden_size, num_tokens, bias=False))
            self.append(nn.Sequential(*head))

    @property
    def dtype(self) -> torch.dtype:
        """What they compute in."""
        return next(self.parameters()).dtype

    @torch.no_grad()
    def copy_outputs(self, weight: Float[Tensor, "W D"]) -> None:
        """Make each head's output layer a copy of this one."""
        heads: list[Any] = list(self)
        for head in heads:
            head[-1].weight.copy_(weight)

    def forward(self, hidden: Float[Tensor, "B T D"], num_heads: int | None = None) -> Float[Tensor, "H B T E"]:
        """What the first heads, or all, make of the hidden states."""
        return torch.stack([head(hidden) for head in list(self)[:num_heads]])


class FusedHeads(nn.Module):
    """`Heads` folded for decoding: the same function, all heads in one launch for each layer.

    Theory: a round asks heads about one place of each row, so they spend their time on launches and on reading weights.
    All heads' weights of a layer are one stack of matrices, and their products one batched product over it. The
    matrices lie the other way round than in a linear layer, which a product with a single row reads faster on a CPU.
    Output layers over large vocabularies are packed for the processor instead, as a target's own layers are.

    Args:
        heads: what to fold, where it is and as it is: later changes or moves do not reach this copy.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.dtype = heads.dtype

        each: list[Any] = list(heads)
        places = list(zip(*each, strict=True))
        # Plain attributes: a registered buffer is found through nn.Module.__getattr__, which costs as much as a launch.
        self._blocks = [
            (stack(block.linear.weight.T for block in place), stack(block.linear.bias[None] for block in place))
            for place in places[: heads.num_blocks]
        ]
        self._stacked: Tensor | None = None
        self._outputs: list[nn.Module] = []
        for layers in places[heads.num_blocks :]:  # one, or none
            if layers[0].out_features <= MOST_STACKED:
                self._stacked = stack(layer.weight.T for layer in layers)
            else:
                self._outputs = [packed(layer) for layer in layers]

    def forward(self, hidden: Float[Tensor, "B T D"], num_heads: int | None = None) -> Float[Tensor, "H B T E"]:
        """See `Heads.forward`."""
        count = len(self._blocks[0][0]) if num_heads is None else num_heads
        states = hidden.flatten(0, 1).expand(count, -1, -1)
        for weight, bias in self._blocks:
            states = states + nn.functional.silu(torch.baddbmm(bias[:count], states, weight[:count]))
        if self._stacked is not None:
            states = torch.bmm(states, self._stacked[:count])
        elif self._outputs:
            states = torch.stack([layer(state) for layer, state in zip(self._outputs, states, strict=False)])
        return states.unflatten(1, hidden.shape[:2])


def stack(weights: Iterable[Tensor]) -> Tensor:
    """Tensors of one shape as one tensor."""
    return torch.stack([weight.detach() for weight in weights])


def packed(layer: nn.Linear) -> nn.Module:
    """The layer as this processor's kernels want it; itself where there is no such form."""
    if layer.weight.device.type != "cpu":
        return layer
    from lightning_specdec.models.packed import PackedLinear, can_pack

    return PackedLinear(layer.weight, layer.bias) if can_pack(layer) else layer
