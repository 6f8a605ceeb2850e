"""Where a reader begins: after an index, with the newest frames, or at a time."""

from __future__ import annotations

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import Resume


def check_starting_point(request: Resume, *, after: str, tail: str, since: str) -> None:
    """Raise CallerError if the request names two starting points, or an empty tail.

    `after`, `tail` and `since` are the names of the fields in the client's API, for the error.
    """
    given = {tail: request.tail, since: request.since_ms, after: request.after}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise CallerError(
            f"{named[0]} and {named[1]} both say where to begin",
            field=named[0],
            hint=f"send only one of {after}, {tail} and {since}",
        )
    if request.tail == 0:
        raise CallerError(
            f"{tail} is 0, which asks for no frame",
            field=tail,
            hint=f"send at least 1; for new frames only, send {after} with the last index",
        )
