"""`/v1/models`: the models that the connected origins serve."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tailrace.edge.origins.hints import Hints
from tailrace.edge.starlette_helpers import NO_STORE, link_of
from tailrace.ledger.errors import NotFound, OriginUnreachable
from tailrace.ledger.links.hints import Hint


async def list_models(request: Request) -> Response:
    """Handle GET /v1/models: list the models."""
    _hint(request)
    models = [_described(name) for name in _names(request)]
    return JSONResponse({"object": "list", "data": models}, headers=NO_STORE)


async def show_model(request: Request) -> Response:
    """Handle GET /v1/models/{name}: describe one model."""
    name = request.path_params["name"]
    _hint(request, name)
    if name not in _names(request):
        raise NotFound(f"The model '{name}' does not exist", code="unknown_model", field="model")
    return JSONResponse(_described(name), headers=NO_STORE)


def _hint(request: Request, name: str = "") -> None:
    """Send a hint to the origins: a client that lists models will probably use one soon."""
    hints: Hints = request.app.state.hints
    hints.send(Hint.MODELS, name)


def _names(request: Request) -> tuple[str, ...]:
    heartbeat = link_of(request).heartbeat
    names = heartbeat.models
    if not names and not heartbeat.ready:
        raise OriginUnreachable("no origin is connected, so the models are unknown")
    return names


def _described(name: str) -> dict[str, object]:
    """Return the description of a model. `created` is 0: clients require it, but it is unknown."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "tailrace"}
