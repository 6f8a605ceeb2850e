"""The key that signs webhooks: Ed25519 (RFC 8032), told to receivers as a JWK set (RFC 8037)."""

from __future__ import annotations

import base64
import hashlib
import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SEED_BYTES = 32


class SigningKey:
    """Made from its seed, which is all that has to be kept, and kept secret."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._x = _base64url(self._key.public_key().public_bytes_raw())
        # RFC 7638: the hash of the required members alone, in order, without white space.
        members = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": self._x}, separators=(",", ":"))
        self.kid = f"ds_{_base64url(hashlib.sha256(members.encode()).digest())}"

    def jwk(self) -> dict[str, str]:
        """The public key."""
        return {
            "kty": "OKP",
            "crv": "Ed25519",
            "x": self._x,
            "kid": self.kid,
            "use": "sig",
            "alg": "EdDSA",
        }

    def signature(self, body: bytes, now_s: int) -> str:
        """The header `Webhook-Signature` for a body that is sent at `now_s` (Unix time).

        What is signed is `now_s.body`, so that a receiver can refuse what is old.
        """
        signed = self._key.sign(str(now_s).encode() + b"." + body)
        return f"t={now_s},kid={self.kid},ed25519={_base64url(signed)}"


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
