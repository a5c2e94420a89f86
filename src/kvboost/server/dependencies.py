"""What routes ask for: the service, and who is calling. Knows FastAPI's dependencies.

All of it is async: FastAPI would run a plain function in a thread.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvboost.server.access import Note
from kvboost.server.auth import Caller
from kvboost.server.service import Service

_bearer = HTTPBearer(auto_error=False, description="An API key, where the server has keys.")


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def note_of(request: Request) -> Note:
    """What the log will say of this request."""
    note: Note = request.state.note
    return note


TheService = Annotated[Service, Depends(service_of)]
TheNote = Annotated[Note, Depends(note_of)]


async def caller_of(
    request: Request,
    service: TheService,
    note: TheNote,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Caller:
    """The caller with a valid key, or anybody where the server has no keys."""
    given = None if credentials is None else credentials.credentials
    if credentials is None and "authorization" in request.headers:
        given = ""  # not a bearer token, so not a valid key
    caller = service.gate.caller(given, _address(request))
    note.caller = caller.name
    return caller


def _address(request: Request) -> str:
    """Where the client is. A proxy's header may say anything, so only an address counts."""
    try:
        return str(ip_address(request.client.host)) if request.client is not None else ""
    except ValueError:
        return "unknown address"


AnyCaller = Annotated[Caller, Depends(caller_of)]


async def admin_of(service: TheService, caller: AnyCaller) -> Caller:
    """A caller that may see and do what concerns everybody."""
    service.gate.check_admin(caller)
    return caller


Admin = Annotated[Caller, Depends(admin_of)]
