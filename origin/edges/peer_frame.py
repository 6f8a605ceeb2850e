"""The frames that origins of one ledger exchange, which have a schema of their own.

They are some of those of ledger/wire/tailrace.bare, and `ObjectCall`. The schema that a Hello names
says which role its sender asks for: that of an edge, or that of another origin, which has to prove
that it holds the keys of the resume tokens. So no edge, and nobody else, can call objects as an
origin does.
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
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text
from tailrace.ledger.wire.codec import Codec, F, framed

ASKING: dict[int, type[Frame]] = {
    cls.tag: cls for cls in (Hello, Challenge, Proof, Heartbeat, Credit, Detach)
}
"""The frames of the origin that connects, by tag."""


@dataclass_transform(frozen_default=True)
def asking(tag: int) -> Callable[[type[F]], type[F]]:
    """Make a class a frame of the origin that connects."""
    return framed(ASKING, tag)


@asking(48)
class ObjectCall(Frame):
    """A Call to an object of the other origin, of a client or, with an `operation`, of an object.

    It is answered as a Call. It has no caller: the origin that sends it has checked its rights.
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
"""The frames of the other one."""
SCHEMA_TEXT = schema_text(ASKING | ANSWERING, {})
PEER_SCHEMA_HASH = schema_identity(SCHEMA_TEXT)
PEER_CODEC: Codec[Frame] = Codec(ASKING | ANSWERING, MAX_LINK_FRAME_BYTES)
