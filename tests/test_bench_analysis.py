"""Laws of a benchmark's analysis: known numbers come out, predictions hold, what pays is advised."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_rows import (
    MACHINE,
    NUM_NEW_TOKENS,
    Machine,
    Row,
    drawn,
    manifest_of,
    row,
    speculative,
    standard,
)

from lightning_specdec.bench import theory
from lightning_specdec.bench.compare import Comparison
from lightning_specdec.bench.report.advice import advise
from lightning_specdec.bench.report.analysis import MeasuredCell, cells_of
from lightning_specdec.bench.report.prediction import Prediction, predictions
from lightning_specdec.bench.report.report import Report
from lightning_specdec.bench.report.tables import best_table
from lightning_specdec.bench.results import Results, read
from lightning_specdec.bench.speed import Timings
from lightning_specdec.bench.statistics import Interval

ROUNDS = [[(4, 4), (4, 0), (4, 2), *[(4, 4)] * 7, (3, 3)]] * 6
"""Of each of six prompts: 48 tokens in 11 rounds, 4 + 0 + 2 + 28 + 3 guesses kept."""


def cell_of(rows: list[Row], way: str = "speculative") -> MeasuredCell:
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
    assert cell.tokens_per_second is not None and cell.tokens_per_second.value == pytest.approx(48 / spent)
    assert cell.rates == pytest.approx([10 / 11, 1, 9 / 10, 1 - 0])
    assert cell.gap_percentiles is not None and cell.gap_percentiles[0] == 0  # most tokens come with another
    first = 4 * MACHINE.guess + MACHINE.wide(5) + MACHINE.overhead + MACHINE.reading
    assert cell.time_to_first_token == pytest.approx([first] * 3)
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


def test_a_shorter_text_is_not_a_faster_way() -> None:
    """The way's first three prompts end after half of their rounds: as fast for each token, and so is the speedup."""
    plain, whole = standard(), speculative(ROUNDS)
    half = [each / 2 for each in whole["prompt_seconds"][:3]] + whole["prompt_seconds"][3:]
    short = {"prompt_seconds": half, "seconds": sum(half), "prompt_new_tokens": [24] * 3 + [48] * 3}
    for batch_size in (1, 3):
        here = [{**each, "batch_size": batch_size} for each in (plain, whole, {**whole, **short})]
        full, ended = (cell_of([here[0], each]).walltime_speedup for each in here[1:])
        assert full is not None and ended == pytest.approx(full)


def timed(seconds: list[float], tokens: list[int], way: str = "standard", **values: Any) -> Row:
    """A run of prompts that took so long and gave so many tokens."""
    named: dict[str, Any] = {"prompts": len(seconds), "cell": f"{way}-{values.get('domain')}"} | values
    made = standard(**named) | {"way": way, "prompt_seconds": seconds, "prompt_new_tokens": tokens}
    made |= {"draft": "draft", "rule": "ExactMatch", "lossless": True} if way == "speculative" else {}
    batch_size = values.get("batch_size", 1)
    batches = [max(seconds[i : i + batch_size]) for i in range(0, len(seconds), batch_size)]
    return made | {"seconds": sum(batches), "num_new_tokens": sum(tokens)}


def test_a_short_text_and_a_last_batch_weigh_as_much_as_they_take() -> None:
    """Of the same tokens a speedup is seconds / seconds, however long each text is and however full each batch."""
    ending = [0.2 + 0.02 * (n - 1) for n in (*[64] * 7, 1)], [0.2 + 0.01 * (n - 1) for n in (*[64] * 7, 1)]
    ragged = [1.28] * 9, [*[1.6] * 8, 0.64]
    for (slow, fast), tokens, size in ((ending, [*[64] * 7, 1], 1), (ragged, [64] * 9, 8)):
        rows = [timed(slow, tokens, batch_size=size), timed(fast, tokens, "speculative", batch_size=size)]
        found = cell_of(rows).walltime_speedup
        assert found is not None and found.value == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])


def test_a_longer_text_is_scaled_to_standard_decodings() -> None:
    """The first prompt's text is twice as long and took 1.5 times as long: 1.25 times as fast, where most time goes."""
    rows = [timed([4.0, 1.0], [40, 10]), timed([6.0, 1.0], [80, 10], "speculative")]
    found = cell_of(rows).walltime_speedup
    assert found is not None and found.value == pytest.approx((4 + 1) / (3 + 1))


@pytest.mark.parametrize("way", ["standard", "speculative"])
@pytest.mark.parametrize(
    "nothing",
    [
        {"num_new_tokens": 0, "prompt_new_tokens": [0] * 6},
        {"seconds": 0.0, "prompt_seconds": [0.0] * 6},
        {"prompt_new_tokens": [0] + [48] * 5},
        {"prompt_seconds": [0.0] + [1.0] * 5},
        {"num_prompts": 0, "num_new_tokens": 0, "prompt_seconds": [], "prompt_new_tokens": [], "prompt_ids": []},
    ],
    ids=["no tokens", "no seconds", "a prompt without tokens", "a prompt without seconds", "no prompts"],
)
def test_what_gave_no_token_or_took_no_time_has_no_speed(way: str, nothing: dict[str, Any]) -> None:
    rows = [standard(), speculative(ROUNDS)]
    rows = [{**each, **nothing} if each["way"] == way else each for each in rows]
    (answer,) = Report.of(Results(Path("made"), manifest_of({("draft", "code"): 0.8}), rows)).answers
    speedup = cell_of(rows).walltime_speedup
    if "prompt_ids" in nothing or nothing.get("num_new_tokens") == 0 or nothing.get("seconds") == 0:
        assert speedup is None and answer[1][0][1].startswith("nothing to say: no ")
    else:
        whole = cell_of([standard(), speculative(ROUNDS)]).walltime_speedup
        assert speedup is not None and whole is not None and speedup.value == pytest.approx(whole.value, rel=0.3)


def test_the_first_token_is_the_prompts_mean_of_the_repeats_medians() -> None:
    first = [[0.1, 0.5], [0.2, 0.7], [9.0, 0.6]]
    rows = [{**standard(prompts=2), "time_to_first_token": each, "repeat": i} for i, each in enumerate(first)]
    found = cell_of(rows, "standard").time_to_first_token
    assert found is not None and found.value == pytest.approx((0.2 + 0.6) / 2)
    assert found.low < found.value < found.high
    doubled = [
        {**each, "time_to_first_token": [t for t in each["time_to_first_token"] for _ in range(2)]} for each in rows
    ]
    batches = [{**each, "batch_size": 2, "cell": "batches"} for each in doubled]
    assert cell_of(batches, "standard").time_to_first_token == pytest.approx(found), "rows of a batch say one thing"


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


def test_a_prediction_is_for_texts_of_standard_decodings_length() -> None:
    """The way's texts are twice as long: so are its rounds and seconds, and no assumption breaks by that."""
    rounds = [independent(seed) for seed in range(6)]
    whole = speculative(rounds)
    twice: dict[str, Any] = {name: [2 * n for n in whole[name]] for name in ("prompt_seconds", "prompt_new_tokens")}
    twice |= {name: 2 * whole[name] for name in ("seconds", "num_new_tokens", "num_proposed")}
    twice["histogram"] = [2 * number for number in whole["histogram"]]
    manifest = manifest_of({("draft", "code"): 0.8})
    (one,), (other,) = (predictions(cells_of([standard(), each]), manifest) for each in (whole, {**whole, **twice}))
    assert other.predicted == one.predicted
    assert other.measured == pytest.approx(one.measured)


def predicted(rounds: Any, machine: Machine = MACHINE, *, alpha: float = 0.8) -> Prediction:
    rows = [standard(), speculative([rounds(seed) for seed in range(6)], machine)]
    (found,) = predictions(cells_of(rows), manifest_of({("draft", "code"): alpha}))
    return found


def independent(seed: int) -> Any:
    return drawn(0.8, 4, 100 + seed)


def test_a_prediction_holds_where_all_assumptions_do() -> None:
    found = predicted(independent)
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
    assert found.holds and found.deviation == pytest.approx(by_hand / found.measured.value - 1)


@pytest.mark.parametrize(
    ("changes", "too_much"),
    [
        ({"rounds": independent, "machine": replace(MACHINE, more=0.004)}, True),
        ({"rounds": independent, "alpha": 0.5}, False),
        ({"rounds": independent, "machine": replace(MACHINE, guess=0.005)}, True),
        ({"rounds": lambda seed: [(0, 0)] * 20 + [(4, 4)] * 5 + [(2, 2)], "alpha": 1.0}, True),
    ],
    ids=["dear wide calls", "worse on other prompts", "dear draft steps", "empty rounds"],
)
def test_a_prediction_misses_where_an_assumption_breaks(changes: dict[str, Any], too_much: bool) -> None:
    found = predicted(**changes)
    assert not found.holds and (found.deviation > 0) == too_much


def test_a_prediction_holds_where_wide_calls_are_as_dear_as_isolated_ones() -> None:
    dear = replace(MACHINE, more=0.004)
    rows = [standard(dear), speculative([independent(seed) for seed in range(6)], dear)]
    (found,) = predictions(cells_of(rows), manifest_of({("draft", "code"): 0.8}, dear))
    assert found.holds and found.call_ratio == pytest.approx(1.8)


def test_nothing_is_predicted_without_alpha_or_calls_or_for_batches() -> None:
    rows = [standard(), speculative(ROUNDS)]
    assert predictions(cells_of(rows), {}) == []
    assert predictions(cells_of(rows), manifest_of({("draft", "other"): 0.8})) == []
    large = [standard(batch_size=2), speculative(ROUNDS, batch_size=2)]
    assert predictions(cells_of(large), manifest_of({("draft", "code"): 0.8})) == []


def test_a_repeat_that_something_else_slowed_down_breaks_no_prediction() -> None:
    """The measured speedup goes by medians."""
    rounds = [independent(seed) for seed in range(6)]
    rows = [standard(repeat=i) for i in range(3)]
    rows += [speculative(rounds, repeat=i, drift=drift) for i, drift in enumerate((1.0, 9.0, 1.0))]
    (found,) = predictions(cells_of(rows), manifest_of({("draft", "code"): 0.8}))
    assert found.holds


# --- advice ---


def looked_up(alpha: float, domain: str, window: int = 4, **values: Any) -> Row:
    rounds = [drawn(alpha, window, seed) for seed in range(6)]
    named = {"draft": "ngram", "draft_kind": "NGramDrafter", "domain": domain, "cell": f"{domain}-ngram-{window}"}
    return speculative(rounds, replace(MACHINE, more=0.002), window=window, **{**named, **values})


def test_the_answer_names_the_choice_its_speedup_and_where_it_is_off() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [looked_up(0.1, "code"), looked_up(0.9, "chat"), looked_up(0.9, "chat", 1), looked_up(0.1, "code", 1)]
    (found,) = advise(cells_of(rows), {})
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
    (found,) = advise(cells_of([standard(), looked_up(0.02, "code")]), {})
    assert found.choice is None and found.sentence.startswith(
        "do not speculate: the best, n-gram look-up with 4 tokens"
    )
    (code,) = found.domains
    assert code.best is not None and code.break_even is not None
    assert (code.best.acceptance_rate or 0) < code.break_even


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"lossless": False, "same_tokens": None}, "no lossless rule was measured"),
        ({"same_tokens": False}, "every lossless method gave other tokens than standard decoding"),
        ({"error": "no memory"}, "no speculative run has finished"),
    ],
)
def test_what_changes_the_output_is_not_advised_and_the_answer_says_why(bad: dict[str, Any], why: str) -> None:
    alone = [standard(), looked_up(0.9, "code", **bad)]
    (found,) = advise(cells_of(alone), {"pair": "float32"})
    assert found.choice is None and found.sentence == f"nothing to say: {why}"
    assert found.domains[0].choice == f"nothing to say: {why}"
    (found,) = advise(cells_of([*alone, standard(domain="chat"), looked_up(0.9, "chat")]), {})
    assert found.sentence.startswith("use n-gram") and found.sentence.endswith("; nothing to say on code")
    (found,) = advise(cells_of([looked_up(0.9, "code")]), {})
    assert found.sentence == "nothing to say: no run of standard decoding has finished"
    (found,) = advise(cells_of([standard()]), {})
    assert found.sentence == "nothing to say: no speculation was measured"


def test_where_the_type_rounds_other_tokens_keep_a_lossless_way_advised() -> None:
    rows = [standard(), looked_up(0.9, "code", same_tokens=False), looked_up(0.5, "code", 1)]
    for dtype, window in (("bfloat16", 4), ("float16", 4), ("float32", 1), (None, 1)):
        (found,) = advise(cells_of(rows), {"pair": dtype})
        assert found.choice is not None and found.choice.num_draft_tokens == window, dtype


def test_ways_that_gain_nothing_are_advised_in_one_run_of_twenty_at_most() -> None:
    """Twenty ways whose prompts are as often slower as faster. At odds of 5%, more than 8 of 50 runs would advise one
    in 1 of 1,000 cases; where each way is judged as if it were alone, 21 do."""
    rng, advised = random.Random(0), 0
    plain = cell_of([standard(domain="code")], "standard")
    for _ in range(50):
        steps = [[1.0] * 4] * 2
        cells = [plain]
        for window in range(1, 21):
            ratios = [rng.lognormvariate(0, 0.15) for _ in range(4)]
            times = [[each * rng.lognormvariate(0, 0.01) for each in ratios] for _ in steps]
            way: dict[str, Any] = {
                "way": "speculative",
                "num_draft_tokens": window,
                "lossless": True,
                "timings": Timings(steps, times, 48.0),
            }
            cells.append(replace(plain, **way))
        advised += advise(cells, {})[0].choice is not None
    assert advised <= 8


@pytest.mark.parametrize(("batch_size", "unit"), [(1, "prompt"), (8, "batch")])
def test_a_single_prompt_or_batch_proves_nothing_however_often_it_is_run(batch_size: int, unit: str) -> None:
    prompts = 1 if batch_size == 1 else 8
    rows = [timed([2.0] * prompts, [48] * prompts, batch_size=batch_size, repeat=i) for i in range(5)]
    rows += [
        timed([1.0 + i / 100] * prompts, [48] * prompts, "speculative", batch_size=batch_size, repeat=i)
        for i in range(5)
    ]
    (found,) = advise(cells_of(rows), {})
    assert found.choice is None and found.sentence.startswith("do not speculate yet: the best, draft")
    assert found.sentence.endswith(f"on code, of one {unit} alone: measure several")
    (found,) = advise(cells_of([rows[0], rows[5]]), {})
    assert f"2.00x (no interval) on code, of one {unit} alone" in found.sentence


def test_a_cell_of_which_a_run_failed_is_not_advised() -> None:
    failed = looked_up(0.9, "code") | {"repeat": 2, "error": "no memory"}
    rows = [standard(repeat=i) for i in range(3)] + [looked_up(0.9, "code", repeat=i) for i in range(2)] + [failed]
    (found,) = advise(cells_of(rows), {})
    assert found.choice is None and found.sentence == "nothing to say: a run of every lossless method has failed"
    (found,) = advise(cells_of([*rows, *(looked_up(0.8, "code", 2, repeat=i) for i in range(3))]), {})
    assert found.choice is not None and found.choice.num_draft_tokens == 2


def test_where_there_are_several_rules_the_choice_names_its_own() -> None:
    other = looked_up(0.95, "code", rule="RejectionSampling", cell="other")
    (found,) = advise(cells_of([standard(), looked_up(0.5, "code"), other]), {})
    assert found.sentence.startswith("use n-gram look-up with 4 tokens under RejectionSampling: ")
    assert found.domains[0].choice == "n-gram look-up with 4 tokens under RejectionSampling"
    (found,) = advise(
        cells_of([standard(), looked_up(0.02, "code"), looked_up(0.01, "code", 4, rule="X", cell="x")]), {}
    )
    assert "n-gram look-up with 4 tokens under ExactMatch, gives" in found.sentence


def test_another_choice_is_named_where_the_intervals_do_not_touch() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [
        looked_up(0.95, "chat", 8),
        looked_up(0.5, "chat", 1),
        looked_up(0.4, "code", 8),
        looked_up(0.4, "code", 1),
    ]
    (found,) = advise(cells_of(rows), {})
    assert found.sentence.startswith("use n-gram look-up with 8 tokens")
    assert "; on code n-gram look-up with 1 token: 1." in found.sentence


def test_where_something_pays_a_faster_cell_that_may_not_pay_does_not_turn_it_off() -> None:
    sure = looked_up(0.4, "code", 1)
    rounds = [drawn(alpha, 4, seed) for seed, alpha in enumerate((0.999, 0.999, 0.999, 0.999, 0.0, 0.0))]
    named: dict[str, Any] = {"draft": "unsure", "draft_kind": "ModelDrafter", "domain": "code", "cell": "unsure"}
    unsure = speculative(rounds, replace(MACHINE, more=0.002), **named)
    fast, slow = (cell_of([standard(domain="code"), each]).walltime_speedup for each in (unsure, sure))
    assert fast is not None and slow is not None and fast.low < 1 < slow.low < slow.value < fast.value
    (found,) = advise(cells_of([standard(domain="code"), sure, unsure]), {})
    assert "use n-gram look-up with 1 token" in found.sentence and "do not" not in found.sentence
    domain = found.domains[0]
    assert domain.choice == "n-gram look-up with 1 token" and domain.bound is not None and domain.bound > 1
    assert domain.unproven is not None and domain.unproven.draft == "unsure"
    (table,) = best_table([found]).rows
    assert any(str(value).startswith("draft model unsure with 4 tokens: ") for value in table)


def test_what_would_help_is_what_theory_says_of_the_costs_in_place() -> None:
    dear = replace(MACHINE, guess=0.006)
    rows = [standard(dear), speculative([independent(seed) for seed in range(6)], dear)]
    (found,) = advise(cells_of(rows), {})
    helps = dict(found.domains[0].helps)
    measured = found.domains[0].best and found.domains[0].best.walltime_speedup
    assert measured and all(speedup > 1.03 * measured.value for speedup in helps.values())
    assert set(helps) >= {"a draft at half the cost", "a draft that is rejected half as often"}
    assert list(helps.values()) == sorted(helps.values(), reverse=True)


def test_where_windows_adapt_the_theory_is_that_of_the_fastest_fixed_one() -> None:
    rows = [standard(), looked_up(0.6, "code", 2), looked_up(0.6, "code", 8)]
    auto = looked_up(0.6, "code", 3, num_draft_tokens="auto", cell="auto")
    faster = {"seconds": auto["seconds"] / 2, "prompt_seconds": [each / 2 for each in auto["prompt_seconds"]]}
    fixed, best = (advise(cells_of([*rows, *more]), {})[0].domains[0] for more in ([], [{**auto, **faster}]))
    assert best.best is not None and best.best.num_draft_tokens == "auto"
    assert fixed.best is not None and fixed.best.num_draft_tokens == 2
    assert best.break_even == fixed.break_even is not None and best.window == fixed.window is not None
    speedup = best.best.walltime_speedup
    assert speedup is not None and all(value > 1.03 * speedup.value for _, value in best.helps)


def test_no_window_is_advised_that_the_draft_cannot_fill() -> None:
    """Heads that guess four tokens, beside a draft that was measured at eight."""
    sure = [drawn(0.95, 4, seed) for seed in range(6)]
    heads = speculative(sure, draft="heads", draft_kind="MultiTokenDrafter", cell="heads")
    (alone,) = advise(cells_of([standard(), heads]), {})
    (beside,) = advise(cells_of([standard(), heads, looked_up(0.1, "code", 8)]), {})
    assert (alone.domains[0].window or 0) > 4 == beside.domains[0].window
    assert any("longer window" in change for change, _ in alone.domains[0].helps)
    assert not any("longer window" in change for change, _ in beside.domains[0].helps)


def test_a_draft_that_seldom_guesses_has_no_closed_form() -> None:
    rounds = [[(4, 4) if place % 5 == 0 else (0, 0) for place in range(27)][:-1] + [(0, 0)] for _ in range(6)]
    seldom = [[*each[:19], *[(0, 0)] * 13] for each in rounds]
    row = speculative(seldom, draft="seldom", cell="seldom")
    (found,) = advise(cells_of([standard(), row]), {})
    assert found.domains[0].best is not None
    assert (found.domains[0].window, found.domains[0].break_even, found.domains[0].helps) == (None, None, ())


def test_texts_shorter_than_a_window_have_their_theory_and_look_up_has_none() -> None:
    """Seven tokens with a window of 8, and source code; of the shipped runs."""
    bench = Path(__file__).parent.parent / "docs" / "results" / "bench"
    short, code = (advise(cells_of(read(bench / name).rows), {}) for name in ("rnn", "batches"))
    assert [each.domains[0].best and each.domains[0].best.num_draft_tokens for each in short] == [8, 8]
    assert all(each.domains[0].window and each.domains[0].helps for each in short)
    assert code[0].choice is not None and code[0].choice.draft == "ngram"
    assert (code[0].domains[0].window, code[0].domains[0].helps) == (None, ())


def both(way: str, speedups: dict[str, float], **values: Any) -> list[Row]:
    """Runs that are so many times as fast as standard decoding of 8 prompts, by domain."""
    return [timed([1 / each] * 8, [48] * 8, way, domain=domain, **values) for domain, each in speedups.items()]


def test_transformers_own_way_is_named_where_it_beats_the_advice_over_all_domains() -> None:
    ours = [*both("standard", {"code": 1, "chat": 1}), *both("speculative", {"code": 2, "chat": 0.4})]
    for code, chat, named in ((1.3, 1.0, False), (1.7, 1.7, True), (1.3, 1.3, False), (3.0, 0.5, False)):
        rows = [*ours, *both("prompt_lookup", {"code": code, "chat": chat})]
        (found,) = advise(cells_of(rows), {})
        assert found.sentence.endswith(": 2.00x [2.00, 2.00]; do not speculate on chat")
        assert (found.outside is not None) == named, "ours takes 0.5 + 1 seconds of 2: off where it does not pay"
    rows = [*ours, *both("prompt_lookup", {"code": 2.5})]
    (answer,) = Report.of(Results(Path("made"), {"name": "made"}, rows)).answers
    told = "faster than that is transformers' prompt look-up on code: 2.50x [2.50, 2.50], where that gives 2.00x [2.00"
    assert answer[1][1][1].startswith(told)


def test_transformers_own_way_is_not_named_by_chance_nor_with_other_tokens() -> None:
    slow = [*both("standard", {"code": 1}), *both("speculative", {"code": 0.8})]
    (lucky,) = both("generate", {"code": 1})
    lucky |= {"prompt_seconds": [0.5] + [1.02] * 7, "seconds": 0.5 + 7.14}
    assert advise(cells_of([*slow, lucky]), {})[0].outside is None, "above 1, and that may be chance"
    wrong = both("generate", {"code": 1.5}, same_tokens=False)
    wrong[0]["same_tokens"] = False
    assert advise(cells_of([*slow, *wrong]), {"pair": "float32"})[0].outside is None
    assert advise(cells_of([*slow, *wrong]), {"pair": "bfloat16"})[0].outside is not None
    (answer,) = Report.of(Results(Path("made"), {"name": "made"}, [*slow, *both("generate", {"code": 1.5})])).answers
    assert answer[1][1][1] == "faster than standard decoding is transformers' generate: 1.50x [1.50, 1.50]"
    rolled = both("rolled", {"code": 1.5})
    assert advise(cells_of([*slow, *rolled]), {})[0].outside is None, "the target alone is ours"


def test_a_comparison_without_an_interval_is_json() -> None:
    cell: Any = SimpleNamespace(pair="p", domain="d", temperature=0.0, batch_size=1, label="a")
    for ratio, told in ((Interval(1.5, math.nan, math.nan), 1.5), (None, None)):
        found = Comparison((cell, cell), ([], []), ratio, same_tokens=True).to_dict()
        assert (found["ratio"], found["interval"]) == (told, [None, None])
        json.dumps(found, allow_nan=False)
