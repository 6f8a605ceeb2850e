import base64
import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ledger.streams.message import chunks
from ledger.streams.offset import START, Offset
from ledger.streams.page import Page, PageBuilder, Tip
from ledger.streams.sse import (
    Base64Events,
    JsonEvents,
    TextEvents,
    control_event,
    data_event,
    events_of,
)


def page_of(messages: list[bytes], start: Offset = START, *, closed: bool = False) -> Page:
    frames = [record.frame for record in chunks(messages, 0)]
    builder = PageBuilder(start, Tip(len(frames), closed), json=False)
    builder.feed(frames[start.index :])
    return builder.page()


def parsed(events: bytes) -> list[tuple[str, str]]:
    """(type, data) of each event, as WHATWG HTML 9.2.6 has a browser read them."""
    found: list[tuple[str, str]] = []
    name, lines = "", list[str]()
    for line in events.decode().replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line and lines:
            found.append((name, "\n".join(lines)))
        if not line:
            name, lines = "", []
        elif field == "event":
            name = value
        elif field == "data":
            lines.append(value)
    return found


@given(st.text())
def test_a_data_event_is_one_event_whatever_is_in_it(text: str) -> None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    assert parsed(data_event(text)) == [("data", lines)]


def test_a_control_event_says_where_the_reader_is() -> None:
    event = control_event(Offset(3), 77, up_to_date=True, closed=False)
    ((name, data),) = parsed(event)
    assert name == "control"
    assert json.loads(data) == {
        "streamNextOffset": str(Offset(3)),
        "streamCursor": "77",
        "upToDate": True,
    }


def test_nobody_comes_back_to_a_closed_stream_with_a_cursor() -> None:
    event = control_event(Offset(3), 77, up_to_date=True, closed=True)
    assert "streamCursor" not in json.loads(parsed(event)[0][1])
    assert json.loads(parsed(event)[0][1])["streamClosed"] is True


def test_json_goes_as_one_array_and_bytes_as_base64() -> None:
    page = page_of([b'{"a":1}', b"2"])
    assert json.loads(JsonEvents().text(page)) == [{"a": 1}, 2]
    assert base64.b64decode(Base64Events().text(page)) == b'{"a":1}2'
    assert JsonEvents().text(page_of([])) == Base64Events().text(page_of([])) == ""


def test_the_content_type_chooses_the_encoding() -> None:
    kinds = {
        "application/json": JsonEvents,
        "text/plain": TextEvents,
        "image/png": Base64Events,
    }
    for content_type, kind in kinds.items():
        assert type(events_of(content_type)) is kind


@given(st.text(min_size=1), st.data())
def test_text_is_whole_however_it_was_cut(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)))) | {0, len(raw)})
    messages = [raw[a:b] for a, b in pairwise(cuts) if a < b]
    encoder, seen = TextEvents(), ""
    for count in range(1, len(messages) + 1):
        page = page_of(messages[:count], Offset(count - 1))
        seen += encoder.text(page)
        # Whoever comes back to the offset of this event reads on with the next character.
        rest = b"".join(page_of(messages, encoder.offset(page)).data)
        assert seen + rest.decode() == text
    assert seen == text


def test_a_character_that_never_ends_is_replaced_at_the_end() -> None:
    encoder = TextEvents()
    assert encoder.text(page_of([b"a\xc3"])) == "a"
    assert encoder.offset(page_of([b"a\xc3"])) == Offset(0, 1)
    assert encoder.text(page_of([b"a\xc3"], Offset(1), closed=True)) == "\ufffd"
