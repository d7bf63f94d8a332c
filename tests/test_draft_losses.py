"""The losses that a draft learns by: each is its formula, whatever the numbers are like."""

from __future__ import annotations

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor
from torch.nn import functional

from lightning_specdec.data import IGNORED
from lightning_specdec.training.draft_losses import (
    CrossEntropy,
    DraftLoss,
    ForwardKL,
    TotalVariation,
)
from lightning_specdec.training.metrics import overlap

LOSSES: list[DraftLoss] = [CrossEntropy(), ForwardKL(), TotalVariation()]


def random_case(num_unsaid: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, the target's log probabilities and labels of 12 places; some labels are `IGNORED`.

    Args:
        num_unsaid: tokens of the target that the draft cannot say.
    """
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.randn(12, 9, generator=generator), torch.randn(12, 9 + num_unsaid, generator=generator)
    labels = torch.randint(9, (12,), generator=generator)
    labels[::3] = IGNORED
    return 2 * draft, (2 * target).log_softmax(-1)[:, :9], labels


def made(loss: DraftLoss, logits: Tensor, log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    values = loss(logits, log_probs, labels)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), gradient


@pytest.mark.parametrize("num_unsaid", [0, 5])
def test_each_loss_is_its_formula(num_unsaid: int) -> None:
    logits, log_probs, labels = random_case(num_unsaid)
    wanted = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(CrossEntropy()(logits, log_probs, labels), wanted)
    probs = log_probs.exp()
    wanted = functional.kl_div(logits.log_softmax(-1), probs, reduction="none").sum(-1) + 1 - probs.sum(-1)
    torch.testing.assert_close(ForwardKL()(logits, log_probs, labels), wanted)
    wanted = 1 - overlap(logits.softmax(-1)[None], probs[None])[0]
    torch.testing.assert_close(TotalVariation()(logits, log_probs, labels), wanted)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_numbers_make_it_none(loss: DraftLoss) -> None:
    """Tokens that neither says, a target that says none of the draft's, logits as far apart as they can be."""
    never, most = -torch.inf, torch.finfo(torch.float32).max
    logits = torch.tensor([[0.0, never, 1.0], [0.0, 1.0, 2.0], [most, -most, 0.0], [-most, -most, 0.0]])
    log_probs = torch.tensor([[0.0, never, never], [never] * 3, [never, 0.0, never], [-300.0, -200.0, 0.0]])
    values, gradient = made(loss, logits, log_probs, torch.tensor([0, IGNORED, 0, 2]))
    assert not values.isnan().any() and not gradient.isnan().any()


def test_a_yaml_names_a_loss() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=DraftLoss)
    assert isinstance(parser.instantiate(parser.parse_args(["--loss", "TotalVariation"])).loss, TotalVariation)
