"""Laws of a benchmark's analysis: figures are their formulas, predictions hold, what pays is advised."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_rows import MACHINE, NUM_NEW_TOKENS, Machine, Row, cells_of, drawn, manifest_of, report_of, row, speculative
from report_rows import standard as standard

from lightning_specdec.bench import theory
from lightning_specdec.bench.results import read
from lightning_specdec.bench.rows import Comparison, Timings, comparisons
from lightning_specdec.report.answer import Answer, answers, choice_of
from lightning_specdec.report.prediction import Prediction, predict

ROUNDS = [[(4, 4), (4, 0), (4, 2), *[(4, 4)] * 7, (3, 3)]] * 6
"""Of each of six prompts: 48 tokens in 11 rounds, 4 + 0 + 2 + 28 + 3 draft tokens accepted."""


def cell_of(rows: list[Row], method: str = "speculative") -> Comparison:
    return next(each for each in cells_of(rows) if each.case.method == method)


def timed(seconds: list[float], tokens: list[int], method: str = "standard", **values: Any) -> Row:
    """A run of prompts that took so long and gave so many tokens."""
    made = standard(**({"prompts": len(seconds)} | values)) | {"method": method}
    made |= {"prompt_seconds": seconds, "prompt_new_tokens": tokens}
    made |= {"draft": "draft", "rule": "ExactMatch", "lossless": True} if method == "speculative" else {}
    size = values.get("batch_size", 1)
    batches = [max(seconds[i : i + size]) for i in range(0, len(seconds), size)]
    return made | {"seconds": sum(batches), "num_new_tokens": sum(tokens)}


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
    alone = cell_of([each for each in rows if each["method"] == "standard" or each["repeat"] == 1])
    assert alone.timings is not None and len(alone.timings.standard) == 1


def test_what_a_run_takes_besides_its_prompts_counts() -> None:
    slow, plain = speculative(ROUNDS), standard()
    found = cell_of([plain, {**slow, "seconds": slow["seconds"] + 3.0}]).walltime_speedup
    assert found is not None and found.value == pytest.approx(plain["seconds"] / (slow["seconds"] + 3.0))


def test_a_shorter_text_is_not_a_faster_method() -> None:
    """Three prompts end after half of their rounds: as fast for each token, and so is the speedup."""
    plain, whole = standard(), speculative(ROUNDS)
    half = [each / 2 for each in whole["prompt_seconds"][:3]] + whole["prompt_seconds"][3:]
    short = {"prompt_seconds": half, "seconds": sum(half), "prompt_new_tokens": [24] * 3 + [48] * 3}
    for batch_size in (1, 3):
        here = [{**each, "batch_size": batch_size} for each in (plain, whole, {**whole, **short})]
        full, ended = (cell_of([here[0], each]).walltime_speedup for each in here[1:])
        assert full is not None and ended == pytest.approx(full)
    rows = [timed([4.0, 1.0], [40, 10]), timed([6.0, 1.0], [80, 10], "speculative")]
    found = cell_of(rows).walltime_speedup
    assert found is not None and found.value == pytest.approx((4 + 1) / (3 + 1)), "a longer text is scaled"


def test_a_short_text_and_a_last_batch_weigh_as_much_as_they_take() -> None:
    """Of the same tokens a speedup is seconds / seconds, however long each text is and however full each batch."""
    ending = [0.2 + 0.02 * (n - 1) for n in (*[64] * 7, 1)], [0.2 + 0.01 * (n - 1) for n in (*[64] * 7, 1)]
    ragged = [1.28] * 9, [*[1.6] * 8, 0.64]
    for (slow, fast), tokens, size in ((ending, [*[64] * 7, 1], 1), (ragged, [64] * 9, 8)):
        rows = [timed(slow, tokens, batch_size=size), timed(fast, tokens, "speculative", batch_size=size)]
        found = cell_of(rows).walltime_speedup
        assert found is not None and found.value == pytest.approx(rows[0]["seconds"] / rows[1]["seconds"])


@pytest.mark.parametrize("method", ["standard", "speculative"])
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
def test_what_gave_no_token_or_took_no_time_has_no_speed(method: str, nothing: dict[str, Any]) -> None:
    rows = [standard(), speculative(ROUNDS)]
    rows = [{**each, **nothing} if each["method"] == method else each for each in rows]
    (answer,) = report_of(rows, **manifest_of({("draft", "code"): 0.8})).answers
    speedup = cell_of(rows).walltime_speedup
    if "prompt_ids" in nothing or nothing.get("num_new_tokens") == 0 or nothing.get("seconds") == 0:
        assert speedup is None and answer.sentence.startswith("nothing to say: ")
    else:
        whole = cell_of([standard(), speculative(ROUNDS)]).walltime_speedup
        assert speedup is not None and whole is not None and speedup.value == pytest.approx(whole.value, rel=0.3)


def test_a_failed_repeat_is_shown_and_the_others_stay() -> None:
    cell = cell_of([standard(), speculative(ROUNDS), row(repeat=1, error="RuntimeError: no memory")])
    assert (cell.error, len(cell.rows)) == ("RuntimeError: no memory", 1)
    nothing = cell_of([standard(), row(error="no")])
    assert (nothing.walltime_speedup, nothing.acceptance_rate, nothing.phase_seconds) == (None, None, None)


# --- predictions ---


def independent(seed: int) -> Any:
    return drawn(0.8, 4, 100 + seed)


def predictions(rows: list[Row], manifest: dict[str, Any]) -> list[Prediction]:
    return [each for each in (predict(cell, manifest) for cell in cells_of(rows)) if isinstance(each, Prediction)]


def predicted(rounds: Any, machine: Machine = MACHINE, *, alpha: float = 0.8) -> Prediction:
    rows = [standard(), speculative([rounds(seed) for seed in range(6)], machine)]
    (found,) = predictions(rows, manifest_of({("draft", "code"): alpha}))
    return found


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
    measured = found.measured.walltime_speedup
    assert found.predicted == pytest.approx(by_hand) and measured is not None
    assert found.holds and found.deviation == pytest.approx(by_hand / measured.value - 1)
    dear = replace(MACHINE, more=0.004)
    rows = [standard(dear), speculative([independent(seed) for seed in range(6)], dear)]
    (found,) = predictions(rows, manifest_of({("draft", "code"): 0.8}, dear))
    assert found.holds and found.call_ratio == pytest.approx(1.8)


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


def test_a_prediction_is_for_texts_of_standard_decodings_length_and_by_medians() -> None:
    rounds = [independent(seed) for seed in range(6)]
    whole, manifest = speculative(rounds), manifest_of({("draft", "code"): 0.8})
    twice: dict[str, Any] = {name: [2 * n for n in whole[name]] for name in ("prompt_seconds", "prompt_new_tokens")}
    twice |= {name: 2 * whole[name] for name in ("seconds", "num_new_tokens", "num_proposed")}
    (one,), (other,) = (predictions([standard(), each], manifest) for each in (whole, {**whole, **twice}))
    assert other.predicted == one.predicted
    assert other.measured.walltime_speedup == pytest.approx(one.measured.walltime_speedup)
    rows = [standard(repeat=i) for i in range(3)]
    rows += [speculative(rounds, repeat=i, drift=drift) for i, drift in enumerate((1.0, 9.0, 1.0))]
    (found,) = predictions(rows, manifest)
    assert found.holds, "a repeat that something else slowed down"


def test_nothing_is_predicted_without_alpha_or_calls_or_for_batches() -> None:
    rows, manifest = [standard(), speculative(ROUNDS)], manifest_of({("draft", "code"): 0.8})
    large = [standard(batch_size=2), speculative(ROUNDS, batch_size=2)]
    untimed = manifest | {"calls": {"pair": {"draft_step_seconds": {}, "error": "too short a context"}}}
    for given, facts, why in (
        (rows, {}, "no isolated calls were timed"),
        (rows, untimed, "no isolated calls were timed: too short a context"),
        (rows, manifest_of({("draft", "other"): 0.8}), "no draft token was tested on other prompts"),
        (large, manifest, "isolated calls are of one row, not of a batch"),
        ([rows[0], rows[1] | {"num_draft_tokens": "auto"}], manifest, "the window adapts to what it meets"),
        (rows[1:], manifest, "there is no speedup to compare with"),
    ):
        assert report_of(given, **facts).without_prediction == [f"1 cell: {why}"]


# --- answers ---


def looked_up(alpha: float, domain: str, window: int = 4, **values: Any) -> Row:
    rounds = [drawn(alpha, window, seed) for seed in range(6)]
    named = {"draft": "ngram", "draft_kind": "NGramDrafter", "domain": domain}
    return speculative(rounds, replace(MACHINE, more=0.002), window=window, **{**named, **values})


def answer_of(rows: Sequence[Row], dtype: str | None = None) -> Answer:
    (found,) = answers(cells_of(rows), {"pair": dtype})
    return found


def test_the_answer_names_the_choice_its_speedup_and_where_it_is_off() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [looked_up(0.1, "code"), looked_up(0.9, "chat"), looked_up(0.9, "chat", 1), looked_up(0.1, "code", 1)]
    found = answer_of(rows)
    chat = next(each for each in cells_of(rows) if (each.case.domain, each.case.num_draft_tokens) == ("chat", 4))
    assert found.speedup is not None and found.speedup == pytest.approx(chat.walltime_speedup)
    value, low, high = found.speedup
    told = f"use ngram with window 4: {value:.2f}x [{low:.2f}, {high:.2f}]; do not speculate on code"
    assert found.sentence == told and [each.pays for each in found.domains] == [False, True]
    assert found.domains[0].best is not None and choice_of(found.domains[0].best) == "ngram with window 1"


def test_a_faster_choice_of_a_domain_is_named() -> None:
    rows = [standard(domain=domain) for domain in ("code", "chat")]
    rows += [
        looked_up(0.95, "chat", 8),
        looked_up(0.5, "chat", 1),
        looked_up(0.4, "code", 8),
        looked_up(0.4, "code", 1),
    ]
    sentence = answer_of(rows).sentence
    assert sentence.startswith("use ngram with window 8") and "; fastest on code: ngram with window 1, 1." in sentence


def test_where_nothing_pays_the_answer_is_not_to_speculate() -> None:
    found = answer_of([standard(), looked_up(0.02, "code")])
    assert found.choice is None and found.sentence.startswith("do not speculate: the best, ngram with window 4")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"lossless": False, "same_tokens": None}, "no lossless rule was measured"),
        ({"same_tokens": False}, "every lossless method gave other tokens than standard decoding"),
        ({"error": "no memory"}, "a run of every lossless method has failed"),
    ],
)
def test_what_changes_the_output_is_not_advised_and_the_answer_says_why(bad: dict[str, Any], why: str) -> None:
    alone = [standard(), looked_up(0.9, "code", **bad)]
    found = answer_of(alone, "float32")
    assert found.choice is None and found.sentence == f"nothing to say: {why}"
    found = answer_of([*alone, standard(domain="chat"), looked_up(0.9, "chat")])
    assert found.sentence.startswith("use ngram") and found.sentence.endswith("; nothing to say on code")


def test_what_is_missing_is_said() -> None:
    assert answer_of([looked_up(0.9, "code")]).sentence.endswith("no run of standard decoding has finished")
    assert answer_of([standard()]).sentence == "nothing to say: no speculation was measured"


def test_where_the_type_rounds_other_tokens_keep_a_lossless_method_advised() -> None:
    rows = [standard(), looked_up(0.9, "code", same_tokens=False), looked_up(0.5, "code", 1)]
    for dtype, window in (("bfloat16", 4), ("float16", 4), ("float32", 1), (None, 1)):
        found = answer_of(rows, dtype)
        assert found.choice is not None and found.choice.case.num_draft_tokens == window, dtype


def test_methods_that_gain_nothing_are_advised_in_one_run_of_twenty_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty methods whose prompts are as often slower as faster. At odds of 5%, more than 8 of 50 runs would advise
    one in 1 of 1,000 cases; where each method is judged as if it were alone, 21 do."""
    rng, advised = random.Random(0), 0
    cells = cells_of([standard(), *(looked_up(0.5, "code", window) for window in range(1, 21))])
    for _ in range(50):
        for cell in cells[1:]:
            ratios = [rng.lognormvariate(0, 0.15) for _ in range(4)]
            times = [[each * rng.lognormvariate(0, 0.01) for each in ratios] for _ in range(2)]
            made = {"timings": Timings([[1.0] * 4] * 2, times, 48.0)}
            for name in ("estimate", "walltime_speedup"):
                cell.__dict__.pop(name, None)
            cell.__dict__.update(made)
        advised += answers(cells, {})[0].choice is not None
    assert advised <= 8


@pytest.mark.parametrize(("batch_size", "unit"), [(1, "prompt"), (8, "batch")])
def test_a_single_prompt_or_batch_proves_nothing_however_often_it_is_run(batch_size: int, unit: str) -> None:
    prompts = 1 if batch_size == 1 else 8
    rows = [timed([2.0] * prompts, [48] * prompts, batch_size=batch_size, repeat=i) for i in range(5)]
    rows += [
        timed([1.0 + i / 100] * prompts, [48] * prompts, "speculative", batch_size=batch_size, repeat=i)
        for i in range(5)
    ]
    found = answer_of(rows)
    assert found.choice is None and found.sentence.startswith("do not speculate yet: the best, draft")
    assert found.sentence.endswith(f"on code, of one {unit} alone: measure several")
    assert f"2.00x (no interval) on code, of one {unit} alone" in answer_of([rows[0], rows[5]]).sentence


def test_a_cell_of_which_a_run_failed_is_not_advised() -> None:
    failed = looked_up(0.9, "code") | {"repeat": 2, "error": "no memory"}
    rows = [standard(repeat=i) for i in range(3)] + [looked_up(0.9, "code", repeat=i) for i in range(2)] + [failed]
    assert answer_of(rows).sentence == "nothing to say: a run of every lossless method has failed"
    found = answer_of([*rows, *(looked_up(0.8, "code", 2, repeat=i) for i in range(3))])
    assert found.choice is not None and found.choice.case.num_draft_tokens == 2


def test_a_faster_cell_that_may_not_pay_does_not_turn_a_proven_one_off() -> None:
    sure = looked_up(0.4, "code", 1)
    rounds = [drawn(alpha, 4, seed) for seed, alpha in enumerate((0.999, 0.999, 0.999, 0.999, 0.0, 0.0))]
    unsure = speculative(rounds, replace(MACHINE, more=0.002), draft="unsure")
    fast, slow = (cell_of([standard(), each]).walltime_speedup for each in (unsure, sure))
    assert fast is not None and slow is not None and fast.low < 1 < slow.low < slow.value < fast.value
    found = answer_of([standard(), sure, unsure])
    assert found.sentence.startswith("use ngram with window 1: ") and "do not" not in found.sentence


def both(method: str, speedups: dict[str, float], **values: Any) -> list[Row]:
    """Runs that are so many times as fast as standard decoding of 8 prompts, by domain."""
    return [timed([1 / each] * 8, [48] * 8, method, domain=domain, **values) for domain, each in speedups.items()]


def test_a_hugging_face_baseline_is_named_where_it_beats_the_choice() -> None:
    ours = [*both("standard", {"code": 1, "chat": 1}), *both("speculative", {"code": 2, "chat": 0.4})]
    for code, chat, named in ((1.3, 1.0, False), (1.7, 1.7, True), (1.3, 1.3, False), (3.0, 0.5, False)):
        found = answer_of([*ours, *both("prompt_lookup", {"code": code, "chat": chat})])
        assert found.sentence.endswith(": 2.00x [2.00, 2.00]; do not speculate on chat")
        assert bool(found.warning) == named, "ours takes 0.5 + 1 seconds of 2: off where it does not pay"
    found = answer_of([*ours, *both("prompt_lookup", {"code": 2.5})])
    assert found.warning == "faster than this: transformers' prompt_lookup, 2.50x [2.50, 2.50]"


def test_a_hugging_face_baseline_is_not_named_by_chance_nor_with_other_tokens() -> None:
    slow = [*both("standard", {"code": 1}), *both("speculative", {"code": 0.8})]
    (lucky,) = both("generate", {"code": 1})
    lucky |= {"prompt_seconds": [0.5] + [1.02] * 7, "seconds": 0.5 + 7.14}
    assert not answer_of([*slow, lucky]).warning, "above 1, and that may be chance"
    wrong = both("generate", {"code": 1.5})
    wrong[0]["same_tokens"] = False
    assert not answer_of([*slow, *wrong], "float32").warning
    assert answer_of([*slow, *wrong], "bfloat16").warning


def test_the_shipped_results_have_their_answers() -> None:
    bench = Path(__file__).parent.parent / "docs" / "results" / "bench"
    short, code = (answers(comparisons(read(bench / name).rows), {}) for name in ("rnn", "batches"))
    assert [each.domains[0].best and each.domains[0].best.case.num_draft_tokens for each in short] == [8, 8]
    assert all("do not speculate" in each.sentence for each in short)
    assert code[0].choice is not None and code[0].choice.case.draft == "ngram"


def test_a_summary_without_an_interval_is_json() -> None:
    found = cell_of([timed([2.0], [48]), timed([1.0], [48], "speculative")])
    assert found.walltime_speedup is not None and math.isnan(found.walltime_speedup.low)
    assert json.loads(json.dumps(found.summary(), allow_nan=False))["walltime_speedup_low"] is None
