"""The objects of an origin: streams, subscriptions to them, chats, and the operator's classes.

The setting `objects` names the operator's classes (MODULE:CLASS) whose code this origin has. A
wrangler file that an edge deploys says by its migrations which of them exist, each in a namespace
of its script; a class may be renamed and keeps its objects. An object of class `deployment` stores
that in the ledger, so that of all edges and origins that are told, one carries out a step. Its
alarm rings when a cron is due.

A chat records the latest stream of a conversation whose id a client has chosen. The edge sets it
when it has opened a stream, and asks for it when a client comes back with only the chat's id. The
messages are the client's to keep.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog
from pydantic import BaseModel

from tailrace.ledger.errors import (
    CallerError,
    ConfigError,
    Conflict,
    NotFound,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import STREAM_ID_BYTES, Durability
from tailrace.ledger.interface import Ledger, ObjectKey
from tailrace.ledger.objects.cron import next_after
from tailrace.ledger.objects.deployment import DEPLOYMENT, Deployment, Migration
from tailrace.ledger.objects.object import (
    ERASE,
    SCHEDULED,
    DurableObject,
    ObjectContext,
    ObjectFactory,
    ObjectLimits,
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
    ReadContext,
)
from tailrace.ledger.objects.runtime import ObjectRuntime
from tailrace.origin.config import StreamsConfig
from tailrace.origin.edges.peers import ALONE, Peers, PeerTransport
from tailrace.origin.generations.service import CHAT
from tailrace.origin.plugin import load_plugin
from tailrace.origin.streams.object import stream_class
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.subscriptions.index import MAX_SUBSCRIPTIONS, UPDATE, Updates, index_class
from tailrace.origin.subscriptions.object import subscription_class
from tailrace.origin.subscriptions.request import INDEX_KEY, SUBSCRIPTION
from tailrace.origin.subscriptions.webhook import Webhooks

LATEST = "latest"
KEPT_MS = 86_400_000
"""Time in ms for which a chat is known after its latest stream began."""

FIELD = "origin.objects"
SHAPE = "write MODULE:CLASS, where CLASS is a tailrace.ledger.objects.object.DurableObject"
KEPT = "deployment"
"""Name of the stored value."""
CRON_LIMIT_S = 900.0
"""Maximum seconds that a cron's handler may take."""
ERASE_RETRY_MS = 60_000
NAMES_AT_ONCE = 1000
Classes = Mapping[str, type[DurableObject]]
log = structlog.get_logger("objects")
HERE = frozenset((UPDATE,))
"""Operations whose data is in this process's memory, so that the subscription is moved here."""


class ChatObject(DurableObject):
    """A chat: remembers the latest stream of a conversation whose id a client has chosen."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Set the latest stream; the body of the PUT is its id."""
        if request.method != "PUT":
            raise CallerError(
                "a chat does not support this method", code="method_not_allowed", status=405
            )
        if len(request.body) != STREAM_ID_BYTES:
            raise CallerError("not the id of a stream", field="body")
        async with self.context.storage.transaction():
            self.context.storage.put(LATEST, request.body)
            self.context.storage.set_alarm(self.context.now_ms() + KEPT_MS)
        return ObjectResponse(204)

    async def alarm(self, retries: int) -> None:
        self.context.storage.delete_all()


async def latest_of(context: ReadContext, _request: ObjectRequest) -> ObjectResponse:
    """Return the id of the latest stream. Raises NotFound if none is known."""
    found = await context.ledger.objects.get(context.key, (LATEST,))
    if LATEST not in found:
        raise NotFound(
            "no such chat", hint="it has had no stream, or its latest stream has expired"
        )
    return ObjectResponse(200, body=found[LATEST])


CHATS = ReadableClass(make=ChatObject, read=latest_of, reads=frozenset(("GET",)))


def load_classes(specs: tuple[str, ...]) -> dict[str, type[DurableObject]]:
    """Return the operator's classes by their names.

    Raises ConfigError that says what is missing.
    """
    found: dict[str, type[DurableObject]] = {}
    for spec in specs:
        made, (module, _, name) = load_plugin(spec, FIELD, SHAPE), spec.partition(":")
        if not (isinstance(made, type) and issubclass(made, DurableObject)):
            why = f"{module} has no class {name} of objects"
            raise ConfigError(why, field=FIELD, hint=SHAPE)
        if name in found:
            raise ConfigError(f"two classes {name}", field=FIELD)
        found[name] = made
    return found


class Deployed(BaseModel):
    """State of a deployment object. `kinds` maps classes to their names in the ledger."""

    tags: list[str] = []
    kinds: dict[str, str] = {}
    erasing: list[str] = []
    """Namespaces of deleted classes that are not empty yet."""
    bound: list[str] = []
    due_ms: dict[str, int] = {}
    """When each cron is next due."""

    def migrated(self, wanted: Deployment, own: Classes, now_ms: int) -> Deployed:
        """Apply every migration step of `wanted`. Raises Conflict, which names the step."""
        after = self.model_copy(deep=True)
        told = {step.tag for step in wanted.migrations}
        if gone := [tag for tag in self.tags if tag not in told]:
            raise Conflict(
                f"{gone[0]} of {wanted.script} was carried out, and is not in the file any more",
                field="migrations",
                hint="leave it there; to take a class away, delete it in a further one",
            )
        for step in wanted.migrations:
            if step.tag not in self.tags:
                after._step(wanted.script, step)
        _require(after.kinds, own, "migrations")
        after.bound = sorted(set(wanted.bindings.values()))
        for name in after.bound:
            if name not in after.kinds:
                raise Conflict(f"no migration makes the class {name}", field="durable_objects")
        if wanted.crons and not _scheduled(after.bound, own):
            raise Conflict(
                "no class that is bound has scheduled(), so crons have nothing to run",
                field="triggers.crons",
                hint="write it, or take the crons out",
            )
        after.due_ms = {}
        for cron in wanted.crons:
            try:
                next_ms = next_after(cron, now_ms)
            except ValueError as error:
                raise CallerError(f"{cron!r} {error}", field="triggers.crons") from None
            if next_ms is not None:
                after.due_ms[cron] = min(next_ms, self.due_ms.get(cron, next_ms))
        return after

    def _step(self, script: str, step: Migration) -> None:
        for name in step.new_sqlite_classes:
            self.kinds.setdefault(name, f"{script}/{step.tag}/{name}")
        for each in step.renamed_classes:
            if each.before not in self.kinds or each.after in self.kinds:
                raise Conflict(
                    f"{each.before} cannot become {each.after}",
                    field=f"migrations: {step.tag}",
                    hint="there are: " + (", ".join(sorted(self.kinds)) or "none"),
                )
            self.kinds[each.after] = self.kinds.pop(each.before)
        for name in step.deleted_classes:
            if name not in self.kinds:
                raise Conflict(f"there is no {name} to delete", field=f"migrations: {step.tag}")
            self.erasing.append(self.kinds.pop(name))
        self.tags.append(step.tag)

    def rings_at_ms(self, now_ms: int) -> int | None:
        """When there is work next; None if never."""
        return min((*self.due_ms.values(), *([now_ms] if self.erasing else [])), default=None)


def _require(names: Iterable[str], own: Classes, where: str) -> None:
    missing = sorted(set(names) - own.keys())
    if missing:
        raise Conflict(
            f"this origin has no class {missing[0]}",
            field=where,
            hint="its setting origin.objects names classes; there are: "
            + (", ".join(sorted(own)) or "none"),
        )


def _scheduled(names: list[str], own: Classes) -> list[str]:
    """Return the classes that have crons."""
    return [name for name in names if own[name].scheduled is not DurableObject.scheduled]


class DeploymentObject(DurableObject):
    """Deployment of a wrangler file: its classes, their migrations, and crons."""

    def __init__(self, context: ObjectContext, own: Classes) -> None:
        super().__init__(context)
        self._own = own

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        """Deploy the body of the PUT, and return the stored state."""
        wanted = Deployment.parse(request.body)
        before = await self._kept()
        now_ms = self.context.now_ms()
        after = before.migrated(wanted, self._own, now_ms)
        is_asleep = self.context.storage.get_alarm() is None
        if after != before or (is_asleep and after.rings_at_ms(now_ms) is not None):
            log.info("deployed", script=wanted.script, classes=sorted(after.kinds))
            self._keep(after)
        return ObjectResponse(200, body=after.model_dump_json().encode())

    async def alarm(self, retries: int) -> None:
        now_ms = self.context.now_ms()
        kept = await self._kept()
        for cron, at_ms in list(kept.due_ms.items()):
            if at_ms <= now_ms:
                await self._run(cron, at_ms, kept)
        left = [kind for kind in kept.erasing if not await self._erased(kind)]
        kept = await self._kept()  # it may have been deployed again meanwhile
        for cron, at_ms in list(kept.due_ms.items()):
            if at_ms <= now_ms:
                next_ms = next_after(cron, self.context.now_ms())
                assert next_ms is not None, "it has come before"
                kept.due_ms[cron] = next_ms
        kept.erasing = [kind for kind in kept.erasing if kind in left]
        self._keep(kept, ERASE_RETRY_MS)

    async def _run(self, cron: str, at_ms: int, kept: Deployed) -> None:
        """Run a cron in every class that takes crons, in the object of its name; log failures."""
        request = ObjectRequest.internal(SCHEDULED, str(at_ms).encode())
        script = self.context.key.name
        for name in _scheduled([one for one in kept.bound if one in self._own], self._own):
            try:
                async with asyncio.timeout(CRON_LIMIT_S):
                    await self.context.call(ObjectKey(kept.kinds[name], cron), request)
            except Exception as error:  # the operator's code may raise anything; other crons go on
                log.exception("cron failed", script=script, cron=cron, object=name, exc_info=error)
            else:
                log.info("cron", script=script, cron=cron, object=name, at_ms=at_ms)

    async def _erased(self, kind: str) -> bool:
        """Return True if no data of these objects is left."""
        request = ObjectRequest.internal(ERASE)
        try:
            while names := await self.context.ledger.objects.names(kind, limit=NAMES_AT_ONCE):
                for name in names:
                    await self.context.call(ObjectKey(kind, name), request)
        except TailraceError as error:
            log.warning("objects not erased", kind=kind, error=str(error))
            return False
        return True

    async def _kept(self) -> Deployed:
        raw = await self.context.storage.get(KEPT)
        return Deployed() if raw is None else Deployed.model_validate_json(raw)

    def _keep(self, deployed: Deployed, erase_in_ms: int = 0) -> None:
        self.context.storage.put(KEPT, deployed.model_dump_json().encode())
        at_ms = deployed.rings_at_ms(self.context.now_ms() + erase_in_ms)
        if at_ms is None:
            self.context.storage.delete_alarm()
        else:
            self.context.storage.set_alarm(at_ms)


class OriginObjects:
    """The object runtime with its classes. `run` it, and `close` it before the ledger."""

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

        `transport` is used for connections to other origins, `own` the operator's classes.
        """
        self._on = config.subscriptions
        self._own = own or {}
        self._scripts: dict[str, Deployed] = {}
        self._updates = Updates(ledger.objects)
        self._webhooks = Webhooks(config.webhook_hosts, now_ms=now_ms)
        settings = StreamSettings(
            long_poll_s=config.long_poll_s,
            sse_s=config.sse_s,
            durability=Durability.from_word(config.durability),
            on_event=self._updates.on_event if self._on else None,
        )
        self._classes: dict[str, ObjectFactory] = {
            "stream": stream_class(settings),
            CHAT: CHATS,
            DEPLOYMENT: partial(DeploymentObject, own=self._own),
            # When subscriptions are off they do nothing, not even when an earlier alarm rings.
            SUBSCRIPTION: DurableObject,
            INDEX_KEY.kind: DurableObject,
        }
        if self._on:
            self._classes[SUBSCRIPTION] = subscription_class(self._updates, self._webhooks)
            self._classes[INDEX_KEY.kind] = index_class(self._updates)
        # Delivering a wake takes as long as its webhook does.
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
            await self.load()  # another origin has been told of it
        return await self.runtime.fetch_here(key, request)

    async def deploy(self, script: str, request: ObjectRequest) -> ObjectResponse:
        """Deploy a wrangler file's classes and crons. Raises Conflict if that is impossible."""
        response = await self.runtime.fetch(ObjectKey(DEPLOYMENT, script), request)
        assert isinstance(response.body, bytes)
        self._adopt(script, response.body)
        return ObjectResponse(204)

    def kind_of(self, called: str) -> str:
        """Return the namespace of SCRIPT/CLASS. Raises Unavailable where nothing is deployed."""
        script, _, name = called.rpartition("/")
        deployed = self._scripts.get(script)
        if deployed is None:
            raise Unavailable(f"{script} is not deployed here", code="not_deployed")
        if name not in deployed.kinds:
            raise NotFound(f"no class {name} is deployed", field="kind")
        return deployed.kinds[name]

    async def load(self) -> None:
        """Load what is deployed, from the ledger."""
        store = self.runtime.ledger.objects
        for script in await store.names(DEPLOYMENT):
            found = await store.get(ObjectKey(DEPLOYMENT, script), (KEPT,))
            if KEPT in found:
                self._adopt(script, found[KEPT])

    def _adopt(self, script: str, raw: bytes) -> None:
        """Recreate loaded objects of namespaces that have another class from now on."""
        self._scripts[script] = deployed = Deployed.model_validate_json(raw)
        wanted: dict[str, ObjectFactory] = {
            kind: self._own[name] for name, kind in deployed.kinds.items() if name in self._own
        }
        for kind, made in (wanted | dict.fromkeys(deployed.erasing, DurableObject)).items():
            if self._classes.get(kind) is not made:
                self._classes[kind] = made
                self.runtime.reset(kind)

    async def run(self) -> None:
        """Run alarms, eviction and updates, until cancelled."""
        await self.load()
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self.runtime.run())
            if self._on:
                parts.create_task(self._updates.run(self.runtime))

    async def close(self) -> None:
        await self.runtime.close()
        await self._peers.close()
        await self._webhooks.aclose()
