"""The HTTP layer, as real clients see it: the openai package, httpx, and a separate process."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cli_fixtures import here, refused
from text_model import decoder, model

from lightning_specdec.config.decoding import DecodingConfig
from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.decoding import Session
from lightning_specdec.serve.server import Server, bind, make_server
from lightning_specdec.serve.settings import ServeSettings

__all__ = ["decoder", "here", "model"]
MODEL = "tiny"
KEY = "a secret key"
TEXT = "the oak and the"
HTTP = httpx.Client(timeout=60)
"""For all requests, since a new client reads the certificates of the machine."""
MESSAGES: Any = [{"role": "user", "content": "the oak"}]


@contextmanager
def running(decoder: SpeculativeDecoder, **options: Any) -> Iterator[tuple[Server, str]]:
    """A server in this process, and its address."""
    settings = ServeSettings(port=0, **options)
    server = make_server(decoder, DecodingConfig(temperature=1.0), settings, model_name=MODEL)
    with bind(settings) as bound:
        bound.listen()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        runner = server.runner()
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [bound]})
        server.start()
        thread.start()
        try:
            yield server, address
        finally:
            runner.should_exit = True
            thread.join(20)
            server.stop()
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(decoder: SpeculativeDecoder) -> Iterator[tuple[Server, str]]:
    with running(decoder) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: tuple[Server, str]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0)


def expected_text(decoder: SpeculativeDecoder, prompt: Any, **options: Any) -> str:
    return str(decoder.decode_standard([prompt], **options).rows[0].text)


def test_an_answer_goes_on_after_the_end_if_that_is_ignored(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    options: dict[str, Any] = {"prompt": "the oak", "temperature": 1.0, "seed": 3}
    biased: dict[str, Any] = {**options, "logit_bias": {str(token): 9 for token in decoder.eos}}
    for fields in (options, biased):
        answer: Any = client.completions.create(
            model=MODEL, max_tokens=30, extra_body={"ignore_eos": True}, **fields
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 30
    expected = expected_text(decoder, "the oak", max_new_tokens=30, temperature=1.0, seed=3, eos=())
    answer = client.completions.create(
        model=MODEL, max_tokens=30, extra_body={"ignore_eos": True}, **options
    )
    assert answer.choices[0].text == expected
    ended: Any = client.completions.create(model=MODEL, max_tokens=30, **biased)
    assert ended.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="ignore_eos and guided_regex exclude"):
        client.completions.create(
            model=MODEL, extra_body={"ignore_eos": True, "guided_regex": "a+"}, **options
        )


def test_a_chat_is_standard_decoding_s_answer(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    prompt = decoder.encode_chat(MESSAGES)
    samplings: list[Any] = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}]
    for options in samplings:
        expected = expected_text(decoder, prompt, max_new_tokens=20, **options)
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=20, **options
        )
        choice = answer.choices[0]
        assert choice.message.content == expected
        assert choice.message.role == "assistant"
        assert choice.finish_reason in ("length", "stop")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens
        speculative = answer.speculative
        assert 0 < speculative["accepted_tokens"] <= speculative["draft_tokens"]

        stream: Any = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        chunks = list(stream)
        assert len({chunk.id for chunk in chunks}) == 1
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == expected
        assert chunks[0].choices[0].delta.role == "assistant"
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
        assert reasons == [None] * (len(reasons) - 1) + [choice.finish_reason]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        # The whole prompt but its last token is known from the request before.
        details = chunks[-1].usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens == len(prompt) - 1
        assert all(chunk.usage is None for chunk in chunks[:-1])
        counts = [chunk.model_extra.get("speculative") for chunk in chunks[:-1]]
        accepted = [count["accepted_tokens"] for count in counts if count]
        assert sum(accepted) == speculative["accepted_tokens"]


def test_completions_take_texts_and_tokens_and_several_choices(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    answer = client.completions.create(model=MODEL, prompt=TEXT, temperature=0)
    tokens = decoder.encode(TEXT)
    assert answer.choices[0].text == expected_text(decoder, tokens, max_new_tokens=16)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 16

    prompts = [tokens, tokens[:3]]
    answer = client.completions.create(
        model=MODEL, prompt=prompts, n=2, max_tokens=7, seed=3, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        result = decoder.decode(
            [prompts[choice.index // 2]],
            indices=[choice.index],
            max_new_tokens=7,
            seed=3,
            temperature=1.0,
        )
        assert choice.text == result.rows[0].text
    assert len({choice.text for choice in answer.choices}) == 4


def test_without_a_seed_answers_differ_and_with_one_they_do_not(client: openai.OpenAI) -> None:
    def texts(**options: Any) -> set[str]:
        answers = [client.completions.create(model=MODEL, prompt=TEXT, **options) for _ in range(3)]
        return {answer.choices[0].text for answer in answers}

    assert len(texts()) == 3
    assert len(texts(seed=-4)) == 1


def test_stop_strings_penalties_and_biases_are_those_of_decoding(
    client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    prompt = decoder.encode(TEXT)
    whole = expected_text(decoder, prompt, max_new_tokens=40)
    stop = whole[4:6]
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, temperature=0, max_tokens=40, stop=[stop, "never"]
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"

    extra = {"repetition_penalty": 1.8, "top_k": 5, "min_p": 0.01}
    answer = client.completions.create(
        model=MODEL, prompt=TEXT, temperature=0.7, max_tokens=20, seed=1, extra_body=extra
    )
    expected = expected_text(decoder, prompt, max_new_tokens=20, temperature=0.7, seed=1, **extra)
    assert answer.choices[0].text == expected

    token = decoder.encode(" the")[-1]
    biased = client.completions.create(
        model=MODEL, prompt=TEXT, temperature=0, max_tokens=5, logit_bias={str(token): 100}
    )
    assert biased.choices[0].text == decoder.tokenizer.decode([token] * 5)  # type: ignore[union-attr]
    penalized = client.completions.create(
        model=MODEL,
        prompt=TEXT,
        temperature=0,
        max_tokens=5,
        logit_bias={str(token): 1},
        presence_penalty=2,
        frequency_penalty=2,
    )
    assert penalized.choices[0].text != biased.choices[0].text


def test_logprobs_are_the_targets(client: openai.OpenAI, decoder: SpeculativeDecoder) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    prompt = decoder.encode_chat(MESSAGES)
    row = decoder.decode_standard([prompt], max_new_tokens=8, logprobs=True).rows[0]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and row.logprobs is not None
    scores = [entry.logprob for entry in logprobs.content]
    assert scores == pytest.approx(row.logprobs[: len(scores)], abs=1e-4)
    for entry in logprobs.content:
        # The greedy token is the likeliest one.
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)

    completion = client.completions.create(
        model=MODEL, prompt=TEXT, max_tokens=8, temperature=0, logprobs=2
    )
    details = completion.choices[0].logprobs
    assert details is not None and details.tokens is not None
    assert "".join(details.tokens).startswith(completion.choices[0].text)
    assert details.text_offset is not None and details.text_offset[:2] == [
        0,
        len(details.tokens[0]),
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"echo": True}, "echo"),
    ({"temperatur": 1}, "temperatur"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 1e300}, "repetition_penalty"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"n": 0}, "n"),
    ({"n": 100}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 600}, "messages"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "pope", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"stream": 1}, "stream"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_what_is_wrong_or_not_supported_is_refused_by_its_name(
    served: tuple[Server, str],
    change: dict[str, Any],
    param: str,
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, **change}
    answer = HTTP.post(f"{served[1]}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_errors_reach_the_openai_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="exceed the limit of 512") as caught:
        client.completions.create(model=MODEL, prompt=TEXT * 300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="would replace the chat"):
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"chat_template_kwargs": {"messages": 3}}
        )


def test_bodies_that_are_no_request_are_refused(served: tuple[Server, str]) -> None:
    address = f"{served[1]}/v1/completions"
    json_type = {"content-type": "application/json"}
    deep = b"[" * 100_000
    for content, headers, status in (
        (b"{}", {}, 415),
        (b"{", json_type, 400),
        (b"[]", json_type, 400),
        (b'{"prompt": NaN}', json_type, 400),
        (b"\xff", json_type, 400),
        (rb'{"half \ud800": 1}', json_type, 400),
        (deep, json_type, 400),
        (b" " * (5 * 2**20), json_type, 413),
    ):
        answer = HTTP.post(address, content=content, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert HTTP.get(f"{served[1]}/v1/nothing").status_code == 404
    assert HTTP.get(address).status_code == 405
    assert HTTP.get(f"{served[1]}/health").json() == {"status": "ok"}


def test_other_routes(client: openai.OpenAI, served: tuple[Server, str], model: str) -> None:
    assert [entry.id for entry in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")

    client.completions.create(model=MODEL, prompt="the cat", max_tokens=16, temperature=0)
    page = HTTP.get(served[1])
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    metrics = HTTP.get(f"{served[1]}/metrics").text
    assert 'lightning_specdec_requests_total{path="/v1/models",status="200"}' in metrics
    assert 'lightning_specdec_accepted_tokens_total{position="0"}' in metrics
    for text in (page.text, metrics):
        assert model not in text


def test_a_name_of_another_site_is_refused(served: tuple[Server, str]) -> None:
    answer = HTTP.get(f"{served[1]}/v1/models", headers={"host": "evil.example"})
    assert answer.status_code == 403


def test_a_key_guards_every_route_but_health(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVE_KEY", KEY)
    basic = base64.b64encode(f"me:{KEY}".encode()).decode()
    with running(decoder, api_key_env="SERVE_KEY") as (_, address):
        for path in ("/", "/metrics", "/v1/models", "/v1/chat/completions", "/nothing"):
            for header in ("", "Bearer", "Bearer wrong", f"Digest {KEY}", "Basic ?", "Bearer é"):
                headers = {b"authorization": header.encode()}
                answer = HTTP.get(address + path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            for header in (f"Bearer {KEY}", f"Basic {basic}"):
                answer = HTTP.get(address + path, headers={"authorization": header})
                assert answer.status_code != 401
        assert HTTP.get(f"{address}/health").status_code == 200


def test_a_client_that_leaves_frees_its_slot_within_a_round(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Session.step
    may_step = threading.Semaphore(0)

    def step_when_allowed(session: Session, *arguments: Any) -> Any:
        if session.live:
            may_step.acquire()
        return step(session, *arguments)

    no_eos = {str(token): -100 for token in decoder.eos}
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 400, "logit_bias": no_eos}
    with running(decoder, max_batch_size=1, max_queue=0) as (server, address):
        monkeypatch.setattr(Session, "step", step_when_allowed)
        url = f"{address}/v1/completions"
        may_step.release()
        with HTTP.stream("POST", url, json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            (generation,) = server.engine._live.values()
            busy = HTTP.post(url, json={"prompt": TEXT})
            assert busy.status_code == 429
            assert busy.json()["error"]["code"] == "queue_full"
        _wait(lambda: generation.is_cancelled)
        may_step.release()
        _wait(lambda: server.engine.num_live == 0)

        with pytest.raises(httpx.ReadTimeout):
            HTTP.post(url, json=body, timeout=httpx.Timeout(60, read=0.3))
        _wait(lambda: all(live.is_cancelled for live in server.engine._live.values()))
        may_step.release()
        _wait(lambda: server.engine.num_live == 0)
        metrics = HTTP.get(f"{address}/metrics").text
        assert 'generations_total{reason="cancelled"} 2.0' in metrics


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_many_clients_at_once_get_the_answers_that_they_get_alone(
    served: tuple[Server, str], decoder: SpeculativeDecoder
) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(
            model=MODEL,
            prompt=TEXT[: number + 4],
            max_tokens=12,
            temperature=number % 3 / 2,
            seed=number,
        )
        return answer.choices[0].text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served[1]}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, number) for number in range(12)))

    for number, text in enumerate(asyncio.run(ask_all())):
        expected = decoder.decode(
            TEXT[: number + 4], max_new_tokens=12, temperature=number % 3 / 2, seed=number
        )
        assert text == expected.rows[0].text


def test_a_process_serves_curl_and_ends_well_on_sigterm(model: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_specdec", "serve", model, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )
    try:
        assert process.stderr is not None
        address = ""
        for line in process.stderr:
            if "serving" in line:
                address = line.split(" at ")[1].split("/v1")[0]
                break
        body = {"prompt": TEXT, "max_tokens": 60, "temperature": 0, "stream": True}
        curl = subprocess.Popen(
            ["curl", "-sN", f"{address}/v1/completions"]
            + ["-H", "content-type: application/json", "-d", json.dumps(body)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith("data: {")
        process.send_signal(signal.SIGTERM)
        rest = curl.stdout.read()
        assert '"finish_reason":"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert curl.wait(60) == 0
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_served_is_refused_in_one_line(here: None, model: str) -> None:
    with bind(ServeSettings(port=0)) as bound:
        bound.listen()
        port = str(bound.getsockname()[1])
        refused("serve", model, "--port", port, message=f"port {port} is in use")
    refused("serve", model, "--host", "192.0.2.1", message="cannot listen on 192.0.2.1")
    refused("serve", model, "--api_key_env", "NO_SUCH_KEY", message="NO_SUCH_KEY holds no key")
    refused(
        "serve", model, "--port", "0", "--max_length", "600", message="exceeds the models' context"
    )
    rnn = str(Path(__file__).parent.parent / "checkpoints" / "rnn.safetensors")
    refused("serve", rnn, "--port", "0", message="has no tokenizer")
