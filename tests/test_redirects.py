"""A key is sent to the server that the user names, and to no other one."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest
from local_server import Handler, serving

from lightning_specdec.audit.engine_client import EngineClient, EngineError
from lightning_specdec.config.http import open_url


@pytest.fixture
def keys() -> list[str | None]:
    """The keys that the other server was sent."""
    return []


@pytest.fixture
def other_server(keys: list[str | None]) -> type[Handler]:
    class Other(Handler):
        def do_GET(self) -> None:  # noqa: N802
            keys.append(self.headers.get("Authorization"))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "model"}]}')

        do_POST = do_GET  # noqa: N815

    return Other


def redirecting(address: str) -> type[Handler]:
    class Redirecting(Handler):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(302)
            self.send_header("Location", f"http://{address}{self.path}")
            self.end_headers()

        do_POST = do_GET  # noqa: N815

    return Redirecting


def request_of_client(address: str) -> None:
    EngineClient(address, api_key="secret").request("/v1/models")


def request_by_url(address: str) -> None:
    headers = {"Authorization": "Bearer secret"}
    open_url(urllib.request.Request(address, headers=headers), timeout=10)


@pytest.mark.parametrize("send", [request_of_client, request_by_url])
def test_a_redirect_is_named_and_not_followed(
    send: Callable[[str], None], other_server: type[Handler], keys: list[str | None]
) -> None:
    with serving(other_server) as other, serving(redirecting(other)) as address:
        with pytest.raises((EngineError, OSError), match=f"redirects to http://{other}"):
            send(f"http://{address}")
        assert keys == []
        # A server that does not redirect gets the key.
        send(f"http://{other}")
    assert set(keys) == {"Bearer secret"}
