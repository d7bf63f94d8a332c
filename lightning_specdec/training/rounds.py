"""Rounds laid end to end over a known text: how likely one starts where, and how many guesses it keeps.

Shapes: B rows, V vocabulary, N new tokens of a row, K draft tokens, W = K + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def overlap(draft_probs: Float[Tensor, "B N V"], target_probs: Float[Tensor, "B N V"]) -> Float[Tensor, "B N"]:
    """The probability that a guess is kept: sum over the vocabulary of min(draft_probs, target_probs)."""
    return torch.minimum(draft_probs, target_probs).sum(-1).clamp(max=1.0)


def draft_windows(num_new: Int[Tensor, "B"], num_draft_tokens: int, *, first_round: bool = True) -> Int[Tensor, "B N"]:
    """How many guesses a round makes that starts at new token j; -1 behind a row's end, where none starts.

    Args:
        num_new: how many new tokens each row has; N is the most of them.
        num_draft_tokens: K, fewer where the text ends: the last token is the target's own.
        first_round: whether the round at new token 0 has guesses.
    """
    left = num_new[:, None] - torch.arange(int(num_new.max()), device=num_new.device) - 1
    windows = left.clamp(-1, num_draft_tokens)
    if not first_round:
        windows[:, 0] = 0
    return windows


def expected_rounds(
    acceptance: Float[Tensor, "B N *K"], num_new: Int[Tensor, "B"], num_draft_tokens: int, *, first_round: bool = True
) -> Float[Tensor, "B N W"]:
    """The probability that a round starts at new token j and keeps n guesses.

    Args:
        acceptance: `[B, N, K]`, the probability that guess i of a round from new token j is kept, given that those
            before it are; or `[B, N]`, where that depends on the new token j + i alone.
        num_new, num_draft_tokens, first_round: see `draft_windows`.
    """
    num_positions = acceptance.shape[1]
    windows = draft_windows(num_new, num_draft_tokens, first_round=first_round)
    if acceptance.dim() == 2:
        acceptance = functional.pad(acceptance, (0, num_draft_tokens - 1)).unfold(1, num_draft_tokens, 1)
    guessed = torch.arange(num_draft_tokens, device=acceptance.device) < windows[..., None]
    at_least = functional.pad((acceptance * guessed).cumprod(-1), (1, 0), value=1.0)
    exactly = at_least - functional.pad(at_least[..., 1:], (0, 1))
    exactly = exactly * (windows >= 0)[..., None]
    # By position first: the loop below has a few small operations for each.
    steps = exactly.movedim(0, 2).contiguous()
    reached = acceptance.new_zeros(num_positions + num_draft_tokens + 1, len(acceptance))
    reached[0] = 1
    for j, step in enumerate(steps.unbind(0)):
        reached[j + 1 : j + num_draft_tokens + 2].addcmul_(step, reached[j])
    return reached[:num_positions].T[..., None] * exactly
