"""Which view of a stream the client asked for, by its Accept header (RFC 9110, 12.5.1)."""

from __future__ import annotations

from enum import Enum

from ledger.errors import CallerError
from ledger.frame import FRAMES_TYPE


class View(Enum):
    """A way to read a stream; the value is its media type."""

    SSE = "text/event-stream"
    FRAMES = FRAMES_TYPE
    JSON = "application/json"


_VIEWS = {
    "text/event-stream": View.SSE,
    "text/*": View.SSE,
    FRAMES_TYPE: View.FRAMES,
    "application/octet-stream": View.FRAMES,
    "application/json": View.JSON,
    "application/*": View.JSON,
    "*/*": View.JSON,
}


def choose_view(accept: str | None) -> View:
    """The view that an Accept header likes best; JSON without one.

    Raises CallerError (406) if it admits none of them.
    """
    if accept is None or not accept.strip():
        return View.JSON
    best: tuple[float, int] | None = None
    chosen = View.JSON
    for media_range in accept.split(","):
        name, _, parameters = media_range.strip().lower().partition(";")
        view = _VIEWS.get(name.strip())
        # Of two ranges liked alike the one without a wildcard says more.
        rank = (_quality(parameters), -name.count("*"))
        if view is not None and rank[0] > 0 and (best is None or rank > best):
            best, chosen = rank, view
    if best is None:
        raise CallerError(
            f"no view of a stream is {accept!r}",
            code="not_acceptable",
            status=406,
            field="Accept",
            hint="one of " + ", ".join(view.value for view in View),
        )
    return chosen


def _quality(parameters: str) -> float:
    """The weight `q` of a media range; 0 where it is not a number."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
