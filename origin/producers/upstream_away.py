"""Why an upstream server is away, and when to log it."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator

import httpx

from tailrace.ledger.errors import TailraceError

REMIND_S = 60.0
"""Interval between two lines of the log for the same reason, in seconds."""
MAX_CAUSES = 8
"""Maximum length of the chain of causes that is followed from one error."""


class AwayLog:
    """Decides which failures are logged: each new reason at once, the same one once a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reason: str | None = None
        self._logged_s = 0.0

    def is_due(self, reason: str) -> bool:
        """Return True if a failure with this reason is to be logged now."""
        now = self._clock()
        if reason == self._reason and now - self._logged_s < REMIND_S:
            return False
        self._reason, self._logged_s = reason, now
        return True


def reason_of(error: TailraceError) -> str:
    """Return the cause of a failed connection for operators, or else the error's own message."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return f"its name cannot be resolved: {cause.strerror}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its TLS certificate is refused: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed: {cause.reason or cause}"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused: nothing listens at that address"
        if isinstance(cause, httpx.ConnectTimeout):
            return "it accepts no connection within origin.upstream_connect_s"
        if isinstance(cause, OSError) and cause.errno is not None and cause.strerror:
            return cause.strerror
    return error.message


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an exception; of an exception group, the first one."""
    latest: BaseException = error
    for _ in range(MAX_CAUSES):
        if isinstance(latest, BaseExceptionGroup):
            behind: BaseException | None = latest.exceptions[0]
        else:
            behind = latest.__cause__ or latest.__context__
        if behind is None:
            return
        yield behind
        latest = behind
