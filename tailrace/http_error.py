"""An edge's error answer as an error again: the client's counterpart of `edge.errors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ledger.errors import TailraceError
from ledger.frame import StreamError, to_error

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Retried when the answer itself does not say, as with a proxy's error page."""


def http_error(status: int, headers: Mapping[str, str], body: bytes) -> TailraceError:
    """The error that an HTTP answer tells of, whoever between client and origin wrote it."""
    fields = _fields(body)
    return to_error(
        StreamError(
            code=str(fields.get("code", "http_error")),
            message=str(fields.get("message", f"the answer was HTTP status {status}")),
            retryable=bool(fields.get("retryable", status in RETRYABLE_STATUSES)),
            status=status,
            field=_text(fields.get("field")),
            hint=_text(fields.get("hint")),
            retry_after_ms=_retry_after_ms(headers.get("Retry-After")),
        )
    )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else {}


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _retry_after_ms(header: str | None) -> int | None:
    """Seconds only: no edge sends the date form (RFC 9110, 10.2.3)."""
    if header is None or not (header.isascii() and header.isdigit()):
        return None
    return int(header) * 1000
