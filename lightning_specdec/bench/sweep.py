"""Find the fastest way to decode a target on this machine: engines first, then drafts on the best.

Every way takes turns with the others and with standard decoding, on the same text. A tournament
decides which of them get more time. Drafts that were not trained for the target have to qualify
with one number of draft tokens. The best drafts are tried with `auto` last, since it has to be
measured what their calls cost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_specdec.bench.measure import FAILURES, Case, windows_of
from lightning_specdec.bench.pieces import PIECE_TOKENS
from lightning_specdec.bench.race import Entrant, MeasuredRace
from lightning_specdec.bench.records import SPECULATIVE, STANDARD, Comparison
from lightning_specdec.bench.scouts import Scout
from lightning_specdec.bench.statistics import may_be_as_high
from lightning_specdec.bench.tournament import FEWEST_TURNS, Tournament
from lightning_specdec.bench.verdict import Verdict, judge, level_among, ranked
from lightning_specdec.bench.ways import (
    LOOKUP,
    LOOKUP_NAME,
    MTP_NAME,
    NO_DRAFT,
    Drafting,
    Engine,
    Way,
)
from lightning_specdec.checkpoints import load_pair
from lightning_specdec.checkpoints.target_reference import dtype_of
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.models import PairSource
from lightning_specdec.config.terminal import one_line
from lightning_specdec.data.prompts import Prompt
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import merge_results
from lightning_specdec.decoding.requests import check_batch, check_eos
from lightning_specdec.drafters import Drafter
from lightning_specdec.models import LanguageModel

MIN_PIECE_SECONDS = 0.01
"""Pieces of a small model hold more tokens, so that their seconds can be measured."""
LEAST_SHARE = 0.2
"""Share of the time that must be left for drafts that have to qualify."""
LOADING_SHARE = 0.4
"""Share of the time after which no further engine is loaded."""
NO_TIME = "no time was left: give more --minutes"
ENGINE_SHARE = 0.25
"""Share of the time for choosing an engine, if there are several."""
QUALIFYING_SHARE = 0.25
"""Share of the rest in which drafts qualify, for those that load a model and for the others."""
MOST_QUALIFIED = 2
"""Drafts that qualify, of those that load a model and of the others."""
FINAL_SHARE = 0.3
"""Share of the rest for comparing the best drafts on the engines that are left, and `auto`."""
MOST_ENGINES = 2
"""Engines that the final compares."""
MOST_FINALISTS = 2
"""Drafts that the final compares."""
LOOKUP_WINDOW = 4
"""Draft tokens of the lookup by which engines are compared."""
WARM_UP_SHARE = 0.5
"""Share of a contest's time after which no further way enters: a turn takes as long as warming up.
"""
FEWEST_WARM_UP_SECONDS = 10.0
"""Time for warming up that a contest may take from those that follow, if it has a small share."""
OVERTIME_SECONDS = 10.0
"""Time after the end that the first contest may take, so that a sweep shows something."""
MEASURING_STEPS = 130
"""Steps of standard decoding that last about as long as measuring what the calls of a draft cost.
"""
_TARGET_ALONE = {"drafter": LOOKUP, **NO_DRAFT}
"""Fields of a source that loads a target and no draft."""


@dataclass(frozen=True)
class Progress:
    """What a sweep is doing.

    Args:
        step: in a few words.
        num_left: ways that may still win.
        seconds_left: until the answer.
        leader: the way that leads, with its verdict; empty before there is one.
    """

    step: str
    num_left: int
    seconds_left: float
    leader: str = ""


@dataclass(frozen=True)
class Standing:
    """What a sweep knows at a time.

    Args:
        winner: the way that the evidence favors; None before anything was measured, or if no way
            has the tokens of standard decoding.
        verdict: of the winner, as the best of all ways that were tried.
        equals: other ways that may be as fast as the winner.
        comparisons: the figures of all ways that were measured.
        remarks: by cell of a comparison, what became of that way.
        failed: ways and drafts that cannot be measured, and why.
    """

    winner: Way | None
    verdict: Verdict
    equals: tuple[Way, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    remarks: Mapping[Any, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        """Whether the winner is faster than standard decoding by more than noise."""
        return self.winner is not None and self.verdict.kind == "faster"

    def remark(self, comparison: Comparison) -> str:
        """The remark of a row of the table."""
        return self.remarks.get(comparison.case.cell, "")


class Sweep:
    """Finds the fastest way to decode a target.

    `run` may be interrupted by Ctrl-C; `standing` reports what is known by then.

    Args:
        decoder: has the target, loaded for the first engine.
        source: what loaded it.
        prompts: texts to decode, as tokens.
        config: how to decode.
        engines: what may compute the target. Every way is compared with standard decoding on the
            first one.
        kinds: the drafts to try.
        scouts: drafts that have to qualify first.
        windows: numbers of draft tokens to try, and "auto".
        seconds: until the answer.
        batch_size: prompts that are decoded together.
        watch: called with what is being done.

    Attributes:
        failed: ways and drafts that cannot be measured, and why.
        unavailable: engines that cannot be used here, and what there was no time for, and why.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        source: PairSource,
        prompts: Sequence[Sequence[int]],
        config: DecodingConfig,
        *,
        engines: Sequence[Engine],
        kinds: Sequence[Drafting],
        windows: Sequence[int | str],
        seconds: float,
        scouts: Sequence[Scout] = (),
        batch_size: int = 1,
        watch: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        batch = check_batch(prompts, decoder.target, config)
        check_eos(config.eos, decoder.target.vocab_size)
        if not kinds or not windows:
            raise ValueError("there is nothing to compare: give a draft and a number of tokens")
        self.decoder = decoder
        self.source = source
        self.config = config
        self.engines = list(engines)
        self.kinds = list(kinds)
        self.scouts = list(scouts)
        self.windows = list(windows)
        self.failed: dict[str, str] = {}
        self.unavailable = _unused_layers(decoder.target)
        self._entrants: dict[str, Entrant] = {}
        self._contests: list[Tournament] = []
        self._drafters: dict[tuple[Engine, str], Drafter] = {}
        self._decoders: dict[tuple[Any, ...], SpeculativeDecoder] = {}
        self._prompts = [Prompt(str(index), "", tuple(tokens)) for index, tokens in batch]
        self._batch_size = batch_size
        self._piece_tokens = PIECE_TOKENS * batch_size
        self._watch = watch
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._step_seconds = 0.0
        self._step = ""
        self._progress = Progress("", 0, seconds)
        self._longest_load = 0.0
        self._standard: Entrant | None = None

    # Running

    def run(self) -> None:
        """Measure until the time is over or the answer is clear."""
        previous_threads = torch.get_num_threads()
        try:
            with _threads(self.engines[0]):
                self._standard = self._standard_entrant(self.engines[0])
                self._choose_piece_size(self._standard.case)
            engines = self._choose_engines()
            self._choose_draft(engines)
        finally:
            torch.set_num_threads(previous_threads)

    @property
    def seconds_left(self) -> float:
        """Seconds until the answer."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def _working_seconds_left(self) -> float:
        """Seconds in which something may begin, overtime included if nothing was measured yet."""
        overtime = 0.0 if self._contests else OVERTIME_SECONDS
        return max(0.0, self._deadline + overtime - time.monotonic())

    def _choose_piece_size(self, standard: Case) -> None:
        """Make pieces of small models longer."""
        self._say("warming up")
        # The first answers only warm up. One prompt suffices: a large model takes seconds.
        case = replace(standard, prompts=standard.prompts[: self._batch_size])
        tape = case.tape(is_endless=True)
        started = time.monotonic()
        tape.run_piece(self._piece_tokens)
        if time.monotonic() - started < FEWEST_WARM_UP_SECONDS:
            tape.run_piece(2 * self._piece_tokens)
        seconds = sum(segment.seconds for segment in tape.pieces[-1])
        self._step_seconds = seconds * self._batch_size / self._piece_tokens
        if 0 < seconds < MIN_PIECE_SECONDS:
            self._piece_tokens = round(self._piece_tokens * MIN_PIECE_SECONDS / seconds)

    def _choose_engines(self) -> list[Engine]:
        """The engines that may be the fastest, the best first.

        An engine is dropped if both its standard decoding and its prompt lookup are proven slower
        than those of another one.
        """
        if len(self.engines) == 1:
            return self.engines
        entrants_by_engine = self._load_engines()
        if len(entrants_by_engine) == 1:
            return list(entrants_by_engine)
        all_entrants = []
        for entrants in entrants_by_engine.values():
            all_entrants += entrants
        contest = self._contest(all_entrants, "comparing engines", self.seconds_left * ENGINE_SHARE)
        assert contest is not None, "the first contest has overtime"
        left = list(entrants_by_engine)
        # A turn shows something in any case.
        while len(left) > 1 and contest.live and (contest.seconds_left or not contest.num_turns):
            contest.run_turn()
            self._report()
            if contest.num_turns >= FEWEST_TURNS:
                left = _engines_left(contest, entrants_by_engine)

        def best_speedup(engine: Engine) -> float:
            speedups = [contest.speedup(entrant.way.name) for entrant in entrants_by_engine[engine]]
            return max((speedup.value for speedup in speedups if speedup), default=0.0)

        return sorted(left, key=best_speedup, reverse=True)

    def _load_engines(self) -> dict[Engine, list[Entrant]]:
        """Standard decoding and prompt lookup in each engine for which there is time."""
        lookup = Drafting(LOOKUP_NAME, _TARGET_ALONE)
        entrants_by_engine: dict[Engine, list[Entrant]] = {}
        seconds = self.seconds_left
        for engine in self.engines:
            has_time = self.seconds_left > 0 and self.seconds_left >= (1 - LOADING_SHARE) * seconds
            if entrants_by_engine and not has_time:
                self.unavailable[engine.name] = NO_TIME
                continue
            self._say(f"loading the target in {engine.name}")
            entrants = self._load(engine, [lookup], [LOOKUP_WINDOW])
            if entrants:
                entrants_by_engine[engine] = entrants
        return entrants_by_engine

    def _choose_draft(self, engines: Sequence[Engine]) -> None:
        """Find the best draft on the best engine, then compare it on the engines that are left."""
        if not self.seconds_left and self._contests:
            # The comparison of engines took all of the time, and has an answer.
            untried = [kind.name for kind in self.kinds if kind.name != LOOKUP_NAME]
            untried += [scout.drafting.name for scout in self.scouts]
            self.unavailable.update(dict.fromkeys(untried, NO_TIME))
            return
        kinds = [*self.kinds, *self._qualified_kinds(engines[0])]
        fixed_windows, adaptive_windows = _by_kind(self.windows)
        has_final = len(engines) > 1 or bool(fixed_windows and adaptive_windows)
        share = 1 - FINAL_SHARE if has_final else 1.0
        entrants = self._load(engines[0], kinds, fixed_windows or adaptive_windows)
        contest = self._contest(entrants, "comparing drafts", self.seconds_left * share)
        if contest is None:
            return
        contest.run(self._report)
        if contest.leader is None or not has_final or not self.seconds_left:
            return

        finalists = self._load_finalists(contest, engines)
        num_drafted = sum(entrant.way.drafting is not None for entrant in finalists)
        if num_drafted > 1:
            final = self._contest(finalists, "the final", self.seconds_left)
            if final is not None:
                final.run(self._report)

    def _load_finalists(self, contest: Tournament, engines: Sequence[Engine]) -> list[Entrant]:
        """The best drafts of a contest, on the best engines and with `auto`, for the final."""
        fixed_windows, adaptive_windows = _by_kind(self.windows)
        finalists: list[Entrant] = []

        def add(engine: Engine, drafting: Drafting | None, windows: Sequence[int | str]) -> None:
            assert drafting is not None
            for entrant in self._load(engine, [drafting], windows):
                if entrant not in finalists:
                    finalists.append(entrant)

        for way in self._finalists(contest):
            assert way.num_draft_tokens is not None
            for engine in engines[:MOST_ENGINES]:
                add(engine, way.drafting, [way.num_draft_tokens])
        if fixed_windows:
            for way in self._finalists(contest):
                add(engines[0], way.drafting, adaptive_windows)
        return finalists

    def _qualified_kinds(self, engine: Engine) -> list[Drafting]:
        """The kinds of drafts that qualify, those that go with them included.

        Those that load a model come last, so that there is a first table early.
        """
        kinds: list[Drafting] = []
        for loads_model in (False, True):
            scouts = [scout for scout in self.scouts if scout.loads_model == loads_model]
            for scout in self._qualified(engine, scouts)[:MOST_QUALIFIED]:
                kinds += [scout.drafting, *scout.followers]
        return kinds

    def _qualified(self, engine: Engine, scouts: Sequence[Scout]) -> list[Scout]:
        """Those of these drafts that may pay, the fastest first."""
        names = ", ".join(scout.drafting.name for scout in scouts)
        if not scouts:
            return []
        if self.seconds_left < LEAST_SHARE * self._seconds or not self.seconds_left:
            self.unavailable[names] = NO_TIME
            return []

        end = self.seconds_left * (1 - QUALIFYING_SHARE)
        loading_end = self.seconds_left * (1 - QUALIFYING_SHARE / 2)
        lookup = Drafting(LOOKUP_NAME, _TARGET_ALONE)
        entrants = self._load(engine, [lookup], [LOOKUP_WINDOW])
        scouts_by_name = self._load_scouts(engine, scouts, entrants, loading_end)
        if not scouts_by_name:
            return []
        seconds = max(0.0, self.seconds_left - end)
        contest = self._contest(entrants, "looking for drafts that may pay", seconds)
        if contest is None:
            return []

        lookup_name = Way(engine, lookup, LOOKUP_WINDOW).name
        # A faster engine is no merit of the draft. The first engine's standard decoding is the
        # one that every speedup refers to.
        standard_name = None if engine == self.engines[0] else Way(engine).name
        rivals: dict[str, str | None] = {}
        for name, scout in scouts_by_name.items():
            # What there was no time to warm up does not take part.
            if name in contest.names:
                rivals[name] = lookup_name if scout.beats_lookup else standard_name
        return [scouts_by_name[name] for name in contest.qualify(rivals, self._report)]

    def _load_scouts(
        self,
        engine: Engine,
        scouts: Sequence[Scout],
        entrants: list[Entrant],
        loading_end: float,
    ) -> dict[str, Scout]:
        """Load drafts, and add their ways to the entrants. Returns the drafts by their ways' names.

        Args:
            loading_end: seconds before the answer after which no further draft is loaded.
        """
        scouts_by_name: dict[str, Scout] = {}
        for scout in scouts:
            if scouts_by_name and self.seconds_left < loading_end:
                self.unavailable[scout.drafting.name] = NO_TIME
                continue
            # One that cannot be loaded here was not asked for, so it is no failure.
            loaded = self._load(
                engine, [scout.drafting], [scout.num_draft_tokens], failures=self.unavailable
            )
            for entrant in loaded:
                if entrant not in entrants:
                    entrants.append(entrant)
                    scouts_by_name[entrant.way.name] = scout
        return scouts_by_name

    def _finalists(self, contest: Tournament) -> list[Way]:
        """The best ways of a contest, one for each draft."""
        assert contest.leader is not None
        finalists: list[Way] = []
        for name in [contest.leader, *contest.equals(contest.leader)]:
            way = self._entrants[name].way
            drafts = [finalist.drafting for finalist in finalists]
            if way.drafting is not None and way.drafting not in drafts:
                finalists.append(way)
        return finalists[:MOST_FINALISTS]

    def _contest(self, entrants: Sequence[Entrant], step: str, seconds: float) -> Tournament | None:
        """A tournament of these ways, which are warmed up.

        None if there is no time to warm up any of them, and others were measured.
        """
        assert self._standard is not None
        self._step = step
        race = MeasuredRace(
            self._standard, entrants, piece_tokens=self._piece_tokens, watch=self._repeat
        )
        self._say(f"{step}: warming up")
        started = time.monotonic()
        names = self._warm_up(race, seconds)
        seconds_for_turns = max(0.0, seconds - (time.monotonic() - started))
        self.failed.update(race.failed)
        for name in race.entrants:
            if name not in names and name not in race.failed:
                self.unavailable[self._shown_name(self._entrants[name].way)] = NO_TIME
        if not names and self._contests:
            return None
        if not names:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise ValueError(f"nothing can be measured: {reasons}")
        contest = Tournament(race, names, seconds=seconds_for_turns, clock=time.monotonic)
        self._contests.append(contest)
        return contest

    def _warm_up(self, race: MeasuredRace, seconds: float) -> list[str]:
        """Warm up the ways for which there is time, and for a turn, which takes as long.

        One way is warmed up in any case if nothing was measured yet.
        """
        left = self._working_seconds_left
        least_seconds = min(FEWEST_WARM_UP_SECONDS, WARM_UP_SHARE * left)
        warm_up_seconds = max(WARM_UP_SHARE * seconds, least_seconds)
        if not self._contests:
            return race.warm_up(warm_up_seconds)
        # Standard decoding and one way warm up, and take a turn.
        needed_seconds = 4 * self._step_seconds * self._piece_tokens / self._batch_size
        if left <= needed_seconds:
            return []
        return race.warm_up(warm_up_seconds, num_certain=0)

    def _shown_name(self, way: Way) -> str:
        """A way in a few words, with its engine if there are several."""
        return way.draft_name if len(self.engines) == 1 else way.name

    def _say(self, step: str) -> None:
        self._tell(Progress(step, len(self._entrants), self.seconds_left))

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        self._watch(progress)

    def _repeat(self) -> None:
        """Tell what is being done again, with the time that is left now."""
        self._watch(replace(self._progress, seconds_left=self.seconds_left))

    def _report(self) -> None:
        contest = self._contests[-1]
        self.failed.update(contest.race.failed)
        leader = contest.leader
        text = ""
        if leader is not None:
            name = self._shown_name(self._entrants[leader].way)
            text = f"{name}: {contest.verdict(leader).text}"
        self._tell(Progress(self._step, len(contest.live), self.seconds_left, text))

    # Loading

    def _load(
        self,
        engine: Engine,
        kinds: Sequence[Drafting],
        windows: Sequence[int | str],
        *,
        failures: dict[str, str] | None = None,
    ) -> list[Entrant]:
        """Standard decoding with an engine, and each draft with each window that it can fill.

        Args:
            failures: where what cannot be loaded is noted; `failed` if None.
        """
        if failures is None:
            failures = self.failed
        with _threads(engine):
            try:
                standard = self._standard_entrant(engine)
            except FAILURES as error:
                self.unavailable[engine.name] = one_line(error)
                return []
            drafted: list[Entrant] = []
            for kind in kinds:
                if kind.backend not in (None, engine.backend):
                    continue
                is_loaded = (engine, kind.name) in self._drafters
                has_time = self._working_seconds_left > self._longest_load
                if drafted and not is_loaded and not has_time:
                    self.unavailable[self._name_of_draft(kind, engine)] = NO_TIME
                    continue
                try:
                    drafted += self._drafted_entrants(standard, kind, windows)
                except FAILURES as error:
                    failures[self._name_of_draft(kind, engine)] = one_line(error)
        # If the time ends early, each draft has been tried with one number of tokens.
        windows_in_order = list(windows)
        drafted.sort(key=lambda entrant: _position(entrant.way.num_draft_tokens, windows_in_order))
        return [standard, *drafted]

    def _standard_entrant(self, engine: Engine) -> Entrant:
        """Standard decoding with an engine."""
        way = Way(engine)
        if way.name not in self._entrants:
            target, _ = self._decoder(engine).ready()
            case = Case(
                method=STANDARD,
                target=target,
                config=self.config,
                prompts=self._prompts,
                draft=None if engine == self.engines[0] else f"in {engine.name}",
                batch_size=self._batch_size,
            )
            self._entrants[way.name] = Entrant(way, case)
        return self._entrants[way.name]

    def _drafted_entrants(
        self,
        standard: Entrant,
        kind: Drafting,
        windows: Sequence[int | str],
    ) -> list[Entrant]:
        """A draft with each window that it can fill."""
        engine = standard.way.engine
        drafter = self._drafter(engine, kind)
        fixed_windows, adaptive_windows = _by_kind(windows)
        if adaptive_windows and not self._has_time_to_measure(standard, drafter):
            adaptive_windows = []
            self.unavailable[f"{kind.name}, auto draft tokens"] = NO_TIME
        entrants = []
        possible_windows: list[int | str] = [
            *windows_of(drafter.max_draft_tokens, fixed_windows),
            *adaptive_windows,
        ]
        for window in possible_windows:
            way = Way(engine, kind, window)
            if way.name not in self._entrants:
                if window == "auto":
                    self._say(f"measuring what the calls of {kind.name} cost")
                case = replace(
                    standard.case,
                    method=SPECULATIVE,
                    drafter=drafter,
                    draft=kind.name if len(self.engines) == 1 else f"{kind.name}, {engine.name}",
                    config=self.config.changed(num_draft_tokens=window),
                )
                self._entrants[way.name] = Entrant(way, case.prepared())
            entrants.append(self._entrants[way.name])
        return entrants

    def _has_time_to_measure(self, standard: Entrant, drafter: Drafter) -> bool:
        """Whether `auto` can be tried: the costs of calls are known, or there is time to measure.

        Without other numbers of draft tokens, they are measured in any case.
        """
        if all(isinstance(window, str) for window in self.windows):
            return True
        case = replace(standard.case, method=SPECULATIVE, drafter=drafter)
        seconds = MEASURING_STEPS * self._step_seconds
        return case.has_costs() or seconds < self.seconds_left / 2

    def _name_of_draft(self, kind: Drafting, engine: Engine) -> str:
        """A draft, with its engine if there are several."""
        return kind.name if len(self.engines) == 1 else f"{kind.name}, in {engine.name}"

    def _drafter(self, engine: Engine, kind: Drafting) -> Drafter:
        """A draft in the form that drafts for the target in an engine."""
        key = (engine, kind.name)
        if key not in self._drafters:
            self._say(f"loading {kind.name}")
            started = time.monotonic()
            decoder = self._decoder(engine)
            source = Way(engine, kind).source(self.source)
            drafter = load_pair(source, target=decoder.target).drafter
            _, self._drafters[key] = decoder.with_drafter(drafter).ready()
            self._longest_load = max(self._longest_load, time.monotonic() - started)
        return self._drafters[key]

    def _decoder(self, engine: Engine) -> SpeculativeDecoder:
        """A decoder of the target in an engine, loaded at the first use."""
        key = _loading_key(engine)
        if key == _loading_key(self.engines[0]):
            return self.decoder
        if key not in self._decoders:
            source = Way(engine).source(self.source).changed(**_TARGET_ALONE)
            self._decoders[key] = SpeculativeDecoder.load(source)
        return self._decoders[key]

    # Results

    @property
    def not_measured(self) -> dict[str, str]:
        """What is not in the table, and why, without what failed.

        A way that there was no time for in one contest may have been measured in another.
        """
        measured = set()
        for entrant in self._entrants.values():
            if entrant.pieces:
                measured.add(self._shown_name(entrant.way))
        return {name: text for name, text in self.unavailable.items() if name not in measured}

    @property
    def found(self) -> list[str]:
        """What was found without being named, and where."""
        kinds = [*self.kinds, *(scout.drafting for scout in self.scouts)]
        return list(dict.fromkeys(kind.found for kind in kinds if kind.found))

    def standing(self) -> Standing:
        """What is known so far."""
        measured = [
            entrant
            for entrant in self._entrants.values()
            if entrant is not self._standard and entrant.pieces
        ]
        comparisons = {entrant.way: self._comparison(entrant) for entrant in measured}
        winner = self._winner(comparisons)
        if winner is None:
            return Standing(
                None, judge(None, 0), comparisons=tuple(comparisons.values()), failed=self.failed
            )

        best = comparisons[winner]
        verdict = judge(best.walltime_speedup, best.num_pairs, level=best.level)
        equals = tuple(self._equals(winner, comparisons))
        remarks = {}
        for way, comparison in comparisons.items():
            remark = self._what_became_of(way)
            if verdict.kind == "faster":
                if way == winner:
                    remark = "<- best"
                elif way in equals:
                    remark = "<- may be as fast"
                elif not remark:
                    remark = _why_not_the_best(comparison)
            remarks[comparison.case.cell] = remark
        return Standing(winner, verdict, equals, tuple(comparisons.values()), remarks, self.failed)

    def _what_became_of(self, way: Way) -> str:
        """Why a way was measured no further; empty if it was measured to the end."""
        for contest in self._contests:
            rival = contest.slower.get(way.name)
            if rival is not None:
                if rival in self._entrants:
                    rival = self._shown_name(self._entrants[rival].way)
                return f"dropped: slower than {rival}"
        newest_contest = self._contests[-1]
        if way.name not in newest_contest.names or way.name in newest_contest.set_aside:
            return "measured no further"
        return ""

    def _winner(self, comparisons: Mapping[Way, Comparison]) -> Way | None:
        """The way that the pieces of all contests favor, of those that no other way beat."""
        right_ways = [way for way, row in comparisons.items() if self._is_right(row)]
        if not right_ways:
            return None
        right_names = {way.name for way in right_ways}
        unbeaten = [way for way in right_ways if not self._rivals_that_beat(way) & right_names]
        # Two ways may each have beaten the other in another contest.
        candidates = unbeaten or right_ways
        best_row = ranked([comparisons[way] for way in candidates])[0]
        return next(way for way in candidates if comparisons[way] is best_row)

    def _rivals_that_beat(self, way: Way) -> set[str]:
        """The names of what a way was dropped for."""
        return {
            contest.slower[way.name] for contest in self._contests if way.name in contest.slower
        }

    def _equals(self, winner: Way, comparisons: Mapping[Way, Comparison]) -> Iterator[Way]:
        """The other ways that may be as fast as the winner, the fastest first.

        What was dropped is not among them, nor what is proven slower in the turns of both.
        """
        winner_speedup = comparisons[winner].walltime_speedup
        ways_by_row = {id(comparison): way for way, comparison in comparisons.items()}
        for comparison in ranked(list(comparisons.values())):
            way = ways_by_row[id(comparison)]
            if way == winner or not self._is_right(comparison) or self._is_beaten(way, winner):
                continue
            if may_be_as_high(comparison.walltime_speedup, winner_speedup):
                yield way

    def _is_beaten(self, way: Way, winner: Way) -> bool:
        """Whether a way was dropped, or is proven slower than the winner in some contest."""
        if self._rivals_that_beat(way):
            return True
        for contest in self._contests:
            has_both = way.name in contest.names and winner.name in contest.names
            if has_both and contest.is_slower(way.name, winner.name):
                return True
        return False

    def _is_right(self, comparison: Comparison | None) -> bool:
        """Whether a way was measured and its tokens are standard decoding's, up to rounding."""
        if comparison is None or comparison.error is not None:
            return False
        return self.allows_rounding or comparison.same_tokens is not False

    @property
    def level(self) -> float:
        """The level of all intervals, since the best of several ways is chosen."""
        return level_among(len(self._entrants) - 1)

    @property
    def standard_tokens_per_second(self) -> float | None:
        """The speed of standard decoding on the first engine; None before it was measured.

        Ways are measured on different parts of the texts, so their own speeds do not compare.
        """
        num_tokens = 0
        seconds = 0.0
        for contest in self._contests:
            assert isinstance(contest.race, MeasuredRace)
            tape = contest.race.tapes[contest.race.standard.way.name]
            num_tokens += tape.num_tokens
            seconds += tape.seconds
        return num_tokens / seconds if seconds else None

    @property
    def allows_rounding(self) -> bool:
        """Whether the target's dtype is so coarse that near-ties may resolve differently."""
        return dtype_of(self.decoder.target) in (torch.bfloat16, torch.float16)

    def _comparison(self, entrant: Entrant) -> Comparison:
        """The figures of a way, beside those of standard decoding on the first engine."""
        assert self._standard is not None
        results = []
        standard_results = []
        for race in entrant.races:
            results += race.tapes[entrant.way.name].results()
            standard_results += race.tapes[self._standard.way.name].results()
        row = entrant.case.measured(0, merge_results(results), pieces=entrant.pieces)
        row = replace(row, same_tokens=self._same_tokens(entrant))
        standard_row = self._standard.case.measured(0, merge_results(standard_results))
        return Comparison(
            row,
            (row,),
            (standard_row,),
            self.failed.get(entrant.way.name),
            level=self.level,
        )

    def _same_tokens(self, entrant: Entrant) -> bool | None:
        """Whether a way generated the tokens of standard decoding on the same engine.

        None if they may differ, or if that did not run beside it.
        """
        if not entrant.case.keeps_tokens:
            return None
        standard_name = Way(entrant.way.engine).name
        checks = []
        for race in entrant.races:
            if standard_name in race.tapes:
                checks.append(race.same_tokens(entrant.way.name, standard_name))
        return all(checks) if checks else None


def _why_not_the_best(comparison: Comparison) -> str:
    """What a way lacks that was measured to the end, and cannot be as fast as the winner."""
    speedup = comparison.walltime_speedup
    if speedup is None or math.isnan(speedup.high):
        return "too few turns to tell"
    return "slower than the best"


def _unused_layers(target: LanguageModel) -> dict[str, str]:
    """Why the prediction layers of the target's checkpoint are not tried, if they cannot
    draft; by their name in tables."""
    if target.origin is None:
        return {}
    from lightning_specdec.models.mtp_files import unusable_layers

    reason = unusable_layers(target)
    return {} if reason is None else {MTP_NAME: reason}


def _by_kind(windows: Sequence[int | str]) -> tuple[list[int], list[str]]:
    """The numbers among windows, and "auto"."""
    fixed_windows = [window for window in windows if isinstance(window, int)]
    adaptive_windows = [window for window in windows if isinstance(window, str)]
    return fixed_windows, adaptive_windows


def _position(window: int | str | None, windows: Sequence[int | str]) -> int:
    """The place of a way's window among those that were asked for; smaller ones come first."""
    for index, possible_window in enumerate(windows):
        if possible_window == window:
            return index
    return 0


def _engines_left(
    contest: Tournament, entrants_by_engine: Mapping[Engine, Sequence[Entrant]]
) -> list[Engine]:
    """The engines that no other one beats in all of their ways."""
    left = []
    for engine, entrants in entrants_by_engine.items():
        is_beaten = False
        for other_engine, other_entrants in entrants_by_engine.items():
            if other_engine == engine:
                continue
            pairs = zip(entrants, other_entrants, strict=False)
            comparisons = [contest.is_slower(way.way.name, other.way.name) for way, other in pairs]
            is_beaten = is_beaten or all(comparisons)
        if not is_beaten:
            left.append(engine)
    return left


def _loading_key(engine: Engine) -> tuple[Any, ...]:
    """What a target is loaded again for. torch sets the number of threads at any time; OpenVINO
    compiles for one."""
    if engine.backend == "torch":
        return (engine.backend, engine.quantization)
    return (engine.backend, engine.quantization, engine.num_threads)


@contextmanager
def _threads(engine: Engine) -> Iterator[None]:
    """Use an engine's number of threads inside the block."""
    previous_threads = torch.get_num_threads()
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous_threads)
