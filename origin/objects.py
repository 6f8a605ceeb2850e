"""The objects of an origin: streams, the subscriptions to them, chats, the operator's own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from ledger.deployment import DEPLOYMENT
from ledger.errors import NotFound
from ledger.frame import Durability
from ledger.interface import Ledger, ObjectKey
from ledger.objects.object import (
    DurableObject,
    ObjectFactory,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
)
from ledger.objects.runtime import ObjectRuntime
from origin.chats import CHAT, CHATS
from origin.config import StreamsConfig
from origin.deployments import Classes, Deployed, DeploymentObject, Namespaces
from origin.edges.peers import PLAIN, Peers, Way
from origin.streams.config import StreamSettings
from origin.streams.object import stream_class
from origin.subscriptions.index import MAX_SUBSCRIPTIONS, UPDATE, Updates, index_class
from origin.subscriptions.object import subscription_class
from origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from origin.subscriptions.webhook import Webhooks

HERE = frozenset((UPDATE,))
"""What this process has to tell lies in its memory: the subscription comes here for it."""


class OriginObjects:
    """The object runtime with what its classes need. `run` it, and `close` it before the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        config: StreamsConfig,
        now_ms: Callable[[], int],
        random: Callable[[int], bytes] = secrets.token_bytes,
        *,
        way: Way = PLAIN,
        own: Classes | None = None,
    ) -> None:
        """`way` is how other origins of the ledger are reached, `own` the operator's classes."""
        self._on = config.subscriptions
        self._updates = Updates(ledger.objects)
        self._webhooks = Webhooks(config.webhook_hosts, now_ms=now_ms)
        settings = StreamSettings(
            long_poll_s=config.long_poll_s,
            sse_s=config.sse_s,
            durability=Durability.from_word(config.durability),
            on_event=self._updates.on_event if self._on else None,
        )
        classes: dict[str, ObjectFactory] = {
            "stream": stream_class(settings),
            CHAT: CHATS,
            DEPLOYMENT: partial(DeploymentObject, own=own or {}),
            # Switched off they do nothing, also when an alarm rings that they had set before.
            SUBSCRIPTION: DurableObject,
            INDEX_KEY.kind: DurableObject,
        }
        if self._on:
            classes[SUBSCRIPTION] = subscription_class(self._updates, self._webhooks)
            classes[INDEX_KEY.kind] = index_class(self._updates)
        self._namespaces = Namespaces(own or {}, classes)
        # A wake waits for a webhook as long as that takes.
        limits = ObjectLimits(alarms_at_once={SUBSCRIPTION: MAX_SUBSCRIPTIONS} if self._on else {})
        self._peers = Peers(ledger.objects.seize, HERE, way)
        self.runtime = ObjectRuntime(
            ledger, classes, now_ms, random, limits=limits, forward=self._peers.ask
        )

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        if not self._on and key.kind in (SUBSCRIPTION, INDEX_KEY.kind):
            raise NotFound(
                "this origin has no subscriptions",
                code="subscriptions_off",
                hint="its operator can set streams.subscriptions = true",
            )
        return await self.runtime.fetch(key, request)

    async def fetch_here(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse:
        if not self._namespaces.has(key.kind):
            await self.load()  # another origin has been told of it
        return await self.runtime.fetch_here(key, request)

    async def deploy(self, script: str, request: ObjectRequest) -> ObjectResponse:
        """Have a wrangler file's classes and crons. Raises Conflict where that cannot be."""
        response = await self.runtime.fetch(ObjectKey(DEPLOYMENT, script), request)
        assert isinstance(response.body, bytes)
        self._reset(self._namespaces.adopt(script, Deployed.model_validate_json(response.body)))
        return ObjectResponse(204)

    def kind_of(self, called: str) -> str:
        """The class in the ledger of what a deployment calls SCRIPT/CLASS."""
        return self._namespaces.kind_of(called)

    async def load(self) -> None:
        """What the ledger says is deployed."""
        self._reset(await self._namespaces.load(self.runtime.ledger.objects))

    def _reset(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.runtime.reset(kind)

    async def run(self) -> None:
        """Alarms, eviction and updates, until cancelled."""
        await self.load()
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self.runtime.run())
            if self._on:
                parts.create_task(self._updates.run(self.runtime))

    async def close(self) -> None:
        await self.runtime.close()
        await self._peers.close()
        await self._webhooks.aclose()
