"""What each subscription has not heard yet of the streams that it wants to know of.

Changes of streams are dropped into a subscription's letterbox, the later over the earlier,
and the subscription is roused to empty it. So a burst costs one letter a stream, and what a
subscription is asked right after a change it answers knowing of it.

A letterbox is in memory. What is lost with it, in a crash or on another origin, is found
again by looking at every stream: each subscription is asked to when it is first seen here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from ledger.errors import TailraceError
from ledger.interface import ObjectKey, ObjectStore
from ledger.objects.object import ObjectRequest, ObjectResponse
from ledger.streams.settings import Change, StreamEvent
from ledger.subscriptions.interest import Directory
from ledger.subscriptions.route import INDEX_KEY, SUBSCRIPTION

HEAR = "HEAR"
"""The method that rouses a subscription to empty its letterbox."""
LOOK = "LOOK"
"""The method that has it look at every stream that it wants to know of."""
ENTRY = "entry/"
"""Names of the index's values: one for each subscription, what it wants to know of."""
VERSION = "version"
"""A value of the index that changes with every entry."""

RELOAD_S = 1.0
"""How late a subscription that was made on another origin may be seen here."""
MAX_ROUSED = 64
"""Subscriptions roused at the same time."""

log = structlog.get_logger("subscriptions")


class Objects(Protocol):
    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...


@dataclass(frozen=True, slots=True)
class Letter:
    """What has happened to a stream: whether it was deleted, and where it ends if it is there."""

    deleted: bool = False
    tail: str | None = None

    def then(self, event: StreamEvent) -> Letter:
        if event.kind is Change.DELETED:
            return Letter(deleted=True)
        return Letter(self.deleted, event.tail_offset)


class News:
    """Letterboxes. `on_event` is for `StreamSettings`; `run` it beside the object runtime."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._directory = Directory()
        self._letters: dict[str, dict[str, Letter]] = {}
        self._to_rouse: dict[str, str] = {}  # the method for each, oldest first
        self._roused: dict[str, asyncio.Task[None]] = {}
        self._version: bytes | None = None
        self._stir = asyncio.Event()

    # ---- for streams and subscriptions ----

    def on_event(self, event: StreamEvent) -> None:
        """A stream has changed; says so to everybody who wants to know."""
        for name in self._directory.interested(event.path):
            box = self._letters.setdefault(name, {})
            box[event.path] = box.get(event.path, Letter()).then(event)
            self._rouse(name, HEAR)

    def enter(self, name: str, entry: bytes) -> None:
        """From now on the subscription hears of what `entry` says."""
        self._directory.enter(name, entry)

    def leave(self, name: str) -> None:
        self._directory.leave(name)
        self._letters.pop(name, None)
        self._to_rouse.pop(name, None)

    def empty(self, name: str) -> dict[str, Letter]:
        """The letters that the subscription has not had, by the name of their stream."""
        return self._letters.pop(name, {})

    # ---- at work ----

    async def run(self, objects: Objects) -> None:
        """Rouse those who have letters, until cancelled."""
        try:
            while True:
                self._stir.clear()
                try:
                    await self._reload()
                except TailraceError as error:  # a store that is away may come back
                    log.warning("subscriptions.unknown", error=str(error))
                while len(self._roused) < MAX_ROUSED and self._start(objects):
                    pass
                await self._wait()
        finally:
            for task in self._roused.values():
                task.cancel()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(RELOAD_S):
                await self._stir.wait()
        except TimeoutError:
            pass  # time to reload

    async def _reload(self) -> None:
        """Take in what other origins, or an earlier life of this one, have entered."""
        found = await self._store.get(INDEX_KEY, [VERSION])
        if found.get(VERSION) == self._version:
            return
        entries = await self._store.list(INDEX_KEY, prefix=ENTRY)
        stored = {name.removeprefix(ENTRY): entry for name, entry in entries.items()}
        for name in self._directory:
            if name not in stored:
                self.leave(name)
        for name, entry in stored.items():
            if self._directory.entry(name) != entry:
                self.enter(name, entry)
                self._rouse(name, LOOK)
        self._version = found.get(VERSION)

    def _rouse(self, name: str, method: str) -> None:
        if method == LOOK or name not in self._to_rouse:
            self._to_rouse[name] = method
        self._stir.set()

    def _start(self, objects: Objects) -> bool:
        """Rouse the one that has waited longest; False if there is none."""
        name = next((name for name in self._to_rouse if name not in self._roused), None)
        if name is None:
            return False
        method = self._to_rouse.pop(name)
        work = self._ask(objects, ObjectKey(SUBSCRIPTION, name), method)
        task = self._roused[name] = asyncio.create_task(work)
        task.add_done_callback(partial(self._ended, name))
        return True

    async def _ask(self, objects: Objects, key: ObjectKey, method: str) -> None:
        try:
            await objects.fetch(key, ObjectRequest(method, f"object://{key.kind}"))
        except TailraceError as error:
            log.warning("subscription.deaf", name=key.name, error=str(error))
            # What it took from its letterbox may be lost with the event.
            await asyncio.sleep(RELOAD_S)
            self._rouse(key.name, LOOK)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._roused[name]
        self._stir.set()
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("subscription.failed", name=name, exc_info=fault)
