"""Laws 6 and 8: a truncated state equals a shorter one; nothing after its rows is read."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from lightning_specdec.decoding import open_session
from lightning_specdec.drafters.model import ModelDraftState
from lightning_specdec.models import DecodeState, KVState, ModelOutput, RecurrentState

MAX_LENGTH = 24
KINDS = {
    "rnn-1": lambda: cases.MODELS["rnn"](2, num_layers=1),
    "rnn-3": lambda: cases.MODELS["rnn"](2, num_layers=3),
    "fused-3": lambda: cases.MODELS["fused"](2, num_layers=3),
    "transformer-1": lambda: cases.MODELS["transformer"](2, num_layers=1),
    "transformer-3": lambda: cases.MODELS["transformer"](2, num_layers=3),
}


assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def poison(state: DecodeState) -> None:
    """Write garbage after every row: large numbers in cache slots, NaN in hidden states."""
    if isinstance(state, KVState):
        for row, length in enumerate(state.consumed):
            for keys, values in state.storage.layers.values():
                keys[row, :, length:] = 1e4
                values[row, :, length:] = -1e4
        return
    assert isinstance(state, RecurrentState)
    state._keep(state._past.clone())
    for row, length in enumerate(state.consumed):
        slot = length - state._origin[row]
        state._past[row, slot + 1 :] = torch.nan


class Walk:
    """A batch that is fed, truncated, committed and reordered at random.

    Every feed is compared with a fresh run.
    """

    def __init__(self, kind: str, seed: int, *, poisoned: bool = False) -> None:
        self.model = KINDS[kind]()
        self.random = random.Random(seed)
        self.poisoned = poisoned
        self.layers = range(int(kind[-1]))
        self.state = self.model.init_state(3, MAX_LENGTH)
        self.texts: list[list[int]] = [[], [], []]
        self.committed = [0, 0, 0]
        self.num_compared = 0

    def feed(self) -> None:
        num_tokens = self.random.randint(1, 4)
        counts = [self.random.randint(0, num_tokens) for _ in self.texts]
        if self.random.random() < 0.4:
            counts = [num_tokens] * len(self.texts)
        if max(len(text) for text in self.texts) + num_tokens > MAX_LENGTH:
            return
        tokens = torch.tensor([self.draw_tokens(num_tokens) for _ in self.texts])
        if self.poisoned:
            poison(self.state)
        valid_lengths = None if min(counts) == num_tokens else counts
        output = self.model(tokens, self.state, valid_lengths=valid_lengths, features=self.layers)
        for row, count in enumerate(counts):
            self.texts[row] += tokens[row, :count].tolist()
            if count:
                self.compare(row, count, output)
        assert self.state.consumed == [len(text) for text in self.texts]

    def draw_tokens(self, num_tokens: int) -> list[int]:
        return [self.random.randrange(cases.VOCAB) for _ in range(num_tokens)]

    def compare(self, row: int, count: int, output: ModelOutput) -> None:
        fresh = self.model(torch.tensor([self.texts[row]]), features=self.layers)
        assert_close(output.logits[row, :count], fresh.logits[0, -count:])
        for layer in self.layers:
            assert_close(output.features[layer][row, :count], fresh.features[layer][0, -count:])
        self.num_compared += count

    def draw_lengths(self) -> list[int]:
        """A length for each row between its last commit and its present one."""
        rows = zip(self.committed, self.texts, strict=True)
        return [self.random.randint(committed, len(text)) for committed, text in rows]

    def truncate(self) -> None:
        lengths = self.draw_lengths()
        self.state.truncate(lengths if self.random.random() < 0.5 else torch.tensor(lengths))
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def commit(self) -> None:
        lengths = [len(text) for text in self.texts]
        if self.random.random() >= 0.6:
            lengths = self.draw_lengths()
        self.committed = lengths
        self.state.commit(self.committed)

    def select(self) -> None:
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

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            steps = [self.feed, self.truncate, self.commit, self.select, self.clear]
            (step,) = self.random.choices(steps, weights=[6, 4, 2, 1, 1])
            step()


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_truncating_and_feeding_again_equals_a_fresh_run_in_every_layer(
    kind: str, seed: int, poisoned: bool
) -> None:
    """Whatever garbage lies after the rows."""
    walk = Walk(kind, seed, poisoned=poisoned)
    with torch.inference_mode():
        walk.run(60)
    assert walk.num_compared > 60


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_request_that_ended_in_nan_leaves_nothing_behind(kind: str) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    state = model.init_state(2, 8)
    model(tokens, state)
    if isinstance(state, KVState):
        buffers = list(state.storage.buffers())
    else:
        assert isinstance(state, RecurrentState)
        buffers = [state._past]
    for buffer in buffers:
        buffer[1] = torch.nan
    state.clear([1])
    logits = model(tokens, state).logits
    assert_close(logits[1:], model(tokens[1:]).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_requested_logits_are_those_of_all_positions(kind: str) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.inference_mode():
        logits = model(tokens).logits
        requests: list[tuple[Any, Tensor]] = [
            (slice(-1, None), logits[:, -1:]),
            (slice(1, 3), logits[:, 1:3]),
            (
                torch.tensor([[3, 0], [1, 2]]),
                torch.stack((logits[0, [3, 0]], logits[1, [1, 2]])),
            ),
        ]
        for positions, expected in requests:
            assert_close(model(tokens, logits_for=positions).logits, expected)
            state = model.init_state(2, 8)
            assert_close(model(tokens, state, logits_for=positions).logits, expected)


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
def test_a_rollout_equals_feeding_the_tokens_it_chose(
    kind: str, valid_lengths: Sequence[int] | None
) -> None:
    model = KINDS[kind]()
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    step_logits: list[Tensor] = []
    new_tokens: list[Tensor] = []

    def choose(logits: Tensor, i: int) -> Tensor:
        assert i == len(step_logits)
        step_logits.append(logits)
        new_tokens.append(logits.argmax(-1))
        return new_tokens[-1]

    with torch.inference_mode():
        state = model.init_state(2, 12)
        model.rollout(tokens, state, 4, choose, valid_lengths=valid_lengths)
        logits = torch.stack(step_logits, dim=1)
        chosen = torch.stack(new_tokens, dim=1)
        for row, length in enumerate(valid_lengths or [3, 3]):
            text = tokens[row, :length].tolist() + chosen[row].tolist()
            fresh = model(torch.tensor([text])).logits[0, length - 1 : -1]
            assert_close(logits[row], fresh)
            assert state.consumed[row] == length + 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_truncated_neither_beyond_its_length_nor_below_its_commit(kind: str) -> None:
    model = KINDS[kind]()
    state = model.init_state(2, 8)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state)
    state.commit([2, 1])
    for lengths in ([3, 4], [1, 3], [2, 0]):
        with pytest.raises(AssertionError, match="is not between committed"):
            state.truncate(lengths)
    with pytest.raises(AssertionError, match="is not between committed"):
        state.commit([2, 4])


def test_a_recurrent_state_does_not_grow_with_the_text() -> None:
    target = cases.target("rnn")
    session = open_session(target, cases.drafter("near", "rnn"), cases.PROMPTS, max_new_tokens=60)
    draft_state = session._batch.draft_state
    assert isinstance(draft_state, ModelDraftState)
    shapes = []
    for _ in range(12):
        session.step()
        states: list[Any] = [session._batch.target_state, draft_state.model_state]
        shapes.append([state._past.shape for state in states])
    assert shapes[-1] == shapes[2]


def addresses(state: KVState) -> list[int]:
    return [buffer.data_ptr() for buffer in state.storage.buffers()]


def test_static_buffers_stay_where_they_are() -> None:
    """No concatenation and no new allocation: what compiled graphs need."""
    target = cases.target("transformer")
    session = open_session(
        target, cases.drafter("near", "transformer"), cases.PROMPTS[1:2], max_new_tokens=20
    )
    session.step()
    state = session._batch.target_state
    assert isinstance(state, KVState)
    initial_addresses = addresses(state)
    while session.step():
        assert addresses(state) == initial_addresses
