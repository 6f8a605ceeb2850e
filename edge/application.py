"""The ASGI application of an edge: its routes, and the health checks that operators use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from anyio import create_task_group
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.bodies import BodyBudget
from tailrace.edge.access.middleware import Access, caller_of, head_of
from tailrace.edge.access.operators import sees_details
from tailrace.edge.access.rules import Rules
from tailrace.edge.admin.routes import admin_routes
from tailrace.edge.ai_sdk import ROUTES as AI_SDK_ROUTES
from tailrace.edge.anthropic.routes import ROUTES as MESSAGE_ROUTES
from tailrace.edge.chats.routes import ROUTES as CHAT_ROUTES
from tailrace.edge.config import EdgeConfig, access_rules
from tailrace.edge.deployment_sync import DeploymentSync
from tailrace.edge.errors import (
    client_gone,
    http_error,
    internal_error,
    not_a_websocket,
    tailrace_error,
)
from tailrace.edge.generate import routes as generate
from tailrace.edge.generate.input import send_input
from tailrace.edge.objects import METHODS, call
from tailrace.edge.objects import ROUTE as OBJECT_ROUTE
from tailrace.edge.openai.answers import (
    routes_of,
)
from tailrace.edge.openai.chat import CHAT
from tailrace.edge.openai.completions import COMPLETIONS
from tailrace.edge.openai.embeddings import embed
from tailrace.edge.openai.models import list_models, show_model
from tailrace.edge.openai.responses.routes import ROUTES as RESPONSE_ROUTES
from tailrace.edge.openapi.document import description_routes
from tailrace.edge.origins.hints import Hints
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.session import ORIGIN_NOT_READY
from tailrace.edge.starlette_helpers import NO_STORE
from tailrace.edge.telemetry.metrics import metrics
from tailrace.edge.usage import USAGE_ROUTE
from tailrace.edge.web_files import web_routes
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import SCHEMA_HASH, STREAM_PATH
from tailrace.ledger.links.hints import Hint
from tailrace.ledger.objects.deployment import Deployment
from tailrace.ledger.process.version import tailrace_version

DRAINING = "this edge is shutting down"


def create_app(
    link: OriginPool,
    config: EdgeConfig,
    rules: Rules | None = None,
    deployment: Deployment | None = None,
) -> Starlette:
    """Return the ASGI application, which keeps `link` connected from startup to shutdown."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # anyio imports modules when the first task group is made, which takes 20 ms. We make one
        # now, so that the first request, perhaps of a client whose edge was lost, does not wait.
        async with create_task_group():
            pass
        sync: DeploymentSync | None = app.state.deployment_sync
        async with link.running(), nullcontext() if sync is None else sync.running():
            yield

    app = Starlette(
        routes=[
            Route("/v1/generate", generate.start, methods=["POST"]),
            Route("/v1/generate/{id}", generate.read, methods=["GET"]),
            Route("/v1/generate/{id}/cancel", generate.cancel, methods=["POST"]),
            Route("/v1/generate/{id}/branch", generate.branch, methods=["POST"]),
            Route("/v1/generate/{id}/steer", generate.steer, methods=["POST"]),
            Route("/v1/generate/{id}/stages", generate.switch_stages, methods=["POST"]),
            Route("/v1/generate/{id}/input", send_input, methods=["POST"]),
            *routes_of(CHAT),
            *routes_of(COMPLETIONS),
            *RESPONSE_ROUTES,
            *MESSAGE_ROUTES,
            Route("/v1/embeddings", embed, methods=["POST"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", show_model, methods=["GET"]),
            Route(f"{STREAM_PATH}{{name:path}}", call, methods=METHODS),
            OBJECT_ROUTE,
            *CHAT_ROUTES,
            *AI_SDK_ROUTES,
            USAGE_ROUTE,
            *admin_routes(),
            Route("/v1/ws", not_a_websocket),
            Route("/healthz", healthz),
            Route("/health", healthz),
            Route("/readyz", readyz),
            Route("/version", version),
            Route("/metrics", metrics),
            *description_routes(),
            *web_routes(opened=lambda request: request.app.state.hints.send(Hint.PAGE)),
        ],
        middleware=[Middleware(Access, rules=rules or access_rules(config))],
        exception_handlers={
            TailraceError: tailrace_error,
            HTTPException: http_error,
            ClientDisconnect: client_gone,
            Exception: internal_error,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # a path with a surplus slash gets 404, not a redirect
    app.state.link = link
    app.state.config = config
    app.state.hints = Hints(link)
    app.state.bodies = BodyBudget()
    app.state.draining = False
    app.state.serves_http3 = False
    app.state.metrics = None  # set by `assemble` if telemetry is on
    app.state.deployment_sync = None if deployment is None else DeploymentSync(link, deployment)
    return app


async def healthz(_request: Request) -> Response:
    """Handle GET /healthz: 200 while the process runs, even if no origin can be reached."""
    return JSONResponse({"ok": True}, headers=NO_STORE)


async def readyz(request: Request) -> Response:
    """Handle GET /readyz: 200 while an origin accepts requests, else 503 with the reasons.

    Callers without a key that are not on this machine get each reason as one word (`draining`):
    the addresses and the load of the origins are not public.
    """
    link: OriginPool = request.app.state.link
    sync: DeploymentSync | None = request.app.state.deployment_sync
    faults: dict[str, list[str]] = {}
    heartbeat = link.heartbeat
    if not heartbeat.ready:
        faults[ORIGIN_NOT_READY if link.up else "no_origin"] = list(heartbeat.reasons)
    if sync is not None and sync.faults:
        faults["not_deployed"] = sync.faults
    if request.app.state.draining:
        faults["draining"] = [DRAINING]
    fields: dict[str, object] = {"ready": not faults, "reasons": list(faults)}
    version, config = request.scope["http_version"], request.app.state.config
    if sees_details(head_of(request.scope), version, caller_of(request), config):
        fields = {
            "ready": not faults,
            "reasons": [reason for reasons in faults.values() for reason in reasons],
            "models": list(heartbeat.models),
            "devices": list(heartbeat.devices),
            "origins": [origin.described() for origin in link.origins],
        }
    return JSONResponse(fields, 503 if faults else 200, NO_STORE)


async def version(_request: Request) -> Response:
    """Handle GET /version: the release, and the hash of the wire schema."""
    fields = {"tailrace": tailrace_version(), "schema": SCHEMA_HASH.hex()}
    return JSONResponse(fields, headers=NO_STORE)
