"""Laws of the checksum by which a decoder notices writes to weights that it holds copies of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_specdec.models import weights
from lightning_specdec.models.weights import weights_checksum

# 2.5 blocks and a rest.
SHAPE = (640, 1027)


def random(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator).to(dtype)


def swap_rows(tensor: Tensor) -> None:
    tensor[[3, 500]] = tensor[[500, 3]]


def swap_columns(tensor: Tensor) -> None:
    tensor[:, [3, 500]] = tensor[:, [500, 3]]


def swap_values(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[[10, 12]] = flat[[12, 10]]


def swap_blocks(tensor: Tensor) -> None:
    """Rows of 8 KiB in the checksum's own layout."""
    flat = tensor.view(-1)
    size = 8192 // tensor.itemsize
    first = flat[:size].clone()
    flat[:size] = flat[size : 2 * size]
    flat[size : 2 * size] = first


def flip_last_bit(tensor: Tensor) -> None:
    tensor.view(torch.uint8)[-1, -1] ^= 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "one value": lambda tensor: tensor[17, 5].add_(1),
    "the first value": lambda tensor: tensor[0, 0].neg_(),
    "the last bit": flip_last_bit,
    "two rows": swap_rows,
    "two columns": swap_columns,
    "two values": swap_values,
    "two blocks": swap_blocks,
    "a roll": lambda tensor: tensor.copy_(tensor.roll(1, 0)),
    "signs": lambda tensor: tensor.neg_(),
    "a transfer": lambda tensor: (tensor[0, 0].add_(1), tensor[0, 2].sub_(1)),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_shows(
    write: str,
    dtype: torch.dtype,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(weights, "_THREADED_BYTES", 0)
    tensor = random(dtype)
    others = [torch.ones(3), random(dtype)]
    before = weights_checksum([tensor, *others])
    assert weights_checksum([random(dtype), *others]) == before
    WRITES[write](tensor.data)
    after = weights_checksum([tensor, *others])
    assert after[0] != before[0] and after[1:] == before[1:]


def test_threads_and_layouts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [random(), random()[:, ::2], torch.zeros(0), torch.arange(5)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = weights_checksum(tensors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(weights, "_THREADED_BYTES", 0)
    assert weights_checksum(tensors) == alone
    assert weights_checksum([tensors[1].contiguous()]) == alone[1:2]
