"""What each subscription has not heard yet of the streams that it wants to know of, and the one
object that knows all subscriptions.

Changes of streams are queued for a subscription, the later merged into the earlier, and the
subscription is notified to take them. So a burst costs one update a stream, and what a
subscription is asked right after a change it answers knowing of it.

The queues are in memory. What is lost with them, in a crash or on another origin, is found
again by looking at every stream: each subscription is asked to when it is first seen here.

The object answers `GET /v1/stream/__ds/jwks.json` to everybody, and subscriptions that enter,
leave, or want a webhook's body signed. The key never leaves it: Ed25519 (RFC 8032), told to
receivers as a JWK set (RFC 8037).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tailrace.ledger.errors import CallerError, TailraceError
from tailrace.ledger.interface import ObjectKey, ObjectStore, ValueRange
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectContext,
    ObjectFactory,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.origin.streams.config import Change, StreamEvent
from tailrace.origin.streams.page import BEGINNING
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from tailrace.origin.subscriptions.subscription import Directory

UPDATE = "UPDATE"
"""The method that notifies a subscription: it takes its updates."""
SCAN = "SCAN"
"""The method that has it look at every stream that it wants to know of."""
ENTRY = "entry/"
"""Names of the index's values: one for each subscription, what it wants to know of."""
VERSION = "version"
"""A value of the index that changes with every entry."""

RELOAD_S = 1.0
"""How late a subscription that was made on another origin may be seen here."""
MAX_NOTIFIED = 64
"""Subscriptions that are being notified at the same time."""

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

log = structlog.get_logger("subscriptions")


class ObjectFetcher(Protocol):
    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...


@dataclass(frozen=True, slots=True)
class Update:
    """What has happened to a stream: whether it was deleted, and where it ends if it is there.

    `since` is where it ended before all of that.
    """

    deleted: bool = False
    tail: str | None = None
    since: str = BEGINNING

    def then(self, event: StreamEvent) -> Update:
        if event.kind is Change.DELETED:
            return Update(deleted=True)
        since = event.since_offset if self.tail is None else self.since
        return Update(self.deleted, event.tail_offset, since)


class Updates:
    """The queues. `on_event` is for `StreamSettings`; `run` it beside the object runtime."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._directory = Directory()
        self._queues: dict[str, dict[str, Update]] = {}
        self._to_notify: dict[str, str] = {}  # the method for each, oldest first
        self._notified: dict[str, asyncio.Task[None]] = {}
        self._version: bytes | None = None
        self._wake = asyncio.Event()

    # ---- for streams and subscriptions ----

    def on_event(self, event: StreamEvent) -> None:
        """A stream has changed; says so to everybody who wants to know."""
        for name in self._directory.interested(event.path):
            updates = self._queues.setdefault(name, {})
            updates[event.path] = updates.get(event.path, Update()).then(event)
            self._notify(name, UPDATE)

    def enter(self, name: str, entry: bytes) -> None:
        """From now on the subscription hears of what `entry` says."""
        self._directory.enter(name, entry)

    def leave(self, name: str) -> None:
        self._directory.leave(name)
        self._queues.pop(name, None)
        self._to_notify.pop(name, None)

    def take(self, name: str) -> dict[str, Update]:
        """Return the updates that the subscription has not had, by the name of their stream."""
        return self._queues.pop(name, {})

    # ---- at work ----

    async def run(self, objects: ObjectFetcher) -> None:
        """Notify those who have updates, until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._reload()
                except TailraceError as error:  # a store that is away may come back
                    log.warning("subscriptions.unknown", error=str(error))
                while len(self._notified) < MAX_NOTIFIED and self._start(objects):
                    pass
                with suppress(TimeoutError):  # time to reload
                    async with asyncio.timeout(RELOAD_S):
                        await self._wake.wait()
        finally:
            for task in self._notified.values():
                task.cancel()

    async def _reload(self) -> None:
        """Take in what other origins, or an earlier life of this one, have entered."""
        found = await self._store.get(INDEX_KEY, [VERSION])
        if found.get(VERSION) == self._version:
            return
        entries = await self._store.list(INDEX_KEY, ValueRange(ENTRY))
        stored = {name.removeprefix(ENTRY): entry for name, entry in entries.items()}
        for name in self._directory:
            if name not in stored:
                self.leave(name)
        for name, entry in stored.items():
            if self._directory.entry(name) != entry:
                self.enter(name, entry)
                self._notify(name, SCAN)
        self._version = found.get(VERSION)

    def _notify(self, name: str, method: str) -> None:
        if method == SCAN or name not in self._to_notify:
            self._to_notify[name] = method
        self._wake.set()

    def _start(self, objects: ObjectFetcher) -> bool:
        """Notify the one that has waited longest; False if there is none."""
        name = next((name for name in self._to_notify if name not in self._notified), None)
        if name is None:
            return False
        method = self._to_notify.pop(name)
        work = self._ask(objects, ObjectKey(SUBSCRIPTION, name), method)
        task = self._notified[name] = asyncio.create_task(work)
        task.add_done_callback(partial(self._ended, name))
        return True

    async def _ask(self, objects: ObjectFetcher, key: ObjectKey, method: str) -> None:
        try:
            await objects.fetch(key, ObjectRequest(method, f"object://{key.kind}"))
        except TailraceError as error:
            log.warning("subscription.not_notified", name=key.name, error=str(error))
            # What it took of its updates may be lost with the event.
            await asyncio.sleep(RELOAD_S)
            self._notify(key.name, SCAN)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._notified[name]
        self._wake.set()
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("subscription.failed", name=name, exc_info=fault)


class SigningKey:
    """Made from its seed, which is all that has to be kept, and kept secret."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._x = base64url(self._key.public_key().public_bytes_raw())
        # RFC 7638: the hash of the required members alone, in order, without white space.
        members = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": self._x}, separators=(",", ":"))
        self.kid = f"ds_{base64url(hashlib.sha256(members.encode()).digest())}"

    def jwk(self) -> dict[str, str]:
        return {
            "kty": "OKP",
            "crv": "Ed25519",
            "x": self._x,
            "kid": self.kid,
            "use": "sig",
            "alg": "EdDSA",
        }

    def signature(self, body: bytes, now_s: int) -> str:
        """Return the header `Webhook-Signature` for a body that is sent at `now_s` (Unix time).

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
    """Return the class of the index, for an ObjectRuntime; it has room for `limit` subscriptions."""
    return lambda context: SubscriptionIndex(context, updates, limit)
