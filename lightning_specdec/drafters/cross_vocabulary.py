"""A draft model with another vocabulary than the target: it drafts the tokens that both vocabularies have."""

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
from lightning_specdec.drafters.model import DrawingDrafter, Drawn, ModelDrafter, fit, make_draft
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling
from lightning_specdec.text.translation import TranslatedText, Translation
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class _Row:
    """One row's text in the draft's tokens, and how far the draft's state agrees with it.

    Places are counted from the text's beginning, in the draft's tokens.
    """

    def __init__(self, text: TranslatedText) -> None:
        self.text = text
        self.waiting: list[int] = []
        """Tokens behind the text's own that the state has read, and that the next tokens may change."""
        self.num_kept = 0
        """Draft tokens of the last round that the state has read, less those that were rejected."""
        self.num_right = 0
        """Leading tokens that the state, if it has read so many, has read as they are now."""
        self.first = 0
        """Where the part begins that the draft looks at: further on, where a text outgrows the draft's context."""

    @property
    def length(self) -> int:
        """Tokens of the text so far."""
        return len(self.text.tokens) + len(self.waiting)

    def extend(self, text: Sequence[int]) -> None:
        """Take in the target's text as it is now."""
        known, new = len(self.text.tokens), text[self.text.num_covered :]
        pairs = self.text.translation.pairs
        read = [*self.waiting, *(pairs.get(token, -1) for token in new[: self.num_kept])]
        if new:
            self.text.extend(new)
        self.waiting = self.text.waiting()
        now = [*self.text.tokens[known:], *self.waiting]
        same = (
            i for i, (before, after) in enumerate(zip(read, now, strict=False)) if before != after
        )
        self.num_right = known + next(same, min(len(read), len(now)))
        self.num_kept = 0

    def behind(self, place: int) -> list[int]:
        """The tokens from that place on."""
        num_settled = len(self.text.tokens)
        return [*self.text.tokens[place:], *self.waiting[max(0, place - num_settled) :]]


class CrossDraftState(DraftState):
    """The state of the draft's model, and every row's text in its tokens."""

    def __init__(
        self, model: LanguageModel, translation: Translation, batch_size: int, capacity: int
    ) -> None:
        super().__init__(batch_size, lambda: _Row(TranslatedText(translation)))
        self.model, self.capacity = model, capacity
        self.model_state = model.init_state(batch_size, capacity)
        self.awaits_result = False
        """Whether it has drafted since the target's last output: another drafter may have drafted instead."""

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        super().clear(rows)
        self.model_state.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        own = self.rows[row]
        own.text.go_back(length)
        own.waiting, own.num_kept = [], 0  # the state may have read others in their place
        if len(own.text.tokens) <= own.first:
            self.clear([row])

    def resume(self, row: int, length: int) -> None:
        own = self.rows[row]
        if own.first:  # what the draft has read begins further on
            self.model_state.clear([row])
        read = [*own.text.tokens, *own.waiting]
        own.text.begin_prompt()
        own.waiting, own.num_kept, own.first = (
            read[len(own.text.tokens) :],
            0,
            0,
        )  # the prompt may read alike

    def make_room(self, num_draft_tokens: int) -> None:
        """Let every row's text and draft tokens fit, at the price of reading again what does not.

        A text may have any number of tokens in another vocabulary, so the size of buffers can only be estimated. Where
        the model's own context is too short, a row begins anew with its last half; that depends on the row alone.
        """
        limit = self.model.max_positions
        if limit is not None:
            outgrown = [
                i for i, row in enumerate(self.rows) if row.length - row.first > limit - limit // 4
            ]
            for i in outgrown:
                self.rows[i].first = self.rows[i].length - limit // 2
            if outgrown:
                self.model_state.clear(outgrown)
        needed = max(row.length - row.first for row in self.rows) + num_draft_tokens
        if needed > self.capacity:
            self.capacity = 2 * needed if limit is None else min(2 * needed, limit)
            self.model_state = self.model.init_state(len(self.rows), self.capacity)

    def unread(self) -> list[list[int]]:
        """Go back to where the state agrees with the text, and give what it has not read: two tokens at the least,
        where there are two, so that shapes seldom change. A state that cannot go back so far reads the text again."""
        state, starts, settled = self.model_state, [], []
        for i, row in enumerate(self.rows):
            start = max(
                row.first, min(row.num_right, row.first + state.consumed[i], row.length - 2)
            )
            if start - row.first < state.committed[i]:
                state.clear([i])
                start = row.first
            starts.append(start - row.first)
            settled.append(max(0, min(start, len(row.text.tokens) - 2) - row.first))
        state.truncate(starts)
        state.commit([max(pair) for pair in zip(settled, state.committed, strict=True)])
        return [row.behind(row.first + start) for row, start in zip(self.rows, starts, strict=True)]


@dataclass(frozen=True)
class CrossVocabularySettings(Settings):
    min_share: float = setting(
        0.1, "minimum share of common tokens, of the smaller vocabulary", minimum=0, maximum=1
    )


class CrossVocabulary(DrawingDrafter):
    """Drafts with a language model of another vocabulary, by the tokens that both have.

    Logits of other tokens are dropped before sampling, so every lossless rule stays lossless (Timor et al. 2025,
    token-level intersection). The draft reads the text in its own tokens. `for_target` fills in the arguments.

    Args:
        model: the draft model, with its `vocabulary`.
        target_vocabulary: the bytes of the target's tokens.
        encode: turns plain text into the draft's tokens, without special tokens; when None, text is split greedily into
            the longest tokens that fit.
        start: token that the draft's texts begin with (BOS), if it was trained with one.
        sampling: how to draw draft tokens; as the session does when None.

    Raises:
        ValueError: the draft's `vocabulary` is None, or shares less than `min_share` with the target's.
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
        own = model.vocabulary
        if own is None:
            raise ValueError(
                "the draft's tokens are not known: load it with its tokenizer, or set its `vocabulary`"
            )
        self.model, self.target_vocabulary = model, target_vocabulary
        # A tokenizer may have tokens that the model has no rows for.
        special = {name: token for name, token in own.special.items() if token < model.vocab_size}
        readable = Vocabulary(own.token_bytes[: model.vocab_size], special)
        self.translation = Translation(target_vocabulary, readable, encode=encode, start=start)
        num_shared, least = len(self.translation.pairs), self.settings.min_share
        if not num_shared or self.translation.share < least:
            raise ValueError(
                f"the draft and the target have {num_shared} tokens in common, {self.translation.share:.1%} of the "
                f"smaller vocabulary (min_share is {least:.1%}): use a draft whose tokens are more like the target's"
            )
        targets, drafts = (
            torch.tensor(tokens)
            for tokens in zip(*sorted(self.translation.pairs.items()), strict=True)
        )
        # Column W of the draft's padded logits is -inf: what the target has alone. A logits processor may choose that
        # all the same, and what only pads the target's output: the filler is read for it until the text is settled.
        sources = torch.full((len(target_vocabulary),), model.vocab_size).index_copy(
            0, targets, drafts
        )
        read_as = torch.full((len(target_vocabulary) + 1,), self.translation.filler).index_copy(
            0, targets, drafts
        )
        for name, table in (("_sources", sources), ("_read_as", read_as)):
            self.register_buffer(name, table.to(model.device), persistent=False)
        self._sources: Tensor
        self._read_as: Tensor

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """As `Drafter.for_target`; a `ModelDrafter` if the vocabularies are equal or one is unknown."""
        if not isinstance(draft, LanguageModel):
            return super().for_target(target, draft, **settings)  # says what is wrong
        own, tokenizer = draft.vocabulary, getattr(draft, "tokenizer", None)
        if own is None or target.vocabulary is None or own == target.vocabulary:
            return ModelDrafter.for_target(target, draft, sampling=settings.get("sampling"))
        if tokenizer is None:
            raise ValueError(
                "the draft's vocabulary is not the target's: load the draft with its tokenizer"
            )
        return cls(
            draft,
            target.vocabulary,
            encode=tokenizer.encode_plain,
            start=tokenizer.start,
            **settings,
        )

    @property
    def max_positions(self) -> None:
        """None: if a text outgrows the draft's context, the draft continues with the end of the text."""

    def check_target(self, target: LanguageModel) -> None:
        if target.vocabulary is None:
            if target.vocab_size != len(self.target_vocabulary):
                made_for = len(self.target_vocabulary)
                raise ValueError(
                    f"it was made for a target of {made_for} tokens, this one has {target.vocab_size}"
                )
        elif difference := self.target_vocabulary.difference(target.vocabulary):
            raise ValueError(
                f"it was made for another target's vocabulary ({difference}): make it with this one's"
            )

    def arguments(self) -> dict[str, Any]:
        raise ValueError(
            "a checkpoint keeps no tokenizer, which a CrossVocabulary needs: save the two models apart"
        )

    def fused(self, target: LanguageModel | None = None) -> CrossVocabulary:
        model = self.model.fused()
        if model is self.model:
            return self
        shared = {
            id(part): part for part in (self.translation, self.target_vocabulary, self.sampling)
        }
        return deepcopy(self, {**shared, id(self.model): model})

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> CrossDraftState:
        # The draft's tokens are shorter as a rule, so there are more of them.
        capacity, limit = max_length + max_length // 2, self.model.max_positions
        capacity = capacity if limit is None else min(capacity, limit)
        return CrossDraftState(self.model, self.translation, batch_size, capacity)

    def to_target(
        self, logits: Float[Tensor, "B W"], request: DraftRequest
    ) -> Float[Tensor, "B V"]:
        """Logits over the target's V tokens from those over the draft's W; -inf for tokens that the draft lacks."""
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        return fit(padded.index_select(1, self._sources), request.vocab_size)

    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        limit, num_draft_tokens = self.model.max_positions, max(windows)
        if limit is not None:
            num_draft_tokens = min(num_draft_tokens, max(1, limit // 4))
        for row, text in zip(state.rows, request.texts, strict=True):
            row.extend(text)
        state.make_room(num_draft_tokens)
        tokens, valid_lengths = pad(state.unread(), request.tail.device)
        wanted = [min(window, num_draft_tokens) for window in windows]

        def call(drawn: Drawn) -> None:
            def choose(logits: Float[Tensor, "B W"], i: int) -> Int[Tensor, "B"]:
                token = drawn.draw(self.to_target(logits, request))
                return self._read_as.index_select(0, token.clamp(max=len(self._read_as) - 1))

            self.model.rollout(
                tokens, state.model_state, num_draft_tokens, choose, valid_lengths=valid_lengths
            )

        outputs = self.run(request, wanted, sampling, call)
        for row in state.rows:
            row.num_kept = num_draft_tokens - 1
        state.awaits_result = True
        return make_draft(outputs, wanted, request)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        for row, count in zip(state.rows, num_accepted, strict=True):
            if state.awaits_result:
                row.num_kept = min(row.num_kept, count)
        state.awaits_result = False
