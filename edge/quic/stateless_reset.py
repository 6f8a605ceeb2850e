"""Stateless resets (RFC 9000, 10.3), which end connections that this edge does not know.

An edge that was killed and started again has lost its connections. Without a reset, each client
keeps sending in vain until its own idle timeout. The reset token of a connection id is computed
from the id and a secret, so any process and any edge with the same secret can end the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from tailrace.ledger.flow.token_bucket import TokenBucket

TOKEN_BYTES = 16
MIN_TRIGGER_BYTES = 22
"""Minimum length of a packet that is answered, in bytes. The shortest reset has 21 bytes. A reset
is always shorter than the packet that it answers, so two endpoints cannot send resets for ever."""
HIDDEN_RESET_BYTES, MAX_RESET_BYTES = 42, 100
"""Range of the length of a reset, in bytes. The length is random, so that an observer cannot tell a
reset from other packets. A packet that is too short for this gets a reset that
is one byte shorter than the packet, which an observer may recognise. It is answered nevertheless,
because waiting clients send nothing but PINGs of about 30 bytes."""
RESETS_PER_S = 200.0
"""Maximum rate of resets of one process: a forged packet costs an HMAC and a datagram."""
_KIND, _SHORT = 0xC0, 0x40
"""Mask for a packet's first byte, and its value for a short header (RFC 9000, 17.3.1)."""


class StatelessResets:
    """Creates reset tokens and resets with one secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, b"tailrace QUIC stateless reset", hashlib.sha256)
        self._bucket: TokenBucket | None = None

    def token(self, cid: bytes) -> bytes:
        """Return the reset token that a client gets together with a connection id."""
        return hmac.digest(self._key, cid, hashlib.sha256)[:TOKEN_BYTES]

    def answer(self, datagram: bytes, cid: bytes, now: float) -> bytes | None:
        """Return the reset for a datagram with an unknown connection id, or None for no answer."""
        if len(datagram) < MIN_TRIGGER_BYTES or datagram[0] & _KIND != _SHORT:
            return None
        if self._bucket is None:
            self._bucket = TokenBucket(RESETS_PER_S, RESETS_PER_S, now)
        if self._bucket.take(1, now) > 0:
            return None
        size = min(len(datagram) - 1, MAX_RESET_BYTES)
        if size > HIDDEN_RESET_BYTES:
            size -= secrets.randbelow(size - HIDDEN_RESET_BYTES + 1)
        noise = secrets.token_bytes(size - TOKEN_BYTES)
        first = _SHORT | noise[0] & ~_KIND
        return bytes((first,)) + noise[1:] + self.token(cid)
