"""Ways to decode that take turns, as the race of a tournament."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from lightning_specdec.bench.measure import FAILURES, Case
from lightning_specdec.bench.pieces import Tape, pair_of
from lightning_specdec.bench.statistics import Pair
from lightning_specdec.bench.tournament import Race
from lightning_specdec.bench.ways import Way
from lightning_specdec.config.terminal import one_line
from lightning_specdec.decoding import Window


@dataclass(eq=False)
class Entrant:
    """A way that is measured.

    Args:
        way: what a user would choose.
        case: how it decodes.
        races: those that it took part in.
    """

    way: Way
    case: Case
    races: list[MeasuredRace] = field(default_factory=list)

    @property
    def largest_window(self) -> int:
        """Most draft tokens of a round."""
        window = self.case.config.num_draft_tokens
        if isinstance(window, Window):
            return window.largest
        return window if isinstance(window, int) else 0

    @property
    def pieces(self) -> list[Pair]:
        """Seconds of the default standard decoding and of this way for the same tokens."""
        pieces: list[Pair] = []
        for race in self.races:
            pieces += race.pairs(self.way.name).values()
        return pieces


class MeasuredRace(Race):
    """Ways that take turns beside standard decoding.

    Args:
        standard: standard decoding with the default engine.
        entrants: the ways.
        piece_tokens: new tokens of a turn.
        watch: called before each piece, which may take seconds.
    """

    def __init__(
        self,
        standard: Entrant,
        entrants: Sequence[Entrant],
        *,
        piece_tokens: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._watch = watch
        self.standard = standard
        self.entrants = {
            entrant.way.name: entrant for entrant in entrants if entrant is not standard
        }
        self.failed: dict[str, str] = {}
        self.piece_tokens = piece_tokens
        self.tapes: dict[str, Tape] = {}
        for name, entrant in {standard.way.name: standard, **self.entrants}.items():
            self.tapes[name] = entrant.case.tape(is_endless=True)
        self._pairs: dict[str, dict[int, Pair]] = {name: {} for name in self.tapes}
        self._goal = 0
        self._num_turns = 0
        # Standard decoding runs ahead by a round, so that it has timed the tokens of every piece.
        largest_window = max(entrant.largest_window for entrant in entrants)
        self._lead = standard.case.batch_size * (largest_window + 1)
        for entrant in self.entrants.values():
            entrant.races.append(self)

    def warm_up(self, seconds: float = math.inf, *, num_certain: int = 1) -> list[str]:
        """Run a piece of each way that does not count.

        A piece is not begun if it would not end in time, lasting as long as the longest so far.

        Args:
            seconds: how long that may take.
            num_certain: ways that are warmed up in any case.

        Returns:
            The ways that are warmed up. A turn of them takes about as long.
        """
        deadline = time.monotonic() + seconds
        longest_seconds = 0.0
        names: list[str] = []
        for name, entrant in {self.standard.way.name: self.standard, **self.entrants}.items():
            started = time.monotonic()
            if len(names) > num_certain and started + longest_seconds > deadline:
                break
            self._watch()
            with self._failing(entrant):
                _run_piece(entrant, entrant.case.tape(), self.piece_tokens)
                names.append(name)
            longest_seconds = max(longest_seconds, time.monotonic() - started)
        return names[1:]

    def run_turn(self, names: Sequence[str]) -> None:
        self._goal += self.piece_tokens
        order = [self.standard.way.name, *names]
        # Reversed after each turn, so that no way always runs after the same one.
        if self._num_turns % 2:
            order.reverse()
        for name in order:
            entrant = self.entrants.get(name, self.standard)
            if name not in self.failed:
                goal = self._goal
                if entrant is self.standard:
                    goal += self._lead
                self._watch()
                with self._failing(entrant):
                    _run_piece(entrant, self.tapes[name], goal)
        self._num_turns += 1
        for name in self.tapes.keys() - set(order):
            # It is measured no more, and its states need memory.
            self.tapes[name].close()

    @contextmanager
    def _failing(self, entrant: Entrant) -> Iterator[None]:
        """Note a way that fails, unless it is the standard decoding that all others need."""
        try:
            yield
        except FAILURES as error:
            if entrant is self.standard:
                raise
            self.failed[entrant.way.name] = one_line(error)

    def pairs(self, name: str) -> Mapping[int, Pair]:
        standard = self.tapes[self.standard.way.name]
        pairs = self._pairs[name]
        pieces = self.tapes[name].pieces
        last_turn = max(pairs, default=-1)
        for turn in range(last_turn + 1, len(pieces)):
            pair = pair_of(standard, pieces[turn])
            if pair is not None:
                pairs[turn] = pair
        return pairs

    def all_pairs(self, name: str) -> Sequence[Pair]:
        entrant = self.entrants.get(name)
        # Standard decoding is in every race and belongs to none.
        return list(self.pairs(name).values()) if entrant is None else entrant.pieces

    def same_tokens(self, name: str, other_name: str) -> bool:
        """Whether two ways generated the same tokens, as far as both have come."""
        answers = self.tapes[name].results()
        other_answers = self.tapes[other_name].results()
        for answer, other_answer in zip(answers, other_answers, strict=False):
            for tokens, other_tokens in zip(answer.tokens, other_answer.tokens, strict=True):
                length = min(len(tokens), len(other_tokens))
                if tokens[:length] != other_tokens[:length]:
                    return False
        return True


def _run_piece(entrant: Entrant, tape: Tape, goal: int) -> None:
    """Run a piece with the number of threads of its engine."""
    num_threads = entrant.way.engine.num_threads
    if num_threads is not None and num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    tape.run_piece(goal)
