"""JSON messages of a WebSocket: each client frame and each server frame as one JSON object.

They are for people who debug with a WebSocket tool. `type` is the name of the frame, `corr` its
channel (0 if it is left out), and the other fields are those of the frame, with bytes in hex.
"""

from __future__ import annotations

import json
from typing import NoReturn

from tailrace.ledger.errors import CallerError, FrameError
from tailrace.ledger.frame import CLIENT, FRAMES, Frame, decode, encode
from tailrace.ledger.frame_json import frame_fields, from_fields
from tailrace.ledger.wire.bare import U32

MAX_CORR = (1 << 8 * U32.min_bytes) - 1
_TYPES = {cls.__name__: cls for tag, cls in FRAMES.items() if tag in CLIENT}


class MalformedMessage(CallerError, code="invalid_json"):
    """A message that is not one JSON object with a frame's type and channel."""


class MalformedFrame(CallerError, code="bad_frame"):
    """A JSON object that is not a valid frame of its type, on the channel `corr`."""

    def __init__(self, corr: int, error: CallerError) -> None:
        message = error.message
        # The offset refers to bytes of a binary frame, but this client has sent JSON.
        if isinstance(error, FrameError):
            message = message.removesuffix(f" at byte {error.offset}")
        super().__init__(message, field=error.field, hint=error.hint)
        self.corr = corr


def parse(message: str) -> tuple[int, Frame]:
    """Return the channel and the frame of a client's message.

    Raises:
        MalformedMessage: It is not JSON, not an object, or has no valid `type` and `corr`.
        MalformedFrame: A field of the frame is missing, unknown or invalid.
    """
    try:
        given = json.loads(message, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the message is not JSON: {error}", hint=_EXAMPLE) from None
    if not isinstance(given, dict):
        raise MalformedMessage("the message is not a JSON object", hint=_EXAMPLE)
    name, corr = given.pop("type", None), given.pop("corr", 0)
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise MalformedMessage(
            f"clients send no frames of type {name!r:.100}",
            field="type",
            hint="one of " + ", ".join(_TYPES),
        )
    if type(corr) is not int or not 0 <= corr <= MAX_CORR:
        raise MalformedMessage(
            f"{corr!r:.100} is not a channel number", field="corr", hint=f"send 0 to {MAX_CORR}"
        )
    try:
        frame = from_fields(cls, given, name)
        encode(frame, corr)  # Encoding checks the ranges of numbers and the lengths of lists.
    except CallerError as error:
        raise MalformedFrame(corr, error) from None
    return corr, frame


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's parser would accept."""
    raise ValueError(f"{constant} is not JSON")


_EXAMPLE = 'send one object, such as {"type": "Resume", "corr": 1, "stream": "…", "credit": 100}'


def message_of(raw: bytes) -> str:
    """Return the message for an encoded frame of the server."""
    corr, frame = decode(raw)
    fields = {"type": type(frame).__name__, "corr": corr, **frame_fields(frame)}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
