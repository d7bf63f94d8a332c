"""A Hub on this machine: a small HTTP server that answers for its models as huggingface.co does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from local_server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API_PREFIX = "/api/models/"
REFUSALS = {
    "lab/gated": (200, 403, "GatedRepo"),
    "lab/gated-no-token": (200, 401, "GatedRepo"),
    "lab/private": (401, 401, "RepoNotFound"),
    "lab/unknown": (404, 404, "RepoNotFound"),
    "lab/forbidden": (403, 403, ""),
    "lab/broken": (500, 500, ""),
    "lab/plain404": (404, 404, ""),
}
"""Models that cannot be downloaded: status of API answers, status of files, and error code."""


class HubHandler(Handler):
    """Answers requests for models and their files."""

    models: ClassVar[dict[str, Path]]
    requests: ClassVar[list[str]]

    def do_GET(self) -> None:  # noqa: N802 - http.server calls it by this name
        self.answer(body=True)

    def do_HEAD(self) -> None:  # noqa: N802
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.requests.append(f"{self.command} {path}")
        is_api_call = path.startswith(API_PREFIX)
        parts = path.removeprefix(API_PREFIX).strip("/").split("/")
        name = "/".join(parts[:2])
        subpath = parts[2:]

        if name in REFUSALS:
            api_status, file_status, error_code = REFUSALS[name]
            status = api_status if is_api_call else file_status
            if status != 200:
                self.send_error_code(status, error_code, body)
                return
        elif name not in self.models:
            self.send_error_code(404, "RepoNotFound", body)
            return

        if is_api_call:
            self.answer_api(name, subpath, body)
        else:
            self.send_file(self.models[name] / subpath[-1], body)

    def answer_api(self, name: str, subpath: list[str], body: bool) -> None:
        topic = subpath[:1]
        if topic == ["revision"] and subpath[1] not in ("main", COMMIT):
            self.send_error_code(404, "RevisionNotFound", body)
        elif topic == ["tree"]:
            self.send_json(self.tree(name), body)
        else:
            info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [], "tags": []}
            self.send_json(info, body)

    def tree(self, name: str) -> list[dict[str, Any]]:
        # Gated models have no directory here, but their list of files is public.
        sizes = {"config.json": 2}
        if name in self.models:
            sizes = {file.name: file.stat().st_size for file in self.models[name].iterdir()}
        entries = []
        for file_name, size in sizes.items():
            entries.append({"type": "file", "path": file_name, "size": size, "oid": "0"})
        return entries

    def send_file(self, path: Path, body: bool) -> None:
        content = path.read_bytes()
        tag = hashlib.sha256(content).hexdigest()
        self.send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, body)

    def send_json(self, content: Any, body: bool) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

    def send_error_code(self, status: int, error_code: str, body: bool) -> None:
        self.send(status, b"no", {"X-Error-Code": error_code}, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for key, value in headers.items():
            if value:
                self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serve(models: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serve directories of models by name; yields the Hub's address and its list of requests."""

    class Hub(HubHandler):
        """The handler of this server only."""

    Hub.models = models
    Hub.requests = []
    with serving(Hub) as address:
        yield f"http://{address}", Hub.requests
