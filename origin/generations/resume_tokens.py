"""What a caller may do with a stream, and how much, by its API key or by a resume token.

Two things speak for a caller: the rights of the API key that an edge has checked, for streams of
that tenant, and a resume token, for its stream, whoever has it. A stream of another tenant is as
if absent.

A token is `v1.kid.payload.mac`, the payload and mac in unpadded base64url. The payload is the
16-byte stream id, one byte of rights and the expiry (u64, Unix ms); the mac is
HMAC-SHA256 over `v1.kid.payload`. There is no algorithm field to be talked into another.
Where the stream is a tenant's the version is `v2`, and the payload ends with the first 8 bytes
of SHA-256 over the tenant's name.
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
    unknown_stream,
)
from tailrace.ledger.interface import Ledger, StreamInfo, StreamKind
from tailrace.ledger.links.rights import OF_A_STREAM, Right
from tailrace.ledger.process.durable_file import OWNER_MODE, create_file
from tailrace.ledger.wire.schema import Caller
from tailrace.origin.core.quotas import tenant_of
from tailrace.origin.streams.protocol import within

MAX_TOKEN_CHARS = 256
KEY_BYTES = 32
TENANT_BYTES = 8
_PAYLOADS = {"v1": struct.Struct("<16sBQ"), "v2": struct.Struct(f"<16sBQ{TENANT_BYTES}s")}
PEER = b"tailrace peer "
PASS = b"tailrace pass "
"""Begins what is signed as a pass: never what is signed as a token, which begins with `v`."""

KEY_MARK = "\x1f"
"""Parts a tenant's name from an idempotency key; neither holds it."""


class Voucher(NamedTuple):
    """What a token says that is good: `tenant` is the mark of whose stream it is for."""

    stream: bytes
    rights: Right
    expires_ms: int
    tenant: bytes = b""

    def is_for(self, tenant: str) -> bool:
        return self.tenant == _mark(tenant)


class TokenKeys:
    """Signing keys by id. The first one signs; all of them verify, so keys can rotate."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        self._keys = keys
        self._signing = next(iter(keys))

    @classmethod
    def load(cls, path: Path, random: Callable[[int], bytes] = secrets.token_bytes) -> TokenKeys:
        """Read the keys at `path` (`{"kid": "hex", …}`, newest first), made on first use."""
        try:
            if not path.exists():
                _make_keys(path, random)
            stored = json.loads(path.read_text())
            keys = {str(kid): bytes.fromhex(key) for kid, key in stored.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path} holds no keys: {error}", hint="remove it") from error
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}",
                field="origin.keys",
                hint="name a file that can be read, or made",
            ) from error
        if not keys or any(len(key) < KEY_BYTES for key in keys.values()):
            raise ConfigError(f"{path}: a key of {KEY_BYTES} bytes is needed", hint="remove it")
        return cls(keys)

    def issue(self, stream: bytes, rights: Right, expires_ms: int, tenant: str = "") -> str:
        """A token for `stream`, of `tenant`, that is good until `expires_ms` (Unix time)."""
        version = "v2" if tenant else "v1"
        said = (stream, rights, expires_ms, *((_mark(tenant),) if tenant else ()))
        signed = f"{version}.{self._signing}.{_b64(_PAYLOADS[version].pack(*said))}"
        return f"{signed}.{self._mac(self._signing, signed)}"

    def check(self, token: str, stream: bytes, right: Right, now_ms: int) -> Voucher:
        """What `token` says; raises unless it gives `right` on `stream` now.

        `Unauthorized` for a token that is not ours or has expired (one text for all
        causes), `NotFound` for another stream's, `Forbidden` where the right is missing.
        """
        voucher = self._verified(token)
        if voucher is None or voucher.expires_ms <= now_ms:
            raise _refused()
        if voucher.stream != stream:
            raise NotFound(f"no stream {stream.hex()}", code="unknown_stream")
        if right not in voucher.rights:
            raise Forbidden(f"this token does not allow to {right.words[0]}", field="token")
        return voucher

    def pass_for(self, stream: bytes) -> bytes:
        """What shows that an origin with one of these keys has opened `stream` for an edge."""
        return self._pass(self._signing, stream)

    def check_pass(self, mac: bytes, stream: bytes) -> None:
        """Raise `Unauthorized` unless `mac` is the pass for `stream`. It does not expire."""
        found = [hmac.compare_digest(mac, self._pass(kid, stream)) for kid in self._keys]
        if not any(found):
            raise _refused()

    def peer_secrets(self, link_secret: bytes | None) -> tuple[bytes, ...]:
        """Return what shows that an origin has one of these keys, and the same link secret.

        Edges have the link secret at most. The first one is of the key that signs.
        """
        said = PEER + (link_secret or b"")
        return tuple(hmac.digest(key, said, "sha256") for key in self._keys.values())

    def _pass(self, kid: str, stream: bytes) -> bytes:
        return hmac.digest(self._keys[kid], PASS + stream, "sha256")

    def _verified(self, token: str) -> Voucher | None:
        parts = token.split(".")
        if len(token) > MAX_TOKEN_CHARS or len(parts) != 4 or not token.isascii():
            return None
        version, kid, payload, mac = parts
        known = version in _PAYLOADS and kid in self._keys
        # An unknown key costs the same work as a known one: timing tells nothing.
        expected = self._mac(kid if known else self._signing, f"{version}.{kid}.{payload}")
        if not hmac.compare_digest(mac, expected) or not known:
            return None
        try:
            raw = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
            stream, rights, *others = _PAYLOADS[version].unpack(raw)
        except (binascii.Error, struct.error):
            return None
        return Voucher(stream, Right(rights), *others)

    def _mac(self, kid: str, signed: str) -> str:
        return _b64(hmac.digest(self._keys[kid], signed.encode(), "sha256"))


def _make_keys(path: Path, random: Callable[[int], bytes]) -> None:
    """Write a new key to `path`, unless another origin does so at this moment.

    It is on the disk before any token is signed with it: a power cut must not void the tokens.
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


def key_of(caller: Caller | None, idempotency_key: str | None) -> str | None:
    """The idempotency key, apart from other tenants'."""
    tenant = tenant_of(caller)
    if idempotency_key is None or not tenant:
        return idempotency_key
    return f"{tenant}{KEY_MARK}{idempotency_key}"


def name_of(caller: Caller | None, name: str) -> str:
    """The name of an object, apart from other tenants'."""
    return within(tenant_of(caller), name)


async def generation(ledger: Ledger, stream: bytes) -> StreamInfo:
    """The stream; an object's is as if absent, because only its object may show or end it."""
    info = await ledger.info(stream)
    if info.kind is not StreamKind.GENERATION:
        raise unknown_stream(stream)
    return info


def check_right(caller: Caller | None, right: Right) -> None:
    """Raises unless the API key that a caller has used has this right."""
    if caller is None or right in Right(caller.rights):
        return
    if not caller.tenant:
        raise nobody_speaks()
    raise missing(right)


def rights_on(
    stream: bytes, tenant: str, caller: Caller | None, voucher: Voucher | None, right: Right
) -> Right:
    """What a caller may do with a stream of `tenant`; raises unless `right` is among it."""
    is_own = tenant_of(caller) == tenant and (caller is None or bool(caller.tenant))
    own = OF_A_STREAM if caller is None else Right(caller.rights) & OF_A_STREAM
    if voucher is not None:
        if not voucher.is_for(tenant):
            raise unknown_stream(stream)
        # An edge without keys asks for everybody: there a token says all that there is to say.
        return voucher.rights | own if is_own and caller is not None else voucher.rights
    if caller is not None and not caller.tenant:
        raise nobody_speaks()
    if not is_own:
        raise unknown_stream(stream)
    if right not in own:
        raise missing(right)
    return own


def nobody_speaks() -> Unauthorized:
    return Unauthorized(
        "neither an API key nor a resume token speaks for this request",
        code="no_key",
        field="Authorization",
        hint="send Authorization: Bearer KEY, or the stream's Tailrace-Token",
    )


def missing(right: Right) -> Forbidden:
    return Forbidden(f"this API key does not allow to {right.words[0]}", field="Authorization")


def no_subscriptions() -> NotFound:
    return NotFound(
        "there are no subscriptions for tenants",
        code="subscriptions_off",
        hint="use them through an edge without API keys",
    )
