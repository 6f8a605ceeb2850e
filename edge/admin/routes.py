"""The routes below `/v1/admin/`."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of, head_of
from tailrace.edge.access.operators import require_operator
from tailrace.edge.admin.queries import (
    SIMULATION_TIMEOUT_S,
    OriginQueries,
    by_origin,
    find_stream,
    merged_page,
    require_success,
)
from tailrace.edge.config import EdgeConfig
from tailrace.edge.generate.params import parse_stream_id, read_body
from tailrace.edge.starlette_helpers import NO_STORE, link_of
from tailrace.edge.usage import admin_usage
from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import SCHEMA_HASH
from tailrace.ledger.process.version import tailrace_version

MAX_MERGED = 1000
"""Maximum number of streams in a list of several origins. A list of one origin may be longer."""
DEFAULT_PAGE = "100"
HEADERS = NO_STORE | {"X-Content-Type-Options": "nosniff"}
PER_ORIGIN = ("pool", "histograms", "ledger", "warm", "warm/explain", "warm/residence")
"""Paths whose response lists the separate answers of all origins."""
WARM_ORDERS = ("warm/apply", "warm/prewarm", "warm/pin")
STARTED_S = time.monotonic()

Handler = Callable[[Request, OriginQueries, dict[str, str]], Awaitable[dict[str, object]]]


def admin_routes() -> list[Route]:
    """Return the routes below `/v1/admin/`."""
    return [
        _route("streams", streams),
        _route("streams/{id}", one_stream),
        _route("streams/{id}/frames", partial(_at_its_origin, "frames")),
        _route("streams/{id}/cancel", partial(_at_its_origin, "cancel"), "POST"),
        _route("health", health),
        _route("usage", admin_usage),
        _route("simulate", simulate, "POST"),
        *(_route(asked, partial(_each, asked), "POST") for asked in WARM_ORDERS),
        *(_route(asked, partial(_each, asked)) for asked in PER_ORIGIN),
    ]


def _route(path: str, handler: Handler, method: str = "GET") -> Route:
    async def endpoint(request: Request) -> Response:
        config: EdgeConfig = request.app.state.config
        caller = caller_of(request)
        version = request.scope["http_version"]
        require_operator(head_of(request.scope), version, caller, config)
        query = dict(request.query_params)
        if len(query) < len(request.query_params.multi_items()):
            raise CallerError("a query parameter is given twice", field="query")
        queries = OriginQueries(request.app.state.link, caller)
        return JSONResponse(await handler(request, queries, query), headers=HEADERS)

    return Route(f"/v1/admin/{path}", endpoint, methods=[method])


async def _each(
    asked: str, request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Send the query `asked` to all origins, or to the one that the request names."""
    body = await read_body(request)
    chosen = _chosen(request, query)
    is_order = asked in WARM_ORDERS
    answers = await queries.all(
        queries.call(asked, query, "POST" if is_order else "GET", body), chosen
    )
    if is_order:
        require_success(answers)
    return by_origin(answers)


async def streams(
    request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """List the streams that run or wait, of all origins or of the one that the request names."""
    chosen = _chosen(request, query)
    offset, limit = (_number(query, *one) for one in (("offset", "0"), ("limit", DEFAULT_PAGE)))
    many = len(link_of(request).origins) > 1 and chosen is None
    if many:
        if offset + limit > MAX_MERGED:
            raise CallerError(
                f"offset + limit is {offset + limit}, which is too many for several origins",
                field="offset",
                hint=f"at most {MAX_MERGED} are possible; or choose one origin: origin=ADDRESS",
            )
        query |= {"offset": "0", "limit": str(offset + limit)}
    answers = await queries.all(queries.call("streams", query), chosen)
    return merged_page(
        answers,
        query.get("sort", "began_ms"),
        falls=query.get("order", "desc") == "desc",
        offset=offset,
        limit=limit,
    )


async def one_stream(
    request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Return the description of one stream by the origin that has it."""
    stream = parse_stream_id(request.path_params["id"]).hex()
    address, document = find_stream(await queries.all(queries.call(f"streams/{stream}", query)))
    return document | {"origin": address}


async def _at_its_origin(
    act: str, request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Send a query about the stream in the path to the origin that has it."""
    stream = parse_stream_id(request.path_params["id"]).hex()
    address, _ = find_stream(await queries.all(queries.call(f"streams/{stream}", {})))
    return await queries.one(
        address, queries.call(f"streams/{stream}/{act}", query, request.method)
    )


async def health(
    request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Describe this edge, and the origins as the edge sees them and as they see themselves."""
    link = link_of(request)
    answers = by_origin(await queries.all(queries.call("health", query)))
    heartbeat = link.heartbeat
    seen = {origin.address: origin.described() for origin in link.origins}
    return {
        "edge": {
            "version": tailrace_version(),
            "schema": SCHEMA_HASH.hex(),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - STARTED_S, 1),
            "ready": heartbeat.ready and not request.app.state.draining,
            "draining": request.app.state.draining,
            "reasons": list(heartbeat.reasons),
            "requests": link.route_count,
            "http3": request.app.state.serves_http3,
        },
        "origins": [seen[one["origin"]] | {"itself": one} for one in answers["origins"]],
    }


async def simulate(
    request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Let one origin simulate arrivals of requests; every origin would give the same result."""
    body = await read_body(request)
    call = queries.call("simulate", query, "POST", body)
    return await queries.one(link_of(request).address, call, SIMULATION_TIMEOUT_S)


def _chosen(request: Request, query: dict[str, str]) -> list[str] | None:
    """Return the address that the query parameter `origin` names, or None for all origins."""
    wanted = query.pop("origin", None)
    if wanted is None:
        return None
    addresses = [origin.address for origin in link_of(request).origins]
    if wanted not in addresses:
        hint = "use one of " + ", ".join(addresses)
        raise NotFound("this edge has no such origin", field="origin", hint=hint)
    return [wanted]


def _number(query: dict[str, str], name: str, default: str) -> int:
    text = query.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise CallerError(f"{text!r} is not an integer from 0 to 999999999", field=name)
    return int(text)
