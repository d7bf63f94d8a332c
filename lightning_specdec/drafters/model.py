"""Drafting with a smaller language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext, pipelined
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.sampling_drafter import SamplingDrafter, make_draft
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

NUM_LAST_TOKENS = 2
"""Tokens at the end of each text that are read in every round: the model missed one or two."""


class ModelDraftState(DraftState):
    """The state of a draft model.

    Args:
        model_state: its keys and values, or hidden states.
    """

    def __init__(self, model_state: DecodeState) -> None:
        self.model_state = model_state

    def select(self, rows: Sequence[int]) -> None:
        self.commit()
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.model_state.clear(rows)

    def truncate_row(self, row: int, length: int) -> None:
        if self.model_state.committed[row] >= length:
            # The drafter reads the token before that length again, and the state cannot be
            # truncated so far.
            self.clear([row])
            return
        lengths = list(self.model_state.consumed)
        if lengths[row] > length:
            lengths[row] = length
            self.model_state.truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        # The model has not read the last token, or more, of some texts.
        readable_lengths = []
        for length, num_read in zip(lengths, self.model_state.consumed, strict=True):
            readable_lengths.append(min(length, num_read))
        self.model_state.truncate(readable_lengths)

    def begin(self, request: DraftRequest, num_again: int) -> list[Sequence[int]]:
        """Truncate the state to the texts of a request.

        Args:
            num_again: number of tokens at the end of each text that are read again at least.

        Returns:
            The tokens of each text that the model has not read.
        """
        state = self.model_state
        texts = request.texts
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
            for start, num_committed in zip(starts, request.committed, strict=True):
                last_start = max(0, num_committed - num_again)
                committed_lengths.append(min(start, last_start))
            state.commit(committed_lengths)
        return [text[start:] for start, text in zip(starts, texts, strict=True)]


class ModelDrafter(SamplingDrafter):
    """Drafts with a smaller language model (Leviathan et al. 2023; Chen et al. 2023).

    Its vocabulary is the target's.

    In each round it reads the text's last two tokens again, of which it has missed one or two, so
    that shapes are fixed.

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

    def check_target(self, target: LanguageModel) -> None:
        vocabulary = self.model.vocabulary
        if vocabulary is not None and target.vocabulary is not None:
            difference = vocabulary.difference(target.vocabulary)
            if difference:
                raise ValueError(
                    f"the draft's vocabulary is not the target's ({difference}): draft with "
                    "CrossVocabulary"
                )
        elif self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {self.model.vocab_size} tokens, the target one "
                f"of {target.vocab_size}: "
                "train both with one vocabulary"
            )

    def fused(self, target: LanguageModel | None = None) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> ModelDraftState:
        return ModelDraftState(self.model.init_state(batch_size, max_length))

    @pipelined
    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        model_state = state.model_state
        unread = state.begin(request, NUM_LAST_TOKENS)
        state.drafted_at = [len(text) for text in request.texts]

        reads_last_two = all(len(tokens) == NUM_LAST_TOKENS for tokens in unread)
        if reads_last_two:
            tokens = request.last_two_tokens
            valid_lengths = None
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

    @pipelined
    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.commit(num_accepted)
