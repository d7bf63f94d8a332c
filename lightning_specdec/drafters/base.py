"""What a drafter implements, and what it is told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import NoSettings
from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import GraphCache
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class DraftRequest:
    """What is known when a round begins.

    Args:
        texts: every row's tokens so far, prompt included, on the host. Rows that are not live have a text too.
        tail: the last two tokens of every row, on the device; a one-token text repeats its token.
        uniform: `[B, K]`, numbers in [0, 1) for drawing the K draft tokens; None where nothing is drawn at random.
        wants_logits: whether the rule compares the draft's logits.
        vocab_size: rows of the target's output, which draft tokens and their distributions are over; as many as the
            draft's own when None.
        settled: how many tokens of each text are final, all of them when None. The others are draft tokens, and
            `go_back` takes them back; a state that cannot go back so far has to read the text again.
        device: the round's numbers on the device; None where calls are not recorded.
    """

    texts: Sequence[Sequence[int]]
    tail: Int[Tensor, "B 2"]
    uniform: Float[Tensor, "B K"] | None
    wants_logits: bool = False
    vocab_size: int | None = None
    settled: Sequence[int] | None = None
    device: DeviceRound | None = None


@dataclass
class DeviceRound:
    """A round's numbers in tensors that stay where they are, for recorded calls.

    Args:
        graphs: the target's recorded calls.
        starts: the length of each text, less its last token.
        num_added: new tokens of each row's last round; 1 at least.
        wanted: draft tokens wanted of each row.
        windows: the same on the device.
        width: draft tokens that a recorded call makes, at least as many as any row wants.
    """

    graphs: GraphCache
    starts: Int[Tensor, "B"]
    num_added: Int[Tensor, "B"]
    wanted: Sequence[int]
    windows: Int[Tensor, "B"]
    width: int


def last_two(texts: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "B 2"]:
    """The `tail` of a request: every text's last two tokens, a single one repeated."""
    return torch.tensor([tail_of(text) for text in texts], device=device)


def tail_of(text: Sequence[int]) -> list[int]:
    """A text's last two tokens; a single one repeated."""
    return [*text[-2:]] if len(text) > 1 else [*text, *text]


@dataclass
class TargetContext:
    """The target that a session decodes and its state, whose lengths only the session moves."""

    model: LanguageModel
    state: DecodeState


class DraftState:
    """What a drafter remembers of a batch of rows: by default one value per row, made by `new_row`."""

    drafted_at: list[int] | None = None
    """Lengths of the texts that were last drafted on, where draft tokens are remembered until some are kept."""

    def __init__(self, batch_size: int = 0, new_row: Callable[[], Any] = lambda: None) -> None:
        self.new_row = new_row
        self.rows: list[Any] = [new_row() for _ in range(batch_size)]

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes the former row `rows[i]`, each of which is named once, or an empty one where that is -1."""
        self.rows = [self.new_row() if row < 0 else self.rows[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows for the next request."""
        for row in rows:
            self.rows[row] = self.new_row()

    def go_back(self, row: int, length: int) -> None:
        """A row goes on after `length` tokens of its text with others than were drafted: forget all behind them.

        Forgetting the whole row is always right. It may come between `propose` and `observe`, where other draft tokens
        than the drafter's own went to the target.
        """
        self.clear([row])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Every row goes on after so many tokens."""
        for row, length in enumerate(lengths):
            self.go_back(row, length)

    def settle(self, num_accepted: Sequence[int] | None = None) -> None:
        """Forget the draft tokens that were not kept, all when None."""
        if self.drafted_at is not None:
            counts = num_accepted or [0] * len(self.drafted_at)
            self.truncate([length + count for length, count in zip(self.drafted_at, counts, strict=True)])
            self.drafted_at = None

    def resume(self, row: int, length: int) -> None:
        """Another prompt follows in a row, which begins with `length` tokens of its text: forget all behind them."""
        self.go_back(row, length)


class JointState(DraftState):
    """The states of several drafters, whose rows move together."""

    def __init__(self, *states: DraftState) -> None:
        self.states = states

    def select(self, rows: Sequence[int]) -> None:
        for state in self.states:
            state.select(rows)

    def clear(self, rows: Sequence[int]) -> None:
        for state in self.states:
            state.clear(rows)

    def go_back(self, row: int, length: int) -> None:
        for state in self.states:
            state.go_back(row, length)

    def truncate(self, lengths: Sequence[int]) -> None:
        for state in self.states:
            state.truncate(lengths)

    def resume(self, row: int, length: int) -> None:
        for state in self.states:
            state.resume(row, length)


class Drafter(nn.Module, ABC):
    """Proposes draft tokens cheaply. One file in `drafters/`, or a class of the user's own named by its import path.

    A subclass declares its `Settings` and implements `propose`. It holds networks and settings; what it remembers of a
    text is in the state that it is given, so one drafter serves any number of sessions.

    Attributes:
        Settings: fields, limits and help of what the constructor takes.
        gives_logits: whether `propose` can give its logits, which some rules compare with the target's.
        from_file: whether it is trained or put together beforehand, so that no settings make one.
        inside_target: whether it works on the target's own state; then it always sees whole texts.
        takes_model: whether it drafts with a draft model, the constructor's first argument.
    """

    Settings: ClassVar[type[BaseSettings]] = NoSettings
    settings: Any
    gives_logits: ClassVar[bool] = False
    from_file: ClassVar[bool] = False
    inside_target: bool = False
    takes_model: ClassVar[bool] = False

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__()
        self.settings = self.Settings.arguments(*values, **settings)

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """Build one for a pretrained target.

        Args:
            draft: the draft model, for kinds that take one.

        Raises:
            ValueError: it takes no draft model, a setting is wrong, or it cannot draft for this target.
        """
        if cls.from_file:
            raise ValueError(f"{cls.__name__} is made from a draft file or checkpoint, not from a model: give one")
        if not (isinstance(draft, LanguageModel) if cls.takes_model else draft is None):
            wants = "needs a" if cls.takes_model else "takes no"
            given = "none: name one with --draft (draft=)" if draft is None else type(draft).__name__
            raise ValueError(f"{cls.__name__} {wants} draft model, got {given}")
        drafter = cls(draft, **settings) if cls.takes_model else cls(**settings)
        drafter.check_target(target)
        return drafter

    def arguments(self) -> dict[str, Any]:
        """What a checkpoint rebuilds it from: plain values, and models under their own names."""
        return self.settings.to_dict()

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a text that its models were made for; None where there is no limit."""
        limits = [model.max_positions for model in self.modules() if isinstance(model, LanguageModel)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_draft_tokens(self) -> int | None:
        """Most tokens that it drafts in a round, however large the window; None where there is no limit."""
        return None

    def check_target(self, target: LanguageModel) -> None:  # noqa: B027
        """Raise ValueError if this drafter cannot draft for that target."""

    def features(self, target: LanguageModel) -> Sequence[int]:
        """The layers of the target whose hidden states `observe` wants."""
        return ()

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> DraftState:
        """An empty state for rows whose texts and draft tokens together reach at most `max_length` tokens.

        Args:
            context: the target and its state; given by every session.
        """
        return DraftState(batch_size)

    @abstractmethod
    def propose(self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        """Draft at most `windows[b]` tokens for each row b, and at least one where the window is not 0, if it can."""

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:  # noqa: B027
        """Learn from the target's output, and how many draft tokens of each row were kept.

        It must learn nothing from behind the first rejection: the uniform numbers of those positions are used again,
        so remembering what was drawn with them would bias the output.
        """

    def needs_noise(self, sampling: Sampling) -> bool:
        """Whether draft tokens are drawn at random under the session's sampling."""
        return not sampling.greedy

    def fused(self, target: LanguageModel | None = None) -> Drafter:
        """The same drafter in the form that decodes fastest, for this target; itself when there is no other."""
        return self
