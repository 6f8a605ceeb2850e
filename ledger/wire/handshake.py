"""Two sides of a link show each other that they hold the same secret, without sending it.

Each sends a nonce (Challenge) beside its Hello, and answers the other's with a MAC over both
(Proof), in which its role stands, so that neither a proof of another connection nor one's own,
sent back, is any good. It proves who is there when the link is made. It protects nothing that
follows: where others can change what is on the way, use TLS.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum

from tailrace.ledger.errors import Unauthorized
from tailrace.ledger.wire.schema import MAC_BYTES, Challenge, Proof

LABEL = b"tailrace link 1 "


class Side(Enum):
    EDGE = b"edge"  # who connects, another origin too
    ORIGIN = b"origin"

    @property
    def other(self) -> Side:
        return Side.ORIGIN if self is Side.EDGE else Side.EDGE


class Handshake:
    """One side's part; `done` when the other has shown that it has the secret, or none is set."""

    def __init__(self, side: Side, secret: bytes | None) -> None:
        self.done = secret is None
        self._side = side
        self._secret = secret
        self._nonce = secrets.token_bytes(MAC_BYTES)
        self._theirs: bytes | None = None

    @property
    def challenge(self) -> Challenge | None:
        """To be sent right after the Hello; None where there is no secret."""
        return None if self._secret is None else Challenge(self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Our proof; Unauthorized where the other side asks for one and this one has no secret."""
        if self._secret is None:
            raise refused("the other side has a link secret, and this one has none")
        if self._theirs is not None:
            raise refused("a second challenge")
        self._theirs = challenge.nonce
        return Proof(self._mac(self._secret, self._side, self._theirs, self._nonce))

    def check(self, proof: Proof) -> None:
        """Unauthorized unless the other side has the secret too."""
        if self._secret is None or self._theirs is None or self.done:
            raise refused("a proof that was not asked for")
        expected = self._mac(self._secret, self._side.other, self._nonce, self._theirs)
        if not hmac.compare_digest(proof.mac, expected):
            raise refused("the two sides have different link secrets")
        self.done = True

    @staticmethod
    def _mac(secret: bytes, side: Side, asked: bytes, own: bytes) -> bytes:
        return hmac.digest(secret, LABEL + side.value + asked + own, "sha256")


def refused(why: str) -> Unauthorized:
    return Unauthorized(
        why,
        code="link_refused",
        hint="set edge.origin_secret and origin.link_secret to the same text",
    )
