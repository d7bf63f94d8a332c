"""The requests of OpenAI's API, checked field by field, and its errors.

A field is supported, or it is refused by its name: none is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_specdec.config.decoding import MAX_REPETITION_PENALTY, MAX_TOKENS
from lightning_specdec.config.settings import (
    Settings,
    check,
    hints,
    nearest,
    setting,
    setting_fields,
)

MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API."""
MAX_TOP_LOGPROBS = 20
"""Largest `top_logprobs`, as in OpenAI's API."""
MAX_STOP_STRINGS = 16
"""Most stop strings of a request; OpenAI's API takes 4."""
MAX_BIASES = 1024
"""Most entries of `logit_bias`, since each position applies them all."""
MAX_BIAS = 100.0
"""Largest number in `logit_bias`, as in OpenAI's API."""
MAX_TOKEN_DIGITS = 10
"""Most digits of a token in `logit_bias`; Python reads no integer of thousands of digits."""

DEFAULT_MAX_TOKENS = 16
"""New tokens of a completion that names no number, as in OpenAI's API. Chats use what is left."""

LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key")
"""Fields that label a request. They have no effect on an answer, in OpenAI's API neither."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
"""Fields that are not supported, with the values that ask for what the server does anyway."""

ROLES = ("system", "developer", "user", "assistant", "tool")

R = TypeVar("R", bound="CommonRequest")


class ApiError(Exception):
    """An error in the shape of OpenAI's API.

    Args:
        message: what is wrong.
        status: HTTP status.
        param: the field at fault.
        code: a word that programs look at.
        kind: OpenAI's type of error.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind

    def to_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        error = {
            "message": _encodable(str(self)),
            "type": self.kind,
            "param": None if self.param is None else _encodable(self.param),
            "code": self.code,
        }
        return {"error": error}


def _encodable(text: str) -> str:
    """The text with each half of a surrogate, which a request may name a field by, as "?"."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True, kw_only=True)
class CommonRequest(Settings):
    """The fields that completions and chats share. None stands for the server's default."""

    model: str | None = None
    max_tokens: int | None = setting(None, minimum=1, maximum=MAX_TOKENS)
    temperature: float | None = setting(None, minimum=0)
    top_p: float | None = setting(None, above=0, maximum=1)
    top_k: int | None = setting(None, minimum=-1)
    min_p: float | None = setting(None, minimum=0, maximum=1)
    presence_penalty: float = setting(0.0, minimum=-2, maximum=2)
    frequency_penalty: float = setting(0.0, minimum=-2, maximum=2)
    repetition_penalty: float | None = setting(
        None, minimum=1 / MAX_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY
    )
    logit_bias: Mapping[str, Any] | None = None
    seed: int | None = setting(None, maximum=2**63 - 1)
    stop: str | tuple[str, ...] = ()
    n: int = setting(1, minimum=1, maximum=MAX_CHOICES)
    stream: bool = False
    stream_options: Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    guided_json: str | Mapping[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Any = None
    guided_grammar: str | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    store: bool | None = None

    @classmethod
    def read(cls: type[R], body: object) -> R:
        """A request from the JSON of its body.

        Raises:
            ApiError: a field is unknown, not supported, or wrong.
        """
        if not isinstance(body, Mapping):
            raise ApiError("the body must be a JSON object")
        names = [field.name for field in setting_fields(cls)]
        values = {}
        for name, value in body.items():
            # Clients send null for fields that are not set.
            if value is None or name in LABELS:
                continue
            if name not in names:
                _refuse_unsupported(name, value, names)
                continue
            values[name] = _checked(cls, name, value)
        request = cls(**values)
        request.check_fields()
        return request

    def check_fields(self) -> None:
        """Raise ApiError for values that a type and limits cannot describe."""
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise ApiError(f"stop takes up to {MAX_STOP_STRINGS} strings", param="stop")
        if "" in self.stop_strings:
            raise ApiError("stop holds an empty string", param="stop")
        if self.stream_options is not None:
            self._check_stream_options(self.stream_options)
        if self.return_token_ids and self.stream:
            raise ApiError("return_token_ids is not supported in streams", param="return_token_ids")
        self.biases()

    def _check_stream_options(self, options: Mapping[str, Any]) -> None:
        if not self.stream:
            raise ApiError("stream_options applies only to streams", param="stream_options")
        for name, value in options.items():
            param = f"stream_options.{name}"
            if name not in ("include_usage", "include_pieces"):
                raise ApiError(f"{param} is not supported", param=param)
            if not isinstance(value, bool):
                raise ApiError(f"{param} must be true or false, got {value!r}", param=param)

    def stream_option(self, name: str) -> bool:
        """Whether an option of the stream is on."""
        return bool((self.stream_options or {}).get(name))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a list."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of a token and its number."""
        biases = []
        if len(self.logit_bias or ()) > MAX_BIASES:
            raise ApiError(f"logit_bias takes up to {MAX_BIASES} tokens", param="logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
            is_token = token.isdecimal() and len(token) <= MAX_TOKEN_DIGITS
            if not is_token or not is_number or not abs(bias) <= MAX_BIAS:
                raise ApiError(
                    "logit_bias maps token numbers to numbers from "
                    f"{-MAX_BIAS:g} to {MAX_BIAS:g}, got {token[:80]!r}: {bias!r}",
                    param="logit_bias",
                )
            biases.append((int(token), float(bias)))
        return tuple(biases)

    def sampling_changes(self) -> dict[str, Any]:
        """Fields of `DecodingConfig` that the request sets, besides processors and seed."""
        changes: dict[str, Any] = {"stop": self.stop_strings}
        if self.ignore_eos:
            changes["eos"] = ()
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None:
                changes[name] = value
        if self.top_k is not None:
            # 0 and -1 turn it off in other servers.
            changes["top_k"] = self.top_k if self.top_k > 0 else None
        return changes


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(CommonRequest):
    """A request to continue texts."""

    prompt: Any = None
    logprobs: int | None = setting(None, minimum=0, maximum=MAX_TOP_LOGPROBS)

    def check_fields(self) -> None:
        super().check_fields()
        if self.prompt is None:
            raise ApiError("prompt is missing", param="prompt")

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts: one text or several, or tokens of one or several.

        Raises:
            ApiError: the prompt is none of these.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(text, str) for text in prompt):
                return prompt
            if _is_tokens(prompt):
                return [prompt]
            if all(isinstance(tokens, list) and _is_tokens(tokens) for tokens in prompt):
                return prompt
        raise ApiError(
            "prompt must be a text, a list of texts, a list of tokens, or a list of lists of "
            "tokens",
            param="prompt",
        )


@dataclass(frozen=True, kw_only=True)
class ChatRequest(CommonRequest):
    """A request for the next turn of a chat."""

    messages: tuple[Mapping[str, Any], ...] = ()
    max_completion_tokens: int | None = setting(None, minimum=1, maximum=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = setting(None, minimum=0, maximum=MAX_TOP_LOGPROBS)
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if not self.messages:
            raise ApiError("messages is missing or empty", param="messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(
                "max_tokens and max_completion_tokens exclude each other: give one of them",
                param="max_tokens",
            )
        self.turns()

    def turns(self) -> list[dict[str, Any]]:
        """The messages as a chat template takes them: with contents as texts.

        Raises:
            ApiError: a message is wrong, or holds something other than text.
        """
        return [_turn(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


def _turn(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise ApiError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}", param=f"{where}.role"
        )
    turn = dict(message)
    if role == "developer":
        # The newer name of the same role; chat templates of open models know the older one.
        turn["role"] = "system"

    if role == "assistant" and isinstance(message.get("tool_calls"), list):
        turn["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]

    content = message.get("content")
    calls_tools = role == "assistant" and message.get("tool_calls")
    if content is None and calls_tools:
        return turn
    turn["content"] = _text_of(content, f"{where}.content")
    return turn


def _with_object(call: Any) -> Any:
    """A call of a tool with its arguments as an object, which chat templates expect."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, Mapping):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _text_of(content: object, where: str) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for i, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            param = f"{where}[{i}]"
            raise ApiError(f"{param} is not a text: only texts are supported", param=param)
        texts.append(part["text"])
    return "".join(texts)


def _is_tokens(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _checked(cls: type[CommonRequest], name: str, value: Any) -> Any:
    """The value of a supported field."""
    field = next(field for field in setting_fields(cls) if field.name == name)
    try:
        return check(name, value, hints(cls)[name], field.metadata)  # type: ignore[arg-type]
    except ValueError as error:
        raise ApiError(str(error), param=name) from None


def _refuse_unsupported(name: str, value: Any, names: Sequence[str]) -> None:
    """Raise ApiError for a field that asks for what the server does not do."""
    if name in NEUTRAL_VALUES:
        # True equals 1, so types are compared too.
        for neutral in NEUTRAL_VALUES[name]:
            if type(value) is type(neutral) and value == neutral:
                return
        raise ApiError(f"{name} is not supported by this server", param=name, code="unsupported")
    raise ApiError(
        f"the field {name} is not supported{nearest(name, names)}", param=name, code="unsupported"
    )
