"""Structured output in requests: the grammar that a request asks for, and calls of tools."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_specdec.rules import Grammar
from lightning_specdec.serve.protocol import ApiError, ChatRequest, CommonRequest
from lightning_specdec.text.grammar import json_rule

MAX_TOOLS = 128
"""Most tools of a request, as in OpenAI's API."""
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Names of functions, as in OpenAI's API."""
CALL_START = "<tool_call>"
"""What a model writes before a call, in the templates that are supported."""
CALL_END = "</tool_call>"

GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Older names of the fields of `structured_outputs`, as in vLLM."""

Json = dict[str, Any]


def requested_grammar(request: CommonRequest) -> tuple[Grammar, str] | None:
    """The grammar of a request, and the field that asks for it; None without one.

    Raises:
        ApiError: a field is wrong, or there are several.
    """
    requested: list[tuple[str, str, Any]] = []
    for name in GUIDED_FIELDS:
        value = getattr(request, name)
        if value is not None:
            requested.append((name, name.removeprefix("guided_"), value))
    for name, value in (request.structured_outputs or {}).items():
        if value is not None:
            requested.append((f"structured_outputs.{name}", name, value))
    if request.response_format is not None:
        requested += _of_response_format(request.response_format)

    if not requested:
        return None
    if len(requested) > 1:
        names = " and ".join(field_name for field_name, _, _ in requested[:2])
        raise ApiError(f"{names} exclude each other: give one of them", param=requested[1][0])
    param, kind, value = requested[0]
    try:
        return _grammar(kind, value), param
    except ValueError as error:
        raise ApiError(str(error), param=param) from None


def _grammar(kind: str, value: Any) -> Grammar:
    """The grammar of this kind.

    Raises:
        ValueError: the value is none, or there is no such kind.
    """
    if kind == "json":
        return Grammar.json_schema(value)
    if kind == "json_object":
        if value is not True:
            raise ValueError("json_object must be true")
        return Grammar.json_object()
    if kind == "choice":
        if not isinstance(value, list):
            raise ValueError("choice must be a list of texts")
        return Grammar.choice(value)
    if kind not in ("regex", "grammar"):
        raise ValueError(f"the kind {kind!r} of structured output is not supported")
    if not isinstance(value, str):
        raise ValueError(f"{kind} must be a text")
    return Grammar.regex(value) if kind == "regex" else Grammar.lark(value)


def _of_response_format(response_format: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """The field, kind and value of OpenAI's `response_format`; empty for plain text."""
    kind = response_format.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind != "json_schema":
        raise ApiError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param="response_format.type",
        )
    param = "response_format.json_schema"
    description = response_format.get("json_schema")
    if not isinstance(description, Mapping) or "schema" not in description:
        raise ApiError(f"{param}.schema is missing", param=param)
    return [(f"{param}.schema", "json", description["schema"])]


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any]


def requested_tools(request: ChatRequest) -> list[Tool]:
    """The tools of a request.

    Raises:
        ApiError: a tool is wrong.
    """
    tools: list[Tool] = []
    if len(request.tools) > MAX_TOOLS:
        raise ApiError(f"tools takes up to {MAX_TOOLS} functions", param="tools")
    for i, description in enumerate(request.tools):
        where = f"tools[{i}]"
        function = description.get("function")
        if description.get("type") != "function" or not isinstance(function, Mapping):
            raise ApiError(f"{where} must be a function", param=where)
        name = function.get("name")
        if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
            raise ApiError(
                f"{where}.function.name must be 1 to 64 letters, digits, _ and -",
                param=f"{where}.function.name",
            )
        if name in [tool.name for tool in tools]:
            raise ApiError(f"there are two tools {name!r}", param=where)
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        if not isinstance(parameters, Mapping):
            param = f"{where}.function.parameters"
            raise ApiError(f"{param} must be a JSON schema", param=param)
        tools.append(Tool(name, parameters))
    return tools


class ToolUse(ABC):
    """How the text of an answer is read as calls of tools."""

    grammar: Grammar | None = None
    """What the text must be; None if anything."""

    @abstractmethod
    def read(self, text: str) -> tuple[str, list[Json]]:
        """The content of a text, and its calls."""

    @abstractmethod
    def num_content(self, text: str) -> int:
        """How many characters of an unfinished text are content for certain."""

    def finish_reason(self, reason: str | None, calls: Sequence[Json]) -> str | None:
        """The reason that a choice reports. A cut answer stays one."""
        return "tool_calls" if calls and reason == "stop" else reason


class NamedTool(ToolUse):
    """The answer is the arguments of one function."""

    def __init__(self, tool: Tool) -> None:
        self.name = tool.name
        self.grammar = Grammar.json_schema(tool.parameters)

    def read(self, text: str) -> tuple[str, list[Json]]:
        return "", [new_call(self.name, text)]

    def num_content(self, text: str) -> int:
        return 0

    def finish_reason(self, reason: str | None, calls: Sequence[Json]) -> str | None:
        # As in OpenAI's API, where the client chose the call.
        return reason


class RequiredTools(ToolUse):
    """The answer is a list of calls, one if they may not be parallel."""

    def __init__(self, tools: Sequence[Tool], *, parallel: bool) -> None:
        rules = []
        names = []
        for i, tool in enumerate(tools):
            start = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
            names.append(f"call_{i}")
            rules.append(f'call_{i}: {start} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: {json_rule(tool.parameters)}")
        more = ' (", " call)*' if parallel else ""
        first_rules = [f'start: "[" call{more} "]"', f"call: {' | '.join(names)}"]
        self.grammar = Grammar.lark("\n".join([*first_rules, *rules]))

    def read(self, text: str) -> tuple[str, list[Json]]:
        try:
            calls = json.loads(text)
        except (ValueError, RecursionError):
            # The answer was cut, or is nested too deeply to be read.
            return text, []
        return "", [new_call(call["name"], json.dumps(call["arguments"])) for call in calls]

    def num_content(self, text: str) -> int:
        return 0


class AutoTools(ToolUse):
    """The answer is free, and calls are between the tags of the chat template."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.names = [tool.name for tool in tools]

    def read(self, text: str) -> tuple[str, list[Json]]:
        calls = []
        # Pieces, not a regular expression, whose time would be quadratic in a text without ends.
        for piece in text.split(CALL_START)[1:]:
            call = _call_in(piece)
            arguments = call.get("arguments", {})
            if call.get("name") not in self.names or not isinstance(arguments, dict):
                # What is no call is text.
                return text, []
            calls.append(new_call(call["name"], json.dumps(arguments)))
        if not calls:
            return text, []
        return text.partition(CALL_START)[0].rstrip(), calls

    def num_content(self, text: str) -> int:
        content, tag, _ = text.partition(CALL_START)
        if tag:
            return len(content.rstrip())
        # The end may become the tag, or be space before it.
        for length in range(min(len(CALL_START) - 1, len(text)), 0, -1):
            if CALL_START.startswith(text[-length:]):
                return len(text[:-length].rstrip())
        return len(text.rstrip())


def _call_in(piece: str) -> Json:
    """The object of a call, which is followed by the end of its tag or of the text; else {}."""
    text = piece.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return {}
    remainder = text[end:].strip()
    is_ended = not remainder or remainder.startswith(CALL_END)
    return value if is_ended and isinstance(value, dict) else {}


def new_call(name: str, arguments: str) -> Json:
    """A call in OpenAI's shape."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool_use(request: ChatRequest, template: str | None) -> ToolUse | None:
    """How the answer to a request uses tools; None if it uses none.

    Args:
        template: source of the chat template for tools; None if it has no place for them.

    Raises:
        ApiError: the tools or the choice are wrong, or the model cannot choose by itself.
    """
    tools = requested_tools(request)
    choice = request.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return None
    if not tools:
        if choice == "auto":
            return None
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, Mapping):
        return NamedTool(_named_tool(choice, tools))
    if choice == "required":
        return RequiredTools(tools, parallel=request.parallel_tool_calls is not False)
    if choice != "auto":
        raise ApiError(
            'tool_choice must be "none", "auto", "required", or a function', param="tool_choice"
        )
    _check_auto(request, template)
    return AutoTools(tools)


def _named_tool(choice: Mapping[str, Any], tools: Sequence[Tool]) -> Tool:
    """The tool that a `tool_choice` names."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if choice.get("type") == "function" and tool.name == name:
            return tool
    raise ApiError(f"tool_choice names no tool of this request: {name!r}", param="tool_choice")


def _check_auto(request: ChatRequest, template: str | None) -> None:
    """Refuse `tool_choice` "auto" where the answer's calls could not be read."""
    if template is None or CALL_START not in template:
        raise ApiError(
            "the model's chat template marks no calls by <tool_call>: use tool_choice required or "
            "name a function",
            param="tool_choice",
            code="unsupported",
        )
    if request.parallel_tool_calls is False:
        raise ApiError(
            "parallel_tool_calls false needs tool_choice required or a function",
            param="parallel_tool_calls",
            code="unsupported",
        )


@dataclass
class ToolStream:
    """The deltas of one choice whose text may hold calls.

    Args:
        use: how its text is read.
    """

    use: ToolUse
    text: str = ""
    num_sent: int = 0
    calls: list[Json] = field(default_factory=list)

    def push(self, text: str, *, is_last: bool) -> Json:
        """Add text and return the delta that can be sent."""
        self.text += text
        if isinstance(self.use, NamedTool):
            return self._named_delta(text)
        if not is_last:
            end = max(self.use.num_content(self.text), self.num_sent)
            delta = self.text[self.num_sent : end]
            self.num_sent = end
            return {"content": delta}
        content, self.calls = self.use.read(self.text)
        delta_content = content[self.num_sent :]
        if not self.calls:
            return {"content": delta_content}
        indexed_calls = [{"index": i, **call} for i, call in enumerate(self.calls)]
        return {"content": delta_content or None, "tool_calls": indexed_calls}

    def _named_delta(self, text: str) -> Json:
        if self.calls:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        assert isinstance(self.use, NamedTool)
        self.calls = [new_call(self.use.name, text)]
        return {"tool_calls": [{"index": 0, **self.calls[0]}]}
