"""Errors as HTTP responses, in the shape of each API, and never with a traceback.

Routes of OpenAI's and Anthropic's APIs use their error objects. Those of the AI SDK are plain text,
which `useChat` shows as `error.message`. All other routes have one JSON shape.

Clients of OpenAI's and Anthropic's APIs retry after 408, 409, 429 and 5xx, unless `x-should-retry`
says otherwise, and wait for the time in `retry-after-ms`.
"""

from __future__ import annotations

import math
import re

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tailrace.edge.telemetry.request_metrics import CLIENT_GONE, note_error, request_id
from tailrace.ledger.errors import CallerError, NotFound, TailraceError, error_body
from tailrace.ledger.frame import FRAMES_TYPE

RESPONSES_PATH = "/v1/responses"
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
AI_SDK_PATH = "/api/chat"
OPENAI_PATHS = (
    *(CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH),
    *("/v1/embeddings", "/v1/models"),
)
MESSAGES_PATH = "/v1/messages"
_OPENAI_PATH = re.compile(rf"(?:{'|'.join(map(re.escape, OPENAI_PATHS))})(?:/|$)")

CODES = {
    "unknown_model": "model_not_found",
    "prompt_too_long": "context_length_exceeded",
    "no_key": "invalid_api_key",
    "bad_key": "invalid_api_key",
    "too_many_requests": "rate_limit_exceeded",
    "too_many_tokens": "rate_limit_exceeded",
    "too_many_streams": "rate_limit_exceeded",
    "day_budget_spent": "insufficient_quota",
    "month_budget_spent": "insufficient_quota",
    "invalid_request": None,
    "method_not_allowed": None,
    "not_found": None,
}
"""Maps our error codes to OpenAI's; None means null. Other codes are sent unchanged."""
STATUSES = {"unsupported": 400, "beyond_end": 400}
"""Maps our error codes to the HTTP status in OpenAI's API, where it differs from ours."""
_AI_SDK_PATH = re.compile(rf"{re.escape(AI_SDK_PATH)}(?:/|$)")
_MESSAGES_PATH = re.compile(rf"{re.escape(MESSAGES_PATH)}(?:/|$)")
THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's error code for an unsupported `thread`. After it, Anthropic's SDKs send the whole
conversation with each request."""
OVERLOADED_STATUS = 529
"""The status of `overloaded_error` in Anthropic's API."""
MESSAGES_STATUSES = {
    **STATUSES,
    "overloaded": OVERLOADED_STATUS,
    "ledger_full": OVERLOADED_STATUS,
}
"""Status of each of our codes for which Anthropic's API has another status."""
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}
"""The `type` of an error in Anthropic's API by its status.

Every other error is an `invalid_request_error`, or an `api_error` from status 500 on.
"""
_OLLAMA_PATH = re.compile(r"/api/(?:tags|generate|show|ps|version|embed|embeddings|pull|push)$")
CHAT_FIELDS = {"logprobs": "top_logprobs", "format": "response_format"}
RESPONSES_FIELDS = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "format": "text.format",
    "overflow": "truncation",
}
MESSAGES_FIELDS = {"stop": "stop_sequences", "format": "output_config.format"}
FIELDS = {
    CHAT_PATH: CHAT_FIELDS,
    RESPONSES_PATH: RESPONSES_FIELDS,
    MESSAGES_PATH: MESSAGES_FIELDS,
}
"""Maps the path of an API to a map from the origin's field names to the names in that API."""


def is_openai_path(path: str) -> bool:
    """Return True if the request is for one of the routes of OpenAI's API."""
    return _OPENAI_PATH.match(path) is not None


DAY_QUOTA = "tokens-day"
MONTH_QUOTA = "tokens-month"
"""Names of the budgets of an API key in the header `RateLimit`."""
TOKENS_QUOTA = "tokens"
"""Name of a tenant's token limit in the header `RateLimit`. Origins enforce this limit, so an edge
learns only from an origin's refusal that no tokens are left."""


SPENT_QUOTAS = {
    "too_many_tokens": TOKENS_QUOTA,
    "day_budget_spent": DAY_QUOTA,
    "month_budget_spent": MONTH_QUOTA,
}
"""Maps the code of an origin's refusal to the quota that is used up."""


def go_duration(seconds: float) -> str:
    """Return a time as OpenAI's headers spell it: `120ms`, `8s`, `6m0s`; seconds are rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


INERT_POLICY = "sandbox; default-src 'none'"
"""The Content-Security-Policy of streams' content and of errors. If a browser shows one as a page,
this page runs no script, has no origin and loads nothing."""


def error_headers(error: TailraceError, retry_ms: int | None) -> dict[str, str]:
    """Return the headers that an error response has in every API (RFC 9110, 10.2.3)."""
    headers = {
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": INERT_POLICY,
    }
    if retry_ms is not None:
        headers["Retry-After"] = str(math.ceil(retry_ms / 1000))
        if (quota := SPENT_QUOTAS.get(error.code)) is not None:
            headers["RateLimit"] = f'"{quota}";r=0;t={headers["Retry-After"]}'
    return headers


def named_error(error: TailraceError, path: str = "") -> tuple[str, str | None]:
    """Return an error's message and field, with the names that fields have in the API at `path`.

    The origin's messages about a field have no subject, such as "is 2.5" or "9 sequences". Most
    clients only show the message, so the name of the field is put before it. Complete sentences,
    and messages that already name the field, stay as they are.
    """
    hint = f" ({error.hint})" if error.hint else ""
    message, field = f"{error.message}{hint}", error.field
    if field is None or f"'{field}'" in message:
        return message, field
    # The error names one item of `stop`, but the client may have sent a string instead of a list.
    if field.startswith("stop["):
        field = "stop"
    name = next((names for prefix, names in FIELDS.items() if path.startswith(prefix)), {}).get(
        field, field
    )
    if message.startswith(_VERBS):
        message = f"'{name}' {message}"
    elif message[:1].isdigit():
        message = f"'{name}': {message}"
    return message, name


_VERBS = ("is ", "are ", "has ", "names ", "requires ", "go with ")
"""Beginnings of messages that lack a subject: the name of the field is put before them."""


def openai_fields(error: TailraceError, path: str) -> dict[str, str | None]:
    """Return OpenAI's error object: the value of `error` in a response or a last event."""
    status = STATUSES.get(error.code, error.status)
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    message, field = named_error(error, path)
    return {
        "message": message,
        "type": kind,
        "param": "starting_after" if error.code == "beyond_end" else field,
        "code": CODES.get(error.code, error.code),
    }


def openai_error(error: TailraceError, path: str) -> JSONResponse:
    """Return the response to an error in OpenAI's shape, with the names of fields at `path`."""
    fields = openai_fields(error, path)
    retry_ms = error.draw_retry_ms()
    should_retry = "true" if error.retryable else "false"
    headers = error_headers(error, retry_ms) | {"X-Should-Retry": should_retry}
    if retry_ms is not None:
        headers["Retry-After-Ms"] = str(retry_ms)
        if error.code == "too_many_tokens":
            headers["X-RateLimit-Remaining-Tokens"] = "0"
            headers["X-RateLimit-Reset-Tokens"] = go_duration(retry_ms / 1000)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status = STATUSES.get(error.code, error.status)
    return JSONResponse({"error": fields}, status, headers)


def messages_error_fields(error: TailraceError) -> dict[str, object]:
    """Return the object below `error` in a response or an event of Anthropic's API.

    The API has no field for the name of the parameter at fault, so the message contains this name.
    """
    status = MESSAGES_STATUSES.get(error.code, error.status)
    kind = MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message, field = named_error(error, MESSAGES_PATH)
    if field is not None and f"'{field}'" not in message and not message.startswith(field):
        message = f"{field}: {message}"
    fields: dict[str, object] = {"type": kind, "message": message}
    if error.code == THREAD_UNSUPPORTED:
        fields["details"] = {"error_code": error.code}
    return fields


def messages_error(error: TailraceError, request: str) -> JSONResponse:
    """Return the response to an error in Anthropic's API; `request` is the id of the request.

    The caller adds the header `Request-Id`, which every response has.
    """
    retry_ms = error.draw_retry_ms()
    should_retry = "true" if error.retryable else "false"
    headers = error_headers(error, retry_ms) | {"X-Should-Retry": should_retry}
    if retry_ms is not None:
        headers["Retry-After-Ms"] = str(retry_ms)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status = MESSAGES_STATUSES.get(error.code, error.status)
    fields = {"type": "error", "error": messages_error_fields(error), "request_id": request}
    return JSONResponse(fields, status, headers)


log = structlog.get_logger("tailrace.edge")


def error_response(error: TailraceError, path: str = "", request: str | None = None) -> Response:
    """Return the response to an error, in the shape of the API at `path`.

    The response has the headers that RFC 9110 demands (15.5.2, 10.2.3). `request` is the id of the
    request; by default it is the id of the request that the running task answers.
    """
    if is_openai_path(path):
        return openai_error(error, path)
    if _MESSAGES_PATH.match(path):
        request = request or request_id()
        answer = messages_error(error, request)
        answer.headers["Request-Id"] = request
        return answer
    headers = error_headers(error, error.draw_retry_ms())
    if error.status == 401:
        by_key = error.code in ("no_key", "bad_key")
        headers["WWW-Authenticate"] = "Bearer" if by_key else "Tailrace-Token"
    if _AI_SDK_PATH.match(path):
        return PlainTextResponse(named_error(error)[0], error.status, headers)
    return JSONResponse(error_body(error), error.status, headers)


def too_slow(part: str) -> CallerError:
    """Return the error of a request whose head or body has timed out."""
    return CallerError(
        f"the request's {part} took too long", code="request_timeout", status=408, retryable=True
    )


def refusal(status: int) -> TailraceError:
    """Return the error for a request that is not valid HTTP; the parser has chosen the status."""
    if status == 431:
        return CallerError(
            "the request's headers are too large", code="headers_too_large", status=431
        )
    if status == 501:
        return TailraceError("the transfer coding is not supported", code="http_error", status=501)
    if status == 505:
        return CallerError(
            "this version of HTTP is not supported",
            code="http_error",
            status=505,
            hint="send HTTP/1.1, or HTTP/2 with its preface",
        )
    return CallerError("malformed HTTP/1.1 request", code="bad_request", status=status)


# ---- handlers that the application registers ----


async def tailrace_error(request: Request, error: Exception) -> Response:
    """Return the response to a `TailraceError`, in the shape of the API that the client uses."""
    assert isinstance(error, TailraceError)
    return noted_response(error, shape_path(request.url.path, request.headers.get("Accept")))


def shape_path(path: str, accept: str | None) -> str:
    """Return the path whose API decides the shape of an error.

    Clients that accept frames read errors in Tailrace's own shape, on every route.
    """
    return "" if FRAMES_TYPE in (accept or "") else path


def noted_response(error: TailraceError, path: str) -> Response:
    """Return the response to an error, and note its code in the metrics of the current request."""
    note_error(error.code)
    return error_response(error, path)


OLLAMA = "Ollama's API is not supported; use OpenAI's, at /v1/chat/completions"


async def http_error(request: Request, error: Exception) -> Response:
    """Return the response to an error of Starlette's router, such as an unknown path or method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        hint = OLLAMA if _OLLAMA_PATH.match(path) else None
        return noted_response(NotFound(f"nothing is served at {path}", hint=hint), path)
    answer = noted_response(
        TailraceError(
            error.detail,
            code="method_not_allowed" if error.status_code == 405 else "http_error",
            status=error.status_code,
        ),
        path,
    )
    headers = dict(error.headers or {})
    if "Allow" in headers:  # Starlette takes the methods from a set, whose order varies
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    answer.headers.update(headers)
    return answer


async def not_a_websocket(request: Request) -> Response:
    """Return 426 for a plain HTTP request to the WebSocket's path (RFC 9110, 15.5.22).

    Valid handshakes never reach the application.
    """
    answer = noted_response(
        CallerError(
            f"{request.url.path} serves WebSocket connections only",
            code="upgrade_required",
            status=426,
            hint="send an opening handshake of version 13 (RFC 6455, 4.2.1) over HTTP/1.1",
        ),
        request.url.path,
    )
    if request.scope["http_version"] == "1.1":  # HTTP/2 and HTTP/3 forbid `Upgrade`
        version = {"Sec-WebSocket-Version": "13"}  # required by RFC 6455, 4.4
        answer.headers.update({"Upgrade": "websocket", "Connection": "Upgrade"} | version)
    return answer


async def client_gone(request: Request, _error: Exception) -> Response:
    """Return a response that nobody receives, because the client has disconnected."""
    log.info("client gone", method=request.method, path=request.url.path)
    return Response(status_code=CLIENT_GONE)


async def internal_error(request: Request, _error: Exception) -> Response:
    """Return the response to an unexpected exception, whose traceback the server logs."""
    fault = TailraceError("internal error of this edge; the edge's log has the details")
    return noted_response(fault, request.url.path)
