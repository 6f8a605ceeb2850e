"""Cuts a byte stream into whole raw frames without decoding their payloads."""

from __future__ import annotations

from collections.abc import Container

from ledger.codec import HEADER_BYTES, MAX_FRAME_BYTES, check_tag, length_of
from ledger.errors import FrameError


class FrameSplitter:
    """Fed bytes in any pieces, gives whole frames; holds at most one unfinished frame.

    Version, flags, length and tag are checked as soon as they arrive, before the payload
    is waited for. After a FrameError the stream has lost its place: every later feed
    raises the same error, and the connection is to be closed.
    """

    def __init__(self, tags: Container[int], max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._tags = tags
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._error: FrameError | None = None

    @property
    def pending(self) -> int:
        """Bytes of an unfinished frame held back."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The frames that `data` completes; FrameError at the first bad header."""
        if self._error is not None:
            raise self._error
        self._buffer += data
        try:
            frames, end = self._cut()
        except FrameError as error:
            self._error = error
            self._buffer.clear()
            raise
        del self._buffer[:end]
        return frames

    def _cut(self) -> tuple[list[bytes], int]:
        buffer = self._buffer
        frames: list[bytes] = []
        start, size = 0, len(buffer)
        while size - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = length_of(int.from_bytes(buffer[start:body], "little"), self._max_frame_bytes)
            if size > body:
                check_tag(buffer[body], self._tags)
            if size - body < length:
                break
            frames.append(bytes(buffer[start : body + length]))
            start = body + length
        return frames, start
