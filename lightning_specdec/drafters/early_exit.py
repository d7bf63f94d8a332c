"""The target's own first layers as the draft; their keys, values and outputs are used again in verification.

Shapes: B rows, T tokens, N places, D hidden size, V vocabulary, W tokens that a head scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import DraftRequest, DraftState, TargetContext, pipelined
from lightning_specdec.drafters.heads import Block
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import TrainedDrafter, make_draft
from lightning_specdec.models import DecodeState, ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.models.state import Lengths
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class LowerState(DecodeState):
    """How far the lower layers have read in one round: the target's state, and the outputs for the tokens ahead of it.

    Args:
        whole: the target's state; the lower half can be ahead of it, never behind.
    """

    def __init__(self, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed), whole.device)
        self.whole, self._origin = whole, whole.consumed
        self.consumed, self.committed = list(whole.consumed), list(whole.consumed)
        self._chunks: list[Tensor] = []

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None) -> None:
        """Keep the outputs for T more tokens, and count the valid ones as consumed."""
        ahead = self.ahead
        if min(ahead) == sum(chunk.shape[1] for chunk in self._chunks):
            self._chunks.append(hidden)
        else:
            num_tokens, size = hidden.shape[1:]
            places = torch.tensor(ahead, device=self.device)[:, None] + torch.arange(
                num_tokens, device=self.device
            )
            room = nn.functional.pad(torch.cat(self._chunks, dim=1), (0, 0, 0, num_tokens))
            self._chunks = [room.scatter_(1, places[..., None].expand(-1, -1, size), hidden)]
        self.advance(hidden.shape[1], valid_lengths)

    @property
    def ahead(self) -> list[int]:
        """How many more tokens of each row it has read than the target."""
        return [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]

    def exit_states(self, num_layers: int) -> ExitStates:
        """What the upper layers continue from."""
        return ExitStates(num_layers, torch.cat(self._chunks, dim=1), self.ahead)

    def _select(
        self, rows: Sequence[int], source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]
    ) -> None:
        raise AssertionError("the rows are the target's: it selects them")


class ExitModel(LanguageModel):
    """The target's lower layers and an output head as a language model over a `LowerState`."""

    num_layers: int

    def __init__(self, target: LanguageModel, drafter: EarlyExitDrafter) -> None:
        super().__init__()
        self.target, self.num_layers, self.head = target, drafter.exit_layer, drafter.head
        self.tokens = drafter.draft_vocabulary
        self.vocab_size = target.vocab_size

    def init_state(self, batch_size: int, max_length: int) -> LowerState:
        return LowerState(self.target.init_state(batch_size, max_length))

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        state: DecodeState | None = None,
        *,
        valid_lengths: Lengths | None = None,
        logits_for: Int[Tensor, "B N"] | slice | None = None,
        features: Sequence[int] = (),
    ) -> ModelOutput:
        assert isinstance(state, LowerState)
        hidden = self.target.lower(tokens, state.whole, state.consumed, self.num_layers)
        state.append(hidden, valid_lengths)
        return ModelOutput(self.logits(select(hidden, logits_for)), logits_for=logits_for)

    def logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """The logits from the lower layers' output."""
        if self.head is None:
            return self.target.exit_logits(hidden)
        scores = self.head(hidden)
        return scores if self.tokens is None else self.tokens.spread(scores, -torch.inf)

    def arguments(self) -> dict[str, Any]:
        raise ValueError("the lower layers belong to their target: save that")


class ExitState(DraftState):
    """Nothing between rounds, since its memory is the target's.

    Args:
        model: the lower layers.
        whole: the target's state.
    """

    def __init__(self, model: ExitModel, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed))
        self.model, self.whole = model, whole


class ExitHead(nn.Module):
    """An exit's own output head: blocks, a norm and a linear layer.

    Args:
        hidden_size: D.
        num_tokens: W.
        num_blocks: residual blocks before the norm.
    """

    def __init__(self, hidden_size: int, num_tokens: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(hidden_size) for _ in range(num_blocks)))
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

    def forward(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """Logits, computed in the head's own type."""
        return self.output(self.norm(self.blocks(hidden.to(self.norm.weight.dtype))))


@dataclass(frozen=True)
class EarlyExitSettings(Settings):
    exit_layer: int = setting(help="how many of the target's layers draft", minimum=1)
    head_layers: tuple[int, ...] = setting(
        (), "exits with a trained output head; others use the target's", minimum=1
    )
    hidden_size: int | None = setting(
        None, "hidden size of the target that these heads are for", minimum=1
    )
    vocab_size: int | None = setting(
        None, "vocabulary of the target that these heads are for", minimum=2
    )
    num_blocks: int = setting(0, "residual blocks of each head", minimum=0, maximum=16)
    draft_vocabulary: int | tuple[int, ...] | None = setting(
        None,
        "tokens that the heads score, ascending, or how many to choose before training; default: all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_layers and (self.num_blocks or self.draft_vocabulary is not None):
            raise ValueError(
                "num_blocks and draft_vocabulary need an exit with its own head: name it in head_layers"
            )
        if self.head_layers and (self.hidden_size is None or self.vocab_size is None):
            raise ValueError(
                "heads need hidden_size and vocab_size of their target: give both beside head_layers"
            )


class EarlyExitDrafter(TrainedDrafter):
    """Drafts with the target's first layers (Elhoushi et al. 2024, "LayerSkip", section 4.3); needs no draft model."""

    Settings = EarlyExitSettings
    settings: EarlyExitSettings
    from_file = False
    free = "exit_layer"

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        own = self.settings
        self.heads = nn.ModuleDict()
        for layer in own.head_layers:
            assert own.hidden_size is not None
            self.heads[str(layer)] = ExitHead(own.hidden_size, self.num_tokens, own.num_blocks)

    @property
    def exit_layer(self) -> int:
        """How many of the target's layers draft."""
        return self.settings.exit_layer

    @property
    def head(self) -> ExitHead | None:
        """The exit's own output head; None where the target's serves."""
        name = str(self.exit_layer)
        found: Any = self.heads[name] if name in self.heads else None
        return found

    def check_target(self, target: LanguageModel) -> None:
        target.check_exit(self.exit_layer)
        if self.heads:
            super().check_target(target)

    def fused(self, target: LanguageModel | None = None) -> EarlyExitDrafter:
        return self.packed("heads")

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> ExitState:
        assert context is not None, (
            "an early exit drafts inside its target, so a session must say which that is"
        )
        return ExitState(ExitModel(context.model, self), context.state)

    @pipelined
    def propose(
        self, state: Any, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        whole, model, layer = state.whole, state.model, self.exit_layer
        unread = [text[length:] for text, length in zip(request.texts, whole.consumed, strict=True)]
        tails = request.tail[:, 1:] if all(len(each) == 1 for each in unread) else None
        outputs = self.recorded_roll(
            model.target, whole, tails, request, sampling, num_layers=layer, head=model.logits
        )
        if outputs is None:
            lower = LowerState(whole)
            tokens, lengths = pad(unread, request.tail.device) if tails is None else (tails, None)
            outputs = self.roll(model, lower, tokens, lengths, windows, request, sampling)
            states = lower.exit_states(layer)
        else:
            assert outputs[3] is not None
            states = ExitStates(layer, outputs[3], [outputs[3].shape[1]] * len(windows))
        return make_draft(outputs, windows, request, states=states)
