"""The adaptive window has the most tokens per second by its costs, and changes no output."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

import cases
import pytest

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Request,
    Window,
    autoregressive_decode,
    open_session,
    speculative_decode,
    window_from_dict,
)
from lightning_specdec.decoding.windows import MEMORY, Controller, Outcome, Plan
from lightning_specdec.rules import RejectionSampling, Sampling

WIDTHS = (1, 2, 3, 5, 9, 17)
SHAPES = {
    "wide calls are free": (1.0, 1.0, 1.0, 1.0, 1.0, 1.02),
    "bfloat16": (1.0, 1.02, 1.04, 1.08, 1.16, 1.3),
    "float32": (1.0, 1.12, 1.22, 1.45, 1.9, 2.8),
    "one token after the other": (1.0, 1.9, 2.8, 4.6, 8.2, 15.4),
}
"""Seconds of a target call at each width; in float32 ten tokens take twice as long as one."""

SHAPES_WHERE_WIDE_CALLS_PAY = list(SHAPES)[:3]
TOKEN_SECONDS = 0.05
"""Seconds in which the target reads one prompt token."""

PROMPT_LENGTH = 64
SOME_ROW = Request(0, [1], max_new_tokens=1, eos=frozenset(), speculative=True)
FIXED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def make_costs(shape: str = "bfloat16", ratio: float = 0.1) -> Calibration:
    """Costs where a draft step takes `ratio` of a target call."""
    loop_seconds = tuple(0.005 + 0.0005 * width for width in WIDTHS)
    return Calibration(WIDTHS, SHAPES[shape], loop_seconds, 0.0, ratio, TOKEN_SECONDS)


def adaptive(shape: str = "bfloat16", ratio: float = 0.1) -> AdaptiveWindow:
    return AdaptiveWindow(make_costs(shape, ratio))


@pytest.mark.parametrize("seed", range(20))
def test_the_window_has_the_most_expected_tokens_per_second(seed: int) -> None:
    """Compared with a sum over all outcomes of a round, for random costs and rates."""
    generator = random.Random(seed)
    target_seconds = tuple(sorted(generator.uniform(1, 4) for _ in range(6)))
    step_seconds = generator.uniform(0, 0.3)
    fixed_seconds = generator.choice([0.0, generator.uniform(0, 0.5)])
    rates = [generator.uniform(0, 1) for _ in range(5)]
    offer_rate = generator.uniform(0.2, 1)
    costs = Calibration(
        (1, 2, 3, 4, 5, 6), target_seconds, (0.1,) * 6, fixed_seconds, step_seconds, 0.0
    )

    def tokens_per_second(window: int) -> float:
        standard_seconds = target_seconds[0] + 0.1
        if window == 0:
            return 1 / standard_seconds
        tokens_of_a_draft = 0.0
        for is_right in itertools.product([True, False], repeat=window):
            probability = 1.0
            for rate, right in zip(rates, is_right, strict=False):
                probability *= rate if right else 1 - rate
            num_accepted = is_right.index(False) if False in is_right else window
            tokens_of_a_draft += probability * (1 + num_accepted)
        tokens = offer_rate * tokens_of_a_draft + 1 - offer_rate
        wide_seconds = target_seconds[window] + 0.1
        call_seconds = offer_rate * wide_seconds + (1 - offer_rate) * standard_seconds
        return tokens / (fixed_seconds + step_seconds * window + call_seconds)

    best = Controller(costs).best(rates, offer_rate)
    highest = max(tokens_per_second(window) for window in range(6))
    assert tokens_per_second(best) == pytest.approx(highest)


def test_costs_between_measured_widths_are_linear() -> None:
    costs = Calibration((1, 3, 7), (1.0, 2.0, 4.0), (0.5, 0.5, 0.5), 0.0, 0.1, 0.0)
    seconds = [costs.round_seconds(window) for window in range(7)]
    assert seconds == [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]


def simulate(
    costs: Calibration,
    is_accepted: Callable[[int], bool],
    num_new: int,
    *,
    window: int | None = None,
) -> tuple[float, list[int]]:
    """Decode by the recorded costs only.

    The draft reads each token of the text too, when it is asked next, at its step's share of what
    the target takes.

    Args:
        is_accepted: whether the draft token at a position is right.
        window: a fixed one; None adapts.

    Returns:
        The seconds, and each round's window.
    """
    controller = None if window else Controller(costs)
    seconds = PROMPT_LENGTH * TOKEN_SECONDS
    position = 0
    num_unread = PROMPT_LENGTH
    windows = []
    while position < num_new:
        requested = (window or 0) if controller is None else controller.window
        num_drafted = min(requested, num_new - position - 1)
        num_accepted = 0
        while num_accepted < num_drafted and is_accepted(position + num_accepted):
            num_accepted += 1

        seconds += costs.round_seconds(num_drafted)
        if num_drafted:
            seconds += num_drafted * costs.draft_step_seconds
            seconds += num_unread * TOKEN_SECONDS * costs.draft_step_seconds
            num_unread = 0
        else:
            num_unread += 1
        if controller is not None:
            controller.learn([Outcome(SOME_ROW, num_drafted, num_drafted, num_accepted)])
        windows.append(num_drafted)
        position += num_accepted + 1
    return seconds, windows


def standard_seconds(costs: Calibration, num_new: int) -> float:
    return PROMPT_LENGTH * TOKEN_SECONDS + num_new * costs.round_seconds(0)


def average_seconds(
    costs: Calibration,
    alpha: float,
    num_new: int,
    window: int | None = None,
) -> float:
    """Mean over 40 texts, the same for every window; one if all drafts are right or wrong."""
    num_texts = 40 if 0 < alpha < 1 else 1
    seconds = []
    for seed in range(num_texts):
        generator = random.Random(seed)
        text = [generator.random() < alpha for _ in range(num_new)]
        seconds.append(simulate(costs, text.__getitem__, num_new, window=window)[0])
    return mean(seconds)


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_never_right_costs_up_to_a_few_per_cent(shape: str, ratio: float) -> None:
    costs = make_costs(shape, ratio)
    assert average_seconds(costs, 0.0, 128) <= 1.03 * standard_seconds(costs, 128)
    assert average_seconds(costs, 0.0, 2000) <= 1.02 * standard_seconds(costs, 2000)


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("ratio", [0.02, 0.25])
@pytest.mark.parametrize("shape", SHAPES_WHERE_WIDE_CALLS_PAY)
def test_a_draft_of_any_quality_comes_within_a_twentieth_of_the_best_fixed_window(
    shape: str,
    ratio: float,
    alpha: float,
) -> None:
    costs = make_costs(shape, ratio)
    fixed_seconds = [average_seconds(costs, alpha, 128, window) for window in FIXED]
    best = min(standard_seconds(costs, 128), *fixed_seconds)
    assert average_seconds(costs, alpha, 128) <= 1.05 * best


@pytest.mark.parametrize("shape", SHAPES_WHERE_WIDE_CALLS_PAY)
@pytest.mark.parametrize("ratio", [0.02, 0.1])
def test_it_recovers_when_a_draft_turns_good_and_leaves_when_it_turns_bad(
    shape: str, ratio: float
) -> None:
    costs = make_costs(shape, ratio)
    good_seconds, _ = simulate(costs, lambda position: True, 500)
    ideal = standard_seconds(costs, 500) + good_seconds - PROMPT_LENGTH * TOKEN_SECONDS

    seconds, windows = simulate(costs, lambda position: position >= 500, 1000)
    assert max(windows[-20:]) >= 8
    assert seconds <= 1.12 * ideal

    seconds, windows = simulate(costs, lambda position: position < 500, 1000)
    num_trials = sum(window > 0 for window in windows[-300:])
    assert seconds <= 1.08 * ideal
    assert 0 < num_trials <= 100


def test_if_even_a_perfect_draft_loses_nothing_is_drafted() -> None:
    costs = make_costs("one token after the other", 0.25)
    _, windows = simulate(costs, lambda position: True, 300)
    assert not any(windows)


def test_what_lies_after_the_first_rejection_teaches_nothing() -> None:
    learned = []
    for num_made in (3, 4, 8):
        controller = Controller(make_costs())
        controller.learn([Outcome(SOME_ROW, 8, num_made, 2)])
        learned.append(controller.draft.positions)
    assert learned[0] == learned[1] == learned[2]
    assert [position.trials for position in learned[0]] == [3, 1, 1, *[0] * 13]
    assert MEMORY > 3


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "temperature"),
    [
        (*pair, temperature)
        for pair in cases.pairs(targets=cases.BUT_LLAMA)
        for temperature in cases.shared(cases.few([0.0, 1.0], *pair), *pair)
    ],
)
def test_with_an_adaptive_window_exact_match_equals_standard_decoding(
    target: str,
    drafter: str,
    temperature: float,
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampling": Sampling(temperature),
        "eos": cases.EOS,
        "seed": 2,
    }
    window = adaptive("wide calls are free")
    result = cases.decode(target, drafter, num_draft_tokens=window, **options)
    expected = autoregressive_decode(cases.target(target), cases.PROMPTS, **options)
    assert result.tokens == expected.tokens


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "rule", "temperature"),
    [
        *((*pair, "RejectionSampling", 1.0) for pair in cases.ONE_EACH),
        *(
            (*triple, temperature)
            for triple in cases.triples(["near", "ngram"], ["rnn"])
            for temperature in (0.0, 1.0)
        ),
    ],
)
def test_a_ragged_batch_with_adaptive_windows_equals_its_rows_decoded_one_by_one(
    target: str,
    drafter: str,
    rule: str,
    temperature: float,
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(temperature),
        "num_draft_tokens": adaptive(),
        "seed": 4,
    }
    rule_class = cases.RULES[rule]
    is_certain = rule_class.lossless and temperature == 0
    rows_share_windows = rule_class.ignores_windows or is_certain

    target_model = cases.target(target)
    drafter_object = cases.drafter(drafter, target)
    batch = speculative_decode(target_model, drafter_object, cases.PROMPTS, **options)
    for index, row in enumerate(batch.rows):
        prompt = cases.PROMPTS[index]
        single = speculative_decode(
            target_model, drafter_object, prompt, indices=[index], **options
        )
        assert row.tokens == single.rows[0].tokens
        if not rows_share_windows:
            assert row.rounds == single.rows[0].rounds


def test_a_record_replays() -> None:
    """The window in the record and the same seed give the same windows and tokens, whatever the
    clock shows.
    """
    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "rule": RejectionSampling(),
        "sampling": Sampling(1.0),
    }
    result = speculative_decode(
        target, drafter, cases.PROMPTS, num_draft_tokens=adaptive(), **options
    )
    record = json.loads(json.dumps(result.to_dict()))
    window = window_from_dict(record["window"])
    replayed = speculative_decode(
        target, drafter, cases.PROMPTS, num_draft_tokens=window, **options
    )
    assert [row.rounds for row in replayed.rows] == [row.rounds for row in result.rows]

    draft_lengths = set()
    for row in result.rows:
        draft_lengths |= {len(round_.drafted) for round_ in row.rounds or ()}
    assert len(draft_lengths) > 2

    fixed = speculative_decode(target, drafter, cases.PROMPTS, max_new_tokens=4, num_draft_tokens=2)
    assert fixed.window is not None
    assert window_from_dict(fixed.window).largest == 2


class Scripted(Window, Plan):
    """Plays a list of windows."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.largest = max(script)

    def plan(self, *, jointly: bool) -> Plan:
        return Scripted(self.script)

    def windows(self, rows: Sequence[Request]) -> list[int]:
        window = self.script.pop(0)
        return [min(window, row.remaining - 1) if row.live else 0 for row in rows]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.num_accepted <= outcome.num_made <= outcome.window

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "Scripted"}


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(
        ["near", "unrelated", "transformer", "fused", "ngram", "early_exit"], ["rnn", "transformer"]
    ),
)
def test_a_drafter_that_skips_rounds_drafts_as_if_it_had_not(target: str, drafter: str) -> None:
    """What it read of rejected draft tokens is gone, and what it missed is read."""
    target_model = cases.target(target)
    drafter_object = cases.DRAFTERS[drafter](target_model)
    window = Scripted([4, 0, 0, 0] * 6)
    session = open_session(
        target_model, drafter_object, cases.PROMPTS, max_new_tokens=60, num_draft_tokens=window
    )
    num_rejected = 0
    for _ in range(12):
        texts = [list(row.text) for row in session.live]
        session.step()
        for text, row in zip(texts, session.live, strict=True):
            last_round = row.rounds[-1]
            num_rejected += len(last_round.drafted) - last_round.num_accepted
            if last_round.drafted:
                fresh = open_session(
                    target_model, drafter_object, text, max_new_tokens=9, num_draft_tokens=4
                )
                # A lookup prefers the first occurrence in the prompt.
                fresh.live[0].prompt_length = row.prompt_length
                fresh.step()
                assert fresh.live[0].rounds[0].drafted == last_round.drafted
    assert num_rejected or drafter == "ngram"
