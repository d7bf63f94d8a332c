"""Medusa: heads on the target's last hidden state, each of which drafts one token, in one pass.

Head i drafts the token i + 1 positions after the one that the target itself predicts.

Shapes: B rows, N scored positions, D hidden size, H heads, W tokens that the heads score.
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
from lightning_specdec.drafters.draft_vocabulary import rows_of
from lightning_specdec.drafters.sampling_drafter import (
    DraftSampler,
    TrainedDrafter,
    empty_draft,
    make_draft,
    runs_in_openvino,
)
from lightning_specdec.models import LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class MedusaSettings(Settings):
    num_heads: int = setting(
        help="heads, which is the most tokens drafted in a round", minimum=1, maximum=64
    )
    hidden_size: int = setting(help="hidden size of the target", minimum=1, maximum=2**16)
    vocab_size: int = setting(help="vocabulary of the target", minimum=2, maximum=2**20)
    num_blocks: int = setting(1, "residual blocks of each head", minimum=1, maximum=16)
    draft_vocabulary: int | tuple[int, ...] | None = setting(
        None,
        "tokens that the heads score, ascending, or how many to choose before training; "
        "default: all",
    )


class ResidualBlock(nn.Module):
    """Medusa's residual block: the hidden state plus the activation of a linear layer.

    The linear layer starts at zero, so a new block returns its input (Cai et al. 2024, "Medusa",
    section 3.1).
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The next block's input."""
        return hidden + nn.functional.silu(self.linear(hidden))


MAX_STACKED_TOKENS = 4096
"""Largest vocabulary whose output layers are stacked. Larger ones are packed for the processor."""


class StackedHeads:
    """A copy of all heads' weights, stacked layer by layer: each layer of all heads is one launch.

    Matrices are transposed, because a CPU multiplies a single row faster that way.
    """

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        # Each head is a sequence of residual blocks and an output layer.
        layers_by_head = [head.children() for head in heads]
        *blocks_by_depth, output_layers = zip(*layers_by_head, strict=True)

        self.block_weights: list[Float[Tensor, "H D D"]] = []
        self.block_biases: list[Float[Tensor, "H 1 D"]] = []
        for blocks in blocks_by_depth:
            self.block_weights.append(_stack(block.linear.weight.T for block in blocks))
            self.block_biases.append(_stack(block.linear.bias[None] for block in blocks))
        self.output_weights = _stack(layer.weight.T for layer in output_layers)

    def __call__(self, hidden: Float[Tensor, "B D"], num_heads: int) -> Float[Tensor, "H B W"]:
        """The logits of the first `num_heads` heads."""
        states = hidden.expand(num_heads, -1, -1)
        for all_weights, all_biases in zip(self.block_weights, self.block_biases, strict=True):
            weights = all_weights[:num_heads]
            biases = all_biases[:num_heads]
            linear_outputs = torch.baddbmm(biases, states, weights)
            states = states + nn.functional.silu(linear_outputs)

        output_weights = self.output_weights[:num_heads]
        return torch.bmm(states, output_weights)


def _stack(weights: Iterable[Tensor]) -> Tensor:
    return torch.stack([weight.detach() for weight in weights])


class MedusaState(DraftState):
    """For each row, the target's hidden state that the text's last token was drawn from.

    The hidden state belongs to one text. A row that has just started, or that continues with other
    tokens, has none until the target has read it: see `lengths`.
    """

    def __init__(self, batch_size: int, context: TargetContext, layer: int) -> None:
        self.context = context
        self.layer = layer
        self.lengths = [0] * batch_size
        """Length of the text that each row's hidden state is for; 0 if there is none."""
        self.scored: Float[Tensor, "B N D"] | None = None
        """The target's hidden states at the positions that its last call scored."""
        self.num_added = [1] * batch_size
        """New tokens of each row in the last round. The last one was drawn from the hidden state at
        scored position `num_added - 1`."""
        self.moved = False
        """Whether rows have moved since then, so that `DeviceRound.num_added` is of other rows."""

    def learn(self, scored: Float[Tensor, "B N D"], num_accepted: Sequence[int]) -> None:
        """Store the hidden states of the target's last call.

        Args:
            scored: at N positions: the text's last token and N - 1 draft tokens.
        """
        self.scored = scored
        # In addition to the accepted draft tokens, a round adds the correction or bonus token.
        self.num_added = [count + 1 for count in num_accepted]
        self.moved = False

        # The target has now read the text and N - 1 draft tokens.
        num_draft_tokens = scored.shape[1] - 1
        self.lengths = []
        for num_read, num_added in zip(self.context.state.consumed, self.num_added, strict=True):
            text_length = num_read - num_draft_tokens
            self.lengths.append(text_length + num_added)

    def take_over(self, previous: DraftState) -> bool:
        # The next round supplies the only hidden state that the heads read.
        return True

    def select(self, rows: Sequence[int]) -> None:
        # Any row will do as the source of an empty one, which has no hidden state.
        source_rows = [max(row, 0) for row in rows]
        if self.scored is not None:
            index = torch.tensor(source_rows, device=self.scored.device)
            self.scored = self.scored[index]
        self.num_added = [self.num_added[row] for row in source_rows]
        self.lengths = [0 if row < 0 else self.lengths[row] for row in rows]
        self.moved = True

    def clear(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.lengths[row] = 0

    def truncate_row(self, row: int, length: int) -> None:
        # Another request may continue in this row, which took no part in the last round.
        self.moved = True
        # The hidden state has read all of its text but the last token. It stays valid if just that
        # token is removed.
        if self.lengths[row] > length + 1:
            self.clear([row])


class MedusaDrafter(TrainedDrafter):
    """Drafts with trained heads on the target's last hidden state, all in one pass.

    Cai et al. 2024, "Medusa", section 3.1, with one token for each position instead of a tree; also
    known as multi-token prediction (Gloeckle et al. 2024). Weights have the names of Medusa's
    published files, with the prefix `heads.`.
    """

    Settings = MedusaSettings
    settings: MedusaSettings

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        self.heads = nn.ModuleList(self._new_head() for _ in range(self.settings.num_heads))
        # Records the heads' dtype and device, which packed weights do not have.
        self.register_buffer("_like", torch.empty(0), persistent=False)
        self._like: Tensor
        self.stacked: StackedHeads | None = None
        """The heads for decoding: copies of the weights, which training does not update."""

    def _new_head(self) -> nn.Sequential:
        hidden_size = self.settings.hidden_size
        blocks = [ResidualBlock(hidden_size) for _ in range(self.settings.num_blocks)]
        output_layer = nn.Linear(hidden_size, self.num_tokens, bias=False)
        return nn.Sequential(*blocks, output_layer)

    @property
    def max_draft_tokens(self) -> int:
        return self.settings.num_heads

    def fused(self, target: LanguageModel | None = None) -> MedusaDrafter:
        if runs_in_openvino(target, self._like.dtype):
            return self._in_openvino(target)
        if self.num_tokens > MAX_STACKED_TOKENS:
            return self.packed("heads")
        if self.stacked is not None:
            return self

        drafter = copy(self)
        drafter.stacked = StackedHeads(self.heads)
        return drafter

    def _in_openvino(self, target: LanguageModel | None) -> MedusaDrafter:
        """A copy whose heads run in OpenVINO."""
        from lightning_specdec.models.openvino import Compiled

        drafter = copy(self)
        example_inputs = (torch.zeros(2, self.settings.hidden_size),)
        target_settings = getattr(target, "settings", None)
        drafter.in_openvino = [
            Compiled.of(head, example_inputs, self._like.dtype, target_settings, self.settings)
            for head in self.heads
        ]
        return drafter

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        # The stacked weights are copies, which moving or converting the modules would not reach.
        if self.stacked is not None:
            raise ValueError(
                "fused heads cannot be moved or converted: move or convert the drafter before "
                "`fused`"
            )
        return super()._apply(*arguments, **options)

    @torch.no_grad()
    def init_from(self, target: LanguageModel) -> MedusaDrafter:
        """Initialize each head's output layer with the target's output head.

        Medusa, section 3.1: so a new head predicts what the target predicts.

        Raises:
            ValueError: as `check_target`.
        """
        self.check_target(target)
        output_weight = rows_of(target.output_weight, self.draft_vocabulary)
        heads: Any = self.heads
        for head in heads:
            head[-1].weight.copy_(output_weight)
        return self

    def features(self, target: LanguageModel) -> Sequence[int]:
        assert target.num_layers is not None
        last_layer = target.num_layers - 1
        return (last_layer,)

    def logits(self, number: int, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """One head's logits over the draft's tokens, from the target's last hidden states.

        The target's own logits at position t predict token t + 1; head i predicts token t + 2 + i.
        """
        return self.heads[number](hidden.to(self._like.dtype))

    def first_logits(
        self,
        num_heads: int,
        hidden: Float[Tensor, "B D"],
    ) -> Iterable[Float[Tensor, "B W"]]:
        """The logits of the first `num_heads` heads."""
        if self.in_openvino:
            inputs = [hidden.float().contiguous()]
            return [head.run(inputs)[0] for head in self.in_openvino[:num_heads]]
        if self.stacked is not None:
            return self.stacked(hidden.to(self._like.dtype), num_heads)
        return [self.logits(number, hidden) for number in range(num_heads)]

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> MedusaState:
        assert context is not None, (
            "Medusa heads read the target's hidden states, so the session must pass the target"
        )
        (last_layer,) = self.features(context.model)
        return MedusaState(batch_size, context, last_layer)

    @pipelined
    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        windows = self._possible_windows(state, request, windows)
        if not max(windows):
            return empty_draft(request)

        inputs = request.calls.inputs
        runs_on_host = (self.sampling or sampling).runs_on_host
        key: tuple[str, int] | None = None
        if inputs is not None and not state.moved and not runs_on_host:
            # With recorded calls, all rounds draft the same number of tokens, and `num_added` is on
            # the device already.
            num_heads = min(request.calls.num_draft_tokens, self.max_draft_tokens)
            num_added = inputs.num_added
            key = ("heads", num_heads)
        else:
            num_heads = max(windows)
            num_added = torch.tensor(state.num_added, device=request.last_two_tokens.device)

        def draw_tokens(
            sampler: DraftSampler,
            scored: Float[Tensor, "B N D"],
            num_added: Int[Tensor, "B"],
        ) -> None:
            # A failed row has added no tokens; any of its positions will do.
            last_position = scored.shape[1] - 1
            positions = (num_added - 1).clamp(0, last_position)
            selected = select(scored, positions[:, None])
            hidden = selected[:, 0]
            for logits in self.first_logits(num_heads, hidden):
                sampler.draw(logits)

        outputs = self.run(
            request,
            windows,
            sampling,
            draw_tokens,
            state.scored,
            num_added,
            key=key,
            vocabulary=self.draft_vocabulary,
        )
        return make_draft(outputs, windows, request, num_calls=1)

    def _possible_windows(
        self,
        state: MedusaState,
        request: DraftRequest,
        windows: Sequence[int],
    ) -> list[int]:
        """The windows, but 0 for rows without a hidden state, and one token per head at most."""
        possible_windows = []
        for text, length, window in zip(request.texts, state.lengths, windows, strict=True):
            has_hidden_state = len(text) == length
            if has_hidden_state:
                possible_windows.append(min(window, self.max_draft_tokens))
            else:
                possible_windows.append(0)
        return possible_windows

    @pipelined
    def observe(self, state: Any, output: ModelOutput, num_accepted: Sequence[int]) -> None:
        state.learn(output.scored(state.layer), num_accepted)


MultiTokenDrafter = MedusaDrafter
"""The same drafter under the name of multi-token prediction (Gloeckle et al. 2024)."""
