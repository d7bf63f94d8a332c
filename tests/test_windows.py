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
from test_whole_decodes import BOUND, NUM_NEW, NUM_ROWS, PROMPT, chi_square
from test_whole_decodes import SAMPLING as WHOLE
from test_whole_decodes import target as whole_target

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Costs,
    DecodeResult,
    FixedWindow,
    Row,
    Session,
    Window,
    autoregressive_decode,
    open_session,
    run,
    speculative_decode,
    window_from_dict,
)
from lightning_specdec.decoding.windows import FEWEST_TOKENS, MAX_LOSS, Controller, Estimate, Outcome, Plan
from lightning_specdec.drafters import Draft, Drafter, DraftRequest, DraftState, ModelDrafter, TargetContext
from lightning_specdec.models import LanguageModel
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


def costs(shape: str, ratio: float, *, fixed: float = 0.0, batch_size: int = 1) -> Costs:
    """A draft step takes `ratio` of a target call, and so does reading a token, of the target's reading it."""
    loop = tuple(0.005 + 0.0005 * width for width in WIDTHS)
    return Costs(batch_size, WIDTHS, SHAPES[shape], loop, fixed * ratio, ratio, TOKEN_SECONDS * ratio, TOKEN_SECONDS)


def adaptive(shape: str = "bfloat16", ratio: float = 0.1, **options: Any) -> AdaptiveWindow:
    return AdaptiveWindow(Calibration((costs(shape, ratio),), 64), **options)


# The plan: numbers alone.


@pytest.mark.parametrize("seed", range(30))
def test_the_window_has_the_most_expected_tokens_per_second(seed: int) -> None:
    """Against a sum over all outcomes of a round, for random costs and random evidence."""
    generator = random.Random(seed)
    target = tuple(sorted(generator.uniform(1, 4) for _ in range(6)))
    step, fixed = generator.uniform(0, 0.3), generator.choice([0.0, generator.uniform(0, 0.5)])
    course = Controller(Costs(1, (1, 2, 3, 4, 5, 6), target, (0.1,) * 6, fixed, step, 0.0, 0.0), 5)
    truth = [generator.uniform(0, 1) for _ in range(5)]
    found = generator.uniform(0.2, 1)
    for _ in range(4000):  # so many that no belief from before counts
        made = 5 if generator.random() < found else 0
        accepted = 0
        while accepted < made and generator.random() < truth[accepted]:
            accepted += 1
        course.estimate.record(5, made, accepted, 1e9)
    pairs = zip(course.estimate.accepted, course.estimate.tested, strict=True)
    rates = [hits / trials if trials else 0.0 for hits, trials in pairs]
    offer = course.estimate.made[0] / course.estimate.asked[0]

    def tokens_per_second(window: int) -> float:
        if not window:
            return 1 / (target[0] + 0.1)
        tokens = 0.0
        for outcome in itertools.product([True, False], repeat=window):
            chance = 1.0
            for rate, kept in zip(rates, outcome, strict=False):
                chance *= rate if kept else 1 - rate
            tokens += chance * (1 + next((i for i, kept in enumerate(outcome) if not kept), window))
        tokens = offer * tokens + 1 - offer
        calls = offer * (target[window] + 0.1) + (1 - offer) * (target[0] + 0.1)
        return tokens / (fixed + step * window + calls)

    best = max(map(tokens_per_second, range(6)))
    assert tokens_per_second(course.best(5)) == pytest.approx(best, rel=0.01)
    for most in range(5):
        assert course.best(most) <= most


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_loss_stays_within_its_bound(seed: int) -> None:
    """An adversary decides what is accepted, found, and how long prompts are; the recorded costs are the clock."""
    generator = random.Random(seed)
    shape, ratio = generator.choice(list(SHAPES)), generator.choice([0.01, 0.05, 0.1, 0.25, 1.0])
    each = costs(shape, ratio, fixed=generator.choice([0.0, 2.0]))
    moods = [generator.random() ** 2 for _ in range(4)]
    length = generator.choice([FEWEST_TOKENS, 500, 2000])

    def accept(position: int) -> bool:
        return generator.random() < moods[position * 4 // length % 4]

    prompt = generator.choice([1, 50, 500, 5000])
    seconds = simulate(each, accept, length, prompt=prompt, found=generator.choice([0.3, 1.0]), generator=generator)[0]
    assert seconds <= (1 + MAX_LOSS) * standard(each, length, prompt) + 1e-9


def simulate(
    each: Costs,
    accept: Callable[[int], bool],
    num_new: int,
    *,
    prompt: int = 64,
    window: int | None = None,
    found: float = 1.0,
    generator: random.Random | None = None,
) -> tuple[float, list[int]]:
    """Decode by the recorded costs alone: seconds, and each round's window. `window` None adapts."""
    course = None if window else Controller(each, LARGEST)
    rounds = [each.round_seconds(made) for made in range(LARGEST + 1)]
    seconds, unread, done, windows = prompt * each.target_token_seconds, prompt, 0, []
    if course is not None:
        course.prompt_seconds, unread = seconds, course.readable(prompt)
    while done < num_new:
        most = min(LARGEST, num_new - done - 1)
        guesses = min(window or 0, most) if course is None else course.choose(num_new - done, unread)
        assert 0 <= guesses <= most
        made = guesses if found == 1 or (generator or random).random() < found else 0
        accepted = 0
        while accepted < made and accept(done + accepted):
            accepted += 1
        seconds += rounds[made]
        if guesses:
            seconds += each.draft_seconds + guesses * each.draft_step_seconds + unread * each.draft_token_seconds
        if course is not None:
            course.learn(guesses, unread, [Outcome(SOME_ROW, guesses, made, accepted)])
        windows.append(guesses)
        unread = 0 if guesses else unread + 1
        done += accepted + 1
    return seconds, windows


def standard(each: Costs, num_new: int, prompt: int = 64) -> float:
    return prompt * each.target_token_seconds + num_new * each.round_seconds(0)


def average(each: Costs, alpha: float, num_new: int, window: int | None = None) -> float:
    """Mean seconds over 40 texts, the same for every window; of a draft that is always right or wrong there is one."""
    texts = []
    for seed in range(40 if 0 < alpha < 1 else 1):
        generator = random.Random(seed)
        texts.append([generator.random() < alpha for _ in range(num_new)])
    return mean(simulate(each, text.__getitem__, num_new, window=window)[0] for text in texts)


@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.25])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_useless_draft_costs_a_twentieth_at_most_and_next_to_nothing_in_a_long_text(shape: str, ratio: float) -> None:
    each = costs(shape, ratio)
    assert average(each, 0.0, 128) <= 1.05 * standard(each, 128)
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


def test_it_stops_on_a_draft_that_is_always_wrong_and_tries_again_now_and_then() -> None:
    _, windows = simulate(costs("bfloat16", 0.25), lambda position: False, 4000)
    trials = [i for i, window in enumerate(windows) if window]
    assert len([trial for trial in trials if trial < 128]) <= 16 and len(trials) <= 4000 * MAX_LOSS / 0.25 + 16
    assert trials[-1] > 3900, "it gave up for ever"
    assert all(windows[trial] == 1 for trial in trials[8:])


@pytest.mark.parametrize("shape", list(SHAPES)[:2])
def test_it_opens_fully_on_a_perfect_draft(shape: str) -> None:
    _, windows = simulate(costs(shape, 0.05), lambda position: True, 400)
    assert max(windows) == 16
    assert min(windows[6:-1]) == 16, windows


@pytest.mark.parametrize("shape", list(SHAPES)[:3])
@pytest.mark.parametrize("ratio", [0.02, 0.1])
def test_it_recovers_when_a_draft_turns_good_and_leaves_when_it_turns_bad(shape: str, ratio: float) -> None:
    each = costs(shape, ratio)
    later, windows = simulate(each, lambda position: position >= 500, 1000)
    assert max(windows[-40:]) >= 4
    good = simulate(each, lambda position: True, 500, prompt=0)[0]
    assert later <= 1.2 * (standard(each, 500) + good)
    earlier, windows = simulate(each, lambda position: position < 500, 1000)
    bad = [each.round_seconds(window) + window * ratio for window in windows[-500:]]
    assert sum(bad[-300:]) <= 1.03 * 300 * each.round_seconds(0)
    assert earlier <= 1.05 * (standard(each, 500) + good) + 5 * each.round_seconds(0), "it took too long to see it"


def test_where_even_a_perfect_draft_loses_it_is_never_asked() -> None:
    assert not any(simulate(costs("one token after the other", 0.25), lambda position: True, 300)[1])


def test_what_lies_behind_the_first_rejection_teaches_nothing() -> None:
    seen = []
    for made in (3, 4, 8):
        evidence = Estimate(8)
        evidence.record(8, made, 2, 48.0)
        seen.append(vars(evidence))
    assert seen[0] == seen[1] == seen[2]
    evidence = Estimate(8)
    evidence.record(8, 2, 2, 48.0)
    assert evidence.made[:3] == [1, 1, 0] and evidence.asked[:3] == [1, 1, 1] and vars(evidence) != seen[0]


# Sessions: the laws of every other window.


@pytest.mark.parametrize("shape", ["wide calls are free"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("target", "drafter"), cases.pairs(targets=cases.BUT_LLAMA))
def test_with_an_adaptive_window_exact_match_equals_standard_decoding(
    target: str, drafter: str, temperature: float, shape: str
) -> None:
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    options: dict[str, Any] = {"max_new_tokens": 24, "sampling": Sampling(temperature), "eos": cases.EOS, "seed": 2}
    result = speculative_decode(model, guesser, cases.PROMPTS, num_draft_tokens=adaptive(shape), **options)
    assert result.tokens == autoregressive_decode(model, cases.PROMPTS, **options).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        *cases.triples(["near", "unrelated", "ragged", "ngram", "cross"], ["rnn"]),
        ("llama", "early_exit", "RejectionSampling"),
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
        alone = speculative_decode(model, guesser, cases.PROMPTS[index], indices=[index], **options).rows[0]
        assert row.tokens == alone.tokens
        if not (options["rule"].ignores_windows or (options["rule"].lossless and not temperature)):
            assert row.rounds == alone.rounds


@pytest.mark.parametrize(
    ("name", "drafter"), [("rnn", "near"), ("rnn", "unrelated"), ("rnn", "ngram"), ("llama", "early_exit")]
)
def test_whole_decodes_with_adaptive_windows_have_the_targets_distribution(name: str, drafter: str) -> None:
    guesser, rows, used = cases.DRAFTERS[drafter](whole_target(name)), [], set()
    for first in range(0, NUM_ROWS, 128):
        result = speculative_decode(
            whole_target(name),
            guesser,
            [PROMPT] * 128,
            max_new_tokens=NUM_NEW,
            num_draft_tokens=adaptive("wide calls are free", 0.01),
            rule=RejectionSampling(),
            sampling=WHOLE,
            indices=range(first, first + 128),
        )
        rows += result.tokens
        used |= {len(each.drafted) for row in result.rows for each in row.rounds or ()}
    assert len(used) > 1
    assert chi_square(name, rows) < BOUND


def test_a_record_replays() -> None:
    """The window in the record, the same seed: the same windows and tokens, whatever the clock says."""
    model, guesser = cases.target("rnn"), cases.drafter("near", "rnn")
    options: dict[str, Any] = {"max_new_tokens": 40, "rule": RejectionSampling(), "sampling": Sampling(1.0)}
    first = speculative_decode(model, guesser, cases.PROMPTS, num_draft_tokens=adaptive(), **options)
    record = DecodeResult.from_dict(json.loads(json.dumps(first.to_dict())))
    assert record == first and record.window is not None
    again = speculative_decode(
        model, guesser, cases.PROMPTS, num_draft_tokens=window_from_dict(record.window), **options
    )
    assert [row.rounds for row in again.rows] == [row.rounds for row in first.rows]
    assert len({len(each.drafted) for row in first.rows for each in row.rounds or ()}) > 2
    fixed = speculative_decode(model, guesser, cases.PROMPTS, max_new_tokens=4, num_draft_tokens=2)
    assert fixed.window == {"kind": "FixedWindow", "num_draft_tokens": 2}
    assert window_from_dict(fixed.window).largest == 2


class Counted(Drafter):
    """Counts how often a drafter is asked, and by how many tokens."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter, self.asked = drafter, list[int]()
        self.lengths: list[list[int]] = []

    def check_target(self, target: LanguageModel) -> None:
        self.drafter.check_target(target)

    def init_state(self, batch_size: int, max_length: int, context: TargetContext | None = None) -> DraftState:
        return self.drafter.init_state(batch_size, max_length, context)

    def features(self, target: LanguageModel) -> Sequence[int]:
        return self.drafter.features(target)

    def arguments(self) -> dict[str, Any]:
        return {}

    def propose(self, state: DraftState, request: DraftRequest, windows: Sequence[int], sampling: Sampling) -> Draft:
        self.asked.append(max(windows))
        self.lengths.append([len(text) for text in request.texts])
        return self.drafter.propose(state, request, windows, sampling)

    def observe(self, state: DraftState, output: Any, num_accepted: Sequence[int]) -> None:
        self.drafter.observe(state, output, num_accepted)


def test_a_session_asks_a_useless_draft_seldom_and_a_perfect_one_for_all_it_can() -> None:
    model = cases.target("rnn")
    useless = Counted(cases.drafter("wrong", "rnn"))
    result = speculative_decode(model, useless, [[3]], max_new_tokens=128, num_draft_tokens=adaptive(ratio=0.25))
    assert 1 <= len(useless.asked) <= 8 and result.num_target_calls == 128
    perfect = Counted(ModelDrafter(model))
    result = speculative_decode(model, perfect, [[3]], max_new_tokens=128, num_draft_tokens=adaptive(ratio=0.05))
    assert max(perfect.asked) == 16 and result.num_target_calls <= 14


def test_rows_share_what_they_learn_only_where_windows_cannot_change_their_output() -> None:
    for rule, jointly in (("ExactMatch", True), ("RejectionSampling", False)):
        session = Session(
            cases.target("rnn"),
            cases.drafter("repeater", "rnn"),
            max_length=60,
            rule=cases.RULES[rule](),
            sampling=Sampling(1.0),
            num_draft_tokens=adaptive(ratio=0.5),
        )
        first = session.add([3], max_new_tokens=40)
        while not first.rounds or first.rounds[-1].drafted:
            session.step()
        second = session.add([4], max_new_tokens=40)
        session.step()
        assert bool(second.rounds[0].drafted) is not jointly


def test_a_batch_plans_with_the_costs_of_its_size() -> None:
    free, dear = costs("wide calls are free", 0.01), costs("one token after the other", 0.25, batch_size=4)
    window = AdaptiveWindow(Calibration((free, dear), 64))
    drafter = Counted(cases.drafter("itself", "rnn"))
    session = Session(cases.target("rnn"), drafter, max_length=60, num_draft_tokens=window, batch_size=4)
    rows = [session.add([i], max_new_tokens=40) for i in range(4)]
    session.step()
    assert not drafter.asked
    for row in rows[1:]:
        session.cancel(row)
    session.step()
    assert drafter.asked


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
        assert all(outcome.num_accepted <= outcome.num_made <= outcome.window for outcome in outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "Scripted"}


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(["near", "unrelated", "transformer", "fused", "ngram", "early_exit"], ["rnn", "transformer"]),
)
def test_a_draft_that_was_not_asked_for_a_while_guesses_as_if_it_had_been(target: str, drafter: str) -> None:
    """What it read of rejected guesses is gone, and what it missed is read."""
    model, guesser, script = cases.target(target), cases.DRAFTERS[drafter](cases.target(target)), [4, 0, 0, 0] * 6
    session = open_session(model, guesser, cases.PROMPTS, max_new_tokens=60, num_draft_tokens=Scripted(script))
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", cases.RULES)
def test_a_round_without_guesses_is_a_step_of_standard_decoding(rule: str, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(temperature, top_p=0.9), "logprobs": True}
    model, drafter = cases.target("rnn"), Counted(cases.drafter("near", "rnn"))
    drafter.gives_logits = True  # type: ignore[misc]
    window = Scripted([0] * 12 + [1])
    result = speculative_decode(
        model, drafter, cases.PROMPTS, num_draft_tokens=window, rule=cases.RULES[rule](), **options
    )
    expected = autoregressive_decode(model, cases.PROMPTS, **options)
    assert result.tokens == expected.tokens and not drafter.asked and result.num_draft_calls == 0
    for row, other in zip(result.rows, expected.rows, strict=True):
        assert row.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("num_dropped", [0, 3])
def test_a_resumed_rows_windows_follow_from_its_texts_and_not_from_where_it_lay(num_dropped: int) -> None:
    """Another row may have taken its place; under this rule other windows would draw other tokens."""
    each = Costs(1, WIDTHS, SHAPES["bfloat16"], (0.0,) * 6, 0.0, 0.25, 0.25, 0.001)
    window, texts = AdaptiveWindow(Calibration((each,), 64)), []
    target, drafter = cases.target("rnn"), cases.drafter("near", "rnn")
    for taken in (False, True):
        session = Session(
            target, drafter, max_length=200, num_draft_tokens=window, rule=RejectionSampling(), sampling=Sampling(1.0)
        )
        row = session.add([i * 7 % cases.VOCAB for i in range(80)], max_new_tokens=20)
        run(session)
        if taken:
            session.add([1], max_new_tokens=9)
            run(session)
        row = session.resume(row, [*row.text[: len(row.text) - num_dropped], 5, 1], max_new_tokens=30)
        assert session._batch.place(row) == 0 and session._plan.first_token(row) > 0
        run(session)
        texts.append((row.text, row.rounds))
    assert texts[0] == texts[1]


def test_a_draft_sees_only_as_much_of_a_long_prompt_as_it_may_cost() -> None:
    each = Costs(1, WIDTHS, SHAPES["bfloat16"], (0.0,) * 6, 0.0, 0.25, 0.25, 0.001)
    window = AdaptiveWindow(Calibration((each,), 64))
    prompt = [i % cases.VOCAB for i in range(200)]
    drafter = Counted(cases.drafter("near", "rnn"))
    options: dict[str, Any] = {"max_new_tokens": 30, "eos": None}
    result = speculative_decode(cases.target("rnn"), drafter, [prompt], num_draft_tokens=window, **options)
    seen = drafter.lengths[0][0]
    assert 2 <= seen and seen * 0.25 <= MAX_LOSS * (0.001 * 200 + FEWEST_TOKENS) < (seen + 20) * 0.25
    assert [each[0] - seen for each in drafter.lengths] == sorted(each[0] - seen for each in drafter.lengths)
    assert result.tokens == autoregressive_decode(cases.target("rnn"), [prompt], **options).tokens
    whole = Counted(cases.drafter("near", "rnn"))
    speculative_decode(cases.target("rnn"), whole, [prompt], max_new_tokens=4, num_draft_tokens=FixedWindow(2))
    assert whole.lengths[0][0] == 200


def test_a_window_larger_than_what_was_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="max_draft_tokens must be from 1 to 16, got 17"):
        adaptive(max_draft_tokens=17)
    assert adaptive(max_draft_tokens=3).largest == 3
    with pytest.raises(ValueError, match="a window is a FixedWindow or an AdaptiveWindow"):
        window_from_dict({"kind": "Thumb"})
