"""A client of OpenAI-compatible servers: vLLM, SGLang, llama.cpp's server, and our own.

It asks for plain completions, and reads from the answers what the engine reports about tokens,
prompts, and drafts. What goes wrong is one line that names the address.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_specdec.config.decoding import SamplingSettings
from lightning_specdec.config.http import open_url
from lightning_specdec.config.terminal import short

ERROR_BYTES = 100_000
"""Most bytes that are read of an error's description."""
MAX_RETRIES = 12
"""How many fields a server may refuse, one after the other."""
TOKEN_ID_TEXT = re.compile(r"token_id:(\d+)")
"""How vLLM writes a token in log probabilities if asked for token ids."""

NEUTRAL_FIELDS: dict[str, Any] = {
    # Without these, engines take values from the model's generation_config.json, or their own.
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    # llama.cpp's name of the repetition penalty, and its order of the samplers. By default, it
    # applies the temperature last, so top_p selects other tokens than in other engines.
    "repeat_penalty": 1.0,
    "samplers": ["temperature", "top_k", "top_p", "min_p"],
}
"""Fields that turn off what is not asked for. Not all engines know all of them."""
REPORT_FIELDS: dict[str, Any] = {"return_token_ids": True, "return_tokens": True}
"""Fields that ask for token ids: of vLLM, SGLang and our server; of llama.cpp."""
LLAMA_CPP_FIELDS = ("repeat_penalty", "samplers", "return_tokens")
"""Fields that other engines may refuse without a loss."""


class EngineError(ValueError):
    """The engine cannot be reached, or does not answer as it must."""


class RefusalError(EngineError):
    """The engine refuses a request.

    Args:
        message: one line with the address.
        status: HTTP status.
        reason: what the engine says.
    """

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class EngineAnswer:
    """A completion, with what the engine reports about it; None if it does not.

    Args:
        text: the new text.
        finish_reason: "stop" or "length".
        tokens: ids of the new tokens.
        token_texts: texts of the new tokens, from the log probabilities.
        num_prompt_tokens: tokens of the prompt.
        num_new_tokens: new tokens.
        num_drafted: draft tokens.
        num_accepted: accepted draft tokens.
        seconds: from the request to the whole answer.
    """

    text: str
    finish_reason: str | None
    tokens: list[int] | None
    token_texts: list[str] | None
    num_prompt_tokens: int | None
    num_new_tokens: int | None
    num_drafted: int | None
    num_accepted: int | None
    seconds: float


class EngineClient:
    """Asks one server.

    Args:
        address: with or without `/v1`.
        model: the model's name there; None for the only one.
        api_key: sent with each request.
        timeout: seconds that an answer may take.

    Attributes:
        kind: what the server calls itself in its list of models, such as "vllm"; "" if nothing.
        model: the model's name.

    Raises:
        EngineError: the server cannot be reached, or does not serve that model.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.address = address.strip().rstrip("/").removesuffix("/v1")
        if not self.address.lower().startswith(("http://", "https://")):
            raise EngineError(
                f"an engine's address begins with http:// or https://, got {short(address, 100)!r}"
            )
        self._api_key = api_key
        self._timeout = timeout
        self._fields: dict[str, Any] = {**NEUTRAL_FIELDS, **REPORT_FIELDS}
        self.asks_logprobs = False
        self.refused_fields: list[str] = []
        """Fields of the sampling that the server does not know."""
        self.model, self.kind = self._find_model(model)

    def _find_model(self, model_name: str | None) -> tuple[str, str]:
        """Name and kind of the model that the server has under this name."""
        answer = self.request("/v1/models")
        kinds: dict[str, str] = {}
        try:
            for card in answer["data"]:
                kinds[str(card["id"])] = str(card.get("owned_by") or "")
        except (LookupError, TypeError, AttributeError):
            raise EngineError(
                f"{self.address}/v1/models does not list models: is it an OpenAI-compatible server?"
            ) from None

        served_names = short(", ".join(kinds) or "no model", 200)
        if model_name is None and len(kinds) == 1:
            model_name = next(iter(kinds))
        if model_name is None:
            raise EngineError(
                f"{self.address} serves {served_names}: name one of them with --engine_model"
            )
        if model_name not in kinds:
            raise EngineError(
                f"{self.address} serves {served_names}, not {short(model_name, 100)!r}"
            )
        return model_name, kinds[model_name]

    def complete(
        self,
        prompt: Sequence[int] | str,
        *,
        max_new_tokens: int,
        sampling: SamplingSettings,
        seed: int,
    ) -> EngineAnswer:
        """One completion.

        Optional fields that the server refuses by name are left out from then on.

        Args:
            prompt: tokens, or text that the server encodes.
            max_new_tokens: most new tokens.
            sampling: temperature, top_k and top_p.
            seed: of the server's random numbers.

        Raises:
            EngineError: the server refuses, or its answer is no completion.
        """
        required: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "seed": seed,
        }
        if sampling.top_k is not None:
            required["top_k"] = sampling.top_k
        if sampling.top_p is not None:
            required["top_p"] = sampling.top_p
        if self.asks_logprobs:
            required["logprobs"] = 1

        for _ in range(MAX_RETRIES):
            try:
                start = time.perf_counter()
                answer = self.request("/v1/completions", {**self._fields, **required})
                seconds = time.perf_counter() - start
            except RefusalError as error:
                if not self._drop_refused_field(error, required):
                    raise
                continue
            return self._read_answer(answer, seconds)
        raise EngineError(f"{self.address} refuses too many fields of a completion")

    def _drop_refused_field(self, error: RefusalError, required: Mapping[str, Any]) -> bool:
        """Leave out an optional field that a refusal names; returns whether there was one."""
        if error.status not in (400, 422):
            return False
        # A refusal may also suggest another field, after the one that it refuses.
        field_positions: dict[int, str] = {}
        for name in self._fields:
            match = re.search(rf"\b{name}\b", error.reason)
            if match is not None and name not in required:
                field_positions[match.start()] = name
        if not field_positions:
            return False
        refused_name = field_positions[min(field_positions)]
        del self._fields[refused_name]
        if refused_name in NEUTRAL_FIELDS and refused_name not in LLAMA_CPP_FIELDS:
            self.refused_fields.append(refused_name)
        return True

    def _read_answer(self, answer: Any, seconds: float) -> EngineAnswer:
        try:
            choice = answer["choices"][0]
            text = choice["text"]
            usage = answer.get("usage") or {}
            logprobs = choice.get("logprobs") or {}
            finish_reason = choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise EngineError(
                f"{self.address}/v1/completions does not answer with a completion"
            ) from None
        if not isinstance(text, str) or not isinstance(usage, dict):
            raise EngineError(f"{self.address}/v1/completions does not answer with a completion")

        num_drafted, num_accepted = _draft_counts(answer)
        return EngineAnswer(
            text=text,
            finish_reason=finish_reason,
            tokens=_token_ids(choice, logprobs),
            token_texts=_token_texts(logprobs),
            num_prompt_tokens=_count(usage.get("prompt_tokens")),
            num_new_tokens=_count(usage.get("completion_tokens")),
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            seconds=seconds,
        )

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """The tokens of a chat by vLLM's `/tokenize`; None if the server has no such path."""
        body = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        try:
            answer = self.request("/tokenize", body)
        except EngineError:
            return None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        # llama.cpp has a path of this name that encodes texts only.
        return tokens if tokens and _are_tokens(tokens) else None

    def chat_length(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        """The number of tokens of a chat, from the usage of an answer; None if not reported."""
        body = {"model": self.model, "messages": list(messages), "max_tokens": 1, "temperature": 0}
        try:
            answer = self.request("/v1/chat/completions", body)
            return _count(answer["usage"]["prompt_tokens"])
        except (EngineError, LookupError, TypeError):
            return None

    def metrics(self) -> str | None:
        """The server's metrics for Prometheus; None if it has none."""
        try:
            return self._read("/metrics", None).decode("utf-8", "replace")
        except EngineError:
            return None

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The server's answer, read from JSON.

        Args:
            path: below the address.
            body: sent as JSON; None sends no body.

        Raises:
            RefusalError: the server refuses.
            EngineError: it cannot be reached, or does not answer with JSON.
        """
        content = self._read(path, body)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            beginning = short(" ".join(content[:200].decode("utf-8", "replace").split()), 60)
            raise EngineError(
                f"{self.address}{path} does not answer with JSON but with {beginning!r}: "
                "is it an OpenAI-compatible server?"
            ) from None

    def _read(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        """The bytes of an answer."""
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.address + path, data, headers)
            with open_url(request, self._timeout) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from None
        except http.client.IncompleteRead:
            raise EngineError(f"{self.address}{path} ends in the middle of its answer") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                raise EngineError(
                    f"{self.address}{path} does not answer within {self._timeout:g} seconds: "
                    "raise --timeout if it is only slow"
                ) from None
            text = short(" ".join(str(cause).split()) or type(cause).__name__, 200)
            raise EngineError(f"{self.address} cannot be reached: {text}") from None

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> RefusalError:
        """The error for a refused request."""
        try:
            text = error.read(ERROR_BYTES).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException):
            text = ""
        reason = " ".join(_reason(text or str(error.reason)).split())
        message = f"{self.address}{path} refuses with {error.code}: {short(reason, 300)}"
        if error.code in (401, 403):
            message += "; name the variable that holds the key with --api_key_env"
        return RefusalError(message, status=error.code, reason=reason)


def _reason(text: str) -> str:
    """Why a server refuses: the message in its JSON, else its text."""
    try:
        document = json.loads(text)
        description = document.get("error") or document
        if isinstance(description, str):
            return description
        # Some frameworks answer with {"detail": ...}, which may be a list with the field's name.
        return str(description.get("message") or document.get("detail") or text)
    except (ValueError, AttributeError, RecursionError):
        return text


def _count(value: Any) -> int | None:
    """A number of tokens, if it is one."""
    return value if type(value) is int and value >= 0 else None


def _are_tokens(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _token_ids(choice: Mapping[str, Any], logprobs: Any) -> list[int] | None:
    """The ids of the new tokens, wherever the answer has them."""
    for name in ("token_ids", "tokens"):
        if _are_tokens(choice.get(name)):
            return list(choice[name])
    if not isinstance(logprobs, dict):
        return None

    # llama.cpp names the token in each entry.
    entries = logprobs.get("content")
    if isinstance(entries, list) and entries:
        entry_ids: Any = [entry.get("id") for entry in entries if isinstance(entry, dict)]
        return entry_ids if _are_tokens(entry_ids) else None

    texts = _token_texts(logprobs) or []
    matches = [TOKEN_ID_TEXT.fullmatch(text) for text in texts]
    ids = [int(match[1]) for match in matches if match]
    return ids if texts and len(ids) == len(texts) else None


def _token_texts(logprobs: Any) -> list[str] | None:
    """The texts of the new tokens in log probabilities, in the form of completions or chats."""
    if not isinstance(logprobs, dict):
        return None
    texts = logprobs.get("tokens")
    if texts is None and isinstance(logprobs.get("content"), list):
        texts = [entry.get("token") for entry in logprobs["content"] if isinstance(entry, dict)]
    is_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_texts and texts else None


def _draft_counts(answer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Draft tokens and accepted ones, as our server or llama.cpp reports them."""
    for name, drafted, accepted in (
        ("speculative", "draft_tokens", "accepted_tokens"),
        ("timings", "draft_n", "draft_n_accepted"),
    ):
        counts = answer.get(name)
        if isinstance(counts, dict) and drafted in counts:
            return _count(counts[drafted]), _count(counts.get(accepted))
    return None, None
