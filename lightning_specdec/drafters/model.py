"""Drafting with a smaller language model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext, pipelined
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.sampling_drafter import SamplingDrafter, make_draft
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput, RowCopy
from lightning_specdec.rules import Draft, Sampling

NUM_LAST_TOKENS = 2
"""Tokens at the end of each text that are read in every round: the model missed one or two."""

SMALLEST_PADDED = 256
"""Fewest tokens of a vocabulary whose output may be padded. Text needs at least all bytes."""
MOST_PADDING = 512
"""Most rows by which the outputs of two models of one tokenizer differ."""


class ModelDraftState(DraftState):
    """The state of a draft model.

    A row whose text outgrows the model's context starts over with the end of its text. Lengths in
    `model_state` count from there.

    Args:
        model_state: its keys and values, or hidden states.
        max_positions: the model's context in tokens; None if it has no limit.

    Attributes:
        firsts: position in each text of the first token that the model has read.
    """

    def __init__(self, model_state: DecodeState, max_positions: int | None = None) -> None:
        self.model_state = model_state
        self.max_positions = max_positions
        self.firsts = [0] * len(model_state.consumed)

    def select(self, rows: Sequence[int]) -> None:
        self.commit()
        self.model_state.select(rows)
        self.firsts = [0 if row < 0 else self.firsts[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        self.model_state.clear(rows)
        for row in rows:
            self.firsts[row] = 0

    def truncate_row(self, row: int, length: int) -> None:
        num_kept = length - self.firsts[row]
        if self.model_state.committed[row] >= num_kept:
            # The drafter reads the token before that length again, and the state cannot be
            # truncated so far.
            self.clear([row])
            return
        lengths = list(self.model_state.consumed)
        if lengths[row] > num_kept:
            lengths[row] = num_kept
            self.model_state.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            if self.firsts[row] and length <= self.firsts[row]:
                self.clear([row])
        # The model has not read the last token, or more, of some texts.
        readable_lengths = []
        for length, first, num_read in zip(
            lengths, self.firsts, self.model_state.consumed, strict=True
        ):
            readable_lengths.append(min(length - first, num_read))
        self.model_state.truncate(readable_lengths)

    def save_row(self, row: int, length: int) -> RowCopy | None:
        if self.firsts[row]:
            # It lacks the beginning of the text.
            return None
        num_read = min(length, self.model_state.consumed[row])
        return self.model_state.save_row(row, num_read)

    def load_row(self, row: int, copy: RowCopy, length: int) -> None:
        self.model_state.load_row(row, copy, min(length, copy.length))

    def begin(
        self,
        request: DraftRequest,
        num_again: int,
        windows: Sequence[int],
        num_extra: int,
    ) -> list[Sequence[int]]:
        """Truncate the state to the texts of a request.

        Args:
            num_again: number of tokens at the end of each text that are read again at least.
            windows: draft tokens that are requested of each row.
            num_extra: how many tokens more than these the model will read after each text.

        Returns:
            The tokens of each text that the model has not read.
        """
        self._start_over(request.texts, windows, num_extra)
        self._choose_sides(request)
        state = self.model_state
        texts = [
            text[first:] if first else text
            for text, first in zip(request.texts, self.firsts, strict=True)
        ]
        starts = []
        for num_read, text in zip(state.consumed, texts, strict=True):
            last_start = max(0, len(text) - num_again)
            starts.append(min(num_read, last_start))
        state.truncate(starts)

        if request.committed is None:
            state.commit(starts)
        else:
            # Draft tokens of another drafter may be removed later.
            committed_lengths = []
            for start, first, num_committed in zip(
                starts, self.firsts, request.committed, strict=True
            ):
                last_start = max(0, num_committed - first - num_again)
                committed_lengths.append(min(start, last_start))
            state.commit(committed_lengths)
        return [text[start:] for start, text in zip(starts, texts, strict=True)]

    def _start_over(
        self,
        texts: Sequence[Sequence[int]],
        windows: Sequence[int],
        num_extra: int,
    ) -> None:
        """Have rows that outgrow the model's context start over with the end of their text.

        Where they start depends on their text and window only, and not on the rows of their batch
        or on earlier rounds. It moves by half of a context, so that rows seldom start over.
        """
        if self.max_positions is None:
            return
        step = max(1, self.max_positions // 2)
        for row, (text, window) in enumerate(zip(texts, windows, strict=True)):
            if window == 0:
                continue
            num_ahead = min(window + num_extra, self.max_positions - step)
            num_missing = max(0, len(text) + num_ahead - self.max_positions)
            first = step * math.ceil(num_missing / step)
            if first != self.firsts[row]:
                self.clear([row])
                self.firsts[row] = first

    def _choose_sides(self, request: DraftRequest) -> None:
        """Have rows that cross the model's own position switch start over on its other side.

        The side depends on the text and its prompt only, and not on how the prompt is read.
        """
        if self.model_state.position_switch is None:
            return
        prompt_lengths = request.prompt_lengths or [0] * len(request.texts)
        lengths = []
        for text, prompt_length, first in zip(
            request.texts, prompt_lengths, self.firsts, strict=True
        ):
            lengths.append(max(len(text), prompt_length) - first)
        change_sides(self.model_state, lengths)


def change_sides(state: DecodeState, text_lengths: Sequence[int]) -> None:
    """Clear the rows of a draft model whose texts are on the other side of its position switch
    now.

    Args:
        state: of the draft model.
        text_lengths: tokens of each row's text.
    """
    changed_rows = []
    for row, num_tokens in enumerate(text_lengths):
        is_empty = state.consumed[row] == 0
        if not is_empty and state.is_long_prompt(num_tokens) != state.is_long[row]:
            changed_rows.append(row)
    if changed_rows:
        state.clear(changed_rows)
    state.expect_prompts(text_lengths)


class ModelDrafter(SamplingDrafter):
    """Drafts with a smaller language model (Leviathan et al. 2023; Chen et al. 2023).

    Its vocabulary is the target's.

    In each round it reads the text's last two tokens again, of which it has missed one or two, so
    that shapes are fixed. If a text outgrows the model's context, the model continues with the end
    of the text.

    Args:
        model: the draft model.
        sampling: how to draw draft tokens; as the session does when None. Any choice is lossless
            under a lossless rule.
    """

    takes_model = True

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None) -> None:
        super().__init__(sampling=sampling)
        self.model = model

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "model": self.model}

    @property
    def computes_in_openvino(self) -> bool:
        return self.model.backend == "openvino"

    @property
    def max_positions(self) -> None:
        """None: a text may be longer than the model's context."""

    def check_target(self, target: LanguageModel) -> None:
        vocabulary = self.model.vocabulary
        if vocabulary is not None and target.vocabulary is not None:
            difference = vocabulary.difference(target.vocabulary)
            if difference:
                raise ValueError(
                    f"the draft's vocabulary is not the target's ({difference}): draft with "
                    "CrossVocabulary"
                )
        elif not _may_share_tokens(self.model, target):
            raise ValueError(
                f"the draft has a vocabulary of {self.model.vocab_size} tokens, the target one "
                f"of {target.vocab_size}: "
                "train both with one vocabulary"
            )

    def fused(self, target: LanguageModel | None = None) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> ModelDraftState:
        model_state = self.model.init_state(batch_size, max_length)
        return ModelDraftState(model_state, self.model.max_positions)

    @pipelined
    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        model_state = state.model_state
        windows = self._windows_in_context(windows)
        # The last draft token is not read.
        unread = state.begin(request, NUM_LAST_TOKENS, windows, -1)
        state.drafted_at = [len(text) for text in request.texts]

        reads_last_two = all(len(tokens) == NUM_LAST_TOKENS for tokens in unread)
        if reads_last_two:
            tokens = request.last_two_tokens
            valid_lengths = None
            outputs = None
            if not any(state.firsts):
                # Recorded calls count positions from the beginning of the text.
                outputs = self.recorded_roll(self.model, model_state, tokens, request, sampling)
            if outputs is not None:
                draft = make_draft(outputs, windows, request)
                # All draft tokens but the last one were read too.
                num_read = NUM_LAST_TOKENS + draft.tokens.shape[1] - 1
                model_state.advance(num_read)
                return draft
        else:
            # In the first round of a text, or if a draft was shorter than others.
            tokens, valid_lengths = pad(unread, request.last_two_tokens.device)

        if request.vocab_size is not None and request.vocab_size > self.model.vocab_size:
            # As in `roll`: the text may have a token that only pads the target's output.
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        outputs = self.roll(
            self.model, model_state, tokens, valid_lengths, windows, request, sampling
        )
        return make_draft(outputs, windows, request)

    def _windows_in_context(self, windows: Sequence[int]) -> Sequence[int]:
        """The numbers of draft tokens, of which a context has to hold twice as many."""
        max_positions = self.model.max_positions
        if max_positions is None or max(windows) <= max_positions // 2:
            return windows
        most_tokens = max(1, max_positions // 2)
        return [min(window, most_tokens) for window in windows]

    @pipelined
    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.commit(num_accepted)


def _may_share_tokens(draft: LanguageModel, target: LanguageModel) -> bool:
    """Whether models of which one has no tokenizer may have the same tokens.

    Models of one tokenizer differ in the rows that pad their output to a round number. Other tokens
    would cost speed and change no output, since the target verifies them.
    """
    sizes = sorted((draft.vocab_size, target.vocab_size))
    if sizes[0] == sizes[1]:
        return True
    for model in (draft, target):
        if model.vocabulary is not None and len(model.vocabulary) > sizes[0]:
            return False
    return sizes[0] >= SMALLEST_PADDED and sizes[1] - sizes[0] <= MOST_PADDING
