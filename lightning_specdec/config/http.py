"""Requests to servers that a user names."""

from __future__ import annotations

import urllib.request
from typing import Any, NoReturn


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the key in a request's header to the other server."""

    def redirect_request(self, *request: Any) -> NoReturn:
        new_address = request[-1]
        raise OSError(f"it redirects to {new_address}: give that address")


_opener = urllib.request.build_opener(_NoRedirects)


def open_url(request: urllib.request.Request, timeout: float) -> Any:
    """The answer to a request, as of `urllib.request.urlopen`.

    Raises:
        urllib.error.HTTPError: the server refuses.
        OSError: it cannot be reached, or redirects.
    """
    return _opener.open(request, timeout=timeout)
