"""Rows of one session may differ in their settings: each gets the tokens that it gets alone."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import cases
import pytest
import torch

from lightning_specdec.decoding import Request, Session
from lightning_specdec.decoding.requests import TopLogprobs
from lightning_specdec.drafters import Drafter, ModelDrafter
from lightning_specdec.models import LanguageModel
from lightning_specdec.rules import LogitBias, PresencePenalty, RowSampling, Sampling

NUM_SCHEDULES = {"rnn": 6, "transformer": 3, "llama": 3}
"""By the target."""
PAIRS = [
    ("rnn", "near", "ExactMatch"),
    ("rnn", "near", "RejectionSampling"),
    ("rnn", "near", "TypicalAcceptance"),
    ("rnn", "repeater", "ExactMatch"),
    ("transformer", "ragged", "RejectionSampling"),
    ("llama", "early_exit", "ExactMatch"),
    ("llama", "eagle", "RejectionSampling"),
    ("llama", "heads", "ExactMatch"),
    ("llama", "staged", "ExactMatch"),
]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 4, "logprobs": True},
    {"temperature": 0.6, "top_k": 4, "seed": 9},
    {"temperature": 1.3, "top_p": 0.7, "min_p": 0.05},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "repetition_penalty": 1.3, "eos": [cases.EOS]},
    {"processors": (PresencePenalty(0.5, 0.3, prompt_length=3),)},
    {"temperature": 1.0, "processors": (LogitBias(((2, 3.0), (5, -100.0))),)},
    {"eos": [cases.EOS], "logprobs": True},
]


def alone(
    target: LanguageModel,
    drafter: Drafter,
    rule: str,
    prompt: list[int],
    **settings: Any,
) -> Request:
    """The row of a session that has no other."""
    session = Session(target, drafter, max_length=24, num_draft_tokens=3, rule=rule)
    row = session.add(prompt, **settings)
    while row.live:
        session.step()
    return row


@pytest.mark.parametrize(("target", "drafter", "rule"), PAIRS)
def test_a_row_with_its_own_settings_has_the_tokens_that_it_has_alone(
    target: str,
    drafter: str,
    rule: str,
) -> None:
    _check_schedules(target, drafter, rule, NUM_SCHEDULES[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "drafter", "rule"),
    [
        ("rnn", "near", "ExactMatch"),
        ("transformer", "ragged", "RejectionSampling"),
        ("llama", "eagle", "RejectionSampling"),
    ],
)
def test_two_hundred_random_schedules_of_each_kind_of_model(
    target: str,
    drafter: str,
    rule: str,
) -> None:
    _check_schedules(target, drafter, rule, 200)


@pytest.mark.quick_cases("heads")
@pytest.mark.parametrize("drafter", ["near", "early_exit", "heads"])
def test_recorded_calls_change_nothing_for_rows_with_their_own_settings(drafter: str) -> None:
    drafter_object = cases.drafter(drafter, "llama")
    schedules = _Schedules(cases.target("llama"), drafter_object, "ExactMatch")
    recorded_model: Any = deepcopy(cases.target("llama"))
    recorded_model.record()
    recorded_drafter: Any = deepcopy(drafter_object)
    if isinstance(recorded_drafter, ModelDrafter):
        recorded_drafter.model = recorded_drafter.model.record()  # type: ignore[operator]
    schedules.check(recorded_model, recorded_drafter, 3)


class _Schedules:
    """Random sessions of rows with different settings, compared with each row alone.

    Args:
        target: the model that decodes rows alone.
        drafter: the drafter then.
        rule: name of the acceptance rule.
    """

    def __init__(self, target: LanguageModel, drafter: Drafter, rule: str) -> None:
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.expected: dict[int, Request] = {}

    def check(self, target: LanguageModel, drafter: Drafter, count: int) -> None:
        """Check this many sessions of a target and a drafter."""
        num_mixed_rounds = 0
        for seed in range(count):
            session = Session(target, drafter, max_length=24, num_draft_tokens=3, rule=self.rule)
            rows, num_mixed = _run_schedule(session, random.Random(seed))
            num_mixed_rounds += num_mixed
            for row, number in rows.items():
                self._compare(row, number)
        assert num_mixed_rounds > count

    def _compare(self, row: Request, number: int) -> None:
        if number not in self.expected:
            options = {"index": number, "max_new_tokens": 9, **SETTINGS[number]}
            self.expected[number] = alone(
                self.target, self.drafter, self.rule, _prompt(number), **options
            )
        single = self.expected[number]
        assert row.text == single.text[: len(row.text)]
        if row.stop_reason != "cancelled":
            assert row.stop_reason == single.stop_reason
            assert row.text == single.text
            assert row.counts == single.counts
        if row.logprobs is not None:
            assert single.logprobs is not None
            torch.testing.assert_close(
                row.logprobs, single.logprobs[: row.num_new], atol=1e-5, rtol=1e-5
            )


def _check_schedules(target: str, drafter: str, rule: str, count: int) -> None:
    """Compare this many random sessions of a pair with its rows alone."""
    model = cases.target(target)
    drafter_object = cases.drafter(drafter, target)
    _Schedules(model, drafter_object, rule).check(model, drafter_object, count)


def _prompt(number: int) -> list[int]:
    return cases.PROMPTS[number % len(cases.PROMPTS)]


def _run_schedule(session: Session, generator: random.Random) -> tuple[dict[Request, int], int]:
    """Decode rows that come and go at random.

    Returns the rows with the numbers of their settings, and the number of rounds in which live rows
    had different samplings.
    """
    rows: dict[Request, int] = {}
    num_mixed = 0
    waiting = generator.sample(range(len(SETTINGS)), 5)
    while waiting or session.live:
        if waiting and generator.random() < 0.6:
            number = waiting.pop()
            row = session.add(_prompt(number), index=number, max_new_tokens=9, **SETTINGS[number])
            rows[row] = number
        if session.live and generator.random() < 0.05:
            session.cancel(generator.choice(session.live))
        num_mixed += len({row.sampling for row in session.live}) > 1
        session.step()
    return rows, num_mixed


def test_a_seed_of_its_own_changes_the_tokens_of_a_row() -> None:
    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    texts = set()
    for seed in range(4):
        row = alone(
            target, drafter, "ExactMatch", [1, 2], temperature=1.0, seed=seed, max_new_tokens=9
        )
        texts.add(tuple(row.text))
    assert len(texts) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.7, "logprobs": True},
        {"eos": [cases.EOS]},
    ],
)
def test_a_resumed_row_keeps_its_settings(settings: dict[str, Any]) -> None:
    target = cases.target("rnn")
    drafter = cases.drafter("near", "rnn")
    text = [3, 1, 4]
    rows = []
    own_settings: list[dict[str, Any]] = [{}, settings]
    for row_settings in own_settings:
        # The settings of the row alone, or of its whole session.
        session_settings = {} if row_settings else settings
        session = Session(target, drafter, max_length=60, rule="ExactMatch", **session_settings)
        row = session.add(text, max_new_tokens=9, index=0, num_top_logprobs=2, **row_settings)
        while row.live:
            session.step()
        resumed = session.resume(row, [*row.text, 2], max_new_tokens=20)
        while resumed.live:
            session.step()
        rows.append(resumed)
    expected, resumed = rows
    assert resumed.text == expected.text
    assert resumed.stop_reason == expected.stop_reason
    assert resumed.logprobs == expected.logprobs
    assert len(resumed.top_logprobs) == resumed.num_new


def test_a_setting_of_the_whole_session_is_refused_for_a_row() -> None:
    session = Session(cases.target("rnn"), cases.drafter("near", "rnn"), max_length=24)
    for change in ({"rule": "RejectionSampling"}, {"num_draft_tokens": 2}):
        with pytest.raises(ValueError, match="applies to all rows of a session"):
            session.add([1], **change)
    with pytest.raises(ValueError, match="did you mean temperature"):
        session.add([1], temperatur=1.0)
    assert session.live == []


def test_a_row_fails_alone_beside_rows_of_other_settings() -> None:
    settings_of_the_first: list[dict[str, Any]] = [{}, {"temperature": 1.0}]
    for first_settings in settings_of_the_first:
        session = Session(
            cases.FirstRowFails(cases.target("rnn")), cases.drafter("near", "rnn"), max_length=24
        )
        failed = session.add([1, 2], max_new_tokens=15, **first_settings)
        others = [
            session.add([3], max_new_tokens=9, temperature=0.9, seed=5, index=1),
            session.add([4, 1], max_new_tokens=9, index=2),
        ]
        while session.live:
            session.step()
        assert failed.stop_reason == "failed"
        assert failed.num_new >= 2
        for row in others:
            assert row.stop_reason == "length"
        expected = alone(
            cases.target("rnn"),
            cases.drafter("near", "rnn"),
            "ExactMatch",
            [3],
            max_new_tokens=9,
            temperature=0.9,
            seed=5,
            index=1,
        )
        assert others[0].text == expected.text


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_likeliest_tokens_are_those_of_the_targets_logits(
    temperature: float, logprobs: bool
) -> None:
    target = cases.target("rnn")
    session = Session(target, cases.drafter("near", "rnn"), max_length=24, num_draft_tokens=3)
    settings: dict[str, Any] = {"temperature": temperature, "logprobs": logprobs}
    row = session.add([1, 2], max_new_tokens=9, num_top_logprobs=3, **settings)
    other = session.add([3], max_new_tokens=9, num_top_logprobs=1)
    plain = session.add([3, 3], max_new_tokens=9)
    while session.live:
        session.step()
    assert plain.top_logprobs == []
    assert plain.logprobs is None
    for requested, count in ((row, 3), (other, 1)):
        log_probs = target(torch.tensor([requested.text])).logits.float().log_softmax(-1)[0]
        _check_likeliest(requested.top_logprobs, log_probs[requested.prompt_length - 1 :], count)
    assert (row.logprobs is not None) == logprobs


def _check_likeliest(top_logprobs: list[TopLogprobs], log_probs: Any, count: int) -> None:
    assert len(top_logprobs) == 9
    for position, likeliest in enumerate(top_logprobs):
        expected = log_probs[position].topk(count)
        assert [token for token, _ in likeliest] == expected.indices.tolist()
        scores = torch.tensor([score for _, score in likeliest])
        torch.testing.assert_close(scores, expected.values, atol=1e-5, rtol=1e-5)


def test_penalties_count_the_new_text_only() -> None:
    scores = torch.zeros(1, 6)
    prefix = torch.tensor([[0, 0, 1, 1, 1, 2]])
    penalized = PresencePenalty(0.5, 0.25, prompt_length=2)(prefix, scores)
    assert penalized.tolist() == [[0.0, -1.25, -0.75, 0.0, 0.0, 0.0]]
    biased = LogitBias(((5, 2.0), (0, -1.0)))(prefix, scores)
    assert biased.tolist() == [[-1.0, 0.0, 0.0, 0.0, 0.0, 2.0]]


def test_equal_samplings_are_drawn_as_one() -> None:
    penalty = PresencePenalty(0.5, 0.25, prompt_length=2)
    same = [Sampling(0.5, processors=(penalty,)), Sampling(0.5, processors=(penalty,))]
    assert RowSampling.of_rows(same) is same[0]
    mixed = RowSampling.of_rows([Sampling(), Sampling(1.0)])
    assert isinstance(mixed, RowSampling)
    assert not mixed.greedy
    assert RowSampling.of_rows([Sampling(), Sampling(top_k=2)]).greedy
