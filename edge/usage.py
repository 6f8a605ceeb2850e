"""`/v1/usage` and `/v1/admin/usage`: what generations have used, from the ledgers of all origins.

Origins that share a ledger give the same answer, which is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.admin.queries import Document, OriginQueries
from tailrace.edge.starlette_helpers import NO_STORE, link_of
from tailrace.ledger.errors import CallerError, NotFound, TailraceError
from tailrace.ledger.frame import Call, Caller
from tailrace.ledger.links.own_usage import OWN_USAGE
from tailrace.ledger.usage import UsageQuery
from tailrace.ledger.usage_report import parse_query, sums_of, usage_document

ANY_TIME_MS = 2**53
"""A Unix time in ms in the far future. The edge parses queries as if this was the current time,
so that it refuses no day as a future day: only the origins check that, by their own clocks."""


async def admin_usage(
    request: Request, queries: OriginQueries, query: dict[str, str]
) -> dict[str, object]:
    """Return the usage of all keys, summed over the ledgers of all origins."""
    parsed = parse_query(query, ANY_TIME_MS)
    answers = await queries.all(queries.call("usage", query))
    documents, errors = _by_ledger(answers)
    if errors and not documents:
        raise next(iter(errors.values()))
    return _merged(parsed, documents) | {
        "ledgers": sorted(documents),
        "missing": {address: error.message for address, error in errors.items()},
    }


async def own_usage(request: Request) -> Response:
    """Handle GET /v1/usage: the usage of the API key that the request was sent with."""
    caller = caller_of(request)
    if caller is None or not caller.key:
        raise NotFound(
            "this edge has no API keys, so no usage is counted by key",
            hint="operators find all usage at /v1/admin/usage",
        )
    query = dict(request.query_params)
    if len(query) < len(request.query_params.multi_items()):
        raise CallerError("a query parameter is given twice", field="query")
    parsed = parse_query(query, ANY_TIME_MS, groups=OWN_GROUPS, filters=OWN_FILTERS)
    url = f"http://usage/own?{urlencode(query)}"
    call = Call(OWN_USAGE, "own", "GET", url, caller=caller)
    answers = await OriginQueries(link_of(request), caller).all(call)
    documents, errors = _by_ledger(answers)
    if errors:  # without all ledgers the sums would be too low
        raise next(iter(errors.values()))
    body = _merged(parsed, documents) | {"key": caller.key, "budgets": _budgets(caller, documents)}
    return JSONResponse(body, headers=NO_STORE)


OWN_GROUPS = ("day", "month", "model", "priority", "finish")
OWN_FILTERS = ("model", "priority", "finish")
USAGE_ROUTE = Route("/v1/usage", own_usage, methods=["GET"])


def _by_ledger(
    answers: Mapping[str, Document | TailraceError],
) -> tuple[dict[str, Document], dict[str, TailraceError]]:
    """Return one answer for each ledger, and the errors of the origins that did not answer."""
    documents: dict[str, Document] = {}
    errors: dict[str, TailraceError] = {}
    for address, answer in answers.items():
        if isinstance(answer, TailraceError):
            errors[address] = answer
        else:
            documents.setdefault(answer["ledger"], answer)
    return documents, errors


def _merged(query: UsageQuery, documents: Mapping[str, Document]) -> dict[str, Any]:
    return usage_document(query, sums_of(documents.values(), query))


def _budgets(caller: Caller, documents: Mapping[str, Document]) -> list[dict[str, object]]:
    """Return the budgets of the caller's key, and what is left of them."""
    told = []
    limits = {"day": caller.tokens_per_day, "month": caller.tokens_per_month}
    for period, limit in limits.items():
        if limit is None:
            continue
        used = sum(document["spent"][period] for document in documents.values())
        ends_ms = max((one["ends_ms"][period] for one in documents.values()), default=0)
        left = {"used": used, "remaining": max(0, limit - used), "ends_ms": ends_ms}
        told.append({"period": period, "tokens": limit, **left})
    return told
