"""A drafter that is replaced between two rounds: running rows go on with the same tokens, and the
new one drafts as if it had been there from the start.
"""

from __future__ import annotations

import gc
import weakref
from copy import copy, deepcopy
from typing import Any

import cases
import pytest
from tiny_vocabularies import letters

from lightning_specdec.decoding import AdaptiveWindow, Calibration, Request, Session
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.drafters.eagle import FeatureState
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.models.state import KVState
from lightning_specdec.rules import Grammar

MAX_LENGTH = 60
NUM_NEW = 24
WINDOW = 3
REPLACEMENTS = [
    ("llama", "near", "eagle"),
    ("llama", "eagle", "near"),
    ("llama", "eagle", "eagle_reduced"),
    ("llama", "ngram", "heads"),
    ("llama", "heads", "early_exit"),
    ("llama", "early_exit", "block"),
    ("llama", "block", "lookup_eagle"),
    ("llama", "lookup_eagle", "staged"),
    ("llama", "staged", "staged_exit"),
    ("llama", "suffix_corpus", "cross"),
    ("openvino", "near", "eagle"),
    ("openvino", "eagle", "heads"),
    ("gemma3", "near", "eagle"),
    ("gemma3", "eagle", "ngram"),
    ("transformer", "unrelated", "near"),
    ("rnn", "near", "unrelated"),
    ("rnn", "repeater", "ragged"),
]
"""A target, the drafter that a session begins with, and the one that replaces it."""
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.6, "top_k": 4, "seed": 9},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "seed": 2, "eos": (cases.EOS,)},
    {"temperature": 1.0, "seed": 5, "processors": (Grammar.regex("[a-e]{3}(abc|deg)+"),)},
]


def target_of(name: str) -> LanguageModel:
    """The target with a vocabulary of letters, so that rows may have grammars."""
    if name == "openvino":
        # A new one, which is compiled again once a drafter reads its hidden states.
        target = cases.MODELS[name]()
    else:
        target = copy(cases.target(name))
    target.vocabulary = letters(cases.VOCAB)
    return target


def run(session: Session) -> None:
    while session.live:
        session.step()


def add(session: Session, number: int, **options: Any) -> Request:
    """Add a row whose length and settings depend on its number."""
    prompt = cases.PROMPTS[number % len(cases.PROMPTS)]
    settings = {**SETTINGS[number % len(SETTINGS)], **options}
    if "processors" in settings:
        settings["eos"] = (cases.EOS,)
    return session.add(prompt, index=number, max_new_tokens=NUM_NEW, **settings)


def alone(target: LanguageModel, drafter: Drafter, number: int) -> Request:
    """The row of a session that has no other row and no other drafter."""
    session = Session(target, drafter, max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
    row = add(session, number)
    run(session)
    return row


@pytest.mark.parametrize(("target", "first", "second"), REPLACEMENTS)
def test_rows_of_all_lengths_and_settings_go_on_with_the_tokens_that_they_have_alone(
    target: str,
    first: str,
    second: str,
) -> None:
    model = target_of(target)
    drafters = [cases.drafter(first, target), cases.drafter(second, target)]
    session = Session(model, drafters[0], max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
    rows = []
    # Rows join one by one. Each drafter drafts for a few rounds, in which rows of the batch end.
    for number in range(len(SETTINGS)):
        rows.append(add(session, number))
        # The row that has just joined has not been read by any model.
        session.replace_drafter(drafters[(number + 1) % 2])
        for _ in range(1 + number % 3):
            session.step()
    session.replace_drafter(drafters[1])
    run(session)

    for number, row in enumerate(rows):
        expected = alone(model, drafters[0], number)
        assert row.text == expected.text
        assert row.stop_reason == expected.stop_reason


@pytest.mark.parametrize(("target", "first", "second"), REPLACEMENTS)
def test_the_new_drafter_drafts_as_in_a_session_of_its_own(
    target: str,
    first: str,
    second: str,
) -> None:
    model = cases.target(target)
    second_drafter = cases.drafter(second, target)
    options: dict[str, Any] = {"max_length": MAX_LENGTH, "num_draft_tokens": WINDOW}
    session = Session(model, cases.drafter(first, target), **options)
    rows = [
        session.add(prompt, index=index, max_new_tokens=NUM_NEW)
        for index, prompt in enumerate(cases.PROMPTS)
    ]
    for _ in range(3):
        session.step()
    session.replace_drafter(second_drafter)
    # A head that has the hidden states of its predecessor drafts at once. In a new session it has
    # them after the first round, which draws one token.
    has_hidden_states = second in ("eagle_reduced", "lookup_eagle")
    texts = [list(row.text) for row in rows]
    if has_hidden_states:
        assert max(session.states[0].consumed) > 0
        texts = [text[:-1] for text in texts]
    num_rounds = [row.num_rounds for row in rows]
    run(session)

    num_compared = 0
    for index, row in enumerate(rows):
        fresh_session = Session(model, second_drafter, **options)
        num_left = row.max_length - len(texts[index])
        fresh = fresh_session.add(texts[index], index=index, max_new_tokens=num_left)
        # Prompt lookup distinguishes what was generated.
        fresh.prompt_length = row.prompt_length
        run(fresh_session)
        rounds = fresh.rounds
        if has_hidden_states and rounds[0].drafted:
            # A lookup has found something before the last token.
            continue
        if has_hidden_states:
            rounds = rounds[1:]
        assert row.rounds[num_rounds[index] :] == rounds
        num_compared += 1
    assert num_compared > 1


@pytest.mark.parametrize(
    ("first", "second", "reads_again"),
    [
        ("eagle", "eagle_reduced", False),
        ("lookup_eagle", "eagle", False),
        ("ngram", "heads", False),
        ("near", "early_exit", False),
        ("near", "ngram", False),
        ("near", "eagle", True),
        ("eagle", "mtp", True),
    ],
)
def test_the_target_reads_texts_again_only_for_hidden_states_that_it_must_return(
    first: str, second: str, reads_again: bool
) -> None:
    model = cases.target("llama")
    session = Session(
        model, cases.drafter(first, "llama"), max_length=MAX_LENGTH, num_draft_tokens=WINDOW
    )
    row = session.add([1, 2, 3, 4, 5] * 4, max_new_tokens=NUM_NEW)
    for _ in range(3):
        session.step()
    text_length = len(row.text)
    session.replace_drafter(cases.drafter(second, "llama"))
    (num_read,) = session.states[0].consumed
    assert (num_read == 0) == reads_again
    assert num_read == 0 or num_read >= text_length - 1
    run(session)
    assert row.text == alone_text(model, row)


def alone_text(model: LanguageModel, row: Request) -> list[int]:
    """The text of a row by prompt lookup in another session."""
    session = Session(model, cases.drafter("ngram", "llama"), max_length=MAX_LENGTH)
    other = session.add(row.text[: row.prompt_length], max_new_tokens=NUM_NEW)
    run(session)
    return other.text


def test_draft_tokens_of_the_new_drafter_are_accepted() -> None:
    """A drafter that had lost its place would draft, too, but be wrong."""
    model = cases.target("llama")
    session = Session(
        model, cases.drafter("wrong", "llama"), max_length=MAX_LENGTH, num_draft_tokens=WINDOW
    )
    row = session.add([1, 2, 3], max_new_tokens=40)
    for _ in range(4):
        session.step()
    assert row.num_new == 4
    session.replace_drafter(cases.drafter("itself", "llama"))
    run(session)
    assert {round_.num_accepted for round_ in row.rounds[4:-1]} == {WINDOW}


@pytest.mark.parametrize("second", ["near", "eagle", "ngram"])
def test_rows_that_have_ended_may_be_saved_and_resumed_after_the_replacement(second: str) -> None:
    model = cases.target("llama")
    session = Session(
        model, cases.drafter("heads", "llama"), max_length=MAX_LENGTH, num_draft_tokens=WINDOW
    )
    first = session.add([1, 2, 3, 4], max_new_tokens=9, index=0)
    other = session.add([5, 6], max_new_tokens=NUM_NEW, index=1)
    while first.live:
        session.step()
    drafter = cases.drafter(second, "llama")
    session.replace_drafter(drafter)
    saved = session.save(first)
    prompt = [*first.text, 7, 8]
    resumed = session.resume(first, prompt, max_new_tokens=9)
    rows = [resumed]
    if saved is not None:
        rows.append(session.add(prompt, saved=saved, max_new_tokens=9, index=2))
    run(session)

    fresh_session = Session(model, drafter, max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
    fresh = fresh_session.add(prompt, max_new_tokens=9)
    run(fresh_session)
    for row in rows:
        assert row.text == fresh.text
        assert row.rounds == fresh.rounds
    assert other.stop_reason == "length"


def test_what_was_saved_under_the_previous_drafter_is_refused() -> None:
    session = Session(cases.target("llama"), cases.drafter("eagle", "llama"), max_length=MAX_LENGTH)
    row = session.add([1, 2, 3], max_new_tokens=9)
    run(session)
    saved = session.save(row)
    session.replace_drafter(cases.drafter("heads", "llama"))
    with pytest.raises(ValueError, match="read by another target or drafter"):
        session.add([1, 2, 3, 4], saved=saved, max_new_tokens=9)


def test_an_adaptive_window_forgets_what_it_has_learned_of_the_previous_drafter() -> None:
    model = cases.target("llama")
    good = cases.drafter("itself", "llama")
    costs = Calibration((1, 2, 5), (1.0, 1.02, 1.1), (0.0, 0.0, 0.0), 0.0, 0.1, 0.0)
    options: dict[str, Any] = {"max_length": 120, "num_draft_tokens": AdaptiveWindow(costs)}
    session = Session(model, cases.drafter("wrong", "llama"), **options)
    row = session.add([1, 2, 3], max_new_tokens=100)
    for _ in range(40):
        session.step()
    assert row.rounds[-1].drafted == []
    session.replace_drafter(good)
    text = list(row.text)
    num_rounds = row.num_rounds
    run(session)

    fresh_session = Session(model, good, **options)
    fresh = fresh_session.add(text, max_new_tokens=row.max_length - len(text))
    run(fresh_session)
    assert row.rounds[num_rounds:] == fresh.rounds
    assert len(fresh.rounds[0].drafted) > 1


def test_the_window_may_change_with_the_drafter_up_to_the_first_one() -> None:
    session = Session(
        cases.target("llama"), cases.drafter("near", "llama"), max_length=30, num_draft_tokens=3
    )
    row = session.add([1, 2, 3], max_new_tokens=27)
    session.step()
    for window in (1, 3):
        session.replace_drafter(cases.drafter("itself", "llama"), window)
        session.step()
        assert len(row.rounds[-1].drafted) == window
    with pytest.raises(ValueError, match="4 draft tokens exceed the 3 that the session has room"):
        session.replace_drafter(cases.drafter("near", "llama"), 4)
    run(session)
    assert row.num_new == 27


def test_a_drafter_that_does_not_fit_is_refused_and_the_previous_one_stays() -> None:
    model = cases.target("llama")
    near = cases.drafter("near", "llama")
    session = Session(model, near, max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
    rows = [add(session, number) for number in range(3)]
    session.step()
    other_vocabulary = ModelDrafter(cases.MODELS["rnn"](3, vocab_size=cases.VOCAB + 2))
    with pytest.raises(ValueError, match="the draft has a vocabulary of 13 tokens"):
        session.replace_drafter(other_vocabulary)

    short: Any = deepcopy(cases.drafter("ngram", "llama"))
    short.draft = cases.Wrapped(cases.target("rnn"), max_positions=10)
    with pytest.raises(ValueError, match="do not fit the draft's context of 10"):
        session.replace_drafter(short)

    assert session.drafter is near
    run(session)
    for number, row in enumerate(rows):
        assert row.rounds == alone(model, near, number).rounds


def test_a_rule_that_compares_logits_refuses_a_drafter_without_them() -> None:
    session = Session(
        cases.target("rnn"),
        cases.drafter("near", "rnn"),
        max_length=MAX_LENGTH,
        rule="EpsilonThreshold",
    )
    with pytest.raises(ValueError, match="EpsilonThreshold compares the draft's logits"):
        session.replace_drafter(cases.drafter("ngram", "rnn"))


def test_a_drafter_that_draws_at_random_gets_numbers_for_greedy_rows_too() -> None:
    model = cases.target("rnn")
    hot = cases.drafter("hotter", "rnn")
    session = Session(model, cases.drafter("near", "rnn"), max_length=MAX_LENGTH)
    row = session.add([1, 2, 3], max_new_tokens=NUM_NEW, index=4)
    session.step()
    num_rounds = row.num_rounds
    session.replace_drafter(hot)
    run(session)
    # The numbers are those that the row has if the drafter is there from the start.
    fresh_session = Session(model, hot, max_length=MAX_LENGTH)
    fresh = fresh_session.add([1, 2, 3], max_new_tokens=NUM_NEW, index=4)
    run(fresh_session)
    assert row.text == fresh.text
    drafts = {tuple(round_.drafted) for round_ in row.rounds[num_rounds:]}
    assert len(drafts) > 2


@pytest.mark.parametrize(
    ("first", "second"), [("near", "heads"), ("heads", "near"), ("near", "early_exit")]
)
def test_recorded_rounds_of_a_replaced_drafter_decide_as_unrecorded_ones(
    first: str, second: str
) -> None:
    decisions = []
    previous: list[Any] = []
    for is_recorded in (False, True):
        model: Any = cases.target("llama")
        drafters: list[Any] = [deepcopy(cases.drafter(name, "llama")) for name in (first, second)]
        if is_recorded:
            model = deepcopy(model).record()
            for drafter in drafters:
                if isinstance(drafter, ModelDrafter):
                    drafter.model = drafter.model.record()  # type: ignore[operator]
        session = Session(model, drafters[0], max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
        rows = [add(session, number) for number in (0, 1, 2)]
        for _ in range(4):
            session.step()
        # There and back, over the same recorded calls.
        for drafter in (drafters[1], drafters[0], drafters[1]):
            session.replace_drafter(drafter)
            session.step()
            session.step()
        run(session)
        decisions.append([(row.text, row.rounds) for row in rows])
        previous.append(weakref.ref(drafters[0]))
        del drafters, drafter
        gc.collect()
        # What was recorded must not keep the weights of the previous drafter.
        assert previous[-1]() is None
    assert decisions[0] == decisions[1]


def test_outcomes_tell_requested_copied_and_forced_draft_tokens() -> None:
    model = target_of("llama")
    session = Session(
        model,
        cases.drafter("ngram", "llama"),
        max_length=MAX_LENGTH,
        num_draft_tokens=WINDOW,
        eos=(cases.EOS,),
    )
    certain = (Grammar.choice(["gabbadekaihag"]),)
    forced_row = session.add([1, 2], max_new_tokens=20, processors=certain)
    plain_row = session.add([3, 4], max_new_tokens=20)
    num_forced = 0
    while session.live:
        session.step()
        for outcome in session.outcomes:
            last_round = outcome.row.rounds[-1]
            assert outcome.num_accepted == last_round.num_accepted
            assert outcome.num_requested <= WINDOW
            if outcome.is_forced:
                assert outcome.row is forced_row
                num_forced += outcome.num_accepted
            if outcome.row is plain_row:
                assert outcome.num_requested == outcome.window or not plain_row.live
    assert num_forced >= 8


@pytest.mark.parametrize("name", ["near", "eagle"])
def test_a_new_drafter_reads_no_rows_that_have_ended(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = cases.target("llama")
    session = Session(
        target, cases.drafter("ngram", "llama"), max_length=400, num_draft_tokens=WINDOW
    )
    ended = session.add([1, 2, 3] * 100, max_new_tokens=4)
    running = session.add([1, 2], max_new_tokens=60)
    while ended.live:
        session.step()

    widths = []
    forward = type(target).forward

    def counted(self: LanguageModel, tokens: Any, *arguments: Any, **options: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(self, tokens, *arguments, **options)

    session.replace_drafter(cases.drafter(name, "llama"))
    monkeypatch.setattr(type(target), "forward", counted)
    session.step()
    assert widths and max(widths) <= len(running.text)
    assert session.save(ended) is None


@pytest.mark.parametrize("name", ["near", "heads", "eagle"])
def test_recorded_calls_do_not_add_up(name: str) -> None:
    def recorded_drafter() -> Drafter:
        drafter = deepcopy(cases.drafter(name, "llama"))
        if isinstance(drafter, ModelDrafter):
            assert isinstance(drafter.model, HuggingFaceLM)
            drafter.model = drafter.model.record()
        return drafter

    target = deepcopy(cases.target("llama"))
    assert isinstance(target, HuggingFaceLM)
    target = target.record()
    session = Session(target, recorded_drafter(), max_length=400, num_draft_tokens=WINDOW)
    for number in range(3):
        session.add([1, 2, 3 + number], max_new_tokens=390)

    counts = []
    for _ in range(8):
        for _ in range(3):
            session.step()
        target_state = session.states[0]
        assert isinstance(target_state, KVState)
        graphs = target_state.storage.graphs
        assert graphs is not None
        counts.append((len(graphs._recordings), len(graphs._fixed_addresses)))
        session.replace_drafter(recorded_drafter())
    assert counts[-1] == counts[-4]


def test_the_previous_drafter_stays_if_the_new_one_cannot_take_its_texts_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = cases.target("llama")
    eagle = cases.drafter("eagle", "llama")
    session = Session(model, eagle, max_length=MAX_LENGTH, num_draft_tokens=WINDOW)
    rows = [add(session, number) for number in range(3)]
    session.step()
    session.step()

    def fail(state: FeatureState, previous: Any) -> bool:
        raise ValueError("not enough memory for its hidden states")

    monkeypatch.setattr(FeatureState, "take_over", fail)
    with pytest.raises(ValueError, match="not enough memory"):
        session.replace_drafter(cases.drafter("eagle_reduced", "llama"))
    run(session)
    for number, row in enumerate(rows):
        assert row.rounds == alone(model, eagle, number).rounds
