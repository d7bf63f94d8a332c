"""A draft model with another vocabulary: it drafts the tokens that both vocabularies have.

Shapes: B rows, V tokens of the target, W tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import Drafter, DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import ModelDrafter, change_sides
from lightning_specdec.drafters.sampling_drafter import (
    DraftSampler,
    SamplingDrafter,
    fit_vocabulary,
    make_draft,
)
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling
from lightning_specdec.text.translation import TranslatedText, Translation
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class CrossVocabularySettings(Settings):
    min_share: float = setting(
        0.1, "minimum share of common tokens, of the smaller vocabulary", minimum=0, maximum=1
    )


class _RowText:
    """The text of one row in the draft's tokens, and how far the draft model has read it.

    Positions are counted in the draft's tokens, from the beginning of the text.
    """

    def __init__(self, text: TranslatedText) -> None:
        self.text = text
        self.pending: list[int] = []
        """Tokens after the final ones, which the next tokens of the target may change."""
        self.num_draft_read = 0
        """Draft tokens of the last round that the model has read and that were not rejected."""
        self.num_agreed = 0
        """Leading tokens of the text that have not changed since the model read them, if it did."""
        self.first = 0
        """Position of the first token that the model reads. It is above 0 once the text has
        outgrown the model's context."""
        self.is_partial = False
        """Whether the text is the beginning of a prompt of which more follows."""

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.text.tokens) + len(self.pending)

    def extend(self, text: Sequence[int]) -> None:
        """Translate the new tokens of the target's text.

        Args:
            text: the whole text, in the target's tokens.
        """
        num_final = len(self.text.tokens)
        new_tokens = text[self.text.num_covered :]

        # What the model has read after the final tokens: the pending ones, and draft tokens.
        pairs = self.text.translation.pairs
        accepted_draft = [pairs.get(token, -1) for token in new_tokens[: self.num_draft_read]]
        tokens_read = self.pending + accepted_draft

        if new_tokens:
            self.text.extend(new_tokens)
        self.pending = self.text.waiting()

        # What the text now has in that place.
        tokens_now = self.text.tokens[num_final:] + self.pending
        self.num_agreed = num_final + _num_equal(tokens_read, tokens_now)
        self.num_draft_read = 0

    def truncate(self, length: int) -> None:
        """Forget the target's tokens after the first `length` ones."""
        self.text.truncate(length)
        # The model may have read other tokens in place of these.
        self.pending = []
        self.num_draft_read = 0

    def resume(self) -> None:
        """Prepare for a new prompt that begins with the text."""
        tokens_read = [*self.text.tokens, *self.pending]
        self.text.begin_prompt()
        # The prompt is encoded as a whole, which may yield the same tokens again.
        self.pending = tokens_read[len(self.text.tokens) :]
        self.num_draft_read = 0
        self.first = 0

    def tokens_from(self, position: int) -> list[int]:
        """The tokens from that position on."""
        num_final = len(self.text.tokens)
        first_pending = max(0, position - num_final)
        return [*self.text.tokens[position:], *self.pending[first_pending:]]


def _num_equal(tokens: Sequence[int], other_tokens: Sequence[int]) -> int:
    """The number of leading tokens that are equal."""
    num_equal = 0
    for token, other_token in zip(tokens, other_tokens, strict=False):
        if token != other_token:
            break
        num_equal += 1
    return num_equal


class CrossDraftState(DraftState):
    """The state of the draft model, and every row's text in its tokens."""

    def __init__(
        self,
        model: LanguageModel,
        translation: Translation,
        batch_size: int,
        capacity: int,
    ) -> None:
        super().__init__(batch_size, lambda: _RowText(TranslatedText(translation)))
        self.model = model
        self.capacity = capacity
        self.model_state = model.init_state(batch_size, capacity)
        self.awaits_result = False
        """Whether the target's output for the last draft is pending. If it is not, the output that
        arrives is for another drafter's draft."""

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        self.model_state.clear(rows)

    def truncate_row(self, row: int, length: int) -> None:
        row_text = self.rows[row]
        row_text.truncate(length)
        if len(row_text.text.tokens) <= row_text.first:
            self.clear([row])

    def resume(self, row: int, length: int) -> None:
        row_text = self.rows[row]
        if row_text.first > 0:
            # The model has not read the beginning of the text.
            self.model_state.clear([row])
        row_text.resume()

    def extend_row(self, row: int, text: Sequence[int], *, is_partial: bool) -> None:
        """Translate the new tokens of a row's text.

        A prompt is encoded as a whole. If it arrives in parts, it is encoded again with each part,
        so that its tokens do not depend on them. The model reads only those that are new.

        Args:
            text: the whole text, in the target's tokens.
            is_partial: whether it is the beginning of a prompt of which more follows.
        """
        row_text = self.rows[row]
        if row_text.is_partial and len(text) > row_text.text.num_covered:
            self.resume(row, len(text))
        row_text.is_partial = is_partial
        row_text.extend(text)

    def make_room(self, num_draft_tokens: int) -> None:
        """Ensure that every row's text and draft tokens fit into the model's state, on the side of
        the model's position switch that it has.

        A text may have any number of tokens in another vocabulary, so the size of buffers is only
        an estimate, and a new state has to read the text again. If the model's own context is too
        short, the row starts over with the last half of a context. That depends on this row only.
        """
        max_positions = self.model.max_positions
        if max_positions is not None:
            self._shorten_rows(max_positions)

        longest_row = max(row_text.length - row_text.first for row_text in self.rows)
        needed = longest_row + num_draft_tokens
        if needed > self.capacity:
            self.capacity = 2 * needed
            if max_positions is not None:
                self.capacity = min(self.capacity, max_positions)
            self.model_state = self.model.init_state(len(self.rows), self.capacity)

        text_lengths = [row_text.length - row_text.first for row_text in self.rows]
        change_sides(self.model_state, text_lengths)

    def _shorten_rows(self, max_positions: int) -> None:
        """Start over with the end of the text in rows that fill three quarters of the context."""
        max_length = max_positions - max_positions // 4
        outgrown_rows = []
        for row, row_text in enumerate(self.rows):
            if row_text.length - row_text.first > max_length:
                row_text.first = row_text.length - max_positions // 2
                outgrown_rows.append(row)
        if outgrown_rows:
            self.model_state.clear(outgrown_rows)

    def unread(self) -> list[list[int]]:
        """Truncate the state to where it agrees with the text, and return each row's unread tokens.

        These are at least two tokens, if the text has two, so shapes seldom change. A row whose
        state cannot go back that far is read again from its first token.
        """
        state = self.model_state
        starts = []
        final_lengths = []
        for row, row_text in enumerate(self.rows):
            first = row_text.first
            num_read = first + state.consumed[row]
            start = max(first, min(row_text.num_agreed, num_read, row_text.length - 2))
            if start - first < state.committed[row]:
                state.clear([row])
                start = first
            starts.append(start - first)

            # The next round may go back to two tokens before the end of the final text.
            final_length = min(start, len(row_text.text.tokens) - 2) - first
            final_lengths.append(max(0, final_length))

        state.truncate(starts)
        state.commit([max(lengths) for lengths in zip(final_lengths, state.committed, strict=True)])
        return [
            row_text.tokens_from(row_text.first + start)
            for row_text, start in zip(self.rows, starts, strict=True)
        ]


class CrossVocabulary(SamplingDrafter):
    """Drafts with a language model of another vocabulary, by the tokens that both have.

    Logits of other tokens are dropped before sampling, so every lossless rule stays lossless (Timor
    et al. 2025, token-level intersection). The draft reads the text in its own tokens. `for_target`
    fills in the arguments.

    Args:
        model: the draft model, with its `vocabulary`.
        target_vocabulary: the bytes of the target's tokens.
        encode: converts plain text into the draft's tokens, without special tokens. If None, text
            is split greedily into the longest tokens that fit.
        start: token that the draft's texts begin with (BOS), if it was trained with one.
        sampling: how to draw draft tokens; like the session if None.

    Raises:
        ValueError: the draft's `vocabulary` is None, or shares less than `min_share` with the
            target's.
    """

    Settings = CrossVocabularySettings
    settings: CrossVocabularySettings
    takes_model = True

    def __init__(
        self,
        model: LanguageModel,
        target_vocabulary: Vocabulary,
        *,
        encode: Callable[[str], Sequence[int]] | None = None,
        start: int | None = None,
        sampling: Sampling | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(sampling=sampling, **settings)
        if model.vocabulary is None:
            raise ValueError(
                "the draft's tokens are not known: load it with its tokenizer, or set its "
                "`vocabulary`"
            )
        self.model = model
        self.target_vocabulary = target_vocabulary

        draft_vocabulary = _scored_tokens(model.vocabulary, model.vocab_size)
        self.translation = Translation(
            target_vocabulary, draft_vocabulary, encode=encode, start=start
        )
        num_shared = len(self.translation.pairs)
        if num_shared == 0 or self.translation.share < self.settings.min_share:
            raise ValueError(
                f"the draft and the target have {num_shared} tokens in common, "
                f"{self.translation.share:.1%} of the smaller vocabulary (min_share is "
                f"{self.settings.min_share:.1%}): use a draft whose tokens are more like the "
                "target's"
            )
        self._draft_column_of: Tensor
        self._draft_token_of: Tensor
        self._register_tables()

    def _register_tables(self) -> None:
        """Create the tables that map logits to the target's tokens and tokens to the draft's."""
        device = self.model.device
        shared_tokens = sorted(self.translation.pairs.items())
        target_tokens, draft_tokens = torch.tensor(shared_tokens).unbind(1)
        num_target_tokens = len(self.target_vocabulary)

        # For each target token, its column in the draft's logits. `to_target` appends column W,
        # which is -inf, for the tokens that the draft lacks.
        missing_column = self.model.vocab_size
        draft_columns = torch.full((num_target_tokens,), missing_column)
        draft_columns[target_tokens] = draft_tokens
        self.register_buffer("_draft_column_of", draft_columns.to(device), persistent=False)

        # For each target token, the token that the draft reads. A logits processor may force a
        # token that the draft lacks, or one that only pads the target's output (the last entry).
        # The draft reads the filler for it until the text is final.
        read_tokens = torch.full((num_target_tokens + 1,), self.translation.filler)
        read_tokens[target_tokens] = draft_tokens
        self.register_buffer("_draft_token_of", read_tokens.to(device), persistent=False)

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """As `Drafter.for_target`; a `ModelDrafter` if the vocabularies are equal or unknown."""
        if not isinstance(draft, LanguageModel):
            # Raises the error for a missing or unsuitable draft.
            return super().for_target(target, draft, **settings)

        if (
            draft.vocabulary is None
            or target.vocabulary is None
            or draft.vocabulary == target.vocabulary
        ):
            return ModelDrafter.for_target(target, draft, sampling=settings.get("sampling"))

        tokenizer = getattr(draft, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                "the draft's vocabulary is not the target's: load the draft with its tokenizer"
            )
        # `check_target` refuses a target without a vocabulary.
        target_vocabulary: Any = target.vocabulary
        return cls(
            draft,
            target_vocabulary,
            encode=tokenizer.encode_plain,
            start=tokenizer.start,
            **settings,
        )

    @property
    def max_positions(self) -> None:
        """None: if a text outgrows the draft's context, the draft continues with its end."""

    def check_target(self, target: LanguageModel) -> None:
        if target.vocabulary is None:
            num_tokens = len(self.target_vocabulary)
            if target.vocab_size != num_tokens:
                raise ValueError(
                    f"it was made for a target of {num_tokens} tokens, this one has "
                    f"{target.vocab_size}"
                )
            return
        difference = self.target_vocabulary.difference(target.vocabulary)
        if difference:
            raise ValueError(
                f"it was made for another target's vocabulary ({difference}): make it with this "
                "one's"
            )

    def arguments(self) -> dict[str, Any]:
        raise ValueError(
            "a checkpoint keeps no tokenizer, which a CrossVocabulary needs: save the two models "
            "separately"
        )

    def fused(self, target: LanguageModel | None = None) -> CrossVocabulary:
        fused_model = self.model.fused()
        if fused_model is self.model:
            return self
        # Copy this module, but replace the model and share what is large and never changes.
        copies: dict[int, Any] = {
            id(self.translation): self.translation,
            id(self.target_vocabulary): self.target_vocabulary,
            id(self.sampling): self.sampling,
            id(self.model): fused_model,
        }
        return deepcopy(self, copies)

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> CrossDraftState:
        # A smaller vocabulary usually has shorter tokens, so a text has more of them.
        capacity = max_length + max_length // 2
        if self.model.max_positions is not None:
            capacity = min(capacity, self.model.max_positions)
        return CrossDraftState(self.model, self.translation, batch_size, capacity)

    def to_target(
        self,
        logits: Float[Tensor, "B W"],
        request: DraftRequest,
    ) -> Float[Tensor, "B V"]:
        """Convert logits over the draft's tokens to logits over the target's.

        Tokens that the draft lacks get -inf.
        """
        padded_logits = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        target_logits = padded_logits.index_select(1, self._draft_column_of)
        return fit_vocabulary(target_logits, request.vocab_size)

    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        num_draft_tokens = max(windows)
        if self.model.max_positions is not None:
            # `make_room` leaves a quarter of the context free.
            free_room = max(1, self.model.max_positions // 4)
            num_draft_tokens = min(num_draft_tokens, free_room)
        allowed_windows = [min(window, num_draft_tokens) for window in windows]

        # The draft reads its own tokens of what is new in the texts.
        prompt_lengths = request.prompt_lengths or [0] * len(windows)
        for row, (text, prompt_length) in enumerate(
            zip(request.texts, prompt_lengths, strict=True)
        ):
            state.extend_row(row, text, is_partial=len(text) < prompt_length)
        state.make_room(num_draft_tokens)
        tokens, valid_lengths = pad(state.unread(), request.last_two_tokens.device)

        # A token beyond the target's vocabulary only pads its output. It has the last entry.
        padding_index = len(self._draft_token_of) - 1

        # `run` calls this once, with an object that draws tokens and records them for the draft.
        def draw_tokens(sampler: DraftSampler) -> None:
            def choose(logits: Float[Tensor, "B W"], step: int) -> Int[Tensor, "B"]:
                target_logits = self.to_target(logits, request)
                target_tokens = sampler.draw(target_logits)
                indices = target_tokens.clamp(max=padding_index)
                return self._draft_token_of.index_select(0, indices)

            self.model.rollout(
                tokens, state.model_state, num_draft_tokens, choose, valid_lengths=valid_lengths
            )

        outputs = self.run(request, allowed_windows, sampling, draw_tokens)
        for row_text in state.rows:
            # Every row drafts the same number of tokens. The model does not read the last one.
            row_text.num_draft_read = num_draft_tokens - 1
        state.awaits_result = True
        return make_draft(outputs, allowed_windows, request)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        if state.awaits_result:
            for row_text, count in zip(state.rows, num_accepted, strict=True):
                row_text.num_draft_read = min(row_text.num_draft_read, count)
        state.awaits_result = False


def _scored_tokens(vocabulary: Vocabulary, vocab_size: int) -> Vocabulary:
    """The tokens that the model scores. A tokenizer may have more of them."""
    special = {name: token for name, token in vocabulary.special.items() if token < vocab_size}
    return Vocabulary(vocabulary.token_bytes[:vocab_size], special)
