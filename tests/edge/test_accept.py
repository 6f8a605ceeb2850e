import pytest

from edge.accept import View, choose_view
from ledger.errors import CallerError


@pytest.mark.parametrize(
    ("accept", "view"),
    [
        (None, View.JSON),
        ("", View.JSON),
        ("*/*", View.JSON),
        ("application/json", View.JSON),
        ("text/event-stream", View.SSE),
        ("TEXT/Event-Stream; charset=utf-8", View.SSE),
        ("application/vnd.tailrace.frames", View.FRAMES),
        ("application/octet-stream", View.FRAMES),
        ("application/json;q=0.5, text/event-stream", View.SSE),
        ("*/*, text/event-stream", View.SSE),
        ("text/html, application/json;q=0.1", View.JSON),
        ("text/event-stream;q=0, application/octet-stream;q=0.1", View.FRAMES),
    ],
)
def test_the_accept_header_chooses_the_view(accept: str | None, view: View) -> None:
    assert choose_view(accept) is view


@pytest.mark.parametrize(
    "accept", ["image/png", "application/json;q=0", "text/event-stream;q=x", "a" * 10_000]
)
def test_a_header_that_admits_no_view_is_not_acceptable(accept: str) -> None:
    with pytest.raises(CallerError) as caught:
        choose_view(accept)
    assert caught.value.status == 406
    assert "text/event-stream" in (caught.value.hint or "")
