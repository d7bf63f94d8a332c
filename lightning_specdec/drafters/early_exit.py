"""The target's own first layers as the draft.

Knows nothing of how the target is laid out: it asks it for its lower layers, and for its output head.

Theory: a transformer often knows the next token before its last layer, above all one that was trained to (LayerSkip,
Elhoushi et al. 2024). Its first layers with an output head are then a draft that needs no memory of its own: their keys
and values are the target's, and what they made of a token need not be made again when it is verified. So per round the
lower layers read each token once, the upper layers each tested token once. The last guess, which nobody fed to the
draft, passes the lower layers during verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, DraftState, Host
from lightning_specdec.drafters.model import RollingDrafter, pad, refuse_sampling
from lightning_specdec.models import DecodeState, ExitStates, LanguageModel, ModelOutput
from lightning_specdec.models.base import Plain, select
from lightning_specdec.models.state import Lengths
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class LowerState(DecodeState):
    """How far the lower layers have read: the target's state, with a length of its own for the lower half.

    Theory: keys and values lie in the target's buffers, below its upper half's lengths or ahead of them. What the
    lower layers made of the tokens ahead is kept until the upper layers take it over.

    Args:
        whole: the target's state; the lower half can be ahead of it, never behind.
    """

    def __init__(self, whole: DecodeState) -> None:
        super().__init__(len(whole.consumed), whole.device)
        self.whole = whole
        self._chunks: list[Tensor] = []
        self._origin: list[int] = []
        self.catch_up()

    @property
    def memory_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def catch_up(self) -> None:
        """Both halves are where the target is: what was made of guesses is let go."""
        self.consumed, self.committed = list(self.whole.consumed), list(self.whole.consumed)
        self._origin, self._chunks = self.consumed, []

    def append(self, hidden: Float[Tensor, "B T D"], valid_lengths: Lengths | None) -> None:
        """Keep what the lower layers made of T more tokens, and count the valid ones as consumed."""
        ahead, width = self.ahead, sum(chunk.shape[1] for chunk in self._chunks)
        if min(ahead) == width:
            self._chunks.append(hidden)
        else:
            num_tokens, size = hidden.shape[1:]
            places = torch.tensor(ahead, device=self.device)[:, None] + torch.arange(num_tokens, device=self.device)
            room = nn.functional.pad(torch.cat(self._chunks, dim=1), (0, 0, 0, num_tokens))
            self._chunks = [room.scatter_(1, places[..., None].expand(-1, -1, size), hidden)]
        self.advance(hidden.shape[1], valid_lengths)

    @property
    def ahead(self) -> list[int]:
        """By how many tokens of each row the lower half is ahead."""
        return [length - origin for length, origin in zip(self.consumed, self._origin, strict=True)]

    def exit_states(self, num_layers: int) -> ExitStates:
        """What the upper layers go on from."""
        return ExitStates(num_layers, torch.cat(self._chunks, dim=1), self.ahead)

    def _go_back(self) -> None:
        pass  # what lies behind a length is written over

    def _select(self, source: Int[Tensor, "N"], empty: Bool[Tensor, "N"]) -> None:
        raise AssertionError("the rows are the target's: it selects them")


class ExitModel(LanguageModel):
    """The target's lower layers and an output head as a language model over a `LowerState`.

    Args:
        target: the whole model.
        num_layers: how many lower layers.
        head: turns their output to logits; the target's own final norm and head when None.
    """

    num_layers: int

    def __init__(self, target: LanguageModel, num_layers: int, head: nn.Module | None) -> None:
        super().__init__()
        target.check_exit(num_layers)
        self.target, self.num_layers, self.head = target, num_layers, head
        self.vocab_size, self.max_positions, self.vocabulary = (
            target.vocab_size,
            target.max_positions,
            target.vocabulary,
        )

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
        parents: Int[Tensor, "B T"] | None = None,
    ) -> ModelOutput:
        if parents is not None or features:
            raise ValueError("the lower layers read one path of tokens, and give no features")
        if state is None:
            layer = self.num_layers - 1
            hidden = self.target(tokens, features=(layer,), logits_for=slice(0, 0)).features[layer]
        else:
            assert isinstance(state, LowerState)
            hidden = self.target.lower(tokens, state.whole, state.consumed, self.num_layers)
            state.append(hidden, valid_lengths)
        wanted = select(hidden, logits_for)
        logits = self.target.exit_logits(wanted) if self.head is None else self.head(wanted)
        return ModelOutput(logits, logits_for=logits_for)

    def arguments(self) -> dict[str, Plain]:
        raise ValueError("the lower layers belong to their target: save that")


class ExitState(DraftState):
    """What an `EarlyExitDrafter` remembers between rounds: nothing, for its memory is the target's.

    Args:
        model: the lower layers.
        lower: how far they have read within this round.
    """

    def __init__(self, model: ExitModel, whole: DecodeState) -> None:
        self.model, self.whole = model, whole
        self.lower = LowerState(whole)

    def begin(self) -> LowerState:
        """The lower half, where the target is."""
        if len(self.lower.consumed) != len(self.whole.consumed):
            self.lower = LowerState(self.whole)
        self.lower.catch_up()
        return self.lower

    def select(self, rows: Sequence[int]) -> None:
        pass

    def clear(self, rows: Sequence[int]) -> None:
        pass


class ExitHead(nn.Module):
    """An output head of an exit's own: a norm and a linear layer.

    Args:
        hidden_size: D.
        vocab_size: V.
    """

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.output = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """Logits, computed in the head's own type."""
        logits: Tensor = self.output(self.norm(hidden.to(self.output.weight.dtype)))
        return logits


class EarlyExitDrafter(RollingDrafter):
    """Guesses with the target's first layers; keys, values and what they made of each token go to the verification.

    Source: Elhoushi et al. 2024, "LayerSkip", section 4.3 (self-speculative decoding with shared cache and exit query).

    Args:
        exit_layer: how many of the target's layers guess; any number of them, whatever exits it was trained with.
        head_layers: the exits that have an output head of their own; at the others the target's serves.
        hidden_size, vocab_size: of these heads.
        sampling: how guesses are drawn, if not as the session draws.
    """

    inside_target = True

    def __init__(
        self,
        exit_layer: int,
        *,
        head_layers: Sequence[int] = (),
        hidden_size: int | None = None,
        vocab_size: int | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(sampling=sampling)
        self.exit_layer = require_int("exit_layer", exit_layer, 1)
        self.heads = nn.ModuleDict()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        for layer in head_layers:
            require_int("head_layers", layer, 1)
            size, rows = require_int("hidden_size", hidden_size, 1), require_int("vocab_size", vocab_size, 1)
            self.heads[str(layer)] = ExitHead(size, rows)

    @property
    def head(self) -> ExitHead | None:
        """The exit's own output head; None where the target's serves."""
        head = self.heads[str(self.exit_layer)] if str(self.exit_layer) in self.heads else None
        assert head is None or isinstance(head, ExitHead)
        return head

    def check_target(self, target: LanguageModel) -> None:
        target.check_exit(self.exit_layer)
        sizes = ("tokens", self.vocab_size, target.vocab_size), ("hidden units", self.hidden_size, target.hidden_size)
        for what, own, others in sizes:
            if self.heads and own != others:
                raise ValueError(
                    f"the exit's heads are for {own} {what}, the target has {others}: "
                    "use the target that they were trained with"
                )

    def at(self, exit_layer: int) -> EarlyExitDrafter:
        """The same drafter with another exit; the heads are shared."""
        other = EarlyExitDrafter(exit_layer, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        other.sampling, other.heads = self.sampling, self.heads
        return other

    def arguments(self) -> dict[str, Any]:
        refuse_sampling(self.sampling)
        plain: dict[str, Any] = {"exit_layer": self.exit_layer}
        if self.heads:
            plain |= {"head_layers": [int(layer) for layer in self.heads]}
            plain |= {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        return plain

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> ExitState:
        assert host is not None, "an early exit drafts inside its target, so a session must say which that is"
        return ExitState(ExitModel(host.model, self.exit_layer, self.head), host.state)

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, ExitState)
        lower, num_guesses = state.begin(), max(windows)
        unread = [text[length:] for text, length in zip(context.texts, lower.consumed, strict=True)]
        tokens, valid_lengths = context.tail[:, 1:], None
        if any(len(each) != 1 for each in unread):
            tokens, valid_lengths = pad(unread, context.tail.device)
        guesses, probs, logits = self.roll(state.model, lower, tokens, valid_lengths, num_guesses, context, sampling)
        even = min(windows) == num_guesses
        lengths = None if even else torch.tensor(windows, device=guesses.device)
        exit_states = lower.exit_states(self.exit_layer)
        return Draft(guesses, lengths, probs, logits, num_calls=num_guesses, exit_states=exit_states)
