"""The edge's default for streams without a reader, used if the request says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from tailrace.ledger.frame import Open, Resume, Unread

DEFAULT_AFTER_S = 30
"""Default of the seconds that a stream may be unread."""

R = TypeVar("R", bound=Open | Resume)


@dataclass(frozen=True, slots=True)
class UnreadDefault:
    """The settings `unread` and `unread_after_s` of an edge.

    `RUN` without seconds is what an Open has that says nothing, so a request that wants `RUN` on an
    edge with another default has to give seconds; in JSON the word alone is enough.
    """

    then: Unread = Unread.RUN
    after_s: int = DEFAULT_AFTER_S

    def applied(self, request: R) -> R:
        """Return the request with this default, if it opens a stream and says nothing else."""
        if self.then is Unread.RUN or not isinstance(request, Open):
            return request
        if request.unread is not Unread.RUN or request.unread_after_s is not None:
            return request
        return replace(request, unread=self.then, unread_after_s=self.after_s)
