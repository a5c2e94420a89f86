"""Requests that a browser sends for web pages of other origins: refused, unless the origin is allowed.

A page can make its visitor's browser send requests to this machine, and a host name of its own point here.
Programs other than browsers are not affected. Knows headers, no route.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvboost.server.errors import ApiError
from kvboost.server.settings import ServerSettings

_HARMLESS = ("GET", "HEAD")  # change nothing, and the page cannot read the answer
_LOCAL_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")  # nobody can register these
_LONGEST_NAME = 100


class SiteGuard:
    """Refuses requests of foreign pages, and without keys those for a foreign host name."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._origins = settings.cors_origins
        self._needs_known_host = not settings.api_keys
        self._hosts = {name.lower() for name in (*settings.allowed_hosts, socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope["method"], Headers(scope=scope))):
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> ApiError | None:
        if method not in _HARMLESS and is_foreign(headers, self._origins):
            return ApiError(
                403,
                "this web page may not call the server; start it with --cors ORIGIN to let it",
                code="origin_not_allowed",
            )
        name = host_name(headers.get("host", ""))
        if self._needs_known_host and "*" not in self._hosts and not self._is_known(name):
            return ApiError(
                403,
                f"{name[:_LONGEST_NAME]!a} is not a name of this server; start it with --allowed-host NAME, "
                "or with --api-key",
                code="host_not_allowed",
            )
        return None

    def _is_known(self, name: str) -> bool:
        """Whether no outsider can have made `name` point here."""
        if name in self._hosts or "." not in name or name.endswith(_LOCAL_ENDINGS):
            return True
        return _is_address(name)


def is_foreign(headers: Headers, let_in: Sequence[str]) -> bool:
    """Whether a browser sends this for a page of an origin that is not allowed."""
    origin = headers.get("origin")
    if "*" in let_in or (origin is not None and origin in let_in):
        return False
    if (site := headers.get("sec-fetch-site")) is not None:
        return site in ("cross-site", "same-site")
    return origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower()


def host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
