"""Mutual authentication of a link by a shared secret, which is never sent.

Each side sends a nonce (Challenge) after its Hello, and answers the other's with a MAC over both
nonces and its own role (Proof). So neither a proof of another connection nor a reflected one is
valid. This authenticates the peer when the link is made. It does not protect later frames; use TLS
on networks where others can change them.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum

from tailrace.ledger.errors import Unauthorized
from tailrace.ledger.wire.schema import MAC_BYTES, Challenge, Proof

LABEL = b"tailrace link 1 "


class Side(Enum):
    """Role of a side, as part of its MAC."""

    EDGE = b"edge"  # the side that connects, which may be another origin
    ORIGIN = b"origin"

    @property
    def other(self) -> Side:
        return Side.ORIGIN if self is Side.EDGE else Side.EDGE


class Handshake:
    """One side of the handshake; `done` once the peer has proven the secret, or without one."""

    def __init__(self, side: Side, secret: bytes | None) -> None:
        self.done = secret is None
        self._side = side
        self._secret = secret
        self._nonce = secrets.token_bytes(MAC_BYTES)
        self._theirs: bytes | None = None

    @property
    def challenge(self) -> Challenge | None:
        """The challenge to send after the Hello; None without a secret."""
        return None if self._secret is None else Challenge(self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Return the proof for the peer's challenge.

        Raises:
            Unauthorized: This side has no secret, or the peer sent two challenges.
        """
        if self._secret is None:
            raise refused("the other side has a link secret, and this one has none")
        if self._theirs is not None:
            raise refused("the other side sent a second challenge")
        self._theirs = challenge.nonce
        return Proof(self._mac(self._secret, self._side, self._theirs, self._nonce))

    def check(self, proof: Proof) -> None:
        """Check the peer's proof.

        Raises:
            Unauthorized: The proof is wrong or unexpected.
        """
        if self._secret is None or self._theirs is None or self.done:
            raise refused("the other side sent an unexpected proof")
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
