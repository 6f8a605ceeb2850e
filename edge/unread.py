"""The edge's default policy for streams without a reader, for requests that set no policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from tailrace.ledger.frame import Open, Resume, Unread

DEFAULT_AFTER_S = 30
"""Default number of seconds that a stream may be without a reader until the policy applies."""

R = TypeVar("R", bound=Open | Resume)


@dataclass(frozen=True, slots=True)
class UnreadDefault:
    """The settings `unread` and `unread_after_s` of an edge.

    An Open frame that sets no policy holds `RUN` without seconds. So a client that wants `RUN` on
    an edge with another default has to send seconds, too. In a JSON request `run` alone is enough.
    """

    then: Unread = Unread.RUN
    after_s: int = DEFAULT_AFTER_S

    def applied(self, request: R) -> R:
        """Return the request, with this default if it is an Open that sets no policy itself."""
        if self.then is Unread.RUN or not isinstance(request, Open):
            return request
        if request.unread is not Unread.RUN or request.unread_after_s is not None:
            return request
        return replace(request, unread=self.then, unread_after_s=self.after_s)
