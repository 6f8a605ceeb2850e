from hypothesis import given
from hypothesis import strategies as st

from ledger.frame import (
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
from ledger.streams.message import CHUNK_BYTES, chunks, end, piece, renumbered

sizes = st.lists(st.integers(1, 3 * CHUNK_BYTES), max_size=4)


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
