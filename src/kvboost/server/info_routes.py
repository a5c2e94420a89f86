"""The smaller routes: the model's name, health, metrics, and the page's files."""

from __future__ import annotations

from functools import lru_cache
from mimetypes import guess_type
from pathlib import Path

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvboost.server.answers import ModelBody, ModelList, Status
from kvboost.server.dependencies import Admin, AnyCaller, TheService
from kvboost.server.errors import ApiError
from kvboost.server.service import Service

router = APIRouter(tags=["server"])
PAGE = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def _model_body(service: Service, name: str) -> ModelBody:
    return ModelBody(id=name, object="model", created=service.created, owned_by="kvboost")


@router.get("/v1/models", summary="The model that is served")
async def models(service: TheService, _caller: AnyCaller) -> ModelList:
    return ModelList(object="list", data=[_model_body(service, service.settings.model_name)])


@router.get("/v1/models/{name:path}", summary="The model, by name")
async def model(service: TheService, _caller: AnyCaller, name: str) -> ModelBody:
    service.check_model(name)
    return _model_body(service, name)


@router.get("/health", summary="The process lives")
async def health() -> Status:
    return Status(status="ok")


@router.get("/ready", summary="The server takes requests")
async def ready(service: TheService) -> Status:
    service.check_ready()
    return Status(status="ready")


@router.get(
    "/metrics",
    summary="Numbers for Prometheus",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
)
async def metrics(service: TheService, _admin: Admin) -> Response:
    return Response(await service.look(service.metrics.text), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def page() -> Response:
    return await page_file("index.html")


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    found = _page_files().get(name)
    if found is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    return Response(found, media_type=guess_type(name)[0] or "text/plain", headers=PAGE_HEADERS)


@lru_cache(maxsize=1)
def _page_files() -> dict[str, bytes]:
    """The page's files, which are small. Kept in memory, so that no request waits for a disk or a thread."""
    return {path.name: path.read_bytes() for path in PAGE.glob("*") if path.is_file()}
