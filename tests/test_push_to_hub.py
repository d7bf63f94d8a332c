"""Laws of uploads: `export --push_to_hub` sends what it wrote, to a server like the Hub's."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli_fixtures import refused, succeed
from local_server import Handler, serving
from tiny_models import write_text_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class UploadHandler(Handler):
    """Takes uploads: small files within the commit, safetensors by git LFS."""

    files: ClassVar[dict[str, dict[str, bytes]]]
    blobs: ClassVar[dict[str, bytes]]
    status: ClassVar[int]

    def do_POST(self) -> None:  # noqa: N802 - http.server calls it by this name
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self.status != 200:
            self.reply({"error": "no"}, self.status)
        elif self.path == "/api/repos/create":
            body = json.loads(content)
            name = f"{body['organization']}/{body['name']}"
            self.files.setdefault(name, {})
            self.reply({"url": f"{self.address}/{name}", "name": name})
        elif self.path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            self.reply({"files": [self.mode(file) for file in json.loads(content)["files"]]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            self.reply({"transfer": "basic", "objects": [self.action(entry) for entry in objects]})
        elif self.path.endswith("/commit/main"):
            self.commit([json.loads(line) for line in content.splitlines()])
        else:
            self.reply({"error": "unknown"}, 404)

    def do_PUT(self) -> None:  # noqa: N802
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.blobs[hashlib.sha256(content).hexdigest()] = content
        self.reply({})

    def do_GET(self) -> None:  # noqa: N802
        self.reply({"error": "unknown"}, 404)

    @property
    def address(self) -> str:
        return f"http://{self.headers['Host']}"

    def mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith(".safetensors")
        mode = "lfs" if is_large else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def action(self, entry: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.address}/blobs/{entry['oid']}"
        return {**entry, "authenticated": True, "actions": {"upload": {"href": href}}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        name = "/".join(self.path.split("/")[3:5])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                assert value["encoding"] == "base64"
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.blobs[value["oid"]]
        url = f"{self.address}/{name}/commit/{COMMIT}"
        self.reply({"success": True, "commitUrl": url, "commitOid": COMMIT})

    def reply(self, values: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[UploadHandler]]:
    from huggingface_hub import constants

    class Hub(UploadHandler):
        """The handler of this test only."""

        files: ClassVar[dict[str, dict[str, bytes]]] = {}
        blobs: ClassVar[dict[str, bytes]] = {}
        status: ClassVar[int] = 200

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with serving(Hub) as address:
        monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
        monkeypatch.setattr(constants, "ENDPOINT", f"http://{address}")
        yield Hub


EXPORT = ("export", "--draft", "draft", "--target", "target", "--format", "vllm", "--output", "out")


def test_an_exported_draft_is_uploaded_whole(hub: type[UploadHandler], tmp_path: Path) -> None:
    write_text_model(tmp_path / "target")
    write_text_model(tmp_path / "draft", num_hidden_layers=1)
    outcome = succeed(*EXPORT, "--push_to_hub", "me/draft")
    assert f"/me/draft/commit/{COMMIT}" in outcome.out

    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    uploaded = {
        name: content for name, content in hub.files["me/draft"].items() if name != ".gitattributes"
    }
    assert uploaded == written
    assert {"README.md", "config.json", "model.safetensors"} <= set(uploaded)
    assert b"speculative-decoding" in uploaded["README.md"]


def test_an_upload_that_fails_is_one_line_and_leaves_the_directory(
    hub: type[UploadHandler], tmp_path: Path
) -> None:
    from cli_fixtures import call

    write_text_model(tmp_path / "target")
    write_text_model(tmp_path / "draft", num_hidden_layers=1)
    hub.status = 403
    outcome = call(*EXPORT, "--push_to_hub", "me/draft")
    assert outcome.code == 2
    assert "out is written, and could not be uploaded to me/draft" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_upload_that_cannot_work_is_refused_before_anything_is_loaded(
    hub: type[UploadHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "is no name of a repository"
    refused(*EXPORT, "--push_to_hub", "a/b/c", message=message)
    without_format = [word for word in EXPORT if word not in ("--format", "vllm")]
    refused(*without_format, "--push_to_hub", "me/draft", message="give --format")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    refused(*EXPORT, "--push_to_hub", "me/draft", message="needs a token: set HF_TOKEN")
