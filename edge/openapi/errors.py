"""The errors in `/openapi.json`: the codes of each status, and the shape of each API's errors."""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus
from typing import Any

from tailrace.edge.errors import OVERLOADED_STATUS
from tailrace.edge.openapi.schemas import STRING, ref

CODES: dict[int, str] = {
    400: "invalid_request invalid_json unknown_field bad_frame corr_in_use too_much_credit"
    " prompt_too_long bad_format format_too_costly invalid_function_parameters",
    401: "bad_token no_key bad_key",
    403: "missing_right class_not_allowed foreign_origin",
    404: "not_found unknown_model unknown_stream unknown_chat subscriptions_off unknown_binding"
    " unknown_object",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    409: "conflict cannot_branch branch_depth unsupported stale_epoch wrong_index",
    410: "gone",
    413: "too_large stream_full",
    416: "beyond_end",
    421: "foreign_host",
    426: "bad_version upgrade_required schema_mismatch",
    429: "too_many_streams too_many_requests too_many_tokens day_budget_spent month_budget_spent"
    " too_many_subscriptions too_many_links",
    431: "headers_too_large",
    500: "internal damaged bad_config bad_model",
    503: "unavailable loading origin_unreachable outcome_unknown overloaded not_deployed"
    " held_elsewhere ledger_away ledger_full ledger_failed",
}
"""Maps each status to its error codes. A test compares them with the table in PROTOCOL.md."""
ALWAYS = (400, 403, 408, 421, 431, 500)
"""Statuses that every route may return, for example because a request is malformed or too slow."""
KEYED = (*ALWAYS, 401, 429, 503)
"""Error statuses of routes that need an API key (if the edge has keys) and an origin."""
MESSAGES_KEYED = (*KEYED, OVERLOADED_STATUS)
"""The statuses of `KEYED`, and the one that only routes of Anthropic's API have."""
BEFORE_ROUTES = (408, 431)
"""Statuses of requests that never arrive completely, so that the server refuses them before a route
handles them. Their errors therefore have Tailrace's own shape on every route."""


class ErrorShape(Enum):
    """The shape of a route's errors.

    The value begins the names of error responses in the document, such as `OpenAiError404`.
    """

    NATIVE = "Error"
    OPENAI = "OpenAiError"
    MESSAGES = "MessagesError"
    AI_SDK = "AiSdkError"


Responses = dict[str, dict[str, Any]]


def error_ref(shape: ErrorShape, status: int) -> dict[str, str]:
    """Return a reference to the response for an error with this status."""
    if status in BEFORE_ROUTES:
        shape = ErrorShape.NATIVE
    return {"$ref": f"#/components/responses/{shape.value}{status}"}


def error_responses() -> Responses:
    """Return every error response, keyed by its name in the document, such as `OpenAiError404`."""
    return {
        f"{shape.value}{status}": _response(shape, status)
        for shape in ErrorShape
        for status in (*CODES, *([OVERLOADED_STATUS] if shape is ErrorShape.MESSAGES else ()))
        if shape is ErrorShape.NATIVE or status not in BEFORE_ROUTES
    }


def _response(shape: ErrorShape, status: int) -> dict[str, Any]:
    named = "Overloaded" if status == OVERLOADED_STATUS else HTTPStatus(status).phrase
    codes = ", ".join(f"`{code}`" for code in CODES.get(status, "").split())
    description = f"{named}: {codes}."
    content: dict[str, Any] = {"application/json": {"schema": ref("Error")}}
    names = ["X-Request-Id"]
    if status in (408, 429, 503, OVERLOADED_STATUS):
        names.append("Retry-After")
    if status == 401:
        names.append("WWW-Authenticate")
    if status == 405:
        names.append("Allow")
    if shape is ErrorShape.OPENAI:
        description = f"{named}. `code` is that of OpenAI's API if it has one, otherwise ours."
        content = {"application/json": {"schema": ref("OpenAiError")}}
        names += ["X-Should-Retry", "Retry-After-Ms"]
    if shape is ErrorShape.MESSAGES:
        description = f"{named}. `type` is that of Anthropic's API."
        content = {"application/json": {"schema": ref("MessagesError")}}
        names += ["Request-Id", "X-Should-Retry", "Retry-After-Ms"]
    if shape is ErrorShape.AI_SDK:
        description = f"{named}: a sentence that `useChat` shows as `error.message`."
        content = {"text/plain": {"schema": STRING}}
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return {"description": description, "headers": headers, "content": content}
