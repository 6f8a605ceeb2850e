"""Parameters of requests for streams: response format, position, stream id, idempotency key."""

import pytest

from tailrace.edge.generate.params import (
    View,
    check_idempotency_key,
    choose_view,
    parse_after,
    parse_stream_id,
)
from tailrace.ledger.errors import CallerError, NotFound

# Digits of other scripts, which int() would take.
FOREIGN_DIGITS = ["٤٢", "\uff14\uff12"]


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


def test_a_stream_id_is_32_lower_case_hex_digits() -> None:
    assert parse_stream_id("00ff" * 8) == b"\x00\xff" * 8


@pytest.mark.parametrize(
    "text",
    ["", "../x", "%2e%2e", "\0", "00FF" * 8, "00ff" * 8 + "0", "00ff" * 8 + "\n", "g" * 32],
)
def test_what_cannot_be_a_stream_id_is_answered_as_absent(text: str) -> None:
    with pytest.raises(NotFound):
        parse_stream_id(text)


@pytest.mark.parametrize(
    ("after", "last_event_id", "index"),
    [
        ([], None, None),
        (["0"], None, 0),
        ([], "41", 41),
        (["41"], "41", 41),
        ([], "", None),
        (["41"], "", 41),
        (["7", "7"], None, 7),
        ([str(2**64 - 1)], None, 2**64 - 1),
    ],
)
def test_the_index_to_resume_after_comes_from_query_or_header(
    after: list[str], last_event_id: str | None, index: int | None
) -> None:
    assert parse_after(after, last_event_id) == index


@pytest.mark.parametrize(
    "text",
    ["-1", "+1", "1.0", "1e30", "NaN", " 1", "1\n", "0x1", "1\0", str(2**64), *FOREIGN_DIGITS],
)
def test_rubbish_is_no_index_wherever_it_stands(text: str) -> None:
    with pytest.raises(CallerError) as in_query:
        parse_after([text], None)
    with pytest.raises(CallerError) as in_header:
        parse_after([], text)
    assert (in_query.value.status, in_query.value.field) == (400, "after")
    assert (in_header.value.status, in_header.value.field) == (400, "Last-Event-ID")


@pytest.mark.parametrize("key", ["a", "6f1c-42", "x" * 255])
def test_printable_ascii_is_an_idempotency_key(key: str) -> None:
    assert check_idempotency_key(key) == key


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "ключ"])
def test_anything_else_is_no_idempotency_key(key: str) -> None:
    with pytest.raises(CallerError) as caught:
        check_idempotency_key(key)
    assert caught.value.field == "Idempotency-Key"
