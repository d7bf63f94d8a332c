"""What a way to guess must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import GraphCache
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class Context:
    """What is known when a round begins.

    Args:
        texts: every row's tokens so far, prompt included, on the host. Rows that are not live have a text too.
        tail: the last two tokens of every row, on the device; a one-token text repeats its token.
        uniform: `[B, K]`, numbers in [0, 1) for drawing the K guesses; None where nothing is drawn at random.
        wants_logits: whether the rule compares the draft's logits.
        vocab_size: rows of the target's output, which guesses and their distributions are over; as many as the draft's
            own when None.
        windows: guesses wanted of each row, which is all that logits processors are asked about; K of all when None.
        settled: how many tokens of each text will stay, all of them when None. The others are guesses themselves, and
            `go_back` takes them back; a state that cannot go back so far has to read the text again.
        device: what recorded calls need of the round, on the device; None where calls are not recorded.
    """

    texts: Sequence[Sequence[int]]
    tail: Int[Tensor, "B 2"]
    uniform: Float[Tensor, "B K"] | None
    wants_logits: bool = False
    vocab_size: int | None = None
    windows: Sequence[int] | None = None
    settled: Sequence[int] | None = None
    device: DeviceRound | None = None


@dataclass
class DeviceRound:
    """A round's numbers on the device, in tensors that stay, for calls that are recorded.

    Args:
        graphs: the target's recorded calls.
        starts: the length of each text, less its last token.
        num_added: new tokens of each row's last round; 1 at least.
        wanted: guesses wanted of each row.
        windows: the same on the device.
        width: guesses that a recorded call makes, at least as many as any row wants: few widths are few recordings.
    """

    graphs: GraphCache
    starts: Int[Tensor, "B"]
    num_added: Int[Tensor, "B"]
    wanted: Sequence[int]
    windows: Int[Tensor, "B"]
    width: int


def last_two(texts: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "B 2"]:
    """The `tail` of a context: every text's last two tokens, a single one repeated."""
    return torch.tensor([tail_of(text) for text in texts], device=device)


def tail_of(text: Sequence[int]) -> list[int]:
    """A text's last two tokens; a single one repeated."""
    return [*text[-2:]] if len(text) > 1 else [*text, *text]


@dataclass
class Host:
    """The target that a session decodes, and its state, for drafters that work inside it.

    Args:
        model: the target, as it decodes.
        state: its state; only the session moves its lengths.
    """

    model: LanguageModel
    state: DecodeState


class DraftState(ABC):
    """What a drafter remembers of a batch of rows: its own business, but for rows that move."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes the former row `rows[i]`, or an empty one where that is -1."""

    @abstractmethod
    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows for the next request."""

    def go_back(self, row: int, length: int) -> None:
        """A row goes on after so many tokens of its text with others than were guessed: forget all behind them.

        Whoever remembers nothing but settled text may ignore it; to forget the whole row is always right.
        It may come between `propose` and `observe`, where others' guesses than the drafter's own went to the target.
        """
        self.clear([row])

    def resume(self, row: int, length: int) -> None:
        """Another prompt follows in a row, which begins with so many tokens of its text: forget all behind them.

        What is guessed then should be what a first reading of that prompt would lead to.
        """
        self.go_back(row, length)


class Drafter(nn.Module, ABC):
    """A cheap way to guess the next tokens.

    Theory: the verdict makes the output right whatever is guessed, so a drafter is free to be wrong; it pays by how
    much cheaper than the target it is and by how often it agrees with it. A drafter holds its networks and settings;
    what it remembers of a text is in the state that it is handed, so one drafter serves any number of sessions.

    Attributes:
        gives_logits: whether `propose` can give its logits, which some rules compare with the target's.
        inside_target: whether it works on the target's own state. Then it sees whole texts, however long, since it
            reads nothing that the target would not read.
    """

    gives_logits: ClassVar[bool] = False
    inside_target: ClassVar[bool] = False

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a text that its models were made for; None where there is no limit."""
        limits = [model.max_positions for model in self.modules() if isinstance(model, LanguageModel)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_draft_tokens(self) -> int | None:
        """Most tokens that it guesses in a round, however large the window; None where there is no limit."""
        return None

    @abstractmethod
    def check_target(self, target: LanguageModel) -> None:
        """Raise ValueError if this drafter cannot guess for that target."""

    def features(self, target: LanguageModel) -> Sequence[int]:
        """The layers of the target whose hidden states `observe` wants."""
        return ()

    @abstractmethod
    def init_state(self, batch_size: int, max_length: int, host: Host | None = None) -> DraftState:
        """An empty state for rows whose texts and guesses together reach at most `max_length` tokens.

        Args:
            host: the target and its state; given by every session.
        """

    @abstractmethod
    def propose(self, state: DraftState, context: Context, windows: Sequence[int], sampling: Sampling) -> Draft:
        """Guess at most `windows[b]` tokens for each row b, and at least one where the window is not 0, if it can."""

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:  # noqa: B027
        """Learn what the target said, and how many guesses of each row were kept. Nothing to learn by default.

        What is learnt may depend on the settled text and on what the target said of it, and on nothing behind the first
        rejection: the uniform numbers of those positions are used again by the next round, so a drafter that
        remembered what it had drawn with them would bias the output.
        """

    def needs_noise(self, sampling: Sampling) -> bool:
        """Whether guesses are drawn at random under the session's sampling."""
        return not sampling.greedy

    def fused(self) -> Drafter:
        """The same drafter in the form that decodes fastest; itself when there is no other."""
        return self

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What a checkpoint rebuilds it from: plain values, and models under their own names."""


def check_states(target: LanguageModel, *, hidden_size: int, vocab_size: int) -> None:
    """Raise ValueError unless the target gives hidden states of this width, and has a vocabulary of this size."""
    if target.hidden_size is None or target.num_layers is None:
        name = type(target).__name__
        raise ValueError(f"{name} gives no hidden states, and this draft guesses from those: draft in another way")
    sizes = ("a hidden size", hidden_size, target.hidden_size), ("a vocabulary", vocab_size, target.vocab_size)
    for what, own, others in sizes:
        if own != others:
            raise ValueError(
                f"the draft is for {what} of {own}, the target has one of {others}: use the target that it was "
                "trained with"
            )
