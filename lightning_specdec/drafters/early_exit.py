"""Early exit: the target's first layers draft, and verification continues from their outputs.

Shapes: B rows, T tokens, N positions, D hidden size, V vocabulary, W tokens that a head scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import Settings, setting
from lightning_specdec.drafters.base import (
    Drafter,
    DraftRequest,
    DraftState,
    TargetContext,
    pipelined,
)
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.medusa import ResidualBlock
from lightning_specdec.drafters.sampling_drafter import TrainedDrafter, make_draft
from lightning_specdec.models import DecodeState, ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.base import select
from lightning_specdec.models.state import Lengths
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


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
        "tokens that the heads score, ascending, or how many to choose before training; "
        "default: all",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_head = self.num_blocks > 0 or self.draft_vocabulary is not None
        if needs_head and not self.head_layers:
            raise ValueError(
                "num_blocks and draft_vocabulary need an exit with its own head: "
                "name it in head_layers"
            )
        has_sizes = self.hidden_size is not None and self.vocab_size is not None
        if self.head_layers and not has_sizes:
            raise ValueError(
                "heads need hidden_size and vocab_size of their target: give both with head_layers"
            )


class LowerState(DecodeState):
    """How far the target's lower layers have read in one round, and their outputs.

    The lower layers write their keys and values into the target's state. They may be ahead of the
    upper layers, but never lag.

    Args:
        whole: the target's state.
    """

    def __init__(self, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed), whole.device)
        self.whole = whole
        self.consumed = list(whole.consumed)
        self.committed = list(whole.consumed)
        self._start = whole.consumed
        """Tokens that the whole target has read."""
        self._outputs: list[Tensor] = []
        """The lower layers' outputs from there on; token i of a row is in slot i of all parts."""

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None) -> None:
        """Store the outputs for T more tokens, and count the valid ones as consumed."""
        num_ahead = self.ahead
        num_slots = sum(outputs.shape[1] for outputs in self._outputs)
        if min(num_ahead) == num_slots:
            # No row has padding or was truncated, so all continue in the same slot.
            self._outputs.append(hidden)
        else:
            self._outputs = [self._scattered(hidden, num_ahead)]
        self.advance(hidden.shape[1], valid_lengths)

    def _scattered(
        self,
        hidden: Float[Tensor, "B T D"],
        num_ahead: Sequence[int],
    ) -> Float[Tensor, "B N D"]:
        """All outputs, with the new ones written after each row's last valid one."""
        num_tokens = hidden.shape[1]
        first_slots = torch.tensor(num_ahead, device=self.device)
        slots = first_slots[:, None] + torch.arange(num_tokens, device=self.device)
        index = slots[..., None].expand_as(hidden)

        outputs = torch.cat(self._outputs, dim=1)
        extended = nn.functional.pad(outputs, (0, 0, 0, num_tokens))
        return extended.scatter_(1, index, hidden)

    @property
    def ahead(self) -> list[int]:
        """How many more tokens of each row the lower layers have read than the whole target."""
        return [length - start for length, start in zip(self.consumed, self._start, strict=True)]

    def exit_states(self, num_layers: int) -> ExitStates:
        """The states that the upper layers continue from."""
        outputs = torch.cat(self._outputs, dim=1)
        return ExitStates(num_layers, outputs, self.ahead)

    def _select(
        self,
        rows: Sequence[int],
        source: Int[Tensor, "N"],
        empty: Bool[Tensor, "N"],
    ) -> None:
        raise AssertionError("select rows of the target's state instead")


class ExitModel(LanguageModel):
    """The target's lower layers and an output head, as a language model over a `LowerState`."""

    num_layers: int

    def __init__(self, target: LanguageModel, drafter: EarlyExitDrafter) -> None:
        super().__init__()
        self.target = target
        self.num_layers = drafter.exit_layer
        self.head = drafter.head
        self.draft_vocabulary = drafter.draft_vocabulary
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
        scored_hidden = select(hidden, logits_for)
        return ModelOutput(self.logits(scored_hidden), logits_for=logits_for)

    def logits(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """The logits from the lower layers' output."""
        if self.head is None:
            return self.target.exit_logits(hidden)
        draft_logits = self.head(hidden)
        if self.draft_vocabulary is None:
            return draft_logits
        return self.draft_vocabulary.spread(draft_logits, -torch.inf)

    def arguments(self) -> dict[str, Any]:
        raise ValueError("the lower layers belong to their target: save the target instead")


class ExitState(DraftState):
    """Nothing is remembered between rounds, since the keys and values are in the target's state.

    Args:
        model: the lower layers.
        whole: the target's state.
    """

    def __init__(self, model: ExitModel, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed))
        self.model = model
        self.whole = whole

    def take_over(self, previous: DraftState) -> bool:
        return True


class ExitHead(nn.Module):
    """The output head of one exit: residual blocks, a norm and a linear layer.

    Args:
        hidden_size: D.
        num_tokens: W.
        num_blocks: residual blocks before the norm.
    """

    def __init__(self, hidden_size: int, num_tokens: int, num_blocks: int) -> None:
        super().__init__()
        blocks = [ResidualBlock(hidden_size) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.output = nn.Linear(hidden_size, num_tokens, bias=False)

    def forward(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B W"]:
        """Logits, computed in the head's dtype."""
        hidden = hidden.to(self.norm.weight.dtype)
        hidden = self.blocks(hidden)
        return self.output(self.norm(hidden))


class EarlyExitDrafter(TrainedDrafter):
    """Drafts with the target's first layers; needs no draft model.

    Elhoushi et al. 2024, "LayerSkip", section 4.3: the exit drafts (4.3.1), the remaining layers
    verify (4.3.2), and both share keys, values and the exit's hidden states (4.3.3).
    """

    Settings = EarlyExitSettings
    settings: EarlyExitSettings
    from_file = False
    free = "exit_layer"

    def __init__(self, *values: Any, sampling: Sampling | None = None, **settings: Any) -> None:
        super().__init__(*values, sampling=sampling, **settings)
        self.heads = nn.ModuleDict()
        for layer in self.settings.head_layers:
            assert self.settings.hidden_size is not None
            self.heads[str(layer)] = ExitHead(
                self.settings.hidden_size, self.num_tokens, self.settings.num_blocks
            )

    @property
    def exit_layer(self) -> int:
        """How many of the target's layers draft."""
        return self.settings.exit_layer

    @property
    def head(self) -> ExitHead | None:
        """The trained output head of this exit; None if the exit uses the target's."""
        name = str(self.exit_layer)
        if name not in self.heads:
            return None
        head: Any = self.heads[name]
        return head

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        if "exit_layer" not in settings and draft is None and target.num_layers is not None:
            raise ValueError(
                f"{cls.__name__} needs exit_layer, the number of the target's layers that draft: "
                f"give --drafter.exit_layer N (exit_layer=N), 1 to {target.num_layers - 1}"
            )
        return super().for_target(target, draft, **settings)

    def check_target(self, target: LanguageModel) -> None:
        target.check_exit(self.exit_layer)
        if self.heads:
            super().check_target(target)

    def fused(self, target: LanguageModel | None = None) -> EarlyExitDrafter:
        return self.packed("heads")

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> ExitState:
        assert context is not None, (
            "an early exit drafts with the target's layers, so the session must pass the target"
        )
        return ExitState(ExitModel(context.model, self), context.state)

    @pipelined
    def propose(
        self,
        state: Any,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        model = state.model
        unread = []
        for text, num_read in zip(request.texts, state.whole.consumed, strict=True):
            unread.append(text[num_read:])
        # After the first round, the target has read all of the text but its last token.
        last_tokens = None
        if all(len(tokens) == 1 for tokens in unread):
            last_tokens = request.last_two_tokens[:, 1:]

        outputs = self.recorded_roll(
            model.target,
            state.whole,
            last_tokens,
            request,
            sampling,
            num_layers=self.exit_layer,
            head=model.logits,
        )
        if outputs is not None:
            # After `DraftSampler.outputs`: what the layers computed for the draft tokens.
            *_, hidden = outputs
            assert hidden is not None
            lengths = [hidden.shape[1]] * len(windows)
            exit_states = ExitStates(self.exit_layer, hidden, lengths)
            return make_draft(outputs, windows, request, states=exit_states)

        if last_tokens is not None:
            tokens = last_tokens
            valid_lengths = None
        else:
            tokens, valid_lengths = pad(unread, request.last_two_tokens.device)
        lower_state = LowerState(state.whole)
        outputs = self.roll(model, lower_state, tokens, valid_lengths, windows, request, sampling)
        exit_states = lower_state.exit_states(self.exit_layer)
        return make_draft(outputs, windows, request, states=exit_states)
