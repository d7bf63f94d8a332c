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
    rows: Sequence[Sequence[int]],
    device: torch.device,
    num_columns: int = 0,
) -> tuple[Int[Tensor, "B T"], list[int] | None]:
    """Right-pad rows of tokens to one tensor with at least `num_columns` columns.

    Returns:
        The tensor, and the lengths of the rows; None if no row is padded.
    """
    lengths = [len(row) for row in rows]
    width = max(num_columns, *lengths)
    padded_rows = []
    for row in rows:
        padding = [0] * (width - len(row))
        padded_rows.append([*row, *padding])
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
        tokens = unread
        if num_draft_tokens:
            tokens = torch.cat((unread, draft), dim=1)
        return tokens, None, verified_positions(num_draft_tokens)

    # A row's draft tokens overwrite its padding, so that they follow its text directly.
    row_lengths = torch.tensor(lengths, device=unread.device)
    offsets = torch.arange(num_draft_tokens, device=unread.device)
    draft_positions = row_lengths[:, None] + offsets
    extended = torch.nn.functional.pad(unread, (0, num_draft_tokens))
    tokens = extended.scatter(1, draft_positions, draft)
    valid_lengths = [length + num_draft_tokens for length in lengths]

    # From the last unread token to the last draft token.
    last_positions = row_lengths[:, None] - 1
    verifying_positions = torch.cat((last_positions, draft_positions), dim=1)
    return tokens, valid_lengths, verifying_positions


def verified_positions(num_draft_tokens: int) -> slice:
    """Positions of a call without padding whose logits verify its draft and bonus tokens."""
    return slice(-num_draft_tokens - 1, None)
