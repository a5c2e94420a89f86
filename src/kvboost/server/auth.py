"""Authentication: API keys, the admin key, and whose cached text a request may see.

Knows keys, salts and FastAPI's dependencies; no route and no cache. What routes depend on is async: FastAPI
would run a plain function in a thread.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvboost.server.asgi import TheNote
from kvboost.server.errors import ApiError
from kvboost.server.settings import ApiKey, ServerSettings

_ASK = {"WWW-Authenticate": "Bearer"}
_bearer = HTTPBearer(auto_error=False, description="An API key, where the server has keys.")


@dataclass(frozen=True)
class Caller:
    """Who sent a request. `name` is for queues and logs and reveals nothing of the key.

    `is_admin`: it may see and change everything. `is_alone`: what is cached under its salt is its own.
    """

    name: str
    salt: str = ""
    is_admin: bool = False
    is_alone: bool = False

    @property
    def sees_tokens(self) -> bool:
        """Whether it may see tokens of cached text that its prompt only partly matches."""
        return self.is_admin or self.is_alone


class Gate:
    """Finds the caller by its key. Compares with all keys, each in constant time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._keys = [(_digest(each.key), number, each) for number, each in enumerate(settings.api_keys, 1)]
        self._admin = _digest(settings.admin_key.key) if settings.admin_key is not None else None
        self._salts = Counter(each.salt for each in settings.api_keys)

    def caller(self, given: str | None, address: str) -> Caller:
        """The caller with the key `given`; an anonymous one where the server has no keys."""
        digest = _digest(given or "")
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        found: tuple[int, ApiKey] | None = None
        for known, number, key in self._keys:
            if hmac.compare_digest(digest, known):
                found = number, key
        if is_admin:
            return Caller("admin", is_admin=True)
        if found is not None:
            number, key = found
            only = len(self._keys) == 1 and self._admin is None
            alone = bool(key.salt) and self._salts[key.salt] == 1
            return Caller(f"key {number}", key.salt, is_admin=only, is_alone=alone)
        if given is not None and self._keys:
            raise ApiError(401, "this API key is not known here", code="invalid_api_key", headers=_ASK)
        if self._keys:
            raise ApiError(
                401,
                "this server needs an API key: send the header Authorization: Bearer KEY",
                code="missing_api_key",
                headers=_ASK,
            )
        return Caller(address, is_admin=self._admin is None)

    def check_admin(self, caller: Caller) -> None:
        """For routes that concern everybody: the admin key, or any caller where there is none."""
        if self._admin is None or caller.is_admin:
            return
        if caller.name.startswith("key "):
            raise ApiError(403, "this route needs the admin key", code="admin_key_required")
        raise ApiError(401, "this route needs the admin key", code="admin_key_required", headers=_ASK)

    def check_clear(self, caller: Caller) -> None:
        """For clearing everything: a caller may not clear text that it may not see."""
        self.check_admin(caller)
        if self._admin is None and len(self._salts) > 1:
            raise ApiError(
                403,
                "the keys have different salts, so clearing for all needs an admin key: start the server "
                "with --admin-key",
                code="admin_key_required",
            )


def effective_salt(engine_salt: str, key_salt: str, request_salt: str) -> str:
    """One salt for a key's salt and a request's. Different pairs give different salts.

    With neither, it is the engine's own, so that text cached by other means is found. Any other is longer
    than the engine's own, which it contains, and its lengths say where its parts end.
    """
    if not key_salt and not request_salt:
        return engine_salt
    return f"{len(engine_salt)}:{engine_salt}{len(key_salt)}:{key_salt}{request_salt}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


# --- what routes depend on -----------------------------------------------------------------------


async def caller_of(
    request: Request,
    note: TheNote,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """The caller with a valid key, or anybody where the server has no keys."""
    given = None if credentials is None else credentials.credentials
    if credentials is None and "authorization" in request.headers:
        given = ""  # not a bearer token, so not a valid key
    gate: Gate = request.app.state.service.gate
    caller = gate.caller(given, _address(request))
    note.caller = caller.name
    return caller


def _address(request: Request) -> str:
    """Where the client is. A proxy's header may say anything, so only an address counts."""
    try:
        return str(ip_address(request.client.host)) if request.client is not None else ""
    except ValueError:
        return "unknown address"


AnyCaller = Annotated[Caller, Depends(caller_of)]


async def admin_of(request: Request, caller: AnyCaller) -> Caller:
    """A caller that may see and do what concerns everybody."""
    request.app.state.service.gate.check_admin(caller)
    return caller


Admin = Annotated[Caller, Depends(admin_of)]
