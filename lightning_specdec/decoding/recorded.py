"""Recorded and pipelined rounds, for a GPU that would otherwise wait for the host.

Recorded: the calls of a round are CUDA graphs over tensors that stay in place. Their integers are
uploaded in one copy.

Pipelined: if the next round is the same calls, the device computes its inputs from this round's
outcome and begins it before the host reads the outcome. The host then processes one round while
the device runs the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_specdec.decoding.executor import Executor, PlainExecutor, gather_noise
from lightning_specdec.decoding.requests import Request, power_of_two
from lightning_specdec.decoding.timing import PhaseTimer
from lightning_specdec.decoding.windows import Plan, window_of
from lightning_specdec.drafters import Draft, Drafter, DraftState
from lightning_specdec.drafters.base import RoundInputs, is_pipelined, tail_of
from lightning_specdec.models import DecodeState
from lightning_specdec.models.graphs import GraphCache, Outputs, begin_read

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def make_executor(
    target_state: DecodeState,
    vocab_size: int,
    timer: PhaseTimer,
    drafter: Drafter | None = None,
) -> Executor:
    """The executor for a batch: a recorded one if the target records its calls.

    Args:
        vocab_size: the target's.
        drafter: the drafter of the session; None for standard decoding.
    """
    if target_state.graphs is None:
        return PlainExecutor(timer, target_state.device)
    pipelined = drafter is not None and is_pipelined(drafter)
    return RecordedExecutor(target_state, vocab_size, timer, pipelined=pipelined)


class RecordedExecutor(Executor):
    """Records calls in addition to the target's, and launches the next round early.

    Args:
        target_state: the state whose buffers recorded calls use. It changes its recordings when
            the batch changes size.
        vocab_size: the target's.
        timer: measures the phases.
        pipelined: whether the drafter permits a round to begin before the host reads the last one.
    """

    is_recorded = True

    def __init__(
        self,
        target_state: DecodeState,
        vocab_size: int,
        timer: PhaseTimer,
        *,
        pipelined: bool,
    ) -> None:
        super().__init__(timer, target_state.device)
        self.vocab_size = vocab_size
        self._target_state = target_state
        self._pipelined = pipelined
        self._host_inputs: Tensor | None = None
        # The current round.
        self._rows: Sequence[Request] = ()
        self._plan: Plan | None = None
        self._windows: list[int] = []
        self._is_finished = True
        # Draft tokens of the round that this one has launched, and of the launched round that
        # comes next.
        self._launched: int | None = None
        self._next_num_draft_tokens: int | None = None

    @property
    def graphs(self) -> GraphCache:
        """The recorded calls for the batch's present size."""
        graphs = self._target_state.graphs
        assert graphs is not None, "a state that records does so as long as it lives"
        return graphs

    @property
    def has_pipelined_round(self) -> bool:  # type: ignore[override]
        return self._next_num_draft_tokens is not None

    def begin_round(
        self,
        rows: Sequence[Request],
        plan: Plan,
        draft_state: DraftState,
    ) -> tuple[list[int], int]:
        is_running = self.has_pipelined_round
        if not is_running and not self._is_finished:
            # The last round was interrupted. A launched one may have overwritten what the drafter
            # had to observe.
            draft_state.clear(range(len(rows)))
        self._is_finished = False

        if is_running:
            assert self._next_num_draft_tokens is not None
            num_draft_tokens = self._next_num_draft_tokens
            windows = [window_of(row, num_draft_tokens) for row in rows]
        else:
            windows = plan.windows(rows)
            num_draft_tokens = max(windows)
            if num_draft_tokens and plan.shared_window:
                # The last rounds of a text request fewer tokens; they use the recordings of the
                # full window.
                num_draft_tokens = plan.shared_window
            self._upload(rows, windows)

        self._rows = rows
        self._plan = plan
        self._windows = windows
        self.num_draft_tokens = num_draft_tokens
        self._next_num_draft_tokens = None
        self._launched = None
        self.graphs.begin(repeated=is_running)
        return windows, num_draft_tokens

    def _upload(self, rows: Sequence[Request], windows: Sequence[int]) -> None:
        """Send the present integers of the rows to the device, in one copy from pinned memory."""
        if self.inputs is None or self._host_inputs is None:
            shape = (len(rows), RoundInputs.NUM_COLUMNS)
            self.inputs = RoundInputs(self.graphs.buffer("round", shape, torch.long))
            on_gpu = self.device.type == "cuda"
            self._host_inputs = torch.empty(shape, dtype=torch.long, pin_memory=on_gpu)

        integers = []
        for row, window in zip(rows, windows, strict=True):
            integers.append(_integers(row, window))
        # The last round was read after its copy from this memory, so the memory is free again.
        self._host_inputs.copy_(torch.tensor(integers))
        self.inputs.values.copy_(self._host_inputs, non_blocking=True)

    @property
    def last_positions(self) -> Int[Tensor, "B"]:  # type: ignore[override]
        return self._present_inputs.last_positions

    @property
    def _present_inputs(self) -> RoundInputs:
        assert self.inputs is not None, "a round begins with its inputs"
        return self.inputs

    def last_two_tokens(self, rows: Sequence[Request]) -> Int[Tensor, "B 2"]:
        return self._present_inputs.last_two_tokens

    def next_noise(
        self,
        noise: Float[Tensor, "B S 3"],
        rows: Sequence[Request],
        num_positions: int,
    ) -> Float[Tensor, "B N 3"]:
        def gather(noise: Tensor, num_generated: Tensor) -> Outputs:
            return (gather_noise(noise, num_generated, num_positions),)

        num_generated = self._present_inputs.num_generated
        (next_noise,) = self.run(("noise", num_positions), gather, noise, num_generated)
        assert next_noise is not None
        return next_noise

    def run(self, key: Hashable, call: Callable[..., Outputs], *tensors: Tensor | None) -> Outputs:
        return self.graphs.run(key, call, *tensors)

    def run_into(
        self,
        name: str,
        key: Hashable,
        call: Callable[..., Outputs],
        *tensors: Tensor | None,
    ) -> Outputs:
        # Whatever made the tokens, the call that reads them finds them here, so that it is
        # recorded once.
        batch_size = next(len(tensor) for tensor in tensors if tensor is not None)
        buffer = self.graphs.buffer(name, (batch_size,), torch.long)

        def call_into(buffer: Tensor, *tensors: Tensor | None) -> Outputs:
            tokens, *outputs = call(*tensors)
            assert tokens is not None
            return (buffer.copy_(tokens), *outputs)

        return self.graphs.run(key, call_into, buffer, *tensors)

    def join(
        self,
        unread: Int[Tensor, "B 1"],
        draft_tokens: Int[Tensor, "B K"],
    ) -> Int[Tensor, "B K1"]:
        if not draft_tokens.shape[1]:
            return unread
        # One buffer for the tokens of all drafters, so that the call that reads them is recorded
        # once.
        shape = (len(unread), 1 + draft_tokens.shape[1])
        tokens = self.graphs.buffer("tokens", shape, draft_tokens.dtype)

        def concatenate(unread: Tensor, draft_tokens: Tensor) -> Outputs:
            return (torch.cat((unread, draft_tokens), dim=1, out=tokens),)

        self.run("join", concatenate, unread, draft_tokens)
        return tokens

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.graphs.buffer(name, shape, dtype)

    def draft_lengths(
        self,
        requested: Sequence[int],
        num_drafted: int,
        device: torch.device,
    ) -> Int[Tensor, "B"] | None:
        if list(requested) == self._windows:
            # Also if every row is full, so that all rounds are the same calls.
            return self._present_inputs.num_draft_tokens
        return super().draft_lengths(requested, num_drafted, device)

    def lap(self, phase: str) -> None:
        self.graphs.mark(self.timer.lap, phase)

    def begin_read(self, values: Tensor) -> Callable[[], list[Any]]:
        return begin_read(values)

    def read(self, outcome: Tensor, draft: Draft) -> list[Any]:
        wait = begin_read(outcome)
        can_repeat = self.graphs.end()
        is_full = draft.tokens.shape[1] == self.num_draft_tokens
        if can_repeat and is_full and self._next_round_is_same():
            self._launch_next_round(outcome)
        return wait()

    def _next_round_is_same(self) -> bool:
        """Whether the next round is the same calls whatever the outcome of this one."""
        assert self._plan is not None
        if not self._pipelined or self._plan.shared_window != self.num_draft_tokens:
            return False
        live_rows = [row for row in self._rows if row.live]
        if any(row.is_reading for row in live_rows):
            # The host chooses the next part of the prompt.
            return False
        shrinks_first = power_of_two(len(live_rows)) < len(self._rows)
        if shrinks_first:
            return False
        # Some row goes on, even if all of its draft tokens are accepted.
        most_added = self.num_draft_tokens + 1
        return any(row.remaining > most_added for row in live_rows)

    def _launch_next_round(self, outcome: Tensor) -> None:
        """Launch the calls of the next round, before the host knows how this one ended."""
        self._write_next_inputs(outcome)
        self.graphs.repeat()
        self._launched = self.num_draft_tokens

    def _write_next_inputs(self, outcome: Tensor) -> None:
        """Compute the next round's inputs on the device, in place."""
        values = self._present_inputs.values
        num_draft_tokens = self.num_draft_tokens
        vocab_size = self.vocab_size

        # What is recorded outlives the session, so this function must not refer to it.
        def follow(values: Tensor, outcome: Tensor) -> Outputs:
            return (next_inputs(values, outcome, num_draft_tokens, vocab_size),)

        (next_values,) = self.run(("next inputs", num_draft_tokens), follow, values, outcome)
        assert next_values is not None
        values.copy_(next_values)

    def finish_round(self) -> None:
        self._next_num_draft_tokens = self._launched
        self._is_finished = True

    @contextmanager
    def not_pipelined(self) -> Iterator[None]:
        pipelined = self._pipelined
        self._pipelined = False
        try:
            yield
        finally:
            self._pipelined = pipelined

    def forget_batch(self) -> None:
        self.inputs = None
        self._host_inputs = None


def _integers(row: Request, window: int) -> list[int]:
    """The columns of `RoundInputs` for one row."""
    text = row.visible_text
    last_position = len(text) - 1
    # A row needs one token less than may follow: the target adds the last one.
    draft_limit = row.max_length - 2 if row.live and not row.is_reading else 0
    return [
        *tail_of(text),
        last_position,
        row.num_new,
        row.num_added,
        window,
        draft_limit,
    ]


def next_inputs(
    values: Int[Tensor, "B 7"],
    outcome: Tensor,
    num_draft_tokens: int,
    vocab_size: int,
) -> Int[Tensor, "B 7"]:
    """The inputs of the next round, computed from those of this one and from its outcome.

    For rows that are still live after the round they equal what the host will know then.

    Args:
        values: columns of `RoundInputs`.
        outcome: columns of `Verification.judge`.
        num_draft_tokens: K of both rounds.
    """
    num_endings = num_draft_tokens + 1
    sizes = (num_draft_tokens, num_endings, num_draft_tokens)
    columns = outcome[:, : sum(sizes)].long()
    accepted, endings, draft_tokens = columns.split(sizes, dim=1)
    num_accepted = accepted.cumprod(1).sum(1, keepdim=True)

    # The last two tokens of the next text: the token that ends the round, and before it an accepted
    # draft token or the text's last token. One gather reads both.
    last_tokens = values[:, 1:2]
    tokens = torch.cat((endings, last_tokens, draft_tokens), dim=1)
    # (num_endings, 0), computed on the device, because a copy from the host cannot be recorded.
    offsets = num_endings * torch.arange(1, -1, -1, device=values.device)
    last_two_tokens = tokens.gather(1, num_accepted + offsets)
    last_two_tokens = last_two_tokens.clamp(max=vocab_size - 1)

    # Both the last position and the number of generated tokens grow by the tokens of the round.
    num_added = num_accepted + 1
    positions_and_counts = values[:, 2:4] + num_added
    last_positions = positions_and_counts[:, :1]
    draft_limits = values[:, 6:]
    windows = (draft_limits - last_positions).clamp(0, num_draft_tokens)
    return torch.cat(
        (last_two_tokens, positions_and_counts, num_added, windows, draft_limits), dim=1
    )
