"""`/openapi.json`: an OpenAPI 3.1 document, made from the table of operations and the schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.edge.access.authenticator import DESCRIPTIONS
from tailrace.edge.openai.request import IGNORED
from tailrace.edge.openapi.errors import error_ref, error_responses
from tailrace.edge.openapi.operations import (
    EVENT_SCHEMA,
    OPERATIONS,
    TAGS,
    Content,
    Operation,
    Parameter,
)
from tailrace.edge.openapi.schemas import COUNT, STREAM_ID, STRING, Schema, ref, schemas
from tailrace.edge.web_files import StaticDocument
from tailrace.ledger.process.version import tailrace_version

LLMS_FILE = Path(__file__).parent / "llms.txt"
API_KEY, KEY_HEADER, TOKEN, TOKEN_QUERY = "ApiKey", "ApiKeyHeader", "ResumeToken", "TokenInUrl"
X_API_KEY = "XApiKey"
DESCRIPTION = """\
Durable token streams: every token is logged before it is shown, and any client resumes any stream
on any edge. A stream that was started in one dialect can be read in every other one by its id
(`Tailrace-Stream`).

OPTIONS is not listed: it answers the CORS preflights of pages that the edge's operator allows.
Frames are described in PROTOCOL.md. A body of `text/event-stream` or of JSON lines names the
schema of its events or lines in `x-event-schema`.
"""

HEADERS: dict[str, tuple[str, Schema]] = {
    "Tailrace-Stream": ("The id of the stream.", STREAM_ID),
    "Tailrace-Schema": ("The identity of the schema of frames, 16 hex digits.", STRING),
    "Content-Encoding": (
        "`zstd` if the response begins with many frames and the request accepts it.",
        STRING,
    ),
    "Vary": ("`Accept-Encoding` if the request accepts zstd.", STRING),
    "Tailrace-Token": ("A resume token for the stream. Send it back as it is.", STRING),
    "Tailrace-Siblings": ("The other streams of a request with `n` above 1.", STRING),
    "Tailrace-Opened": (
        "With `Accept: application/vnd.tailrace.frames`: the Opened frame, in base64.",
        STRING,
    ),
    IGNORED: ("The names of parameters that had no effect.", STRING),
    "X-Request-Id": ("The id of the request: the client's own, or a new one.", STRING),
    "Request-Id": ("The id of the request, as Anthropic's API names it.", STRING),
    "X-Vercel-AI-UI-Message-Stream": ("The version of the AI SDK's protocol.", STRING),
    "Retry-After": ("Seconds to wait before the next attempt.", COUNT),
    "Retry-After-Ms": ("Milliseconds to wait before the next attempt.", COUNT),
    "X-Should-Retry": ("`true` if the same request may succeed later.", STRING),
    "WWW-Authenticate": ("How to authenticate.", STRING),
    "Allow": ("The methods of this path.", STRING),
    "ETag": ("The version of the content, for `If-None-Match`.", STRING),
    "Location": ("The URL of the stream.", STRING),
    "Stream-Next-Offset": ("The offset at which the next content begins.", STRING),
    "Stream-Up-To-Date": ("`true` if the response reaches the current end of the stream.", STRING),
    "Stream-Closed": ("`true` if the stream is closed and nothing follows.", STRING),
    "Stream-Cursor": ("The `cursor` of the next long poll.", STRING),
    "Stream-SSE-Data-Encoding": ("`base64` if the events carry binary data.", STRING),
    "Stream-TTL": ("Seconds for which the stream is kept after its last use.", STRING),
    "Stream-Expires-At": ("When the stream is deleted.", STRING),
    "Producer-Epoch": ("The epoch of the producer's last append.", COUNT),
    "Producer-Seq": ("The sequence number of the producer's last append.", COUNT),
}


@cache
def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document; it is the same for every edge of this release."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    for methods in paths.values():
        if "get" in methods and "head" not in methods:
            methods["head"] = _head(methods["get"])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tailrace",
            "version": tailrace_version(),
            "summary": "Durable token streams from a GPU to a browser.",
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "responses": error_responses(),
            "headers": {
                name: {"description": text, "schema": schema}
                for name, (text, schema) in HEADERS.items()
            },
            "securitySchemes": _security_schemes(),
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description,
    }
    if operation.parameters:
        made["parameters"] = [_parameter(each) for each in operation.parameters]
    if operation.body:
        content = {each.media_type: _media(each) for each in operation.body}
        first = operation.body[0].media_type
        content[first]["examples"] = {
            name: {"value": value} for name, value in operation.examples.items()
        }
        made["requestBody"] = {"required": bool(operation.examples), "content": content}
    responses: dict[str, Any] = {}
    for status in operation.statuses:
        answer = operation.answers.get(status)
        if answer is None:
            responses[str(status)] = error_ref(operation.shape, status)
            continue
        one: dict[str, Any] = {"description": answer.description}
        if answer.headers:
            one["headers"] = {
                name: {"$ref": f"#/components/headers/{name}"} for name in answer.headers
            }
        if answer.content:
            one["content"] = {each.media_type: _media(each) for each in answer.content}
        responses[str(status)] = one
    made["responses"] = responses
    made["security"] = _security(operation)
    return made


def _head(get: dict[str, Any]) -> dict[str, Any]:
    """Return the description of HEAD, made from that of GET: the same answer without a body."""
    responses = {
        status: {name: value for name, value in response.items() if name != "content"}
        for status, response in get["responses"].items()
    }
    return get | {
        "operationId": f"{get['operationId']}Head",
        "summary": f"{get['summary']}: the headers alone",
        "description": "The headers of GET, without the body.",
        "responses": responses,
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "description": parameter.description,
        "schema": parameter.schema,
    }
    if parameter.example is not None:
        made["example"] = parameter.example
    return made


def _media(content: Content) -> dict[str, Any]:
    made: dict[str, Any] = {"schema": content.schema}
    if content.event:
        made[EVENT_SCHEMA] = ref(content.event)
    return made


def _security(operation: Operation) -> list[dict[str, list[str]]]:
    """Return the ways to authenticate; `{}` means without credentials, at an edge without keys."""
    ways: list[dict[str, list[str]]] = [{}]
    if operation.right is not None:
        words = list(operation.right.words)
        ways = [{API_KEY: words}, {KEY_HEADER: words}, {X_API_KEY: words}]
        if operation.takes_token:
            ways.append({TOKEN: []})
            if operation.name in ("readStream", "readMessage"):
                ways.append({TOKEN_QUERY: []})
        ways.append({})
    return ways


def _security_schemes() -> dict[str, Any]:
    rights = (
        "The roles of an operation are the rights that the key needs. `admin` includes all others."
    )
    token = (
        "The `Tailrace-Token` of an earlier response: it authorizes requests for that one stream."
    )
    return {
        API_KEY: {
            "type": "http",
            "scheme": "bearer",
            "description": f"An API key, `tr_…`, if the edge has API keys. {rights}",
        },
        KEY_HEADER: {
            "type": "apiKey",
            "in": "header",
            "name": "Tailrace-Key",
            "description": "An API key, if the header Authorization is used for something else.",
        },
        X_API_KEY: {
            "type": "apiKey",
            "in": "header",
            "name": "X-Api-Key",
            "description": "An API key, as clients of Anthropic's API send it.",
        },
        TOKEN: {
            "type": "apiKey",
            "in": "header",
            "name": "Tailrace-Token",
            "description": token,
        },
        TOKEN_QUERY: {
            "type": "apiKey",
            "in": "query",
            "name": "token",
            "description": "A resume token, if headers cannot be set, as in a page's EventSource.",
        },
    }


def description_routes() -> list[Route]:
    """Return the routes of `/openapi.json` and `/llms.txt`."""
    openapi = StaticDocument("application/json", _encoded)
    llms = StaticDocument("text/plain; charset=utf-8", LLMS_FILE.read_bytes)

    async def serve_openapi(request: Request) -> Response:
        """Handle GET /openapi.json."""
        return await openapi.answer(request)

    async def serve_llms(request: Request) -> Response:
        """Handle GET /llms.txt."""
        return await llms.answer(request)

    openapi_path, llms_path = DESCRIPTIONS
    return [Route(openapi_path, serve_openapi), Route(llms_path, serve_llms)]


@cache
def _encoded() -> bytes:
    return json.dumps(openapi_document(), ensure_ascii=False, separators=(",", ":")).encode()
