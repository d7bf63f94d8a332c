"""Heads on the target's last hidden state as the draft: each drafts one token further ahead, all in one pass.

Shapes: B rows, N scored places, D width of the hidden state, W tokens that the heads score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext, pipelined
from lightning_specdec.drafters.heads import Block, rows_of
from lightning_specdec.drafters.model import (
    Drawn,
    TrainedDrafter,
    make_draft,
    nothing,
    runs_in_openvino,
)
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


MOST_STACKED = 4096
"""Tokens up to which output layers are stacked; larger ones are packed for the processor."""


class StackedHeads:
    """The heads' weights as they are now, one stack of matrices for each layer: all heads in one launch.

    The matrices are transposed, which a product with a single row reads faster on a CPU.
    """

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        *blocks, outputs = zip(*(head.children() for head in heads), strict=True)
        self.blocks = [
            (
                _stack(block.linear.weight.T for block in place),
                _stack(block.linear.bias[None] for block in place),
            )
            for place in blocks
        ]
        self.output = _stack(layer.weight.T for layer in outputs)

    def __call__(self, hidden: Float[Tensor, "B D"], num_heads: int) -> Float[Tensor, "H B W"]:
        states = hidden.expand(num_heads, -1, -1)
        for weight, bias in self.blocks:
            states = states + nn.functional.silu(
                torch.baddbmm(bias[:num_heads], states, weight[:num_heads])
            )
        return torch.bmm(states, self.output[:num_heads])


def _stack(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.detach() for weight in weights])


class MultiTokenState(DraftState):
    """For each row the hidden state that its text's last token was drawn from.

    It serves one text alone, hence the lengths: a row that has just begun or goes on after other tokens has none until
    the target has read it.
    """

    def __init__(self, batch_size: int, context: TargetContext, layer: int) -> None:
        self.context, self.layer = context, layer
        self.lengths = [0] * batch_size
        """Tokens of the texts that the hidden states are for; 0 where there is none."""
        self.scored: Float[Tensor, "B N D"] | None = None
        """The target's hidden states at its last call's places."""
        self.num_added = [1] * batch_size
        """New tokens of each row's last round: the last one was drawn from the state at this place, counted from 1."""
        self.moved = False
        """Whether the rows have moved since, so that the device's own numbers are of others."""

    def learn(self, scored: Float[Tensor, "B N D"], num_accepted: Sequence[int]) -> None:
        """Keep the states of the last call; N places are the text's last token and N - 1 draft tokens."""
        self.scored, self.num_added, self.moved = (
            scored,
            [count + 1 for count in num_accepted],
            False,
        )
        # The target has read the whole text and all draft tokens; the kept ones and one token more are text now.
        reads = zip(self.context.state.consumed, self.num_added, strict=True)
        self.lengths = [length - scored.shape[1] + added + 1 for length, added in reads]

    def select(self, rows: Sequence[int]) -> None:
        if self.scored is not None:
            self.scored = self.scored[torch.tensor(rows, device=self.scored.device).clamp(min=0)]
        self.lengths = [0 if row < 0 else self.lengths[row] for row in rows]
        self.num_added = [self.num_added[max(row, 0)] for row in rows]
        self.moved = True

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row] = 0

    def go_back(self, row: int, length: int) -> None:
        self.moved = True  # another row goes on there, whose last round was not this one
        if self.lengths[row] > length + 1:  # it is of a text with other tokens
            self.clear([row])


@dataclass(frozen=True)
class MultiTokenSettings(Settings):
    num_heads: int = setting(
        help="heads, which is the most tokens drafted in a round", minimum=1, maximum=64
    )
    hidden_size: int = setting(help="hidden size of the target", minimum=1, maximum=2**16)
    vocab_size: int = setting(help="vocabulary of the target", minimum=2, maximum=2**20)
    num_blocks: int = setting(1, "residual blocks of each head", minimum=1, maximum=16)
    draft_vocabulary: int | tuple[int, ...] | None = setting(
        None,
        "tokens that the heads score, ascending, or how many to choose before training; default: all",
    )


class MultiTokenDrafter(TrainedDrafter):
    """Drafts with trained heads on the target's last hidden state, all in one pass.

    Cai et al. 2024, "Medusa", section 3.1, with one token for each place instead of a tree. Weights are named as in
    Medusa's published files, behind `heads.`.
    """

    Settings = MultiTokenSettings
    settings: MultiTokenSettings

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        size, own = self.settings.hidden_size, self.settings
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(Block(size) for _ in range(own.num_blocks)),
                nn.Linear(size, self.num_tokens, bias=False),
            )
            for _ in range(own.num_heads)
        )
        # Keeps the heads' type where their weights are packed.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor
        self.stacked: StackedHeads | None = None
        """The heads for decoding, which training does not reach."""

    @property
    def max_draft_tokens(self) -> int:
        return self.settings.num_heads

    def fused(self, target: LanguageModel | None = None) -> MultiTokenDrafter:
        if runs_in_openvino(target, self._like.dtype):
            from lightning_specdec.models.openvino import Compiled

            other, example = copy(self), (torch.zeros(2, self.settings.hidden_size),)
            kind = self._like.dtype, getattr(target, "settings", None), self.settings
            other.in_openvino = [Compiled.of(head, example, *kind) for head in self.heads]
            return other
        if self.num_tokens > MOST_STACKED:
            return self.packed("heads")
        if self.stacked is not None:
            return self
        other = copy(self)
        other.stacked = StackedHeads(self.heads)
        return other

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        if (
            self.stacked is not None
        ):  # its weights are copies of others that it shares with the original
            raise ValueError(
                "fused heads stay as they are: move or convert the drafter before `fused`"
            )
        return super()._apply(*arguments, **options)

    @torch.no_grad()
    def init_from(self, target: LanguageModel) -> MultiTokenDrafter:
        """Make each head's output layer a copy of the target's output head, as Medusa begins.

        Raises:
            ValueError: as `check_target`.
        """
        self.check_target(target)
        heads: Any = self.heads
        for head in heads:
            head[-1].weight.copy_(rows_of(target.output_weight, self.draft_vocabulary))
        return self

    def features(self, target: LanguageModel) -> Sequence[int]:
        assert target.num_layers is not None
        return (target.num_layers - 1,)

    def logits(self, number: int, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """One head's logits from the target's last hidden states, of the draft's tokens.

        Those of head i at place t are of token t + 2 + i, when the target's own are of token t + 1.
        """
        return self.heads[number](hidden.to(self._like.dtype))

    def first_logits(
        self, num_heads: int, hidden: Float[Tensor, "B D"]
    ) -> Iterable[Float[Tensor, "B W"]]:
        if self.in_openvino:
            flat = hidden.float().contiguous()
            return [head.run([flat])[0] for head in self.in_openvino[:num_heads]]
        if self.stacked is not None:
            return self.stacked(hidden.to(self._like.dtype), num_heads)
        return [self.logits(number, hidden) for number in range(num_heads)]

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> MultiTokenState:
        assert context is not None, (
            "heads read their target's hidden states, so a session must say which that is"
        )
        return MultiTokenState(batch_size, context, self.features(context.model)[0])

    @pipelined
    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        most, inputs = self.max_draft_tokens, request.calls.inputs
        known = (
            len(text) == length for text, length in zip(request.texts, state.lengths, strict=True)
        )
        wanted = [
            min(window, most) if each else 0 for window, each in zip(windows, known, strict=True)
        ]
        if not max(wanted):
            return nothing(request)
        if inputs is None or state.moved or (self.sampling or sampling).processors:
            width, key, added = (
                max(wanted),
                None,
                torch.tensor(state.num_added, device=request.tail.device),
            )
        else:
            width = min(request.calls.num_draft_tokens, most)
            key, added = ("heads", width), inputs.num_added

        def call(drawn: Drawn, scored: Float[Tensor, "B N D"], added: Int[Tensor, "B"]) -> None:
            hidden = select(scored, (added - 1).clamp(0, scored.shape[1] - 1)[:, None])[
                :, 0
            ]  # 0 of a row that failed
            for scores in self.first_logits(width, hidden):
                drawn.draw(scores)

        vocabulary = self.draft_vocabulary
        outputs = self.run(
            request, wanted, sampling, call, state.scored, added, key=key, vocabulary=vocabulary
        )
        return make_draft(outputs, wanted, request, num_calls=1)

    @pipelined
    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.learn(output.scored(state.layer), num_accepted)
