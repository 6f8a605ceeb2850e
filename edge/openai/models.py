"""`/v1/models`: what the origins serve now."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edge.origins.hints import Hints
from edge.origins.link import link_of
from ledger.errors import NotFound, OriginUnreachable
from ledger.hints import Hint

HEADERS = {"Cache-Control": "no-store"}


async def list_models(request: Request) -> Response:
    """GET /v1/models"""
    _hint(request)
    models = [_described(name) for name in _names(request)]
    return JSONResponse({"object": "list", "data": models}, headers=HEADERS)


async def show_model(request: Request) -> Response:
    """GET /v1/models/{name}"""
    name = request.path_params["name"]
    _hint(request, name)
    if name not in _names(request):
        raise NotFound(f"The model '{name}' does not exist", code="unknown_model", field="model")
    return JSONResponse(_described(name), headers=HEADERS)


def _hint(request: Request, name: str = "") -> None:
    """Who looks what there is will soon ask for it."""
    hints: Hints = request.app.state.hints
    hints.say(Hint.MODELS, name)


def _names(request: Request) -> tuple[str, ...]:
    heartbeat = link_of(request).heartbeat
    names = heartbeat.models
    if not names and not heartbeat.ready:
        raise OriginUnreachable("no origin tells what it serves", retry_after_ms=1000)
    return names


def _described(name: str) -> dict[str, object]:
    """`created` is a field that clients require; nobody knows it of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "tailrace"}
