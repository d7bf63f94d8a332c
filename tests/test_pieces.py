"""Laws of pieces: methods take turns on the same tokens, nothing is lost, and intervals hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import pytest
from synthetic_machine import Machine

from lightning_specdec import Sampling, SpeculativeDecoder
from lightning_specdec.bench.pieces import Stream, Tape, pairs_by_turn, take_turns
from lightning_specdec.bench.statistics import Pair, piece_interval

TRUE_SPEEDUP = 1.5


class FakeStream(Stream):
    """An answer whose steps have known tokens and seconds."""

    def __init__(self, tokens_by_step: Sequence[int], seconds_per_step: float) -> None:
        self.num_tokens = 0
        self.is_over = False
        self._tokens_left = list(tokens_by_step)
        self._seconds_per_step = seconds_per_step
        self._num_steps = 0

    def step(self) -> None:
        self.num_tokens += self._tokens_left.pop(0)
        self._num_steps += 1
        self.is_over = not self._tokens_left

    @property
    def seconds(self) -> float:
        return self._num_steps * self._seconds_per_step

    def result(self) -> Any:
        return None


def fake_tape(*tokens_by_step: Sequence[int], seconds_per_step: float = 1.0) -> Tape:
    """A tape of answers with these tokens in each step."""
    return Tape(
        lambda number: FakeStream(tokens_by_step[number], seconds_per_step),
        num_answers=len(tokens_by_step),
    )


def test_each_pair_is_of_the_same_tokens_whatever_a_round_accepts() -> None:
    """A token of standard decoding takes a second, and a round of four tokens two."""
    standard = fake_tape([1] * 40, [1] * 8)
    drafted = fake_tape([4] * 10, [4, 4], seconds_per_step=2.0)
    for _ in take_turns([standard, drafted], piece_tokens=6):
        pass
    pairs = pairs_by_turn(standard, drafted)
    assert len(pairs) > 6
    for standard_seconds, seconds in pairs.values():
        assert standard_seconds == pytest.approx(2 * seconds)
    assert sum(standard_seconds for standard_seconds, _ in pairs.values()) == 48.0
    assert sum(seconds for _, seconds in pairs.values()) == 24.0


def test_methods_take_turns_and_the_order_alternates() -> None:
    runs: list[str] = []

    class Recorded(Tape):
        def __init__(self, name: str) -> None:
            super().__init__(lambda number: FakeStream([1] * 9, 1.0), num_answers=1)
            self.name = name

        def run_piece(self, goal: int) -> None:
            runs.append(self.name)
            super().run_piece(goal)

    for _ in take_turns([Recorded("a"), Recorded("b")], piece_tokens=3):
        pass
    assert "".join(runs) == "abbaab"


def test_a_round_that_exceeds_its_piece_is_made_up_for_in_the_next_turn() -> None:
    standard = fake_tape([1] * 24)
    drafted = fake_tape([8] * 3, seconds_per_step=2.0)
    for _ in take_turns([standard, drafted], piece_tokens=3):
        pass
    turns_with_a_piece = [turn for turn, piece in enumerate(drafted.pieces) if piece]
    assert turns_with_a_piece == [0, 2, 5], "at 3, 9 and 18 tokens"
    assert list(pairs_by_turn(standard, drafted).values()) == [(8.0, 2.0)] * 3


def test_tokens_that_only_one_text_has_are_left_out() -> None:
    standard = fake_tape([1] * 9, [1] * 6)
    drafted = fake_tape([3] * 5, [3, 3], seconds_per_step=1.5)
    for _ in take_turns([standard, drafted], piece_tokens=3):
        pass
    pairs = pairs_by_turn(standard, drafted)
    assert len(pairs) == 5, "three pieces of the first text, two of the second"
    assert set(pairs.values()) == {(3.0, 1.5)}


def test_whole_answers_are_scaled_to_equally_many_tokens() -> None:
    standard = fake_tape([1] * 10)
    drafted = Tape(lambda number: FakeStream([4] * 5, 1.0), num_answers=1, whole_answers=True)
    for _ in take_turns([standard, drafted], piece_tokens=4):
        pass
    assert list(pairs_by_turn(standard, drafted).values()) == [(20.0, 5.0)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pieces_decode_the_same_tokens_and_their_seconds_add_up(
    batch_size: int, temperature: float
) -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(target, cases.near(target))
    comparison = decoder.benchmark(
        cases.PROMPTS,
        repeats=2,
        warmup=1,
        batch_size=batch_size,
        max_new_tokens=40,
        temperature=temperature,
        eos=cases.EOS,
    )
    expected = cases.standard("rnn", Sampling(temperature), 40)
    assert comparison.rows[0].num_new_tokens == expected.num_new_tokens
    assert comparison.same_tokens
    for standard, row in zip(comparison.standard, comparison.rows, strict=True):
        assert row.pieces
        standard_seconds = sum(seconds for seconds, _ in row.pieces)
        method_seconds = sum(seconds for _, seconds in row.pieces)
        assert standard_seconds == pytest.approx(standard.seconds, rel=0.05)
        assert method_seconds == pytest.approx(row.seconds, rel=0.05)
        assert sum(row.phase_seconds.values()) == pytest.approx(row.seconds)  # type: ignore[union-attr]


def test_two_repeats_of_three_prompts_yield_more_than_twenty_pairs() -> None:
    target = cases.target("rnn")
    decoder = SpeculativeDecoder(target, cases.near(target))
    comparison = decoder.benchmark([[1], [2, 3], [4]], repeats=2, warmup=0, max_new_tokens=64)
    assert comparison.num_pairs > 20
    assert comparison.walltime_speedup is not None
    assert comparison.walltime_speedup.ends is not None


def pairs_on(machine: Machine, num_pieces: int, *, text_noise: float) -> Iterator[Pair]:
    """Pieces of both methods in turn; a piece of standard decoding is a second of work."""
    for turn in range(num_pieces):
        text = machine.rng.lognormvariate(-(text_noise**2) / 2, text_noise)
        works = {"standard": 1.0, "method": text / TRUE_SPEEDUP}
        order = ["standard", "method"] if turn % 2 == 0 else ["method", "standard"]
        seconds = {name: machine.run(works[name]) for name in order}
        yield seconds["standard"], seconds["method"]


@pytest.mark.parametrize("num_pieces", [12, 24, 96])
@pytest.mark.parametrize(
    ("burst_rate", "burst_seconds", "burst_factor", "text_noise"),
    [
        (0.0, 1.0, 1.0, 0.0),
        (0.3, 0.5, 3.0, 0.0),
        (0.1, 3.0, 3.0, 0.0),
        (0.03, 15.0, 3.0, 0.0),
        (0.02, 1.0, 5.0, 0.0),
        (0.0, 1.0, 1.0, 0.4),
        (0.1, 1.0, 3.0, 0.4),
    ],
)
def test_an_interval_of_pieces_contains_the_truth_in_95_of_100_cases(
    burst_rate: float,
    burst_seconds: float,
    burst_factor: float,
    text_noise: float,
    num_pieces: int,
) -> None:
    """On machines that drift and that bursts slow down, of any length beside a piece.

    At a true coverage of 0.95, fewer than 363 of 400 would contain it in 1 of 4,000 cases with
    other seeds, in 1 of 200 for all machines together. Intervals that contain everything would be
    no evidence: half of the truth is excluded.
    """
    rng = random.Random(3)
    num_with_truth = 0
    num_with_half = 0
    for _ in range(400):
        machine = Machine(rng, burst_rate, burst_seconds, burst_factor)
        pairs = list(pairs_on(machine, num_pieces, text_noise=text_noise))
        _, low, high = piece_interval(pairs)
        num_with_truth += low <= TRUE_SPEEDUP <= high
        num_with_half += low <= TRUE_SPEEDUP / 2 <= high
    assert num_with_truth >= 363
    assert num_with_half < 60
