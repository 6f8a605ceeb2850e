"""The object runtime of an origin, with all classes of objects that it serves.

The classes are those of streams, subscriptions, chats, byte logs and deployments, and those of the
operator.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

import structlog
from pydantic import ValidationError

from tailrace.ledger.errors import Damaged, NotFound, Unavailable
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Ledger, ObjectKey
from tailrace.ledger.objects.deployment import DEPLOYMENT
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectFactory,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.origin.config import StreamsConfig
from tailrace.origin.edges.peers import ALONE, Peers, PeerTransport
from tailrace.origin.generations.service import CHAT
from tailrace.origin.objects.byte_logs import BYTE_LOG, BYTE_LOGS
from tailrace.origin.objects.chats import Chats
from tailrace.origin.objects.deployments import KEPT, Deployed, DeploymentObject
from tailrace.origin.objects.operator_classes import Classes
from tailrace.origin.streams.object import stream_class
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.subscriptions.index import MAX_SUBSCRIPTIONS, UPDATE, Updates, index_class
from tailrace.origin.subscriptions.object import subscription_class
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from tailrace.origin.subscriptions.webhook import Webhooks

HERE = frozenset((UPDATE,))
"""Operations that need data in this process's memory. If another origin runs the object, this
origin takes the object over before such an operation."""

LOAD_AGAIN_S = 5.0
"""Seconds until deployments that could not be read at the start are read again."""

log = structlog.get_logger("objects")


class OriginObjects:
    """The object runtime with its classes. It must be closed before the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        config: StreamsConfig,
        now_ms: Callable[[], int],
        random: Callable[[int], bytes] = secrets.token_bytes,
        *,
        transport: PeerTransport = ALONE,
        own: Classes | None = None,
    ) -> None:
        """Create the runtime.

        `transport` is used for connections to other origins. `own` are the operator's classes.
        """
        self._on = config.subscriptions
        self._own = own or {}
        self._scripts: dict[str, Deployed] = {}
        self._updates = Updates(ledger.objects)
        self._webhooks = Webhooks(config.webhook_hosts, now_ms=now_ms)
        self.chats = Chats(ledger)
        settings = StreamSettings(
            long_poll_s=config.long_poll_s,
            sse_s=config.sse_s,
            durability=Durability.from_word(config.durability),
            on_event=self._updates.on_event if self._on else None,
        )
        self._classes: dict[str, ObjectFactory] = {
            "stream": stream_class(settings),
            CHAT: self.chats.kind,
            BYTE_LOG: BYTE_LOGS,
            DEPLOYMENT: partial(DeploymentObject, own=self._own),
            # While subscriptions are switched off, these objects do nothing, even if an alarm that
            # was set earlier rings.
            SUBSCRIPTION: DurableObject,
            INDEX_KEY.kind: DurableObject,
        }
        if self._on:
            self._classes[SUBSCRIPTION] = subscription_class(self._updates, self._webhooks)
            self._classes[INDEX_KEY.kind] = index_class(self._updates)
        # An alarm of a subscription delivers a webhook, which may be slow. So all subscriptions may
        # run their alarms at the same time.
        limits = ObjectLimits(alarms_at_once={SUBSCRIPTION: MAX_SUBSCRIPTIONS} if self._on else {})
        self._peers = Peers(ledger.objects.seize, HERE, transport)
        self.runtime = ObjectRuntime(
            ledger, self._classes, now_ms, random, limits=limits, forward=self._peers.ask
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
        if key.kind not in self._classes:
            await self.load()  # the class may have been deployed through another origin
        return await self.runtime.fetch_here(key, request)

    async def deploy(self, script: str, request: ObjectRequest) -> ObjectResponse:
        """Deploy a wrangler file's classes and crons. Raises Conflict if that is impossible."""
        response = await self.runtime.fetch(ObjectKey(DEPLOYMENT, script), request)
        assert isinstance(response.body, bytes)
        self._adopt(script, response.body)
        return ObjectResponse(204)

    def kind_of(self, called: str) -> str:
        """Return the namespace of a class, given as SCRIPT/CLASS.

        Raises Unavailable if the script is not deployed, and NotFound if it has no such class.
        """
        script, _, name = called.rpartition("/")
        deployed = self._scripts.get(script)
        if deployed is None:
            raise Unavailable(f"{script} is not deployed here", code="not_deployed")
        if name not in deployed.kinds:
            raise NotFound(f"no class {name} is deployed", field="kind")
        return deployed.kinds[name]

    async def load(self) -> None:
        """Read all deployments from the ledger, and serve the classes that they name.

        A damaged deployment is logged and left out. If a deployment cannot be read now, the others
        are served nevertheless.

        Raises:
            Unavailable: A deployment, or their list, cannot be read now.
            Damaged: The list of deployments is damaged.
        """
        store = self.runtime.ledger.objects
        unread: Unavailable | None = None
        for script in await store.names(DEPLOYMENT):
            try:
                found = await store.get(ObjectKey(DEPLOYMENT, script), (KEPT,))
                if KEPT in found:
                    self._adopt(script, found[KEPT])
            except Unavailable as error:
                unread = error
            except (Damaged, ValidationError) as error:
                log.error("deployment.damaged", script=script, error=str(error))
        if unread is not None:
            raise unread

    async def _try_to_load(self) -> bool:
        """Load the deployments; log why and return False if not all of them could be read."""
        try:
            await self.load()
        except (Unavailable, Damaged) as error:
            log.warning("deployments.unread", error=str(error), again_in_s=LOAD_AGAIN_S)
            return False
        return True

    async def _load_later(self) -> None:
        while True:
            await asyncio.sleep(LOAD_AGAIN_S)
            if await self._try_to_load():
                return

    def _adopt(self, script: str, raw: bytes) -> None:
        """Serve the classes of a script's deployment from now on; `raw` is its stored state.

        Loaded objects are recreated if their namespace now has another class.
        """
        self._scripts[script] = deployed = Deployed.model_validate_json(raw)
        wanted: dict[str, ObjectFactory] = {
            kind: self._own[name] for name, kind in deployed.kinds.items() if name in self._own
        }
        for kind, made in (wanted | dict.fromkeys(deployed.erasing, DurableObject)).items():
            if self._classes.get(kind) is not made:
                self._classes[kind] = made
                self.runtime.reset(kind)

    async def run(self) -> None:
        """Run the objects' tasks until cancelled.

        They ring alarms, evict idle objects, exchange the presence of chats with other origins, and
        update subscriptions. Deployments that cannot be read now are loaded later.
        """
        async with asyncio.TaskGroup() as parts:
            if not await self._try_to_load():
                parts.create_task(self._load_later())
            parts.create_task(self.runtime.run())
            parts.create_task(self.chats.presence.run())
            if self._on:
                parts.create_task(self._updates.run(self.runtime))

    async def close(self) -> None:
        await self.runtime.close()
        await self._peers.close()
        await self._webhooks.aclose()
