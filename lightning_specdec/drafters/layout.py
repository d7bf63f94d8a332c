"""Ragged rows of tokens as one tensor, with draft tokens after them: the input of one call.

Shapes: B rows, T tokens, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_specdec.models.graphs import GraphCache

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


def with_draft_tokens(
    unread: Int[Tensor, "B T"],
    lengths: Sequence[int] | None,
    draft: Int[Tensor, "B K"],
    graphs: GraphCache | None = None,
) -> tuple[Int[Tensor, "B _"], list[int] | None, Int[Tensor, "B K1"] | slice]:
    """The input of a call that reads each row's unread tokens and its draft tokens after them.

    Args:
        unread: right-padded, as `pad` gives them.
        lengths: how many of them are real, at least one of each row; None for all.
        draft: the draft tokens; may be none, K = 0.
        graphs: where to record that, if it comes in few shapes.

    Returns:
        The tokens, how many of each row are real (None: all), and the K + 1 places whose logits judge the draft and
        follow them: from the last unread token on.
    """
    num_draft = draft.shape[1]
    if lengths is None:
        tokens = torch.cat((unread, draft), dim=1) if num_draft and graphs is None else unread
        if (
            num_draft and graphs is not None
        ):  # to one place, whatever made the draft: what reads it is recorded once
            tokens = graphs.buffer(
                "tokens", (len(unread), unread.shape[1] + num_draft), draft.dtype
            )
            graphs.run("join", lambda *parts: (torch.cat(parts, dim=1, out=tokens),), unread, draft)
        return tokens, None, slice(-num_draft - 1, None)
    first = torch.tensor([[length] for length in lengths], device=unread.device)
    behind = first + torch.arange(num_draft + 1, device=unread.device)
    tokens = torch.nn.functional.pad(unread, (0, num_draft)).scatter(1, behind[:, :-1], draft)
    return tokens, [length + num_draft for length in lengths], behind - 1
