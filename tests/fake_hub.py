"""A hub on this machine: a small HTTP server that answers for its models as huggingface.co does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from local_server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "lab/gated": (200, 403, "GatedRepo"),
    "lab/gated-no-token": (200, 401, "GatedRepo"),
    "lab/private": (401, 401, "RepoNotFound"),
    "lab/unknown": (404, 404, "RepoNotFound"),
    "lab/forbidden": (403, 403, ""),
    "lab/broken": (500, 500, ""),
    "lab/plain404": (404, 404, ""),
}
"""Of models that cannot be had: the status of answers about the model, that of its files, and the error's code."""


@contextmanager
def serve(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with these models by name, and the requests that it got."""
    requests: list[str] = []

    class Hub(Handler):
        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            requests.append(f"{self.command} {path}")
            about = path.startswith("/api/models/")
            parts = path.removeprefix("/api/models/").strip("/").split("/")
            name, rest = "/".join(parts[:2]), parts[2:]
            sizes = {"config.json": 2}
            if name in models:
                sizes = {file.name: file.stat().st_size for file in models[name].iterdir()}
            if name in REFUSALS and (status := REFUSALS[name][not about]) != 200:
                self.send(int(status), b"no", {"X-Error-Code": REFUSALS[name][2]}, body)
            elif name not in {*models, *REFUSALS}:
                self.send(404, b"no", {"X-Error-Code": "RepoNotFound"}, body)
            elif about and rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                self.send(404, b"no", {"X-Error-Code": "RevisionNotFound"}, body)
            elif about and rest[:1] == ["tree"]:
                files = [
                    {"type": "file", "path": file, "size": size, "oid": "0"}
                    for file, size in sizes.items()
                ]
                self.send_json(files, body)
            elif about:
                self.send_json(
                    {"id": name, "modelId": name, "sha": COMMIT, "siblings": [], "tags": []}, body
                )
            else:
                content = (models[name] / rest[-1]).read_bytes()
                tag = hashlib.sha256(content).hexdigest()
                self.send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)

        def send_json(self, content: Any, body: bool) -> None:
            self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

        def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(content))} | headers).items():
                if value:
                    self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    with serving(Hub) as address:
        yield f"http://{address}", requests
