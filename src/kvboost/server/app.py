"""The application: routes, errors, and middleware.

`create_app` joins the parts. Knows FastAPI, and no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from kvboost import __version__
from kvboost.engine import InferenceEngine
from kvboost.errors import KVBoostError
from kvboost.server import completions, routes
from kvboost.server.answers import ChatChunk
from kvboost.server.asgi import AccessLog, SiteGuard, note_failure
from kvboost.server.cache_schemas import CacheRequest, ExplainRequest, WarmRequest
from kvboost.server.errors import ApiError, ErrorBody, as_api_error, of_validation
from kvboost.server.schemas import ChatRequest, CompletionRequest
from kvboost.server.service import Service
from kvboost.server.settings import ServerSettings

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served; the error names the field."},
    "5XX": {"model": ErrorBody, "description": "The server failed or is shutting down."},
}
_FOR_ADMINS = ("/metrics", "/v1/cache/stats", "/v1/cache/clear", "/v1/cache/pin", "/v1/cache/unpin")
_READ_BY_HAND = (ChatRequest, CompletionRequest, CacheRequest, ExplainRequest, WarmRequest)


def create_app(engine: InferenceEngine, settings: ServerSettings) -> FastAPI:
    """An application over `engine`. Its worker runs at once, and ends with the application's lifespan.

    The engine stays the caller's to close.
    """
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="kvboost",
        version=__version__,
        description="An OpenAI-compatible server that never reads the same text twice.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_ERRORS,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    for router in (completions.router, routes.cache_router, routes.router):
        app.include_router(router)
    for kind in (ApiError, KVBoostError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _told)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.add_middleware(SiteGuard, settings=settings)
    app.add_middleware(AccessLog, metrics=service.metrics)
    app.openapi = lambda: _openapi(app, settings)  # type: ignore[method-assign]
    return app


async def _told(_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        return of_validation(error).response()
    told = as_api_error(error)
    note_failure(told, error)
    return told.response()


def _needs_key(path: str, settings: ServerSettings) -> bool:
    return bool(settings.api_keys) or (settings.admin_key is not None and path in _FOR_ADMINS)


def _openapi(app: FastAPI, settings: ServerSettings) -> dict[str, Any]:
    """FastAPI's document, with the bodies that are read by hand, and without errors that cannot occur."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        template = "#/components/schemas/{model}"
        _, own = models_json_schema([(kind, "validation") for kind in _READ_BY_HAND], ref_template=template)
        _, sent = models_json_schema([(ChatChunk, "serialization")], ref_template=template)
        schemas = document["components"]["schemas"]
        schemas.update({**sent["$defs"], **own["$defs"]})
        for kind in (ChatRequest, CompletionRequest):
            schemas[kind.__name__]["properties"]["model"]["enum"] = [settings.model_name]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if "security" in operation and not _needs_key(path, settings):
                    del operation["security"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema
