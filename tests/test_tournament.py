"""Laws of successive halving, on synthetic machines: the best stays, slow candidates lose their
time, and nothing is called faster that is not."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from synthetic_machine import Machine

from lightning_specdec.bench.statistics import Pair
from lightning_specdec.bench.tournament import Race, Tournament


class SyntheticRace(Race):
    """Candidates with known speedups on a machine that drifts.

    Args:
        speedups: by name, over standard decoding, whose pieces are a second of work.
        text_noise: how much the speedups vary with the text. Half of it is common to all.
    """

    def __init__(
        self,
        machine: Machine,
        speedups: Mapping[str, float],
        *,
        text_noise: float = 0.0,
    ) -> None:
        self.machine = machine
        self.speedups = speedups
        self.text_noise = text_noise
        self.num_turns = 0
        self.measured: dict[str, dict[int, Pair]] = defaultdict(dict)

    def run_turn(self, names: Sequence[str]) -> None:
        rng = self.machine.rng
        noise = self.text_noise / 2**0.5
        common_text = rng.lognormvariate(-(noise**2) / 2, noise)
        works = {"standard": 1.0}
        for name in names:
            text = common_text * rng.lognormvariate(-(noise**2) / 2, noise)
            works[name] = text / self.speedups[name]

        order = list(works) if self.num_turns % 2 == 0 else list(works)[::-1]
        seconds = {name: self.machine.run(works[name]) for name in order}
        for name in names:
            self.measured[name][self.num_turns] = (seconds["standard"], seconds[name])
        self.num_turns += 1

    def pairs(self, name: str) -> Mapping[int, Pair]:
        return self.measured[name]


def tournament(
    speedups: Mapping[str, float],
    *,
    seed: int = 0,
    seconds: float = 120.0,
    bursts: tuple[float, float, float] = (0.1, 2.0, 3.0),
    text_noise: float = 0.2,
) -> Tournament:
    """A tournament on a synthetic machine, whose clock is the machine's."""
    machine = Machine(random.Random(seed), *bursts)
    race = SyntheticRace(machine, speedups, text_noise=text_noise)
    return Tournament(race, list(speedups), seconds=seconds, clock=lambda: machine.now)


SPREAD = {f"speedup {value}": value for value in (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)}


@pytest.mark.quick_cases("bursts0")
@pytest.mark.parametrize("bursts", [(0.0, 1.0, 1.0), (0.1, 2.0, 3.0), (0.02, 10.0, 3.0)])
def test_the_fastest_is_found_and_slow_candidates_lose_their_time(
    bursts: tuple[float, float, float],
) -> None:
    """Among eight candidates, of which the second has three quarters of the speed of the best, the
    best one is the leader. At odds of 1 in 20 for another one, more than 6 of 40 would be in 1 of
    1,000 cases."""
    num_missed = 0
    for seed in range(40):
        contest = tournament(SPREAD, seed=seed, bursts=bursts)
        contest.run()
        num_missed += contest.leader != "speedup 2.0"
        turns_of_best = len(contest.race.pairs("speedup 2.0"))
        turns_of_worst = len(contest.race.pairs("speedup 0.5"))
        assert turns_of_worst <= turns_of_best
    assert num_missed <= 6


def test_the_fastest_is_hardly_ever_excluded() -> None:
    """Candidates that differ by 3%: the fastest need not lead, and is named as perhaps as fast.

    At odds of 1 in 20 for an exclusion, more than 6 of 40 would exclude it in 1 of 1,000 cases.
    """
    speedups = {f"{value}": value for value in (1.40, 1.44, 1.48, 1.52, 1.56)}
    num_excluded = 0
    for seed in range(40):
        contest = tournament(speedups, seed=seed)
        contest.run()
        leader = str(contest.leader)
        num_excluded += leader != "1.56" and "1.56" not in contest.equals(leader)
    assert num_excluded <= 6


@pytest.mark.quick_cases("12")
@pytest.mark.parametrize("num_candidates", [1, 12])
def test_nothing_is_called_faster_if_nothing_is(num_candidates: int) -> None:
    """With candidates of exactly standard decoding's speed.

    At odds of 5%, more than 9 of 60 would call one faster in 1 of 1,000 cases with other seeds.
    """
    speedups = {f"candidate {number}": 1.0 for number in range(num_candidates)}
    num_faster = 0
    for seed in range(60):
        contest = tournament(speedups, seed=seed, seconds=60.0)
        contest.run()
        num_faster += contest.verdict(str(contest.leader)).kind == "faster"
    assert num_faster <= 9


def test_a_clear_gain_is_proven() -> None:
    num_proven = 0
    for seed in range(20):
        contest = tournament(SPREAD, seed=seed)
        contest.run()
        num_proven += contest.verdict(str(contest.leader)).kind == "faster"
    assert num_proven >= 18


def test_it_ends_in_time_and_earlier_if_it_is_decided() -> None:
    contest = tournament(SPREAD, seconds=50.0, bursts=(0.0, 1.0, 1.0))
    contest.run()
    slowest_turn = 1 + sum(1 / speedup for speedup in SPREAD.values())
    assert contest.race.machine.now <= 50.0 + 2 * slowest_turn  # type: ignore[attr-defined]

    alone = tournament({"2": 2.0}, seconds=1e6, text_noise=0.0)
    alone.run()
    assert alone.seconds_left > 0.99e6


def test_each_stage_has_a_turn_on_a_slow_machine_and_none_runs_after_the_end() -> None:
    contest = tournament(SPREAD, seconds=0.001)
    contest.run()
    assert contest.num_turns == 1
    assert contest.live == list(SPREAD)


def test_half_of_the_candidates_go_on_after_each_stage() -> None:
    contest = tournament(SPREAD, seconds=90.0)
    num_live_by_turn: list[int] = []
    contest.run(lambda: num_live_by_turn.append(len(contest.live)))
    assert num_live_by_turn[0] == 8
    assert num_live_by_turn[-1] <= 2
    assert sorted([*contest.live, *contest.slower, *contest.set_aside]) == sorted(SPREAD)
    for leader in contest.slower.values():
        assert leader in SPREAD


def test_what_was_measured_before_ctrl_c_is_known() -> None:
    contest = tournament(SPREAD)

    def interrupt() -> None:
        if contest.num_turns == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contest.run(interrupt)
    speedup = contest.speedup(str(contest.leader))
    assert speedup is not None
    assert speedup.value > 1


def test_a_candidate_that_is_proven_slower_is_not_named_as_equal() -> None:
    contest = tournament({"fast": 2.0, "slow": 0.5}, bursts=(0.0, 1.0, 1.0), text_noise=0.0)
    contest.run()
    assert contest.leader == "fast"
    assert contest.slower == {"slow": "fast"}
    assert contest.equals("fast") == []


def test_a_candidate_that_fails_is_live_no_more() -> None:
    contest = tournament(SPREAD)
    race = contest.race
    race.failed = {"speedup 2.0": "no memory"}
    contest.run()
    assert contest.leader == "speedup 1.5"
    assert "speedup 2.0" not in contest.equals("speedup 1.5")

    race.failed = dict.fromkeys(SPREAD, "no memory")
    contest = Tournament(race, list(SPREAD), seconds=100.0)
    contest.run()
    assert contest.leader is None
    assert contest.num_turns == 1


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="there is no candidate"):
        tournament({})
