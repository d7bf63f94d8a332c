"""Laws of the closed forms in bench/theory.py; every worked number of docs/theory.md is recomputed.

The document marks worked numbers with `<!-- worked: name -->` before a table or a fenced JSON
block. A shown number agrees with a computed one if it is that number rounded to the digits shown.
"""

import itertools
import json
import math
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_specdec.bench import theory

DOCUMENT = (Path(__file__).parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")
WORKED = re.compile(r"<!-- worked: (\w+) -->\n((?:\|[^\n]*\n)+|```json\n.*?```)", re.DOTALL)
BLOCKS: dict[str, str] = dict(WORKED.findall(DOCUMENT))
ALPHAS = [0.0, 0.3, 0.8, 0.95, 1.0]
WINDOWS = [0, 1, 3, 8]
predict = partial(
    theory.predicted_speedup, draft_step_seconds=0.1, target_seconds=1.0, verify_seconds=1.0
)


def table(name: str) -> list[dict[str, str]]:
    """The rows of a worked table, each as a dict from column heading to cell."""
    lines = []
    for line in BLOCKS[name].splitlines():
        lines.append([cell.strip() for cell in line.strip("|").split("|")])
    headings, _, *rows = lines
    return [dict(zip(headings, row, strict=True)) for row in rows]


def block(name: str) -> dict[str, Any]:
    """A worked JSON block; its fractions stay text, so that the digits shown are known."""
    text = BLOCKS[name].removeprefix("```json").removesuffix("```")
    return json.loads(text, parse_float=str)


def value(cell: str | int) -> float:
    return float(str(cell).replace(",", ""))


def agrees(cell: str | int, computed: float) -> bool:
    num_decimals = len(str(cell).partition(".")[2])
    return abs(value(cell) - computed) <= 0.5 * 10**-num_decimals + 1e-9


def best_window(alpha: float, cost_ratio: float) -> tuple[int, float]:
    """The smallest window up to 32 with the largest speedup."""
    speedups = [predict(alpha, window, draft_step_seconds=cost_ratio) for window in range(33)]
    best_speedup = max(speedups)
    return speedups.index(best_speedup), best_speedup


# --- the closed forms ---


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_accepted_tokens_equal_a_sum_over_all_verdicts(alpha: float, num_draft_tokens: int) -> None:
    probs = [0.0] * (num_draft_tokens + 1)
    for verdicts in itertools.product([True, False], repeat=num_draft_tokens):
        num_accepted = (*verdicts, False).index(False)
        probs[num_accepted] += math.prod(alpha if accepted else 1 - alpha for accepted in verdicts)
    distribution = theory.accepted_distribution(alpha, num_draft_tokens)
    assert distribution == pytest.approx(probs, abs=1e-12)

    mean = sum(num_accepted * prob for num_accepted, prob in enumerate(probs))
    assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(mean + 1)
    if alpha < 1:
        # Equation 1 of Leviathan et al.
        closed_form = (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(closed_form)


def simulated_text(
    rng: random.Random,
    alpha: float,
    num_draft_tokens: int,
    num_new_tokens: int,
) -> tuple[int, int]:
    """Rounds and draft steps of a text."""
    num_rounds = 0
    num_steps = 0
    num_remaining = num_new_tokens
    while num_remaining:
        window = min(num_draft_tokens, num_remaining - 1)
        num_accepted = 0
        while num_accepted < window and rng.random() < alpha:
            num_accepted += 1
        num_remaining -= num_accepted + 1
        num_rounds += 1
        num_steps += window
    return num_rounds, num_steps


def test_rounds_and_speedup_agree_with_simulated_texts() -> None:
    """20,000 texts from a fixed seed; tolerance 5 standard errors a mean. With other seeds: false
    alarm odds 1e-6."""
    rng = random.Random(0)
    alpha = 0.7
    num_draft_tokens = 4
    num_new_tokens = 23
    num_texts = 20_000
    round_counts = []
    seconds = []
    for _ in range(num_texts):
        num_rounds, num_steps = simulated_text(rng, alpha, num_draft_tokens, num_new_tokens)
        round_counts.append(num_rounds)
        seconds.append(0.1 * num_steps + 1.3 * num_rounds)

    speedup = predict(
        alpha,
        num_draft_tokens,
        verify_seconds=1.2,
        round_overhead_seconds=0.1,
        step_overhead_seconds=0.05,
        num_new_tokens=num_new_tokens,
    )
    standard_seconds = num_new_tokens * 1.05
    expected_rounds = theory.expected_rounds(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
    for samples, expected in (
        (round_counts, expected_rounds),
        (seconds, standard_seconds / speedup),
    ):
        mean = sum(samples) / num_texts
        squared_deviations = sum((sample - mean) ** 2 for sample in samples)
        standard_error = math.sqrt(squared_deviations) / num_texts
        assert abs(mean - expected) < 5 * standard_error


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
def test_the_limits_are_a_perfect_draft_a_wrong_one_and_an_endless_text(
    num_draft_tokens: int,
) -> None:
    for num_new_tokens in range(1, 20):
        fewest_rounds = math.ceil(num_new_tokens / (num_draft_tokens + 1))
        perfect = theory.expected_rounds(1.0, num_draft_tokens, num_new_tokens=num_new_tokens)
        assert perfect == fewest_rounds
        wrong = theory.expected_rounds(0.0, num_draft_tokens, num_new_tokens=num_new_tokens)
        assert wrong == num_new_tokens
    for alpha in ALPHAS:
        finite = theory.block_efficiency_finite(alpha, num_draft_tokens, num_new_tokens=1500)
        assert finite == pytest.approx(theory.expected_tokens(alpha, num_draft_tokens), rel=0.01)


@pytest.mark.parametrize("alpha", [1.1, math.nan, -0.1])
def test_a_rate_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be 2 rates from 0 to 1"):
        theory.expected_tokens(alpha, 2)


def test_a_text_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        predict(0.8, 4, num_new_tokens=0)


# --- the document ---


def test_every_worked_block_of_the_document_is_computed_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(BLOCKS) == DOCUMENT.count("<!-- worked:")
    assert [name for name in BLOCKS if f'"{name}"' not in source] == []


def test_document_section_8_expected_tokens() -> None:
    for row in table("expected_tokens"):
        alpha = value(row["alpha"])
        for window in (1, 2, 3, 4, 6, 8):
            assert agrees(row[f"k={window}"], theory.expected_tokens(alpha, window))


def test_document_section_8_seven_tokens() -> None:
    for row in table("seven_tokens"):
        alpha = value(row["alpha"])
        for window in (1, 3, 4, 6):
            finite = theory.block_efficiency_finite(alpha, window, num_new_tokens=7)
            percent_over = 100 * (theory.expected_tokens(alpha, window) / finite - 1)
            assert agrees(row[f"k={window}"], finite)
            assert agrees(row[f"k={window}, % over"], percent_over)


def test_document_section_8_best_windows() -> None:
    for row in table("best_window"):
        alpha = value(row.pop("alpha"))
        for heading, cell in row.items():
            cost_ratio = value(heading.removeprefix("c="))
            window, speedup = best_window(alpha, cost_ratio)
            shown_window, shown_speedup = cell.split(": ")
            assert int(shown_window) == window
            assert agrees(shown_speedup, speedup)


def test_document_section_8_break_even() -> None:
    for row in table("break_even"):
        window = int(row.pop("window"))
        for heading, cell in row.items():
            cost_ratio = value(heading.removeprefix("c="))
            alpha = value(cell)
            assert predict(alpha - 0.005, window, draft_step_seconds=cost_ratio) < 1
            assert predict(alpha + 0.005, window, draft_step_seconds=cost_ratio) > 1


def test_document_section_9_short_outputs() -> None:
    costs = block("costs")
    alpha = value(costs.pop("alpha"))
    window = costs.pop("num_draft_tokens")
    endless_speedup = costs.pop("endless_speedup")
    costs = {name: value(cell) for name, cell in costs.items()}
    assert agrees(endless_speedup, predict(alpha, window, **costs))
    for row in table("lengths"):
        length = int(row["new tokens"])
        num_rounds = theory.expected_rounds(alpha, window, num_new_tokens=length)
        block_efficiency = theory.block_efficiency_finite(alpha, window, num_new_tokens=length)
        speedup = predict(alpha, window, **costs, num_new_tokens=length)
        assert agrees(row["expected rounds"], num_rounds)
        assert agrees(row["block efficiency"], block_efficiency)
        assert agrees(row["speedup"], speedup), row
