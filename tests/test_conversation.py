"""Laws of conversations: nothing is read twice, and answers are those to the whole text."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Request, Session, autoregressive_decode, run
from lightning_specdec.decoding import session as module
from lightning_specdec.decoding.session import Conversation
from lightning_specdec.rules import Sampling

TURNS = [[3, 1, 4], [7], [2, 7, 1, 8, 2, 8], [10, 0, 10]]
NEW = 9


def converse(target: str, drafter: str, **options: Any) -> Conversation:
    config = DecodingConfig.of(None, max_new_tokens=NEW, **options)
    return Conversation(cases.target(target), cases.drafter(drafter, target), config)


def talk(
    conversation: Conversation,
    *,
    cancel_at: int | None = None,
    num_turns: int = len(TURNS),
) -> list[Request]:
    """Rows of `num_turns` turns.

    With `cancel_at`, each answer is stopped after that many rounds.
    """
    text: list[int] = []
    rows = []
    for turn in TURNS[:num_turns]:
        row = conversation.begin([*text, *turn])
        answer: list[int] = []
        for num_rounds in range(NEW):
            if row.live and num_rounds == cancel_at:
                conversation.session.cancel(row)
            for _, tokens in conversation.session.step():
                answer += tokens
        assert answer == row.text[row.prompt_length :] and not row.live
        text = row.text
        rows.append(row)
    return rows


def count_reads(conversation: Conversation) -> list[int]:
    """A list that receives the number of tokens of each later call of the target."""
    state = conversation.session._batch.target_state
    reads: list[int] = []
    advance: Callable[..., None] = state.advance

    def counting(num_tokens: int, valid_lengths: Any = None) -> None:
        reads.append(num_tokens if valid_lengths is None else max(valid_lengths))
        advance(num_tokens, valid_lengths)

    state.advance = counting  # type: ignore[method-assign]
    return reads


@functools.cache
def from_scratch(target: str, prompt: tuple[int, ...]) -> list[int]:
    """Standard decoding's answer: turns of other drafters and windows have the same prompts."""
    return autoregressive_decode(
        cases.target(target), prompt, max_new_tokens=NEW, eos=cases.EOS
    ).tokens[0]


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "cancel_at", "window"),
    [
        (*pair, *turn)
        for pair in cases.pairs(targets=cases.BUT_LLAMA)
        for turn in cases.shared(
            cases.in_turn(cases.few([1, None, 2], *pair), cases.few((1, 3, 6), *pair), *pair), *pair
        )
    ],
)
def test_every_answer_is_that_to_the_whole_text_read_from_scratch(
    target: str,
    drafter: str,
    cancel_at: int | None,
    window: int,
) -> None:
    """Also for answers that are stopped between two rounds."""
    conversation = converse(target, drafter, num_draft_tokens=window, eos=cases.EOS)
    for row in talk(conversation, cancel_at=cancel_at):
        prompt = row.text[: row.prompt_length]
        answer = row.text[row.prompt_length :]
        expected = from_scratch(target, tuple(prompt))
        if row.stop_reason == "cancelled":
            expected = expected[: len(answer)]
        assert answer == expected


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(
        ["near", "ragged", "itself", "ngram", "wrong", "early_exit", "heads"], cases.BUT_LLAMA
    ),
)
def test_a_turn_reads_its_own_tokens_alone(target: str, drafter: str) -> None:
    conversation = converse(target, drafter)
    row = conversation.begin(TURNS[0])
    reads = count_reads(conversation)
    for turn in TURNS[1:]:
        while row.live:
            conversation.session.step()
        del reads[:]
        row = conversation.begin([*row.text, *turn])
        while row.live:
            conversation.session.step()
        assert row.counts is not None and len(reads) == row.num_rounds
        # The last token of an answer was drawn and never fed.
        assert sum(reads) == len(turn) + row.num_rounds + row.counts.num_proposed


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        *((*pair, "ExactMatch") for pair in cases.ONE_EACH),
        *(
            (*pair, "RejectionSampling")
            for pair in cases.pairs(["ragged", "hotter", "cross", "heads"], ["transformer"])
        ),
        *(case for case in cases.triples(["near", "ngram"], ["rnn"]) if case[2] != "ExactMatch"),
        ("llama", "early_exit", "RejectionSampling"),
    ],
)
def test_reading_all_again_changes_no_answer_at_any_temperature(
    target: str,
    drafter: str,
    rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise continues where the last turn ended, whether or not the states were kept."""
    options: dict[str, Any] = {"rule": rule, "temperature": 1.1, "seed": 3, "eos": cases.EOS}
    expected = [row.text for row in talk(converse(target, drafter, **options))]
    monkeypatch.setattr(module, "FIRST_LENGTH", 13)
    grown = converse(target, drafter, **options)
    assert [row.text for row in talk(grown)] == expected
    assert grown.session.max_length > 13

    third_row = talk(converse(target, drafter, **options), num_turns=3)[-1]
    session = Session(
        cases.target(target), cases.drafter(drafter, target), max_length=99, **options
    )
    row = session.resume(third_row, [*third_row.text, *TURNS[3]], max_new_tokens=NEW)
    run(session)
    assert row.text == expected[3]


def test_a_row_is_resumed_once_and_the_newest_goes_back_as_far_as_it_likes() -> None:
    """Otherwise two rows would draw from the same noise."""
    session = Session(
        cases.target("rnn"), cases.drafter("near", "rnn"), max_length=40, sampling=Sampling(1.0)
    )
    first = session.add([1, 2], max_new_tokens=5)
    with pytest.raises(ValueError, match="still being decoded"):
        session.resume(first, [1, 2], max_new_tokens=5)
    run(session)
    with pytest.raises(ValueError, match="exceed max_length=40"):
        session.resume(first, [*first.text, 3], max_new_tokens=50)
    # The refused prompt has drawn nothing.
    second = session.resume(first, [*first.text, 3], max_new_tokens=4)
    with pytest.raises(ValueError, match="resumed before: resume the newest turn instead"):
        session.resume(first, [1, 2, 3], max_new_tokens=5)
    run(session)
    third = session.resume(second, [1, 2, 3], max_new_tokens=5)
    run(session)
    assert third.num_new == 5
    assert (second.num_drawn, third.num_drawn) == (5, 9), "a turn draws after the previous turn"


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(
        ["near", "itself", "ragged", "ngram", "cross", "early_exit", "heads"], cases.BUT_LLAMA
    ),
)
def test_a_prompt_that_rewrites_the_text_is_answered_from_scratch(
    target: str, drafter: str
) -> None:
    """Also after an answer that was stopped, as far back as the draft's last commit."""
    generator = random.Random(4)
    model = cases.target(target)
    conversation = converse(target, drafter, num_draft_tokens=4)
    text = [3, 1, 4, 1]
    for _ in range(12):
        length = len(text)
        num_kept = generator.choice([0, length // 2, length - 2, length - 1, length])
        num_added = generator.randint(1, 4)
        added_tokens = [generator.randrange(cases.VOCAB) for _ in range(num_added)]
        prompt = [*text[:num_kept], *added_tokens][-40:]

        row = conversation.begin(prompt)
        num_rounds = generator.choice([1, 2, NEW])
        for _ in range(num_rounds):
            conversation.session.step()
        conversation.session.cancel(row)
        if num_rounds == NEW:
            assert row.num_new == NEW
        expected = autoregressive_decode(model, prompt, max_new_tokens=NEW).tokens[0]
        assert row.text[row.prompt_length :] == expected[: row.num_new]
        text = row.text


def test_no_turn_draws_from_the_noise_of_another() -> None:
    """A model that forgets everything draws the same tokens from the same numbers."""
    model = cases.make(cases.RNN, 1, embedding_size=8, hidden_size=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    config = DecodingConfig(max_new_tokens=NEW, temperature=1.0)
    answered_tokens: list[int] = []
    for row in talk(Conversation(model, cases.Repeater(), config)):
        answered_tokens += row.text[row.prompt_length :]
    one_answer = autoregressive_decode(
        model, [[1]], max_new_tokens=NEW * len(TURNS), sampling=Sampling(1.0)
    )
    assert answered_tokens == one_answer.tokens[0]


@pytest.mark.quick_cases(*cases.QUICK_DRAFTERS)
@pytest.mark.parametrize(("target", "drafter"), cases.ONE_EACH)
def test_rows_are_resumed_while_others_continue(target: str, drafter: str) -> None:
    generator = random.Random(8)
    model = cases.target(target)
    session = Session(model, cases.drafter(drafter, target), max_length=400, eos=cases.EOS)
    rows = [session.add(prompt, max_new_tokens=5) for prompt in cases.PROMPTS]
    finished_rows: list[Request] = []
    for _ in range(20):
        session.step()
        for index, row in enumerate(rows):
            if row.live or generator.random() >= 0.7:
                continue
            finished_rows.append(row)
            turn = [generator.randrange(cases.VOCAB) for _ in range(2)]
            num_new_tokens = generator.randint(1, 8)
            rows[index] = session.resume(row, [*row.text, *turn], max_new_tokens=num_new_tokens)
    assert len(finished_rows) > 12

    # Rows of a batch are decoded independently, so one batch has all expected answers.
    prompts = [row.text[: row.prompt_length] for row in finished_rows]
    answers = autoregressive_decode(model, prompts, max_new_tokens=8, eos=cases.EOS).tokens
    for row, answer in zip(finished_rows, answers, strict=True):
        num_new_tokens = row.max_length - row.prompt_length
        assert row.text[row.prompt_length :] == answer[:num_new_tokens]
