"""An independent, smaller language model as the draft.

Knows nothing of the target but its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import le
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.drafters.base import Context, Drafter, DraftState
from lightning_specdec.models import DecodeState, LanguageModel
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class ModelDraftState(DraftState):
    """The state of the draft's model."""

    model_state: DecodeState

    def select(self, rows: Sequence[int]) -> None:
        self.model_state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        self.model_state.clear(rows)


class ModelDrafter(Drafter):
    """Guesses with a smaller language model of the same vocabulary, one token after the other.

    Theory: the classic draft of Leviathan et al. 2023 and Chen et al. 2023. After a verdict the model has not seen the
    last one or two tokens of the text (the correction or bonus, and the last guess, which nobody fed). It always reads
    the last two again: that costs no launch more than reading two ragged ones, and keeps every shape fixed.

    Args:
        model: the draft.
        sampling: how it draws its guesses, if not as the session draws; any choice is lossless under a lossless rule.
    """

    gives_logits = True

    def __init__(self, model: LanguageModel, *, sampling: Sampling | None = None) -> None:
        super().__init__()
        self.model = model
        self.sampling = sampling

    def check_target(self, target: LanguageModel) -> None:
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {self.model.vocab_size} tokens, the target one of {target.vocab_size}: "
                "train both with one vocabulary"
            )

    def arguments(self) -> dict[str, Any]:
        if self.sampling is not None:
            raise ValueError(
                "a checkpoint keeps no sampling of the draft's own: save without it, give it when decoding"
            )
        return {"model": self.model}

    def needs_noise(self, sampling: Sampling) -> bool:
        return not (self.sampling or sampling).greedy

    def fused(self) -> ModelDrafter:
        return ModelDrafter(self.model.fused(), sampling=self.sampling)

    def init_state(self, batch_size: int, max_length: int) -> ModelDraftState:
        return ModelDraftState(self.model.init_state(batch_size, max_length))

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, ModelDraftState)
        tokens, valid_lengths = self._unread(state.model_state, context)
        num_guesses = max(windows)
        guesses, probs, logits = self.roll(state.model_state, tokens, valid_lengths, num_guesses, context, sampling)
        even = min(windows) == num_guesses
        lengths = None if even else torch.tensor(windows, device=guesses.device)
        return Draft(guesses, lengths, probs, logits, num_calls=num_guesses)

    def roll(
        self,
        state: DecodeState,
        tokens: Int[Tensor, "B T"],
        valid_lengths: Sequence[int] | None,
        num_guesses: int,
        context: Context,
        sampling: Sampling,
    ) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K V"] | None, Float[Tensor, "B K V"] | None]:
        """Read tokens and guess: the guesses, the distributions that they were drawn from, the logits if wanted."""
        sampling = self.sampling or sampling
        uniform = [None] * num_guesses if context.uniform is None else context.uniform.unbind(1)
        all_probs: list[Tensor] = []
        all_logits: list[Tensor] = []

        def choose(logits: Float[Tensor, "B V"], i: int) -> Int[Tensor, "B"]:
            token, probs = sampling.sample_with_probs(logits, uniform[i])
            if probs is not None:
                all_probs.append(probs)
            if context.wants_logits:
                all_logits.append(logits)
            return token

        guesses = self.model.rollout(tokens, state, num_guesses, choose, valid_lengths=valid_lengths)
        return (
            guesses,
            torch.stack(all_probs, dim=1) if all_probs else None,
            torch.stack(all_logits, dim=1) if all_logits else None,
        )

    def _unread(self, state: DecodeState, context: Context) -> tuple[Int[Tensor, "B T"], list[int] | None]:
        """The tokens to read before guessing, right-padded, and how many of each row's are real (None: all)."""
        tails = [len(text) - 2 for text in context.texts]
        if min(tails) >= 0 and all(map(le, tails, state.consumed)):
            state.truncate(tails)
            state.commit(tails)
            return context.tail, None
        starts = [min(length, max(tail, 0)) for length, tail in zip(state.consumed, tails, strict=True)]
        if starts != state.consumed:
            state.truncate(starts)
        unread = [text[start:] for start, text in zip(starts, context.texts, strict=True)]
        return pad(unread, context.tail.device)


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Int[Tensor, "B T"], list[int] | None]:
    """Rows of tokens as one right-padded tensor, and their lengths where these differ."""
    lengths = [len(row) for row in rows]
    width = max(lengths)
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    return tokens, None if min(lengths) == width else lengths
