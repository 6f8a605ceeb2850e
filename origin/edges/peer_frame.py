"""The frames that origins of one ledger exchange, which have a schema of their own.

The schema has some frames of ledger/wire/tailrace.bare, and `ObjectCall`. The schema hash in a
Hello tells whether the sender is an edge or another origin. An origin has to prove that it holds
the keys of the resume tokens, so only origins can send an `ObjectCall`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import dataclass_transform

from tailrace.ledger.frame import (
    MAX_LINK_FRAME_BYTES,
    Answer,
    Body,
    BodyEnd,
    Challenge,
    Credit,
    Detach,
    Frame,
    Header,
    Heartbeat,
    Hello,
    Proof,
    StreamError,
)
from tailrace.ledger.wire.bare import Uint
from tailrace.ledger.wire.bare_schema import schema_identity
from tailrace.ledger.wire.codec import Codec, F, framed

ASKING: dict[int, type[Frame]] = {
    cls.tag: cls for cls in (Hello, Challenge, Proof, Heartbeat, Credit, Detach)
}
"""Frames that the connecting origin sends, by tag."""


@dataclass_transform(frozen_default=True)
def asking(tag: int) -> Callable[[type[F]], type[F]]:
    """Return a decorator that registers a class as a frame that the connecting origin sends."""
    return framed(ASKING, tag)


@asking(48)
class ObjectCall(Frame):
    """A request to an object that the other origin runs; it is answered like a Call.

    The request comes from a client or, if `operation` is set, from another object. The frame does
    not name the caller, because the sending origin has already checked the caller's rights.
    """

    object: str
    name: str
    operation: str | None
    method: str
    url: str
    headers: tuple[Header, ...]
    body: bytes
    credit: Uint
    credit_bytes: Uint | None = None


ANSWERING: dict[int, type[Frame]] = {
    cls.tag: cls for cls in (Hello, Challenge, Proof, Heartbeat, Answer, Body, BodyEnd, StreamError)
}
"""Frames that the origin at the other end sends, by tag."""
PEER_SCHEMA_HASH = schema_identity(ASKING | ANSWERING)
PEER_CODEC: Codec[Frame] = Codec(ASKING | ANSWERING, MAX_LINK_FRAME_BYTES)
