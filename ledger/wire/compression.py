"""Sends frames in fewer bytes: runs of Tokens as one frame, and payloads compressed by zstd.

A server does this for a client whose Hello says that the client takes compression. `packed` is for
servers, `unpacked` for clients. PROTOCOL.md is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence

import zstandard

from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import (
    CORR_OFFSET,
    FLAG_ZSTD,
    HEADER_BYTES,
    LENGTH_BITS,
    MAX_FRAME_BYTES,
    MIN_LENGTH_BYTES,
    PREFIX_BYTES,
    TAG_OFFSET,
    VERSION_BITS,
    Token,
    TokenRun,
    decode,
    encode,
)

LEVEL = 3
"""Compression level of zstd."""
MIN_PAYLOAD_BYTES = 256
"""Minimum size of a payload to compress, in bytes: shorter ones hardly get smaller."""
MIN_RUN_TOKENS = 4
"""Minimum number of consecutive Tokens that are sent as a TokenRun."""
MAX_RUN_TOKENS = 8_192
"""Maximum number of Tokens in a TokenRun, so that one frame cannot become millions of Tokens."""
MAX_TOKEN_BYTES = 255
"""Maximum bytes of one Token's text in a TokenRun, which stores the length in one byte."""
FLAGS_BITS = LENGTH_BITS + 4  # number of bits below the flags in a header

_compressor = zstandard.ZstdCompressor(level=LEVEL)


# ---- the sender ----


def packed(frames: Sequence[bytes]) -> bytes:
    """Return the bytes to send for frames: runs of Tokens are joined, large payloads compressed.

    Each channel keeps the order of its frames. Frames of different channels may be reordered.
    """
    groups: list[list[bytes]] = []
    runs: dict[bytes, list[bytes]] = {}  # the run of each channel that may still grow
    for raw in frames:
        corr = raw[CORR_OFFSET:PREFIX_BYTES]
        if raw[TAG_OFFSET] != Token.tag:
            runs.pop(corr, None)
            groups.append([raw])
            continue
        run = runs.get(corr)
        if run is None or len(run) == MAX_RUN_TOKENS:
            run = runs[corr] = []
            groups.append(run)
        run.append(raw)
    return b"".join([each for group in groups for each in map(compressed, _joined(group))])


def _joined(group: list[bytes]) -> list[bytes]:
    """Return consecutive Tokens of one channel as one TokenRun, if their texts are short."""
    if len(group) < MIN_RUN_TOKENS:
        return group
    texts, first, corr = [], 0, 0
    for at, raw in enumerate(group):
        corr, token = decode(raw)
        assert isinstance(token, Token), token
        text = token.text.encode()
        first = first if at else token.index
        if len(text) > MAX_TOKEN_BYTES or token.index != first + at:
            return group
        texts.append(text)
    run = TokenRun(first, bytes(map(len, texts)), b"".join(texts).decode())
    return [encode(run, corr)]


def compressed(raw: bytes) -> bytes:
    """Return a frame with its payload compressed, or unchanged if that would not be shorter."""
    payload = raw[PREFIX_BYTES:]
    if len(payload) < MIN_PAYLOAD_BYTES:
        return raw
    made = _compressor.compress(payload)
    if len(made) >= len(payload):
        return raw
    return _header(len(made), FLAG_ZSTD) + raw[TAG_OFFSET:PREFIX_BYTES] + made


def _header(payload_bytes: int, flags: int = 0) -> bytes:
    header = flags << FLAGS_BITS | VERSION_BITS | MIN_LENGTH_BYTES + payload_bytes
    return header.to_bytes(HEADER_BYTES, "little")


# ---- the receiver ----


def unpacked(raw: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Decompress a received frame; return the Tokens of a TokenRun, or any other frame alone.

    `max_frame_bytes` limits the length of a frame before and after decompression.

    Raises:
        FrameError: The payload is not valid, or expands to more than the limit (`too_large`).
    """
    raw = decompressed(raw, max_frame_bytes)
    if raw[TAG_OFFSET] != TokenRun.tag:
        return [raw]
    corr, run = decode(raw)
    assert isinstance(run, TokenRun), run
    return _expanded(run, corr)


def _expanded(run: TokenRun, corr: int) -> list[bytes]:
    data = run.text.encode()
    if len(run.lengths) > MAX_RUN_TOKENS:
        raise _malformed(f"{len(run.lengths)} Tokens exceed the limit of {MAX_RUN_TOKENS}")
    if (total := sum(run.lengths)) != len(data):
        raise _malformed(f"the lengths add up to {total} bytes, but the text has {len(data)}")
    frames, at = [], 0
    for index, size in enumerate(run.lengths, run.first):
        try:
            text = data[at : at + size].decode()
        except UnicodeDecodeError:
            raise _malformed(f"the text of Token {index} is not valid UTF-8") from None
        frames.append(encode(Token(text, index), corr))
        at += size
    return frames


def _malformed(message: str) -> FrameError:
    return FrameError(message, field="TokenRun.lengths", offset=PREFIX_BYTES)


def decompressed(raw: bytes, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return a frame decompressed, or unchanged if it was not compressed.

    Raises:
        FrameError: The payload is not valid, or expands to more than the limit (`too_large`).
    """
    if not int.from_bytes(raw[:HEADER_BYTES], "little") >> FLAGS_BITS & FLAG_ZSTD:
        return raw
    packed_payload, limit = raw[PREFIX_BYTES:], max_frame_bytes - MIN_LENGTH_BYTES
    try:
        # The size in the header of the zstd frame is checked before anything is decompressed. zstd
        # itself refuses data that expands to another size.
        size = zstandard.get_frame_parameters(packed_payload).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise _bad_payload("the payload does not say its decompressed size")
        if size > limit:
            error = _bad_payload(f"the payload expands to {size} bytes, over the limit of {limit}")
            error.code, error.status = "too_large", 413
            raise error
        payload = zstandard.ZstdDecompressor().decompress(packed_payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise _bad_payload(f"the payload is not valid zstd: {error}") from None
    return _header(len(payload)) + raw[TAG_OFFSET:PREFIX_BYTES] + payload


def _bad_payload(message: str) -> FrameError:
    return FrameError(message, field="payload", offset=PREFIX_BYTES)
