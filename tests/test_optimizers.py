"""Laws of Muon with AdamW: the same steps where bfloat16 is not fast, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_specdec.training import optimizers


class Products(TorchDispatchMode):
    """Notes the types that matrices are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.dtypes |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


def stepped(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], set[torch.dtype], list[Tensor]]:
    """Weights after three steps, the types of products, and what the optimizer remembers."""
    monkeypatch.setattr(optimizers, "fast_bfloat16", lambda device: fast)
    generator = torch.Generator().manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(*size, generator=generator)) for size in ((12, 8), (8, 20), (8,))
    ]
    optimizer = optimizers.MuonAdamW(weights[:2], weights[2:], lr=0.1, weight_decay=0.1)
    with Products() as products:
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    memory = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return [weight.detach() for weight in weights], products.dtypes, memory


def test_muon_multiplies_in_float32_where_bfloat16_is_not_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, in_bfloat16, remembered = stepped(True, monkeypatch)
    exact, in_float32, memory = stepped(False, monkeypatch)
    assert in_bfloat16 == {torch.bfloat16} and in_float32 == {torch.float32}
    torch.testing.assert_close(memory, remembered, rtol=0, atol=0)
    # A step changes weights by 0.02 in root mean square; bfloat16 keeps three digits, and the iteration amplifies them.
    torch.testing.assert_close(exact, fast, rtol=0, atol=0.01)
    assert not torch.equal(exact[0], fast[0]) and torch.equal(exact[2], fast[2])
