"""Drafts of which some rows are known without the drafter: by prompt lookup, or by a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.ngram import certain
from lightning_specdec.drafters.user_drafts import proposed
from lightning_specdec.models import ExitStates
from lightning_specdec.rules import Draft, Sampling


def draft_around(
    known_tokens: Sequence[Sequence[int]],
    drafter: Drafter,
    state: DraftState,
    context: TargetContext | None,
    request: DraftRequest,
    windows: Sequence[int],
    sampling: Sampling,
) -> Draft:
    """The known tokens of each row, and the drafter's for the rows without any.

    The drafter is not called if every row that requests tokens has known ones.

    Args:
        known_tokens: draft tokens of each row.
        drafter: drafts for the other rows.
        state: the drafter's.
        context: the target and its state.
        request: as of `Drafter.propose`, like `sampling`.
        windows: how many draft tokens to request of the drafter for each row without known ones.
    """
    known_rows = [row for row, tokens in enumerate(known_tokens) if tokens]
    other_windows = list(windows)
    for row in known_rows:
        other_windows[row] = 0
    if not known_rows and any(other_windows):
        return proposed(drafter, state, request, other_windows, sampling)

    known_draft = certain(known_tokens, request.last_two_tokens.device)
    if not any(other_windows):
        return known_draft

    draft = proposed(drafter, state, request, other_windows, sampling)
    for row in known_rows:
        # The target reads the known tokens there, not what the drafter may have drafted.
        state.truncate_row(row, len(request.texts[row]))

    exit_states = draft.exit_states
    if exit_states is not None:
        exit_states = _without_drafts(exit_states, known_rows, context, request)
    joined_draft = _joined(known_draft, draft, exit_states)
    if draft.copied is None:
        return joined_draft

    # Known tokens cost no more than copied ones.
    copied = list(draft.copied)
    for row in known_rows:
        copied[row] = True
    return replace(joined_draft, copied=copied)


def _without_drafts(
    exit_states: ExitStates,
    rows: Sequence[int],
    context: TargetContext | None,
    request: DraftRequest,
) -> ExitStates:
    """The exit states, but for these rows only those of text that the target has not read."""
    assert context is not None
    lengths = list(exit_states.lengths)
    for row in rows:
        num_unread = len(request.texts[row]) - context.state.consumed[row]
        lengths[row] = min(lengths[row], num_unread)
    return replace(exit_states, lengths=lengths)


def _joined(known: Draft, drafted: Draft, exit_states: ExitStates | None) -> Draft:
    """One draft from two: the known tokens where a row has some, the drafter's in all others."""
    assert known.lengths is not None, "it has tokens for some rows and none for others"
    is_known = known.lengths > 0

    known_width = known.tokens.shape[1]
    drafted_width = drafted.tokens.shape[1]
    width = max(known_width, drafted_width)
    known_tokens = pad(known.tokens, (0, width - known_width))
    drafted_tokens = pad(drafted.tokens, (0, width - drafted_width))
    tokens = torch.where(is_known[:, None], known_tokens, drafted_tokens)

    drafted_lengths = drafted.lengths
    if drafted_lengths is None:
        drafted_lengths = torch.full_like(known.lengths, drafted_width)
    lengths = torch.where(is_known, known.lengths, drafted_lengths)

    probs = drafted.probs
    if probs is not None:
        # Known tokens are deterministic, so their distributions are one-hot.
        drafted_probs = pad(probs, (0, 0, 0, width - drafted_width))
        one_hot = torch.zeros_like(drafted_probs)
        one_hot.scatter_(-1, known_tokens[..., None], 1.0)
        probs = torch.where(is_known[:, None, None], one_hot, drafted_probs)
    return Draft(tokens, lengths, probs, num_calls=drafted.num_calls, exit_states=exit_states)
