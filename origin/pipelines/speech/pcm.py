"""Reads 16 kHz mono 16-bit little-endian PCM, with or without a WAV header, from pieces of bytes.

Input in another format is refused by its name. Compressed sound would otherwise be taken for noise.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from tailrace.ledger.errors import CallerError

SAMPLE_RATE = 16_000
"""Sample rate of the sound, in samples per second."""
SAMPLE_BYTES = 2
"""Size of a sample, in bytes."""
BYTES_PER_MS = SAMPLE_RATE * SAMPLE_BYTES // 1000
"""Size of a millisecond of sound, in bytes."""
MAX_HEADER_BYTES = 64 << 10
"""Maximum size of the header of a WAV file, in bytes."""

HINT = "send 16-bit little-endian PCM of one channel at 16,000 Hz, or a WAV file with it"
_MAGIC_BYTES = 8
_COMPRESSED: Mapping[bytes, str] = {
    b"OggS": "Ogg",
    b"\x1a\x45\xdf\xa3": "WebM",
    b"fLaC": "FLAC",
    b"ID3\x03": "MP3",
    b"ID3\x04": "MP3",
    b"FORM": "AIFF",
    b"RIFX": "big-endian WAV",
}
"""The first bytes of other formats, which 16-bit PCM does not begin with in practice."""
_PCM = 1
_EXTENSIBLE = 0xFFFE
_UNKNOWN_SIZE = 0xFFFFFFFF
"""The size of the samples in the header of a WAV file that was written while it was recorded."""


class PcmReader:
    """Takes the bytes of a stream in any pieces and returns its whole samples."""

    def __init__(self) -> None:
        """Begin before the first byte."""
        self._head: bytes | None = b""  # bytes before the first sample; None behind the header
        self._rest = b""  # the first byte of a sample whose second byte is not here yet
        self._left: int | None = None  # bytes until the end of a WAV file's samples, if known

    @property
    def is_cut(self) -> bool:
        """True if the bytes so far end inside a sample or inside the header of a WAV file."""
        return bool(self._rest) or bool(self._head and self._head[:4] == b"RIFF")

    def feed(self, data: bytes) -> bytes:
        """Return the samples that `data` completes.

        Raises:
            CallerError: The bytes are in another format.
        """
        if self._head is not None:
            self._head += data
            samples = self._after_head(self._head)
            if samples is None:
                return b""
            self._head, data = None, samples
        return self._whole(data)

    def finish(self) -> bytes:
        """Return the last samples, if the input was too short to tell its format."""
        if self._head is None or self._head.startswith(b"RIFF"):
            return b""
        head, self._head = self._head, None
        return self._whole(head)

    def _whole(self, data: bytes) -> bytes:
        if self._left is not None:
            data = data[: self._left]  # lists of names and the like follow the samples
            self._left -= len(data)
        data = self._rest + data
        whole = len(data) - len(data) % SAMPLE_BYTES
        self._rest = data[whole:]
        return data[:whole]

    def _after_head(self, head: bytes) -> bytes | None:
        """Return what follows the header, if there is one; None if more bytes are needed."""
        if len(head) < _MAGIC_BYTES:
            return None
        if head[4:8] == b"ftyp":
            raise _refused("MP4")
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise _refused(name)
        return self._after_wav_header(head) if head.startswith(b"RIFF") else head

    def _after_wav_header(self, head: bytes) -> bytes | None:
        if len(head) < 12:
            return None
        if head[8:12] != b"WAVE":
            raise _refused("RIFF without WAVE")
        at, is_checked = 12, False
        while len(head) >= at + 8:
            kind, size = struct.unpack_from("<4sI", head, at)
            at += 8
            if kind == b"data":
                if not is_checked:
                    raise CallerError("the WAV file does not say its format", hint=HINT)
                self._left = None if size in {0, _UNKNOWN_SIZE} else size
                return head[at:]
            if at + size > MAX_HEADER_BYTES:
                message = f"the header of the WAV file has more than {MAX_HEADER_BYTES} bytes"
                raise CallerError(message, hint=HINT)
            if kind == b"fmt " and len(head) >= at + size:
                _check_format(head[at : at + size])
                is_checked = True
            at += size + size % 2
        return None


def _refused(name: str) -> CallerError:
    return CallerError(f"the input is {name}, which is not served", hint=HINT)


def _check_format(chunk: bytes) -> None:
    """Check the chunk `fmt ` of a WAV file."""
    if len(chunk) < 16:
        raise CallerError("the format of the WAV file is cut off", hint=HINT)
    form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if form == _EXTENSIBLE and len(chunk) >= 26:
        (form,) = struct.unpack_from("<H", chunk, 24)
    faults = [
        form != _PCM and f"the encoding {form}, not PCM (1)",
        channels != 1 and f"{channels} channels, not 1",
        rate != SAMPLE_RATE and f"{rate} Hz, not {SAMPLE_RATE}",
        bits != 8 * SAMPLE_BYTES and f"{bits} bits per sample, not {8 * SAMPLE_BYTES}",
    ]
    if found := ", ".join(fault for fault in faults if fault):
        raise CallerError(f"the WAV file has {found}", hint=HINT)
