"""The losses that a draft learns by: each is its formula, and so is its gradient, whatever the numbers are like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from lightning_specdec.data import IGNORED
from lightning_specdec.training import draft_losses
from lightning_specdec.training.draft_losses import (
    LOG_FLOOR,
    CrossEntropy,
    DraftLoss,
    ForwardKL,
    Mixture,
    ReverseKL,
    TotalVariation,
    position_weights,
)
from lightning_specdec.training.metrics import overlap

Plain = Callable[[Tensor, Tensor, Tensor], Tensor]


def cross_entropy(logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def forward_kl(logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
    terms = target_log_probs.exp() * (target_log_probs - logits.log_softmax(-1))
    return terms.where(target_log_probs > -torch.inf, 0).sum(-1) + 1 - target_log_probs.exp().sum(-1)


def reverse_kl(logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (log_probs.exp() * (log_probs - target_log_probs.clamp(min=LOG_FLOOR))).sum(-1)


def total_variation(logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
    return 1 - torch.minimum(logits.softmax(-1), target_log_probs.exp()).sum(-1)


def mixture(*arguments: Tensor) -> Tensor:
    return 0.25 * cross_entropy(*arguments) + 2.0 * total_variation(*arguments) + 0.5 * reverse_kl(*arguments)


LOSSES: dict[str, tuple[DraftLoss, Plain]] = {
    "cross-entropy": (CrossEntropy(), cross_entropy),
    "forward KL": (ForwardKL(), forward_kl),
    "reverse KL": (ReverseKL(), reverse_kl),
    "total variation": (TotalVariation(), total_variation),
    "mixture": (Mixture([CrossEntropy(), TotalVariation(), ReverseKL()], [0.25, 2.0, 0.5]), mixture),
}
"""Each with the formula that it is."""


def random_case(seed: int, *, scale: float = 2.0, num_unsaid: int = 0, impossible: float = 0.0) -> list[Tensor]:
    """Logits, the target's log probabilities and labels of 12 places, in float64; some labels are `IGNORED`.

    Args:
        num_unsaid: tokens of the target that the draft cannot say.
        impossible: share of the tokens that the target never says.
    """
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(12, 9, generator=generator, dtype=torch.float64) * scale
    target = torch.randn(12, 9 + num_unsaid, generator=generator, dtype=torch.float64) * scale
    target[:, 1:] = target[:, 1:].masked_fill(
        torch.rand(target[:, 1:].shape, generator=generator) < impossible, -torch.inf
    )
    labels = torch.randint(9, (12,), generator=generator)
    labels[::3] = IGNORED
    return [draft, target.log_softmax(-1)[:, :9], labels]


CASES: dict[str, list[Tensor]] = {
    **{f"random {seed}": random_case(seed) for seed in range(3)},
    "a reduced vocabulary": random_case(3, num_unsaid=5),
    "impossible tokens": random_case(4, impossible=0.5),
    "impossible tokens in a reduced vocabulary": random_case(5, num_unsaid=5, impossible=0.5),
    "logits far apart": random_case(6, scale=60.0),
    "logits beyond any probability": random_case(7, scale=1e4),
}


def made(function: Plain | DraftLoss, arguments: list[Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of their weighted sum."""
    logits = arguments[0].clone().requires_grad_()
    values = function(logits, *arguments[1:])
    (gradient,) = torch.autograd.grad((values.double() * weights).sum(), logits)
    return values.detach().double(), gradient


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_the_formula(name: str, case: str) -> None:
    loss, formula = LOSSES[name]
    weights = torch.linspace(-1, 2, 12, dtype=torch.float64)
    expected, slope = made(formula, CASES[case], weights)
    logits, *others = CASES[case]
    values, gradient = made(loss, [logits.float(), others[0].float(), others[1]], weights)
    torch.testing.assert_close(values, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-4, atol=2e-5)
    assert gradient.dtype == torch.float32 and gradient.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_logits_have_bfloat16_gradients_right_within_rounding(name: str) -> None:
    loss, formula = LOSSES[name]
    weights = torch.linspace(0, 1, 12, dtype=torch.float64)
    logits, log_probs, labels = CASES["a reduced vocabulary"]
    rounded = [logits.bfloat16(), log_probs.bfloat16(), labels]
    values, gradient = made(loss, rounded, weights)
    expected, slope = made(formula, [rounded[0].double(), rounded[1].double(), labels], weights)
    assert gradient.dtype == torch.bfloat16 and loss(*rounded).dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), slope, rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("num_unsaid", [0, 5])
def test_total_variation_is_the_probability_of_rejection(num_unsaid: int) -> None:
    logits, log_probs, labels = random_case(8, num_unsaid=num_unsaid)
    expected = 1 - overlap(logits.softmax(-1)[None], log_probs.exp()[None])[0]
    torch.testing.assert_close(TotalVariation()(logits, log_probs, labels).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [ForwardKL, ReverseKL, TotalVariation])
def test_nothing_is_learnt_from_ones_own_distribution(kind: type[DraftLoss]) -> None:
    logits, _, labels = random_case(9)
    arguments = [logits.float(), logits.float().log_softmax(-1), labels]
    values, gradient = made(kind(), arguments, torch.ones(12, dtype=torch.float64))
    assert values.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


def test_where_the_two_are_equal_total_variation_has_half_the_slope() -> None:
    logits = torch.zeros(1, 4)
    log_probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()
    _, gradient = made(TotalVariation(), [logits, log_probs, torch.zeros(1, dtype=torch.long)], torch.ones(1))
    # s = 1/2, 1, 0, 0, so sum(q s) = 3/8.
    torch.testing.assert_close(gradient, torch.tensor([[-0.03125, -0.15625, 0.09375, 0.09375]]))


@pytest.mark.parametrize("name", LOSSES)
def test_no_numbers_make_it_none(name: str) -> None:
    """Tokens that neither says, a target that says none of the draft's, logits as far apart as they can be."""
    never, most = -torch.inf, torch.finfo(torch.float32).max
    logits = torch.tensor([[0.0, never, 1.0], [0.0, 1.0, 2.0], [most, -most, 0.0], [-most, -most, 0.0]])
    log_probs = torch.tensor([[0.0, never, never], [never] * 3, [never, 0.0, never], [-300.0, -200.0, 0.0]])
    values, gradient = made(LOSSES[name][0], [logits, log_probs, torch.tensor([0, IGNORED, 0, 2])], torch.ones(4))
    assert not values.isnan().any() and not gradient.isnan().any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_few_places_at_a_time_give_what_all_at_once_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = LOSSES[name]
    whole = made(loss, CASES["random 0"], torch.ones(12))
    monkeypatch.setattr(draft_losses, "AT_A_TIME", 50)
    torch.testing.assert_close(made(loss, CASES["random 0"], torch.ones(12)), whole)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_kept_but_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = LOSSES[name]
    logits, log_probs, labels = CASES["random 0"]
    values: Any = loss(logits.bfloat16().requires_grad_(), log_probs, labels)
    kept = values.grad_fn.saved_tensors
    assert [(each.shape, each.dtype) for each in kept] == [(logits.shape, torch.bfloat16)]
    monkeypatch.setattr(torch, "empty_like", None)  # where no gradient is wanted, no room is made for it
    loss(logits, log_probs, labels)
    with torch.no_grad():
        loss(logits.clone().requires_grad_(), log_probs, labels)


def test_places_count_less_the_further_they_are() -> None:
    assert position_weights(0.5, 4) == [1.0, 0.5, 0.25, 0.125]
    assert position_weights(1, 3) == [1.0, 1.0, 1.0] and position_weights(0, 3) == [1.0, 0.0, 0.0]
    for decay, number in ((1.5, 4), (0.5, 0)):
        with pytest.raises(ValueError, match="decay|num_positions"):
            position_weights(decay, number)


def test_a_mixture_without_a_weight_for_each_loss_is_refused() -> None:
    one: list[DraftLoss] = [CrossEntropy()]
    for losses, weights in (([], []), (one, [1.0, 2.0]), (one, [-1.0]), (one, [0.0])):
        with pytest.raises(ValueError, match="weight"):
            Mixture(losses, weights)


def test_a_yaml_names_a_loss_and_a_record_says_which() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=DraftLoss)
    losses = "[{class_path: CrossEntropy}, {class_path: ReverseKL}]"
    text = f"{{class_path: Mixture, init_args: {{losses: {losses}, weights: [1, 2]}}}}"
    loss = parser.instantiate(parser.parse_args([f"--loss={text}"])).loss
    parts = [{"class": "CrossEntropy"}, {"class": "ReverseKL"}]
    assert loss.arguments() == {"losses": parts, "weights": [1.0, 2.0]}
    assert TotalVariation().arguments() == {}
