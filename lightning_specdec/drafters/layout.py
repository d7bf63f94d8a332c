"""Ragged rows of tokens as one tensor, with draft tokens after them: the input of one call.

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
    """Right-pad rows of tokens to one tensor with at least `num_columns` columns.

    Returns:
        The tensor, and the lengths of the rows; None if no row is padded.
    """
    lengths = [len(row) for row in rows]
    width = max(num_columns, *lengths)
    padded_rows = [[*row, *[0] * (width - len(row))] for row in rows]
    tokens = torch.tensor(padded_rows, device=device)
    if min(lengths) == width:
        return tokens, None
    return tokens, lengths


def with_draft_tokens(
    unread: Int[Tensor, "B T"],
    lengths: Sequence[int] | None,
    draft: Int[Tensor, "B K"],
) -> tuple[Int[Tensor, "B _"], list[int] | None, Int[Tensor, "B K1"] | slice]:
    """The input of a call that reads each row's unread tokens and its draft tokens after them.

    Args:
        unread: right-padded, as `pad` returns them.
        lengths: how many of them are real, at least one of each row; None for all.
        draft: the draft tokens; may be none, K = 0.

    Returns:
        The tokens, how many of each row are real (None: all), and the K + 1 positions whose
        logits verify the draft: from the last unread token on.
    """
    num_draft_tokens = draft.shape[1]
    if lengths is None:
        tokens = torch.cat((unread, draft), dim=1) if num_draft_tokens else unread
        return tokens, None, verified_positions(num_draft_tokens)

    # A row's draft tokens overwrite its padding, so that they follow its text directly.
    draft_starts = torch.tensor([[length] for length in lengths], device=unread.device)
    offsets = torch.arange(num_draft_tokens + 1, device=unread.device)
    positions = draft_starts + offsets
    room = torch.nn.functional.pad(unread, (0, num_draft_tokens))
    tokens = room.scatter(1, positions[:, :-1], draft)
    valid_lengths = [length + num_draft_tokens for length in lengths]
    return tokens, valid_lengths, positions - 1


def verified_positions(num_draft_tokens: int) -> slice:
    """Positions of a call without padding whose logits verify its draft and bonus tokens."""
    return slice(-num_draft_tokens - 1, None)
