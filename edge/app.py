"""The routes of an edge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route, WebSocketRoute

from edge import generate, health, stream
from edge.config import EdgeConfig
from edge.link import Link
from edge.problem import http_error, internal_error, tailrace_error
from edge.ws import sessions
from ledger.errors import TailraceError


def create_app(link: Link, config: EdgeConfig) -> Starlette:
    """An ASGI application over `link`, which it keeps up from startup to shutdown."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with link.running():
            yield

    app = Starlette(
        routes=[
            Route("/v1/generate", generate.start, methods=["POST"]),
            Route("/v1/generate/{id}", generate.read, methods=["GET"]),
            Route("/v1/generate/{id}/cancel", generate.cancel, methods=["POST"]),
            Route("/v1/generate/{id}/steer", generate.steer, methods=["POST"]),
            Route("/v1/stream/{name:path}", stream.call, methods=stream.METHODS),
            WebSocketRoute("/v1/ws", sessions),
            Route("/healthz", health.healthz),
            Route("/readyz", health.readyz),
            Route("/version", health.version),
        ],
        exception_handlers={
            TailraceError: tailrace_error,
            HTTPException: http_error,
            Exception: internal_error,
        },
        lifespan=lifespan,
    )
    app.state.link = link
    app.state.config = config
    return app
