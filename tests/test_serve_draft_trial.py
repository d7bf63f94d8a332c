"""The trial of a new draft in a running server: requests wait for a round of it at most."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import cases
import pytest
from test_serve_engine import MAX_LENGTH, Client, alone

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Session
from lightning_specdec.serve.engine import DraftName, Engine, Replacement

NAME = DraftName("new", "ModelDrafter")
LENGTH = 30
PROMPTS = ([1, 2, 3], [4, 5])


def make_engine(rule: str) -> Engine:
    """An engine whose draft is never right, so that its requests have many rounds."""
    return Engine(
        cases.target("rnn"),
        cases.drafter("unrelated", "rnn"),
        DecodingConfig(num_draft_tokens=3, rule=rule),
        max_length=MAX_LENGTH,
        max_batch_size=4,
        max_queue=10,
    )


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4}])
def test_each_round_of_a_trial_is_followed_by_one_of_the_requests(
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("ExactMatch")
    steps: list[str] = []
    own_step = Session.step

    def step(session: Session, *arguments: Any) -> Any:
        steps.append("requests" if session is engine._session else "trial")
        return own_step(session, *arguments)

    monkeypatch.setattr(Session, "step", step)
    drafter = cases.drafter("unrelated", "rnn")
    replacement = Replacement(drafter, NAME)
    clients = []
    engine.start()
    try:
        for index, prompt in enumerate(PROMPTS):
            client = Client(prompt, LENGTH, index=index, **settings)
            clients.append(client)
        engine.submit([client.generation for client in clients])
        engine.replace_drafter(replacement)
        replacement.done.result(timeout=20)
        answers = [client.tokens() for client in clients]
    finally:
        engine.begin_shutdown(0)
        engine.join(20)

    first = steps.index("trial")
    last = len(steps) - 1 - steps[::-1].index("trial")
    during_trial = steps[first : last + 1]
    num_rounds = during_trial.count("trial")
    assert num_rounds > 2
    # In turn, as the requests did not end before the trial did.
    assert during_trial == ["trial", "requests"] * (num_rounds - 1) + ["trial"]
    assert "requests" in steps[last + 1 :]
    for index, prompt in enumerate(PROMPTS):
        assert answers[index] == alone(prompt, "ExactMatch", LENGTH, index=index, **settings)


def test_a_trial_that_the_end_of_the_server_cuts_off_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine("ExactMatch")
    is_tried = threading.Event()
    is_ending = threading.Event()
    own_step = Session.step

    def step(session: Session, *arguments: Any) -> Any:
        if session is not engine._session:
            is_tried.set()
            assert is_ending.wait(20)
        return own_step(session, *arguments)

    monkeypatch.setattr(Session, "step", step)
    replacement = Replacement(cases.drafter("near", "rnn"), NAME)
    engine.start()
    engine.replace_drafter(replacement)
    assert is_tried.wait(20)
    engine.begin_shutdown(0)
    is_ending.set()
    engine.join(20)
    with pytest.raises(CancelledError):
        replacement.done.result(timeout=20)
    assert engine.drafter is not replacement.drafter


def test_a_draft_that_comes_during_a_trial_is_tried_after_it() -> None:
    engine = make_engine("RejectionSampling")
    replacements = [Replacement(cases.drafter("near", "rnn"), NAME) for _ in range(2)]
    engine.start()
    try:
        for replacement in replacements:
            engine.replace_drafter(replacement)
            while engine._replacement is not None:
                time.sleep(0.001)
        for replacement in replacements:
            replacement.done.result(timeout=20)
        assert engine.drafter is replacements[1].drafter
    finally:
        engine.begin_shutdown(0)
        engine.join(20)
