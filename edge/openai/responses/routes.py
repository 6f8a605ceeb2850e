"""The endpoints of `/v1/responses`: streamed responses, complete ones, and background ones.

Edges keep no responses, so every edge can serve every response. The id of a response contains the
id of its stream, its events are derived from the stream's log, and the parts of the request that
are needed later are in the stream's note.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.edge.access.middleware import caller_of
from tailrace.edge.errors import RESPONSES_PATH
from tailrace.edge.generate.encoders import stream_headers
from tailrace.edge.generate.params import read_body
from tailrace.edge.generate.routes import MAX_DOCUMENT_BYTES
from tailrace.edge.numbered_events import read_frames, resumed
from tailrace.edge.openai.request import flag, parse_body
from tailrace.edge.openai.responses.events import PREFIX, ResponseEvents, StreamedResponse
from tailrace.edge.openai.responses.request import (
    EXAMPLE,
    REFERENCE,
    Items,
    ResponseBody,
    read_note,
    to_open,
)
from tailrace.edge.origins.reader import Reader
from tailrace.edge.starlette_helpers import link_of, unless_disconnected
from tailrace.edge.stream_answer import StreamAnswer
from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import (
    Cancel,
    Opened,
    Resume,
)

MAX_LISTED = 100
"""Maximum number of input items on one page."""
MAX_REFERRED = 64
"""Maximum number of earlier responses whose items the `item_reference`s of one input may name."""
MAX_EARLIER_BYTES = 4 << 20
"""Maximum bytes of frames that an edge reads for the response that a request continues. The same
maximum applies to all responses together to which `item_reference`s of the input refer."""

_ID = re.compile(rf"{PREFIX}([0-9a-f]{{32}})")
_ITEM = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})([0-9a-f]{4})")
_NUMBER = re.compile(r"[0-9]{1,18}")


# ---- endpoints ----


async def create(request: Request) -> Response:
    """Handle POST /v1/responses: start a response."""
    body, headers = parse_body(ResponseBody, await read_body(request), EXAMPLE)
    caller = caller_of(request)
    earlier: Items = []
    if body.previous_response_id is not None:
        earlier = await unless_disconnected(request, _earlier(request, body.previous_response_id))
    given = await unless_disconnected(request, _resolved(request, body.items()))
    wanted = to_open(body, earlier, given, request.headers.get("Idempotency-Key"), caller)
    if body.stream:
        return StreamAnswer(wanted, ResponseEvents(), headers)
    with Reader(link_of(request)) as reader:
        opened = await unless_disconnected(request, reader.open(wanted))
        headers |= stream_headers(opened)
        response = StreamedResponse(opened)
        if not body.background:
            await unless_disconnected(request, read_frames(reader, response.add))
        return JSONResponse(response.document(), headers=headers)


async def retrieve(request: Request) -> Response:
    """Handle GET /v1/responses/{id}: read a response, as a document or as events."""
    asked, query = _asked(request), request.query_params
    if not flag(query, "stream"):
        opened, document = await unless_disconnected(request, _document(request, asked))
        return JSONResponse(document, headers=stream_headers(opened))
    after = _after(query.get("starting_after"))
    if after is None:
        return StreamAnswer(asked, ResponseEvents())
    return await resumed(request, asked, ResponseEvents(after), after)


async def cancel(request: Request) -> Response:
    """Handle POST /v1/responses/{id}/cancel: end a response."""
    await read_body(request)
    asked = _asked(request)
    await unless_disconnected(request, _cancel(request, asked))
    opened, document = await unless_disconnected(request, _document(request, asked))
    return JSONResponse(document, headers=stream_headers(opened))


async def delete(request: Request) -> Response:
    """Handle DELETE /v1/responses/{id}: end a response and delete its stream."""
    asked = _asked(request)
    await unless_disconnected(request, _cancel(request, asked, forget=True))
    return JSONResponse(
        {"id": f"{PREFIX}{asked.stream.hex()}", "object": "response", "deleted": True}
    )


async def input_items(request: Request) -> Response:
    """Handle GET /v1/responses/{id}/input_items: list the input of a response."""
    asked, query = _asked(request), request.query_params
    opened = await unless_disconnected(request, _opened(request, asked))
    items = read_note(opened.note).input
    if items is None:
        raise _not_kept(request.path_params["id"])
    listed = [
        {"id": f"{'msg' if item.get('type') == 'message' else 'item'}_{at}_{opened.stream.hex()}"}
        | item
        for at, item in enumerate(items)
    ]
    return JSONResponse(_page(listed, query), headers=stream_headers(opened))


ROUTES = [
    Route(RESPONSES_PATH, create, methods=["POST"]),
    Route(f"{RESPONSES_PATH}/{{id}}", retrieve, methods=["GET"]),
    Route(f"{RESPONSES_PATH}/{{id}}", delete, methods=["DELETE"]),
    Route(f"{RESPONSES_PATH}/{{id}}/cancel", cancel, methods=["POST"]),
    Route(f"{RESPONSES_PATH}/{{id}}/input_items", input_items, methods=["GET"]),
]


# ---- parsing ----


def parse_id(name: str) -> bytes:
    """Return the stream id of a response; raise NotFound if the id is not valid."""
    found = _ID.fullmatch(name)
    if found is None:
        raise NotFound(f"Response with id '{name}' not found.", code="unknown_stream", field="id")
    return bytes.fromhex(found[1])


def _asked(request: Request) -> Resume:
    """Return a Resume from the stream's start: the last events of a response repeat all text."""
    return Resume(
        parse_id(request.path_params["id"]),
        token=request.headers.get("Tailrace-Token"),
        caller=caller_of(request),
    )


def _after(said: str | None) -> int | None:
    if said is None:
        return None
    if _NUMBER.fullmatch(said) is None:
        raise CallerError(
            f"Invalid value for 'starting_after': {said!r} is not a sequence number.",
            code="invalid_value",
            field="starting_after",
        )
    return int(said)


def _page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of the items; by default the last item is first, as in OpenAI's API."""
    said, order = query.get("limit", "20"), query.get("order", "desc")
    if _NUMBER.fullmatch(said) is None or not 1 <= int(said) <= MAX_LISTED:
        raise CallerError(f"{said!r} is not an integer from 1 to {MAX_LISTED}", field="limit")
    if order not in ("asc", "desc"):
        raise CallerError(f"{order!r} is not asc or desc", field="order")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    after = query.get("after")
    if after is not None and after not in ids:
        raise CallerError(f"no item has the id {after!r}", field="after")
    rest = ordered if after is None else ordered[ids.index(after) + 1 :]
    page = rest[: int(said)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > len(page),
    }


# ---- from a stream to a response ----


async def _document(request: Request, asked: Resume) -> tuple[Opened, dict[str, Any]]:
    """Return the Opened of a stream, and the document of its response so far."""
    opened, response, _ = await _collected(request, asked)
    return opened, response.document()


async def _collected(
    request: Request, asked: Resume, most: int = MAX_DOCUMENT_BYTES
) -> tuple[Opened, StreamedResponse, int]:
    """Return the Opened of a stream, its response so far, and the size of its frames in bytes."""
    with Reader(link_of(request)) as reader:
        opened = await reader.open(replace(asked, follow=False))
        response = StreamedResponse(opened)
        return opened, response, await read_frames(reader, response.add, most)


async def _opened(request: Request, asked: Resume) -> Opened:
    with Reader(link_of(request)) as reader:
        return await reader.open(replace(asked, follow=False), frames=0)


async def _cancel(request: Request, asked: Resume, *, forget: bool = False) -> None:
    wanted = Cancel(asked.stream, asked.token, asked.caller, forget=forget)
    with Reader(link_of(request)) as reader:
        await reader.ask(wanted)


async def _earlier(request: Request, name: str) -> Items:
    """Return the input items and the output items of an earlier response."""
    try:
        # The request's resume token is not used: it is for another stream than the earlier one.
        asked = Resume(parse_id(name), caller=caller_of(request))
        opened, response, _ = await _collected(request, asked, MAX_EARLIER_BYTES)
    except NotFound:
        raise NotFound(
            f"Previous response with id '{name}' not found.",
            code="previous_response_not_found",
            status=400,
            field="previous_response_id",
        ) from None
    items = read_note(opened.note).input
    if items is None:
        raise _not_kept(name)
    document = response.document()
    if document["status"] in ("queued", "in_progress"):
        raise CallerError(
            f"Response with id '{name}' is still in progress.", field="previous_response_id"
        )
    return [*items, *document["output"]]


async def _resolved(request: Request, items: Items) -> Items:
    """Return the items, with each `item_reference` replaced by the item that it names.

    The id of an output item contains the id of its stream and its index in the output.
    """
    outputs: dict[str, Items] = {}
    resolved, room = list[dict[str, Any]](), MAX_EARLIER_BYTES
    for item in items:
        if item.get("type") != REFERENCE:
            resolved.append(item)
            continue
        name = item.get("id")
        found = _ITEM.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise _no_item(name)
        stream, at = found[1], int(found[2], 16)
        if stream not in outputs:
            if len(outputs) >= MAX_REFERRED:
                raise CallerError(
                    f"The input refers to items of over {MAX_REFERRED} responses.", field="input"
                )
            outputs[stream], size = await _output(request, stream, room)
            room -= size
        if at >= len(outputs[stream]) or outputs[stream][at]["id"] != name:
            raise _no_item(name)
        resolved.append(outputs[stream][at])
    return resolved


async def _output(request: Request, stream: str, most: int) -> tuple[Items, int]:
    """Return a response's output items and the bytes of its frames; no items for an unknown id."""
    asked = Resume(bytes.fromhex(stream), caller=caller_of(request))
    try:
        _, response, size = await _collected(request, asked, most)
    except NotFound:
        return [], 0
    return list(response.document()["output"]), size


def _no_item(name: object) -> NotFound:
    return NotFound(f"Item with id {name!r} not found.", code="item_not_found", field="input")


def _not_kept(name: str) -> CallerError:
    return CallerError(
        f"The input of the response with id '{name}' was not stored: the request had store=false, "
        "was too long, or used another route.",
        code="input_not_kept",
        field="previous_response_id",
    )
