"""Laws of a benchmark's analysis: known numbers come out, what broke a prediction is named, what pays is advised."""

import math
from dataclasses import replace
from typing import Any

import pytest
from report_rows import (
    MACHINE,
    NUM_NEW_TOKENS,
    Machine,
    Row,
    all_or_nothing,
    drawn,
    manifest_of,
    row,
    speculative,
    standard,
)

from lightning_specdec.bench import theory
from lightning_specdec.bench.report.advice import advise
from lightning_specdec.bench.report.analysis import Cell, cells_of
from lightning_specdec.bench.report.prediction import Prediction, predictions
from lightning_specdec.bench.report.round_costs import isolated_calls

ROUNDS = [[(4, 4), (4, 0), (4, 2), *[(4, 4)] * 7, (3, 3)]] * 6
"""Of each of six prompts: 48 tokens in 11 rounds, 4 + 0 + 2 + 28 + 3 guesses kept."""


def cell_of(rows: list[Row], way: str = "speculative") -> Cell:
    return next(cell for cell in cells_of(rows) if cell.way == way)


# --- figures ---


def test_figures_are_their_formulas() -> None:
    cell = cell_of([standard(), speculative(ROUNDS)])
    spent = 43 * MACHINE.guess + 11 * (MACHINE.wide(5) + MACHINE.overhead) + MACHINE.reading
    plain = 48 * (MACHINE.one + MACHINE.overhead) + MACHINE.reading
    assert cell.walltime_speedup is not None and cell.walltime_speedup == pytest.approx([plain / spent] * 3)
    assert cell.latency_reduction == pytest.approx(1 - spent / plain)
    assert cell.acceptance_rate == pytest.approx(37 / (4 + 1 + 3 + 28 + 3))
    assert cell.draft_utilization == pytest.approx(37 / 43)
    assert cell.block_efficiency == pytest.approx(48 / 11)
    assert cell.tokens_per_second == pytest.approx(48 / spent)
    assert cell.rates == pytest.approx([10 / 11, 1, 9 / 10, 1 - 0])
    assert cell.gap_percentiles is not None and cell.gap_percentiles[0] == 0  # most tokens come with another
    assert cell.time_to_first_token == pytest.approx(
        4 * MACHINE.guess + MACHINE.wide(5) + MACHINE.overhead + MACHINE.reading
    )
    assert sum((cell.phase_seconds or {}).values()) == pytest.approx(6 * spent)
    assert cell_of([standard()], "standard").block_efficiency == 1


def test_repeats_are_compared_with_the_one_beside_them() -> None:
    """A machine that drifts by a factor of three changes nothing, in whatever order the rows are read."""
    drifts = (1.0, 3.0, 0.7)
    rows = [standard(drift=drift, repeat=i) for i, drift in enumerate(drifts)]
    rows += [speculative(ROUNDS, drift=drift, repeat=i) for i, drift in enumerate(drifts)]
    still = cell_of([standard(), speculative(ROUNDS)]).walltime_speedup
    for order in (rows, rows[::-1]):
        speedup = cell_of(order).walltime_speedup
        assert speedup is not None and still is not None and speedup == pytest.approx([still.value] * 3)
    alone = cell_of([each for each in rows if each["way"] == "standard" or each["repeat"] == 1])
    assert alone.timings is not None and len(alone.timings[0]) == 1


def test_what_a_run_takes_besides_its_prompts_counts() -> None:
    slow = speculative(ROUNDS)
    plain = standard()
    expected = plain["seconds"] / (slow["seconds"] + 3.0)
    found = cell_of([plain, {**slow, "seconds": slow["seconds"] + 3.0}]).walltime_speedup
    assert found is not None and found.value == pytest.approx(expected)


def test_a_failed_repeat_is_shown_and_the_others_stay() -> None:
    rows = [standard(), speculative(ROUNDS), row(repeat=1, error="RuntimeError: no memory")]
    cell = cell_of(rows)
    assert (cell.error, len(cell.rows)) == ("RuntimeError: no memory", 1)
    nothing = cell_of([standard(), row(error="no")])
    figures = (nothing.walltime_speedup, nothing.acceptance_rate, nothing.phase_seconds, nothing.seconds)
    assert figures == (None, None, None, None)


def test_a_row_that_lacks_a_figure_is_refused_by_its_number() -> None:
    broken = speculative(ROUNDS)
    del broken["histogram"]
    with pytest.raises(ValueError, match="row 2 of the results has no histogram: measure again"):
        cells_of([standard(), broken])


# --- predictions ---


def predicted(rounds: Any, machine: Machine = MACHINE, *, alpha: float = 0.8, plain: Machine = MACHINE) -> Prediction:
    rows = [standard(plain), speculative([rounds(seed) for seed in range(6)], machine)]
    (found,) = predictions(cells_of(rows), manifest_of({("draft", "code"): alpha}))
    assert math.prod([found.predicted, *(step.factor for step in found.steps)]) == pytest.approx(found.measured.value)
    return found


def independent(seed: int) -> Any:
    return drawn(0.8, 4, 100 + seed)


def test_a_prediction_holds_where_all_assumptions_do() -> None:
    found = predicted(independent)
    calls = isolated_calls(manifest_of({("draft", "code"): 0.8}), "pair", "draft")
    assert calls is not None
    by_hand = theory.predicted_speedup(
        0.8,
        4,
        draft_step_seconds=MACHINE.guess,
        target_seconds=MACHINE.one,
        verify_seconds=MACHINE.wide(5),
        round_overhead_seconds=MACHINE.overhead,
        step_overhead_seconds=MACHINE.overhead,
        prompt_seconds=MACHINE.reading,
        num_new_tokens=NUM_NEW_TOKENS,
    )
    assert found.predicted == pytest.approx(by_hand)
    assert found.holds and found.verdict.startswith("holds") and found.broken == []
    assert calls.round_costs.speedup(0.8, 4) == pytest.approx(by_hand, rel=0.15)  # of an endless text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rounds": lambda seed: all_or_nothing(0.45, 4, seed), "alpha": 0.76}, "not independent between positions"),
        ({"rounds": independent, "machine": replace(MACHINE, more=0.004)}, "a call on 5 tokens is not as cheap"),
        ({"rounds": independent, "alpha": 0.5}, "right more often than on other prompts"),
        ({"rounds": independent, "machine": replace(MACHINE, guess=0.005)}, "a guess is not as cheap"),
        ({"rounds": independent, "machine": replace(MACHINE, overhead=0.02)}, "what a round does besides its calls"),
        ({"rounds": independent, "plain": replace(MACHINE, one=0.03)}, "standard decoding is slower than by itself"),
        (
            {"rounds": lambda seed: [(0, 0)] * 20 + [(4, 4)] * 5 + [(2, 2)], "alpha": 1.0},
            "do not guess whole windows",
        ),
    ],
)
def test_a_prediction_that_misses_names_the_assumption_that_broke(changes: dict[str, Any], reason: str) -> None:
    found = predicted(**changes)
    assert not found.holds
    assert reason in found.broken[0].told and reason in found.verdict


def test_the_textbook_is_told_off_where_wide_calls_are_dear() -> None:
    dear = replace(MACHINE, more=0.004)
    rows = [standard(dear), speculative([independent(seed) for seed in range(6)], dear)]
    (found,) = predictions(cells_of(rows), manifest_of({("draft", "code"): 0.8}, dear))
    assert found.holds and found.call_ratio == pytest.approx(1.8)
    assert "a call on 5 tokens costs 1.80 calls on one" in found.verdict


def test_nothing_is_predicted_without_alpha_or_calls_or_for_batches() -> None:
    rows = [standard(), speculative(ROUNDS)]
    assert predictions(cells_of(rows), {}) == []
    assert predictions(cells_of(rows), manifest_of({("draft", "other"): 0.8})) == []
    large = [standard(batch_size=2), speculative(ROUNDS, batch_size=2)]
    assert predictions(cells_of(large), manifest_of({("draft", "code"): 0.8})) == []


# --- advice ---


def looked_up(alpha: float, domain: str, window: int = 4, **values: Any) -> Row:
    rounds = [drawn(alpha, window, seed) for seed in range(6)]
    named = {"draft": "ngram", "draft_kind": "NGramDrafter", "domain": domain, "cell": f"{domain}-ngram-{window}"}
    return speculative(rounds, replace(MACHINE, more=0.002), window=window, **{**named, **values})


def test_the_answer_names_the_choice_its_speedup_and_where_it_is_off() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [looked_up(0.1, "code"), looked_up(0.9, "chat"), looked_up(0.9, "chat", 1), looked_up(0.1, "code", 1)]
    (found,) = advise(cells_of(rows))
    chat = next(cell for cell in cells_of(rows) if cell.domain == "chat" and cell.num_draft_tokens == 4)
    assert found.speedup is not None and chat.walltime_speedup is not None
    assert found.speedup == pytest.approx(chat.walltime_speedup)
    value, low, high = found.speedup
    assert found.sentence == (
        f"use n-gram look-up with 4 tokens: {value:.2f}x [{low:.2f}, {high:.2f}]; do not speculate on code"
    )
    assert [each.pays for each in found.domains] == [False, True]
    assert found.domains[0].choice == "off (best: n-gram look-up with 1 token)"


def test_where_nothing_pays_the_answer_is_not_to_speculate() -> None:
    (found,) = advise(cells_of([standard(), looked_up(0.02, "code")]))
    assert found.choice is None and found.sentence.startswith(
        "do not speculate: the best, n-gram look-up with 4 tokens"
    )
    (code,) = found.domains
    assert code.best is not None and code.break_even is not None
    assert (code.best.acceptance_rate or 0) < code.break_even


@pytest.mark.parametrize("bad", [{"lossless": False, "same_tokens": None}, {"same_tokens": False}])
def test_what_changes_the_output_is_not_advised(bad: dict[str, Any]) -> None:
    (found,) = advise(cells_of([standard(), looked_up(0.9, "code", **bad)]))
    assert found.choice is None and "no lossless speculative run" in found.sentence


def test_another_choice_is_named_where_it_is_surely_better() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [
        looked_up(0.95, "chat", 8),
        looked_up(0.5, "chat", 1),
        looked_up(0.4, "code", 8),
        looked_up(0.4, "code", 1),
    ]
    (found,) = advise(cells_of(rows))
    assert found.sentence.startswith("use n-gram look-up with 8 tokens")
    assert "; on code n-gram look-up with 1 token: 1." in found.sentence


def test_where_something_pays_a_faster_cell_that_may_not_pay_does_not_turn_it_off() -> None:
    sure = looked_up(0.4, "code", 1)
    rounds = [drawn(alpha, 4, seed) for seed, alpha in enumerate((0.999, 0.999, 0.999, 0.999, 0.0, 0.0))]
    named: dict[str, Any] = {"draft": "unsure", "draft_kind": "ModelDrafter", "domain": "code", "cell": "unsure"}
    unsure = speculative(rounds, replace(MACHINE, more=0.002), **named)
    fast, slow = (cell_of([standard(domain="code"), each]).walltime_speedup for each in (unsure, sure))
    assert fast is not None and slow is not None and fast.low < 1 < slow.low < slow.value < fast.value
    (found,) = advise(cells_of([standard(domain="code"), sure, unsure]))
    assert "use n-gram look-up with 1 token" in found.sentence and "do not" not in found.sentence
    assert found.domains[0].choice == "n-gram look-up with 1 token"


def test_what_would_help_is_what_theory_says_of_the_costs_in_place() -> None:
    dear = replace(MACHINE, guess=0.006)
    rows = [standard(dear), speculative([independent(seed) for seed in range(6)], dear)]
    (found,) = advise(cells_of(rows))
    helps = dict(found.domains[0].helps)
    measured = found.domains[0].best and found.domains[0].best.walltime_speedup
    assert measured and all(speedup > 1.03 * measured.value for speedup in helps.values())
    assert set(helps) >= {"a draft at half the cost", "a draft that is rejected half as often"}
    assert list(helps.values()) == sorted(helps.values(), reverse=True)


def test_transformers_own_way_is_named_where_it_is_faster() -> None:
    rows = [standard(), looked_up(0.5, "code"), standard(replace(MACHINE, one=0.004))]
    rows[2] |= {"way": "prompt_lookup", "cell": "theirs"}
    (found,) = advise(cells_of(rows))
    assert found.outside is not None and found.outside[0].way == "prompt_lookup"
    rows[2]["seconds"] *= 20
    assert advise(cells_of(rows))[0].outside is None
