"""The encoder of responses of any view that are compressed by zstd (RFC 8878).

The body is one zstd frame, flushed after each write, so that no event waits for a later one. Events
that exist already are compressed together. A new event has only a few bytes, which zstd cannot make
smaller, so new events are sent as raw blocks, with 3 bytes more for each write. So only a response
that still sends older events needs a compressor and its memory.
"""

from __future__ import annotations

from weakref import WeakSet

import zstandard

from tailrace.edge.generate.encoders import Encoder, WrappedEncoder
from tailrace.ledger.frame import CLOSING, LOGGED, TAG_OFFSET, Opened, index_of

MIN_REPLAY_FRAMES = 64
"""Minimum number of existing frames for which a response is compressed: about 1 KiB of events."""
MIN_COMPRESSED_BYTES = 512
"""Minimum size of a write to be compressed once the client has caught up, in bytes. The first
smaller write ends the use of the compressor."""
MAX_COMPRESSORS = 64
"""Maximum number of compressors of one edge process, each of which uses 345 KiB of memory. Further
responses are sent uncompressed."""
WINDOW_LOG = 16
"""Base-2 logarithm of zstd's window size, 64 KiB. A client needs this much memory to decompress."""
PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    6, window_log=WINDOW_LOG, chain_log=14, hash_log=14
)
MAX_BLOCK_BYTES = 1 << WINDOW_LOG
# The header of a zstd frame with this window, and without sizes, checksum and dictionary
# (RFC 8878, 3.1.1): the magic number, the descriptor of the header, and that of the window.
HEADER = b"\x28\xb5\x2f\xfd" + bytes((0, (WINDOW_LOG - 10) << 3))
LAST_BLOCK = b"\x01\x00\x00"
"""An empty raw block that ends a zstd frame."""
HEADERS = {"Content-Encoding": "zstd"}
VARY = {"Vary": "Accept-Encoding"}


class _Compressor:
    """The compressor of one response."""

    __slots__ = ("__weakref__", "_object")

    def __init__(self) -> None:
        self._object = zstandard.ZstdCompressor(compression_params=PARAMETERS).compressobj()

    def compress(self, data: bytes) -> bytes:
        """Return the next blocks, which have all of `data`."""
        flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK
        return self._object.compress(data) + self._object.flush(flush)


_in_use: WeakSet[_Compressor] = WeakSet()


class CompressedEncoder(WrappedEncoder):
    """Compresses what `inner` encodes, if the stream has enough frames already."""

    __slots__ = ("_compressor", "_end", "_header", "_is_caught_up", "_is_used", "headers")

    def __init__(self, inner: Encoder, *, always: bool = False) -> None:
        """Compress also a stream with few frames if `always` is True."""
        super().__init__(inner)
        self.headers = VARY
        self._is_used = always
        self._compressor: _Compressor | None = None
        self._header = HEADER  # the zstd header; empty once it was sent
        self._end = 0  # the index after the frames that existed at `opened`
        self._is_caught_up = True

    def opened(self, opened: Opened) -> None:
        """Decide if the response is compressed, from the number of frames that exist already."""
        super().opened(opened)
        self.begin(opened)

    def begin(self, opened: Opened) -> None:
        """Decide if the response is compressed, without a call of the inner encoder's `opened`."""
        self._end = opened.next_index
        if opened.next_index - opened.first >= MIN_REPLAY_FRAMES and len(_in_use) < MAX_COMPRESSORS:
            self._is_used, self._is_caught_up = True, False
            self._compressor = _Compressor()
            _in_use.add(self._compressor)
        if self._is_used:
            self.headers = {**VARY, **HEADERS}

    def frames(self, frames: list[bytes]) -> bytes:
        """Return the encoded, compressed frames; a frame that closes the stream ends the body."""
        data = self.blocks(self._inner.frames(frames))
        if not self._is_used or not frames:
            return data
        tag = frames[-1][TAG_OFFSET]
        if tag in CLOSING:
            return data + self._take_header() + LAST_BLOCK
        if not self._is_caught_up and tag in LOGGED:
            self._is_caught_up = index_of(frames[-1]) + 1 >= self._end
        return data

    def release(self) -> bytes:
        """Return the text that the inner encoder holds back, as blocks."""
        return self.blocks(super().release())

    def keepalive(self) -> bytes:
        """Return the keepalive of the inner encoder, as a block."""
        return self.blocks(super().keepalive())

    def blocks(self, data: bytes) -> bytes:
        """Return whole zstd blocks with this data, so that a client can decompress it at once."""
        if not self._is_used or not data:
            return data
        if self._compressor is not None:
            if not self._is_caught_up or len(data) >= MIN_COMPRESSED_BYTES:
                self._header = b""  # the compressor writes this header itself
                return self._compressor.compress(data)
            self._compressor = None
        pieces = [data[at : at + MAX_BLOCK_BYTES] for at in range(0, len(data), MAX_BLOCK_BYTES)]
        return self._take_header() + b"".join([_raw_block(piece) for piece in pieces])

    def _take_header(self) -> bytes:
        header, self._header = self._header, b""
        return header


def _raw_block(data: bytes) -> bytes:
    """Return a block with uncompressed data (RFC 8878, 3.1.1.2)."""
    return (len(data) << 3).to_bytes(3, "little") + data
