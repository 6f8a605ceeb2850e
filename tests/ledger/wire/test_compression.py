"""Frames in fewer bytes: what a server packs, and what a client accepts."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import (
    FLAG_ZSTD,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    Chunk,
    FinishReason,
    Frame,
    Heartbeat,
    Notice,
    Snapshot,
    StreamEnd,
    Token,
    TokenRun,
    corr_of,
    decode,
    encode,
    split,
    tag_of,
)
from tailrace.ledger.wire.compression import (
    MAX_RUN_TOKENS,
    MIN_PAYLOAD_BYTES,
    MIN_RUN_TOKENS,
    compressed,
    packed,
    unpacked,
)
from tests.english import english_tokens

STEADY_BYTES = 4 << 10
"""Size of the frames that an edge has for one message while it replays."""


def received(data: bytes) -> list[bytes]:
    """Return the frames that a client reads from a message."""
    return [frame for raw in split(data) for frame in unpacked(raw)]


def is_compressed(raw: bytes) -> bool:
    return bool(int.from_bytes(raw[:HEADER_BYTES], "little") >> 28 & FLAG_ZSTD)


def flagged(tag: int, payload: bytes) -> bytes:
    """Return a frame on channel 7 whose payload counts as compressed."""
    header = (len(payload) + 5) | 1 << 24 | FLAG_ZSTD << 28
    return header.to_bytes(4, "little") + bytes((tag, 7, 0, 0, 0)) + payload


FRAMES = st.one_of(
    st.builds(Token, st.text(max_size=300), st.just(0)),
    st.builds(Token, st.sampled_from(["", " the", "é", "€", "\0"]), st.just(0)),
    st.builds(Notice, st.just("x"), st.text(max_size=9), st.just(0)),
    st.builds(Heartbeat, st.integers(0, 9), st.booleans()),
    st.builds(Snapshot, st.just(0), st.text(max_size=600), st.just(0)),
)


@given(st.lists(st.tuples(st.integers(1, 3), FRAMES), max_size=60), st.integers(0, 20_000))
def test_each_channel_gets_its_frames_in_order(
    given_frames: list[tuple[int, Frame]], start: int
) -> None:
    indexes = {corr: itertools.count(start) for corr in (1, 2, 3)}
    frames = [
        encode(Token(frame.text, next(indexes[corr])) if isinstance(frame, Token) else frame, corr)
        for corr, frame in given_frames
    ]
    got = received(packed(frames))
    for corr in (1, 2, 3):
        assert [raw for raw in got if corr_of(raw) == corr] == [
            raw for raw in frames if corr_of(raw) == corr
        ]


def test_tokens_in_a_row_are_one_frame_and_others_are_not() -> None:
    tokens = [encode(Token(f" w{n}", n), 7) for n in range(200)]
    [run] = split(packed(tokens))
    assert tag_of(run) == TokenRun.tag
    assert is_compressed(run)
    few = tokens[: MIN_RUN_TOKENS - 1]
    assert packed(few) == b"".join(few)
    gap = [*tokens[:5], *tokens[6:11]]
    assert packed(gap) == b"".join(gap), "indexes that do not follow each other"
    long = [encode(Token("x" * 256, n), 7) for n in range(9)]
    assert all(tag_of(raw) == Token.tag for raw in split(packed(long)))


def test_a_run_has_a_maximum_length() -> None:
    tokens = [encode(Token("a", n), 7) for n in range(MAX_RUN_TOKENS + 9)]
    first, second = [decode(unflagged)[1] for unflagged in map(plain, split(packed(tokens)))]
    assert isinstance(first, TokenRun)
    assert isinstance(second, TokenRun)
    assert (len(first.lengths), len(second.lengths)) == (MAX_RUN_TOKENS, 9)


def plain(raw: bytes) -> bytes:
    """Return a frame with its payload decompressed by zstd itself."""
    if not is_compressed(raw):
        return raw
    payload = zstandard.ZstdDecompressor().decompress(raw[PREFIX_BYTES:])
    return (len(payload) + 5 | 1 << 24).to_bytes(4, "little") + raw[4:PREFIX_BYTES] + payload


def test_a_payload_is_compressed_if_it_is_large_and_gets_smaller() -> None:
    large = encode(Snapshot(0, "the river ran " * 99, 9), 7)
    small = encode(Snapshot(0, "a" * (MIN_PAYLOAD_BYTES - 6), 9), 7)
    dense = encode(Chunk(Random(1).randbytes(1_000), False, 0), 7)
    assert is_compressed(compressed(large))
    assert len(compressed(large)) < len(large) / 4
    assert compressed(small) == small
    assert unpacked(compressed(large)) == [large] == unpacked(large)
    assert compressed(dense) == dense


def test_a_replay_of_english_takes_less_than_four_bytes_a_token() -> None:
    pieces = english_tokens(50_000)
    frames = [encode(Token(piece, index), 7) for index, piece in enumerate(pieces)]
    frames.append(encode(StreamEnd(50_000, FinishReason.LENGTH, 50_000, 3), 7))
    size, got, batch = 0, list[bytes](), list[bytes]()
    for raw in frames:
        batch.append(raw)
        if sum(map(len, batch)) > STEADY_BYTES or raw is frames[-1]:
            message = packed(batch)
            size, batch = size + len(message), []
            got += received(message)
    assert got == frames
    assert sum(map(len, frames)) / 50_000 > 15
    assert size / 50_000 < 4
    snapshot = compressed(encode(Snapshot(0, "".join(pieces), 49_999), 7))
    assert len(snapshot) / 50_000 < 2


# ---- what a client refuses ----


def refusal(raw: bytes, most: int = MAX_FRAME_BYTES) -> FrameError:
    with pytest.raises(FrameError) as refused:
        unpacked(raw, most)
    return refused.value


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES, 100 << 20])
def test_a_decompression_bomb_is_refused_by_name_before_it_expands(size: int) -> None:
    bomb = flagged(Snapshot.tag, zstandard.compress(bytes(size)))
    assert len(bomb) < 20_000
    error = refusal(bomb)
    assert (error.code, error.status, error.field) == ("too_large", 413, "payload")
    assert f"expands to {size} bytes" in error.message
    assert str(MAX_FRAME_BYTES - 5) in error.message


def test_the_limit_of_a_frame_holds_after_decompression() -> None:
    raw = encode(Snapshot(0, "a" * 3_000, 9), 7)
    assert unpacked(compressed(raw), len(raw) - HEADER_BYTES) == [raw]
    assert refusal(compressed(raw), len(raw) - HEADER_BYTES - 1).code == "too_large"


def test_a_bomb_that_lies_about_its_size_is_refused() -> None:
    honest = zstandard.compress(bytes(60_000))
    at = honest.index((60_000 - 256).to_bytes(2, "little"))  # RFC 8878, 3.1.1.1.4
    lying = honest[:at] + (1_000 - 256).to_bytes(2, "little") + honest[at + 2 :]
    assert zstandard.get_frame_parameters(lying).content_size == 1_000
    error = refusal(flagged(Snapshot.tag, lying))
    assert (error.code, error.field) == ("bad_frame", "payload")


def test_payloads_that_are_no_zstd_are_refused() -> None:
    whole = zstandard.compress(b"the river ran " * 99)
    trained = zstandard.train_dictionary(
        1_024, [b"the river %d ran down to mill %d" % (n, n * n) for n in range(500)]
    )
    with_dictionary = zstandard.ZstdCompressor(dict_data=trained).compress(b"the river ran" * 9)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"the river ran" * 9)
    for payload in (b"", b"x" * 99, whole[:-3], whole + b"x", with_dictionary, unsized):
        error = refusal(flagged(Snapshot.tag, payload))
        assert (error.code, error.field, error.offset) == ("bad_frame", "payload", PREFIX_BYTES)


@given(st.binary(max_size=60), st.integers(0, 255))
def test_any_payload_is_frames_or_a_frame_error(payload: bytes, tag: int) -> None:
    for raw in (flagged(tag, payload), flagged(tag, zstandard.compress(payload))):
        try:
            for frame in unpacked(raw):
                decode(frame)
        except FrameError:
            pass


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (TokenRun(0, b"\x02", "abc"), "add up to 2 bytes, but the text has 3"),
        (TokenRun(0, b"\x01\x01", "é"), "the text of Token 0 is not valid UTF-8"),
        (TokenRun(0, bytes(MAX_RUN_TOKENS + 1), ""), f"limit of {MAX_RUN_TOKENS}"),
    ],
)
def test_a_run_that_does_not_fit_together_is_refused(run: TokenRun, says: str) -> None:
    error = refusal(encode(run, 7))
    assert error.field == "TokenRun.lengths"
    assert says in error.message


def test_an_index_beyond_64_bits_is_refused() -> None:
    assert refusal(encode(TokenRun(2**64 - 1, b"\x01\x01", "ab"), 7)).code == "bad_frame"
