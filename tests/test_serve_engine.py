"""The engine: requests come and go, and each gets the tokens that it gets alone."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cases
import pytest

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoding import Session
from lightning_specdec.models import LanguageModel
from lightning_specdec.serve.engine import (
    INTERNAL_ERROR,
    NOT_FINITE,
    SHUTTING_DOWN,
    Engine,
    EngineObserver,
    Generation,
    QueueFullError,
    ShuttingDownError,
    Update,
)

MAX_LENGTH = 40
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.6, "top_k": 4, "seed": 9},
    {"repetition_penalty": 1.7},
    {"temperature": 0.8, "seed": 2, "eos": (cases.EOS,)},
]


class Recorder(EngineObserver):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.num_new = 0
        self.first_seconds: list[float] = []

    def first_token(self, seconds: float) -> None:
        self.first_seconds.append(seconds)

    def round(self, row: Any, num_new: int) -> None:
        self.num_new += num_new

    def ended(self, generation: Generation, reason: str) -> None:
        self.reasons.append(reason)


class Client:
    """A generation and the updates that it got."""

    def __init__(self, prompt: list[int], max_new_tokens: int = 9, **options: Any) -> None:
        self.updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        index = options.pop("index", 0)
        self.generation = Generation(
            prompt, max_new_tokens, self.updates.put, index=index, changes=options
        )

    def tokens(self) -> list[int]:
        """All tokens; waits for the last update."""
        tokens: list[int] = []
        while True:
            update = self.updates.get(timeout=20)
            tokens += update.tokens
            if update.is_last:
                self.last = update
                return tokens


@contextmanager
def running(
    target: LanguageModel | None = None,
    rule: str = "ExactMatch",
    **options: Any,
) -> Iterator[Engine]:
    """An engine that is shut down at the end."""
    limits = {"max_batch_size": 4, "max_queue": 50, **options}
    engine = Engine(
        target or cases.target("rnn"),
        cases.drafter("near", "rnn"),
        DecodingConfig(num_draft_tokens=3, rule=rule),
        max_length=MAX_LENGTH,
        **limits,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.begin_shutdown(0)
        engine.join(20)
        assert engine.num_live == 0


def alone(prompt: list[int], rule: str, max_new_tokens: int = 9, **options: Any) -> list[int]:
    """The tokens of a session with one row."""
    session = Session(
        cases.target("rnn"),
        cases.drafter("near", "rnn"),
        max_length=MAX_LENGTH,
        num_draft_tokens=3,
        rule=rule,
    )
    row = session.add(prompt, max_new_tokens=max_new_tokens, **options)
    while row.live:
        session.step()
    return row.result().tokens


class Slow(cases.Wrapped):
    """A model whose calls take a while."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return super().forward(*arguments, **options)


@pytest.mark.parametrize("prompt_tokens", [3, 128])
@pytest.mark.parametrize("rule", ["ExactMatch", "RejectionSampling"])
def test_each_request_of_a_random_schedule_has_the_tokens_that_it_has_alone(
    rule: str,
    prompt_tokens: int,
) -> None:
    """With long prompts among them, which are read in parts of up to `prompt_tokens`."""
    prompts = [*cases.PROMPTS, list(range(cases.VOCAB)) * 2]
    generator = random.Random(7)
    observer = Recorder()
    clients: list[tuple[Client, dict[str, Any], list[int]]] = []
    engine_options: dict[str, Any] = {
        "prompt_tokens_per_round": prompt_tokens,
        "observers": [observer],
    }
    with running(rule=rule, **engine_options) as engine:
        for index in range(40):
            settings = generator.choice(SETTINGS)
            prompt = generator.choice(prompts)
            client = Client(prompt, index=index, **settings)
            engine.submit([client.generation])
            if generator.random() < 0.2:
                engine.cancel(client.generation)
            else:
                clients.append((client, {"index": index, **settings}, prompt))
            time.sleep(generator.random() * 0.004)

        num_tokens = 0
        for client, options, prompt in clients:
            tokens = client.tokens()
            num_tokens += len(tokens)
            assert tokens == alone(prompt, rule, **options)
    assert observer.num_new >= num_tokens
    assert len(observer.first_seconds) >= len(clients)
    assert observer.reasons.count("cancelled") == 40 - len(clients)
    assert len(observer.reasons) == 40


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """Between two of its parts, running requests get tokens, and clients may leave."""
    model = Slow(cases.target("rnn"))
    with running(model, max_batch_size=3, prompt_tokens_per_round=3) as engine:
        running_client = Client([1, 2], max_new_tokens=38)
        engine.submit([running_client.generation])
        running_client.updates.get(timeout=20)
        long_client = Client([1, 2, 3, 4, 5] * 6, max_new_tokens=4)
        leaving = Client([5, 4, 3, 2, 1] * 6, max_new_tokens=4)
        engine.submit([long_client.generation, leaving.generation])
        num_updates = 0
        while long_client.updates.empty():
            running_client.updates.get(timeout=20)
            num_updates += 1
            if num_updates == 3:
                engine.cancel(leaving.generation)
        # Ten parts, of which the last round has the first token.
        assert num_updates >= 9
        assert long_client.tokens() == alone([1, 2, 3, 4, 5] * 6, "ExactMatch", 4)
        running_client.tokens()
        assert leaving.updates.empty()


def test_a_request_that_is_cancelled_frees_its_slot_within_a_round() -> None:
    model = Slow(cases.target("rnn"))
    with running(model, max_batch_size=1) as engine:
        first = Client([1, 2], max_new_tokens=30)
        second = Client([3], max_new_tokens=4)
        engine.submit([first.generation, second.generation])
        first.updates.get(timeout=20)
        engine.cancel(first.generation)
        assert len(second.tokens()) == 4
        # At most the update of the round that ran when it was cancelled came after it.
        num_updates = 0
        while not first.updates.empty():
            assert not first.updates.get().is_last
            num_updates += 1
        assert num_updates <= 1


def test_a_full_queue_takes_all_of_a_request_or_nothing() -> None:
    model = Slow(cases.target("rnn"))
    with running(model, max_batch_size=1, max_queue=2) as engine:
        clients = [Client([1, 2], max_new_tokens=30) for _ in range(6)]
        engine.submit([client.generation for client in clients[:3]])
        clients[0].updates.get(timeout=20)
        assert engine.num_live == 1
        assert engine.num_waiting == 2
        with pytest.raises(QueueFullError, match="2 requests are waiting"):
            engine.submit([clients[3].generation])
        engine.cancel(clients[1].generation)
        assert engine.num_waiting == 1
        with pytest.raises(QueueFullError):
            engine.submit([clients[4].generation, clients[5].generation])
        engine.submit([clients[3].generation])
        assert len(clients[3].tokens()) == 30


def test_a_shutdown_finishes_what_runs_and_refuses_the_rest() -> None:
    model = Slow(cases.target("rnn"))
    with running(model, max_batch_size=1) as engine:
        first = Client([1, 2], max_new_tokens=12)
        second = Client([3])
        engine.submit([first.generation, second.generation])
        first.updates.get(timeout=20)
        engine.begin_shutdown(30)
        with pytest.raises(ShuttingDownError):
            engine.submit([Client([3]).generation])
        first.tokens()
        assert first.last.stop_reason == "length"
        assert second.tokens() == []
        assert second.last.error == SHUTTING_DOWN
        engine.join(20)
        assert not engine.is_running


def test_a_shutdown_ends_what_takes_too_long() -> None:
    with running(Slow(cases.target("rnn"))) as engine:
        client = Client([1, 2], max_new_tokens=38)
        engine.submit([client.generation])
        client.updates.get(timeout=20)
        engine.begin_shutdown(0.02)
        assert len(client.tokens()) < 38
        assert client.last.error == SHUTTING_DOWN


def test_a_round_that_fails_ends_its_requests_and_not_the_engine() -> None:
    class FailsOnce(cases.Wrapped):
        num_calls = 0

        def forward(self, *arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == 3:
                raise RuntimeError("out of memory")
            return super().forward(*arguments, **options)

    with running(FailsOnce(cases.target("rnn"))) as engine:
        first = Client([1, 2], max_new_tokens=20)
        engine.submit([first.generation])
        first.tokens()
        assert first.last.error == INTERNAL_ERROR
        second = Client([1, 2], max_new_tokens=20)
        engine.submit([second.generation])
        assert second.tokens() == alone([1, 2], "ExactMatch", max_new_tokens=20)


def test_an_observer_that_raises_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EngineObserver):
        def first_token(self, seconds: float) -> None:
            raise RuntimeError("first")

        def round(self, row: Any, num_new: int) -> None:
            raise RuntimeError("round")

        def ended(self, generation: Generation, reason: str) -> None:
            raise RuntimeError("ended")

    recorder = Recorder()
    with running(observers=[Broken(), recorder]) as engine:
        for _ in range(2):
            client = Client([1, 2])
            engine.submit([client.generation])
            assert client.tokens() == alone([1, 2], "ExactMatch")
        assert engine.is_running
    assert recorder.reasons == ["length", "length"]
    assert {record.message for record in caplog.records} == {"Broken failed"}


def test_a_row_that_is_not_finite_fails_alone() -> None:
    with running(cases.FirstRowFails(Slow(cases.target("rnn")))) as engine:
        clients = [Client([1, 2], max_new_tokens=20), Client([3], max_new_tokens=20)]
        engine.submit([client.generation for client in clients])
        clients[0].tokens()
        assert clients[0].last.error == NOT_FINITE
        assert clients[1].tokens() == alone([3], "ExactMatch", max_new_tokens=20)


def test_what_cannot_be_decoded_is_refused_before_it_waits() -> None:
    with running() as engine:
        for client, message in (
            (Client([]), "the prompt is empty"),
            (Client([1, 99]), "holds 99"),
            (Client([1] * 30, max_new_tokens=11), "exceed this server's limit of 40 tokens"),
            (Client([1], temperature=-1.0), "temperature"),
            (Client([1], stop=("x",)), "stop strings need the text"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.check(client.generation)
        engine.check(Client([1] * 30, max_new_tokens=10).generation)


def test_the_next_turn_of_a_chat_reads_only_its_own_tokens() -> None:
    target = cases.target("llama")
    drafter = cases.drafter("near", "llama")
    config = DecodingConfig(num_draft_tokens=3)
    engine = Engine(
        target,
        drafter,
        config,
        max_length=80,
        max_batch_size=2,
        max_queue=2,
        cache_bytes=10**6,
    )
    engine.start()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    num_before = 0
    for turn in range(4):
        client = Client(prompt, temperature=turn % 2, seed=turn)
        other = Client([turn + 1] * 12)
        engine.submit([client.generation, other.generation])
        tokens = client.tokens()
        session = Session(target, drafter, config, max_length=80)
        row = session.add(prompt, max_new_tokens=9, index=0, temperature=turn % 2, seed=turn)
        while row.live:
            session.step()
        assert tokens == row.result().tokens
        # All but the last token of the turn before, which the target had not read.
        assert client.generation.num_cached == max(0, num_before - 1)
        prompt = [*prompt, *tokens, 3, 1, 4]
        num_before = len(prompt) - 3
        other.tokens()
    engine.begin_shutdown(0)
    engine.join(20)
