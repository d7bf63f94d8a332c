"""Ragged rows of tokens as one tensor, and draft tokens behind them: what a model reads in one call.

Shapes: B rows, T tokens, K draft tokens.
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


def with_draft(
    unread: Int[Tensor, "B T"], lengths: Sequence[int] | None, drafted: Int[Tensor, "B K"]
) -> tuple[Int[Tensor, "B _"], list[int] | None, Int[Tensor, "B K1"] | slice]:
    """What a scorer's call takes, to read each row's unread tokens and its draft tokens behind them.

    Args:
        unread: right-padded, as `pad` gives them.
        lengths: how many of them are real, at least one of each row; None for all.
        drafted: may be none, K = 0.

    Returns:
        The tokens, how many of each row are real (None: all), and the K + 1 places whose logits judge the draft
        tokens and follow them: from the last unread token on.
    """
    num_drafted = drafted.shape[1]
    if lengths is None:
        tokens = torch.cat((unread, drafted), dim=1) if num_drafted else unread
        return tokens, None, slice(-num_drafted - 1, None)
    first = torch.tensor([[length] for length in lengths], device=unread.device)
    behind = first + torch.arange(num_drafted + 1, device=unread.device)
    tokens = torch.nn.functional.pad(unread, (0, num_drafted)).scatter(1, behind[:, :-1], drafted)
    return tokens, [length + num_drafted for length in lengths], behind - 1
