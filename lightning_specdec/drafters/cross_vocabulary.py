"""An independent language model with a vocabulary of its own as the draft: it guesses what both vocabularies have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.checks import require_number
from lightning_specdec.drafters.base import Context, Drafter, DraftState, Host
from lightning_specdec.drafters.cross_state import CrossDraftState
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import ModelDrafter, RollingDrafter, fit
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling
from lightning_specdec.text.translation import Translation
from lightning_specdec.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class CrossVocabulary(RollingDrafter):
    """Guesses with a language model whose vocabulary is not the target's, through the tokens that both have.

    Theory: the draft's logits are restricted to the intersection and renormalized by the sampling, under the target's
    numbers, so a guess's reported distribution is the one that it was drawn from and every lossless rule stays
    lossless; the rest of the draft's probability is lost as acceptance. What the draft reads is a function of the
    settled text, and any such function will do: see `TranslatedText` for the one that is used.

    Source: Timor et al. 2025, "Accelerating LLM inference with lossless speculative decoding algorithms for
    heterogeneous vocabularies" (token-level intersection).

    Args:
        model: the draft.
        target_vocabulary: what the target's tokens mean.
        vocabulary: what the draft's tokens mean; the model's own when None.
        encode: the draft's tokenizer for plain text, without special tokens; where it is None, text is spelt
            by the longest tokens that fit.
        start: a token that the draft's texts begin with: its BOS, if it was trained with one.
        min_share: tokens that both have / tokens of the smaller vocabulary, at the least.
        sampling: how it draws its guesses, if not as the session draws.

    Raises:
        ValueError: the draft's tokens are not known, or too few are the target's too.
    """

    def __init__(
        self,
        model: LanguageModel,
        target_vocabulary: Vocabulary,
        *,
        vocabulary: Vocabulary | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
        start: int | None = None,
        min_share: float = 0.1,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(sampling=sampling)
        self.model = model
        self.min_share = require_number("min_share", min_share, low=0, high=1)
        own = model.vocabulary if vocabulary is None else vocabulary
        if own is None:
            raise ValueError(
                "what the draft's tokens mean is not known: give its vocabulary (Vocabulary.of(tokenizer))"
            )
        self.target_vocabulary, self.vocabulary, self.encode, self.start = target_vocabulary, own, encode, start
        self.translation = Translation(target_vocabulary, _readable(own, model.vocab_size), encode=encode, start=start)
        num_shared = len(self.translation.pairs)
        if not num_shared or self.translation.share < self.min_share:
            raise ValueError(
                f"the draft and the target have {num_shared} tokens in common, {self.translation.share:.1%} of the "
                f"smaller vocabulary (min_share is {self.min_share:.1%}): use a draft whose tokens are more like the "
                "target's"
            )
        targets, drafts = (torch.tensor(tokens) for tokens in zip(*sorted(self.translation.pairs.items()), strict=True))
        # Column W of the draft's padded logits is -inf: what the target has alone. A logits processor may choose that
        # all the same, and what only pads the target's output: the filler is read for it until the text is settled.
        sources = torch.full((len(target_vocabulary),), model.vocab_size).index_copy(0, targets, drafts)
        read_as = torch.full((len(target_vocabulary) + 1,), self.translation.filler).index_copy(0, targets, drafts)
        for name, table in (("_sources", sources), ("_read_as", read_as)):
            self.register_buffer(name, table.to(model.device), persistent=False)
        self._sources: Tensor
        self._read_as: Tensor

    renames = True

    @property
    def max_positions(self) -> None:
        """No limit: where a text outgrows the draft's context, the draft goes on with its end."""

    def check_target(self, target: LanguageModel) -> None:
        if target.vocabulary is None:
            if target.vocab_size != len(self.target_vocabulary):
                raise ValueError(
                    f"the drafter was made for a target of {len(self.target_vocabulary)} tokens, this one has "
                    f"{target.vocab_size}: make it with this target's vocabulary"
                )
        elif difference := self.target_vocabulary.difference(target.vocabulary):
            raise ValueError(
                f"the drafter was made for another target's vocabulary ({difference}): make it with this one's"
            )

    def arguments(self) -> dict[str, Any]:
        raise ValueError("a checkpoint keeps no tokenizer, which a CrossVocabulary needs: save the two models apart")

    def fused(self) -> CrossVocabulary:
        model = self.model.fused()
        if model is self.model:
            return self
        return CrossVocabulary(
            model,
            self.target_vocabulary,
            vocabulary=self.vocabulary,
            encode=self.encode,
            start=self.start,
            min_share=self.min_share,
            sampling=self.sampling,
        )

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> CrossDraftState:
        # The draft's tokens are shorter as a rule, so there are more of them.
        capacity, limit = max_length + max_length // 2, self.model.max_positions
        capacity = capacity if limit is None else min(capacity, limit)
        return CrossDraftState(self.model, self.translation, batch_size, capacity)

    def to_target(self, logits: Float[Tensor, "B W"], context: Context) -> Float[Tensor, "B V"]:
        padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
        return fit(padded.index_select(1, self._sources), context.vocab_size)

    def to_draft(self, tokens: Int[Tensor, "B"]) -> Int[Tensor, "B"]:
        return self._read_as.index_select(0, tokens.clamp(max=len(self._read_as) - 1))

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, CrossDraftState)
        limit = self.model.max_positions
        num_guesses = max(windows) if limit is None else min(max(windows), max(1, limit // 4))
        for row, text in zip(state.rows, context.texts, strict=True):
            row.extend(text)
        state.make_room(num_guesses)
        tokens, valid_lengths = pad(state.unread(), context.tail.device)
        guesses, probs, logits = self.roll(
            self.model, state.model_state, tokens, valid_lengths, num_guesses, context, sampling
        )
        state.num_fed = [num_guesses - 1] * len(windows)
        lengths = [min(window, num_guesses) for window in windows]
        even = min(lengths) == num_guesses
        return Draft(
            guesses,
            None if even else torch.tensor(lengths, device=guesses.device),
            probs,
            logits,
            num_calls=num_guesses,
        )

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        assert isinstance(state, CrossDraftState)
        state.observe(num_accepted)


def make_drafter(target: LanguageModel, model: LanguageModel, *, sampling: Sampling | None = None) -> Drafter:
    """The drafter that lets this model guess for that target: directly, or through what their vocabularies share.

    Raises:
        ValueError: they share too little.
    """
    own, others = model.vocabulary, target.vocabulary
    drafter: Drafter
    if own is None or others is None or own == others:
        drafter = ModelDrafter(model, sampling=sampling)
    else:
        tokenizer = getattr(model, "tokenizer", None)
        if tokenizer is None:
            raise ValueError(
                "the draft's vocabulary is not the target's, so its tokenizer must read the target's text, and it has "
                "none: load the draft with its tokenizer"
            )
        drafter = CrossVocabulary(
            model, others, encode=tokenizer.encode_plain, start=tokenizer.start, sampling=sampling
        )
    drafter.check_target(target)
    return drafter


def _readable(vocabulary: Vocabulary, num_rows: int) -> Vocabulary:
    """The tokens that the model has rows for; a tokenizer may have been given more."""
    special = {name: token for name, token in vocabulary.special.items() if token < num_rows}
    return Vocabulary(vocabulary.token_bytes[:num_rows], special)
