"""What a subscription can see of streams by looking at them, instead of hearing of them."""

from __future__ import annotations

from collections.abc import Iterable

from ledger.interface import ObjectKey
from ledger.objects.object import ObjectContext, ObjectRequest
from ledger.streams.header import NEXT_OFFSET
from ledger.subscriptions.glob import Glob
from ledger.subscriptions.notice import stream_url
from ledger.subscriptions.state import Config

NAMES_PER_READ = 1_000
STREAM = "stream"
"""The class of objects that are streams."""


class Survey:
    """Looks with the rights of an object: each look is a time outside for it."""

    def __init__(self, context: ObjectContext) -> None:
        self._context = context

    async def tail(self, base: str, path: str) -> str | None:
        """Where a stream ends; None if there is none."""
        request = ObjectRequest("HEAD", stream_url(base, path))
        response = await self._context.call(ObjectKey(STREAM, path), request)
        return response.header(NEXT_OFFSET) if response.status == 200 else None

    async def tails(self, base: str, paths: Iterable[str]) -> dict[str, str | None]:
        return {path: await self.tail(base, path) for path in paths}

    async def matching(self, config: Config) -> list[str]:
        """The names of existing streams that the pattern matches."""
        if config.pattern is None:
            return []
        glob, found, last = Glob(config.pattern), list[str](), ""
        while True:
            reading = self._context.ledger.objects.names(STREAM, after=last, limit=NAMES_PER_READ)
            names = await self._context.outside(reading)
            found += [n for n in names if glob.matches(n) and n != config.wake_stream]
            if len(names) < NAMES_PER_READ:
                return found
            last = names[-1]
