"""Cuts a byte stream into whole raw frames without decoding their payloads."""

from __future__ import annotations

import struct
from collections.abc import Container

from ledger.errors import FrameError
from ledger.wire.codec import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MIN_LENGTH_BYTES,
    VERSION_BITS,
    Raw,
    check_tag,
    length_of,
)

_HEADER = struct.Struct("<I")
_HEAD = struct.Struct("<IB")  # header and tag


class FrameSplitter:
    """Fed bytes in any pieces, gives whole frames; holds at most one unfinished frame.

    Version, flags, length and tag are checked as soon as they arrive, before the payload
    is waited for. After a FrameError the stream has lost its place: every later feed
    raises the same error, and the connection is to be closed.
    """

    def __init__(
        self,
        tags: Container[int],
        max_frame_bytes: int = MAX_FRAME_BYTES,
        known: Container[int] = (),
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        """May be raised; frames are held to what it is when they come."""
        self._tags = tags
        self._known = known  # what a tag may be that is not in `tags`: the other side's
        self._rest = bytearray()
        self._needed = HEADER_BYTES  # bytes of `_rest` before there is anything to look at
        self._error: FrameError | None = None

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame held back."""
        return len(self._rest)

    def feed(self, data: Raw) -> list[bytes]:
        """The frames that `data` completes; FrameError at the first bad header."""
        if self._error is not None:
            raise self._error
        if self._rest:
            # Collected in place, so that a large frame in small pieces is copied once.
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = self._rest
        try:
            frames, end = self._cut(bytes(data))
        except FrameError as error:
            self._error = error
            self._rest.clear()
            raise
        self._rest = bytearray(data[end:])
        return frames

    def feed_one(self, data: Raw) -> bytes | None:
        """The first frame of all, if `data` completes it, and no further one: what follows may be
        held to another limit. Then `feed` goes on, with what is left too."""
        self._rest += data
        if len(self._rest) <= HEADER_BYTES:
            return None
        (header,) = _HEADER.unpack_from(self._rest)
        frame_bytes = HEADER_BYTES + length_of(header, self.max_frame_bytes)
        check_tag(self._rest[HEADER_BYTES], self._tags, self._known)
        if len(self._rest) < frame_bytes:
            return None
        frame = bytes(self._rest[:frame_bytes])
        del self._rest[:frame_bytes]
        return frame

    def _cut(self, data: bytes) -> tuple[list[bytes], int]:
        """The whole frames in `data`, and where the unfinished one begins."""
        frames: list[bytes] = []
        start, size = 0, len(data)
        tags, most = self._tags, self.max_frame_bytes
        head_of, add = _HEAD.unpack_from, frames.append
        while size - start > HEADER_BYTES:
            header, tag = head_of(data, start)
            length = header - VERSION_BITS
            end = start + HEADER_BYTES + length
            if not (MIN_LENGTH_BYTES <= length <= most and tag in tags):  # flags, or faults
                end = start + HEADER_BYTES + length_of(header, most)
                check_tag(tag, tags, self._known)
            if end > size:
                self._needed = end - start
                return frames, start
            add(data[start:end])
            start = end
        self._needed = HEADER_BYTES
        if size - start == HEADER_BYTES:
            length_of(_HEADER.unpack_from(data, start)[0], most)
            self._needed = _HEAD.size
        return frames, start
