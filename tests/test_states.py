"""Laws 6 and 8: a state that went back is as if it had never been ahead; what lies behind its rows is never read."""

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
    """Garbage wherever no row has been: large numbers in cache slots, NaN in hidden states that were gone back from."""
    for row, length in enumerate(state.consumed):
        if isinstance(state, KVState):
            for keys, values in state.storage.layers.values():
                keys[row, :, length:] = 1e4
                values[row, :, length:] = -1e4
        else:
            assert isinstance(state, RecurrentState)
            if row == 0:
                state._keep(state._past.clone())
            state._past[row, length - state._origin[row] + 1 :] = torch.nan


class Walk:
    """A batch that is fed, goes back, commits and moves its rows at random; every feed is compared with a fresh run."""

    def __init__(self, kind: str, seed: int, *, poisoned: bool = False) -> None:
        self.model, self.random, self.poisoned = KINDS[kind](), random.Random(seed), poisoned
        self.layers = range(int(kind[-1]))
        self.state = self.model.init_state(3, MAX_LENGTH)
        self.texts: list[list[int]] = [[], [], []]
        self.committed = [0, 0, 0]
        self.num_compared = 0

    def feed(self) -> None:
        width = self.random.randint(1, 4)
        counts = [self.random.randint(0, width) for _ in self.texts]
        if self.random.random() < 0.4:
            counts = [width] * len(self.texts)
        if max(len(text) for text in self.texts) + width > MAX_LENGTH:
            return
        tokens = torch.tensor(
            [[self.random.randrange(cases.VOCAB) for _ in range(width)] for _ in self.texts]
        )
        if self.poisoned:
            poison(self.state)
        valid = None if min(counts) == width else counts
        output = self.model(tokens, self.state, valid_lengths=valid, features=self.layers)
        for row, count in enumerate(counts):
            self.texts[row] += tokens[row, :count].tolist()
            if count:
                self.compare(row, count, output)
        assert self.state.consumed == [len(text) for text in self.texts]

    def compare(self, row: int, count: int, output: ModelOutput) -> None:
        fresh = self.model(torch.tensor([self.texts[row]]), features=self.layers)
        assert_close(output.logits[row, :count], fresh.logits[0, -count:])
        for layer in self.layers:
            assert_close(output.features[layer][row, :count], fresh.features[layer][0, -count:])
        self.num_compared += count

    def between(self) -> list[int]:
        """A length for each row between its last commit and its present one."""
        return [
            self.random.randint(first, len(t))
            for first, t in zip(self.committed, self.texts, strict=True)
        ]

    def truncate(self) -> None:
        lengths = self.between()
        self.state.truncate(lengths if self.random.random() < 0.5 else torch.tensor(lengths))
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def commit(self) -> None:
        here = [len(text) for text in self.texts]
        self.committed = here if self.random.random() < 0.6 else self.between()
        self.state.commit(self.committed)

    def select(self) -> None:
        rows = [
            self.random.randrange(-1, len(self.texts)) for _ in range(self.random.randint(1, 4))
        ]
        self.state.select(rows)
        self.texts = [[] if row < 0 else list(self.texts[row]) for row in rows]
        self.committed = [0 if row < 0 else self.committed[row] for row in rows]

    def clear(self) -> None:
        row = self.random.randrange(len(self.texts))
        self.state.clear([row])
        self.texts[row], self.committed[row] = [], 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            step = self.random.choices(
                [self.feed, self.truncate, self.commit, self.select, self.clear],
                weights=[6, 4, 2, 1, 1],
            )
            step[0]()


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_truncating_and_feeding_again_equals_a_fresh_run_in_every_layer(
    kind: str, seed: int, poisoned: bool
) -> None:
    """Whatever garbage lies behind the rows."""
    walk = Walk(kind, seed, poisoned=poisoned)
    with torch.inference_mode():
        walk.run(60)
    assert walk.num_compared > 60


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_request_that_ended_in_nan_leaves_nothing_behind(kind: str) -> None:
    model, tokens = KINDS[kind](), torch.tensor([[1, 2, 3], [4, 5, 6]])
    state = model.init_state(2, 8)
    model(tokens, state)
    if isinstance(state, KVState):
        parts = [part for pair in state.storage.layers.values() for part in pair]
    else:
        assert isinstance(state, RecurrentState)
        parts = [state._past]
    for part in parts:
        part[1] = torch.nan
    state.clear([1])
    logits = model(tokens, state).logits
    assert_close(logits[1:], model(tokens[1:]).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_the_wanted_logits_are_those_of_the_whole(kind: str) -> None:
    model, tokens = KINDS[kind](), torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.inference_mode():
        whole = model(tokens).logits
        for part in (slice(-1, None), slice(1, 3), torch.tensor([[3, 0], [1, 2]])):
            wanted = (
                whole[:, part] if isinstance(part, slice) else whole[torch.arange(2)[:, None], part]
            )
            assert_close(model(tokens, logits_for=part).logits, wanted)
            state = model.init_state(2, 8)
            assert_close(model(tokens, state, logits_for=part).logits, wanted)


def test_the_fused_network_is_the_same_function() -> None:
    for num_layers in (1, 2, 3):
        model = cases.MODELS["rnn"](4, num_layers=num_layers)
        fused, tokens = model.fused(), torch.randint(0, cases.VOCAB, (3, 7))
        whole, folded = (
            model(tokens, features=range(num_layers)),
            fused(tokens, features=range(num_layers)),
        )
        assert_close(folded.logits, whole.logits)
        for layer in range(num_layers):
            assert_close(folded.features[layer], whole.features[layer])


@pytest.mark.parametrize("valid_lengths", [None, [1, 3]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_equals_feeding_the_tokens_it_chose(
    kind: str, valid_lengths: Sequence[int] | None
) -> None:
    model, tokens = KINDS[kind](), torch.tensor([[1, 2, 3], [4, 5, 6]])
    seen: list[Tensor] = []
    drawn: list[Tensor] = []

    def choose(logits: Tensor, i: int) -> Tensor:
        assert i == len(seen)
        seen.append(logits)
        drawn.append(logits.argmax(-1))
        return drawn[-1]

    with torch.inference_mode():
        state = model.init_state(2, 12)
        model.rollout(tokens, state, 4, choose, valid_lengths=valid_lengths)
        chosen = torch.stack(drawn, dim=1)
        for row, count in enumerate(valid_lengths or [3, 3]):
            text = tokens[row, :count].tolist() + chosen[row].tolist()
            fresh = model(torch.tensor([text])).logits[0, count - 1 : -1]
            assert_close(torch.stack(seen, dim=1)[row], fresh)
            assert state.consumed[row] == count + 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_refuses_to_go_forward_or_behind_its_commit(kind: str) -> None:
    model = KINDS[kind]()
    state = model.init_state(2, 8)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3], [4, 5, 6]]), state)
    state.commit([2, 1])
    for wrong in ([3, 4], [1, 3], [2, 0]):
        with pytest.raises(AssertionError, match="is not between committed"):
            state.truncate(wrong)
    with pytest.raises(AssertionError, match="is not between committed"):
        state.commit([2, 4])


def test_what_a_recurrent_state_holds_does_not_grow_with_the_text() -> None:
    target = cases.target("rnn")
    session = open_session(target, cases.drafter("near", "rnn"), cases.PROMPTS, max_new_tokens=60)
    draft_state = session._batch.draft_state
    assert isinstance(draft_state, ModelDraftState)
    held = []
    for _ in range(12):
        session.step()
        states: list[Any] = [session._batch.target_state, draft_state.model_state]
        held.append([state._past.shape for state in states])
    assert held[-1] == held[2]


def addresses(state: KVState) -> list[int]:
    """Where the buffers lie."""
    return [buffer.data_ptr() for pair in state.storage.layers.values() for buffer in pair]


def test_static_buffers_stay_where_they_are() -> None:
    """No concatenation and no new allocation: what compiled graphs need."""
    target = cases.target("transformer")
    session = open_session(
        target, cases.drafter("near", "transformer"), cases.PROMPTS[1:2], max_new_tokens=20
    )
    session.step()
    state = session._batch.target_state
    assert isinstance(state, KVState)
    address = addresses(state)
    while session.step():
        assert addresses(state) == address
