"""Ragged rows of tokens as one tensor, and guesses behind them: what a model reads in one call.

Shapes: B rows, T tokens, K guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Int


def pad(
    rows: Sequence[Sequence[int]], device: torch.device, num_columns: int = 0
) -> tuple[Int[Tensor, "B T"], list[int] | None]:
    """Rows of tokens as one right-padded tensor of `num_columns` at least, and their lengths where some are shorter."""
    lengths = [len(row) for row in rows]
    width = max(num_columns, *lengths)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    return tokens, None if min(lengths) == width else lengths


def with_guesses(
    unread: Int[Tensor, "B T"], lengths: Sequence[int] | None, guesses: Int[Tensor, "B K"]
) -> tuple[Int[Tensor, "B _"], list[int] | None, Int[Tensor, "B K1"] | slice]:
    """What a scorer's call takes, to read each row's unread tokens and its guesses behind them.

    Args:
        unread: right-padded, as `pad` gives them.
        lengths: how many of them are real, at least one of each row; None for all.
        guesses: may be none, K = 0.

    Returns:
        The tokens, how many of each row are real (None: all), and the K + 1 places whose logits judge the guesses and
        follow them: from the last unread token on.
    """
    num_guesses = guesses.shape[1]
    if lengths is None:
        tokens = torch.cat((unread, guesses), dim=1) if num_guesses else unread
        return tokens, None, slice(-num_guesses - 1, None)
    first = torch.tensor([[length] for length in lengths], device=unread.device)
    behind = first + torch.arange(num_guesses + 1, device=unread.device)
    tokens = torch.nn.functional.pad(unread, (0, num_guesses)).scatter(1, behind[:, :-1], guesses)
    return tokens, [length + num_guesses for length in lengths], behind - 1
