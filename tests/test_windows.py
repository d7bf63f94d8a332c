"""The adaptive window: it picks what pays by the recorded costs, loses next to nothing, and changes no output."""

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
    Row,
    Window,
    autoregressive_decode,
    open_session,
    speculative_decode,
    window_from_dict,
)
from lightning_specdec.decoding.windows import MEMORY, Controller, Outcome, Plan
from lightning_specdec.rules import RejectionSampling, Sampling

WIDTHS, LARGEST = (1, 2, 3, 5, 9, 17), 16
SHAPES = {
    "wide calls are free": (1.0, 1.0, 1.0, 1.0, 1.0, 1.02),
    "bfloat16": (1.0, 1.02, 1.04, 1.08, 1.16, 1.3),
    "float32": (1.0, 1.12, 1.22, 1.45, 1.9, 2.8),
    "one token after the other": (1.0, 1.9, 2.8, 4.6, 8.2, 15.4),
}
"""Seconds of a target call at each width; in float32 ten tokens take twice as long as one."""
TOKEN_SECONDS = 0.05
"""The target's reading of one prompt token."""
SOME_ROW = Row(0, [1], max_new_tokens=1, eos=frozenset(), speculative=True)
FIXED = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def costs(shape: str = "bfloat16", ratio: float = 0.1) -> Calibration:
    """A draft step takes `ratio` of a target call."""
    loop = tuple(0.005 + 0.0005 * width for width in WIDTHS)
    return Calibration(WIDTHS, SHAPES[shape], loop, 0.0, ratio, TOKEN_SECONDS)


def adaptive(shape: str = "bfloat16", ratio: float = 0.1) -> AdaptiveWindow:
    return AdaptiveWindow(costs(shape, ratio))


@pytest.mark.parametrize("seed", range(20))
def test_the_window_has_the_most_expected_tokens_per_second(seed: int) -> None:
    """Compared with a sum over all outcomes of a round, for random costs and rates."""
    generator = random.Random(seed)
    target = tuple(sorted(generator.uniform(1, 4) for _ in range(6)))
    step, fixed = generator.uniform(0, 0.3), generator.choice([0.0, generator.uniform(0, 0.5)])
    controller = Controller(Calibration((1, 2, 3, 4, 5, 6), target, (0.1,) * 6, fixed, step, 0.0))
    rates, offered = [generator.uniform(0, 1) for _ in range(5)], generator.uniform(0.2, 1)

    def tokens_per_second(window: int) -> float:
        if not window:
            return 1 / (target[0] + 0.1)
        tokens = 0.0
        for outcome in itertools.product([True, False], repeat=window):
            chance = 1.0
            for rate, kept in zip(rates, outcome, strict=False):
                chance *= rate if kept else 1 - rate
            tokens += chance * (1 + next((i for i, kept in enumerate(outcome) if not kept), window))
        tokens = offered * tokens + 1 - offered
        calls = offered * (target[window] + 0.1) + (1 - offered) * (target[0] + 0.1)
        return tokens / (fixed + step * window + calls)

    assert tokens_per_second(controller.best(rates, offered)) == pytest.approx(
        max(map(tokens_per_second, range(6)))
    )


def simulate(
    each: Calibration, accept: Callable[[int], bool], num_new: int, *, window: int | None = None
) -> tuple[float, list[int]]:
    """Decode by the recorded costs alone: seconds, and each round's window. `window` None adapts.

    The draft reads each token of the text too, when it is next asked, at its step's share of what the target takes.
    """
    controller = None if window else Controller(each)
    seconds, done, unread, windows = 64 * TOKEN_SECONDS, 0, 64, []
    while done < num_new:
        drafted = min(
            (window or 0) if controller is None else controller.window, num_new - done - 1
        )
        accepted = 0
        while accepted < drafted and accept(done + accepted):
            accepted += 1
        seconds += each.round_seconds(drafted)
        if drafted:
            seconds += (
                drafted * each.draft_step_seconds + unread * TOKEN_SECONDS * each.draft_step_seconds
            )
        if controller is not None:
            controller.learn([Outcome(SOME_ROW, drafted, drafted, accepted)])
        windows.append(drafted)
        unread = 0 if drafted else unread + 1
        done += accepted + 1
    return seconds, windows


def standard(each: Calibration, num_new: int) -> float:
    return 64 * TOKEN_SECONDS + num_new * each.round_seconds(0)


def average(each: Calibration, alpha: float, num_new: int, window: int | None = None) -> float:
    """Mean seconds over 40 texts, the same for every window; of a draft that is always right or wrong there is one."""
    texts = []
    for seed in range(40 if 0 < alpha < 1 else 1):
        generator = random.Random(seed)
        texts.append([generator.random() < alpha for _ in range(num_new)])
    return mean(simulate(each, text.__getitem__, num_new, window=window)[0] for text in texts)


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_is_never_right_costs_a_few_per_cent_at_most(shape: str, ratio: float) -> None:
    each = costs(shape, ratio)
    assert average(each, 0.0, 128) <= 1.03 * standard(each, 128)
    assert average(each, 0.0, 2000) <= 1.02 * standard(each, 2000)


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("ratio", [0.02, 0.25])
@pytest.mark.parametrize("shape", list(SHAPES)[:3])
def test_a_draft_of_any_quality_comes_within_a_twentieth_of_the_best_fixed_window(
    shape: str, ratio: float, alpha: float
) -> None:
    each = costs(shape, ratio)
    best = min(standard(each, 128), *(average(each, alpha, 128, window) for window in FIXED))
    assert average(each, alpha, 128) <= 1.05 * best


@pytest.mark.parametrize("shape", list(SHAPES)[:3])
@pytest.mark.parametrize("ratio", [0.02, 0.1])
def test_it_recovers_when_a_draft_turns_good_and_leaves_when_it_turns_bad(
    shape: str, ratio: float
) -> None:
    each = costs(shape, ratio)
    good = simulate(each, lambda position: True, 500)[0] - 64 * TOKEN_SECONDS
    later, windows = simulate(each, lambda position: position >= 500, 1000)
    assert max(windows[-20:]) >= 8
    assert later <= 1.12 * (standard(each, 500) + good)
    earlier, windows = simulate(each, lambda position: position < 500, 1000)
    assert (
        earlier <= 1.08 * (standard(each, 500) + good) and 0 < sum(map(bool, windows[-300:])) <= 100
    )


def test_where_even_a_perfect_draft_loses_it_is_never_asked() -> None:
    assert not any(
        simulate(costs("one token after the other", 0.25), lambda position: True, 300)[1]
    )


def test_what_lies_behind_the_first_rejection_teaches_nothing() -> None:
    seen = []
    for made in (3, 4, 8):
        controller = Controller(costs())
        controller.learn([Outcome(SOME_ROW, 8, made, 2)])
        seen.append(controller.positions)
    assert seen[0] == seen[1] == seen[2]
    assert [each.trials for each in seen[0]] == [3, 1, 1, *[0] * 13] and MEMORY > 3


@pytest.mark.parametrize(
    ("target", "drafter", "temperature"),
    [
        (*pair, temperature)
        for pair in cases.pairs(targets=cases.BUT_LLAMA)
        for temperature in cases.shared(cases.few([0.0, 1.0], *pair), *pair)
    ],
)
def test_with_an_adaptive_window_exact_match_equals_standard_decoding(
    target: str, drafter: str, temperature: float
) -> None:
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "sampling": Sampling(temperature),
        "eos": cases.EOS,
        "seed": 2,
    }
    window = adaptive("wide calls are free")
    result = speculative_decode(model, guesser, cases.PROMPTS, num_draft_tokens=window, **options)
    assert result.tokens == autoregressive_decode(model, cases.PROMPTS, **options).tokens


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
    target: str, drafter: str, rule: str, temperature: float
) -> None:
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "rule": cases.RULES[rule](),
        "sampling": Sampling(temperature),
        "num_draft_tokens": adaptive(),
        "seed": 4,
    }
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    batch = speculative_decode(model, guesser, cases.PROMPTS, **options)
    for index, row in enumerate(batch.rows):
        alone = speculative_decode(
            model, guesser, cases.PROMPTS[index], indices=[index], **options
        ).rows[0]
        assert row.tokens == alone.tokens
        if not (options["rule"].ignores_windows or (options["rule"].lossless and not temperature)):
            assert row.rounds == alone.rounds


def test_a_record_replays() -> None:
    """The window in the record, the same seed: the same windows and tokens, whatever the clock says."""
    model, guesser = cases.target("rnn"), cases.drafter("near", "rnn")
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "rule": RejectionSampling(),
        "sampling": Sampling(1.0),
    }
    first = speculative_decode(
        model, guesser, cases.PROMPTS, num_draft_tokens=adaptive(), **options
    )
    window = window_from_dict(json.loads(json.dumps(first.to_dict()))["window"])
    again = speculative_decode(model, guesser, cases.PROMPTS, num_draft_tokens=window, **options)
    assert [row.rounds for row in again.rows] == [row.rounds for row in first.rows]
    assert len({len(each.drafted) for row in first.rows for each in row.rounds or ()}) > 2
    fixed = speculative_decode(model, guesser, cases.PROMPTS, max_new_tokens=4, num_draft_tokens=2)
    assert fixed.window is not None and window_from_dict(fixed.window).largest == 2


class Scripted(Window, Plan):
    """Plays a list of windows."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.largest = list(script), max(script)

    def plan(self, *, jointly: bool) -> Plan:
        return Scripted(self.script)

    def windows(self, rows: Sequence[Row]) -> list[int]:
        window = self.script.pop(0)
        return [min(window, row.remaining - 1) if row.live else 0 for row in rows]

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        assert all(
            outcome.num_accepted <= outcome.num_made <= outcome.window for outcome in outcomes
        )

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "Scripted"}


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(
        ["near", "unrelated", "transformer", "fused", "ngram", "early_exit"], ["rnn", "transformer"]
    ),
)
def test_a_draft_that_was_not_asked_for_a_while_guesses_as_if_it_had_been(
    target: str, drafter: str
) -> None:
    """What it read of rejected guesses is gone, and what it missed is read."""
    model, guesser, script = (
        cases.target(target),
        cases.DRAFTERS[drafter](cases.target(target)),
        [4, 0, 0, 0] * 6,
    )
    session = open_session(
        model, guesser, cases.PROMPTS, max_new_tokens=60, num_draft_tokens=Scripted(script)
    )
    rejected = 0
    for _ in range(12):
        texts = [list(row.text) for row in session.live]
        session.step()
        for text, row in zip(texts, session.live, strict=True):
            last = row.rounds[-1]
            rejected += len(last.drafted) - last.num_accepted
            if last.drafted:
                fresh = open_session(model, guesser, text, max_new_tokens=9, num_draft_tokens=4)
                fresh.step()
                assert fresh.live[0].rounds[0].drafted == last.drafted
    assert rejected or drafter == "ngram"
