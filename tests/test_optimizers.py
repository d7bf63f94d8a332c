"""Laws of Muon with AdamW: on devices without fast bfloat16, the same steps in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_specdec.training import optimizers


class Products(TorchDispatchMode):
    """Records the types in which matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.dtypes.update(value.dtype for value in args if isinstance(value, Tensor))
        return func(*args, **(kwargs or {}))


def stepped(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], set[torch.dtype], list[Tensor]]:
    """Weights after three steps, the types of products, and the optimizer's state."""
    monkeypatch.setattr(optimizers, "fast_bfloat16", lambda device: fast)
    generator = torch.Generator().manual_seed(0)
    weights = []
    for size in ((12, 8), (8, 20), (8,)):
        weights.append(nn.Parameter(torch.randn(*size, generator=generator)))
    optimizer = optimizers.MuonAdamW(weights[:2], weights[2:], lr=0.1, weight_decay=0.1)
    with Products() as products:
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    state_tensors: list[Tensor] = []
    for state in optimizer.state.values():
        state_tensors.extend(value for value in state.values() if isinstance(value, Tensor))
    return [weight.detach() for weight in weights], products.dtypes, state_tensors


def test_muon_multiplies_in_float32_where_bfloat16_is_not_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast_weights, fast_dtypes, fast_state = stepped(True, monkeypatch)
    exact_weights, exact_dtypes, exact_state = stepped(False, monkeypatch)
    assert fast_dtypes == {torch.bfloat16}
    assert exact_dtypes == {torch.float32}
    torch.testing.assert_close(exact_state, fast_state, rtol=0, atol=0)
    # A step changes weights by 0.02 in root mean square. bfloat16 has three digits, and the
    # iteration
    # amplifies its errors.
    torch.testing.assert_close(exact_weights, fast_weights, rtol=0, atol=0.01)
    assert not torch.equal(exact_weights[0], fast_weights[0])
    assert torch.equal(exact_weights[2], fast_weights[2])
