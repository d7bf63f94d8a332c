"""Counts of the rounds that known texts would take, summed over batches and processes.

Shapes: B rows, N new tokens of a row, K draft tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_specdec.checks import require_int
from lightning_specdec.training.rounds import draft_windows, expected_rounds

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class SpeculationCounts(NamedTuple):
    """What speculative decoding would do along given texts, as expected counts.

    Args:
        acceptance_sum: sum over the tested guesses of the probability that the guess is kept.
        num_tested: guesses that were judged. Of a draft that reads its own guesses: one for each position.
        num_positions: new tokens, each once.
        num_rounds: rounds needed to decode them all.
        accepted_per_round: `[K + 1]`, how many rounds keep 0, 1, ..., K guesses.
    """

    acceptance_sum: Tensor
    num_tested: Tensor
    num_positions: Tensor
    num_rounds: Tensor
    accepted_per_round: Tensor

    @property
    def acceptance_rate(self) -> Tensor:
        """acceptance_sum / num_tested: E[beta], Leviathan et al. 2023, definition 3.1"""
        return self.acceptance_sum / self.num_tested

    @property
    def block_efficiency(self) -> Tensor:
        """num_positions / num_rounds: new tokens for each call of the target"""
        return self.num_positions / self.num_rounds


class Rounds(Metric):
    """What rounds keep along known texts of which it is known how likely each guess is kept.

    Theory: the rounds are laid end to end over the tokens behind the prompt. A round that starts at new token j, of N
    in that row, guesses w = min(K, N - j - 1) tokens, keeps exactly n < w of them with probability
    beta_j ... beta_(j+n-1) (1 - beta_(j+n)) and all w with probability beta_j ... beta_(j+w-1); the next round starts
    at j + n + 1, because the target adds one token of its own. Summing over all ways to get there gives, for each j,
    the probability that a round starts there, and the sum of those is the expected number of rounds.

    Args:
        num_draft_tokens: K, guesses of a round.
        first_round: whether there are guesses before the target has read anything.
    """

    full_state_update = False
    acceptance_sum: Tensor
    num_tested: Tensor
    num_positions: Tensor
    num_rounds: Tensor
    accepted_per_round: Tensor

    def __init__(self, num_draft_tokens: int, *, first_round: bool = True) -> None:
        super().__init__()
        self.num_draft_tokens = require_int("num_draft_tokens", num_draft_tokens, 1)
        self.first_round = first_round
        self.add_state("acceptance_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_tested", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_positions", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_rounds", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("accepted_per_round", torch.zeros(num_draft_tokens + 1), dist_reduce_fx="sum")

    def update(self, acceptance: Float[Tensor, "B N *K"], num_new: Int[Tensor, "B"]) -> None:
        """Count rows; arguments as of `expected_rounds`."""
        rounds = expected_rounds(acceptance, num_new, self.num_draft_tokens, first_round=self.first_round)
        if acceptance.dim() == 2:
            is_new = torch.arange(acceptance.shape[1], device=num_new.device) < num_new[:, None]
            self.acceptance_sum += acceptance.masked_fill(~is_new, 0).sum()
            self.num_tested += num_new.sum()
        else:
            windows = draft_windows(num_new, self.num_draft_tokens, first_round=self.first_round)
            kept = torch.arange(self.num_draft_tokens + 1, device=rounds.device)
            num_accepted = (rounds * kept).sum()
            self.acceptance_sum += num_accepted
            self.num_tested += num_accepted + (rounds * (kept < windows[..., None])).sum()
        self.num_positions += num_new.sum()
        self.num_rounds += rounds.sum()
        self.accepted_per_round += rounds.sum((0, 1))

    def compute(self) -> SpeculationCounts:
        """The counts, with the rates as properties."""
        return SpeculationCounts(
            self.acceptance_sum, self.num_tested, self.num_positions, self.num_rounds, self.accepted_per_round
        )
