"""Checks what a user's drafter returns, so that a mistake in it is named where it was made.

Drafters of this package are not checked: tests hold them to the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_specdec.config.kinds import described, is_user_class, path_of
from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, is_pipelined
from lightning_specdec.rules import Draft, Sampling


def proposed(
    drafter: Drafter,
    state: DraftState,
    request: DraftRequest,
    windows: Sequence[int],
    sampling: Sampling,
) -> Draft:
    """Call `drafter.propose`, and check the draft of a user's drafter.

    Raises:
        ValueError: it is no draft for this request; the message names the class.
    """
    draft = drafter.propose(state, request, windows, sampling)
    if is_user_class(type(drafter)):
        _check_draft(drafter, draft, request, windows)
    return draft


def check_state(drafter: Drafter, state: object) -> None:
    """Raise ValueError if the `init_state` of a user's drafter returned no state."""
    if not isinstance(state, DraftState):
        raise ValueError(
            f"{path_of(type(drafter))}.init_state must return a DraftState, got {described(state)}"
        )


def _check_draft(
    drafter: Drafter,
    draft: object,
    request: DraftRequest,
    windows: Sequence[int],
) -> None:
    where = f"{path_of(type(drafter))}.propose"
    if not isinstance(draft, Draft):
        raise ValueError(
            f"{where} must return a Draft, got {described(draft)}: return Draft(tokens, lengths)"
        )

    batch_size = len(windows)
    tokens: Any = draft.tokens
    is_integer = isinstance(tokens, Tensor) and not (
        tokens.is_floating_point() or tokens.is_complex()
    )
    if not is_integer or tokens.dim() != 2 or len(tokens) != batch_size:
        raise ValueError(
            f"{where} must return draft tokens as integers [B, K] with B = {batch_size}, "
            f"got {described(tokens)}"
        )

    # Recorded calls compute the same number for every row.
    most_tokens = max(*windows, request.calls.num_draft_tokens)
    num_draft_tokens = tokens.shape[1]
    if num_draft_tokens > most_tokens:
        raise ValueError(
            f"{where} returned {num_draft_tokens} draft tokens for each row, and up to "
            f"{most_tokens} were requested: respect `windows`"
        )
    _check_shape(where, "lengths", draft.lengths, [batch_size])
    for name in ("probs", "logits"):
        shape = [batch_size, num_draft_tokens, request.vocab_size]
        _check_shape(where, name, getattr(draft, name), shape)

    # Reading values waits for a GPU, which pipelined rounds must not do.
    if tokens.device.type == "cpu" or not is_pipelined(drafter):
        _check_values(where, draft, request.vocab_size)


def _check_shape(where: str, name: str, value: object, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless a part of a draft is None or has this shape; None is any size."""
    if value is None:
        return
    fits = isinstance(value, Tensor) and value.dim() == len(shape)
    if fits:
        assert isinstance(value, Tensor)
        sizes = zip(value.shape, shape, strict=True)
        fits = all(expected in (None, size) for size, expected in sizes)
    if not fits:
        expected_shape = ["V" if size is None else size for size in shape]
        raise ValueError(
            f"{where} must return {name} as None or a tensor "
            f"[{', '.join(map(str, expected_shape))}], got {described(value)}"
        )


def _check_values(where: str, draft: Draft, vocab_size: int | None) -> None:
    """Raise ValueError for tokens outside of the vocabulary, and for impossible lengths."""
    num_draft_tokens = draft.tokens.shape[1]
    if draft.lengths is not None:
        for row, length in enumerate(draft.lengths.tolist()):
            if not 0 <= length <= num_draft_tokens:
                raise ValueError(
                    f"{where} returned the length {length} for row {row}, and the draft has "
                    f"{num_draft_tokens} tokens: give 0 to {num_draft_tokens}"
                )
    if vocab_size is None or draft.tokens.numel() == 0:
        return
    for row, row_tokens in enumerate(draft.tokens.tolist()):
        for token in row_tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{where} returned token {token} in row {row}, and the target has the tokens "
                    f"0 to {vocab_size - 1}: padding must be one of them, too"
                )
