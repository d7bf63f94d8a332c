"""Staged drafting: a smaller drafter drafts for a larger one, whose tokens go to the target.

The larger stage reads the smaller one's draft tokens in one call and keeps those that it would have
drawn itself, plus one token, until the window is full (`ExactMatch`, with the window's own
uniform numbers). So the draft and its distributions are those of the larger stage alone, and every
lossless rule stays lossless (Spector & Re 2023, "Staged speculative decoding"; Chen et al. 2023,
"Cascade speculative drafting").

Shapes: B rows, K draft tokens, N positions that one call scores, V vocabulary, W tokens that the
larger stage scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import (
    Drafter,
    DraftRequest,
    DraftState,
    JointState,
    TargetContext,
    last_two_tokens_of,
)
from lightning_specdec.drafters.early_exit import EarlyExitDrafter, ExitState, LowerState
from lightning_specdec.drafters.layout import pad, with_draft_tokens
from lightning_specdec.drafters.model import ModelDrafter, ModelDraftState
from lightning_specdec.drafters.sampling_drafter import empty_draft, fit_vocabulary
from lightning_specdec.drafters.user_drafts import proposed
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class StagedSettings(Settings):
    stage_windows: int = setting(4, "draft tokens that a stage proposes to the next one", minimum=1)


class StagedState(JointState):
    """The states of the larger stage and of the smaller drafter.

    Within a round, the smaller drafter sees texts that end in the larger stage's draft tokens. Once
    the target has verified these, both states go back to the accepted ones.
    """

    def __init__(self, larger: DraftState, smaller: DraftState) -> None:
        super().__init__(larger, smaller)
        self.larger = larger
        self.smaller = smaller

    def begin(self, request: DraftRequest, windows: Sequence[int], num_extra: int) -> DecodeState:
        """Truncate to the texts, and return the state that the larger stage reads with.

        At least the last token of each text is unread.

        Args:
            windows: draft tokens that are requested of each row.
            num_extra: how many tokens more than these the larger stage will read after each text.
        """
        self.commit()
        self.drafted_at = [len(text) for text in request.texts]
        if isinstance(self.larger, ExitState):
            return LowerState(self.larger.whole)
        assert isinstance(self.larger, ModelDraftState)
        self.larger.begin(request, 1, windows, num_extra)
        return self.larger.model_state

    def seen_by_larger(self, texts: Sequence[list[int]]) -> list[list[int]]:
        """The part of each text that the larger stage reads: the end, if its context is short."""
        if not isinstance(self.larger, ModelDraftState) or not any(self.larger.firsts):
            return list(texts)
        return [text[first:] for text, first in zip(texts, self.larger.firsts, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self.commit()
        super().select(rows)


class _StageDraft:
    """The larger stage's draft of one round, which grows until every row has enough tokens."""

    def __init__(self, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> None:
        self.request = request
        self.windows = windows
        self.sampling = sampling
        self.texts = [list(text) for text in request.texts]
        """Each row's text, followed by its draft tokens so far."""
        # What the tokens were drawn from: for each row, one tensor for each call.
        self.probs: list[list[Tensor]] = [[] for _ in windows]
        self.logits: list[list[Tensor]] = [[] for _ in windows]

    @property
    def tokens(self) -> list[list[int]]:
        """The draft tokens of each row so far."""
        draft_tokens = []
        for text, request_text in zip(self.texts, self.request.texts, strict=True):
            draft_tokens.append(text[len(request_text) :])
        return draft_tokens

    @property
    def num_missing(self) -> list[int]:
        """How many more tokens each row needs."""
        return [
            window - len(row_tokens)
            for window, row_tokens in zip(self.windows, self.tokens, strict=True)
        ]

    def uniform(self, num_positions: int) -> Float[Tensor, "B N"] | None:
        """The uniform numbers of each row's next tokens.

        Positions after the window repeat its last number; the tokens drawn there are not used.
        """
        uniform = self.request.uniform
        if uniform is None:
            return None
        num_drafted = [len(row_tokens) for row_tokens in self.tokens]
        starts = torch.tensor(num_drafted, device=uniform.device)
        positions = starts[:, None] + torch.arange(num_positions, device=uniform.device)
        last_position = uniform.shape[1] - 1
        return uniform.gather(1, positions.clamp(max=last_position))

    def extend(
        self,
        logits: Float[Tensor, "B N W"],
        smaller_tokens: Sequence[Sequence[int]],
    ) -> list[int]:
        """Draw the larger stage's tokens, and append them up to the first that differs.

        The token that differs is included. Rows that want no more tokens are unchanged.

        Args:
            logits: the larger stage's logits, before each of the smaller stage's draft tokens and
                after the last one.
            smaller_tokens: the smaller stage's draft tokens of each row.

        Returns:
            How many of these tokens agree with the larger stage's.
        """
        num_missing = self.num_missing
        logits = fit_vocabulary(logits, self.request.vocab_size)
        if self.sampling.runs_on_host:
            # The processors skip rows that want no more tokens.
            unfinished_texts = [
                text if count else None for text, count in zip(self.texts, num_missing, strict=True)
            ]
            logits = self.sampling.process(
                logits, unfinished_texts, smaller_tokens, stop_at_impossible=True
            )

        _, num_positions, vocab_size = logits.shape
        tokens, probs = self.sampling.sample_with_probs(logits, self.uniform(num_positions))
        # Logits that are NaN yield a token outside the vocabulary, which no model can read.
        larger_tokens = tokens.clamp(max=vocab_size - 1).tolist()

        num_agreed = []
        for row, smaller_row in enumerate(smaller_tokens):
            larger_row = larger_tokens[row]
            num_equal = _num_equal(smaller_row, larger_row)
            num_agreed.append(num_equal)
            if not num_missing[row]:
                continue

            num_drawn = num_equal + 1
            self.texts[row] += larger_row[:num_drawn]
            if probs is not None:
                self.probs[row].append(probs[row, :num_drawn])
            if self.request.wants_logits:
                self.logits[row].append(logits[row, :num_drawn])
        return num_agreed

    def finish(self, num_calls: int) -> Draft:
        """All rows' tokens, and what they were drawn from."""
        tokens, row_lengths = pad(self.tokens, self.request.last_two_tokens.device)
        lengths = None
        if row_lengths is not None:
            lengths = torch.tensor(row_lengths, device=tokens.device)
        return Draft(tokens, lengths, _joined(self.probs), _joined(self.logits), num_calls)


def _num_equal(draft_tokens: Sequence[int], drawn_tokens: Sequence[int]) -> int:
    """How many draft tokens equal those drawn at their positions, up to the first that differs."""
    for i, token in enumerate(draft_tokens):
        if token != drawn_tokens[i]:
            return i
    return len(draft_tokens)


def _joined(parts_by_row: list[list[Tensor]]) -> Float[Tensor, "B K V"] | None:
    """Concatenate each row's parts, and pad shorter rows with zeros; None if no row has parts."""
    example = next((parts[0] for parts in parts_by_row if parts), None)
    if example is None:
        return None
    # A row may have no parts, and torch.cat needs at least one.
    empty = example[:0]
    rows = [torch.cat([empty, *parts]) for parts in parts_by_row]
    return pad_sequence(rows, batch_first=True)


class StagedDrafter(Drafter):
    """Drafts with a model that is itself helped by a smaller drafter.

    The tokens are those that the model would draft alone. `Draft.num_calls` counts the last stage's
    passes.

    Args:
        stages: two drafters or more, smallest first. The first may be of any kind that does not
            work inside its target, those between are `ModelDrafter`, and the last is a
            `ModelDrafter` or an `EarlyExitDrafter`.
        stage_windows: see `StagedSettings`.

    Raises:
        ValueError: a stage does not fit its position.
    """

    Settings = StagedSettings
    gives_logits = True
    from_file = True

    def __init__(self, stages: Sequence[Drafter], *, stage_windows: int = 4) -> None:
        super().__init__(stage_windows=stage_windows)
        _check_stages(stages)
        *smaller_stages, larger = stages
        self.stages = [*stages]
        self.window = stage_windows
        if len(smaller_stages) == 1:
            self.smaller = smaller_stages[0]
        else:
            self.smaller = StagedDrafter(smaller_stages, stage_windows=stage_windows)
        self.larger: Any = larger
        self.inside_target = larger.inside_target

    @property
    def max_positions(self) -> int | None:
        limits = [stage.max_positions for stage in self.stages if stage.max_positions is not None]
        return min(limits, default=None)

    def check_target(self, target: LanguageModel) -> None:
        for stage in self.stages:
            stage.check_target(target)

    def needs_noise(self, sampling: Sampling) -> bool:
        larger_sampling = self.larger.sampling or sampling
        return self.larger.needs_noise(sampling) or self.smaller.needs_noise(larger_sampling)

    def fused(self, target: LanguageModel | None = None) -> StagedDrafter:
        fused_stages = [stage.fused(target) for stage in self.stages]
        return StagedDrafter(fused_stages, stage_windows=self.window)

    def fresh(self) -> StagedDrafter:
        return StagedDrafter([stage.fresh() for stage in self.stages], stage_windows=self.window)

    def arguments(self) -> dict[str, Any]:
        for stage in self.stages:
            # Raises ValueError if a checkpoint cannot store the stage.
            stage.arguments()
        return {"stages": self.stages, "stage_windows": self.window}

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> StagedState:
        # The stages read whole windows, also where a row needs fewer tokens.
        max_length += self.window
        larger = self.larger.init_state(batch_size, max_length, context)
        smaller = self.smaller.init_state(batch_size, max_length, context)
        return StagedState(larger, smaller)

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        larger_state = state.begin(request, windows, self.window)
        stage_draft = _StageDraft(request, windows, self.larger.sampling or sampling)
        if isinstance(larger_state, LowerState):
            model = state.larger.model
        else:
            model = self.larger.model

        num_calls = 0
        while max(stage_draft.num_missing) > 0:
            self._stage_round(state, model, larger_state, stage_draft)
            num_calls += 1

        draft = stage_draft.finish(num_calls)
        if isinstance(larger_state, LowerState):
            draft.exit_states = larger_state.exit_states(self.larger.exit_layer)
        return draft

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.commit(num_accepted)

    def _stage_round(
        self,
        state: StagedState,
        model: LanguageModel,
        larger_state: DecodeState,
        stage_draft: _StageDraft,
    ) -> None:
        """One round between the two stages: draft, verify, keep what agrees and one token more.

        Rows that want no more tokens read their last token again, so that what the smaller drafter
        observes is true for them, too.
        """
        device = stage_draft.request.last_two_tokens.device

        # The larger stage adds one token, so the smaller one drafts one less.
        windows = [min(self.window, max(count - 1, 0)) for count in stage_draft.num_missing]
        draft = self._smaller_draft(state, stage_draft, model, windows)

        # The larger stage reads what it has not read, and the draft.
        unread = []
        texts = state.seen_by_larger(stage_draft.texts)
        for text, num_read in zip(texts, larger_state.consumed, strict=True):
            unread.append(text[num_read:])
        unread_tokens, lengths = pad(unread, device)
        tokens, valid_lengths, positions = with_draft_tokens(unread_tokens, lengths, draft.tokens)
        # The target may have tokens that only pad its output.
        tokens = tokens.clamp(max=model.vocab_size - 1)
        output = model(tokens, larger_state, valid_lengths=valid_lengths, logits_for=positions)

        num_agreed = stage_draft.extend(output.logits, _tokens_of(draft, windows))
        self.smaller.observe(state.smaller, output, num_agreed)

        # The last token was drawn from the larger stage's logits and is unread.
        final_lengths = []
        texts = state.seen_by_larger(stage_draft.texts)
        for text, num_read in zip(texts, larger_state.consumed, strict=True):
            final_lengths.append(min(num_read, len(text) - 1))
        larger_state.truncate(final_lengths)

    def _smaller_draft(
        self,
        state: StagedState,
        stage_draft: _StageDraft,
        model: LanguageModel,
        windows: Sequence[int],
    ) -> Draft:
        """The smaller drafter's tokens after the larger stage's tokens so far."""
        request = stage_draft.request
        num_draft_tokens = max(windows)
        if num_draft_tokens == 0:
            return empty_draft(request)

        texts = stage_draft.texts
        smaller_request = DraftRequest(
            texts,
            last_two_tokens_of(texts, request.last_two_tokens.device),
            stage_draft.uniform(num_draft_tokens),
            vocab_size=request.vocab_size or model.vocab_size,
            # The larger stage's tokens so far are a draft too.
            committed=request.committed or [len(text) for text in request.texts],
            prompt_lengths=request.prompt_lengths,
        )
        return proposed(self.smaller, state.smaller, smaller_request, windows, stage_draft.sampling)


def _check_stages(stages: Sequence[Drafter]) -> None:
    """Raise ValueError unless each stage can be where it is, and the smallest is first."""
    if not _are_in_order(stages):
        names = ", ".join(type(stage).__name__ for stage in stages)
        raise ValueError(
            "stages must be two drafters or more: one that works outside its target, then "
            "ModelDrafters, of which the last may be an EarlyExitDrafter instead, "
            f"got {names or 'none'}"
        )
    sizes = [stage.model.num_parameters for stage in stages if isinstance(stage, ModelDrafter)]
    if sizes != sorted(sizes):
        raise ValueError(f"give the stages smallest first, got models of {sizes} parameters")


def _are_in_order(stages: Sequence[Drafter]) -> bool:
    """Whether each stage is of a kind that can be where it is."""
    if len(stages) < 2:
        return False
    smallest, *middle_stages, larger = stages
    return (
        isinstance(smallest, Drafter)
        and not smallest.inside_target
        and all(isinstance(stage, ModelDrafter) for stage in middle_stages)
        and isinstance(larger, ModelDrafter | EarlyExitDrafter)
    )


def _tokens_of(draft: Draft, windows: Sequence[int]) -> list[list[int]]:
    """Each row's draft tokens on the host, at most `windows[b]`."""
    lengths = draft.lengths
    if lengths is None:
        lengths = torch.tensor(windows, device=draft.tokens.device)
    # Lengths and tokens are read in one copy.
    lengths_and_tokens = torch.cat((lengths[:, None], draft.tokens), dim=1)

    rows = []
    for (length, *tokens), window in zip(lengths_and_tokens.tolist(), windows, strict=True):
        num_tokens = min(window, length)
        rows.append(tokens[:num_tokens])
    return rows
