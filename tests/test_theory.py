"""Laws of the closed forms in bench/theory.py, and every worked number of docs/theory.md computed again.

The document marks what is worked with `<!-- worked: name -->` in front of a table or a fenced JSON block. A shown
number agrees with a computed one if it is that number rounded to the digits shown.
"""

import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec.bench import theory

DOCUMENT = (Path(__file__).parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")
WORKED = re.compile(r"<!-- worked: (\w+) -->\n((?:\|[^\n]*\n)+|```json\n.*?```)", re.DOTALL)
WORDS = ["the", "cat", "sat", "on", "mat"]
ALPHAS = [0.0, 0.3, 0.5, 0.8, 0.95, 1.0]
WINDOWS = [0, 1, 2, 3, 4, 8]


def blocks() -> dict[str, str]:
    """The text of each worked table or JSON block, by its name."""
    return dict(WORKED.findall(DOCUMENT))


def table(name: str) -> list[dict[str, str]]:
    """The rows of a worked table, each as a dict from column heading to cell."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in blocks()[name].splitlines())
    assert rows and all(len(row) == len(header) for row in rows), f"the table {name!r} is ragged or empty"
    return [dict(zip(header, row, strict=True)) for row in rows]


def block(name: str) -> dict[str, Any]:
    """A worked JSON block; its fractional numbers stay text, so that the digits shown are known."""
    return json.loads(blocks()[name].removeprefix("```json").removesuffix("```"), parse_float=str)


def value(shown: str | int) -> float:
    return float(str(shown).replace(",", ""))


def agrees(shown: str | int, computed: float) -> bool:
    decimals = len(str(shown).partition(".")[2])
    return abs(value(shown) - computed) <= 0.5 * 10**-decimals + 1e-9


def probs(name: str) -> list[list[float]]:
    return [[value(row[word]) for word in WORDS] for row in table(name)]


def inverse_transform(distribution: list[float], uniform: float) -> str:
    return next(word for word, total in zip(WORDS, itertools.accumulate(distribution), strict=True) if uniform < total)


def rejection_acceptance(draft_probs: list[float], target_probs: list[float]) -> float:
    return sum(map(min, draft_probs, target_probs))


def residual_mass(draft_probs: list[float], target_probs: list[float]) -> list[float]:
    return [max(0.0, target - draft) for draft, target in zip(draft_probs, target_probs, strict=True)]


# --- the closed forms ---


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_accepted_distribution_equals_a_sum_over_all_verdicts(alpha: float, num_draft_tokens: int) -> None:
    enumerated = [0.0] * (num_draft_tokens + 1)
    for verdicts in itertools.product([True, False], repeat=num_draft_tokens):
        num_accepted = (*verdicts, False).index(False)
        enumerated[num_accepted] += math.prod(alpha if kept else 1 - alpha for kept in verdicts)
    assert theory.accepted_distribution(alpha, num_draft_tokens) == pytest.approx(enumerated, abs=1e-12)


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_expected_tokens_is_the_mean_of_the_accepted_distribution_plus_one(alpha: float, num_draft_tokens: int) -> None:
    distribution = theory.accepted_distribution(alpha, num_draft_tokens)
    mean = sum(accepted * prob for accepted, prob in enumerate(distribution))
    assert math.fsum(distribution) == pytest.approx(1)
    assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(mean + 1)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.999])
def test_expected_tokens_is_equation_one_of_leviathan(alpha: float) -> None:
    for num_draft_tokens in WINDOWS:
        closed_form = (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(closed_form)


def test_expected_tokens_is_continuous_at_alpha_one() -> None:
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(1 - 1e-15, 4) == pytest.approx(5, abs=1e-12)


def rounds_by_enumeration(alpha: Fraction, num_draft_tokens: int, num_new_tokens: int) -> Fraction:
    """Expected rounds as a sum over every whole history of verdicts, in exact fractions; no value is reused."""

    def visit(wanted: int, prob: Fraction, num_rounds: int) -> Fraction:
        if wanted == 0:
            return prob * num_rounds
        window = min(num_draft_tokens, wanted - 1)
        total = visit(wanted - window - 1, prob * alpha**window, num_rounds + 1)
        for accepted in range(window):
            total += visit(wanted - accepted - 1, prob * alpha**accepted * (1 - alpha), num_rounds + 1)
        return total

    return visit(num_new_tokens, Fraction(1), 0)


@pytest.mark.parametrize("num_new_tokens", [1, 2, 7, 9])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 4, 12])
@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 2), Fraction(4, 5), Fraction(1)])
def test_expected_rounds_equals_a_sum_over_all_histories(
    alpha: Fraction, num_draft_tokens: int, num_new_tokens: int
) -> None:
    exact = rounds_by_enumeration(alpha, num_draft_tokens, num_new_tokens)
    computed = theory.expected_rounds(float(alpha), num_draft_tokens, num_new_tokens=num_new_tokens)
    assert computed == pytest.approx(float(exact), rel=1e-12)


def test_expected_rounds_and_draft_steps_agree_with_simulated_texts() -> None:
    """20,000 texts from a fixed seed; tolerance 5 standard errors a mean. With other seeds: false alarm odds 1e-6."""
    generator, alpha, num_draft_tokens, num_new_tokens, num_texts = random.Random(0), 0.7, 4, 23, 20_000
    rounds, draft_steps = [], []
    for _ in range(num_texts):
        wanted, num_rounds, num_steps = num_new_tokens, 0, 0
        while wanted:
            window, accepted = min(num_draft_tokens, wanted - 1), 0
            while accepted < window and generator.random() < alpha:
                accepted += 1
            wanted, num_rounds, num_steps = wanted - accepted - 1, num_rounds + 1, num_steps + window
        rounds.append(num_rounds)
        draft_steps.append(num_steps)
    for samples, compute in ((rounds, theory.expected_rounds), (draft_steps, theory.expected_draft_steps)):
        mean = sum(samples) / num_texts
        error = math.sqrt(sum((sample - mean) ** 2 for sample in samples)) / num_texts
        assert abs(mean - compute(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)) < 5 * error


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
def test_a_perfect_draft_takes_the_fewest_rounds_and_a_wrong_one_a_round_a_token(num_draft_tokens: int) -> None:
    for num_new_tokens in range(1, 20):
        fewest = math.ceil(num_new_tokens / (num_draft_tokens + 1))
        assert theory.expected_rounds(1.0, num_draft_tokens, num_new_tokens=num_new_tokens) == fewest
        assert theory.expected_rounds(0.0, num_draft_tokens, num_new_tokens=num_new_tokens) == num_new_tokens


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_finite_block_efficiency_lies_below_the_endless_one_and_reaches_it(alpha: float, num_draft_tokens: int) -> None:
    endless = theory.expected_tokens(alpha, num_draft_tokens)
    for num_new_tokens in (1, 2, 7, 30):
        finite = theory.block_efficiency_finite(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
        assert 1 - 1e-12 <= finite <= endless + 1e-12
    long_text = theory.block_efficiency_finite(alpha, num_draft_tokens, num_new_tokens=3000)
    assert long_text == pytest.approx(endless, rel=0.005)


def test_at_seven_tokens_and_window_three_the_endless_form_is_14_to_17_percent_too_high() -> None:
    excess = [
        theory.expected_tokens(alpha, 3) / theory.block_efficiency_finite(alpha, 3, num_new_tokens=7) - 1
        for alpha in (step / 1000 for step in range(650, 1001))
    ]
    assert 0.14 < min(excess) and max(excess) < 0.175


@pytest.mark.parametrize("cost_ratio", [0.0, 0.1, 1.5])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_predicted_speedup_without_overheads_is_theorem_three_eight(alpha: float, cost_ratio: float) -> None:
    for num_draft_tokens in WINDOWS:
        theorem = theory.expected_tokens(alpha, num_draft_tokens) / (num_draft_tokens * cost_ratio + 1)
        predicted = theory.predicted_speedup(
            alpha, num_draft_tokens, draft_step_seconds=2 * cost_ratio, target_seconds=2.0, verify_seconds=2.0
        )
        assert theory.speedup_with_cost_ratio(alpha, num_draft_tokens, cost_ratio=cost_ratio) == pytest.approx(theorem)
        assert predicted == pytest.approx(theorem)


def test_predicted_speedup_of_a_short_text_adds_up_its_rounds_by_hand() -> None:
    """Three tokens, window 2: 1 round (two kept), or 2 rounds (one kept), or then a window of 1: 2 or 3 rounds."""
    alpha, draft, verify, overhead = 0.6, 0.1, 1.2, 0.3
    first, second, last = 2 * draft + verify + overhead, draft + verify + overhead, verify + overhead
    one_kept, none_kept = alpha * (1 - alpha), 1 - alpha
    seconds = first + one_kept * last + none_kept * (second + (1 - alpha) * last)
    predicted = theory.predicted_speedup(
        alpha,
        2,
        draft_step_seconds=draft,
        target_seconds=1.0,
        verify_seconds=verify,
        round_overhead_seconds=overhead,
        step_overhead_seconds=0.05,
        num_new_tokens=3,
    )
    assert predicted == pytest.approx(3 * 1.05 / seconds)


def test_reading_the_prompt_is_added_on_both_sides_and_vanishes_in_an_endless_text() -> None:
    short = predict(0.8, 4, num_new_tokens=20)
    with_prompt = predict(0.8, 4, num_new_tokens=20, prompt_seconds=5.0)
    assert with_prompt == pytest.approx((5 + 20) / (5 + 20 / short))
    assert predict(0.8, 4, prompt_seconds=5.0) == predict(0.8, 4)


def test_no_window_and_equal_costs_give_no_speedup() -> None:
    for num_new_tokens in (None, 1, 10):
        assert theory.predicted_speedup(
            0.8,
            0,
            draft_step_seconds=0.5,
            target_seconds=1.0,
            verify_seconds=1.0,
            round_overhead_seconds=0.25,
            step_overhead_seconds=0.25,
            num_new_tokens=num_new_tokens,
        ) == pytest.approx(1)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_best_window_is_zero_exactly_when_alpha_is_not_above_the_cost_ratio(alpha: float) -> None:
    for cost_ratio in (0.0, 0.1, 0.3, 0.8, 1.0, 2.0):
        assert (theory.best_window(alpha, cost_ratio) == 0) == (alpha <= cost_ratio)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_other_window_beats_the_best_window(alpha: float) -> None:
    for cost_ratio in (0.0, 0.02, 0.3):
        best = theory.best_window(alpha, cost_ratio, max_window=12)
        speedups = [theory.speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio) for window in range(13)]
        assert speedups[best] == max(speedups) and max(speedups) not in speedups[:best]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("cost_ratio", [0.01, 0.2, 0.5, 0.9])
def test_the_speedup_is_one_at_the_break_even_alpha_and_grows_past_it(num_draft_tokens: int, cost_ratio: float) -> None:
    alpha = theory.break_even_alpha(num_draft_tokens, cost_ratio)
    assert alpha is not None and 0 < alpha < 1
    assert theory.speedup_with_cost_ratio(alpha, num_draft_tokens, cost_ratio=cost_ratio) == pytest.approx(1, abs=1e-12)
    assert theory.speedup_with_cost_ratio(alpha - 0.005, num_draft_tokens, cost_ratio=cost_ratio) < 1
    assert theory.speedup_with_cost_ratio(alpha + 0.005, num_draft_tokens, cost_ratio=cost_ratio) > 1


def test_a_window_of_one_breaks_even_at_the_cost_ratio_and_a_dear_draft_never() -> None:
    for cost_ratio in (0.25, 0.7, 1.0):
        assert theory.break_even_alpha(1, cost_ratio) == pytest.approx(cost_ratio)
    assert theory.break_even_alpha(4, 0.0) == pytest.approx(0.0, abs=1e-12)
    assert theory.break_even_alpha(1, 1.01) is None
    assert theory.break_even_alpha(8, 1.01) is None


predict = partial(theory.predicted_speedup, draft_step_seconds=0.1, target_seconds=1.0, verify_seconds=1.0)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.expected_tokens(1.1, 4), "alpha .* 1.1"),
        (lambda: theory.expected_tokens(math.nan, 4), "alpha .* nan"),
        (lambda: theory.expected_tokens(2.0, 0), "alpha .* 2.0"),
        (lambda: theory.expected_tokens([0.5, 1.5], 2), "alpha .* 1.5"),
        (lambda: theory.expected_tokens([0.5, 0.5], 3), "a window of 3 needs as many rates, got 2"),
        (lambda: theory.accepted_distribution(0.5, -1), "num_draft_tokens .* -1"),
        (lambda: theory.expected_rounds(0.8, 4, num_new_tokens=0), "num_new_tokens .* 0"),
        (lambda: predict(0.8, 4, num_new_tokens=0), "num_new_tokens .* 0"),
        (lambda: predict(0.8, 4, target_seconds=0.0), "target_seconds .* 0.0"),
        (lambda: predict(0.8, 4, verify_seconds=math.inf), "verify_seconds .* inf"),
        (lambda: predict(0.8, 4, draft_step_seconds=-1.0), "draft_step_seconds .* -1"),
        (lambda: predict(0.8, 4, step_overhead_seconds=math.nan), "step_overhead_seconds .* nan"),
        (lambda: theory.speedup_with_cost_ratio(0.8, 4, cost_ratio=-0.1), "cost_ratio .* -0.1"),
        (lambda: theory.best_window(0.8, 0.1, max_window=-1), "max_window .* -1"),
        (lambda: theory.break_even_alpha(0, 0.1), "num_draft_tokens .* 0"),
        (lambda: theory.break_even_alpha(4, 0.1, call_ratio=0.0), "call_ratio .* 0.0"),
        (lambda: theory.call_ratio({2: 1.0}, 2), "the call on 1 token"),
        (lambda: theory.call_ratio({1: 1.0, 2: math.nan}, 2), "seconds .*nan"),
        (lambda: theory.between({}, 2), "seconds must be some"),
        (lambda: theory.call_ratio({1: 1.0}, 0), "num_tokens .* 0"),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name_and_value(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        call()


def test_the_closed_forms_load_no_torch() -> None:
    code = "import sys; import lightning_specdec.bench.theory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
def test_equal_rates_at_all_positions_are_one_rate(num_draft_tokens: int) -> None:
    rates = [0.7] * 8
    for compute in (theory.accepted_distribution, theory.expected_tokens):
        assert compute(rates, num_draft_tokens) == pytest.approx(compute(0.7, num_draft_tokens))
    for finite in (theory.expected_rounds, theory.expected_draft_steps, theory.block_efficiency_finite):
        one = finite(0.7, num_draft_tokens, num_new_tokens=23)
        assert finite(rates, num_draft_tokens, num_new_tokens=23) == pytest.approx(one)


def test_rates_by_position_describe_a_text_of_easy_and_hard_rounds_and_one_rate_does_not() -> None:
    """Half of the rounds keep guesses with 0.9, half with 0.3: the mixture, position by position, and its mean rate."""
    window, kinds = 4, (0.9, 0.3)
    mixture = [sum(each) / 2 for each in zip(*(theory.accepted_distribution(a, window) for a in kinds), strict=True)]
    at_least = [sum(mixture[kept:]) for kept in range(window + 1)]
    rates = [at_least[i + 1] / at_least[i] for i in range(window)]
    assert theory.accepted_distribution(rates, window) == pytest.approx(mixture)
    truth = sum(theory.expected_tokens(alpha, window) for alpha in kinds) / 2
    assert theory.expected_tokens(rates, window) == pytest.approx(truth)
    alpha = sum(at_least[1:]) / sum(at_least[:-1])  # num_accepted / num_tested
    assert theory.expected_tokens(alpha, window) > 1.05 * truth


def test_a_call_between_two_measured_widths_lies_on_the_line_between_them() -> None:
    seconds = {1: 2.0, 3: 3.0, 9: 6.0}
    assert [theory.call_ratio(seconds, width) for width in (1, 2, 3, 5, 9, 13)] == [1.0, 1.25, 1.5, 2.0, 3.0, 4.0]
    assert theory.call_ratio({1: 2.0}, 7) == 1.0
    assert theory.call_ratio({1: 2.0, 5: 1.9}, 40) == 0.95  # and no free lunch beyond


def test_the_best_window_with_measured_calls_is_the_best_of_all_windows() -> None:
    calls = {1: 1.0, 2: 1.05, 5: 1.2, 9: 2.5}
    for alpha in (0.2, 0.6, 0.9):
        speedups = [
            theory.speedup_with_cost_ratio(alpha, k, cost_ratio=0.05, call_ratio=theory.call_ratio(calls, k + 1))
            for k in range(33)
        ]
        best = theory.best_window(alpha, 0.05, call_seconds=calls)
        assert speedups[best] == max(speedups) >= 1
        assert best <= theory.best_window(alpha, 0.05)
    assert theory.best_window(0.9, 0.05, call_seconds={1: 1.0, 2: 2.0}) == 0


def test_a_wider_call_that_costs_more_raises_the_break_even_alpha() -> None:
    cheap, dear = theory.break_even_alpha(4, 0.1), theory.break_even_alpha(4, 0.1, call_ratio=1.5)
    assert cheap is not None and dear is not None and cheap < dear
    assert theory.speedup_with_cost_ratio(dear, 4, cost_ratio=0.1, call_ratio=1.5) == pytest.approx(1)
    assert theory.break_even_alpha(4, 0.1, call_ratio=5.0) is None


# --- the document ---


def test_every_worked_block_of_the_document_is_computed_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(blocks()) == DOCUMENT.count("<!-- worked:")
    for name in blocks():
        assert re.search(rf'(table|block|probs)\("{name}"', source), f"no test reads the block {name!r}"


def test_every_table_and_json_block_with_numbers_is_marked_as_worked() -> None:
    unmarked = DOCUMENT
    for body in blocks().values():
        unmarked = unmarked.replace(body, "")
    assert "```json" not in unmarked
    assert not [line for line in unmarked.splitlines() if line.startswith("|") and re.search(r"\d", line)]


def test_the_running_text_quotes_only_figures_of_worked_blocks() -> None:
    """Figures are numbers of two or more digits, or with a decimal point; not links, years, names, theorem numbers."""
    number = r"(?<![\w.])\d[\d,]*(?:\.\d+)?"
    prose, figures = DOCUMENT, set()
    for body in blocks().values():
        prose = prose.replace(body, "")
        figures |= {value(found.rstrip(",")) for found in re.findall(number, body)}
    for name in (r"\]\([^)]*\)", r"\b20\d\d\b", r"(?:Theorem|Corollary|equation) [\d.]*\d", r"A100(?: 80GB)?|80GB"):
        prose = re.sub(name, "", prose)
    prose = prose.replace("99%", "")  # "more than 99%": held below, where the share in use is computed
    quoted = [found.rstrip(",") for found in re.findall(number, prose)]
    strangers = [found for found in quoted if len(found) > 1 and value(found) not in figures]
    assert not strangers, f"figures that no worked block holds: {strangers}"


def test_the_sentences_of_the_document_quote_the_figure_that_they_speak_of() -> None:
    """Each sentence is put together from the cell, or the formula, that it quotes."""
    first_sums = list(itertools.accumulate(probs("draft_probs")[0]))
    verdicts, acceptance, costs = table("verdicts"), table("acceptance"), block("costs")
    one_hot, drawn = "either rule, the draft's most likely word", "rejection sampling"
    utilization = value(block("rates")["draft_utilization"])
    sentences = [
        f"the sums are {first_sums[0]:.2f}, {first_sums[1]:.2f}, {first_sums[2]:.2f}, ..., "
        f'and {verdicts[0]["uniform, draft"]} falls on "{verdicts[0]["guess"]}"',
        f"kept with odds of {verdicts[1]['target prob']} to {verdicts[1]['draft prob']}",
        f"The uniform number for the correction is {block('round')['uniform_correct']}. "
        f'The first sum, {table("residual")[1]["the"]}, exceeds it: the token is "{block("round")["correction"]}"',
        f"({value(acceptance[3][one_hot]):.2f} against {value(acceptance[3][drawn]):.2f} for the drawn guess",
        f"({value(acceptance[2][one_hot]):.2f} against {value(acceptance[2][drawn]):.2f})",
        "10,000 rounds with a window of 4 and an acceptance rate of 0.8,",
        f"Put {utilization:.2f} into the formulas below as alpha",
        f"For these costs, alpha {costs['alpha']} and a window of {costs['num_draft_tokens']}:",
        f"slower than without speculation ({table('lengths')[0]['speedup']})",
        f"speedup, {costs['endless_speedup']}, is nearly reached at {table('lengths')[-1]['new tokens']} tokens",
        "window 4, alpha 0.8, draft steps at 0.05 of a target call",
        f"with a window of 8 and a cost ratio of 0.20 that is every alpha below {theory.break_even_alpha(8, 0.2):.2f}",
        "the cost of the call on 5 tokens in calls on one; alpha 0.8 with a cost ratio of 0.05, and",
        "With a window of 3 the endless formula is 14 to 17% too high for every alpha from 0.65 up; "
        f"with a window of 4, up to {max(int(row['k=4, % over']) for row in table('seven_tokens'))}%",
        "A perfect draft makes it exact only if k + 1 divides the length (7 tokens, window 6)",
    ]
    text = " ".join(DOCUMENT.split())
    assert [sentence for sentence in sentences if sentence not in text] == []


def test_document_section_1_arithmetic() -> None:
    rows = {row["quantity"]: row["value"] for row in table("arithmetic")}
    assert (rows["arithmetic rate, TFLOP/s"], rows["memory rate, GB/s"]) == ("312", "2,039")  # the data sheet
    flops, rate = value(rows["arithmetic rate, TFLOP/s"]) * 1e12, value(rows["memory rate, GB/s"]) * 1e9
    parameters = value(rows["parameters, billions"]) * 1e9
    read_seconds, token_seconds = 2 * parameters / rate, 2 * parameters / flops
    computed = {
        "bytes of weights for a token, GB": 2 * parameters / 1e9,
        "arithmetic for a token, GFLOP": 2 * parameters / 1e9,
        "intensity, FLOP/byte": 1.0,
        "intensity the device could feed, FLOP/byte": flops / rate,
        "reading the weights, ms": read_seconds * 1e3,
        "arithmetic for a token, ms": token_seconds * 1e3,
        "arithmetic for 5 tokens, ms": 5 * token_seconds * 1e3,
        "arithmetic units in use, %": 100 * token_seconds / read_seconds,
        "ceiling, tokens/s": 1 / read_seconds,
    }
    given = {"arithmetic rate, TFLOP/s", "memory rate, GB/s", "parameters, billions"}
    assert rows.keys() == computed.keys() | given
    for quantity, number in computed.items():
        assert agrees(rows[quantity], number), f"{quantity}: shown {rows[quantity]}, is {number}"
    assert "more than 99%" in DOCUMENT and 1 - token_seconds / read_seconds > 0.99


def test_document_section_2_a_perfect_draft_gives_seven_tokens_in_two_calls() -> None:
    sentence = re.search(
        r"(\d) tokens from a perfect draft with a window of (\d) take (\d) target calls, the\s+first yielding (\d) "
        r"tokens and the second (\d)\. Standard decoding takes (\d) calls",
        DOCUMENT,
    )
    assert sentence is not None
    num_new_tokens, window, calls, first, second, standard = map(int, sentence.groups())
    assert theory.expected_rounds(1.0, window, num_new_tokens=num_new_tokens) == calls == 2
    assert first == window + 1 and second == num_new_tokens - first and standard == num_new_tokens


def test_document_section_3_distributions_sum_to_one() -> None:
    draft_probs, target_probs = probs("draft_probs"), probs("target_probs")
    assert [row["position"] for row in table("draft_probs")] == list("1234")
    assert [row["position"] for row in table("target_probs")] == list("12345")
    for distribution in draft_probs + target_probs:
        assert sum(distribution) == pytest.approx(1)


def test_document_section_3_round_is_what_its_uniform_numbers_say() -> None:
    draft_probs, target_probs, facts = probs("draft_probs"), probs("target_probs"), block("round")
    rejected, guesses = None, []
    for index, row in enumerate(table("verdicts")):
        assert row["position"] == str(index + 1)
        guess = inverse_transform(draft_probs[index], value(row["uniform, draft"]))
        guesses.append(guess)
        draft_prob, target_prob = draft_probs[index][WORDS.index(guess)], target_probs[index][WORDS.index(guess)]
        assert row["guess"] == guess
        assert agrees(row["draft prob"], draft_prob) and agrees(row["target prob"], target_prob)
        if rejected is not None:
            assert (row["uniform, accept"], row["product"], row["verdict"]) == ("-", "-", "not tested")
            continue
        product = value(row["uniform, accept"]) * draft_prob
        assert agrees(row["product"], product)
        assert row["verdict"] == ("kept" if product < target_prob else "rejected")
        rejected = index if row["verdict"] == "rejected" else None
    assert rejected is not None
    mass = residual_mass(draft_probs[rejected], target_probs[rejected])
    correction = inverse_transform([share / sum(mass) for share in mass], value(facts["uniform_correct"]))
    text_after = facts["prompt"] + guesses[:rejected] + [correction]
    assert facts["correction"] == correction and facts["text_after"] == text_after
    assert (facts["num_proposed"], facts["num_tested"], facts["num_accepted"]) == (4, rejected + 1, rejected)
    assert facts["target_has_read"] == len(facts["prompt"]) + len(guesses)
    assert facts["draft_has_read"] == facts["target_has_read"] - 1
    assert facts["truncate_to"] == len(text_after) - 1


def test_document_section_3_residual_is_the_normalized_surplus_of_the_target() -> None:
    mass = residual_mass(probs("draft_probs")[2], probs("target_probs")[2])
    surplus, normalized = table("residual")
    assert all(agrees(surplus[word], share) for word, share in zip(WORDS, mass, strict=True))
    assert all(agrees(normalized[word], share / sum(mass)) for word, share in zip(WORDS, mass, strict=True))
    assert agrees(surplus["sum"], sum(mass)) and agrees(normalized["sum"], 1.0)


def test_document_section_3_rejection_sampling_gives_the_target_at_every_position() -> None:
    """The proof of section 4 on the numbers of section 3: every guess, kept or corrected, summed."""
    for draft_probs, target_probs in zip(probs("draft_probs"), probs("target_probs"), strict=False):
        mass = residual_mass(draft_probs, target_probs)
        output = [0.0] * len(WORDS)
        for guess, (draft_prob, target_prob) in enumerate(zip(draft_probs, target_probs, strict=True)):
            keep = min(1.0, target_prob / draft_prob)
            output[guess] += draft_prob * keep
            for word, share in enumerate(mass):
                output[word] += draft_prob * (1 - keep) * share / sum(mass)
        assert output == pytest.approx(target_probs, abs=1e-12)


def test_document_section_5_acceptance_of_the_two_lossless_rules() -> None:
    rows = table("acceptance")
    pairs = list(zip(probs("draft_probs"), probs("target_probs"), strict=False))
    assert len(rows) == len(pairs)
    assert [row["position"] for row in rows] == list("1234")
    for row, (draft_probs, target_probs) in zip(rows, pairs, strict=True):
        drawn = rejection_acceptance(draft_probs, target_probs)
        matched = sum(draft * target for draft, target in zip(draft_probs, target_probs, strict=True))
        likeliest = target_probs[draft_probs.index(max(draft_probs))]
        assert agrees(row["rejection sampling"], drawn) and matched <= drawn
        assert agrees(row["exact match, guess drawn from the draft"], matched)
        assert agrees(row["either rule, the draft's most likely word"], likeliest)


def test_document_section_6_lossy_rules() -> None:
    settings = block("lossy_settings")
    draft_probs, target_probs = (probs(name)[settings["position"] - 1] for name in ("draft_probs", "target_probs"))
    entropy = -sum(prob * math.log(prob) for prob in target_probs)
    threshold_rule, typical_rule = settings["EpsilonThreshold"], settings["TypicalAcceptance"]
    threshold = min(value(typical_rule["epsilon"]), value(typical_rule["delta"]) * math.exp(-entropy))
    assert agrees(settings["entropy"], entropy) and agrees(typical_rule["threshold"], threshold)
    assert (threshold_rule["epsilon"], typical_rule["epsilon"], typical_rule["delta"]) == ("0.1", "0.09", "0.3")
    epsilon = value(threshold_rule["epsilon"])
    differences = [abs(draft - target) for draft, target in zip(draft_probs, target_probs, strict=True)]
    rules = {
        "EpsilonThreshold": [difference < epsilon for difference in differences],
        "TypicalAcceptance": [target > threshold for target in target_probs],
    }
    rows = table("lossy")
    assert [row["word"] for row in rows] == WORDS
    for index, row in enumerate(rows):
        assert agrees(row["draft"], draft_probs[index]) and agrees(row["target"], target_probs[index])
        assert agrees(row["difference"], differences[index])
    for rule, kept in rules.items():
        kept_mass = sum(draft for draft, keep in zip(draft_probs, kept, strict=True) if keep)
        output = [
            draft * keep + (1 - kept_mass) * target
            for draft, target, keep in zip(draft_probs, target_probs, kept, strict=True)
        ]
        distance = sum(abs(out - target) for out, target in zip(output, target_probs, strict=True)) / 2
        assert sum(output) == pytest.approx(1)
        assert agrees(settings[rule]["kept_mass"], kept_mass) and agrees(settings[rule]["distance"], distance)
        for row, keep, prob in zip(rows, kept, output, strict=True):
            assert row[rule] == ("keep" if keep else "reject")
            assert agrees(row[f"output, {rule}"], prob)


def test_document_section_7_rates_follow_from_the_histogram() -> None:
    facts = block("rates")
    window, histogram, alpha = facts["num_draft_tokens"], facts["rounds_by_num_accepted"], 0.8
    assert len(histogram) == window + 1 and sum(histogram) == facts["num_rounds"]
    expected = [prob * facts["num_rounds"] for prob in theory.accepted_distribution(alpha, window)]
    assert histogram == pytest.approx(expected, abs=1e-6)
    assert facts["num_proposed"] == facts["num_rounds"] * window
    assert facts["num_accepted"] == sum(accepted * rounds for accepted, rounds in enumerate(histogram))
    assert facts["num_tested"] == sum(min(accepted + 1, window) * rounds for accepted, rounds in enumerate(histogram))
    assert facts["num_new_tokens"] == facts["num_accepted"] + facts["num_rounds"]
    assert agrees(facts["acceptance_rate"], facts["num_accepted"] / facts["num_tested"])
    assert agrees(facts["draft_utilization"], facts["num_accepted"] / facts["num_proposed"])
    assert agrees(facts["block_efficiency"], facts["num_new_tokens"] / facts["num_rounds"])
    assert agrees(facts["block_efficiency"], theory.expected_tokens(alpha, window))


def test_document_section_8_expected_tokens() -> None:
    windows = {f"k={window}": window for window in (1, 2, 3, 4, 6, 8)}
    for row in table("expected_tokens"):
        assert row.keys() == {"alpha", *windows}
        for column, window in windows.items():
            assert agrees(row[column], theory.expected_tokens(value(row["alpha"]), window)), (row, column)


def test_document_section_8_seven_tokens() -> None:
    for row in table("seven_tokens"):
        alpha = value(row["alpha"])
        for window in (1, 3, 4, 6):
            finite = theory.block_efficiency_finite(alpha, window, num_new_tokens=7)
            assert agrees(row[f"k={window}"], finite), (row, window)
            excess = 100 * (theory.expected_tokens(alpha, window) / finite - 1)
            assert agrees(row[f"k={window}, % over"], excess), (row, window)


def test_document_section_8_best_windows() -> None:
    for row in table("best_window"):
        alpha = value(row.pop("alpha"))
        for column, cell in row.items():
            cost_ratio = value(column.removeprefix("c="))
            window, speedup = cell.split(": ")
            assert int(window) == theory.best_window(alpha, cost_ratio), (alpha, column)
            assert agrees(speedup, theory.speedup_with_cost_ratio(alpha, int(window), cost_ratio=cost_ratio))


def test_document_section_8_break_even_rates() -> None:
    for row in table("break_even"):
        window = int(row.pop("window"))
        for column, cell in row.items():
            alpha = theory.break_even_alpha(window, value(column.removeprefix("c=")))
            assert alpha is not None and agrees(cell, alpha), (window, column)


def test_document_section_8_easy_and_hard_rounds() -> None:
    facts = block("mixture")
    window, kinds = facts["num_draft_tokens"], [value(rate) for rate in facts["alpha_of_the_kinds"]]
    mixture = [sum(each) / 2 for each in zip(*(theory.accepted_distribution(a, window) for a in kinds), strict=True)]
    at_least = [sum(mixture[kept:]) for kept in range(window + 1)]
    rates = [at_least[i + 1] / at_least[i] for i in range(window)]
    alpha = sum(at_least[1:]) / sum(at_least[:-1])
    assert all(map(agrees, facts["rate_of_each_position"], rates))
    assert agrees(facts["acceptance_rate"], alpha)
    assert agrees(facts["block_efficiency"], theory.expected_tokens(rates, window))
    assert agrees(facts["block_efficiency_from_the_one_rate"], theory.expected_tokens(alpha, window))
    percent = 100 * (theory.expected_tokens(alpha, window) / theory.expected_tokens(rates, window) - 1)
    assert f"{percent:.0f}% too high" in DOCUMENT


def test_document_section_8_wider_calls() -> None:
    calls = {int(row["tokens"]): value(row["call, in calls on one token"]) for row in table("calls")}
    for row in table("wider_calls"):
        alpha = value(row["alpha"])
        for column, seconds in (("all calls alike", None), ("these calls", calls)):
            window, speedup = row[column].split(": ")
            assert int(window) == theory.best_window(alpha, 0.05, call_seconds=seconds), (alpha, column)
            wide = 1.0 if seconds is None else theory.call_ratio(seconds, int(window) + 1)
            computed = theory.speedup_with_cost_ratio(alpha, int(window), cost_ratio=0.05, call_ratio=wide)
            assert agrees(speedup, computed)
        at_eight = theory.speedup_with_cost_ratio(alpha, 8, cost_ratio=0.05, call_ratio=theory.call_ratio(calls, 9))
        assert agrees(row["these calls, window 8"], at_eight)


def test_document_section_9_short_outputs() -> None:
    facts = block("costs")
    alpha, window = value(facts["alpha"]), facts["num_draft_tokens"]
    speedup = partial(
        theory.predicted_speedup,
        alpha,
        window,
        draft_step_seconds=value(facts["draft_step_seconds"]),
        target_seconds=value(facts["target_seconds"]),
        verify_seconds=value(facts["verify_seconds"]),
        round_overhead_seconds=value(facts["round_overhead_seconds"]),
        step_overhead_seconds=value(facts["step_overhead_seconds"]),
    )
    assert agrees(facts["endless_speedup"], speedup())
    for row in table("lengths"):
        length = int(row["new tokens"])
        assert agrees(row["expected rounds"], theory.expected_rounds(alpha, window, num_new_tokens=length))
        assert agrees(row["block efficiency"], theory.block_efficiency_finite(alpha, window, num_new_tokens=length))
        assert agrees(row["speedup"], speedup(num_new_tokens=length)), row


def test_document_section_9_large_batches() -> None:
    device = {row["quantity"]: value(row["value"]) for row in table("arithmetic")}
    parameters = device["parameters, billions"] * 1e9
    read_seconds = 2 * parameters / (device["memory rate, GB/s"] * 1e9)
    token_seconds = 2 * parameters / (device["arithmetic rate, TFLOP/s"] * 1e12)
    for row in table("batches"):
        one, five = (max(read_seconds, int(row["rows"]) * tokens * token_seconds) for tokens in (1, 5))
        speedup = theory.predicted_speedup(
            0.8, 4, draft_step_seconds=0.05 * one, target_seconds=one, verify_seconds=five
        )
        assert agrees(row["call on 1 token, ms"], one * 1e3) and agrees(row["call on 5 tokens, ms"], five * 1e3)
        assert agrees(row["ratio"], five / one) and agrees(row["speedup"], speedup), row


def test_document_section_9_sequential_targets() -> None:
    for row in table("sequential"):
        verify = value(row["call on 5 / call on 1"])
        usual = theory.predicted_speedup(0.8, 4, draft_step_seconds=0.05, target_seconds=1.0, verify_seconds=verify)
        best_case = theory.predicted_speedup(1.0, 4, draft_step_seconds=0.0, target_seconds=1.0, verify_seconds=verify)
        assert agrees(row["alpha 0.8, cost ratio 0.05"], usual), row
        assert agrees(row["alpha 1, cost ratio 0"], best_case), row
