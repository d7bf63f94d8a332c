"""Laws of conversations: nothing is read twice, and the answers are those to the whole text read from scratch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import Row, Session, autoregressive_decode, run, speculative_decode
from lightning_specdec.decoding import conversation as module
from lightning_specdec.decoding.conversation import Conversation
from lightning_specdec.decoding.stopping import StopStrings
from lightning_specdec.rules import Sampling

TURNS = [[3, 1, 4], [7], [2, 7, 1, 8, 2, 8], [10, 0, 10], [6]]
NEW = 9


def talk(
    conversation: Conversation, *, cancel_at: int | None = None, num_turns: int = len(TURNS), **options: Any
) -> list[Row]:
    """Five turns, or fewer; with `cancel_at` each answer is stopped after so many rounds."""
    text: list[int] = []
    rows = []
    for turn in TURNS[:num_turns]:
        row = conversation.begin([*text, *turn], max_new_tokens=NEW, **options)
        answer: list[int] = []
        for num_rounds in range(NEW):
            if row.live and num_rounds == cancel_at:
                conversation.cancel()
            answer += conversation.step()
        assert answer == row.text[row.prompt_length :] and not row.live
        text = row.text
        rows.append(row)
    return rows


def count_reads(conversation: Conversation) -> list[int]:
    """Tokens that the target reads in each of its calls from now on."""
    assert conversation.session is not None
    state, reads = conversation.session._batch.target_state, []
    advance: Callable[..., None] = state.advance

    def counting(num_tokens: int, valid_lengths: Any = None) -> None:
        reads.append(num_tokens if valid_lengths is None else max(valid_lengths))
        advance(num_tokens, valid_lengths)

    state.advance = counting  # type: ignore[method-assign]
    return reads


@functools.cache
def from_scratch(target: str, prompt: tuple[int, ...]) -> list[int]:
    """Standard decoding's answer: turns of other drafters and windows have the same prompts."""
    return autoregressive_decode(cases.target(target), prompt, max_new_tokens=NEW, eos=cases.EOS).tokens[0]


@pytest.mark.parametrize(
    ("target", "drafter", "cancel_at", "window"),
    [
        (*pair, *turn)
        for pair in cases.pairs(targets=cases.BUT_LLAMA)
        for turn in cases.in_turn(cases.few([1, None, 2], *pair), cases.few((1, 3, 6), *pair), *pair)
    ],
)
def test_every_answer_is_that_to_the_whole_text_read_from_scratch(
    target: str, drafter: str, cancel_at: int | None, window: int
) -> None:
    """An answer is stopped between two rounds, where the windows of the rounds before are over and done with."""
    conversation = Conversation(
        cases.target(target), cases.drafter(drafter, target), num_draft_tokens=window, eos=[cases.EOS]
    )
    for row in talk(conversation, cancel_at=cancel_at):
        prompt, answer = row.text[: row.prompt_length], row.text[row.prompt_length :]
        whole = from_scratch(target, tuple(prompt))
        assert answer == (whole[: len(answer)] if row.stop_reason == "cancelled" else whole)


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(["near", "ragged", "itself", "ngram", "wrong", "early_exit", "heads"], cases.BUT_LLAMA),
)
def test_a_turn_reads_its_own_tokens_alone(target: str, drafter: str) -> None:
    conversation = Conversation(cases.target(target), cases.drafter(drafter, target))
    first = conversation.begin(TURNS[0], max_new_tokens=NEW)
    reads, rows = count_reads(conversation), [first]
    while first.live:
        conversation.step()
    for turn in TURNS[1:]:
        text = rows[-1].text
        del reads[:]
        row = conversation.begin([*text, *turn], max_new_tokens=NEW)
        rows.append(row)
        # The last token of an answer was drawn and never fed.
        assert conversation.num_reused == len(text) - 1
        while row.live:
            conversation.step()
        assert row.counts is not None and len(reads) == row.num_rounds
        assert sum(reads) == len(turn) + row.num_rounds + row.counts.num_proposed


@pytest.mark.parametrize("target", ["rnn", "transformer"])
def test_a_draft_that_is_the_target_is_right_in_every_turn(target: str) -> None:
    """So its state went back to the text and no further."""
    conversation = Conversation(cases.target(target), cases.drafter("itself", target), num_draft_tokens=2)
    for row in talk(conversation):
        assert row.result().block_efficiency == 3
        assert row.counts is not None and row.counts.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        *cases.triples(["near", "ragged", "hotter", "ngram", "heads"], ["rnn", "transformer"]),
        ("llama", "early_exit", "RejectionSampling"),
        *((name, "cross", "RejectionSampling") for name in ("rnn", "transformer")),
    ],
)
def test_reading_all_again_changes_no_answer_at_any_temperature(
    target: str, drafter: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise goes on where the last turn ended, however much room there was, and whether the states were kept."""
    options: dict[str, Any] = {"rule": cases.RULES[rule](), "sampling": Sampling(1.1), "seed": 3, "eos": [cases.EOS]}
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    kept = [row.text for row in talk(Conversation(model, guesser, **options))]
    monkeypatch.setattr(module, "FIRST_LENGTH", 13)
    grown = Conversation(model, guesser, **options)
    assert [row.text for row in talk(grown)] == kept
    assert grown.session is not None and grown.session.max_length > 13
    for i in range(1, len(TURNS)):
        last = talk(Conversation(model, guesser, **options), num_turns=i)[-1]
        session = Session(model, guesser, max_length=99, **options)
        row = session.resume(last, [*last.text, *TURNS[i]], max_new_tokens=NEW)
        run(session)
        assert row.text == kept[i]


def test_no_turn_draws_from_the_noise_of_another() -> None:
    """A model that forgets everything draws the same tokens from the same numbers."""
    model = cases.make(cases.RNN, 1, embedding_size=8, hidden_size=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    conversation = Conversation(model, cases.drafter("repeater", "rnn"), sampling=Sampling(1.0))
    answers = [tuple(row.text[row.prompt_length :]) for row in talk(conversation)]
    assert len(set(answers)) == len(TURNS)
    alone = autoregressive_decode(model, [[1]], max_new_tokens=NEW * len(TURNS), sampling=Sampling(1.0)).tokens[0]
    assert [token for answer in answers for token in answer] == alone


def test_a_row_is_resumed_once_and_the_newest_goes_back_as_far_as_it_likes() -> None:
    """Or two rows would draw from the same noise."""
    session = Session(cases.target("rnn"), cases.drafter("near", "rnn"), max_length=40, sampling=Sampling(1.0))
    first = session.add([1, 2], max_new_tokens=5)
    run(session)
    with pytest.raises(ValueError, match="exceed max_length=40"):
        session.resume(first, [*first.text, 3], max_new_tokens=50)
    second = session.resume(first, [*first.text, 3], max_new_tokens=4)  # a prompt that was refused has drawn nothing
    for _ in range(2):
        with pytest.raises(ValueError, match="resumed before.*: resume the newest turn instead"):
            session.resume(first, [1, 2, 3], max_new_tokens=5)
        run(session)
    third = session.resume(second, [1, 2, 3], max_new_tokens=5)
    run(session)
    assert third.num_new == 5
    assert (second.num_drawn, third.num_drawn) == (5, 9), "every turn draws behind the one before"


@pytest.mark.parametrize(
    ("target", "drafter"),
    cases.pairs(["near", "itself", "ragged", "ngram", "repeater", "early_exit", "heads"], cases.BUT_LLAMA),
)
def test_a_prompt_that_rewrites_the_text_is_answered_from_scratch(target: str, drafter: str) -> None:
    generator = random.Random(4)
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    conversation, text = Conversation(model, guesser, num_draft_tokens=4), [3, 1, 4, 1]
    reused = set()
    for _ in range(12):
        kept = generator.choice([0, len(text) // 2, len(text) - 2, len(text) - 1, len(text)])
        prompt = [*text[:kept], *[generator.randrange(cases.VOCAB) for _ in range(generator.randint(1, 4))]]
        row = conversation.begin(prompt[-40:], max_new_tokens=6)
        reused.add(conversation.num_reused > 0)
        while row.live:
            conversation.step()
        whole = autoregressive_decode(model, prompt[-40:], max_new_tokens=6).tokens[0]
        assert row.text[row.prompt_length :] == whole
        text = row.text
    assert reused == {True, False}


@pytest.mark.parametrize(("target", "drafter"), cases.pairs(["near", "itself", "early_exit_own"], ["rnn"]))
def test_answers_end_by_stop_strings_and_go_on_behind_them(target: str, drafter: str) -> None:
    pieces = [bytes([ord("a") + token]) for token in range(cases.VOCAB)]
    stop = StopStrings(["a", "cb", "hh"], pieces)
    model = cases.target(target)
    rows = talk(Conversation(model, cases.drafter(drafter, target), sampling=Sampling(1.0), seed=1), stop=stop)
    assert {row.stop_reason for row in rows} >= {"stop"}
    again = talk(Conversation(model, cases.drafter("wrong", target), sampling=Sampling(1.0), seed=1), stop=stop)
    assert [row.text for row in rows] == [row.text for row in again]


@pytest.mark.parametrize(("name", "drafter"), cases.pairs(["near", "cross", "ngram", "early_exit"], ["transformer"]))
def test_a_cancelled_answer_may_be_asked_for_again_from_any_place(name: str, drafter: str) -> None:
    """As far back as the draft's own last commit, where it reads one token more than the prompt shares."""
    target, generator = cases.target(name), random.Random(0)
    for _ in range(15 if name == "transformer" else 5):
        conversation = Conversation(target, cases.drafter(drafter, name), num_draft_tokens=3)
        prompt = [1, 2, 3, 4, 5, 6]
        for _ in range(6):
            row = conversation.begin(prompt, max_new_tokens=8)
            for _ in range(generator.randint(1, 2)):
                conversation.step()
            conversation.cancel()
            num_new = row.num_new
            expected = autoregressive_decode(target, prompt, max_new_tokens=8).tokens[0]
            assert row.text[len(prompt) :] == expected[:num_new]
            prompt = row.text[: len(row.text) - generator.randint(0, 3)]
            prompt += [generator.randrange(cases.VOCAB) for _ in range(generator.randint(0, 2))]


@pytest.mark.parametrize(
    ("target", "drafter"), [*cases.pairs(["near"], ["rnn", "transformer"]), ("llama", "early_exit")]
)
def test_rows_are_resumed_while_others_go_on(target: str, drafter: str) -> None:
    generator = random.Random(8)
    model, guesser = cases.target(target), cases.drafter(drafter, target)
    session = Session(model, guesser, max_length=400, eos=cases.EOS)
    rows = [session.add(prompt, max_new_tokens=5) for prompt in cases.PROMPTS]
    done: list[Row] = []
    for _ in range(60):
        session.step()
        for i, row in enumerate(rows):
            if not row.live and generator.random() < 0.7:
                done.append(row)
                prompt = [*row.text, generator.randrange(cases.VOCAB), generator.randrange(cases.VOCAB)]
                rows[i] = session.resume(row, prompt, max_new_tokens=generator.randint(1, 8))
    assert len(done) > 60
    for row in done:
        expected = speculative_decode(
            model, guesser, row.text[: row.prompt_length], max_new_tokens=row.max_length - row.prompt_length,
            eos=cases.EOS,
        )  # fmt: skip
        assert row.text[row.prompt_length :] == expected.tokens[0]


def test_a_conversation_keeps_to_the_models_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cases.make(cases.RNN, 1, embedding_size=8, hidden_size=16)
    model.max_positions = 10
    conversation = Conversation(model, cases.drafter("ngram", "rnn"))
    row = conversation.begin([1, 2, 3, 4], max_new_tokens=99)
    while row.live:
        conversation.step()
    assert len(row.text) == 10 and row.stop_reason == "length"
    with pytest.raises(ValueError, match="10 tokens and the models a context of 10: begin a new one"):
        conversation.begin(row.text, max_new_tokens=1)
    assert conversation.begin([1], max_new_tokens=3).live  # the conversation goes on with less


def test_turns_out_of_turn_are_refused() -> None:
    conversation = Conversation(cases.target("rnn"), cases.drafter("near", "rnn"))
    with pytest.raises(ValueError, match="begin one"):
        conversation.step()
    row = conversation.begin([1], max_new_tokens=5)
    with pytest.raises(ValueError, match="has not ended"):
        conversation.begin([1, 2], max_new_tokens=5)
    assert conversation.session is not None
    with pytest.raises(ValueError, match="still being decoded"):
        conversation.session.resume(row, [1, 2], max_new_tokens=5)
