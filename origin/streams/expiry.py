"""Expiry of a stream: at a fixed time, or some time after its last use.

`Stream-TTL` is a sliding window: every write and every read renews it, but HEAD does not. The
stream is gone in the ms in which the window ends.

A write stores the time of use with its data. A read keeps the time in memory, and stores it only if
the last stored time is older than the window divided by `UNWRITTEN_SHARE`. A restart loses times
that are only in memory, so a restored object assumes the latest read that may have happened. Then a
stream never expires too early, and it expires too late by at most that part of its window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from tailrace.ledger.errors import CallerError
from tailrace.origin.streams.protocol import EXPIRES_AT, TTL

MAX_TTL_S = 100 * 365 * 24 * 3600

UNWRITTEN_SHARE = 10
"""Divisor of a stream's TTL: a read stores its time only if the last stored time is older than
TTL / UNWRITTEN_SHARE."""

_TTL = re.compile("0|[1-9][0-9]{0,9}")

_RFC3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})"
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Expiry:
    """Expiry `ttl_s` after the last use, or at `at_ms` (Unix ms); never if both are None."""

    ttl_s: int | None = None
    at_ms: int | None = None

    def deadline_ms(self, used_ms: int) -> int | None:
        """Return the time of expiry of a stream that was last used at `used_ms`."""
        if self.ttl_s is not None:
            return used_ms + self.ttl_s * 1000
        return self.at_ms

    @property
    def unwritten_ms(self) -> int:
        """Milliseconds for which the time of a use may be kept only in memory."""
        return (self.ttl_s or 0) * 1000 // UNWRITTEN_SHARE

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers for HEAD: the window, not the time that is left."""
        if self.ttl_s is not None:
            return ((TTL, str(self.ttl_s)),)
        if self.at_ms is not None:
            return ((EXPIRES_AT, format_rfc3339(self.at_ms)),)
        return ()


NEVER = Expiry()


@dataclass(slots=True)
class LastUse:
    """The effective time of last use, and the stored one; both in Unix ms."""

    known_ms: int
    stored_ms: int

    @classmethod
    def restored(cls, stored_ms: int, expiry: Expiry, now_ms: int) -> LastUse:
        """Return the last use of a stream after a restart of the origin.

        The times of some reads are kept only in memory, for up to `expiry.unwritten_ms` after the
        stored time. The restart has lost them, so assume that the stream was read at the end of
        this period, or now if the period has not ended.
        """
        unstored = min(stored_ms + expiry.unwritten_ms, now_ms)
        return cls(max(stored_ms, unstored), stored_ms)

    def touch(self, expiry: Expiry, now_ms: int) -> bool:
        """Set the time of use to now; return True if it must be stored."""
        self.known_ms = max(self.known_ms, now_ms)
        return expiry.ttl_s is not None and self.known_ms - self.stored_ms > expiry.unwritten_ms


def parse_expiry(ttl: str | None, expires_at: str | None) -> Expiry:
    """Return the expiry that a client requests.

    Raises CallerError if it is malformed or given twice.
    """
    if ttl is not None and expires_at is not None:
        raise CallerError(
            "a stream cannot have both a TTL and a time of expiry",
            field=EXPIRES_AT,
            hint=f"send only one of {TTL} and {EXPIRES_AT}",
        )
    if ttl is not None:
        if not _TTL.fullmatch(ttl) or int(ttl) > MAX_TTL_S:
            raise CallerError(
                "the TTL is not valid", field=TTL, hint=f"send whole seconds from 0 to {MAX_TTL_S}"
            )
        return Expiry(ttl_s=int(ttl))
    return NEVER if expires_at is None else Expiry(at_ms=_parse_rfc3339(expires_at))


def format_rfc3339(at_ms: int) -> str:
    moment = _EPOCH + timedelta(milliseconds=at_ms)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _parse_rfc3339(text: str) -> int:
    text = text.upper()
    try:
        if _RFC3339.fullmatch(text):
            moment = datetime.fromisoformat(text).astimezone(UTC)
            return (moment - _EPOCH) // timedelta(milliseconds=1)
    except (ValueError, OverflowError):
        pass  # not a valid time, such as month 13 or year 10000
    raise CallerError(
        "the time of expiry is not valid",
        field=EXPIRES_AT,
        hint="send a time as in RFC 3339, such as 2031-01-31T23:59:59Z",
    )
