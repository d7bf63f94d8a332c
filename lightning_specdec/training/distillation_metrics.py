"""What a draft that learns from a frozen target is measured with.

Shapes: B rows, M places of tokens, N new tokens of a row, K draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric

from lightning_specdec.data import Batch
from lightning_specdec.training.metrics import RoundMetrics
from lightning_specdec.training.round_metrics import Rounds

if TYPE_CHECKING:
    from jaxtyping import Float


class Mean(Metric):
    """A sum over places divided by their number; not a number where there are none."""

    full_state_update = False
    total: Tensor
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Count values, any number of them."""
        self.total += values.sum()
        self.number += values.numel()

    def compute(self) -> Tensor:
        """total / number"""
        return self.total / self.number


class DistillationMetrics(RoundMetrics):
    """What rounds would keep along known texts, the chance of each guess of a round, and the losses.

    `position_1/acceptance_rate` and so on are of the guesses of a round in their order: how likely each is kept where
    all before it were, on average over the new tokens of the texts that such a guess can be of (teacher-forced).

    Args:
        weights: of each guess's loss.
        num_draft_tokens: guesses of a round.
        first_round: whether there are guesses before the target has read anything.
    """

    def __init__(self, weights: list[float], num_draft_tokens: int, *, first_round: bool) -> None:
        super().__init__(*(Rounds(num_draft_tokens, first_round=first_round) for _ in range(2)))
        self.weights = weights
        self.losses = nn.ModuleList(Mean() for _ in weights)
        self.greedy_rates = nn.ModuleList(Mean() for _ in range(num_draft_tokens))
        self.sampling_rates = nn.ModuleList(Mean() for _ in range(num_draft_tokens))

    def count_loss(self, number: int, values: Tensor) -> None:
        """Count a guess's losses, place by place."""
        self.losses[number].update(values)  # type: ignore[operator]

    def count_rounds(
        self, greedy: list[Float[Tensor, "B M"]], sampling: list[Float[Tensor, "B M"]], batch: Batch
    ) -> None:
        """Count one batch.

        Args:
            greedy, sampling: how likely a guess of token m is kept, for each guess of a round; the first one's for all
                where there is one.
        """
        num_draft_tokens = self.greedy.num_draft_tokens
        num_new = batch.lengths - batch.prompt_lengths
        offsets = torch.arange(int(num_new.max()), device=num_new.device)
        starts = batch.prompt_lengths[:, None] + offsets
        for counts, rates, chances in (
            (self.greedy, self.greedy_rates, greedy),
            (self.sampling, self.sampling_rates, sampling),
        ):
            columns = []
            for i in range(num_draft_tokens):
                of_guess = functional.pad(chances[min(i, len(chances) - 1)], (0, num_draft_tokens))
                places = (starts + i).clamp(max=of_guess.shape[1] - 1)
                column = of_guess.gather(1, places)
                columns.append(column)
                rates[i].update(column[offsets + i < num_new[:, None]])  # type: ignore[operator]
            counts.update(torch.stack(columns, dim=-1), num_new)

    def compute(self) -> dict[str, Tensor]:
        values = self.rates()
        losses = torch.stack([loss.compute().nan_to_num() for loss in self.losses])  # type: ignore[operator]
        values["loss"] = (losses * losses.new_tensor(self.weights)).sum() / sum(self.weights)
        for i, (greedy, sampling) in enumerate(zip(self.greedy_rates, self.sampling_rates, strict=True), start=1):
            values[f"position_{i}/acceptance_rate"] = greedy.compute()  # type: ignore[operator]
            values[f"position_{i}/sampling_acceptance_rate"] = sampling.compute()  # type: ignore[operator]
        return values
