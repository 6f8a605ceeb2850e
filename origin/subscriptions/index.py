"""Delivers changes of streams to subscriptions, and holds the list of all subscriptions.

Changes of streams are queued for each subscription, and the subscription is notified to fetch them.
A later change of a stream is merged into an earlier one in the queue. So a burst costs one update
per stream, and a request to a subscription right after a change sees that change.

The queues are in memory. Changes are lost with them in a crash, and changes on another origin never
reach them. A scan of all streams finds these changes: each subscription is told to scan when this
process first sees it.

The index object answers `GET /v1/stream/__ds/jwks.json` to everyone. It also answers internal
requests of subscriptions to be listed or removed, or to sign a webhook's body. Signatures are
Ed25519 (RFC 8032). The private key never leaves the object; the public key is published to
receivers of webhooks as a JWK set (RFC 8037).
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
from tailrace.origin.streams.events import Change, StreamEvent
from tailrace.origin.streams.offsets import BEGINNING
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from tailrace.origin.subscriptions.subscription import Directory

UPDATE = "update"
"""Operation that notifies a subscription, which then takes its updates."""
SCAN = "scan"
"""Operation that makes a subscription scan every stream that it matches."""
ENTRY = "entry/"
"""Prefix of the keys under which the index stores the entry of each subscription. An entry has the
subscription's interests: its pattern, the names of its streams, and its wake stream."""
VERSION = "version"
"""Key of a value in the index that is changed whenever an entry changes."""

RELOAD_S = 1.0
"""Interval in seconds after which subscriptions made on other origins are seen here."""
MAX_NOTIFIED = 64
"""Maximum number of subscriptions that are notified at the same time."""

SEED_BYTES = 32

ENTER = "enter"
LEAVE = "leave"
SIGN = "sign"
"""Operations of the index, by which a subscription has itself listed or removed, or a webhook's
body signed."""
NAME = "subscription"
"""Header with the name of the subscription that sends the request."""

MAX_SUBSCRIPTIONS = 256
"""Maximum number of subscriptions; every origin matches each change against all of them."""
MAX_ENTRY_BYTES = 16 * 1024 * 1024
"""Maximum bytes of all entries together; every origin keeps them in memory."""

_SEED = "seed"
_VERSION_BYTES = 8
_JWKS_HEADERS = (
    ("content-type", "application/jwk-set+json"),
    ("cache-control", "public, max-age=300"),
)

log = structlog.get_logger("subscriptions")


class ObjectFetcher(Protocol):
    """Sends requests to objects."""

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...


@dataclass(frozen=True, slots=True)
class Update:
    """The changes of one stream that a subscription has not taken yet, merged into one.

    `deleted` is True if the stream was deleted. `tail` is the offset at which it ends now, or None
    if it does not exist. `since` is the offset at which it ended before these changes.
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
    """Queues the updates of streams for subscriptions, and notifies the subscriptions.

    `on_event` is the callback for `StreamSettings`. `run` must run along with the object runtime.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._directory = Directory()
        self._queues: dict[str, dict[str, Update]] = {}
        # The operation, UPDATE or SCAN, to send to each subscription, by name; the subscription
        # that has waited longest is first.
        self._to_notify: dict[str, str] = {}
        self._notified: dict[str, asyncio.Task[None]] = {}
        self._version: bytes | None = None
        self._wake = asyncio.Event()

    # ---- for streams and subscriptions ----

    def on_event(self, event: StreamEvent) -> None:
        """Queue a stream's change for every interested subscription."""
        for name in self._directory.interested(event.path):
            updates = self._queues.setdefault(name, {})
            updates[event.path] = updates.get(event.path, Update()).then(event)
            self._notify(name, UPDATE)

    def enter(self, name: str, entry: bytes) -> None:
        """Register a subscription's interests, so that it gets changes from now on."""
        self._directory.enter(name, entry)

    def leave(self, name: str) -> None:
        self._directory.leave(name)
        self._queues.pop(name, None)
        self._to_notify.pop(name, None)

    def take(self, name: str) -> dict[str, Update]:
        """Return and remove the subscription's updates, by the name of their stream."""
        return self._queues.pop(name, {})

    # ---- at work ----

    async def run(self, objects: ObjectFetcher) -> None:
        """Notify subscriptions that have updates, until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._reload()
                except TailraceError as error:  # retried in the next round of this loop
                    log.warning("subscriptions.unknown", error=str(error))
                while len(self._notified) < MAX_NOTIFIED and self._start(objects):
                    pass
                with suppress(TimeoutError):  # after RELOAD_S the loop reloads the entries
                    async with asyncio.timeout(RELOAD_S):
                        await self._wake.wait()
        finally:
            for task in self._notified.values():
                task.cancel()

    async def _reload(self) -> None:
        """Read the entries that other origins, or earlier processes of this one, have made."""
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

    def _notify(self, name: str, operation: str) -> None:
        if operation == SCAN or name not in self._to_notify:
            self._to_notify[name] = operation
        self._wake.set()

    def _start(self, objects: ObjectFetcher) -> bool:
        """Notify the subscription that has waited longest; return False if there is none."""
        name = next((name for name in self._to_notify if name not in self._notified), None)
        if name is None:
            return False
        operation = self._to_notify.pop(name)
        work = self._ask(objects, ObjectKey(SUBSCRIPTION, name), operation)
        task = self._notified[name] = asyncio.create_task(work)
        task.add_done_callback(partial(self._ended, name))
        return True

    async def _ask(self, objects: ObjectFetcher, key: ObjectKey, operation: str) -> None:
        try:
            await objects.fetch(key, ObjectRequest.internal(operation))
        except TailraceError as error:
            log.warning("subscription.not_notified", name=key.name, error=str(error))
            # The failed request may have taken updates from the queue. A scan finds them again.
            await asyncio.sleep(RELOAD_S)
            self._notify(key.name, SCAN)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._notified[name]
        self._wake.set()
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("subscription.failed", name=name, exc_info=fault)


class SigningKey:
    """A signing key, made from its secret seed, which is all that is stored."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._x = base64url(self._key.public_key().public_bytes_raw())
        # The thumbprint of RFC 7638 is over the required members only, sorted, without white space.
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

        The signed text is `now_s.body`, so that a receiver can refuse old messages.
        """
        signed = self._key.sign(str(now_s).encode() + b"." + body)
        return f"t={now_s},kid={self.kid},ed25519={base64url(signed)}"


def base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


class SubscriptionIndex(DurableObject):
    """The one object that lists all subscriptions and signs webhooks."""

    def __init__(self, context: ObjectContext, updates: Updates, limit: int) -> None:
        super().__init__(context)
        self._updates = updates
        self._limit = limit
        # Bytes of the stored interests of each subscription; None before they were read.
        self._sizes: dict[str, int] | None = None
        self._key: SigningKey | None = None

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        name = request.header(NAME) or ""
        match request.operation:
            case None if request.method == "GET":
                keys = {"keys": [(await self._signing_key()).jwk()]}
                return ObjectResponse(200, _JWKS_HEADERS, json.dumps(keys).encode())
            case "sign":
                now_s = self.context.now_ms() // 1000
                signature = (await self._signing_key()).signature(request.body, now_s)
                return ObjectResponse(200, body=signature.encode())
            case "enter":
                (await self._room_for(name, len(request.body)))[name] = len(request.body)
                self.context.storage.put(ENTRY + name, request.body)
                await self._changed()
                self._updates.enter(name, request.body)
            case "leave":
                (await self._all_sizes()).pop(name, None)
                self.context.storage.delete(ENTRY + name)
                await self._changed()
                self._updates.leave(name)
            case _:
                raise CallerError(
                    f"this path does not support the method {request.method}",
                    code="method_not_allowed",
                    status=405,
                )
        return ObjectResponse(204)

    async def _room_for(self, name: str, size: int) -> dict[str, int]:
        sizes = await self._all_sizes()
        others = sum(sizes.values()) - sizes.get(name, 0)
        if (name not in sizes and len(sizes) >= self._limit) or others + size > MAX_ENTRY_BYTES:
            raise CallerError(
                f"there are already {len(sizes)} subscriptions, which take {others} bytes",
                code="too_many_subscriptions",
                status=429,
                hint="delete some subscriptions first, or name fewer streams",
            )
        return sizes

    async def _all_sizes(self) -> dict[str, int]:
        if self._sizes is None:
            entries = await self.context.storage.list(prefix=ENTRY)
            self._sizes = {name.removeprefix(ENTRY): len(entry) for name, entry in entries.items()}
        return self._sizes

    async def _changed(self) -> None:
        """Change the version of the entries, and wait until it is durable.

        `Updates` of other origins then read the entries again.
        """
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
    """Return the class of the index, for an ObjectRuntime; it holds `limit` subscriptions."""
    return lambda context: SubscriptionIndex(context, updates, limit)
