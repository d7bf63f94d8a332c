"""How the calls of a round run: directly, which is here, or as recorded calls (`recorded.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.decoding.requests import Request
from lightning_specdec.decoding.timing import PhaseTimer
from lightning_specdec.decoding.windows import Plan
from lightning_specdec.drafters import Draft, DraftState
from lightning_specdec.drafters.base import DraftCalls, last_two_tokens_of
from lightning_specdec.models.graphs import Outputs

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Executor(DraftCalls, ABC):
    """Runs the calls of a batch and reads their outcome.

    A round of a session is `begin_round`, its calls with a `lap` after each phase, `read`, and
    `finish_round`. `make_executor` chooses between `PlainExecutor` and `RecordedExecutor` when a
    batch is made.

    Args:
        timer: measures the phases.
        device: where the calls run.

    Attributes:
        is_recorded: whether calls are recorded.
        has_pipelined_round: whether the device runs the next round already. The rows of the batch
            must not move then.
        last_positions: the position of each text's last token, if it is on the device already.
    """

    is_recorded = False
    has_pipelined_round = False
    last_positions: Int[Tensor, "B"] | None = None

    def __init__(self, timer: PhaseTimer, device: torch.device) -> None:
        self.timer = timer
        self.device = device

    @abstractmethod
    def begin_round(
        self,
        rows: Sequence[Request],
        plan: Plan,
        draft_state: DraftState,
    ) -> tuple[list[int], int]:
        """Begin a round.

        Args:
            rows: the row of each slot.
            plan: chooses the number of draft tokens.
            draft_state: cleared if the last round was interrupted and may have changed what the
                drafter had to observe.

        Returns:
            The number of draft tokens that each row requests, and the number that is drafted for
            every row.
        """

    @abstractmethod
    def last_two_tokens(self, rows: Sequence[Request]) -> Int[Tensor, "B 2"]:
        """The last two tokens of each text, as `last_two_tokens_of` returns them."""

    @abstractmethod
    def next_noise(
        self,
        noise: Float[Tensor, "B S 3"],
        rows: Sequence[Request],
        num_positions: int,
    ) -> Float[Tensor, "B N 3"]:
        """The uniform numbers of each row's next N tokens."""

    @abstractmethod
    def join(
        self,
        unread: Int[Tensor, "B 1"],
        draft_tokens: Int[Tensor, "B K"],
    ) -> Int[Tensor, "B K1"]:
        """The last token of each text and its draft tokens side by side."""

    @abstractmethod
    def run_into(
        self,
        name: str,
        key: Hashable,
        call: Callable[..., Outputs],
        *tensors: Tensor | None,
    ) -> Outputs:
        """As `run`; a recorded call writes its first output, `[B]` tokens, to a named buffer."""

    @abstractmethod
    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros or former values; recorded calls always find it in the same place."""

    @abstractmethod
    def begin_read(self, values: Tensor) -> Callable[[], list[Any]]:
        """Begin to copy values to the host; the returned function waits for them."""

    @abstractmethod
    def read(self, outcome: Tensor, draft: Draft) -> list[Any]:
        """Read the outcome of a round: the only time that the host waits for the device."""

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to this phase."""
        self.timer.lap(phase)

    def finish_round(self) -> None:  # noqa: B027
        """End a round that the drafter has observed."""

    def not_pipelined(self) -> AbstractContextManager[None]:
        """Within this context a round does not launch the next one."""
        return nullcontext()

    def forget_batch(self) -> None:  # noqa: B027
        """The batch has another size now."""


class PlainExecutor(Executor):
    """Runs every call directly."""

    def begin_round(
        self,
        rows: Sequence[Request],
        plan: Plan,
        draft_state: DraftState,
    ) -> tuple[list[int], int]:
        windows = plan.windows(rows)
        return windows, max(windows)

    def last_two_tokens(self, rows: Sequence[Request]) -> Int[Tensor, "B 2"]:
        return last_two_tokens_of([row.visible_text for row in rows], self.device)

    def next_noise(
        self,
        noise: Float[Tensor, "B S 3"],
        rows: Sequence[Request],
        num_positions: int,
    ) -> Float[Tensor, "B N 3"]:
        num_generated = [row.num_new for row in rows]
        start = min(num_generated)
        all_rows_are_even = start == max(num_generated)
        if all_rows_are_even:
            return noise[:, start : start + num_positions]
        starts = torch.tensor(num_generated, device=self.device)
        return gather_noise(noise, starts, num_positions)

    def join(
        self,
        unread: Int[Tensor, "B 1"],
        draft_tokens: Int[Tensor, "B K"],
    ) -> Int[Tensor, "B K1"]:
        if not draft_tokens.shape[1]:
            return unread
        return torch.cat((unread, draft_tokens), dim=1)

    def run_into(
        self,
        name: str,
        key: Hashable,
        call: Callable[..., Outputs],
        *tensors: Tensor | None,
    ) -> Outputs:
        return call(*tensors)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def begin_read(self, values: Tensor) -> Callable[[], list[Any]]:
        return values.tolist

    def read(self, outcome: Tensor, draft: Draft) -> list[Any]:
        values: list[Any] = outcome.tolist()
        return values


def gather_noise(
    noise: Float[Tensor, "B S 3"],
    starts: Int[Tensor, "B"],
    num_positions: int,
) -> Float[Tensor, "B N 3"]:
    """The uniform numbers of N positions from `starts` on; the last one is repeated."""
    _, num_slots, num_purposes = noise.shape
    offsets = torch.arange(num_positions, device=noise.device)
    positions = starts[:, None] + offsets
    positions = positions.clamp(max=num_slots - 1)
    index = positions[..., None].expand(-1, -1, num_purposes)
    return noise.gather(1, index)
