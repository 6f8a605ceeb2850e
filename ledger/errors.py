"""All errors of Tailrace in one tree: each says whose fault it is and what to do about it.

An error that reaches a client becomes a JSON body or a `StreamError` frame with the same fields.
"""

from __future__ import annotations

from tailrace.ledger.flow.backoff import spread_ms

EXIT_FAILED = 1
EXIT_USAGE = 2
"""Exit status for an invalid configuration: restarting will not help."""


class TailraceError(Exception):
    """Base of every error that Tailrace raises on purpose.

    Attributes:
        code: A stable snake_case word.
        status: The HTTP status of a response with this error.
        retryable: True if the same request may succeed later without a change.
        field: The part of the input at fault.
        hint: What would be right.
        min_retry_ms: Minimum wait before another try; each receiver gets a random longer one.
        retry_after_ms: A wait that a peer sent or that was drawn already; it is used unchanged.
    """

    code = "internal"
    status = 500
    retryable = False
    min_retry_ms: int | None = None

    def __init_subclass__(
        cls,
        code: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        min_retry_ms: int | None = None,
    ) -> None:
        """Set the default attributes of this class of errors, which its subclasses inherit."""
        defaults = {
            "code": code,
            "status": status,
            "retryable": retryable,
            "min_retry_ms": min_retry_ms,
        }
        for name, value in defaults.items():
            if value is not None:
                setattr(cls, name, value)

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        field: str | None = None,
        hint: str | None = None,
        min_retry_ms: int | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code if code is not None else self.code
        self.status = status if status is not None else self.status
        self.retryable = retryable if retryable is not None else self.retryable
        self.field = field
        self.hint = hint
        self.min_retry_ms = min_retry_ms if min_retry_ms is not None else self.min_retry_ms
        self.retry_after_ms = retry_after_ms

    def draw_retry_ms(self) -> int | None:
        """Return the wait to send to one receiver of this error, in ms; None to send none.

        Call it once for each frame or response with the error.
        """
        if self.retry_after_ms is not None or self.min_retry_ms is None:
            return self.retry_after_ms
        return spread_ms(self.min_retry_ms)

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}"


# ---- the caller's fault ----


class CallerError(TailraceError, code="invalid_request", status=400):
    """The request is at fault: it will fail again if it is repeated unchanged."""


class FrameError(CallerError, code="bad_frame"):
    """A malformed frame. The error names the faulty field and its offset in the frame."""

    def __init__(self, message: str, *, field: str, offset: int, hint: str | None = None) -> None:
        super().__init__(f"{message} at byte {offset}", field=field, hint=hint)
        self.offset = offset


class SchemaMismatch(CallerError, code="schema_mismatch", status=426):
    """The peer uses another schema or frame version."""


class Unauthorized(CallerError, code="bad_token", status=401):
    """A resume token that is forged, expired, or signed with an unknown key."""


class Forbidden(CallerError, code="missing_right", status=403):
    """A valid token without the right that the request needs."""


class NotFound(CallerError, code="not_found", status=404):
    """The stream, model or object does not exist, or the caller may not know of it."""


class Conflict(CallerError, code="conflict", status=409):
    """The request contradicts stored data."""


class StaleEpoch(Conflict, code="stale_epoch"):
    """An append or a lease of a producer that another producer has replaced."""


class WrongIndex(Conflict, code="wrong_index"):
    """An append that would leave a gap or write an index twice."""


class TooLarge(CallerError, code="too_large", status=413):
    """A body, frame or prompt over its limit."""


class StreamFull(TooLarge, code="stream_full"):
    """A stream at its size limit: it can only be ended."""


class TooManyRequests(
    CallerError, code="too_many_requests", status=429, retryable=True, min_retry_ms=1_000
):
    """The caller has reached a rate limit or quota; the code says which."""


class BeyondEnd(CallerError, code="beyond_end", status=416):
    """An index that the stream has not reached."""


# ---- the server's fault, or a temporary condition ----


class Unavailable(
    TailraceError, code="unavailable", status=503, retryable=True, min_retry_ms=1_000
):
    """The request is valid, but the service cannot handle it now."""


class OriginUnreachable(Unavailable, code="origin_unreachable"):
    """The edge has no link to an origin."""


class Overloaded(Unavailable, code="overloaded"):
    """A queue is full; the message names the queue."""


class HeldElsewhere(Unavailable, code="held_elsewhere"):
    """Another origin runs the object; `address` is the address of its link, if known."""

    address: str | None = None


class LedgerAway(Unavailable, code="ledger_away"):
    """The ledger's storage cannot be reached now. Acknowledged data is safe."""


class LedgerFull(Overloaded, code="ledger_full", min_retry_ms=5_000):
    """The ledger is at its size limit: new streams are refused, running streams can only end."""


class LedgerFailed(Unavailable, code="ledger_failed"):
    """The ledger's storage refused a write. Readers were shown no frame of that write."""


class Damaged(TailraceError, code="damaged"):
    """Stored data is corrupt. The message names the affected data; other data is not affected."""


# ---- the operator's fault ----


class ConfigError(TailraceError, code="bad_config"):
    """An invalid setting. The message names the setting, the file and what would be right."""


class ModelError(TailraceError, code="bad_model"):
    """A checkpoint that cannot be served. The message names the file and the tensor or key."""


# ---- shared ----


def error_body(error: TailraceError) -> dict[str, dict[str, str | bool]]:
    """Return the JSON document of an error, without absent fields."""
    fields: dict[str, str | bool] = {"code": error.code, "message": error.message}
    if error.field is not None:
        fields["field"] = error.field
    if error.hint is not None:
        fields["hint"] = error.hint
    fields["retryable"] = error.retryable
    return {"error": fields}


def unknown_stream(stream: bytes) -> NotFound:
    return NotFound(
        f"no stream {stream.hex()}",
        code="unknown_stream",
        hint="it never existed, or it has expired",
    )


def damaged_stream(stream: bytes, what: str) -> Damaged:
    return Damaged(
        f"stream {stream.hex()}: {what}", hint="the file is damaged; restore it from a copy"
    )
