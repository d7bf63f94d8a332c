"""Methods that take turns after a few rounds on the same text, and the seconds of each piece.

Whole answers yield one pair of timings each, and a burst of load hits only one side of a pair.
Short pieces yield many pairs, and whatever the machine does affects both sides.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_specdec.bench.statistics import Pair
from lightning_specdec.decoding import DecodeResult, Session
from lightning_specdec.decoding.autoregressive import StandardDecoding
from lightning_specdec.decoding.state_size import state_bytes

PIECE_TOKENS = 12
"""New tokens of a piece of one row: a few rounds."""
MIN_STEPS = 4
"""Steps of an answer from which on its later half shows its speed."""


class Stream:
    """A batch of answers that is decoded step by step. Its clock stands still in between.

    Args:
        decoding: a session with prompts, or standard decoding, before the first step.

    Attributes:
        num_tokens: new tokens of all rows so far.
        is_over: whether no row is live.
    """

    def __init__(self, decoding: Session | StandardDecoding) -> None:
        self._decoding = decoding
        self.num_tokens = 0
        self.is_over = False

    def step(self) -> None:
        """Run one round, or one step of standard decoding."""
        decoding = self._decoding
        decoding.timer.resume()
        if isinstance(decoding, Session):
            events = decoding.step()
            self.num_tokens += sum(len(tokens) for _, tokens in events)
            self.is_over = not decoding.live
        else:
            has_more = decoding.step()
            self.num_tokens = sum(row.num_new for row in decoding.rows)
            self.is_over = not has_more
        decoding.timer.pause()

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of the models."""
        if isinstance(self._decoding, Session):
            return state_bytes(self._decoding.states)
        return state_bytes(self._decoding.state)

    @property
    def seconds(self) -> float:
        """Seconds of all steps so far, and of opening."""
        return self._decoding.timer.elapsed()

    def result(self) -> DecodeResult:
        """The result so far."""
        return self._decoding.result()


class WholeStream(Stream):
    """A batch of answers that is decoded in a single step, as transformers decodes it."""

    def __init__(self, decode: Callable[[], DecodeResult]) -> None:
        self._decode = decode
        self._result: DecodeResult | None = None
        self.num_tokens = 0
        self.is_over = False

    def step(self) -> None:
        """Decode the whole batch."""
        self._result = self._decode()
        self.num_tokens = self._result.num_new_tokens
        self.is_over = True

    @property
    def num_bytes(self) -> int:
        """Nothing is in memory between two steps."""
        return 0

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return 0.0 if self._result is None else self._result.seconds

    def result(self) -> DecodeResult:
        """The result of the step."""
        assert self._result is not None
        return self._result


class _Answer:
    """One batch of answers on a tape, and its clock after each step."""

    def __init__(self, stream: Stream) -> None:
        self.stream: Stream | None = stream
        self.is_over = False
        self._finished: DecodeResult | None = None
        self.tokens_by_step = [0]
        self.seconds_by_step = [0.0]

    @property
    def num_tokens(self) -> int:
        return self.tokens_by_step[-1]

    @property
    def seconds(self) -> float:
        return self.seconds_by_step[-1]

    def step(self) -> None:
        assert self.stream is not None
        self.stream.step()
        self.tokens_by_step.append(self.stream.num_tokens)
        self.seconds_by_step.append(self.stream.seconds)
        if self.stream.is_over:
            self.is_over = True
            self.close()

    def close(self) -> None:
        """Keep the result and free the states of the models."""
        if self.stream is not None:
            self._finished = self.stream.result()
            self.stream = None

    def result(self) -> DecodeResult:
        if self._finished is not None:
            return self._finished
        assert self.stream is not None
        return self.stream.result()

    def expected_seconds(self, max_tokens: int) -> float:
        """Seconds of an answer at the speed of its later steps."""
        num_steps = len(self.seconds_by_step) - 1
        if num_steps < MIN_STEPS:
            return self.seconds * (1.0 if self.is_over else max_tokens / max(1, self.num_tokens))
        start = num_steps // 2
        num_tokens = self.num_tokens - self.tokens_by_step[start]
        seconds = self.seconds - self.seconds_by_step[start]
        expected_tokens = self.num_tokens if self.is_over else max_tokens
        return seconds / max(1, num_tokens) * expected_tokens

    def seconds_until(self, num_tokens: int) -> float | None:
        """Seconds until that many tokens were there; None if they are not there.

        Several rows get a token each per step. Between steps, the time is linear.
        """
        if num_tokens > self.num_tokens:
            return None
        index = bisect_left(self.tokens_by_step, num_tokens)
        tokens_after = self.tokens_by_step[index]
        seconds_after = self.seconds_by_step[index]
        if tokens_after == num_tokens:
            return seconds_after
        tokens_before = self.tokens_by_step[index - 1]
        seconds_before = self.seconds_by_step[index - 1]
        share = (num_tokens - tokens_before) / (tokens_after - tokens_before)
        return seconds_before + share * (seconds_after - seconds_before)


@dataclass(frozen=True)
class Segment:
    """Tokens from `start` to `end` of one answer, and the seconds that they took."""

    answer: int
    start: int
    end: int
    seconds: float


Piece = tuple[Segment, ...]
"""What a method decoded in one turn; it may end one answer and begin the next."""


class Tape:
    """The answers that one method decodes in turns, one after the other.

    Args:
        open_answer: opens the stream of an answer by its number.
        num_answers: how many there are; None for no end.
        whole_answers: whether a turn lasts until its answer ends. On a GPU, where a round is
            launched before the last one has been read, time inside an answer cannot be assigned.

    Attributes:
        whole_answers: as the argument; it may change between two turns.
        pieces: the piece of each turn, empty for a turn without a step.
    """

    def __init__(
        self,
        open_answer: Callable[[int], Stream],
        *,
        num_answers: int | None = None,
        whole_answers: bool = False,
    ) -> None:
        self._open_answer = open_answer
        self._num_answers = num_answers
        self.whole_answers = whole_answers
        self._answers: list[_Answer] = []
        self._is_abandoned = False
        self._num_tokens_before = 0
        self.pieces: list[Piece] = []

    @property
    def is_over(self) -> bool:
        """Whether all answers have ended, or the tape was abandoned."""
        if self._is_abandoned:
            return True
        has_opened_all = len(self._answers) == self._num_answers
        return has_opened_all and self._answers[-1].is_over

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers so far."""
        if not self._answers:
            return 0
        return self._num_tokens_before + self._answers[-1].num_tokens

    @property
    def seconds(self) -> float:
        """Seconds of all answers so far."""
        return sum(answer.seconds for answer in self._answers)

    def expected_seconds(self, max_tokens: int) -> float | None:
        """Seconds of all answers at the speed of those so far; None if it is not known yet.

        The first steps of a method may include work that happens once. The first answer is
        therefore left out as soon as a second one has ended, and before that its first steps.

        Args:
            max_tokens: new tokens of an answer if it does not end early.
        """
        if self._num_answers is None or not self._answers:
            return None
        if self.is_over and self._num_answers == 1:
            return self.seconds
        later_answers = [answer for answer in self._answers[1:] if answer.is_over]
        if later_answers:
            later_seconds = sum(answer.seconds for answer in later_answers)
            return self._num_answers * later_seconds / len(later_answers)
        return self._num_answers * self._answers[0].expected_seconds(max_tokens)

    @property
    def num_begun(self) -> int:
        """Answers that have begun, those that have ended included."""
        return len(self._answers)

    def end_after(self, num_answers: int) -> None:
        """Begin no answer beyond this number of them, at least as many as have begun."""
        self._num_answers = num_answers

    def run_piece(self, goal: int) -> None:
        """Decode until the tape has `goal` tokens, and append the piece."""
        segments: list[Segment] = []
        with _no_collection():
            while self.num_tokens < goal and not self.is_over:
                segments.append(self._run_segment(goal))
        self.pieces.append(tuple(segments))

    def _run_segment(self, goal: int) -> Segment:
        """Decode until the goal is reached or the answer ends."""
        if not self._answers or self._answers[-1].is_over:
            self._num_tokens_before = self.num_tokens
            self._answers.append(_Answer(self._open_answer(len(self._answers))))

        answer = self._answers[-1]
        start = answer.num_tokens
        start_seconds = answer.seconds
        while not answer.is_over:
            answer.step()
            if not self.whole_answers and self.num_tokens >= goal:
                break
        return Segment(
            answer=len(self._answers) - 1,
            start=start,
            end=answer.num_tokens,
            seconds=answer.seconds - start_seconds,
        )

    def seconds_of(self, segment: Segment) -> float | None:
        """Seconds of this tape for the tokens of another tape's segment; None if unknown.

        They are unknown if this tape is not there yet, or if its answer ended before: other methods
        may generate other texts, by sampling or by rounding.
        """
        if segment.answer >= len(self._answers):
            return None
        answer = self._answers[segment.answer]
        is_whole_answer = segment.start == 0
        if answer.is_over and is_whole_answer and 0 < answer.num_tokens < segment.end:
            # The other text is longer: the time is that for equally many tokens.
            return answer.seconds * segment.end / answer.num_tokens
        end_seconds = answer.seconds_until(segment.end)
        start_seconds = answer.seconds_until(segment.start)
        if end_seconds is None or start_seconds is None:
            return None
        return end_seconds - start_seconds

    def close(self) -> None:
        """End the tape within its answer, and free the states of the models."""
        if self._answers:
            self._answers[-1].close()

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of the answer that has begun; 0 if none has."""
        if not self._answers or self._answers[-1].stream is None:
            return 0
        return self._answers[-1].stream.num_bytes

    def abandon(self) -> None:
        """Forget all answers of a method that has failed, and free the states of the models."""
        self._is_abandoned = True
        self._answers.clear()

    def results(self) -> list[DecodeResult]:
        """The results of all answers so far; the last one may not have ended."""
        return [answer.result() for answer in self._answers]


def pairs_by_turn(standard: Tape, tape: Tape) -> dict[int, Pair]:
    """Seconds of standard decoding and of another method for each piece of that method.

    Turns without a piece, or whose text standard decoding has not reached, are left out.
    """
    pairs = {}
    for turn, piece in enumerate(tape.pieces):
        pair = pair_of(standard, piece)
        if pair is not None:
            pairs[turn] = pair
    return pairs


def pair_of(standard: Tape, piece: Piece) -> Pair | None:
    standard_seconds = 0.0
    seconds = 0.0
    for segment in piece:
        segment_seconds = standard.seconds_of(segment)
        if segment_seconds is None:
            return None
        standard_seconds += segment_seconds
        seconds += segment.seconds
    if not standard_seconds or not seconds:
        return None
    return standard_seconds, seconds


def take_turns(
    tapes: Sequence[Tape],
    *,
    piece_tokens: int,
    run_piece: Callable[[int, int], None] | None = None,
) -> Iterator[int]:
    """Run a piece of each tape in turn until all are over; yields the number of each turn.

    The order is reversed after each turn, so that no method always runs after the same one.

    Args:
        piece_tokens: new tokens of a piece.
        run_piece: runs a piece of the tape with this index up to this number of tokens; by default
            with `Tape.run_piece`.
    """
    goal = 0
    turn = 0
    indices = list(range(len(tapes)))
    while not all(tape.is_over for tape in tapes):
        goal += piece_tokens
        order = indices if turn % 2 == 0 else indices[::-1]
        for index in order:
            if run_piece is None:
                tapes[index].run_piece(goal)
            else:
                run_piece(index, goal)
        yield turn
        turn += 1


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: it would be charged to whichever method happens to run."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
