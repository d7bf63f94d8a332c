"""The target's own first layers as the draft.

Theory: a transformer often knows the next token before its last layer, above all one that was trained to (LayerSkip,
Elhoushi et al. 2024). Its first layers with an output head are then a draft that needs no memory of its own: their keys
and values are the target's, and what they made of a token need not be made again when it is verified. So per round the
lower layers read each token once, the upper layers each tested token once. The last guess, which nobody fed to the
draft, passes the lower layers during verification.

Shapes: B rows, N places, D hidden size, W tokens that a head scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_specdec.checks import require_int
from lightning_specdec.drafters.base import Context, DraftState, Host
from lightning_specdec.drafters.draft_vocabulary import DraftVocabulary
from lightning_specdec.drafters.exit_model import ExitModel, LowerState
from lightning_specdec.drafters.heads import Block
from lightning_specdec.drafters.layout import pad
from lightning_specdec.drafters.model import RollingDrafter, draft_lengths, refuse_sampling
from lightning_specdec.models import DecodeState, ExitStates, KVState, LanguageModel
from lightning_specdec.models.packed import PackedLinear, pack_linears
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float


class ExitState(DraftState):
    """What an `EarlyExitDrafter` remembers between rounds: nothing, for its memory is the target's.

    Args:
        model: the lower layers.
        whole: the target's state.
    """

    def __init__(self, model: ExitModel, whole: DecodeState) -> None:
        self.model, self.whole = model, whole

    def begin(self) -> LowerState:
        """A round's state of the lower half, where the target is."""
        return LowerState(self.whole)

    def select(self, rows: Sequence[int]) -> None:
        pass

    def clear(self, rows: Sequence[int]) -> None:
        pass


class ExitHead(nn.Module):
    """An output head of an exit's own: blocks, a norm and a linear layer.

    Theory: a layer in the middle says what the layers above it want to read. Blocks turn that towards what an output
    head reads, where the layer itself stays as it is; they begin as if they were not there.

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
        logits: Tensor = self.output(self.norm(self.blocks(hidden.to(self.norm.weight.dtype))))
        return logits


class EarlyExitDrafter(RollingDrafter):
    """Guesses with the target's first layers; keys, values and what they made of each token go to the verification.

    Source: Elhoushi et al. 2024, "LayerSkip", section 4.3 (self-speculative decoding with shared cache and exit query).

    Args:
        exit_layer: how many of the target's layers guess; any number of them, whatever exits it was trained with.
        head_layers: the exits that have an output head of their own; at the others the target's serves.
        hidden_size, vocab_size: of the target that these heads are for.
        num_blocks: residual blocks of each of them.
        draft_vocabulary: the tokens that they can say, ascending; or how many, to be chosen before they are trained;
            all of them when None.
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
        num_blocks: int = 0,
        draft_vocabulary: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(sampling=sampling)
        self.exit_layer = require_int("exit_layer", exit_layer, 1)
        self.heads = nn.ModuleDict()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_blocks = require_int("num_blocks", num_blocks, 0, 16)
        self.draft_vocabulary: DraftVocabulary | None = None
        if not head_layers and (num_blocks or draft_vocabulary is not None):
            raise ValueError(
                "num_blocks and draft_vocabulary are of an exit's own output head, and there is none: name its layer "
                "in head_layers, or leave them out"
            )
        if draft_vocabulary is not None:
            self.draft_vocabulary = DraftVocabulary(draft_vocabulary, require_int("vocab_size", vocab_size, 2))
        for layer in head_layers:
            require_int("head_layers", layer, 1)
            size, rows = require_int("hidden_size", hidden_size, 1), require_int("vocab_size", vocab_size, 1)
            num_tokens = rows if self.draft_vocabulary is None else len(self.draft_vocabulary)
            self.heads[str(layer)] = ExitHead(size, num_tokens, num_blocks)

    @property
    def head(self) -> ExitHead | None:
        """The exit's own output head; None where the target's serves."""
        return self.head_of(self.exit_layer)

    def head_of(self, exit_layer: int) -> ExitHead | None:
        """Another exit's own output head; None where the target's serves."""
        head = self.heads[str(exit_layer)] if str(exit_layer) in self.heads else None
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
        other.num_blocks, other.draft_vocabulary = self.num_blocks, self.draft_vocabulary
        return other

    def fused(self) -> EarlyExitDrafter:
        linears = [layer for layer in self.heads.modules() if isinstance(layer, nn.Linear | PackedLinear)]
        if not linears or isinstance(linears[0], PackedLinear) or linears[0].weight.device.type != "cpu":
            return self
        other = deepcopy(self)
        pack_linears(other.heads)
        return other.eval()

    def exit_model(self, target: LanguageModel) -> ExitModel:
        """The language model that guesses, over the target's own state."""
        return ExitModel(target, self.exit_layer, self.head, None if self.head is None else self.draft_vocabulary)

    def arguments(self) -> dict[str, Any]:
        refuse_sampling(self.sampling)
        plain: dict[str, Any] = {"exit_layer": self.exit_layer}
        if self.heads:
            plain |= {"head_layers": [int(layer) for layer in self.heads]}
            plain |= {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        if self.num_blocks:
            plain["num_blocks"] = self.num_blocks
        if self.draft_vocabulary is not None:
            plain["draft_vocabulary"] = self.draft_vocabulary.arguments()
        return plain

    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> ExitState:
        assert host is not None, "an early exit drafts inside its target, so a session must say which that is"
        return ExitState(self.exit_model(host.model), host.state)

    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        assert isinstance(state, ExitState)
        lower, num_guesses = state.begin(), max(windows)
        unread = [text[length:] for text, length in zip(context.texts, lower.consumed, strict=True)]
        tokens, valid_lengths = context.tail[:, 1:], None
        if any(len(each) != 1 for each in unread):
            tokens, valid_lengths = pad(unread, context.tail.device)
        target, whole = state.model.target, state.whole
        if valid_lengths is None and self.records(target, whole, tokens, 1, context, sampling):
            assert isinstance(whole, KVState) and context.device is not None
            num_guesses = context.device.width
            model, storage, span = state.model, whole.storage, whole.recorded_span(num_guesses + 1)

            def score(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
                hidden = target.read_at(storage, span, tokens, starts, self.exit_layer)
                return model.logits(hidden[:, -1:])[:, -1], hidden

            starts = context.device.starts
            guesses, probs, logits, made = self.recorded_roll(
                score, tokens, starts, num_guesses, context, sampling, (id(storage), span)
            )
            assert made is not None
            exit_states = ExitStates(self.exit_layer, made, [num_guesses] * len(guesses))
        else:
            guesses, probs, logits = self.roll(
                state.model, lower, tokens, valid_lengths, num_guesses, context, sampling
            )
            exit_states = lower.exit_states(self.exit_layer)
        lengths = draft_lengths(windows, num_guesses, context)
        return Draft(guesses, lengths, probs, logits, num_calls=num_guesses, exit_states=exit_states)
