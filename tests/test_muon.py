"""Laws of the joined optimizer: each part does what torch's own does, and a restored one goes on alike."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from lightning_specdec.training.muon import MuonAdamW


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 3))


def joined(model: nn.Sequential) -> MuonAdamW:
    matrices = [each for each in model.parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if each.ndim != 2]
    return MuonAdamW(matrices, others, lr=0.01, betas=(0.9, 0.95))


def steps(model: nn.Sequential, *optimizers: torch.optim.Optimizer, first: int = 0, last: int = 5) -> None:
    for number in range(first, last):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        model(inputs).square().mean().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + number)
            optimizer.step()
        model.zero_grad()


def test_matrices_are_stepped_by_muon_and_the_rest_by_adamw() -> None:
    one, other = network(), network()
    steps(one, joined(one))
    muon = torch.optim.Muon(
        [each for each in other.parameters() if each.ndim == 2],
        lr=0.01,
        weight_decay=0.0,
        adjust_lr_fn="match_rms_adamw",
    )
    rest = [each for each in other.parameters() if each.ndim != 2]
    steps(other, muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0))
    for found, wanted, begun in zip(one.parameters(), other.parameters(), network().parameters(), strict=True):
        assert torch.equal(found, wanted) and not torch.equal(found, begun)


def test_a_restored_one_goes_on_as_if_nothing_had_been() -> None:
    whole, stopped = network(), network()
    steps(whole, joined(whole))
    before = joined(stopped)
    steps(stopped, before, last=2)
    after = joined(stopped)
    after.load_state_dict(deepcopy(before.state_dict()))
    steps(stopped, after, first=2)
    for found, wanted in zip(stopped.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_it_hands_back_what_the_closure_gives() -> None:
    model = network()
    assert joined(model).step(lambda: torch.tensor(3.0)) == 3.0
