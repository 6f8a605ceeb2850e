"""Reads a stream from the ledger, where a fork lies in several streams, and waits for more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from ledger.errors import NotFound
from ledger.interface import Ledger
from origin.streams.config import ForkOrder, StreamConfig
from origin.streams.fork import Cut, Cutter
from origin.streams.json import Steps
from origin.streams.offset import Offset
from origin.streams.page import FIRST_FRAMES, Page, PageBuilder, Tip, renumbered
from origin.streams.protocol import is_json

SLICE_STEPS = 64
"""Steps of reading JSON between two turns of others: 1 to 3 ms."""

T = TypeVar("T")


async def in_slices(steps: Steps[T]) -> T:
    """Do the work, and let whoever else is in the process have a turn now and then."""
    while True:
        try:
            for _ in range(SLICE_STEPS):
                next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)


class StreamReader:
    """Reads a stream as its config has it: its own frames behind those that it has inherited.

    Holds nothing between two calls, so a reader that does not come back costs nothing.
    Methods raise `NotFound` once the stream has been deleted.
    """

    def __init__(self, ledger: Ledger, config: StreamConfig) -> None:
        self._ledger, self._stream = ledger, config.stream
        self._parts, self._base = config.parts, config.base
        self._json = is_json(config.content_type)

    async def tip(self) -> Tip:
        info = await self._ledger.info(self._stream)
        return Tip(self._base + info.next_index - info.ended, info.ended)

    async def page(self, start: Offset | None) -> Page:
        """What is there from `start` on, or at the end; CallerError if it is no position."""
        tip = await self.tip()
        builder = PageBuilder(tip.offset if start is None else start, tip, json=self._json)
        index = builder.first_index
        while not builder.full:
            frames = await self._frames(index, builder.wants)
            builder.feed(frames)
            index += len(frames)
        return builder.page()

    async def wait_page(self, start: Offset | None, timeout_s: float) -> Page:
        """A page with data or of a closed stream, or after the timeout one without."""
        page = await self.page(start)

        async def ready() -> bool:
            nonlocal page
            page = await self.page(page.next)
            return bool(page) or page.closed

        if not page and not page.closed:
            await self._until(ready, timeout_s)
        return page

    async def wait_frames(self, index: int, limit: int, timeout_s: float) -> list[bytes]:
        """At most `limit` frames from `index` on, the StreamEnd too; none if none come in time."""
        frames: list[bytes] = []

        async def ready() -> bool:
            nonlocal frames
            tip = await self.tip()
            room = min(tip.index + tip.closed - index, limit)
            frames = await self._numbered(index, room) if room > 0 else []
            return bool(frames)

        if not await ready():
            await self._until(ready, timeout_s)
        return frames

    async def cut(self, order: ForkOrder) -> Cut:
        """Where a fork leaves this stream; CallerError if there is no such place."""
        tip = await self.tip()
        cutter = Cutter(order, tip, json=self._json)
        index = cutter.first_index
        while cutter.cut is None:
            room = min(tip.index - index, FIRST_FRAMES)
            frames = await self._frames(index, room) if room > 0 else []
            await in_slices(cutter.feed(frames))
            index += len(frames)
        return cutter.cut

    async def _frames(self, index: int, limit: int) -> list[bytes]:
        """Some frames from `index` on: at least one, as many as `limit` at most."""
        stream, begin, room = self._stream, 0, limit
        for part in self._parts:
            if index < part.end:
                stream, room = part.stream, min(limit, part.end - index)
                break
            begin = part.end
        frames = await self._ledger.frames(stream, index - begin, room)
        if not frames:
            raise NotFound("the stream was deleted")
        return frames

    async def _numbered(self, index: int, limit: int) -> list[bytes]:
        frames = await self._frames(index, limit)
        if not self._parts:
            return frames
        return [renumbered(raw, at) for at, raw in enumerate(frames, index)]

    async def _until(self, ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Ask `ready` now and after each release, until it says so or the time is over."""
        woken = asyncio.Event()
        await self._ledger.info(self._stream)  # so that it may be watched
        self._ledger.watch(self._stream, woken.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not await ready():
                        await woken.wait()
                        woken.clear()
        finally:
            self._ledger.unwatch(self._stream, woken.set)
