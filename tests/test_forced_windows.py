"""Adaptive windows and tokens that a grammar forces: these come without the drafter, so they say
nothing about it, and it does not decide about them.
"""

from __future__ import annotations

import random
from copy import copy
from typing import Any

import cases
import pytest
from tiny_vocabularies import letters

from lightning_specdec.decoding import (
    AdaptiveWindow,
    Calibration,
    Request,
    Session,
    autoregressive_decode,
    speculative_decode,
)
from lightning_specdec.decoding.windows import Controller, Outcome
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import Grammar, RejectionSampling, Sampling

TEXT = "gabbadekaihag"
WIDTHS = (1, 2, 3, 5, 9)
CHEAP_CALLS = (1.0, 1.02, 1.04, 1.08, 1.16)
SOME_ROW = Request(0, [1], max_new_tokens=1, eos=frozenset(), speculative=True)


def costs(draft_step_seconds: float, lookup_seconds: float | None = None) -> Calibration:
    """Costs in which wide calls are cheap."""
    return Calibration(
        WIDTHS, CHEAP_CALLS, (0.0,) * 5, 0.0, draft_step_seconds, 0.0, lookup_seconds
    )


def lettered(name: str) -> LanguageModel:
    """The target with a vocabulary of letters."""
    target = copy(cases.target(name))
    target.vocabulary = letters(cases.VOCAB)
    return target


def state_of(controller: Controller) -> list[Any]:
    """What a controller has learned, and what it chooses."""
    state: list[Any] = [controller.balance, controller.fallback_balance]
    state += [controller.window, controller.draft_window, controller.lookup_window]
    for stage in (controller.draft, controller.lookup):
        if stage is not None:
            state += [stage.rates(), stage.offer_rate]
    return state


@pytest.mark.parametrize("lookup_seconds", [None, 0.001])
@pytest.mark.parametrize("is_copied", [False, True])
def test_rounds_with_forced_tokens_teach_an_adaptive_window_nothing(
    lookup_seconds: float | None,
    is_copied: bool,
) -> None:
    """A draft that is never right, and five forced rounds after each of its rounds."""
    generator = random.Random(1)
    plain = Controller(costs(0.2, lookup_seconds))
    with_forced = Controller(costs(0.2, lookup_seconds))
    for _ in range(60):
        window = plain.window
        outcome = Outcome(SOME_ROW, window, window, 0)
        plain.learn([outcome])
        with_forced.learn([outcome])
        for _ in range(5):
            length = generator.randint(1, 8)
            forced = Outcome(SOME_ROW, length, length, length, is_copied=is_copied, is_forced=True)
            with_forced.learn([forced])
        assert state_of(with_forced) == state_of(plain)
    # Far below the prior. With the forced tokens it would be above it.
    assert with_forced.draft.rates()[0] < 0.5


def test_in_a_round_of_several_rows_only_those_without_forced_tokens_teach() -> None:
    alone = Controller(costs(0.2))
    beside = Controller(costs(0.2))
    for _ in range(30):
        window = alone.window
        outcomes = [Outcome(SOME_ROW, window, window, 0), Outcome(SOME_ROW, window, window, 1)]
        forced = [Outcome(SOME_ROW, 8, 8, 8, is_forced=True)] * 2
        alone.learn(outcomes)
        beside.learn([forced[0], outcomes[0], forced[1], outcomes[1]])
        assert beside.draft.rates() == alone.draft.rates()
        assert beside.balance == alone.balance


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["ExactMatch", "RejectionSampling"])
@pytest.mark.parametrize("drafter", ["ngram", "near", "unrelated"])
def test_a_drafter_that_never_pays_does_not_hold_up_forced_tokens(
    drafter: str,
    rule: str,
    temperature: float,
) -> None:
    """A single text of 13 letters and EOS: two rounds of nine, and the drafter has no part."""
    target = lettered("transformer")
    options: dict[str, Any] = {
        "max_new_tokens": 20,
        "sampling": Sampling(temperature, processors=(Grammar.choice([TEXT]),)),
        "eos": (cases.EOS,),
        "seed": 3,
    }
    window = AdaptiveWindow(costs(draft_step_seconds=50.0))
    prompts = cases.PROMPTS[:2]
    result = speculative_decode(
        target,
        cases.drafter(drafter, "transformer"),
        prompts,
        rule=cases.RULES[rule](),
        num_draft_tokens=window,
        **options,
    )
    expected = autoregressive_decode(target, prompts, **options)
    assert result.tokens == expected.tokens
    assert [len(tokens) for tokens in result.tokens] == [len(TEXT) + 1] * 2
    assert result.num_draft_calls == 0
    for row in result.rows:
        assert row.num_rounds == 2


def test_forced_rows_and_others_share_a_session() -> None:
    """One row has a grammar with a single text, the other none; the window follows the other."""
    target = lettered("transformer")
    drafter = cases.drafter("unrelated", "transformer")
    session = Session(
        target,
        drafter,
        max_length=64,
        num_draft_tokens=AdaptiveWindow(costs(0.3)),
        rule=RejectionSampling(),
        eos=(cases.EOS,),
    )
    forced = session.add([1, 2], max_new_tokens=20, processors=(Grammar.choice([TEXT]),))
    free = session.add([3, 4], max_new_tokens=30, eos=())
    forced_rounds = 0
    while session.live:
        session.step()
        for outcome in session.outcomes:
            assert outcome.is_forced == (outcome.row is forced)
            if outcome.is_forced:
                forced_rounds += 1
                assert outcome.num_accepted == outcome.num_made
    assert forced_rounds == 2
    assert letters(cases.VOCAB).join(forced.text[2:-1]).decode() == TEXT
    expected = autoregressive_decode(target, [[3, 4]], max_new_tokens=30, eos=())
    assert free.text[2:] == expected.tokens[0]
