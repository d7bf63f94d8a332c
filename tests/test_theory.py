"""Laws of the closed forms in bench/theory.py, and every worked number of docs/theory.md computed again.

The document marks what is worked with `<!-- worked: name -->` in front of a table or a fenced JSON block. A shown
number agrees with a computed one if it is that number rounded to the digits shown.
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
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in BLOCKS[name].splitlines()
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


def block(name: str) -> dict[str, Any]:
    """A worked JSON block; its fractional numbers stay text, so that the digits shown are known."""
    return json.loads(BLOCKS[name].removeprefix("```json").removesuffix("```"), parse_float=str)


def value(shown: str | int) -> float:
    return float(str(shown).replace(",", ""))


def agrees(shown: str | int, computed: float) -> bool:
    decimals = len(str(shown).partition(".")[2])
    return abs(value(shown) - computed) <= 0.5 * 10**-decimals + 1e-9


def best_window(alpha: float, cost_ratio: float) -> tuple[int, float]:
    """The smallest window up to 32 with the largest speedup."""
    speedups = [predict(alpha, window, draft_step_seconds=cost_ratio) for window in range(33)]
    return speedups.index(max(speedups)), max(speedups)


# --- the closed forms ---


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_accepted_tokens_equal_a_sum_over_all_verdicts(alpha: float, num_draft_tokens: int) -> None:
    enumerated = [0.0] * (num_draft_tokens + 1)
    for verdicts in itertools.product([True, False], repeat=num_draft_tokens):
        num_accepted = (*verdicts, False).index(False)
        enumerated[num_accepted] += math.prod(alpha if kept else 1 - alpha for kept in verdicts)
    assert theory.accepted_distribution(alpha, num_draft_tokens) == pytest.approx(
        enumerated, abs=1e-12
    )
    mean = sum(accepted * prob for accepted, prob in enumerate(enumerated))
    assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(mean + 1)
    if alpha < 1:  # equation 1 of Leviathan et al.
        closed_form = (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(closed_form)


def test_rounds_and_speedup_agree_with_simulated_texts() -> None:
    """20,000 texts from a fixed seed; tolerance 5 standard errors a mean. With other seeds: false alarm odds 1e-6."""
    generator, alpha, num_draft_tokens, num_new_tokens, num_texts = (
        random.Random(0),
        0.7,
        4,
        23,
        20_000,
    )
    rounds, seconds = [], []
    for _ in range(num_texts):
        wanted, num_rounds, num_steps = num_new_tokens, 0, 0
        while wanted:
            window, accepted = min(num_draft_tokens, wanted - 1), 0
            while accepted < window and generator.random() < alpha:
                accepted += 1
            wanted, num_rounds, num_steps = (
                wanted - accepted - 1,
                num_rounds + 1,
                num_steps + window,
            )
        rounds.append(num_rounds)
        seconds.append(0.1 * num_steps + 1.3 * num_rounds)
    costs = {"verify_seconds": 1.2, "round_overhead_seconds": 0.1, "step_overhead_seconds": 0.05}
    promised = (
        num_new_tokens
        * 1.05
        / predict(alpha, num_draft_tokens, **costs, num_new_tokens=num_new_tokens)
    )
    expected = theory.expected_rounds(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
    for samples, computed in ((rounds, expected), (seconds, promised)):
        mean = sum(samples) / num_texts
        error = math.sqrt(sum((sample - mean) ** 2 for sample in samples)) / num_texts
        assert abs(mean - computed) < 5 * error


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
def test_the_limits_are_a_perfect_draft_a_wrong_one_and_an_endless_text(
    num_draft_tokens: int,
) -> None:
    for num_new_tokens in range(1, 20):
        fewest = math.ceil(num_new_tokens / (num_draft_tokens + 1))
        assert (
            theory.expected_rounds(1.0, num_draft_tokens, num_new_tokens=num_new_tokens) == fewest
        )
        assert (
            theory.expected_rounds(0.0, num_draft_tokens, num_new_tokens=num_new_tokens)
            == num_new_tokens
        )
    for alpha in ALPHAS:
        long = theory.block_efficiency_finite(alpha, num_draft_tokens, num_new_tokens=1500)
        assert long == pytest.approx(theory.expected_tokens(alpha, num_draft_tokens), rel=0.01)


@pytest.mark.parametrize("alpha", [1.1, math.nan, -0.1])
def test_a_rate_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be 2 rates from 0 to 1"):
        theory.expected_tokens(alpha, 2)
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        predict(0.8, 4, num_new_tokens=0)


# --- the document ---


def test_every_worked_block_of_the_document_is_computed_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(BLOCKS) == DOCUMENT.count("<!-- worked:")
    assert [name for name in BLOCKS if f'"{name}"' not in source] == []


def test_document_section_8_tokens_and_windows() -> None:
    for row in table("expected_tokens"):
        for window in (1, 2, 3, 4, 6, 8):
            assert agrees(row[f"k={window}"], theory.expected_tokens(value(row["alpha"]), window))
    for row in table("seven_tokens"):
        for window in (1, 3, 4, 6):
            finite = theory.block_efficiency_finite(value(row["alpha"]), window, num_new_tokens=7)
            excess = 100 * (theory.expected_tokens(value(row["alpha"]), window) / finite - 1)
            assert agrees(row[f"k={window}"], finite) and agrees(row[f"k={window}, % over"], excess)
    for row in table("best_window"):
        alpha = value(row.pop("alpha"))
        for column, cell in row.items():
            found, (shown, speedup) = (
                best_window(alpha, value(column.removeprefix("c="))),
                cell.split(": "),
            )
            assert int(shown) == found[0] and agrees(speedup, found[1])
    for row in table("break_even"):
        window = int(row.pop("window"))
        for column, cell in row.items():
            near = (value(cell) - 0.005, value(cell) + 0.005)
            below, above = (
                predict(alpha, window, draft_step_seconds=value(column.removeprefix("c=")))
                for alpha in near
            )
            assert below < 1 < above


def test_document_section_9_short_outputs() -> None:
    facts = block("costs")
    alpha, window = value(facts.pop("alpha")), facts.pop("num_draft_tokens")
    endless, costs = (
        facts.pop("endless_speedup"),
        dict[str, Any](zip(facts, map(value, facts.values()), strict=True)),
    )
    assert agrees(endless, predict(alpha, window, **costs))
    for row in table("lengths"):
        length = int(row["new tokens"])
        assert agrees(
            row["expected rounds"], theory.expected_rounds(alpha, window, num_new_tokens=length)
        )
        assert agrees(
            row["block efficiency"],
            theory.block_efficiency_finite(alpha, window, num_new_tokens=length),
        )
        assert agrees(row["speedup"], predict(alpha, window, **costs, num_new_tokens=length)), row
