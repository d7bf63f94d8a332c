"""Laws 6 and 8: a truncated state equals a shorter one, and slots after a row are never read."""

from __future__ import annotations

import functools
import random
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.decoding import open_session
from lightning_specdec.drafters.model import ModelDraftState
from lightning_specdec.models import DecodeState, KVState, ModelOutput, RecurrentState
from lightning_specdec.models.paged_state import BLOCK, PagedState
from lightning_specdec.models.state import lazy_zeros

MAX_LENGTH = 24
KINDS = {
    "rnn-1": lambda: cases.MODELS["rnn"](2, num_layers=1),
    "rnn-3": lambda: cases.MODELS["rnn"](2, num_layers=3),
    "fused-3": lambda: cases.MODELS["fused"](2, num_layers=3),
    "transformer-1": lambda: cases.MODELS["transformer"](2, num_layers=1),
    "transformer-3": lambda: cases.MODELS["transformer"](2, num_layers=3),
    "openvino-2": lambda: cases.MODELS["openvino"](2),
}
"""Models by name; the number is that of their layers."""

assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def poison(state: DecodeState) -> None:
    """Write garbage after every row: large numbers in cache slots, NaN in hidden states."""
    if isinstance(state, KVState):
        for row, length in enumerate(state.consumed):
            for keys, values in state.storage.layers.values():
                keys[row, :, length:] = 1e4
                values[row, :, length:] = -1e4
        return

    if isinstance(state, PagedState):
        for buffer in state._buffers:
            # `[B, number of blocks, BLOCK, H, D]`
            by_slot = buffer.unflatten(0, (-1, state.num_blocks)).transpose(2, 3)
            for row, length in enumerate(state.consumed):
                slots = torch.arange(length, state.num_blocks * BLOCK)
                by_slot[row, slots // BLOCK, slots % BLOCK] = 1e4
        return

    assert isinstance(state, RecurrentState)
    state._keep(state._past.clone())
    for row, length in enumerate(state.consumed):
        slot = length - state._origin[row]
        state._past[row, slot + 1 :] = torch.nan


def rows_of(state: DecodeState) -> list[Tensor]:
    """All that a state keeps, `[B, ...]`."""
    if isinstance(state, KVState):
        return list(state.storage.buffers())
    if isinstance(state, PagedState):
        return [buffer.unflatten(0, (-1, state.num_blocks)) for buffer in state._buffers]
    assert isinstance(state, RecurrentState)
    return [state._past]


class RandomWalk:
    """A batch that is fed, truncated, committed and reordered at random.

    The outputs of every call are compared with those of a call on the row's whole text.
    """

    def __init__(self, kind: str, seed: int, *, poisoned: bool) -> None:
        self.model = KINDS[kind]()
        self.random = random.Random(seed)
        self.poisoned = poisoned
        self.layers = range(int(kind[-1]))
        self.state = self.model.init_state(3, MAX_LENGTH)
        self.texts: list[list[int]] = [[], [], []]
        self.committed = [0, 0, 0]
        self.num_compared = 0

    def run(self, num_steps: int) -> None:
        steps = [self.feed, self.truncate, self.commit, self.select, self.clear]
        for step in self.random.choices(steps, weights=[6, 4, 2, 1, 1], k=num_steps):
            step()

    def feed(self) -> None:
        """Read a few new tokens in each row, unless the longest row is almost full."""
        num_tokens = self.random.randint(1, 4)
        valid_lengths = self.draw_valid_lengths(num_tokens)
        longest = max(len(text) for text in self.texts)
        if longest + num_tokens > MAX_LENGTH:
            return
        tokens = torch.tensor([self.draw_tokens(num_tokens) for _ in self.texts])
        if self.poisoned:
            poison(self.state)

        has_padding = min(valid_lengths) < num_tokens
        output = self.model(
            tokens,
            self.state,
            valid_lengths=valid_lengths if has_padding else None,
            features=self.layers,
        )
        for row, length in enumerate(valid_lengths):
            self.texts[row] += tokens[row, :length].tolist()
            if length:
                self.compare(row, length, output)
        assert self.state.consumed == [len(text) for text in self.texts]

    def draw_valid_lengths(self, num_tokens: int) -> list[int]:
        """The number of tokens for each row: often ragged, and often all of them."""
        if self.random.random() < 0.4:
            return [num_tokens] * len(self.texts)
        lengths = [self.random.randint(0, num_tokens) for _ in self.texts]
        # A call reads something.
        lengths[0] = max(1, lengths[0])
        return lengths

    def draw_tokens(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(cases.VOCAB) for _ in range(num_tokens)]

    def compare(self, row: int, num_new: int, output: ModelOutput) -> None:
        """Compare a row's new outputs with those of a call on its whole text."""
        whole = self.model(torch.tensor([self.texts[row]]), features=self.layers)
        assert_close(output.logits[row, :num_new], whole.logits[0, -num_new:])
        for layer in self.layers:
            feature = output.features[layer][row, :num_new]
            assert_close(feature, whole.features[layer][0, -num_new:])
        self.num_compared += num_new

    def draw_lengths(self) -> list[int]:
        """A length for each row between its last commit and its present one."""
        lengths = []
        for committed, text in zip(self.committed, self.texts, strict=True):
            lengths.append(self.random.randint(committed, len(text)))
        return lengths

    def truncate(self) -> None:
        lengths = self.draw_lengths()
        # The host may know the lengths as integers or as a tensor.
        as_tensor = self.random.random() < 0.5
        self.state.truncate(torch.tensor(lengths) if as_tensor else lengths)
        for row, length in enumerate(lengths):
            del self.texts[row][length:]

    def commit(self) -> None:
        commits_all = self.random.random() < 0.6
        if commits_all:
            self.committed = [len(text) for text in self.texts]
        else:
            self.committed = self.draw_lengths()
        self.state.commit(self.committed)

    def select(self) -> None:
        """Reorder, repeat and drop rows; -1 stands for an empty row."""
        batch_size = self.random.randint(1, 4)
        rows = [self.random.randrange(-1, len(self.texts)) for _ in range(batch_size)]
        self.state.select(rows)
        self.texts = [[] if row < 0 else list(self.texts[row]) for row in rows]
        self.committed = [0 if row < 0 else self.committed[row] for row in rows]

    def clear(self) -> None:
        row = self.random.randrange(len(self.texts))
        self.state.clear([row])
        self.texts[row] = []
        self.committed[row] = 0


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_truncating_and_feeding_again_equals_one_call_in_every_layer(
    kind: str,
    seed: int,
    poisoned: bool,
) -> None:
    """Garbage in the slots after the rows changes nothing."""
    walk = RandomWalk(kind, seed, poisoned=poisoned)
    walk.run(80)
    assert walk.num_compared > 80


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_request_that_ended_in_nan_does_not_affect_the_next_one(kind: str) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    state = model.init_state(2, 8)
    model(tokens, state)
    for values in rows_of(state):
        # What a call can have written: the slots of its tokens.
        is_in_slots = isinstance(state, KVState)
        written = values[1, :, :3] if is_in_slots else values[1]
        written.fill_(torch.nan)
    if isinstance(state, PagedState):
        assert state.num_blocks == 1

    state.clear([1])
    logits = model(tokens, state).logits
    assert_close(logits[1:], model(tokens[1:]).logits)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_nothing_is_left_of_a_cleared_row(kind: str, seed: int) -> None:
    """Whatever calls wrote: padding, tokens that were rejected, copies of other rows."""
    walk = RandomWalk(kind, seed, poisoned=False)
    for _ in range(10):
        walk.run(10)
        num_rows = len(walk.texts)
        copies = [walk.state.save_row(row, len(walk.texts[row])) for row in range(num_rows)]
        for row in range(num_rows):
            walk.state.clear([row])
            assert all(values[row].eq(0).all() for values in rows_of(walk.state))
            walk.texts[row] = []
            walk.committed[row] = 0
        if copies[0] is not None:
            walk.state.load_row(num_rows - 1, copies[0], copies[0].length)
            walk.state.select([num_rows - 1])
            walk.state.clear([0])
            assert all(values[0].eq(0).all() for values in rows_of(walk.state))
            walk.texts = [[]]
            walk.committed = [0]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_the_requested_logits_are_those_of_all_positions(kind: str) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    logits = model(tokens).logits
    chosen_positions = torch.tensor([[3, 0], [1, 2]])
    chosen_logits = torch.stack((logits[0, [3, 0]], logits[1, [1, 2]]))
    requests: list[tuple[Any, Tensor]] = [
        (slice(-1, None), logits[:, -1:]),
        (slice(1, 3), logits[:, 1:3]),
        (chosen_positions, chosen_logits),
    ]
    for positions, expected_logits in requests:
        assert_close(model(tokens, logits_for=positions).logits, expected_logits)
        state = model.init_state(2, 8)
        assert_close(model(tokens, state, logits_for=positions).logits, expected_logits)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_the_fused_network_is_the_same_function(num_layers: int) -> None:
    model = cases.MODELS["rnn"](4, num_layers=num_layers)
    layers = range(num_layers)
    tokens = torch.randint(0, cases.VOCAB, (3, 7))
    expected = model(tokens, features=layers)
    output = model.fused()(tokens, features=layers)
    assert_close(output.logits, expected.logits)
    for layer in layers:
        assert_close(output.features[layer], expected.features[layer])


@pytest.mark.parametrize("valid_lengths", [None, [1, 3]])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_rollout_equals_one_call_on_the_tokens_that_it_chose(
    kind: str, valid_lengths: Sequence[int] | None
) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    step_logits: list[Tensor] = []
    step_tokens: list[Tensor] = []

    def choose(logits: Tensor, step: int) -> Tensor:
        assert step == len(step_logits)
        step_logits.append(logits)
        step_tokens.append(logits.argmax(-1))
        return step_tokens[-1]

    state = model.init_state(2, 12)
    model.rollout(tokens, state, 4, choose, valid_lengths=valid_lengths)
    logits = torch.stack(step_logits, dim=1)
    chosen_tokens = torch.stack(step_tokens, dim=1)
    for row, length in enumerate(valid_lengths or [3, 3]):
        text = tokens[row, :length].tolist() + chosen_tokens[row].tolist()
        whole_logits = model(torch.tensor([text])).logits[0]
        assert_close(logits[row], whole_logits[length - 1 : -1])
        # The last chosen token has not been read.
        assert state.consumed[row] == length + 3


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_state_is_truncated_neither_beyond_its_length_nor_below_its_commit(kind: str) -> None:
    model = KINDS[kind]()
    state = model.init_state(2, 8)
    model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state)
    state.commit([2, 1])
    for lengths in ([3, 4], [1, 3], [2, 0]):
        with pytest.raises(AssertionError, match="is not between committed"):
            state.truncate(lengths)
    with pytest.raises(AssertionError, match="is not between committed"):
        state.commit([2, 4])


def test_a_recurrent_state_does_not_grow_with_the_text() -> None:
    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    session = open_session(target, drafter, cases.PROMPTS, max_new_tokens=60)
    draft_state = session._batch.draft_state
    assert isinstance(draft_state, ModelDraftState)
    shapes = []
    for _ in range(12):
        session.step()
        states: list[Any] = [session._batch.target_state, draft_state.model_state]
        shapes.append([state._past.shape for state in states])
    assert shapes[-1] == shapes[2]


def buffer_addresses(state: KVState) -> list[int]:
    return [buffer.data_ptr() for buffer in state.storage.buffers()]


def test_static_buffers_are_never_reallocated() -> None:
    """Compiled graphs read and write the same memory in every call."""
    target = cases.target("transformer")
    drafter = cases.drafter("near", "transformer")
    session = open_session(target, drafter, cases.PROMPTS[1:2], max_new_tokens=20)
    session.step()
    state = session._batch.target_state
    assert isinstance(state, KVState)
    initial_addresses = buffer_addresses(state)
    while session.step():
        assert buffer_addresses(state) == initial_addresses


def test_empty_slots_take_no_memory() -> None:
    """Of a very long context, only what a text uses is in memory, also after the batch grew."""

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    num_slots = 2**18
    like = torch.zeros(1, 2, 1, 64)
    before = resident_bytes()
    state = KVState(1, num_slots, device=torch.device("cpu"))
    paged = PagedState(1, num_slots, sizes=[(2, 64, 64)], dtype=torch.float32)
    for _ in range(2):
        num_rows = len(state.consumed)
        values = like.expand(num_rows, -1, -1, -1)
        state.storage.update(0, state.slots(1), values, values)
        state.advance(1)
        paged.plan_call(paged.consumed, [1] * num_rows)
        paged.advance(1)
        state.select([0, -1])
        paged.select([0, -1])
        state.clear([0])
        paged.clear([0])

    whole_bytes = 2 * 2 * num_slots * 2 * 64 * 4
    assert resident_bytes() - before < 0.05 * whole_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lazy_zeros_are_aligned_zeros(dtype: torch.dtype) -> None:
    zeros = lazy_zeros([3, 5, 2], dtype, torch.device("cpu"))
    assert zeros.shape == (3, 5, 2)
    assert zeros.dtype == dtype
    assert zeros.is_contiguous()
    assert zeros.data_ptr() % 64 == 0
    assert zeros.eq(0).all()
    zeros += 1
    assert zeros.eq(1).all()
