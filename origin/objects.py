"""The objects of an origin: its streams, and the subscriptions to them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

from ledger.frame import Durability
from ledger.interface import Ledger, ObjectKey
from ledger.objects.object import ObjectRequest, ObjectResponse
from ledger.objects.runtime import ObjectRuntime
from ledger.streams.object import stream_class
from ledger.streams.settings import StreamSettings
from ledger.subscriptions.index import index_class
from ledger.subscriptions.news import News
from ledger.subscriptions.object import subscription_class
from ledger.subscriptions.route import INDEX_KEY, SUBSCRIPTION
from ledger.subscriptions.webhook import Webhooks
from origin.config import StreamsConfig


class OriginObjects:
    """The object runtime with what its classes need. `run` it, and `close` it before the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        config: StreamsConfig,
        now_ms: Callable[[], int],
        random: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._news = News(ledger.objects)
        self._webhooks = Webhooks(config.webhook_hosts)
        settings = StreamSettings(
            long_poll_s=config.long_poll_s,
            sse_s=config.sse_s,
            durability=Durability.from_word(config.durability),
            on_event=self._news.on_event,
        )
        classes = {
            "stream": stream_class(settings),
            SUBSCRIPTION: subscription_class(self._news, self._webhooks),
            INDEX_KEY.kind: index_class(self._news),
        }
        self.runtime = ObjectRuntime(ledger, classes, now_ms, random)

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        return await self.runtime.fetch(key, request)

    async def run(self) -> None:
        """Alarms, eviction and news, until cancelled."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self.runtime.run())
            parts.create_task(self._news.run(self.runtime))

    async def close(self) -> None:
        await self.runtime.close()
        await self._webhooks.aclose()
