"""GET and HEAD /metrics where clients ask too, for those who may know how this edge is doing."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from edge.access.middleware import caller_of
from edge.config import EdgeConfig
from edge.telemetry.metrics import EdgeMetrics
from ledger.errors import Forbidden, NotFound
from ledger.rights import Right
from ledger.telemetry.exposition import rendered


async def metrics(request: Request) -> Response:
    """Where there are API keys, with one of an administrator; where there are none, only at an
    edge that nobody but this machine can reach."""
    shown: EdgeMetrics | None = request.app.state.metrics
    config: EdgeConfig = request.app.state.config
    caller = caller_of(request)
    if caller is not None and Right.ADMIN not in Right(caller.rights):
        raise Forbidden("only an administrator's key reads metrics")
    if shown is None or config.processes > 1 or (caller is None and not config.is_private):
        raise NotFound("no metrics are served here", hint="edge.metrics names a place for them")
    content_type, body = await asyncio.to_thread(
        rendered, shown.registry, request.headers.get("accept")
    )
    headers = {"Content-Type": content_type, "Cache-Control": "no-store"}
    return Response(body, headers=headers)
