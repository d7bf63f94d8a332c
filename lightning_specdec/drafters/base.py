"""The interface of a drafter, its state, and what a session passes to it.

Shapes: B rows, K draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import NoSettings
from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import GraphCache
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

D = TypeVar("D", bound="Drafter")  # not `Self`: the tests' shape checker refuses it


@dataclass
class DraftRequest:
    """What a session passes to `Drafter.propose` at the beginning of a round.

    Args:
        texts: every row's tokens so far, prompt included, on the host. Finished rows have a text too.
        tail: the last two tokens of every row, on the device; a one-token text repeats its token.
        uniform: numbers in [0, 1) to draw the K draft tokens with; None if nothing is drawn at random.
        wants_logits: whether the rule needs `Draft.logits`.
        vocab_size: size V of the target's output, which `Draft.probs` and `Draft.logits` must have; None for the
            draft's own.
        settled: number of final tokens in each text; None for all. The rest are draft tokens of another drafter, which
            `go_back` may take back later.
        device: the round's numbers on the device; None if calls are not recorded.
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
    """The target that a session decodes and its state. Only the session changes the state's lengths."""

    model: LanguageModel
    state: DecodeState


class DraftState:
    """What a drafter remembers of a batch of rows: by default `rows`, one value per row, made by `new_row()`."""

    drafted_at: list[int] | None = None
    """Text lengths at the last `propose`, while its draft tokens wait for `observe`; None otherwise."""

    def __init__(self, batch_size: int = 0, new_row: Callable[[], Any] = lambda: None) -> None:
        self.new_row = new_row
        self.rows: list[Any] = [new_row() for _ in range(batch_size)]

    def select(self, rows: Sequence[int]) -> None:
        """Change the batch: row i is the former row `rows[i]` (each named once), or empty where that is -1."""
        self.rows = [self.new_row() if row < 0 else self.rows[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows for the next prompt."""
        for row in rows:
            self.rows[row] = self.new_row()

    def go_back(self, row: int, length: int) -> None:
        """Forget all after the first `length` tokens of a row's text, which continues with other tokens than drafted.

        The default forgets the whole row, which is always correct. A session may call it between `propose` and
        `observe`, if the target read the draft tokens of another drafter.
        """
        self.clear([row])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Call `go_back` for every row."""
        for row, length in enumerate(lengths):
            self.go_back(row, length)

    def settle(self, num_accepted: Sequence[int] | None = None) -> None:
        """Forget the draft tokens that were not accepted; all of them when None."""
        if self.drafted_at is not None:
            counts = num_accepted or [0] * len(self.drafted_at)
            self.truncate(
                [length + count for length, count in zip(self.drafted_at, counts, strict=True)]
            )
            self.drafted_at = None

    def resume(self, row: int, length: int) -> None:
        """Prepare a row for a new prompt that begins with the first `length` tokens of its text: forget the rest."""
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
    """Proposes draft tokens cheaply. Derive from it for a drafter that is named by its import path.

    A subclass declares its `Settings` and implements `propose`. It holds networks and settings only. What it remembers
    of a text is in a state that it gets as an argument, so one drafter serves any number of sessions.

    Attributes:
        Settings: settings class; the constructor takes its fields, by position or name, and keeps them in `settings`.
        gives_logits: whether `propose` can return logits, which some rules need.
        from_file: whether it is trained, so that it is loaded from a file and not made from settings.
        inside_target: whether it reads the target's state or hidden states. It then always sees whole texts.
        takes_model: whether the constructor's first argument is a draft model.
        free: the setting that may change once there are weights, see `at`.
        runs_ahead: whether recorded calls are all of its `propose`, and its `observe` computes nothing: a session may
            then launch a round before the one before is observed. A subclass with its own methods has to say so anew.
    """

    Settings: ClassVar[type[BaseSettings]] = NoSettings
    settings: Any
    gives_logits: ClassVar[bool] = False
    from_file: ClassVar[bool] = False
    inside_target: bool = False
    takes_model: ClassVar[bool] = False
    free: ClassVar[str | None] = None
    runs_ahead: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        said: Any = next(base for base in cls.__mro__ if "runs_ahead" in vars(base))
        if (cls.propose, cls.observe) != (
            said.propose,
            said.observe,
        ):  # of its own, or of another base
            cls.runs_ahead = False

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__()
        self.settings = self.Settings.arguments(*values, **settings)

    def at(self: D, value: Any) -> D:
        """The same drafter with another value of its `free` setting; the weights are shared."""
        other = copy(self)
        other.settings = self.settings.changed(**{str(self.free): value})
        return other

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """Make a drafter for this target.

        Args:
            draft: the draft model, if `takes_model`.
            settings: fields of `Settings`.

        Raises:
            ValueError: a draft model is missing or not taken, a setting is wrong, it cannot draft for this target, or
                `from_file`.
        """
        if cls.from_file:
            raise ValueError(
                f"{cls.__name__} is made from a draft file or checkpoint, not from a model: give one"
            )
        if not (isinstance(draft, LanguageModel) if cls.takes_model else draft is None):
            wants = "needs a" if cls.takes_model else "takes no"
            given = (
                "none: name one with --draft (draft=)" if draft is None else type(draft).__name__
            )
            raise ValueError(f"{cls.__name__} {wants} draft model, got {given}")
        drafter = cls(draft, **settings) if cls.takes_model else cls(**settings)
        drafter.check_target(target)
        return drafter

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values and models; a checkpoint stores them to rebuild the drafter."""
        return self.settings.to_dict()

    @property
    def max_positions(self) -> int | None:
        """The shortest context length of its models, in tokens; None if there is no limit."""
        limits = [
            model.max_positions for model in self.modules() if isinstance(model, LanguageModel)
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def max_draft_tokens(self) -> int | None:
        """Most draft tokens that it can make in a round; None if there is no limit."""
        return None

    def check_target(self, target: LanguageModel) -> None:  # noqa: B027
        """Raise ValueError if this drafter cannot draft for that target."""

    def features(self, target: LanguageModel) -> Sequence[int]:
        """Numbers of the target's layers whose hidden states `observe` gets in `output.features`."""
        return ()

    def init_state(
        self, batch_size: int, max_length: int, context: TargetContext | None = None
    ) -> DraftState:
        """Make an empty state for `batch_size` rows.

        Args:
            max_length: most tokens of a row's text and draft tokens together.
            context: the target and its state, which every session passes.
        """
        return DraftState(batch_size)

    @abstractmethod
    def propose(
        self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling
    ) -> Draft:
        """Return at most `windows[b]` draft tokens for each row b; fewer are allowed. `sampling` is the session's.

        It is not called in a round whose windows are all 0. Tokens drawn at random must be drawn by `request.uniform`
        from exactly the `probs` that the draft reports.
        """

    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:  # noqa: B027
        """Learn from a round: the target's output for its draft tokens, and how many of each row were accepted.

        Learn only from positions 0 to `num_accepted[b]` of `output.logits` `[B, K + 1, V]`. The random numbers of later
        positions are used again, so remembering tokens drawn with them would bias the output.
        """

    def needs_noise(self, sampling: Sampling) -> bool:
        """Whether it draws at random under this sampling, so that `request.uniform` is needed."""
        return not sampling.greedy

    def fused(self, target: LanguageModel | None = None) -> Drafter:
        """The same drafter in its fastest form for this target, for inference only; itself if there is no other."""
        return self
