"""A local Ollama server: which models it has, and one short generation, as a quick check of the hardware.

Standard library alone.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

DEFAULT_HOST = "http://localhost:11434"
TIMEOUT_SECONDS = 5.0
"""For questions about models."""
GENERATION_SECONDS = 300.0
"""For a generation, which may have to load the model first."""
_PORT = ":11434"


@dataclass(frozen=True)
class OllamaModel:
    """What the server says of a model.

    Args:
        name: as it is asked for.
        parameters: how many, in words such as "8.0B".
        quantization: how its weights are stored, such as "Q4_0".
        size_bytes: of its files.
    """

    name: str
    parameters: str
    quantization: str
    size_bytes: int


@dataclass(frozen=True)
class Generation:
    """A short text and what it took: new tokens, and the seconds that the server spent on them."""

    model: str
    text: str
    num_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """num_tokens / seconds."""
        return self.num_tokens / self.seconds if self.seconds else None


def host() -> str:
    """The server's address: OLLAMA_HOST, as Ollama itself reads it, or the local default."""
    given = os.environ.get("OLLAMA_HOST", "").strip()
    if not given:
        return DEFAULT_HOST
    scheme, _, rest = given.rpartition("://")
    address = rest.rstrip("/")
    if address.startswith("0.0.0.0"):  # where it listens, and no address to ask
        address = "localhost" + address.removeprefix("0.0.0.0")
    if ":" not in address and not scheme:
        address += _PORT
    return f"{scheme or 'http'}://{address}"


def list_models() -> list[OllamaModel]:
    """The server's models, the smallest first.

    Raises:
        ValueError: there is no server, or it does not answer as Ollama does.
    """
    listed = _ask("/api/tags", None, TIMEOUT_SECONDS).get("models")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError(f"{host()} does not answer as Ollama does: check OLLAMA_HOST")
    return sorted((_model(entry) for entry in listed), key=lambda model: (model.size_bytes, model.name))


def _model(entry: dict[str, Any]) -> OllamaModel:
    """One entry of the list; what it leaves out is asked for."""
    name = str(entry.get("name") or entry.get("model") or "")
    details = entry.get("details") if isinstance(entry.get("details"), dict) else {}
    assert isinstance(details, dict)
    if not details.get("parameter_size") or not details.get("quantization_level"):
        shown = _ask("/api/show", {"model": name}, TIMEOUT_SECONDS).get("details")
        details = {**details, **(shown if isinstance(shown, dict) else {})}
    size = entry.get("size")
    return OllamaModel(
        name=name,
        parameters=str(details.get("parameter_size") or "?"),
        quantization=str(details.get("quantization_level") or "?"),
        size_bytes=size if isinstance(size, int) else 0,
    )


def generate(model: str, prompt: str, *, max_new_tokens: int) -> Generation:
    """Have the server continue a prompt, greedily.

    Raises:
        ValueError: there is no server or no such model, or it does not answer as Ollama does.
    """
    request = {
        "model": model,
        "prompt": prompt,
        "stream": False,
        "options": {"num_predict": max_new_tokens, "temperature": 0},
    }
    answer = _ask("/api/generate", request, GENERATION_SECONDS)
    count, nanoseconds = answer.get("eval_count"), answer.get("eval_duration")
    if not isinstance(answer.get("response"), str):
        raise ValueError(f"{host()} does not answer as Ollama does: check OLLAMA_HOST")
    return Generation(
        model=model,
        text=answer["response"],
        num_tokens=count if isinstance(count, int) else 0,
        seconds=nanoseconds / 1e9 if isinstance(nanoseconds, int) else 0.0,
    )


def _ask(path: str, content: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """The server's answer; `content` is sent as JSON where there is any."""
    address = host()
    try:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=timeout) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(f"Ollama at {address} answered {error.code} to {path}: {_reason(error)}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"no Ollama server answers at {address}: start one (`ollama serve`), or set OLLAMA_HOST"
        ) from error
    except ValueError as error:
        raise ValueError(f"{address} does not answer as Ollama does: check OLLAMA_HOST") from error
    if not isinstance(answer, dict):
        raise ValueError(f"{address} does not answer as Ollama does: check OLLAMA_HOST")
    return answer


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says was wrong, in one line of bounded length."""
    text = error.read(2000).decode(errors="replace")
    try:
        values = json.loads(text)
        text = str(values["error"]) if isinstance(values, dict) and "error" in values else text
    except json.JSONDecodeError:
        pass
    return " ".join(text.split())[:200] or error.reason


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Goes to the server itself: it is on this machine, or on one that the user named."""
