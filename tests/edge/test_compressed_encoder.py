"""Compressed responses without a server: what can be read when, and what a reader costs."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable

import pytest
import zstandard

from tailrace.edge import compressed_encoder
from tailrace.edge.compressed_encoder import (
    HEADER,
    LAST_BLOCK,
    MAX_BLOCK_BYTES,
    MAX_COMPRESSORS,
    MIN_REPLAY_FRAMES,
    PARAMETERS,
    WINDOW_LOG,
    CompressedEncoder,
)
from tailrace.edge.generate.encoders import Encoder, FrameEncoder, SseEncoder
from tailrace.edge.generate.json_lines import JsonLinesEncoder
from tailrace.edge.generate.snapshot_encoder import SnapshotEncoder
from tailrace.edge.sse import PING
from tailrace.ledger.frame import (
    Chunk,
    FinishReason,
    Opened,
    Status,
    StreamEnd,
    StreamState,
    Token,
    encode,
)
from tests.english import english_tokens

STREAM = bytes(16)
REPLAYED = 300
VIEWS: dict[str, Callable[[], Encoder]] = {
    "frames": FrameEncoder,
    "events": SseEncoder,
    "lines": lambda: JsonLinesEncoder("application/jsonl"),
    "snapshot": lambda: SnapshotEncoder(FrameEncoder()),
}


def opened(next_index: int, first: int = 0) -> Opened:
    return Opened(STREAM, next_index, "", "demo", 3, first=first)


def token(index: int) -> bytes:
    return encode(Token(f" w{index}", index))


def end(index: int) -> bytes:
    return encode(StreamEnd(index, FinishReason.STOP, index, 3))


class Reader:
    """A client that decompresses what it gets, and knows what it would have got otherwise."""

    def __init__(
        self, inner: Callable[[], Encoder], stream: Opened, *, always: bool = False
    ) -> None:
        self.encoder = CompressedEncoder(inner(), always=always)
        self.encoder.opened(stream)
        self._plain = inner()
        self._plain.opened(stream)
        self._object = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG).decompressobj()
        self.body, self.got, self.expected = b"", b"", b""

    def take(self, *frames: bytes) -> None:
        """Get the next write, and decompress it at once."""
        self.expected += self._plain.frames([*frames])
        self._read(self.encoder.frames([*frames]))

    def keepalive(self) -> None:
        self.expected += self._plain.keepalive()
        self._read(self.encoder.keepalive())

    def _read(self, data: bytes) -> None:
        self.body += data
        self.got += self._object.decompress(data) if data else b""

    @property
    def is_whole(self) -> bool:
        return self._object.eof and not self._object.unused_data


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "events"])
@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("size", [1, 7, 100, REPLAYED])
def test_every_write_can_be_decompressed_at_once(view: str, always: bool, size: int) -> None:
    reader = Reader(VIEWS[view], opened(REPLAYED), always=always)
    reader.take()
    for at in range(0, REPLAYED, size):
        reader.take(*map(token, range(at, min(at + size, REPLAYED))))
        assert reader.got == reader.expected
    for index in range(REPLAYED, REPLAYED + 20):
        reader.take(token(index))
        assert reader.got == reader.expected
        reader.keepalive()
        assert reader.got == reader.expected
        assert not reader.is_whole
    reader.take(token(REPLAYED + 20), end(REPLAYED + 21))
    assert reader.got == reader.expected
    assert reader.is_whole
    assert len(reader.body) < len(reader.got)


def test_events_are_compressed_and_their_keepalive_is_a_comment() -> None:
    encoder = CompressedEncoder(SseEncoder())
    encoder.opened(opened(REPLAYED))
    body = encoder.frames([]) + encoder.keepalive()
    body += encoder.frames([*map(token, range(REPLAYED)), end(REPLAYED)])
    text = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    retry, ping, *rest = text.removesuffix(b"\n\n").split(b"\n\n")
    assert retry.startswith(b"retry: ")
    assert ping + b"\n\n" == PING
    assert [event.split(b"\n")[0] for event in rest] == [
        b"id: %d" % index for index in range(REPLAYED + 1)
    ]


@pytest.mark.parametrize("exist", [0, MIN_REPLAY_FRAMES - 1, MIN_REPLAY_FRAMES])
@pytest.mark.parametrize("first", [0, 1_000])
def test_only_a_response_that_begins_with_many_frames_is_compressed(exist: int, first: int) -> None:
    encoder = CompressedEncoder(FrameEncoder())
    encoder.opened(opened(first + exist, first))
    is_compressed = exist == MIN_REPLAY_FRAMES
    assert encoder.headers == {"Vary": "Accept-Encoding"} | (
        {"Content-Encoding": "zstd"} if is_compressed else {}
    )
    frames = [token(first), token(first + 1)]
    assert (encoder.frames(frames) == b"".join(frames)) is not is_compressed
    assert (encoder.frames([end(first + 2)]) == end(first + 2)) is not is_compressed


def test_a_live_token_is_a_raw_block_and_needs_no_compressor() -> None:
    reader = Reader(FrameEncoder, opened(REPLAYED))
    reader.take(*map(token, range(REPLAYED)))
    gc.collect()
    assert len(compressed_encoder._in_use) == 1
    before = len(reader.body)
    reader.take(token(REPLAYED))
    assert reader.body[before:] == (len(token(REPLAYED)) << 3).to_bytes(3, "little") + token(
        REPLAYED
    )
    assert len(compressed_encoder._in_use) == 0


def test_a_reader_that_is_still_behind_after_the_replay_gets_compressed_writes() -> None:
    reader = Reader(FrameEncoder, opened(REPLAYED))
    reader.take(*map(token, range(REPLAYED)))
    before = len(reader.body)
    reader.take(*map(token, range(REPLAYED, REPLAYED + 200)))
    assert len(reader.body) - before < 200 * len(token(REPLAYED)) / 2
    reader.take(end(REPLAYED + 200))
    assert reader.got == reader.expected
    assert reader.is_whole


def test_large_pieces_without_a_compressor_are_several_blocks() -> None:
    reader = Reader(FrameEncoder, opened(0), always=True)
    frame = encode(Chunk(bytes(range(256)) * 1_000, False, 0))
    assert len(frame) > 3 * MAX_BLOCK_BYTES
    reader.take(frame)
    assert reader.got == frame
    reader.take(encode(Status(STREAM, StreamState.ENDED, 1)))
    assert reader.is_whole


def test_a_body_without_frames_that_exist_is_whole_too() -> None:
    for count in (0, REPLAYED):
        reader = Reader(FrameEncoder, opened(count), always=True)
        reader.take()
        assert reader.body == b""
        reader.take(encode(Status(STREAM, StreamState.ENDED, count)))
        assert reader.got == reader.expected
        assert reader.is_whole


def test_a_body_that_is_cut_is_not_whole() -> None:
    reader = Reader(FrameEncoder, opened(REPLAYED))
    reader.take(*map(token, range(REPLAYED)), end(REPLAYED))
    assert reader.is_whole
    assert reader.body.endswith(LAST_BLOCK)
    for cut in range(len(reader.body)):
        decompressor = zstandard.ZstdDecompressor().decompressobj()
        assert reader.got.startswith(decompressor.decompress(reader.body[:cut]))
        assert not decompressor.eof


def test_more_readers_than_compressors_get_uncompressed_responses() -> None:
    readers = [CompressedEncoder(FrameEncoder()) for _ in range(MAX_COMPRESSORS + 1)]
    for reader in readers:
        reader.opened(opened(REPLAYED))
    assert ["Content-Encoding" in each.headers for each in readers] == [
        *(True for _ in range(MAX_COMPRESSORS)),
        False,
    ]
    forced = Reader(FrameEncoder, opened(REPLAYED), always=True)
    forced.take(*map(token, range(REPLAYED)), end(REPLAYED))
    assert (forced.got, forced.is_whole) == (forced.expected, True)
    assert len(forced.body) > len(forced.got), "compressed without a compressor"
    del readers, reader
    again = CompressedEncoder(FrameEncoder())
    again.opened(opened(REPLAYED))
    assert "Content-Encoding" in again.headers


def test_a_stream_that_an_endpoint_has_opened_begins_with_what_it_read() -> None:
    encoder = CompressedEncoder(FrameEncoder())
    encoder.begin(opened(REPLAYED))
    body = encoder.blocks(b"begin") + encoder.frames([]) + encoder.frames([token(0), end(1)])
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    assert decompressor.decompress(body) == b"begin" + token(0) + end(1)
    assert decompressor.eof


def test_the_header_is_that_of_the_compressor() -> None:
    compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS).compressobj()
    assert compressor.compress(bytes(1 << 20)).startswith(HEADER)
    assert zstandard.get_frame_parameters(HEADER + LAST_BLOCK).window_size == 1 << WINDOW_LOG
    assert PARAMETERS.estimated_compression_context_size() <= 346 << 10


@pytest.mark.parametrize(
    ("view", "most"), [("frames", 4.6), ("events", 6.6), ("lines", 5.3), ("snapshot", 2.0)]
)
def test_what_a_replay_of_english_takes(view: str, most: float) -> None:
    """Writes of 8 KiB of frames, as a response makes them; sizes in bytes a token."""
    pieces = english_tokens(50_000)
    frames = [encode(Token(piece, index)) for index, piece in enumerate(pieces)]
    frames.append(end(50_000))
    encoder = CompressedEncoder(VIEWS[view]())
    encoder.opened(opened(50_001))
    body, batch = encoder.frames([]), list[bytes]()
    for raw in frames:
        batch.append(raw)
        if sum(map(len, batch)) > 8 << 10 or raw is frames[-1]:
            body, batch = body + encoder.frames(batch), []
    assert len(body) / 50_000 < most
    text = zstandard.ZstdDecompressor().decompressobj().decompress(body)
    if view == "lines":
        told = [json.loads(line) for line in text.splitlines()]
        assert "".join(line.get("text", "") for line in told) == "".join(pieces)
