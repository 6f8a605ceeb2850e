"""Pages of a stream, cut from its frames."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import CallerError
from tailrace.ledger.frame import (
    Chunk,
    FinishReason,
    Revision,
    ScoredToken,
    StreamEnd,
    Token,
    decode,
    encode,
    index_of,
)
from tailrace.origin.streams.chunks import CHUNK_BYTES, chunks, end, piece, renumbered
from tailrace.origin.streams.offsets import START, Offset
from tailrace.origin.streams.page import MAX_PAGE_BYTES, MAX_PAGE_FRAMES, Page, PageBuilder, Tip

messages_of = st.lists(
    st.binary(min_size=1, max_size=20) | st.integers(1, 3 * CHUNK_BYTES).map(bytes), max_size=8
)

sizes = st.lists(st.integers(1, 3 * CHUNK_BYTES), max_size=4)


def frames_of(messages: Sequence[bytes]) -> list[bytes]:
    return [record.frame for record in chunks(messages, 0)]


def read(frames: list[bytes], start: Offset, *, json: bool = False, closed: bool = False) -> Page:
    builder = PageBuilder(start, Tip(len(frames), closed), json=json)
    index = builder.first_index
    while not builder.full:
        wanted = frames[index : index + builder.wants]
        assert 0 < len(wanted) == builder.wants
        builder.feed(wanted)
        index += len(wanted)
    return builder.page()


def read_all(frames: list[bytes], *, json: bool = False) -> list[Page]:
    pages = [read(frames, START, json=json)]
    while not pages[-1].up_to_date:
        pages.append(read(frames, pages[-1].next, json=json))
    return pages


@given(messages_of, st.booleans())
def test_pages_hold_all_of_a_stream_once_and_in_order(messages: list[bytes], json: bool) -> None:
    pages = read_all(frames_of(messages), json=json)
    data = [part for page in pages for part in page.data]
    assert b"".join(data) == b"".join(messages)
    if json:
        assert data == messages


@given(messages_of.filter(bool), st.data())
def test_a_byte_stream_can_be_read_from_any_byte(
    messages: list[bytes], data: st.DataObject
) -> None:
    frames = frames_of(messages)
    sizes = [len(chunk) for chunk in read(frames, START).data]
    index = data.draw(st.integers(0, len(sizes) - 1))
    byte = data.draw(st.integers(0, sizes[index] - 1))
    page = read(frames, Offset(index, byte))
    assert b"".join(messages)[sum(sizes[:index]) + byte :].startswith(b"".join(page.data))


@given(messages_of.filter(bool), st.data())
def test_so_many_bytes_before_the_end_of_a_page_is_an_offset(
    messages: list[bytes], data: st.DataObject
) -> None:
    frames = frames_of(messages)
    whole = b"".join(messages)
    size = data.draw(st.integers(1, len(whole)))
    offset = read(frames, START).back(size)
    assert offset is not None
    assert b"".join(read(frames, offset).data) == whole[-size:]
    # And seen from a page that itself begins within a frame.
    again = read(frames, offset).back(size)
    assert again == offset and read(frames, offset).back(size + 1) is None


def test_a_page_of_a_closed_stream_is_closed_only_at_the_end() -> None:
    frames = frames_of([b"x"] * (MAX_PAGE_FRAMES + 1))
    first = read(frames, START, closed=True)
    assert (len(first.data), first.up_to_date, first.closed) == (MAX_PAGE_FRAMES, False, False)
    rest = read(frames, first.next, closed=True)
    assert (len(rest.data), rest.up_to_date, rest.closed) == (1, True, True)


def test_a_page_of_bytes_ends_with_the_frame_that_fills_it() -> None:
    page = read(frames_of([bytes(3 * MAX_PAGE_BYTES)]), START)
    assert sum(map(len, page.data)) == MAX_PAGE_BYTES and not page.up_to_date


def test_a_page_of_json_ends_with_the_value_that_fills_it() -> None:
    page = read(frames_of([bytes(3 * MAX_PAGE_BYTES), b"1"]), START, json=True)
    assert [len(value) for value in page.data] == [3 * MAX_PAGE_BYTES] and not page.up_to_date


def test_an_empty_page_at_the_end_stays_where_it_is() -> None:
    page = read(frames_of([b"x"]), Offset(1))
    assert (page.next, page.up_to_date, bool(page)) == (Offset(1), True, False)


@pytest.mark.parametrize("start", [Offset(2), Offset(10**15), Offset(1, 1), Offset(0, 3)])
def test_a_position_that_the_stream_has_not_is_refused(start: Offset) -> None:
    with pytest.raises(CallerError) as refused:
        read(frames_of([b"abc"]), start)
    assert (refused.value.status, refused.value.field) == (400, "offset")


def test_json_is_read_from_the_beginning_of_a_value_only() -> None:
    frames = frames_of([bytes(CHUNK_BYTES + 1), b"12"])
    assert read(frames, Offset(2), json=True).data == (b"12",)
    for within in (Offset(1), Offset(2, 1)):
        with pytest.raises(CallerError):
            read(frames, within, json=True)


@given(sizes, st.integers(0, 10**9))
def test_messages_are_found_again_in_their_chunks(sizes: list[int], first: int) -> None:
    messages = [bytes([at]) * size for at, size in enumerate(sizes)]
    records = chunks(messages, first)
    assert [index_of(record.frame) for record in records] == list(
        range(first, first + len(records))
    )
    found, parts = [], []
    for record in records:
        data, last = piece(record.frame)
        assert 0 < len(data) <= CHUNK_BYTES
        parts.append(data)
        if last:
            found.append(b"".join(parts))
            parts.clear()
    assert found == messages and not parts


def test_an_empty_append_has_no_frames() -> None:
    assert chunks([], 0) == []


def test_a_token_adds_its_text_and_other_frames_nothing() -> None:
    for token in (Token("né", 3), ScoredToken("né", (), 3)):
        assert piece(encode(token)) == ("né".encode(), True)
    for frame in (Revision(0, "x", True, 3), StreamEnd(1, FinishReason.STOP, 3, 0)):
        assert piece(encode(frame)) == (b"", True)


def test_a_frame_is_numbered_anew_and_else_the_same() -> None:
    assert decode(renumbered(encode(Chunk(b"x", False, 3)), 9)) == (0, Chunk(b"x", False, 9))
    _, ended = decode(renumbered(end(3).frame, 9))
    assert ended == StreamEnd(0, FinishReason.STOP, 9, 0)
