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

import numpy as np
import pytest

from lightning_specdec.bench import theory

DOCUMENT = (Path(__file__).parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")
WORKED = re.compile(r"<!-- worked: (\w+) -->\n((?:\|[^\n]*\n)+|```json\n.*?```)", re.DOTALL)
BLOCKS: dict[str, str] = dict(WORKED.findall(DOCUMENT))
WORDS = ["the", "cat", "sat", "on", "mat"]
ALPHAS = [0.0, 0.3, 0.8, 0.95, 1.0]
WINDOWS = [0, 1, 3, 8]
predict = partial(theory.predicted_speedup, draft_step_seconds=0.1, target_seconds=1.0, verify_seconds=1.0)


def table(name: str) -> list[dict[str, str]]:
    """The rows of a worked table, each as a dict from column heading to cell."""
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in BLOCKS[name].splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


def block(name: str) -> dict[str, Any]:
    """A worked JSON block; its fractional numbers stay text, so that the digits shown are known."""
    return json.loads(BLOCKS[name].removeprefix("```json").removesuffix("```"), parse_float=str)


def value(shown: str | int) -> float:
    return float(str(shown).replace(",", ""))


def agrees(shown: str | int, computed: float) -> bool:
    decimals = len(str(shown).partition(".")[2])
    return abs(value(shown) - computed) <= 0.5 * 10**-decimals + 1e-9


def probs(name: str) -> list[list[float]]:
    return [[value(row[word]) for word in WORDS] for row in table(name)]


def inverse_transform(distribution: list[float], uniform: float) -> str:
    return next(word for word, total in zip(WORDS, itertools.accumulate(distribution), strict=True) if uniform < total)


def best_window(alpha: float, cost_ratio: float, calls: dict[int, float] | None = None) -> tuple[int, float]:
    """The smallest window up to 32 with the largest speedup; `calls`: seconds by width, straight lines between them."""

    def speedup(window: int) -> float:
        wide = 1.0 if calls is None else call_ratio(calls, window + 1)
        return theory.speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio, call_ratio=wide)

    window = max(range(33), key=speedup)
    return window, speedup(window)


def call_ratio(calls: dict[int, float], width: int) -> float:
    (before, last), seconds = list(calls)[-2:], list(calls.values())
    beyond = max(0, width - last) * (calls[last] - calls[before]) / (last - before)
    return float(np.interp(width, list(calls), seconds)) + beyond


# --- the closed forms ---


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_accepted_tokens_equal_a_sum_over_all_verdicts(alpha: float, num_draft_tokens: int) -> None:
    enumerated = [0.0] * (num_draft_tokens + 1)
    for verdicts in itertools.product([True, False], repeat=num_draft_tokens):
        num_accepted = (*verdicts, False).index(False)
        enumerated[num_accepted] += math.prod(alpha if kept else 1 - alpha for kept in verdicts)
    assert theory.accepted_distribution(alpha, num_draft_tokens) == pytest.approx(enumerated, abs=1e-12)
    mean = sum(accepted * prob for accepted, prob in enumerate(enumerated))
    assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(mean + 1)
    if alpha < 1:  # equation 1 of Leviathan et al.
        closed_form = (1 - alpha ** (num_draft_tokens + 1)) / (1 - alpha)
        assert theory.expected_tokens(alpha, num_draft_tokens) == pytest.approx(closed_form)


def test_rounds_and_speedup_agree_with_simulated_texts() -> None:
    """20,000 texts from a fixed seed; tolerance 5 standard errors a mean. With other seeds: false alarm odds 1e-6."""
    generator, alpha, num_draft_tokens, num_new_tokens, num_texts = random.Random(0), 0.7, 4, 23, 20_000
    rounds, seconds = [], []
    for _ in range(num_texts):
        wanted, num_rounds, num_steps = num_new_tokens, 0, 0
        while wanted:
            window, accepted = min(num_draft_tokens, wanted - 1), 0
            while accepted < window and generator.random() < alpha:
                accepted += 1
            wanted, num_rounds, num_steps = wanted - accepted - 1, num_rounds + 1, num_steps + window
        rounds.append(num_rounds)
        seconds.append(0.1 * num_steps + 1.3 * num_rounds)
    costs = {"verify_seconds": 1.2, "round_overhead_seconds": 0.1, "step_overhead_seconds": 0.05}
    promised = num_new_tokens * 1.05 / predict(alpha, num_draft_tokens, **costs, num_new_tokens=num_new_tokens)
    expected = theory.expected_rounds(alpha, num_draft_tokens, num_new_tokens=num_new_tokens)
    for samples, computed in ((rounds, expected), (seconds, promised)):
        mean = sum(samples) / num_texts
        error = math.sqrt(sum((sample - mean) ** 2 for sample in samples)) / num_texts
        assert abs(mean - computed) < 5 * error


@pytest.mark.parametrize("num_draft_tokens", WINDOWS)
def test_the_limits_are_a_perfect_draft_a_wrong_one_and_an_endless_text(num_draft_tokens: int) -> None:
    for num_new_tokens in range(1, 20):
        fewest = math.ceil(num_new_tokens / (num_draft_tokens + 1))
        assert theory.expected_rounds(1.0, num_draft_tokens, num_new_tokens=num_new_tokens) == fewest
        assert theory.expected_rounds(0.0, num_draft_tokens, num_new_tokens=num_new_tokens) == num_new_tokens
    for alpha in ALPHAS:
        endless = theory.expected_tokens(alpha, num_draft_tokens)
        finite = [theory.block_efficiency_finite(alpha, num_draft_tokens, num_new_tokens=n) for n in (1, 7, 1500)]
        assert finite[0] == 1 and finite[1] <= endless + 1e-12 and finite[2] == pytest.approx(endless, rel=0.01)


@pytest.mark.parametrize("cost_ratio", [0.0, 0.1, 1.5])
def test_predicted_speedup_without_overheads_is_theorem_three_eight(cost_ratio: float) -> None:
    for alpha, window in itertools.product(ALPHAS, WINDOWS):
        theorem = theory.expected_tokens(alpha, window) / (window * cost_ratio + 1)
        assert theory.speedup_with_cost_ratio(alpha, window, cost_ratio=cost_ratio) == pytest.approx(theorem)
        assert predict(alpha, window, draft_step_seconds=cost_ratio) == pytest.approx(theorem)
        assert (best_window(alpha, cost_ratio)[0] == 0) == (alpha <= cost_ratio), "corollary 3.9"


def test_rates_by_position_describe_a_text_of_easy_and_hard_rounds_and_one_rate_does_not() -> None:
    """Half of the rounds keep guesses with 0.9, half with 0.3: the mixture, position by position, and its mean rate."""
    facts = block("mixture")
    window, kinds = facts["num_draft_tokens"], [value(rate) for rate in facts["alpha_of_the_kinds"]]
    mixture = [sum(each) / 2 for each in zip(*(theory.accepted_distribution(a, window) for a in kinds), strict=True)]
    at_least = [sum(mixture[kept:]) for kept in range(window + 1)]
    rates = [at_least[i + 1] / at_least[i] for i in range(window)]
    alpha = sum(at_least[1:]) / sum(at_least[:-1])  # num_accepted / num_tested
    assert theory.accepted_distribution(rates, window) == pytest.approx(mixture)
    truth = sum(theory.expected_tokens(alpha, window) for alpha in kinds) / 2
    assert theory.expected_tokens(rates, window) == pytest.approx(truth)
    assert all(map(agrees, facts["rate_of_each_position"], rates)) and agrees(facts["acceptance_rate"], alpha)
    assert agrees(facts["block_efficiency"], truth)
    assert agrees(facts["block_efficiency_from_the_one_rate"], theory.expected_tokens(alpha, window))


@pytest.mark.parametrize("alpha", [1.1, math.nan, -0.1, [0.5, 1.5], [0.5]])
def test_a_rate_that_is_none_is_refused(alpha: Any) -> None:
    with pytest.raises(ValueError, match="alpha must be 2 rates from 0 to 1"):
        theory.expected_tokens(alpha, 2)
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        predict(0.8, 4, num_new_tokens=0)


# --- the document ---


def test_every_worked_block_of_the_document_is_computed_by_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert len(BLOCKS) == DOCUMENT.count("<!-- worked:")
    assert [name for name in BLOCKS if f'"{name}"' not in source] == []


def test_document_section_1_arithmetic() -> None:
    rows = {row["quantity"]: row["value"] for row in table("arithmetic")}
    flops, rate = value(rows.pop("arithmetic rate, TFLOP/s")) * 1e12, value(rows.pop("memory rate, GB/s")) * 1e9
    parameters = value(rows.pop("parameters, billions")) * 1e9
    read_seconds, token_seconds = 2 * parameters / rate, 2 * parameters / flops
    computed = [2 * parameters / 1e9, 2 * parameters / 1e9, 1.0, flops / rate, read_seconds * 1e3, token_seconds * 1e3]
    computed += [5 * token_seconds * 1e3, 100 * token_seconds / read_seconds, 1 / read_seconds]
    assert all(map(agrees, rows.values(), computed)) and len(rows) == len(computed)


def test_document_section_3_round_is_what_its_uniform_numbers_say() -> None:
    draft_probs, target_probs, facts = probs("draft_probs"), probs("target_probs"), block("round")
    assert all(sum(distribution) == pytest.approx(1) for distribution in draft_probs + target_probs)
    kept: list[str] = []
    rejected = None
    for index, row in enumerate(table("verdicts")):
        guess = inverse_transform(draft_probs[index], value(row["uniform, draft"]))
        draft_prob, target_prob = draft_probs[index][WORDS.index(guess)], target_probs[index][WORDS.index(guess)]
        assert row["draft token"] == guess and agrees(row["draft prob"], draft_prob)
        assert agrees(row["target prob"], target_prob)
        if rejected is not None:
            assert row["verdict"] == "not tested"
            continue
        product = value(row["uniform, accept"]) * draft_prob
        assert agrees(row["product"], product) and row["verdict"] == ("kept" if product < target_prob else "rejected")
        if product < target_prob:
            kept.append(guess)
        else:
            rejected = index
    assert rejected is not None
    mass = [max(0.0, t - d) for d, t in zip(draft_probs[rejected], target_probs[rejected], strict=True)]
    normalized = [share / sum(mass) for share in mass]
    for shown, computed in zip(table("residual"), (mass, normalized), strict=True):
        assert all(map(agrees, [shown[word] for word in (*WORDS, "sum")], [*computed, sum(computed)]))
    correction = inverse_transform(normalized, value(facts["uniform_correct"]))
    text_after = facts["prompt"] + kept + [correction]
    assert (facts["correction"], facts["text_after"]) == (correction, text_after)
    assert (facts["num_proposed"], facts["num_tested"], facts["num_accepted"]) == (4, rejected + 1, rejected)
    read = len(facts["prompt"]) + 4
    assert (facts["target_has_read"], facts["draft_has_read"]) == (read, read - 1)
    assert facts["truncate_to"] == len(text_after) - 1


def test_document_section_5_acceptance_of_the_two_lossless_rules() -> None:
    for row, drafted, wanted in zip(table("acceptance"), probs("draft_probs"), probs("target_probs")[:4], strict=True):
        assert agrees(row["rejection sampling"], sum(map(min, drafted, wanted)))
        matched = sum(draft * target for draft, target in zip(drafted, wanted, strict=True))
        assert agrees(row["exact match, draft token drawn from the draft"], matched)
        likeliest = wanted[drafted.index(max(drafted))]
        assert agrees(row["either rule, the draft's most likely word"], likeliest)


def test_document_section_6_lossy_rules() -> None:
    settings, rows = block("lossy_settings"), table("lossy")
    drafted, wanted = (probs(name)[settings["position"] - 1] for name in ("draft_probs", "target_probs"))
    entropy, typical = -sum(prob * math.log(prob) for prob in wanted), settings["TypicalAcceptance"]
    threshold = min(value(typical["epsilon"]), value(typical["delta"]) * math.exp(-entropy))
    assert agrees(settings["entropy"], entropy) and agrees(typical["threshold"], threshold)
    differences = [abs(draft - target) for draft, target in zip(drafted, wanted, strict=True)]
    rules = {
        "EpsilonThreshold": [each < value(settings["EpsilonThreshold"]["epsilon"]) for each in differences],
        "TypicalAcceptance": [target > threshold for target in wanted],
    }
    for name, computed in (("draft", drafted), ("target", wanted), ("difference", differences)):
        assert all(map(agrees, [row[name] for row in rows], computed))
    for rule, kept in rules.items():
        mass = sum(draft for draft, keep in zip(drafted, kept, strict=True) if keep)
        output = [d * keep + (1 - mass) * t for d, t, keep in zip(drafted, wanted, kept, strict=True)]
        distance = sum(abs(out - target) for out, target in zip(output, wanted, strict=True)) / 2
        assert agrees(settings[rule]["kept_mass"], mass) and agrees(settings[rule]["distance"], distance)
        assert [row[rule] for row in rows] == ["keep" if keep else "reject" for keep in kept]
        assert all(map(agrees, [row[f"output, {rule}"] for row in rows], output))


def test_document_section_7_rates_follow_from_the_histogram() -> None:
    facts = block("rates")
    window, histogram, rounds = facts["num_draft_tokens"], facts["rounds_by_num_accepted"], facts["num_rounds"]
    assert histogram == pytest.approx([rounds * prob for prob in theory.accepted_distribution(0.8, window)])
    accepted = sum(kept * number for kept, number in enumerate(histogram))
    tested = sum(min(kept + 1, window) * number for kept, number in enumerate(histogram))
    assert (facts["num_accepted"], facts["num_tested"]) == (accepted, tested)
    assert (facts["num_proposed"], facts["num_new_tokens"]) == (rounds * window, accepted + rounds)
    assert agrees(facts["acceptance_rate"], accepted / tested)
    assert agrees(facts["draft_utilization"], accepted / (rounds * window))
    assert agrees(facts["block_efficiency"], theory.expected_tokens(0.8, window))


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
            found, (shown, speedup) = best_window(alpha, value(column.removeprefix("c="))), cell.split(": ")
            assert int(shown) == found[0] and agrees(speedup, found[1])
    for row in table("break_even"):
        window = int(row.pop("window"))
        for column, cell in row.items():
            near = (value(cell) - 0.005, value(cell) + 0.005)
            below, above = (
                theory.speedup_with_cost_ratio(alpha, window, cost_ratio=value(column.removeprefix("c=")))
                for alpha in near
            )
            assert below < 1 < above


def test_document_section_8_wider_calls() -> None:
    calls = {int(row["tokens"]): value(row["call, in calls on one token"]) for row in table("calls")}
    for row in table("wider_calls"):
        alpha = value(row["alpha"])
        for column, seconds in (("all calls alike", None), ("these calls", calls)):
            found, (window, speedup) = best_window(alpha, 0.05, seconds), row[column].split(": ")
            assert int(window) == found[0] and agrees(speedup, found[1])
        at_eight = theory.speedup_with_cost_ratio(alpha, 8, cost_ratio=0.05, call_ratio=calls[9])
        assert agrees(row["these calls, window 8"], at_eight)


def test_document_section_9_short_outputs() -> None:
    facts = block("costs")
    alpha, window = value(facts.pop("alpha")), facts.pop("num_draft_tokens")
    endless, costs = facts.pop("endless_speedup"), dict[str, Any](zip(facts, map(value, facts.values()), strict=True))
    assert agrees(endless, predict(alpha, window, **costs))
    for row in table("lengths"):
        length = int(row["new tokens"])
        assert agrees(row["expected rounds"], theory.expected_rounds(alpha, window, num_new_tokens=length))
        assert agrees(row["block efficiency"], theory.block_efficiency_finite(alpha, window, num_new_tokens=length))
        assert agrees(row["speedup"], predict(alpha, window, **costs, num_new_tokens=length)), row


def test_document_section_9_large_batches_and_sequential_targets() -> None:
    device = {row["quantity"]: value(row["value"]) for row in table("arithmetic")}
    parameters = device["parameters, billions"] * 1e9
    read_seconds = 2 * parameters / (device["memory rate, GB/s"] * 1e9)
    token_seconds = 2 * parameters / (device["arithmetic rate, TFLOP/s"] * 1e12)
    for row in table("batches"):
        one, five = (max(read_seconds, int(row["rows"]) * tokens * token_seconds) for tokens in (1, 5))
        assert agrees(row["call on 1 token, ms"], one * 1e3) and agrees(row["call on 5 tokens, ms"], five * 1e3)
        speedup = predict(0.8, 4, draft_step_seconds=0.05, verify_seconds=five / one)
        assert agrees(row["ratio"], five / one) and agrees(row["speedup"], speedup), row
    for row in table("sequential"):
        verify = value(row["call on 5 / call on 1"])
        usual = predict(0.8, 4, draft_step_seconds=0.05, verify_seconds=verify)
        assert agrees(row["alpha 0.8, cost ratio 0.05"], usual), row
        best_case = predict(1.0, 4, draft_step_seconds=0.0, verify_seconds=verify)
        assert agrees(row["alpha 1, cost ratio 0"], best_case), row
