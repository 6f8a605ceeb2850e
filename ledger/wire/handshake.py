"""Mutual authentication of a link by a shared secret, which is never sent.

Each side sends a nonce (Challenge) after its Hello, and answers the nonce of the other side with a
MAC over both nonces and its own role (Proof). So a proof from another connection is not valid, and
neither is a side's own proof sent back to it. The handshake authenticates the peer when the link is
made. It does not protect later frames; use TLS on networks where others can change data.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum
from typing import NamedTuple

from tailrace.ledger.errors import Unauthorized
from tailrace.ledger.wire.schema import MAC_BYTES, Challenge, Proof


class Shared(NamedTuple):
    """A kind of shared secret: the label in its MACs, and its name and hint for errors."""

    label: bytes
    name: str
    hint: str


LINK = Shared(
    b"tailrace link 1 ",
    "link secret",
    "set edge.origin_secret and origin.link_secret to the same text",
)
PEER = Shared(
    b"tailrace peer 1 ",
    "token key or link secret",
    "give all origins of one ledger the same file `origin.keys` and the same origin.link_secret",
)
"""The secret between two origins of one ledger, which edges do not have."""


class Side(Enum):
    """Role of a side of the handshake, which its MAC includes."""

    EDGE = b"edge"  # the side that opened the connection, also if both are origins
    ORIGIN = b"origin"

    @property
    def other(self) -> Side:
        return Side.ORIGIN if self is Side.EDGE else Side.EDGE


class Handshake:
    """One side of the handshake.

    `done` is True once the peer has proven that it knows the secret, or if there is no secret. This
    side proves `secret`, and accepts proofs of `secret` or of one of the `others`, so that keys can
    be rotated.
    """

    def __init__(
        self, side: Side, secret: bytes | None, *others: bytes, shared: Shared = LINK
    ) -> None:
        self.done = secret is None
        self._side = side
        self._secret = secret
        self._others = others
        self._shared = shared
        self._nonce = secrets.token_bytes(MAC_BYTES)
        self._theirs: bytes | None = None

    @property
    def challenge(self) -> Challenge | None:
        """The challenge to send after the Hello; None without a secret."""
        return None if self._secret is None else Challenge(self._nonce)

    def answer(self, challenge: Challenge) -> Proof:
        """Return the proof that answers the peer's challenge.

        Raises:
            Unauthorized: This side has no secret, or the peer sent two challenges.
        """
        if self._secret is None:
            name = self._shared.name
            raise refused(f"the other side has a {name}, and this one has none", self._shared)
        if self._theirs is not None:
            raise refused("the other side sent a second challenge", self._shared)
        self._theirs = challenge.nonce
        return Proof(self._mac(self._secret, self._side, self._theirs, self._nonce))

    def check(self, proof: Proof) -> None:
        """Check the peer's proof.

        Raises:
            Unauthorized: The proof is wrong or unexpected.
        """
        if self._secret is None or self._theirs is None or self.done:
            raise refused("the other side sent an unexpected proof", self._shared)
        nonces = self._nonce, self._theirs
        found = [
            hmac.compare_digest(proof.mac, self._mac(secret, self._side.other, *nonces))
            for secret in (self._secret, *self._others)
        ]
        if not any(found):
            raise refused(f"the two sides have different {self._shared.name}s", self._shared)
        self.done = True

    def _mac(self, secret: bytes, side: Side, asked: bytes, own: bytes) -> bytes:
        return hmac.digest(secret, self._shared.label + side.value + asked + own, "sha256")


def refused(why: str, shared: Shared = LINK) -> Unauthorized:
    return Unauthorized(why, code="link_refused", hint=shared.hint)
