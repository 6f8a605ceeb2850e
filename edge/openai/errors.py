"""Errors in the shape of OpenAI's API, with the statuses and headers that its clients act upon.

A client of that API tries again after 408, 409, 429 and from 500 on, unless `x-should-retry` says
otherwise, and waits as long as `retry-after-ms` says.
"""

from __future__ import annotations

import math
import re

from starlette.responses import JSONResponse

from ledger.errors import TailraceError

RESPONSES_PATH = "/v1/responses"
OPENAI_PATHS = (
    *("/v1/chat/completions", "/v1/completions", RESPONSES_PATH),
    *("/v1/embeddings", "/v1/models"),
)
_OPENAI_PATH = re.compile(rf"(?:{'|'.join(map(re.escape, OPENAI_PATHS))})(?:/|$)")

CODES = {
    "unknown_model": "model_not_found",
    "prompt_too_long": "context_length_exceeded",
    "no_key": "invalid_api_key",
    "bad_key": "invalid_api_key",
    "too_many_requests": "rate_limit_exceeded",
    "too_many_tokens": "rate_limit_exceeded",
    "too_many_streams": "rate_limit_exceeded",
    "invalid_request": None,
    "method_not_allowed": None,
    "not_found": None,
}
"""Ours, where clients know another word for it, or none; all others keep ours."""
STATUSES = {"unsupported": 400, "beyond_end": 400}
"""By our code, where the reference says another status than ours."""
RESPONSES_FIELDS: dict[str | None, str] = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "format": "text.format",
    "overflow": "truncation",
}
"""What the origin calls otherwise than `/v1/responses`."""


def error_headers(error: TailraceError) -> dict[str, str]:
    """Of an answer that is an error, whatever the dialect (RFC 9110, 10.2.3)."""
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
    return headers


def speaks_openai(path: str) -> bool:
    """Whether who asks for this path expects answers of this kind."""
    return _OPENAI_PATH.match(path) is not None


def openai_fields(error: TailraceError) -> dict[str, str | None]:
    """What is below `error` in an answer, and in an event that ends a stream."""
    status = STATUSES.get(error.code, error.status)
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    hint = f" ({error.hint})" if error.hint else ""
    return {
        "message": f"{error.message}{hint}",
        "type": kind,
        "param": "starting_after" if error.code == "beyond_end" else error.field,
        "code": CODES.get(error.code, error.code),
    }


def openai_error(error: TailraceError, path: str = "") -> JSONResponse:
    """The whole answer, by the names that fields have in the API at `path`."""
    fields = openai_fields(error)
    if path.startswith(RESPONSES_PATH):
        fields["param"] = RESPONSES_FIELDS.get(fields["param"], fields["param"])
    headers = error_headers(error) | {"X-Should-Retry": "true" if error.retryable else "false"}
    if error.retry_after_ms is not None:
        headers["Retry-After-Ms"] = str(error.retry_after_ms)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status = STATUSES.get(error.code, error.status)
    return JSONResponse({"error": fields}, status, headers)
