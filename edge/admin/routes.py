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
from tailrace.edge.admin.asking import (
    SIMULATION_PATIENCE_S,
    Asking,
    one_page,
    require_done,
    side_by_side,
    whose,
)
from tailrace.edge.config import EdgeConfig
from tailrace.edge.generate.params import parse_stream_id, read_body
from tailrace.edge.origins.link import link_of
from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import SCHEMA_HASH
from tailrace.ledger.process.version import tailrace_version

MAX_MERGED = 1000
"""How far down the streams of several origins are shown as one list; beyond, choose an origin."""
DEFAULT_PAGE = "100"
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
BESIDE = ("pool", "histograms", "ledger", "warm", "warm/explain", "warm/residence")
"""What each origin answers for itself."""
WARM_ACTS = ("warm/apply", "warm/prewarm", "warm/pin")
STARTED_S = time.monotonic()

Handler = Callable[[Request, Asking, dict[str, str]], Awaitable[dict[str, object]]]


def admin_routes() -> list[Route]:
    return [
        _route("streams", streams),
        _route("streams/{id}", one_stream),
        _route("streams/{id}/frames", partial(_at_its_origin, "frames")),
        _route("streams/{id}/cancel", partial(_at_its_origin, "cancel"), "POST"),
        _route("health", health),
        _route("simulate", simulate, "POST"),
        *(_route(asked, partial(_each, asked), "POST") for asked in WARM_ACTS),
        *(_route(asked, partial(_each, asked)) for asked in BESIDE),
    ]


def _route(path: str, handler: Handler, method: str = "GET") -> Route:
    async def endpoint(request: Request) -> Response:
        config: EdgeConfig = request.app.state.config
        caller = caller_of(request)
        version = request.scope["http_version"]
        require_operator(head_of(request.scope), version, caller, config)
        query = dict(request.query_params)
        if len(query) < len(request.query_params.multi_items()):
            raise CallerError("a parameter is given twice", field="query")
        asking = Asking(request.app.state.link, caller)
        return JSONResponse(await handler(request, asking, query), headers=NO_STORE)

    return Route(f"/v1/admin/{path}", endpoint, methods=[method])


async def _each(
    asked: str, request: Request, asking: Asking, query: dict[str, str]
) -> dict[str, object]:
    """Ask every origin, or the one that is chosen, and show each answer."""
    body = await read_body(request)
    chosen = _chosen(request, query)
    is_order = asked in WARM_ACTS
    answers = await asking.all(
        asking.call(asked, query, "POST" if is_order else "GET", body), chosen
    )
    if is_order:
        require_done(answers)
    return side_by_side(answers)


async def streams(request: Request, asking: Asking, query: dict[str, str]) -> dict[str, object]:
    """Those that run or wait, of all origins or one."""
    chosen = _chosen(request, query)
    offset, limit = (_number(query, *one) for one in (("offset", "0"), ("limit", DEFAULT_PAGE)))
    many = len(link_of(request).origins) > 1 and chosen is None
    if many:
        if offset + limit > MAX_MERGED:
            raise CallerError(
                f"{offset + limit} is beyond what is shown of several origins together",
                field="offset",
                hint=f"at most {MAX_MERGED} with limit; or choose one: origin=ADDRESS",
            )
        query |= {"offset": "0", "limit": str(offset + limit)}
    answers = await asking.all(asking.call("streams", query), chosen)
    return one_page(
        answers,
        query.get("sort", "began_ms"),
        falls=query.get("order", "desc") == "desc",
        offset=offset,
        limit=limit,
    )


async def one_stream(request: Request, asking: Asking, query: dict[str, str]) -> dict[str, object]:
    """Of whichever origin has it."""
    stream = parse_stream_id(request.path_params["id"]).hex()
    address, document = whose(await asking.all(asking.call(f"streams/{stream}", query)))
    return document | {"origin": address}


async def _at_its_origin(
    act: str, request: Request, asking: Asking, query: dict[str, str]
) -> dict[str, object]:
    """Of the stream that the path names."""
    stream = parse_stream_id(request.path_params["id"]).hex()
    address, _ = whose(await asking.all(asking.call(f"streams/{stream}", {})))
    return await asking.one(address, asking.call(f"streams/{stream}/{act}", query, request.method))


async def health(request: Request, asking: Asking, query: dict[str, str]) -> dict[str, object]:
    """This edge, and the origins as it sees them and as they see themselves."""
    link = link_of(request)
    answers = side_by_side(await asking.all(asking.call("health", query)))
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


async def simulate(request: Request, asking: Asking, query: dict[str, str]) -> dict[str, object]:
    """By the first origin that is there: what it answers does not depend on which."""
    body = await read_body(request)
    call = asking.call("simulate", query, "POST", body)
    return await asking.one(link_of(request).address, call, SIMULATION_PATIENCE_S)


def _chosen(request: Request, query: dict[str, str]) -> list[str] | None:
    """The origin that is asked alone, if one is."""
    wanted = query.pop("origin", None)
    if wanted is None:
        return None
    addresses = [origin.address for origin in link_of(request).origins]
    if wanted not in addresses:
        hint = ", ".join(addresses)
        raise NotFound("no such origin", field="origin", hint=hint)
    return [wanted]


def _number(query: dict[str, str], name: str, default: str) -> int:
    text = query.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise CallerError(f"{text!r}", field=name, hint="a number")
    return int(text)
