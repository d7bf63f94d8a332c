"""Long prompts are read over several rounds, so that running rows go on: no row's tokens change."""

from __future__ import annotations

import random
from copy import copy, deepcopy
from typing import Any

import cases
import pytest
import row_families
import torch
from families import tiny
from tiny_vocabularies import letters

from lightning_specdec.decoding import Request, Session
from lightning_specdec.drafters import Drafter, ModelDrafter, NGramDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.models.huggingface import HuggingFaceLM
from lightning_specdec.rules import Grammar

MAX_LENGTH = 80
NUM_NEW = 9
WINDOW = 3
NUM_SCHEDULES = {"rnn": 8, "transformer": 4, "recurrent": 2}
"""By the target; 3 for others."""
PAIRS = [
    ("rnn", "near", "ExactMatch"),
    ("rnn", "near", "RejectionSampling"),
    ("rnn", "near", "TypicalAcceptance"),
    ("rnn", "cross", "ExactMatch"),
    ("rnn", "suffix_corpus", "ExactMatch"),
    ("transformer", "ragged", "RejectionSampling"),
    ("gemma3", "near", "RejectionSampling"),
    ("llama", "ngram", "ExactMatch"),
    ("llama", "eagle", "RejectionSampling"),
    ("llama", "eagle_windowed", "ExactMatch"),
    ("llama", "block", "RejectionSampling"),
    ("llama", "mtp", "RejectionSampling"),
    ("llama", "heads", "RejectionSampling"),
    ("llama", "early_exit", "RejectionSampling"),
    ("llama", "lookup_eagle", "ExactMatch"),
    ("llama", "staged", "ExactMatch"),
    ("llama", "staged_exit", "ExactMatch"),
    ("openvino", "near", "ExactMatch"),
    ("openvino", "eagle", "RejectionSampling"),
    ("openvino", "heads", "ExactMatch"),
    ("recurrent", "near", "RejectionSampling"),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3, "logprobs": True},
    {"temperature": 0.6, "top_k": 4, "seed": 9},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "seed": 2, "eos": (cases.EOS,)},
    {"temperature": 1.0, "seed": 5, "processors": (Grammar.regex("[a-e]{3}(abc|deg)+"),)},
]
PROMPT_LENGTHS = (1, 40, 7, 33, 2, 61)


def pair_of(target: str, drafter: str) -> tuple[LanguageModel, Drafter]:
    """A target with a vocabulary of letters, so that rows may have grammars, and a drafter."""
    if target == "recurrent":
        sizes = {**row_families.FAMILIES["qwen3_next"], "vocab_size": cases.VOCAB}
        with torch.inference_mode(False):
            model = HuggingFaceLM(tiny("qwen3_next", **sizes))
        return with_letters(model), ModelDrafter(cases.near(model))
    if target == "openvino":
        # A new one, which is compiled again once a drafter reads its hidden states.
        return with_letters(cases.MODELS[target]()), cases.drafter(drafter, target)
    return with_letters(cases.target(target)), cases.drafter(drafter, target)


def with_letters(model: LanguageModel) -> LanguageModel:
    model = copy(model)
    model.vocabulary = letters(cases.VOCAB)
    return model


def prompt_of(number: int) -> list[int]:
    generator = random.Random(number)
    length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
    return [generator.randrange(cases.VOCAB) for _ in range(length)]


def add(session: Session, number: int, **options: Any) -> Request:
    settings = dict(SETTINGS[number % len(SETTINGS)])
    if "processors" in settings:
        settings["eos"] = (cases.EOS,)
    options = {"index": number, "max_new_tokens": NUM_NEW, **settings, **options}
    return session.add(prompt_of(number), **options)


def new_session(target: LanguageModel, drafter: Drafter, rule: str = "ExactMatch") -> Session:
    return Session(target, drafter, max_length=MAX_LENGTH, num_draft_tokens=WINDOW, rule=rule)


def run(session: Session, max_prompt_tokens: int | None = None) -> None:
    while session.live:
        session.step(max_prompt_tokens)


def alone(target: LanguageModel, drafter: Drafter, number: int, rule: str = "ExactMatch") -> Any:
    """The row of a session that reads its prompt at once."""
    session = new_session(target, drafter, rule)
    row = add(session, number)
    run(session)
    return row


@pytest.mark.parametrize(("target", "drafter", "rule"), PAIRS)
def test_a_row_has_the_tokens_that_it_has_alone_whatever_the_parts(
    target: str,
    drafter: str,
    rule: str,
) -> None:
    """Rows of all lengths and settings come and go, and each round reads another number."""
    model, drafter_object = pair_of(target, drafter)
    expected = [alone(model, drafter_object, number, rule) for number in range(len(SETTINGS))]
    num_reading = 0
    for seed in range(NUM_SCHEDULES.get(target, 3)):
        generator = random.Random(seed)
        session = new_session(model, drafter_object, rule)
        rows: dict[Request, int] = {}
        waiting = generator.sample(range(len(SETTINGS)), len(SETTINGS))
        while waiting or session.live:
            if waiting and generator.random() < 0.5:
                number = waiting.pop()
                rows[add(session, number)] = number
            if session.live and generator.random() < 0.05:
                session.cancel(generator.choice(session.live))
            session.step(generator.choice((1, 2, 5, 16, None)))
            num_reading += sum(row.is_reading for row in rows)

        for row, number in rows.items():
            single = expected[number]
            assert row.text == single.text[: len(row.text)]
            if row.stop_reason == "cancelled":
                continue
            assert row.text == single.text
            assert row.stop_reason == single.stop_reason
            # The drafts are the same, too.
            assert row.counts == single.counts
            if row.logprobs is not None:
                torch.testing.assert_close(row.logprobs, single.logprobs, atol=1e-4, rtol=1e-4)
    assert num_reading > 5


class Watched(cases.Wrapped):
    """Records how many tokens of each row each call reads."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.calls: list[list[int]] = []

    def forward(self, tokens: torch.Tensor, state: Any = None, **options: Any) -> Any:
        lengths = options.get("valid_lengths")
        self.calls.append([tokens.shape[1]] * len(tokens) if lengths is None else list(lengths))
        return super().forward(tokens, state, **options)


def test_running_rows_get_tokens_in_every_round_and_each_round_reads_a_part() -> None:
    model = Watched(cases.target("rnn"))
    session = new_session(model, cases.drafter("near", "rnn"))
    running = [session.add([1, 2], max_new_tokens=60, index=index) for index in range(2)]
    session.step(8)
    long = session.add(list(range(10)) * 4, max_new_tokens=NUM_NEW)
    model.calls.clear()

    num_rounds = 0
    while long.num_new == 0:
        events = session.step(8)
        num_rounds += 1
        reported = [row for row, tokens in events if tokens]
        assert [row for row in reported if row is not long] == running
        assert (long in reported) == (long.num_new > 0)
    assert num_rounds == 5
    for lengths in model.calls:
        # Each row may read up to a window and the token before it in addition.
        assert sum(lengths) <= 8 + 4 * (WINDOW + 1)
    assert session.outcomes[-1].row is long


def test_the_prompts_of_several_rows_share_what_a_round_reads_and_the_oldest_is_first() -> None:
    session = new_session(cases.target("rnn"), cases.drafter("near", "rnn"))
    first = session.add([1] * 20, max_new_tokens=NUM_NEW)
    second = session.add([2] * 20, max_new_tokens=NUM_NEW)
    assert session.step(10) == []
    assert (first.num_prompt_read, second.num_prompt_read) == (10, 1)
    events = session.step(12)
    assert [row for row, _ in events] == [first]
    assert second.num_prompt_read == 3
    run(session, 6)
    assert second.stop_reason == "length"
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        session.step(0)


def test_no_last_part_is_a_single_token() -> None:
    """A draft head would know all it needs, and draft sooner than after the whole prompt."""
    for length in range(1, 8):
        for size in range(1, 5):
            session = new_session(cases.target("rnn"), cases.drafter("near", "rnn"))
            row = session.add([1] * length, max_new_tokens=1)
            num_read = 0
            while row.live:
                num_read = row.num_prompt_read
                session.step(size)
            assert num_read != length - 1 or length == 1


@pytest.mark.parametrize(
    ("target", "drafter"), [("llama", "near"), ("llama", "eagle"), ("openvino", "near")]
)
def test_a_row_that_ends_within_its_prompt_leaves_what_it_has_read(
    target: str, drafter: str
) -> None:
    model, drafter_object = pair_of(target, drafter)
    session = new_session(model, drafter_object)
    # Three rows and the cancelled one fill the batch, so that it does not shrink.
    others = [add(session, number, max_new_tokens=18) for number in range(3)]
    session.step()
    cancelled = add(session, 5)
    for _ in range(3):
        session.step(7)
    session.cancel(cancelled)
    # Others go on in the meantime. The rest of the prompt is not read.
    session.step(7)
    assert cancelled.num_prompt_read == 21
    saved = session.save(cancelled)
    assert saved is not None
    assert saved.tokens == tuple(prompt_of(5)[:21])

    continued = add(session, 5, saved=saved)
    resumed = session.resume(cancelled, prompt_of(5), max_new_tokens=NUM_NEW)
    run(session, 9)
    expected = alone(model, drafter_object, 5)
    assert continued.text == expected.text
    assert resumed.text == expected.text
    for number, row in enumerate(others):
        expected_text = alone(model, drafter_object, number).text
        assert row.text[: len(expected_text)] == expected_text


@pytest.mark.parametrize(
    ("first", "second"), [("near", "eagle"), ("eagle", "near"), ("eagle", "heads")]
)
def test_the_drafter_may_change_within_a_prompt(first: str, second: str) -> None:
    model, drafter = pair_of("llama", first)
    session = new_session(model, drafter)
    rows = [add(session, number) for number in range(len(SETTINGS))]
    for _ in range(3):
        session.step(9)
    session.replace_drafter(cases.drafter(second, "llama"))
    run(session, 9)
    for number, row in enumerate(rows):
        assert row.text == alone(model, drafter, number).text


class Interrupted(cases.Wrapped):
    """A model whose call number `fails_at` ends with an interrupt, after it has read its tokens."""

    num_calls = 0
    fails_at = 0

    def forward(self, tokens: torch.Tensor, state: Any = None, **options: Any) -> Any:
        output = super().forward(tokens, state, **options)
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise KeyboardInterrupt
        return output


@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_an_interrupted_part_is_read_again(fails_at: int) -> None:
    model = Interrupted(cases.target("llama"))
    model.fails_at = fails_at
    session = new_session(model, cases.drafter("near", "llama"))
    row = session.add(prompt_of(1), max_new_tokens=NUM_NEW)
    with pytest.raises(KeyboardInterrupt):
        run(session, 9)
    run(session, 9)
    session = new_session(cases.target("llama"), cases.drafter("near", "llama"))
    expected = session.add(prompt_of(1), max_new_tokens=NUM_NEW)
    run(session)
    assert row.text == expected.text


@pytest.mark.parametrize("drafter", ["near", "early_exit", "heads"])
def test_recorded_and_pipelined_rounds_read_prompts_in_parts(drafter: str) -> None:
    model, drafter_object = pair_of("llama", drafter)
    recorded_model: Any = with_letters(deepcopy(cases.target("llama")))
    recorded_model.record()
    recorded_drafter: Any = deepcopy(drafter_object)
    if isinstance(recorded_drafter, ModelDrafter):
        recorded_drafter.model = recorded_drafter.model.record()  # type: ignore[operator]
    session = new_session(recorded_model, recorded_drafter)
    rows = []
    for number in range(len(SETTINGS)):
        rows.append(add(session, number))
        for _ in range(3):
            session.step(11)
    run(session, 11)
    for number, row in enumerate(rows):
        assert row.text == alone(model, drafter_object, number).text


class FirstTokenFails(cases.Wrapped):
    """A model whose first call has NaN in all logits of the last row."""

    num_calls = 0

    def forward(self, tokens: torch.Tensor, state: Any = None, **options: Any) -> Any:
        output = super().forward(tokens, state, **options)
        self.num_calls += 1
        if self.num_calls == 1:
            output.logits[-1] = torch.nan
        return output


def test_a_row_that_fails_at_its_first_token_harms_no_other() -> None:
    """Its text stays as the draft has seen it: the end of a text that exceeds its context."""
    target = cases.target("llama")
    drafter = ModelDrafter(cases.Wrapped(cases.related(target), max_positions=16))
    numbers = (0, 2, 4)
    session = new_session(FirstTokenFails(target), drafter)
    rows = [add(session, number) for number in numbers]
    failed = session.add([1] * 40, max_new_tokens=NUM_NEW)
    run(session)
    assert (failed.stop_reason, failed.num_new) == ("failed", 0)
    for number, row in zip(numbers, rows, strict=True):
        assert row.text == alone(target, drafter, number).text


@pytest.mark.parametrize("family", ["jamba", "deepseek_v32"])
def test_a_target_that_reads_one_token_a_call_reads_whole_prompts(family: str) -> None:
    model = row_families.ours(family)
    prompt = row_families.PROMPTS[-1]
    session = Session(model, NGramDrafter(), max_length=MAX_LENGTH, max_new_tokens=4)
    row = session.add(prompt)
    session.step(8)
    assert row.num_new > 0
    run(session, 8)
    assert row.text[len(prompt) :] == row_families.standard(family, 4)[-1]
