"""Shared parts of the subscriptions' tests: streams, subscriptions, a receiver of webhooks."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import ObjectFactory, ObjectRequest, ObjectResponse
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.streams.events import StreamEvent
from tailrace.origin.streams.object import stream_class
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.subscriptions.index import Updates, index_class
from tailrace.origin.subscriptions.object import subscription_class
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION, object_of
from tailrace.origin.subscriptions.webhook import Webhooks
from tests.ledger.next_alarm import next_alarm_ms
from tests.ledger.objects.object_world import HandClock

BASE = "http://edge"
MAX_SUBSCRIPTIONS = 3
TIMEOUT_S = 20.0
"""Only a test that fails waits so long."""


@dataclass(frozen=True)
class Post:
    """A request that a receiver got, with header names in lower case."""

    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """A webhook: answers `status` with `answer`, once `open` is set."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        self.status = 200
        self.answer = b"{}"
        self.head = ""
        self.port = 0
        self.open = asyncio.Event()
        self.open.set()
        self._posted = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @asynccontextmanager
    async def listening(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        with closing(server):
            yield

    async def post(self, count: int = 1) -> Post:
        """Return the `count`-th request, when it has come."""
        async with asyncio.timeout(TIMEOUT_S), self._posted:
            await self._posted.wait_for(lambda: len(self.posts) >= count)
        return self.posts[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except asyncio.IncompleteReadError:  # the client connected and left
            writer.close()
            return
        fields = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in fields}
        body = await reader.readexactly(int(headers["content-length"]))
        async with self._posted:
            self.posts.append(Post(headers, body))
            self._posted.notify_all()
        await self.open.wait()
        length = f"content-length: {len(self.answer)}\r\nconnection: close\r\n{self.head}"
        writer.write(f"HTTP/1.1 {self.status} X\r\n{length}\r\n".encode() + self.answer)
        writer.close()


class SubscriptionWorld:
    """A ledger with streams and subscriptions; their alarms ring by a clock moved by hand."""

    def __init__(self, ledger: SqliteLedger, clock: HandClock, seed: str) -> None:
        self.clock = clock
        self.deaf = False
        self._store = ledger.objects
        self.updates = Updates(ledger.objects)
        self.webhooks = Webhooks(["127.0.0.1"])
        classes: dict[str, ObjectFactory] = {
            "stream": stream_class(StreamSettings(long_poll_s=0.0, on_event=self._on_event)),
            SUBSCRIPTION: subscription_class(self.updates, self.webhooks),
            INDEX_KEY.kind: index_class(self.updates, MAX_SUBSCRIPTIONS),
        }
        self.runtime = ObjectRuntime(
            ledger, classes, clock.now_ms, Random(seed).randbytes, timer=clock
        )

    def _on_event(self, event: StreamEvent) -> None:
        """Pass an event on; a deaf world loses its updates, as a crash does."""
        if not self.deaf:
            self.updates.on_event(event)

    # ---- streams ----

    async def put(self, path: str, body: bytes = b"[]") -> None:
        await self._stream("PUT", path, body, 201)

    async def append(self, path: str, body: bytes = b'{"n":1}') -> None:
        await self._stream("POST", path, body, 204)

    async def delete_stream(self, path: str) -> None:
        await self._stream("DELETE", path, b"", 204)

    async def tail(self, path: str) -> str:
        response = await self._stream("HEAD", path, b"", 200)
        tail = response.header("stream-next-offset")
        assert tail is not None
        return tail

    async def items(self, path: str) -> list[Any]:
        response = await self._stream("GET", path, b"", 200)
        assert isinstance(response.body, bytes)
        items: list[Any] = json.loads(response.body)
        return items

    async def _stream(self, method: str, path: str, body: bytes, status: int) -> ObjectResponse:
        fields = (("content-type", "application/json"),)
        request = ObjectRequest(method, f"{BASE}/v1/stream/{path}", fields, body)
        response = await self.runtime.fetch(ObjectKey("stream", path), request)
        assert response.status == status, response
        return response

    # ---- subscriptions ----

    async def ask(
        self, method: str, path: str, fields: Any = None, token: str | None = None
    ) -> tuple[int, Any]:
        """Status and JSON of an answer; `path` is what follows `__ds/`."""
        headers = () if token is None else (("authorization", f"Bearer {token}"),)
        body = b"" if fields is None else json.dumps(fields).encode()
        request = ObjectRequest(method, f"{BASE}/v1/stream/__ds/{path}", headers, body)
        async with asyncio.timeout(TIMEOUT_S):
            response = await self.runtime.fetch(object_of(path), request)
        assert isinstance(response.body, bytes)
        return response.status, json.loads(response.body) if response.body else None

    async def subscribe(self, name: str, **fields: Any) -> Any:
        status, said = await self.ask("PUT", f"subscriptions/{name}", fields)
        assert status == 201, said
        return said

    async def get(self, name: str) -> Any:
        status, said = await self.ask("GET", f"subscriptions/{name}")
        assert status == 200, said
        return said

    async def acked(self, name: str) -> dict[str, str]:
        return {link["path"]: link["acked_offset"] for link in (await self.get(name))["streams"]}

    async def next_alarm_ms(self) -> int:
        """Return when the next alarm is, once there is one that is not due already."""
        async with asyncio.timeout(TIMEOUT_S):
            while (at_ms := await next_alarm_ms(self._store) or 0) <= self.clock.now:
                await self.clock.parks.get()
        return at_ms

    async def until(self, name: str, field: str, value: object) -> None:
        """Wait until the subscription says so: alarms do their work in their own time."""
        async with asyncio.timeout(TIMEOUT_S):
            while (await self.get(name))[field] != value:
                await self.clock.parks.get()


@asynccontextmanager
async def subscriptions_at(
    folder: Path, *, now_ms: int | None = None, rings: bool = True
) -> AsyncIterator[SubscriptionWorld]:
    """Subscriptions on the ledger in `folder`, which may be there already."""
    clock = HandClock()
    clock.now = clock.now if now_ms is None else now_ms
    ledger = await SqliteLedger.open(folder / "ledger.db", clock.now_ms)
    world = SubscriptionWorld(ledger, clock, folder.name)
    parts = [asyncio.create_task(world.updates.run(world.runtime))]
    if rings:
        parts.append(asyncio.create_task(world.runtime.run()))
    try:
        yield world
    finally:
        for part in parts:
            part.cancel()
        await asyncio.wait(parts)
        await world.runtime.close()
        await world.webhooks.aclose()
        await ledger.close()
