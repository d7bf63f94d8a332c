"""A server that speaks Ollama's API: /api/tags, /api/show and /api/generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from local_server import Handler, serving

MODELS: list[dict[str, Any]] = [
    {
        "name": "llama3:8b",
        "model": "llama3:8b",
        "size": 4_661_224_676,
        "details": {"family": "llama", "parameter_size": "8.0B", "quantization_level": "Q4_0"},
    },
    {"name": "phi3:mini", "model": "phi3:mini", "size": 2_176_178_913, "details": {"family": "phi3"}},
]
DETAILS = {"phi3:mini": {"parameter_size": "3.8B", "quantization_level": "Q4_K_M"}}


@contextmanager
def serve(models: Any = MODELS) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's address, and what it was asked to generate."""
    asked: list[dict[str, Any]] = []

    class Ollama(Handler):
        def do_GET(self) -> None:
            if self.path == "/api/tags":
                self.send(200, models if isinstance(models, bytes) else {"models": models})
            else:
                self.send(404, {"error": "not found"})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/show":
                self.send(200, {"details": DETAILS.get(request["model"], {})})
            elif request["model"] == "phi3:mini":
                asked.append(request)
                answer = {"response": " jumps over", "done": True, "eval_count": 4, "eval_duration": 200_000_000}
                self.send(200, {"model": request["model"], **answer})
            else:
                self.send(500, {"error": "model requires more system memory\nthan is available"})

        def send(self, status: int, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serving(Ollama) as address:
        yield address, asked
