"""Laws of a sweep's answer: the winner is the way that all that was measured favors, a way without
an interval takes nothing from one that is proven, and every row says what became of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_text_model
from tiny_sweep import sweep_of_two_engines

from lightning_specdec import SpeculativeDecoder
from lightning_specdec.bench.race import MeasuredRace
from lightning_specdec.bench.recommendation import python_lines
from lightning_specdec.bench.statistics import Pair
from lightning_specdec.bench.sweep import NO_TIME, OVERTIME_SECONDS, Standing, Sweep
from lightning_specdec.bench.tournament import Race, Tournament
from lightning_specdec.bench.ways import Engine, Way, draftings, reason_against_openvino
from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.config.models import PairSource

WIGGLE = (1.1, 0.9, 1.05, 0.95, 1.1, 0.9, 1.05, 0.95)


def steady(speedup: float) -> list[Pair]:
    """Eight pieces that show a speedup with an interval of about 10%."""
    return [(speedup * factor, 1.0) for factor in WIGGLE]


class ScriptedRace(Race):
    """Candidates whose pieces are written down, and a clock that counts turns.

    Args:
        earlier: pieces of earlier races.
        speedups: of each piece of this one.
    """

    def __init__(
        self, speedups: Mapping[str, float], earlier: Mapping[str, Sequence[Pair]]
    ) -> None:
        self.speedups = speedups
        self.earlier = earlier
        self.measured: dict[str, dict[int, Pair]] = {name: {} for name in speedups}
        self.num_turns = 0

    def run_turn(self, names: Sequence[str]) -> None:
        for name in names:
            self.measured[name][self.num_turns] = (self.speedups[name], 1.0)
        self.num_turns += 1

    def pairs(self, name: str) -> Mapping[int, Pair]:
        return self.measured[name]

    def all_pairs(self, name: str) -> Sequence[Pair]:
        return [*self.earlier.get(name, ()), *self.measured[name].values()]


def scripted(
    speedups: Mapping[str, float], earlier: Mapping[str, Sequence[Pair]], *, seconds: float
) -> Tournament:
    race = ScriptedRace(speedups, earlier)
    return Tournament(race, list(speedups), seconds=seconds, clock=lambda: race.num_turns)


def test_a_proven_way_is_not_set_aside_for_ways_without_an_interval() -> None:
    """Each stage lasts one turn, so that only the earlier pieces make an interval."""
    speedups = {"wild": 4.0, "wilder": 5.0, "proven": 1.6, "better": 2.0}
    earlier = {"proven": steady(1.6), "better": steady(2.0)}
    live_by_turn: list[list[str]] = []
    contest = scripted(speedups, earlier, seconds=2.0)
    contest.run(lambda: live_by_turn.append(list(contest.live)))
    assert live_by_turn[1] == ["proven", "better"]
    assert contest.leader == "better"


def test_without_any_interval_those_that_look_slowest_are_set_aside() -> None:
    contest = scripted({"slow": 0.5, "slower": 0.4, "fast": 2.0, "good": 1.8}, {}, seconds=2.0)
    contest.run()
    assert contest.set_aside == ["slow", "slower"]


def test_a_way_without_an_interval_may_be_as_fast_only_if_its_estimate_is_not_below() -> None:
    speedups = {"proven": 2.0, "low": 0.98, "lower": 0.74, "high": 2.9}
    contest = scripted(speedups, {"proven": steady(2.0)}, seconds=1.0)
    contest.run_turn()
    assert contest.equals("proven") == ["high"]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """A sweep whose contests are over: of two engines, and of drafts on the first one."""
    monkeypatch.setattr("lightning_specdec.bench.tournament.MOST_TURNS", 1)
    choose_engines = Sweep._choose_engines

    def first_engine(sweep: Sweep) -> list[Engine]:
        # A single turn does not show which of two engines is faster.
        choose_engines(sweep)
        return sweep.engines[:1]

    monkeypatch.setattr(Sweep, "_choose_engines", first_engine)
    write_text_model(tmp_path / "target")
    sweep = sweep_of_two_engines(
        str(tmp_path / "target"),
        windows=[2, 3, 8],
        seconds=600.0,
        prompt=(1, 2, 3, 1, 2),
        max_new_tokens=16,
    )
    sweep.run()
    return sweep


Script = Mapping[tuple[str, int | None, int], Iterable[Pair]]
"""By draft tokens and contest: `(engine, draft tokens, contest)`, the pieces."""


def replay(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, script: Script) -> Standing:
    """The standing of a sweep whose contests had these pieces."""
    races = [contest.race for contest in sweep._contests]

    def pairs(self: MeasuredRace, name: str) -> Mapping[int, Pair]:
        way = sweep._entrants[name].way
        key: Any = (way.engine.name, way.num_draft_tokens, races.index(self))
        return dict(enumerate(script.get(key, ())))

    monkeypatch.setattr(MeasuredRace, "pairs", pairs)
    for contest in sweep._contests:
        contest.slower.clear()
        contest.set_aside.clear()
        contest.live = list(contest.names)
    return sweep.standing()


ONE = "torch, 1 thread"
TWO = "torch, 2 threads"
PROVEN_EARLY: Script = {
    (ONE, 4, 0): steady(3.1),
    (TWO, None, 0): steady(1.8),
    (ONE, 2, 1): [(0.74, 1.0)],
    (ONE, 3, 1): [(0.98, 1.0)],
    (ONE, 8, 1): [(2.9, 1.0)],
}
"""Lookup with 4 draft tokens was proven in the first contest, and had no turn in the second."""


def remarks_by_window(standing: Standing) -> dict[Any, str]:
    remarks = {}
    for row in standing.comparisons:
        remarks[row.case.draft, row.case.num_draft_tokens] = standing.remark(row)
    return remarks


def test_the_winner_is_the_way_that_all_contests_favor(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    standing = replay(sweep, monkeypatch, PROVEN_EARLY)
    assert standing.is_proven
    assert standing.winner is not None
    assert standing.winner.num_draft_tokens == 4
    assert [way.num_draft_tokens for way in standing.equals] == [8]


def test_every_row_says_what_became_of_it(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = replay(sweep, monkeypatch, PROVEN_EARLY)
    lookup = f"prompt lookup, {ONE}"
    assert remarks_by_window(standing) == {
        (lookup, 4): "<- best",
        (f"in {TWO}", None): "measured no further",
        (lookup, 2): "too few turns to tell",
        (lookup, 3): "too few turns to tell",
        (lookup, 8): "<- may be as fast",
    }


def test_a_row_whose_interval_ends_below_the_best_is_slower(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Script = {(ONE, 2, 1): steady(1.5), (ONE, 3, 1): steady(3.0)}
    standing = replay(sweep, monkeypatch, script)
    lookup = f"prompt lookup, {ONE}"
    remarks = remarks_by_window(standing)
    assert remarks[lookup, 3] == "<- best"
    assert remarks[lookup, 2] == "slower than the best"


def test_a_dropped_row_says_which_way_beat_it(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(sweep, monkeypatch, PROVEN_EARLY)
    names = {way.num_draft_tokens: way.name for way in _ways(sweep) if way.engine.name == ONE}
    sweep._contests[1].slower[names[2]] = names[8]
    remarks = remarks_by_window(sweep.standing())
    expected = f"dropped: slower than prompt lookup, 8 draft tokens, in {ONE}"
    assert remarks[f"prompt lookup, {ONE}", 2] == expected


def test_a_way_that_was_dropped_for_a_better_one_does_not_win(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison of two ways is paired, so the intervals over standard decoding may overlap."""
    script: Script = {(ONE, 2, 1): steady(2.0), (ONE, 3, 1): steady(1.9)}
    replay(sweep, monkeypatch, script)
    names = {way.num_draft_tokens: way.name for way in _ways(sweep) if way.engine.name == ONE}
    sweep._contests[1].slower[names[2]] = names[3]
    winner = sweep.standing().winner
    assert winner is not None
    assert winner.num_draft_tokens == 3


def _ways(sweep: Sweep) -> list[Way]:
    return [entrant.way for entrant in sweep._entrants.values()]


def test_the_python_of_standard_decoding_decodes_without_a_draft(tmp_path: Path) -> None:
    write_text_model(tmp_path / "target")
    source = PairSource(target=str(tmp_path / "target"), backend="torch")
    lines = python_lines(Way(Engine("torch", 1)), source, threads=None, prompt="the cat")
    namespace: dict[str, Any] = {}
    exec(lines, namespace)
    assert 'result = decoder.decode_standard("the cat")' in lines
    assert namespace["result"].rows[0].tokens
    assert not namespace["result"].num_draft_calls


def test_openvino_that_is_not_tried_for_a_small_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text_model(tmp_path / "target")
    source = PairSource(target=str(tmp_path / "target"))
    target = SpeculativeDecoder.load(source).target

    def is_ready(device: Any, dtype: Any = None) -> None:
        return None

    def is_missing(device: Any, dtype: Any = None) -> None:
        raise ValueError("it is not installed")

    monkeypatch.setattr("lightning_specdec.bench.ways.check_openvino", is_ready)
    reason = reason_against_openvino(target, source)
    assert reason is not None
    assert reason.endswith("parameters: --backend openvino tries it")
    assert reason_against_openvino(target, source.changed(backend="torch")) is None
    monkeypatch.setattr("lightning_specdec.bench.ways.check_openvino", is_missing)
    assert reason_against_openvino(target, source) is None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the sweep goes by, on which each piece lasts 3 seconds."""
    now = [1000.0]

    def run_piece(entrant: Any, tape: Any, goal: int) -> None:
        now[0] += 3.0
        tape.run_piece(goal)

    monkeypatch.setattr("lightning_specdec.bench.race._run_piece", run_piece)
    for module in ("race", "sweep", "tournament"):
        monkeypatch.setattr(f"lightning_specdec.bench.{module}.time", FakeTime(now))
    return now


class FakeTime:
    """In place of the module `time`."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def monotonic(self) -> float:
        return self._now[0]


def make_sweep(directory: Path, seconds: float, **options: Any) -> Sweep:
    write_text_model(directory / "target")
    source = PairSource(target=str(directory / "target"), backend="torch")
    decoder = SpeculativeDecoder.load(source)
    return Sweep(
        decoder,
        source,
        [[1, 2, 3, 1, 2]],
        DecodingConfig(max_new_tokens=16),
        engines=[Engine("torch", 1)],
        kinds=draftings(decoder, source),
        windows=[2, 3, 4, 5, 6, 8],
        seconds=seconds,
        **options,
    )


def test_without_time_a_sweep_ends_after_one_short_turn(tmp_path: Path, now: list[float]) -> None:
    """Seven ways of 3 seconds each would warm up and take a turn for 42 seconds."""
    sweep = make_sweep(tmp_path, 0.0)
    sweep.run()
    assert now[0] - 1000.0 <= OVERTIME_SECONDS + 3.0
    assert sweep.standing().comparisons
    assert set(sweep.not_measured.values()) == {NO_TIME}


def test_a_warm_up_that_cannot_end_in_time_is_not_begun(tmp_path: Path, now: list[float]) -> None:
    """Of 30 seconds, 15 may warm up: five ways, standard decoding included."""
    sweep = make_sweep(tmp_path, 30.0)
    sweep.run()
    assert len(sweep.standing().comparisons) == 4
    assert len(sweep.not_measured) == 2
    assert now[0] <= 1030.0 + 5 * 3.0


def test_a_contest_for_which_there_is_no_time_is_not_begun(
    tmp_path: Path, now: list[float]
) -> None:
    sweep = make_sweep(tmp_path, 30.0)
    sweep.run()
    num_contests = len(sweep._contests)
    entrants = list(sweep._entrants.values())
    ended = now[0]
    assert sweep._contest(entrants, "the final", 1.0) is None
    assert len(sweep._contests) == num_contests
    assert now[0] == ended
    assert sweep.standing().winner is not None


def test_the_time_that_is_left_is_told_before_each_piece(tmp_path: Path, now: list[float]) -> None:
    seconds_left: list[float] = []
    sweep = make_sweep(
        tmp_path, 30.0, watch=lambda progress: seconds_left.append(progress.seconds_left)
    )
    sweep.run()
    steps = [earlier - later for earlier, later in pairwise(seconds_left)]
    assert max(steps) <= 3.0
