"""Resume tokens, which give their holders rights on one stream.

A token is `v1.kid.payload.mac`, the payload and mac in unpadded base64url. The payload is the
16-byte stream id, one byte of rights and the expiry (u64, Unix ms); the mac is HMAC-SHA256 over
`v1.kid.payload`. There is no algorithm field, so no client can choose a weaker one. The token of a
tenant's stream has version `v2`, and its payload ends with the first 8 bytes of SHA-256 over the
tenant's name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tailrace.ledger.errors import (
    ConfigError,
    Forbidden,
    NotFound,
    Unauthorized,
)
from tailrace.ledger.links.rights import Right
from tailrace.ledger.process.durable_file import OWNER_MODE, create_file

MAX_TOKEN_CHARS = 256
KEY_BYTES = 32
TENANT_BYTES = 8
_PAYLOADS = {"v1": struct.Struct("<16sBQ"), "v2": struct.Struct(f"<16sBQ{TENANT_BYTES}s")}
PEER = b"tailrace peer "
PASS = b"tailrace pass "
"""Prefix of the text that is signed to prove to edges that an origin has opened a stream. The
signed text of a token begins with `v`, so the MAC of a token cannot serve as such a proof."""


class VerifiedToken(NamedTuple):
    """The contents of a valid token.

    `tenant` has the first TENANT_BYTES of the hash of the tenant's name; it is empty for a stream
    without a tenant.
    """

    stream: bytes
    rights: Right
    expires_ms: int
    tenant: bytes = b""

    def is_for(self, tenant: str) -> bool:
        """Return True if the token is for a stream of this tenant."""
        return self.tenant == _mark(tenant)


class TokenKeys:
    """The keys of resume tokens, by id.

    Tokens are signed with the first key and verified with any of them, so that keys can be rotated.
    """

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self._signing = next(iter(keys))

    @classmethod
    def load(cls, path: Path, random: Callable[[int], bytes] = secrets.token_bytes) -> TokenKeys:
        """Read the keys at `path` (`{"kid": "hex", …}`, newest first), or create them.

        Raises:
            ConfigError: The file cannot be read or created, or holds no valid keys.
        """
        try:
            if not path.exists():
                _make_keys(path, random)
            stored = json.loads(path.read_text())
            keys = {str(kid): bytes.fromhex(key) for kid, key in stored.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{path} holds no keys: {error}",
                hint="restore the file, or remove it to get a new key",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}",
                field="origin.keys",
                hint="name a file that this user can read, or create",
            ) from error
        if not keys or any(len(key) < KEY_BYTES for key in keys.values()):
            raise ConfigError(
                f"{path} must hold at least one key, each of {KEY_BYTES} bytes or more",
                hint="restore the file, or remove it to get a new key",
            )
        return cls(keys)

    def issue(self, stream: bytes, rights: Right, expires_ms: int, tenant: str = "") -> str:
        """Return a token for a stream of `tenant` that is valid until `expires_ms` (Unix time)."""
        version = "v2" if tenant else "v1"
        said = (stream, rights, expires_ms, *((_mark(tenant),) if tenant else ()))
        signed = f"{version}.{self._signing}.{_b64(_PAYLOADS[version].pack(*said))}"
        return f"{signed}.{self._mac(self._signing, signed)}"

    def check(self, token: str, stream: bytes, right: Right, now_ms: int) -> VerifiedToken:
        """Return the contents of a token that gives `right` on `stream` now.

        Raises:
            Unauthorized: The token is forged or has expired; the message is the same for both.
            NotFound: The token is for another stream.
            Forbidden: The token does not include the right.
        """
        verified = self._verified(token)
        if verified is None or verified.expires_ms <= now_ms:
            raise _refused()
        if verified.stream != stream:
            raise NotFound(f"no stream {stream.hex()}", code="unknown_stream")
        if right not in verified.rights:
            raise Forbidden(f"this token does not allow to {right.words[0]}", field="token")
        return verified

    def pass_for(self, stream: bytes) -> bytes:
        """Return the proof that an origin with these keys has opened a stream; edges keep it."""
        return self._pass(self._signing, stream)

    def check_pass(self, mac: bytes, stream: bytes) -> None:
        """Raise `Unauthorized` unless `mac` is the proof for a stream; proofs do not expire."""
        found = [hmac.compare_digest(mac, self._pass(kid, stream)) for kid in self._keys]
        if not any(found):
            raise _refused()

    def peer_secrets(self, link_secret: bytes | None) -> tuple[bytes, ...]:
        """Return the secrets by which origins with these keys recognize each other.

        Each is derived from one key and the link secret. Edges have only the link secret, so they
        cannot pose as origins. The first secret belongs to the key that signs tokens.
        """
        said = PEER + (link_secret or b"")
        return tuple(hmac.digest(key, said, "sha256") for key in self._keys.values())

    def _pass(self, kid: str, stream: bytes) -> bytes:
        return hmac.digest(self._keys[kid], PASS + stream, "sha256")

    def _verified(self, token: str) -> VerifiedToken | None:
        parts = token.split(".")
        if len(token) > MAX_TOKEN_CHARS or len(parts) != 4 or not token.isascii():
            return None
        version, kid, payload, mac = parts
        known = version in _PAYLOADS and kid in self._keys
        # A token with an unknown key takes the same time, so that timing reveals no key ids.
        expected = self._mac(kid if known else self._signing, f"{version}.{kid}.{payload}")
        if not hmac.compare_digest(mac, expected) or not known:
            return None
        try:
            raw = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
            stream, rights, *others = _PAYLOADS[version].unpack(raw)
        except (binascii.Error, struct.error):
            return None
        return VerifiedToken(stream, Right(rights), *others)

    def _mac(self, kid: str, signed: str) -> str:
        return _b64(hmac.digest(self._keys[kid], signed.encode(), "sha256"))


def _make_keys(path: Path, random: Callable[[int], bytes]) -> None:
    """Write a new key to `path`, unless another origin has just written one.

    The key is synced to the disk before it signs any token, so that tokens survive a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {random(4).hex(): random(KEY_BYTES).hex()}
    create_file(path, json.dumps(made).encode(), mode=OWNER_MODE)


def _mark(tenant: str) -> bytes:
    return hashlib.sha256(tenant.encode()).digest()[:TENANT_BYTES] if tenant else b""


def _b64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _refused() -> Unauthorized:
    return Unauthorized(
        "the resume token is not valid",
        field="token",
        hint="send the Tailrace-Token of the response that opened the stream, before it expires",
    )
