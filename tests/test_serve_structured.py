"""Structured output of the server, with real clients: answers parse, and errors are one line."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from test_serve_http import client, served
from text_model import decoder, model

from lightning_specdec.decoder import SpeculativeDecoder
from lightning_specdec.rules import Grammar
from lightning_specdec.serve import grammar_trial
from lightning_specdec.serve.server import Server
from lightning_specdec.serve.structured import AutoTools, RequiredTools, Tool, ToolStream

__all__ = ["client", "decoder", "model", "served"]

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "the oak"}]
HTTP = httpx.Client(timeout=60)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["oak", "lightning"]},
        "height": {"type": "integer", "minimum": 1, "maximum": 99},
        "tall": {"type": "boolean"},
    },
    "required": ["kind", "height", "tall"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {
            "name": "plant",
            "parameters": {
                "type": "object",
                "properties": {"tree": {"$ref": "#/$defs/tree"}},
                "required": ["tree"],
                "additionalProperties": False,
                "$defs": {"tree": {"enum": ["oak", "elm"]}},
            },
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"max_completion_tokens": 200, "seed": 4, **options}
    return client.chat.completions.create(model=MODEL, messages=MESSAGES, **options)


def streamed(client: openai.OpenAI, **options: Any) -> tuple[str, list[Any], str | None]:
    """The content, the calls and the finish reason of a stream."""
    content = ""
    calls: dict[int, Any] = {}
    reason = None
    for chunk in ask(client, stream=True, **options):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
    return content, list(calls.values()), reason


FORMATS: dict[str, dict[str, Any]] = {
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "guided_json": {"extra_body": {"guided_json": SCHEMA}},
    "guided_json as text": {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_is_json_under_its_schema_and_standard_decoding_s(
    client: openai.OpenAI, decoder: SpeculativeDecoder, name: str, temperature: float
) -> None:
    answer = ask(client, temperature=temperature, **FORMATS[name])
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert answer.speculative["accepted_tokens"] > 0
    expected = decoder.decode_standard(
        [decoder.encode_chat(MESSAGES)],
        max_new_tokens=200,
        temperature=temperature,
        seed=4,
        processors=(Grammar.json_schema(SCHEMA),),
    )
    assert choice.message.content == expected.rows[0].text
    assert streamed(client, temperature=temperature, **FORMATS[name])[0] == choice.message.content


def test_regex_choice_and_grammar_are_obeyed(client: openai.OpenAI) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "oak|elm"}}, "oak|elm"),
        ({"guided_choice": ["the oak", 'a "tree"']}, 'the oak|a "tree"'),
        ({"guided_grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
    ]
    for body, pattern in bodies:
        answer = ask(client, temperature=1.0, extra_body=body)
        assert re.fullmatch(pattern, answer.choices[0].message.content), body
        assert answer.choices[0].finish_reason == "stop"
    completion: Any = client.completions.create(
        model=MODEL, prompt="the oak", max_tokens=30, extra_body={"guided_regex": "[0-9]{4}"}
    )
    assert re.fullmatch("[0-9]{4}", completion.choices[0].text)


def test_any_json_object_parses_and_a_cut_one_says_so(client: openai.OpenAI) -> None:
    response_format: Any = {"type": "json_object"}
    reasons = set()
    for max_tokens in (1, 3, 12, 300):
        for seed in range(3):
            answer = ask(
                client,
                response_format=response_format,
                max_completion_tokens=max_tokens,
                seed=seed,
                temperature=0.5,
            )
            choice = answer.choices[0]
            reasons.add(choice.finish_reason)
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
            else:
                assert choice.finish_reason == "length"
                assert answer.usage.completion_tokens == max_tokens
    assert "length" in reasons


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    for name, schema in PARAMETERS.items():
        options: dict[str, Any] = {
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": name}},
        }
        choice = ask(client, **options).choices[0]
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        assert call.type == "function"
        assert choice.message.content is None
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(call.function.arguments), schema)
        content, calls, reason = streamed(client, **options)
        assert content == ""
        assert calls == [[name, call.function.arguments]]
        assert reason == "stop"


@pytest.mark.parametrize("parallel", [True, False])
def test_required_tools_are_called(client: openai.OpenAI, parallel: bool) -> None:
    for seed in range(3):
        options: dict[str, Any] = {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": parallel,
            "seed": seed,
            "temperature": 1.0,
        }
        choice = ask(client, **options).choices[0]
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert len(calls) == 1 or parallel
        for call in calls:
            arguments = json.loads(call.function.arguments)
            jsonschema.validate(arguments, PARAMETERS[call.function.name])
        _, streamed_calls, reason = streamed(client, **options)
        assert reason == "tool_calls"
        expected = [[call.function.name, call.function.arguments] for call in calls]
        assert streamed_calls == expected


def test_tools_that_are_not_to_be_called_change_nothing(client: openai.OpenAI) -> None:
    plain = ask(client, max_completion_tokens=8).choices[0].message.content
    with_tools = ask(client, max_completion_tokens=8, tools=TOOLS, tool_choice="none")
    assert with_tools.choices[0].message.content == plain


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello <tool", "hello <tool", []),
        (
            'I look.\n<tool_call>\n{"name": "measure", "arguments": {"a": 1}}\n</tool_call>',
            "I look.",
            [("measure", '{"a": 1}')],
        ),
        (
            '<tool_call>{"name": "measure", "arguments": {}}</tool_call>'
            '<tool_call>{"name": "measure", "arguments": {"b": {"c": 2}}}</tool_call>',
            "",
            [("measure", "{}"), ("measure", '{"b": {"c": 2}}')],
        ),
        (
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
            [],
        ),
        (
            '<tool_call>{"name": "measure", "arguments": {"a": "}</tool_call>"}}</tool_call> Bye.',
            "",
            [("measure", '{"a": "}</tool_call>"}')],
        ),
        (
            '<tool_call>{"name": "measure", "arguments": {}} or so',
            '<tool_call>{"name": "measure", "arguments": {}} or so',
            [],
        ),
        ("text  \n ", "text  \n ", []),
    ],
)
def test_calls_of_the_model_s_own_choice_are_read(
    text: str, content: str, calls: list[Any], step: int
) -> None:
    use = AutoTools([Tool("measure", {})])
    read_content, read_calls = use.read(text)
    functions = [tuple(call["function"].values()) for call in read_calls]
    assert (read_content, functions) == (content, calls)

    stream = ToolStream(use)
    sent = ""
    deltas: list[Any] = []
    for start in range(0, len(text), step):
        is_last = start + step >= len(text)
        deltas.append(stream.push(text[start : start + step], is_last=is_last))
    for delta in deltas:
        sent += delta.get("content") or ""
    assert sent == content
    last_calls = deltas[-1].get("tool_calls", [])
    assert [tuple(call["function"].values()) for call in last_calls] == calls


DEEP: Any = {"type": "integer"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": 3}, "guided_regex", "must be"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_json": {"$ref": "http://localhost:1/x"}}, "guided_json", "does not fetch"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "does not fetch"),
        ({"guided_json": DEEP}, "guided_json", "refused"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", "exceeds the limit"),
        (
            {"guided_json": {"type": "integer", "multipleOf": 999_983}},
            "guided_json",
            "needs more than|refused",
        ),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": "x"}, "guided_choice", "list of texts"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"structured_outputs": {"tag": "x"}}, "structured_outputs.tag", "not supported"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude each other"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "schema is missing",
        ),
        ({"tools": TOOLS}, "tool_choice", "marks no calls"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "must be"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "x"}]}, "tools[0]", "must be a function"),
        (
            {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"},
            "guided_regex",
            "exclude each other",
        ),
    ],
)
def test_what_is_refused_is_one_line_and_the_others_go_on(
    served: tuple[Server, str], body: dict[str, Any], param: str, message: str
) -> None:
    url = f"{served[1]}/v1/chat/completions"
    response = HTTP.post(url, json={"messages": MESSAGES, "max_tokens": 4, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500
    good = HTTP.post(url, json={"messages": MESSAGES, "max_tokens": 4})
    assert good.status_code == 200


def test_a_text_of_many_unfinished_calls_is_text() -> None:
    """Reading it takes time that is linear in its length."""
    text = "<tool_call>{" * 20_000
    assert AutoTools([Tool("measure", {})]).read(text) == (text, [])


def test_calls_that_are_nested_too_deeply_are_text() -> None:
    text = '[{"name": "measure", "arguments": ' + "[" * 50_000
    assert RequiredTools([Tool("measure", {})], parallel=False).read(text) == (text, [])


def test_a_new_grammar_waits_for_those_that_are_being_tried(
    served: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_trial, "_trials", threading.BoundedSemaphore(1))
    url = f"{served[1]}/v1/chat/completions"
    body = {"messages": MESSAGES, "max_tokens": 4, "guided_regex": "a new one|b"}
    with grammar_trial._trials:
        response = HTTP.post(url, json=body)
    assert response.status_code == 429, response.text
    assert response.json()["error"]["param"] == "guided_regex"
    assert HTTP.post(url, json=body).status_code == 200


def test_the_trial_imports_the_library_only() -> None:
    """It is started for each new grammar, so it must be quick."""
    path = Path(__file__).parents[1] / "lightning_specdec" / "serve" / "grammar_trial.py"
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
    assert imported & {"torch", "lightning_specdec", "numpy", "transformers"} == set()
