"""What an operator asks of an edge: does it live, can it serve, which build is it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edge.link import Link
from edge.version import tailrace_version
from ledger.frame import SCHEMA_HASH, Heartbeat

NO_STORE = {"Cache-Control": "no-store"}


async def healthz(_request: Request) -> Response:
    """GET /healthz: 200 while the process runs, whatever the origin does."""
    return JSONResponse({"ok": True}, headers=NO_STORE)


async def readyz(request: Request) -> Response:
    """GET /readyz: 200 while the origin takes requests, else 503 with the reasons."""
    link: Link = request.app.state.link
    status, fields = readiness(link.heartbeat, link.address)
    return JSONResponse(fields, status, NO_STORE)


async def version(_request: Request) -> Response:
    """GET /version: the release, and the identity of the wire schema."""
    fields = {"tailrace": tailrace_version(), "schema": SCHEMA_HASH.hex()}
    return JSONResponse(fields, headers=NO_STORE)


def readiness(heartbeat: Heartbeat, origin: str) -> tuple[int, dict[str, object]]:
    """The status and document of /readyz."""
    fields = {
        "ready": heartbeat.ready,
        "reasons": list(heartbeat.reasons),
        "models": list(heartbeat.models),
        "devices": list(heartbeat.devices),
        "origin": origin,
    }
    return 200 if heartbeat.ready else 503, fields
