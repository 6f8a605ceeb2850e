"""The one object that knows all subscriptions, and signs their webhooks.

It answers `GET /v1/stream/__ds/jwks.json` to everybody, and subscriptions that enter, leave,
or want a body signed. The key never leaves it.
"""

from __future__ import annotations

import json

from ledger.errors import CallerError
from ledger.objects.object import (
    DurableObject,
    ObjectContext,
    ObjectFactory,
    ObjectRequest,
    ObjectResponse,
)
from ledger.subscriptions.keys import SEED_BYTES, SigningKey
from ledger.subscriptions.news import ENTRY, VERSION, News

ENTER = "ENTER"
LEAVE = "LEAVE"
SIGN = "SIGN"
"""Methods by which subscriptions ask; an edge passes no such method on."""
NAME = "subscription"
"""The header that says who asks."""

MAX_SUBSCRIPTIONS = 10_000
"""Every origin keeps what each of them wants to know of in memory."""

_SEED = "seed"
_VERSION_BYTES = 8
_JWKS_HEADERS = (
    ("content-type", "application/jwk-set+json"),
    ("cache-control", "public, max-age=300"),
)


class SubscriptionIndex(DurableObject):
    def __init__(self, context: ObjectContext, news: News, limit: int) -> None:
        super().__init__(context)
        self._news = news
        self._limit = limit
        self._names: set[str] | None = None
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
                (await self._room_for(name)).add(name)
                self.context.storage.put(ENTRY + name, request.body)
                await self._changed()
                self._news.enter(name, request.body)
            case "LEAVE":
                (await self._all_names()).discard(name)
                self.context.storage.delete(ENTRY + name)
                await self._changed()
                self._news.leave(name)
            case _:
                raise CallerError("not a method here", code="method_not_allowed", status=405)
        return ObjectResponse(204)

    async def _room_for(self, name: str) -> set[str]:
        names = await self._all_names()
        if name not in names and len(names) >= self._limit:
            raise CallerError(
                f"there are {len(names)} subscriptions already",
                code="too_many_subscriptions",
                status=429,
                hint="delete some first",
            )
        return names

    async def _all_names(self) -> set[str]:
        if self._names is None:
            entries = await self.context.storage.list(prefix=ENTRY)
            self._names = {entry.removeprefix(ENTRY) for entry in entries}
        return self._names

    async def _changed(self) -> None:
        """Entries are durable before anybody hears of them: see `News`."""
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


def index_class(news: News, limit: int = MAX_SUBSCRIPTIONS) -> ObjectFactory:
    """The class of the index, for an ObjectRuntime; it has room for `limit` subscriptions."""
    return lambda context: SubscriptionIndex(context, news, limit)
