"""Heads on the target's last hidden state as the draft: each drafts one token further ahead, all in one pass.

Shapes: B rows, T tokens, D width of the hidden state, V vocabulary, W tokens that the heads score, H heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext
from lightning_specdec.drafters.heads import FusedHeads, Heads, rows_of
from lightning_specdec.drafters.model import Drawn, TrainedDrafter, make_draft, nothing
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


class MultiTokenState(DraftState):
    """For each row the hidden state that its text's last token was drawn from.

    It serves one text alone, hence the lengths: a row that has just begun or goes on after other tokens has none until
    the target has read it.
    """

    def __init__(self, batch_size: int, context: TargetContext, layer: int) -> None:
        self.context, self.layer = context, layer
        self.lengths = [0] * batch_size
        """Tokens of the texts that the hidden states are for; 0 where there is none."""
        self._hidden: Float[Tensor, "B D"] | None = None
        self.scored: Float[Tensor, "B N D"] | None = None
        """The target's hidden states at its last call's places; None where the rows have moved since."""
        self._num_accepted: Sequence[int] = ()

    @property
    def hidden(self) -> Float[Tensor, "B D"]:
        """The hidden states; those of rows whose length is 0 mean nothing."""
        if self._hidden is None:
            assert self.scored is not None, "the target has not been called yet"
            self._hidden = _at(self.scored, torch.tensor(self._num_accepted, device=self.scored.device))
        return self._hidden

    def learn(self, scored: Float[Tensor, "B N D"], num_accepted: Sequence[int]) -> None:
        """Keep the state that the next token came from; N places are the text's last token and N - 1 draft tokens."""
        self.scored, self._num_accepted, self._hidden = scored, num_accepted, None
        # The target has read the whole text and all draft tokens; the kept ones and one token more are text now.
        reads = zip(self.context.state.consumed, num_accepted, strict=True)
        self.lengths = [length - scored.shape[1] + count + 2 for length, count in reads]

    def select(self, rows: Sequence[int]) -> None:
        if self.scored is not None or self._hidden is not None:
            self._hidden = self.hidden[torch.tensor(rows, device=self.hidden.device).clamp(min=0)]
            self.scored = None
        self.lengths = [0 if row < 0 else self.lengths[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row] = 0

    def go_back(self, row: int, length: int) -> None:
        if self.scored is not None:  # another row goes on there, whose last round was not this one
            self._hidden, self.scored = self.hidden, None
        if self.lengths[row] > length + 1:  # it is of a text with other tokens
            self.clear([row])


@dataclass(frozen=True)
class MultiTokenSettings(Settings):
    """Settings of `MultiTokenDrafter`."""

    num_heads: int = setting(help="heads, which is the most tokens drafted in a round", minimum=1, maximum=64)
    hidden_size: int = setting(help="hidden size of the target", minimum=1, maximum=2**16)
    vocab_size: int = setting(help="vocabulary of the target", minimum=2, maximum=2**20)
    num_blocks: int = setting(1, "residual blocks of each head", minimum=1, maximum=16)
    shared_output: bool = setting(False, "end in the target's own output head")
    draft_vocabulary: int | tuple[int, ...] | None = setting(
        None, "tokens that the heads score, ascending, or how many to choose before training; default: all"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_output and self.draft_vocabulary is not None:
            raise ValueError("a shared output head scores all tokens: drop draft_vocabulary or shared_output")


class MultiTokenDrafter(TrainedDrafter):
    """Drafts with trained heads on the target's last hidden state, all in one pass.

    Cai et al. 2024, "Medusa", section 3.1, with one token for each place instead of a tree; heads that share the
    target's output layer are those of Gloeckle et al. 2024.
    """

    Settings = MultiTokenSettings
    settings: MultiTokenSettings

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        own = self.settings
        self.heads: Heads | FusedHeads = Heads(
            own.num_heads, own.hidden_size, None if own.shared_output else self.num_tokens, own.num_blocks
        )

    @property
    def max_draft_tokens(self) -> int:
        return self.settings.num_heads

    def fused(self) -> MultiTokenDrafter:
        if isinstance(self.heads, FusedHeads):
            return self
        with torch.device("meta"):  # its own heads are not used
            other = MultiTokenDrafter(sampling=self.sampling, **self.settings.to_dict())
        other.heads, other.draft_vocabulary = FusedHeads(self.heads), deepcopy(self.draft_vocabulary)
        return other.eval()

    def check_target(self, target: LanguageModel) -> None:
        super().check_target(target)
        if self.settings.shared_output:
            target.check_output_head()

    @torch.no_grad()
    def init_from(self, target: LanguageModel) -> MultiTokenDrafter:
        """Make each head's own output layer a copy of the target's output head, as Medusa begins.

        Raises:
            ValueError: as `check_target`.
        """
        self.check_target(target)
        heads: Any = self.heads
        for head in () if self.settings.shared_output else heads:
            head[-1].weight.copy_(rows_of(target.output_weight, self.draft_vocabulary))
        return self

    def features(self, target: LanguageModel) -> Sequence[int]:
        assert target.num_layers is not None
        return (target.num_layers - 1,)

    def logits(
        self, hidden: Float[Tensor, "B T D"], target: LanguageModel, num_heads: int | None = None
    ) -> Float[Tensor, "H B T V"]:
        """The logits of the first `num_heads` heads (all when None) from the target's last hidden states.

        Head i's logits at place t are of token t + 2 + i, when the target's own are of token t + 1.
        """
        scores = self.scores(hidden, target, num_heads)
        return scores if self.draft_vocabulary is None else self.draft_vocabulary.to_target(scores)

    def scores(
        self, hidden: Float[Tensor, "B T D"], target: LanguageModel, num_heads: int | None = None
    ) -> Float[Tensor, "H B T W"]:
        """As `logits`, of the draft's tokens."""
        outputs: Tensor = self.heads(hidden.to(self.heads.dtype), num_heads)
        if not self.settings.shared_output:
            return outputs
        return target.output_logits(outputs.flatten(0, 1).to(hidden.dtype)).unflatten(0, outputs.shape[:2])

    def head_logits(self, number: int, hidden: Float[Tensor, "*N D"], target: LanguageModel) -> Float[Tensor, "*N W"]:
        """One head's logits from the target's last hidden states, of the draft's tokens: for training."""
        assert isinstance(self.heads, Heads), "fused heads are for decoding: train those that they were made of"
        output: Tensor = self.heads[number](hidden.to(self.heads.dtype))
        if not self.settings.shared_output:
            return output
        flat = output.to(hidden.dtype).flatten(end_dim=-2)
        return target.output_logits(flat[None])[0].unflatten(0, output.shape[:-1])

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> MultiTokenState:
        assert context is not None, "heads read their target's hidden states, so a session must say which that is"
        return MultiTokenState(batch_size, context, self.features(context.model)[0])

    def propose(self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        known = (len(text) == length for text, length in zip(request.texts, state.lengths, strict=True))
        wanted = [
            min(window, self.max_draft_tokens) if each else 0 for window, each in zip(windows, known, strict=True)
        ]
        if not max(wanted):
            return nothing(request)
        own, model, vocabulary = self.sampling or sampling, state.context.model, self.draft_vocabulary

        def draw(drawn: Drawn, hidden: Tensor, num_draft_tokens: int) -> None:
            for scores in self.scores(hidden[:, None], model, num_draft_tokens)[:, :, 0]:
                drawn.draw(scores)

        if state.scored is None or request.device is None or own.processors:
            drawn = Drawn(request, wanted, own, vocabulary)
            draw(drawn, state.hidden, max(wanted))
            return make_draft(drawn.outputs, wanted, request, num_calls=1)
        width = min(request.device.width, self.max_draft_tokens)

        def call(drawn: Drawn, scored: Tensor, num_added: Tensor) -> None:
            draw(drawn, _at(scored, (num_added - 1).clamp(max=scored.shape[1] - 1)), width)

        added = request.device.num_added
        outputs = self.recorded(request, width, own, "heads", call, state.scored, added, vocabulary=vocabulary)
        return make_draft(outputs, wanted, request, num_calls=1)

    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.learn(output.scored(state.layer), num_accepted)


def _at(scored: Float[Tensor, "B N D"], places: Tensor) -> Float[Tensor, "B D"]:
    """Each row's hidden state at its place."""
    return scored.gather(1, places[:, None, None].expand(-1, -1, scored.shape[-1])).squeeze(1)


def to_medusa(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A drafter's `state_dict` under the names of Medusa's published `medusa_lm_head` files."""
    return {name.removeprefix("heads."): weight for name, weight in weights.items()}


def from_medusa(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_medusa`; ValueError if these are no weights of Medusa's heads."""
    if not weights or not all(
        re.fullmatch(r"\d+\.\d+\.(linear\.weight|linear\.bias|weight)", name) for name in weights
    ):
        raise ValueError("this is no file of Medusa's heads, whose weights are named like 0.0.linear.weight")
    return {f"heads.{name}": weight for name, weight in weights.items()}
