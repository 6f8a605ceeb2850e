"""The one object that knows all subscriptions, and signs their webhooks.

It answers `GET /v1/stream/__ds/jwks.json` to everybody, and subscriptions that enter, leave,
or want a body signed. The key never leaves it: Ed25519 (RFC 8032), told to receivers as a JWK
set (RFC 8037).
"""

from __future__ import annotations

import base64
import hashlib
import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ledger.errors import CallerError
from ledger.objects.object import (
    DurableObject,
    ObjectContext,
    ObjectFactory,
    ObjectRequest,
    ObjectResponse,
)
from origin.subscriptions.updates import ENTRY, VERSION, Updates

SEED_BYTES = 32

ENTER = "ENTER"
LEAVE = "LEAVE"
SIGN = "SIGN"
"""Methods by which subscriptions ask; an edge passes no such method on."""
NAME = "subscription"
"""The header that says who asks."""

MAX_SUBSCRIPTIONS = 256
"""Every origin asks each of them of every change of a stream."""
MAX_ENTRY_BYTES = 16 * 1024 * 1024
"""What they want to know of, all together; every origin keeps it in memory."""

_SEED = "seed"
_VERSION_BYTES = 8
_JWKS_HEADERS = (
    ("content-type", "application/jwk-set+json"),
    ("cache-control", "public, max-age=300"),
)


class SigningKey:
    """Made from its seed, which is all that has to be kept, and kept secret."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._x = base64url(self._key.public_key().public_bytes_raw())
        # RFC 7638: the hash of the required members alone, in order, without white space.
        members = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": self._x}, separators=(",", ":"))
        self.kid = f"ds_{base64url(hashlib.sha256(members.encode()).digest())}"

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
        return f"t={now_s},kid={self.kid},ed25519={base64url(signed)}"


def base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class SubscriptionIndex(DurableObject):
    def __init__(self, context: ObjectContext, updates: Updates, limit: int) -> None:
        super().__init__(context)
        self._updates = updates
        self._limit = limit
        self._sizes: dict[str, int] | None = None  # of what each wants to know of
        self._key: SigningKey | None = None

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        name = request.header(NAME) or ""
        match request.method:
            case "GET":
                keys = {"keys": [(await self._signing_key()).jwk()]}
                return ObjectResponse(200, _JWKS_HEADERS, json.dumps(keys).encode())
            case "SIGN":
                now_s = self.context.now_ms() // 1000
                signature = (await self._signing_key()).signature(request.body, now_s)
                return ObjectResponse(200, body=signature.encode())
            case "ENTER":
                (await self._room_for(name, len(request.body)))[name] = len(request.body)
                self.context.storage.put(ENTRY + name, request.body)
                await self._changed()
                self._updates.enter(name, request.body)
            case "LEAVE":
                (await self._all_sizes()).pop(name, None)
                self.context.storage.delete(ENTRY + name)
                await self._changed()
                self._updates.leave(name)
            case _:
                raise CallerError("not a method here", code="method_not_allowed", status=405)
        return ObjectResponse(204)

    async def _room_for(self, name: str, size: int) -> dict[str, int]:
        sizes = await self._all_sizes()
        others = sum(sizes.values()) - sizes.get(name, 0)
        if (name not in sizes and len(sizes) >= self._limit) or others + size > MAX_ENTRY_BYTES:
            raise CallerError(
                f"there are {len(sizes)} subscriptions already, of {others} bytes",
                code="too_many_subscriptions",
                status=429,
                hint="delete some first, or name fewer streams",
            )
        return sizes

    async def _all_sizes(self) -> dict[str, int]:
        if self._sizes is None:
            entries = await self.context.storage.list(prefix=ENTRY)
            self._sizes = {name.removeprefix(ENTRY): len(entry) for name, entry in entries.items()}
        return self._sizes

    async def _changed(self) -> None:
        """Entries are durable before anybody hears of them: see `Updates`."""
        self.context.storage.put(VERSION, self.context.random(_VERSION_BYTES))
        await self.context.storage.sync()

    async def _signing_key(self) -> SigningKey:
        if self._key is None:
            seed = await self.context.storage.get(_SEED)
            if seed is None:
                seed = self.context.random(SEED_BYTES)
                self.context.storage.put(_SEED, seed)
            self._key = SigningKey(seed)
        return self._key


def index_class(updates: Updates, limit: int = MAX_SUBSCRIPTIONS) -> ObjectFactory:
    """The class of the index, for an ObjectRuntime; it has room for `limit` subscriptions."""
    return lambda context: SubscriptionIndex(context, updates, limit)
