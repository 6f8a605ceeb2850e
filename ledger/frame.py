"""Frames of the client schema: encode, decode, split, and errors as frames.

Uses the standard library only. Edges and clients import everything for the protocol from here.
"""

from __future__ import annotations

# ruff: noqa: F403, F405  (this module exports all names of the schema)
import struct
from collections.abc import Container

from tailrace.ledger import errors
from tailrace.ledger.errors import CallerError, FrameError, TailraceError
from tailrace.ledger.wire.bare import SCHEMA_ID_BYTES
from tailrace.ledger.wire.codec import *
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.ledger.wire.schema import *

CODEC: Codec[Frame] = Codec(FRAMES)
FRAMES_TYPE = "application/vnd.tailrace.frames"
"""Media type of an HTTP body that consists of frames."""

# A Call has the whole body of a request, so a frame on a link may be as long as the header's length
# field allows.
MAX_LINK_FRAME_BYTES = LENGTH_MASK
MAX_CALL_HEAD_BYTES = 128 << 10
"""Maximum bytes of a Call without its body: twice the 64 KiB of headers that servers accept."""
MAX_CALL_BODY_BYTES = MAX_LINK_FRAME_BYTES - MAX_CALL_HEAD_BYTES

LINK_CODEC: Codec[Frame] = Codec(FRAMES, MAX_LINK_FRAME_BYTES)


# ---- encode and decode ----

# Nearly all frames are Tokens. Those with a short text and a small index are encoded and decoded
# here in a few C calls. Everything else, also every error, goes to the table-driven codec.

_SHORT = struct.Struct("<IBIB")  # the header, the tag, the corr and the length of the text
_SHORT_BYTES = _SHORT.size
_pack_short, _unpack_short = _SHORT.pack, _SHORT.unpack_from
_HEADER_LESS_SIZE = VERSION_BITS - HEADER_BYTES  # the header as a number, less the frame's size
_SHORT_TEXT_BYTES = 1 << 7  # the length of a shorter text is encoded in one byte
_SMALL_INDEX = 1 << 14  # a smaller index is encoded in at most two bytes
_UVARINT = tuple(
    bytes((n,)) if n < 1 << 7 else bytes((n & 0x7F | 0x80, n >> 7)) for n in range(_SMALL_INDEX)
)
SMALL_INDEXES = {raw: n for n, raw in enumerate(_UVARINT)}
"""Maps the varint of each small index to the index."""

# Fields are set by the slots' setters: __init__ of a frozen dataclass takes twice as long.
_new_token = Token.__new__
_set_text = vars(Token)["text"].__set__
_set_index = vars(Token)["index"].__set__


def encode(frame: Frame, corr: int = 0) -> bytes:
    """Encode a frame on channel `corr`.

    Raises:
        FrameError: A value does not fit its type.
    """
    if type(frame) is Token:
        try:
            text, index = frame.text.encode(), frame.index
            size = len(text)
            if size < _SHORT_TEXT_BYTES and 0 <= index < _SMALL_INDEX:
                tail = text + _UVARINT[index]
                header = _HEADER_LESS_SIZE + _SHORT_BYTES + len(tail)
                return _pack_short(header, 0, corr, size) + tail
        except (AttributeError, TypeError, ValueError, struct.error):
            pass  # a value does not fit its type: CODEC.encode raises an error that names the field
    return CODEC.encode(frame, corr)


def decode(raw: Raw) -> tuple[int, Frame]:
    """Decode exactly one whole frame into its channel and its value.

    Raises:
        FrameError: The frame is malformed. No other error is raised.
    """
    try:
        header, tag, corr, size = _unpack_short(raw)
        if tag == 0 and size < _SHORT_TEXT_BYTES and header - len(raw) == _HEADER_LESS_SIZE:
            end = _SHORT_BYTES + size
            token = _new_token(Token)
            _set_text(token, raw[_SHORT_BYTES:end].decode())  # type: ignore[union-attr]
            # If the bytes after the text are not the varint of a small index, this is a KeyError.
            _set_index(token, SMALL_INDEXES[raw[end:]])  # type: ignore[index]
            return corr, token
    except (AttributeError, KeyError, TypeError, ValueError, struct.error):
        pass  # another kind of frame, or a malformed one: CODEC.decode handles both
    return CODEC.decode(raw)


def hello_schema(raw: Raw) -> bytes | None:
    """Return the schema that an encoded Hello begins with; None for any other frame.

    The Hello of another release may have other fields after the schema, and so fail to decode.
    """
    end = PREFIX_BYTES + SCHEMA_ID_BYTES
    return bytes(raw[PREFIX_BYTES:end]) if tag_of(raw) == Hello.tag and len(raw) >= end else None


def index_of(raw: Raw) -> int:
    """Return the index of an encoded logged frame."""
    _, frame = decode(raw)
    if isinstance(frame, Logged):
        return frame.index
    raise FrameError(f"{type(frame).__name__} has no index", field="tag", offset=HEADER_BYTES)


class Splitter(FrameSplitter):
    """Splits a connection's bytes into encoded frames of this schema.

    `tags` are the allowed tags, such as CLIENT on the server's side.
    """

    def __init__(
        self, max_frame_bytes: int = MAX_FRAME_BYTES, tags: Container[int] = frozenset(FRAMES)
    ) -> None:
        super().__init__(tags, max_frame_bytes, FRAMES)


def split(
    data: Raw, tags: Container[int] = frozenset(FRAMES), max_frame_bytes: int = MAX_FRAME_BYTES
) -> list[bytes]:
    """Split a WebSocket message, which must end with a whole frame, into encoded frames."""
    splitter = Splitter(max_frame_bytes, tags)
    frames = splitter.feed(data)
    if splitter.pending:
        raise bad_length("the message ends inside a frame")
    return frames


# ---- errors as frames ----

MAX_ERROR_TEXT = 1000  # maximum characters of each text of an error, so that it fits a frame

_CLASSES = [
    cls
    for cls in vars(errors).values()
    # Not FrameError: it needs the offset of the fault in bytes that this process has received. A
    # peer that reports `bad_frame` refuses bytes that this process has sent. `to_error` chooses the
    # class of such an error by its status.
    if isinstance(cls, type) and issubclass(cls, TailraceError) and cls is not FrameError
]
_BY_CODE = {cls.code: cls for cls in _CLASSES if "code" in vars(cls)}
_BY_STATUS = {cls.status: cls for cls in _CLASSES if "status" in vars(cls)}


def error_frame(exc: TailraceError) -> StreamError:
    """Return a frame that reports `exc`, with long texts cut so that the frame can be encoded."""
    return StreamError(
        code=_sendable(exc.code),
        message=_sendable(exc.message),
        retryable=exc.retryable,
        status=exc.status,
        field=None if exc.field is None else _sendable(exc.field),
        hint=None if exc.hint is None else _sendable(exc.hint),
        retry_after_ms=exc.draw_retry_ms(),
    )


def to_error(frame: StreamError) -> TailraceError:
    """Return the error that a peer reported, as an instance of the class for its code or status."""
    cls = _BY_CODE.get(frame.code) or _BY_STATUS.get(frame.status)
    if cls is None:
        cls = CallerError if 400 <= frame.status < 500 else TailraceError
    return cls(
        frame.message,
        code=frame.code,
        status=frame.status,
        retryable=frame.retryable,
        field=frame.field,
        hint=frame.hint,
        retry_after_ms=frame.retry_after_ms,
    )


def _sendable(text: str) -> str:
    """Cut a text and replace lone surrogates: JSON escapes can contain them, UTF-8 cannot."""
    return text[:MAX_ERROR_TEXT].encode(errors="replace").decode()
