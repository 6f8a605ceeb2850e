"""The frames that belong to a link itself, and not to a stream: greeting, proofs and heartbeats.

Sans-I/O: encoded frames in, encoded answers out.
"""

from __future__ import annotations

from enum import Enum

from tailrace.ledger.errors import FrameError, SchemaMismatch
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Challenge,
    Heartbeat,
    Hello,
    Proof,
    StreamError,
    decode,
    encode,
    hello_schema,
    to_error,
)
from tailrace.ledger.process.version import software
from tailrace.ledger.wire.handshake import Handshake, Side, refused

LINK_IDLE_TIMEOUT_S = 16.0
"""Idle timeout of this edge's link, in seconds. Each Heartbeat tells the origin this timeout."""
HEARTBEAT_REPLY = encode(Heartbeat(0, ready=True, patience_ms=round(LINK_IDLE_TIMEOUT_S * 1000)))
"""The answer to each Heartbeat of the origin."""


class LinkState(Enum):
    """The state of the link to an origin."""

    DOWN = "down"
    GREETING = "greeting"  # connected, but the origin's Hello or proof is missing
    UP = "up"


class LinkProtocol:
    """The edge's side of the protocol on one link, which may have several connections in turn."""

    def __init__(self, secret: bytes | None = None) -> None:
        """Begin without a connection; both sides must prove that they know `secret`, if given."""
        self.state = LinkState.DOWN
        self.heartbeat: Heartbeat | None = None  # the latest Heartbeat on this connection
        self._secret = secret
        self._handshake = Handshake(Side.EDGE, secret)
        self._is_greeted = False

    def connected(self) -> list[bytes]:
        """Begin on a new connection; return the frames to send first."""
        self.state = LinkState.GREETING
        self._handshake = Handshake(Side.EDGE, self._secret)
        self._is_greeted = False
        frames = [encode(Hello(SCHEMA_HASH, software("edge")))]
        if (challenge := self._handshake.challenge) is not None:
            frames.append(encode(challenge))
        return frames

    def disconnected(self) -> None:
        """Handle the loss of the connection."""
        self.state = LinkState.DOWN
        self.heartbeat = None

    def receive(self, raw: bytes) -> bytes | None:
        """Handle a frame on corr 0, or any frame before the link is up; return the answer to it.

        The link is up once the origin has sent its Hello and proved its identity.

        Raises TailraceError if the origin violates the protocol or ends the connection.
        """
        try:
            _, frame = decode(raw)
        except FrameError:
            if (schema := hello_schema(raw)) is not None:
                _check_schema(schema, "another release")
            raise
        if isinstance(frame, StreamError):
            raise to_error(frame)
        if isinstance(frame, Hello) and self.state is LinkState.GREETING:
            _check_schema(frame.schema, frame.software)
            self._is_greeted = True
            self._begin_if_sure()
        elif isinstance(frame, Challenge):
            return encode(self._handshake.answer(frame))
        elif isinstance(frame, Proof) and self.state is LinkState.GREETING:
            self._handshake.check(frame)
            self._begin_if_sure()
        elif isinstance(frame, Heartbeat) and self.state is LinkState.UP:
            self.heartbeat = frame
            return HEARTBEAT_REPLY
        elif self._is_greeted and not self._handshake.done:
            raise refused("the origin has not proved that it knows the link secret of this edge")
        else:
            name = type(frame).__name__
            raise FrameError(f"unexpected {name} frame on the link", field="tag", offset=4)
        return None

    def _begin_if_sure(self) -> None:
        if self._is_greeted and self._handshake.done:
            self.state = LinkState.UP


def _check_schema(schema: bytes, software: str) -> None:
    if schema != SCHEMA_HASH:
        raise SchemaMismatch(
            f"the origin ({software}) uses wire schema {schema.hex()}",
            hint=f"run the same release on both: this edge uses {SCHEMA_HASH.hex()}",
        )
