"""The interface of a drafter, its state, and what a session passes to it.

Shapes: B rows, K draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_specdec.config.settings import NoSettings, show_settings
from lightning_specdec.config.settings import Settings as BaseSettings
from lightning_specdec.models import DecodeState, LanguageModel, ModelOutput
from lightning_specdec.models.graphs import Outputs
from lightning_specdec.rules import Draft, Sampling

if TYPE_CHECKING:
    from jaxtyping import Float, Int

D = TypeVar("D", bound="Drafter")  # not `Self`: the tests' shape checker refuses it
Method = TypeVar("Method", bound=Callable[..., Any])


class RoundInputs:
    """Integers of each row for recorded calls: columns of one tensor that stays in place.

    Attributes:
        last_two_tokens: the last two tokens of each text, as in `DraftRequest.last_two_tokens`.
        last_positions: position of each text's last token, which is the number of tokens before
            it.
        num_generated: new tokens of each row so far.
        num_added: new tokens of each row's last round, at least 1.
        num_draft_tokens: draft tokens requested of each row.
        draft_limits: position from which on a row needs no draft token; 0 for rows that have
            ended.
    """

    NUM_COLUMNS = 7

    def __init__(self, values: Int[Tensor, "B 7"]) -> None:
        self.values = values
        self.last_two_tokens = values[:, 0:2]
        self.last_positions = values[:, 2]
        self.num_generated = values[:, 3]
        self.num_added = values[:, 4]
        self.num_draft_tokens = values[:, 5]
        self.draft_limits = values[:, 6]


class DraftCalls:
    """Runs a drafter's calls directly. A session on a GPU passes one that records them.

    Attributes:
        inputs: the round's integers on the device; None if calls are not recorded.
        num_draft_tokens: draft tokens that a recorded call computes for every row, no fewer than
            any row requests.
    """

    inputs: RoundInputs | None = None
    num_draft_tokens: int = 0

    def run(self, key: Hashable, call: Callable[..., Outputs], *tensors: Tensor | None) -> Outputs:
        """Return `call(*tensors)`.

        Args:
            key: names the call. Two calls of one key must compute the same function of their
                tensors.
            call: a function of its tensors only. The host must not read them, and the next call
                with this key overwrites the outputs.
        """
        return call(*tensors)

    def draft_lengths(
        self,
        requested: Sequence[int],
        num_drafted: int,
        device: torch.device,
    ) -> Int[Tensor, "B"] | None:
        """`Draft.lengths` if `requested` of the `num_drafted` tokens of each row count."""
        if min(requested) >= num_drafted:
            return None
        return torch.tensor(requested, device=device)


@dataclass
class DraftRequest:
    """What a session passes to `Drafter.propose` at the beginning of a round.

    Args:
        texts: every row's tokens so far, prompt included, on the host. Finished rows have a text
            too.
        last_two_tokens: of every row, on the device. A text of one token repeats it.
        uniform: numbers in [0, 1) to draw the K draft tokens with; None if nothing is drawn at
            random.
        wants_logits: whether the rule needs `Draft.logits`.
        vocab_size: size V of the target's output, which `Draft.probs` and `Draft.logits` must
            have; None for the draft's own.
        committed: number of committed tokens in each text; None for all. The others are draft
            tokens of another drafter, which `truncate_row` may remove later.
        calls: runs the drafter's calls, and records them if the session does.
        prompt_lengths: tokens of each text that were not generated; None if that is not known. A
            text that is shorter is a part of its prompt: no draft token is requested of its row,
            and the rest follows in later rounds.
        may_use_other_texts: whether the draft may depend on the texts of other requests. Under
            some rules the output depends on the draft, and a row must not depend on other rows.
        fallback_windows: for a drafter with a fallback, how many draft tokens it requests of the
            fallback for each row without a match; None for as many as of the lookup.
    """

    texts: Sequence[Sequence[int]]
    last_two_tokens: Int[Tensor, "B 2"]
    uniform: Float[Tensor, "B K"] | None
    wants_logits: bool = False
    vocab_size: int | None = None
    committed: Sequence[int] | None = None
    calls: DraftCalls = DraftCalls()  # noqa: RUF009
    prompt_lengths: Sequence[int] | None = None
    may_use_other_texts: bool = False
    fallback_windows: Sequence[int] | None = None


def last_two_tokens_of(texts: Sequence[Sequence[int]], device: torch.device) -> Int[Tensor, "B 2"]:
    """The last two tokens of every text, a single one repeated."""
    return torch.tensor([tail_of(text) for text in texts], device=device)


def tail_of(text: Sequence[int]) -> list[int]:
    """The last two tokens of a text; a single one repeated."""
    if len(text) > 1:
        return list(text[-2:])
    return [text[0], text[0]]


@dataclass
class TargetContext:
    """The target that a session decodes and its state.

    Only the session changes the state's lengths.
    """

    model: LanguageModel
    state: DecodeState


class DraftState:
    """What a drafter remembers of a batch: by default one value for each row in `rows`."""

    drafted_at: list[int] | None = None
    """Text lengths at the last `propose`, while its draft tokens wait for `observe`; None
    otherwise.
    """

    def __init__(self, batch_size: int = 0, new_row: Callable[[], Any] = lambda: None) -> None:
        self.new_row = new_row
        self.rows: list[Any] = [new_row() for _ in range(batch_size)]

    def select(self, rows: Sequence[int]) -> None:
        """Change the batch: row i is the former row `rows[i]` (each named once), or empty where
        that is -1.
        """
        self.rows = [self.new_row() if row < 0 else self.rows[row] for row in rows]

    def clear(self, rows: Sequence[int]) -> None:
        """Empty these rows for the next prompt."""
        for row in rows:
            self.rows[row] = self.new_row()

    def truncate_row(self, row: int, length: int) -> None:
        """Truncate a row to the first `length` tokens of its text, which continues with other
        tokens than drafted.

        The default clears the row, which is always correct. A session may call it between
        `propose` and `observe`, if the target read the draft tokens of another drafter.
        """
        self.clear([row])

    def truncate(self, lengths: Sequence[int]) -> None:
        """Call `truncate_row` for every row."""
        for row, length in enumerate(lengths):
            self.truncate_row(row, length)

    def commit(self, num_accepted: Sequence[int] | None = None) -> None:
        """Forget the draft tokens that were not accepted; all of them when None."""
        if self.drafted_at is None:
            return
        lengths = self.drafted_at
        if num_accepted is not None:
            lengths = []
            for text_length, count in zip(self.drafted_at, num_accepted, strict=True):
                lengths.append(text_length + count)
        self.truncate(lengths)
        self.drafted_at = None

    def resume(self, row: int, length: int) -> None:
        """Truncate a row to `length` tokens, with which the prompt of the next turn begins."""
        self.truncate_row(row, length)

    @property
    def inner(self) -> DraftState:
        """The state of the drafter that may read the target's hidden states: this one by default,
        and one inside it if it consists of several.
        """
        return self

    def take_over(self, previous: DraftState) -> bool:
        """Continue the texts of another drafter's state, whose target has read them. The state is
        new, and its drafter is inside the target.

        Returns:
            Whether it knows what it needs of these texts. If not, as by default, the target reads
            them again.
        """
        return False

    def save_row(self, row: int, length: int) -> Any:
        """A copy of what a row remembers of its first `length` tokens, for `load_row`.

        None, as by default, if the drafter needs no copy: it reads the text again.
        """
        return None

    def load_row(self, row: int, copy: Any, length: int) -> None:
        """Continue an empty row from the first `length` tokens of a copy that is not None."""
        raise NotImplementedError(f"{type(self).__name__} makes no copies")


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

    def truncate_row(self, row: int, length: int) -> None:
        for state in self.states:
            state.truncate_row(row, length)

    def truncate(self, lengths: Sequence[int]) -> None:
        for state in self.states:
            state.truncate(lengths)

    def resume(self, row: int, length: int) -> None:
        for state in self.states:
            state.resume(row, length)

    def save_row(self, row: int, length: int) -> list[Any]:
        return [state.save_row(row, length) for state in self.states]

    def load_row(self, row: int, copy: list[Any], length: int) -> None:
        for state, state_copy in zip(self.states, copy, strict=True):
            if state_copy is not None:
                state.load_row(row, state_copy, length)


def pipelined(method: Method) -> Method:
    """Declare that a `propose` or `observe` permits rounds before the last one is read.

    Such a `propose` runs nothing on the device but `DraftRequest.calls.run`, and such an `observe`
    runs nothing there. The declaration belongs to the method: a subclass that overrides it is not
    pipelined unless it declares its own.
    """
    method.pipelined = True  # type: ignore[attr-defined]
    return method


def is_pipelined(drafter: Drafter) -> bool:
    """Whether both methods that a session calls in each round are declared `pipelined`."""
    methods = (drafter.propose, drafter.observe)
    return all(getattr(method, "pipelined", False) for method in methods)


class Drafter(nn.Module, ABC):
    """Proposes draft tokens cheaply. Derive from it for a drafter that is named by its import
    path.

    A subclass declares its `Settings` and implements `propose`. It holds networks and settings
    only. What it remembers of a text is in a state that it gets as an argument, so one drafter
    serves any number of sessions.

    Attributes:
        Settings: settings class; the constructor takes its fields, by position or name, and stores
            them in `settings`.
        gives_logits: whether `propose` can return logits, which some rules need.
        from_file: whether it is trained, so that it is loaded from a file and not made from
            settings.
        inside_target: whether it reads the target's state or hidden states. It then always sees
            whole texts.
        takes_model: whether the constructor's first argument is a draft model.
        free: the setting that may change once there are weights, see `at`.
    """

    Settings: ClassVar[type[BaseSettings]] = NoSettings
    settings: Any
    gives_logits: ClassVar[bool] = False
    from_file: ClassVar[bool] = False
    inside_target: bool = False
    takes_model: ClassVar[bool] = False
    free: ClassVar[str | None] = None

    def __init__(self, *values: Any, **settings: Any) -> None:
        super().__init__()
        self.settings = self.Settings.arguments(values, settings, owner=type(self).__name__)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        show_settings(cls)

    def at(self: D, value: Any) -> D:
        """The same drafter with another value of its `free` setting; the weights are shared."""
        drafter = copy(self)
        drafter.settings = self.settings.changed(**{str(self.free): value})
        return drafter

    @classmethod
    def for_target(cls, target: LanguageModel, draft: Any = None, **settings: Any) -> Drafter:
        """Make a drafter for this target.

        Args:
            draft: the draft model, if `takes_model`.
            settings: fields of `Settings`.

        Raises:
            ValueError: a draft model is missing or not taken, a setting is wrong, it cannot draft
                for this target, or `from_file`.
        """
        if cls.from_file:
            raise ValueError(
                f"{cls.__name__} is made from a draft file or checkpoint, not from a model: "
                "give one"
            )
        if cls.takes_model:
            if not isinstance(draft, LanguageModel):
                raise ValueError(f"{cls.__name__} needs a draft model, got {_type_of(draft)}")
            drafter = cls(draft, **settings)
        else:
            if draft is not None:
                raise ValueError(f"{cls.__name__} takes no draft model, got {_type_of(draft)}")
            drafter = cls(**settings)
        drafter.check_target(target)
        return drafter

    def fresh(self: D) -> D:
        """The same drafter without what it remembers of earlier requests; itself by default.

        Measurements use it, so that no run drafts with the answers of another one.
        """
        return self

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments as plain values and models; a checkpoint stores them to
        rebuild the drafter.
        """
        return self.settings.to_dict()

    @property
    def max_positions(self) -> int | None:
        """The shortest context length of its models, in tokens; None if there is no limit."""
        models = [module for module in self.modules() if isinstance(module, LanguageModel)]
        limits = [model.max_positions for model in models if model.max_positions is not None]
        return min(limits, default=None)

    @property
    def max_draft_tokens(self) -> int | None:
        """Most draft tokens that it can make in a round; None if there is no limit."""
        return None

    def check_target(self, target: LanguageModel) -> None:  # noqa: B027
        """Raise ValueError if this drafter cannot draft for that target."""

    def features(self, target: LanguageModel) -> Sequence[int]:
        """Numbers of the layers of which `observe` gets hidden states in `output.features`."""
        return ()

    def init_state(
        self,
        batch_size: int,
        max_length: int,
        context: TargetContext | None = None,
    ) -> DraftState:
        """Make an empty state for `batch_size` rows.

        Args:
            max_length: most tokens of a row's text and draft tokens together.
            context: the target and its state, which every session passes.
        """
        return DraftState(batch_size)

    @abstractmethod
    def propose(
        self,
        state: DraftState,
        request: DraftRequest,
        windows: Sequence[int],
        sampling: Sampling,
    ) -> Draft:
        """Return up to `windows[b]` draft tokens for each row b. `sampling` is the session's.

        It is not called in a round whose windows are all 0. Tokens drawn at random must be drawn
        by `request.uniform` from exactly the `probs` that the draft reports.
        """

    @pipelined
    def observe(self, state: DraftState, output: ModelOutput, num_accepted: Sequence[int]) -> None:  # noqa: B027
        """Learn from a round: the target's output, and how many draft tokens were accepted.

        Learn only from positions 0 to `num_accepted[b]` of `output.logits` `[B, K + 1, V]`. The
        random numbers of later positions are used again, so remembering tokens drawn with them
        would bias the output.
        """

    def needs_noise(self, sampling: Sampling) -> bool:
        """Whether it draws at random under this sampling, so that `request.uniform` is needed."""
        return not sampling.greedy

    def fused(self, target: LanguageModel | None = None) -> Drafter:
        """The same drafter in its fastest form for this target, for inference only; itself if
        there is no other.
        """
        return self


def _type_of(draft: Any) -> str:
    if draft is None:
        return "none: name one with --draft (draft=)"
    return type(draft).__name__
