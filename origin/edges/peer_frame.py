"""The frames that origins of one ledger exchange, which have a schema of their own.

They are some of those of ledger/wire/tailrace.bare. The schema that a Hello names says which role
its sender asks for: that of an edge, or that of another origin, which has to prove that it holds
the keys of the resume tokens. So no edge, and nobody else, can call objects as an origin does.
"""

from __future__ import annotations

from tailrace.ledger.frame import (
    Answer,
    Body,
    BodyEnd,
    Call,
    Challenge,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Proof,
    StreamError,
)
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text

ASKING: dict[int, type[Frame]] = {
    cls.tag: cls for cls in (Hello, Challenge, Proof, Heartbeat, Call, Credit, Detach)
}
"""The frames of the origin that connects, by tag."""
ANSWERING: dict[int, type[Frame]] = {
    cls.tag: cls for cls in (Hello, Challenge, Proof, Heartbeat, Answer, Body, BodyEnd, StreamError)
}
"""The frames of the other one."""
SCHEMA_TEXT = schema_text(ASKING | ANSWERING, {})
PEER_SCHEMA_HASH = schema_identity(SCHEMA_TEXT)
