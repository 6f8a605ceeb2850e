"""A subscription as an object: when streams grow, it notifies (wakes) a webhook or a worker.

This is the HTTP side of the reserved API of the Durable Streams protocol;
`origin/subscriptions/subscription.py` has the rules. The object's alarm delivers wakes, so each
wake is delivered at least once, even if a process dies. A wake has a generation, by which requests
of workers that were woken earlier are refused.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping

import structlog

from tailrace.ledger.errors import CallerError, Conflict, NotFound, Unavailable
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import (
    DurableObject,
    ObjectContext,
    ObjectFactory,
    ObjectRequest,
    ObjectResponse,
)
from tailrace.origin.streams.json_messages import JSON_TYPE
from tailrace.origin.streams.protocol import CONTENT_TYPE, NEXT_OFFSET, answer, error_answer, parted
from tailrace.origin.subscriptions.index import ENTER, LEAVE, NAME, SCAN, SIGN, UPDATE, Updates
from tailrace.origin.subscriptions.request import (
    INDEX_KEY,
    JWKS,
    ROOT,
    Action,
    ClaimBody,
    CreateBody,
    StreamsBody,
    base_of,
    parse,
    route_of,
    url_of,
)
from tailrace.origin.subscriptions.state import (
    EMPTY,
    MAX_LINKS,
    SECRET_BYTES,
    Config,
    SubscriptionState,
    entry_of,
)
from tailrace.origin.subscriptions.subscription import Glob, Phase, WakeEvent
from tailrace.origin.subscriptions.webhook import SIGNATURE, Webhooks

NAMES_PER_READ = 1_000
"""Number of stream names that are read at a time for matching."""
STREAM = "stream"
"""Class of the objects that are streams."""

log = structlog.get_logger("subscriptions")


class Subscription(DurableObject):
    """The object of one subscription; `updates` queues changes of streams."""

    def __init__(self, context: ObjectContext, updates: Updates, webhooks: Webhooks) -> None:
        super().__init__(context)
        self._updates = updates
        self._webhooks = webhooks
        self._state: SubscriptionState | None = None
        self._loaded = False
        # Names of streams that had an update since the current scan began; None without a scan.
        self._updated: set[str] | None = None
        self._actions: dict[
            tuple[Action, str], Callable[[ObjectRequest], Awaitable[ObjectResponse]]
        ] = {
            (Action.ITSELF, "PUT"): self._put,
            (Action.ITSELF, "GET"): self._get,
            (Action.ITSELF, "DELETE"): self._delete,
            (Action.STREAMS, "POST"): self._add_streams,
            (Action.STREAM, "DELETE"): self._remove_stream,
            (Action.CALLBACK, "POST"): self._callback,
            (Action.CLAIM, "POST"): self._claim,
            (Action.ACK, "POST"): self._ack,
            (Action.RELEASE, "POST"): self._release,
        }

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        await self._load()
        try:
            if request.operation == SCAN:
                return await self._scan()
            self._take_updates()
            if request.operation == UPDATE:
                return answer(204)
            act = self._actions.get((route_of(request.url).action, request.method))
            if act is None:
                raise CallerError(
                    f"this path does not support the method {request.method}",
                    code="method_not_allowed",
                    status=405,
                )
            return await act(request)
        except CallerError as error:
            return error_answer(error)

    async def alarm(self, retries: int) -> None:
        """Notify the webhook or the workers, or end a lease, whichever is due."""
        await self._load()
        self._take_updates()
        state, now_ms = self._state, self.context.now_ms()
        if state is None:
            return
        lease_until_ms = state.standing.lease_until_ms
        if lease_until_ms is not None and lease_until_ms <= now_ms:
            state.step(WakeEvent.EXPIRED)
        notify_at_ms = state.standing.notify_at_ms
        if notify_at_ms is not None and notify_at_ms <= now_ms:
            await self._tell(state)
        if self._state is not None:
            self._state.arm()

    async def _load(self) -> None:
        if not self._loaded:
            self._state = await SubscriptionState.load(self.context)
            self._loaded = True

    def _existing(self) -> SubscriptionState:
        if self._state is None:
            raise NotFound("no such subscription", code="SUBSCRIPTION_NOT_FOUND")
        return self._state

    # ---- waking ----

    async def _tell(self, state: SubscriptionState) -> None:
        """Deliver the current wake: notify the webhook or the workers.

        The result is recorded unless another wake has replaced this one in the meantime.
        """
        wake_id = state.standing.wake_id
        event: WakeEvent | None = None
        told: Mapping[str, str] = {}
        try:
            if state.config.is_webhook:
                event, told = await self._call_webhook(state)
            else:
                await self._write_wake(state)
        except Unavailable as error:
            log.warning("wake.not_delivered", subscription=self.context.key.name, error=str(error))
            event = WakeEvent.FAILED
        if self._state is not state or state.standing.wake_id != wake_id:
            return
        if event is None:
            state.told()
            return
        if event is WakeEvent.DONE:
            for path, offset in told.items():
                state.links.ack(path, offset)
        state.step(event)

    async def _call_webhook(self, state: SubscriptionState) -> tuple[WakeEvent, Mapping[str, str]]:
        """Send the webhook a POST which says that there is work.

        Return the result, and the end offset of each stream that the POST names, keyed by path.
        """
        name, config, standing = self.context.key.name, state.config, state.standing
        assert config.webhook_url is not None
        streams = state.told_streams()
        fields = {
            "subscription_id": name,
            "wake_id": standing.wake_id,
            "generation": standing.generation,
            "streams": streams,
            "callback_url": url_of(config.base, name, Action.CALLBACK),
            "callback_token": state.token(),
        }
        body = json.dumps(fields).encode()
        signed = await self.context.call(INDEX_KEY, ObjectRequest.internal(SIGN, body))
        assert isinstance(signed.body, bytes)
        headers = {"content-type": JSON_TYPE, SIGNATURE: signed.body.decode()}
        posting = self._webhooks.post(config.webhook_url, body, headers)
        delivery = await self.context.outside(posting)
        told = {str(stream["path"]): str(stream["tail_offset"]) for stream in streams}
        if not delivery.taken:
            log.warning("webhook.failed", subscription=name, reason=delivery.reason)
            return WakeEvent.FAILED, told
        return WakeEvent.DONE if delivery.done else WakeEvent.DELIVERED, told

    async def _write_wake(self, state: SubscriptionState) -> None:
        """Append a message about the wake to the stream that workers read.

        If the message cannot be written, workers learn of the wake only by trying to claim it.
        """
        name, stream = self.context.key.name, state.config.wake_stream
        assert stream is not None
        event = {
            "type": "wake",
            "subscription_id": name,
            "stream": state.links.first_pending or "",
            "generation": state.standing.generation,
            "ts": self.context.now_ms(),
        }
        body = json.dumps(event).encode()
        request = ObjectRequest("POST", "", (("content-type", JSON_TYPE),), body)
        response = await self.context.call(ObjectKey(STREAM, stream), request)
        if response.status >= 400:
            status = response.status
            log.warning("wake.not_written", subscription=name, stream=stream, status=status)

    # ---- what streams do ----

    def _take_updates(self) -> None:
        updates = self._updates.take(self.context.key.name)
        if self._updated is not None:
            self._updated |= updates.keys()
        if self._state is not None:
            self._state.hear(updates)

    async def _scan(self) -> ObjectResponse:
        """Scan every stream that the subscription matches, since updates may have been lost."""
        state = self._state
        if state is None:
            # The index lists a subscription that was never created, or has been deleted.
            await self._ask_index(LEAVE)
            return answer(204)
        self._updated = set()
        try:
            paths = {link.path for link in state.links}
            # The list of links keeps at most MAX_LINKS. Once it has overflowed, a stream without a
            # link may have been acknowledged already, so it is not reported again from its start.
            if not state.links.overflowed:
                paths.update(await self._matching(state.config, MAX_LINKS))
            tails = await self._tails(paths)
            self._take_updates()
            if self._state is state:
                # Streams that were updated during the scan have newer tails than those read.
                for path in tails.keys() - self._updated:
                    if (tail := tails[path]) is None:
                        state.links.gone(path)
                    else:
                        state.see(path, tail)
                state.wake_if_needed()
                state.arm()  # an alarm that rang while subscriptions were off was lost
        finally:
            self._updated = None
        return answer(204)

    # ---- the subscription itself ----

    async def _put(self, request: ObjectRequest) -> ObjectResponse:
        asked = parse(CreateBody, request.body)
        if asked.webhook is not None:
            self._webhooks.check(asked.webhook.url)
        secret = self.context.random(SECRET_BYTES)
        config = Config.create(asked, base_of(request.url), self.context.now_ms(), secret)
        if self._state is None:
            await self.context.block_concurrency_while(lambda: self._create(config))
            return await self._described(201)
        if not self._state.config.confirms(config):
            raise Conflict(
                "a subscription with this id and another configuration exists",
                code="SUBSCRIPTION_ALREADY_EXISTS",
            )
        return await self._described(200)

    async def _create(self, config: Config) -> None:
        """Create the subscription.

        It is entered in the index before the streams are read, so that no later change is missed.
        """
        await self._ask_index(ENTER, entry_of(config, config.streams))
        matching = await self._matching(config, MAX_LINKS + 1)
        room = MAX_LINKS - len(config.streams)
        tails = await self._tails({*config.streams, *matching[:room]})
        state = SubscriptionState.create(self.context, config)
        for path in config.streams:
            tail = tails[path] or EMPTY
            state.links.link(path, explicit=True, acked=tail, tail=tail)
        if len(matching) > room:
            state.links.overflow()
        for path in matching[:room]:
            if (found := tails[path]) is not None:
                state.links.link(path, explicit=False, acked=found, tail=found)
        self._state = state

    async def _get(self, request: ObjectRequest) -> ObjectResponse:
        return await self._described(200)

    async def _delete(self, request: ObjectRequest) -> ObjectResponse:
        if self._state is not None:
            self._state = None
            self.context.storage.delete_all()
            self.context.storage.delete_alarm()
            await self._ask_index(LEAVE)
        return answer(204)

    async def _described(self, status: int) -> ObjectResponse:
        state, name = self._existing(), self.context.key.name
        config = state.config
        streams = [
            {"path": link.path, "link_type": link.link_type, "acked_offset": link.acked}
            for link in state.links
        ]
        webhook = None
        if config.is_webhook:
            webhook = {"url": config.webhook_url, "signing": await self._signing(config.base)}
        fields = {
            "id": name,
            "subscription_id": name,
            "type": config.type,
            "pattern": config.pattern,
            "streams": streams,
            "webhook": webhook,
            "wake_stream": config.wake_stream,
            "lease_ttl_ms": config.lease_ms,
            "created_at": config.created_at,
            "status": "failed" if state.standing.failures else "active",
            "description": config.description,
        }
        return _json(status, {key: value for key, value in fields.items() if value is not None})

    async def _signing(self, base: str) -> dict[str, str]:
        response = await self.context.call(INDEX_KEY, ObjectRequest("GET", base))
        assert isinstance(response.body, bytes)
        [key] = json.loads(response.body)["keys"]
        return {"alg": "ed25519", "kid": key["kid"], "jwks_url": f"{base}{ROOT}{JWKS}"}

    async def _ask_index(self, operation: str, body: bytes = b"") -> None:
        headers = ((NAME, self.context.key.name),)
        await self.context.call(INDEX_KEY, ObjectRequest.internal(operation, body, headers))

    # ---- its streams ----

    async def _add_streams(self, request: ObjectRequest) -> ObjectResponse:
        state, asked = self._existing(), parse(StreamsBody, request.body)
        explicit = {link.path for link in state.links if link.explicit}
        if len(explicit.union(asked.streams)) > MAX_LINKS:
            raise CallerError(
                f"the subscription would name {len(explicit.union(asked.streams))} streams",
                code="too_many_links",
                field="streams",
                status=429,
                hint=f"at most {MAX_LINKS}",
            )
        await self.context.block_concurrency_while(
            lambda: self._link(state, explicit, asked.streams)
        )
        return answer(204)

    async def _link(self, state: SubscriptionState, explicit: set[str], streams: list[str]) -> None:
        await self._ask_index(ENTER, entry_of(state.config, explicit.union(streams)))
        tails = await self._tails(streams)
        for path, found in tails.items():
            tail = found or EMPTY
            state.links.link(path, explicit=True, acked=tail, tail=tail)

    async def _remove_stream(self, request: ObjectRequest) -> ObjectResponse:
        state = self._existing()
        state.links.unlink(route_of(request.url).stream.strip("/"))
        await self._ask_index(ENTER, state.entry())
        return answer(204)

    # ---- requests of woken workers and webhooks ----

    async def _claim(self, request: ObjectRequest) -> ObjectResponse:
        state = self._pulled()
        worker = parse(ClaimBody, request.body).worker
        standing = state.standing
        if standing.phase is Phase.LEASED:
            error = {
                "code": "ALREADY_CLAIMED",
                "message": "another worker has claimed the work",
                "current_holder": standing.holder,
                "generation": standing.generation,
            }
            return _json(409, {"error": error})
        if standing.phase is Phase.IDLE:
            raise Conflict("the subscription has no pending work", code="NO_PENDING_WORK")
        state.step(WakeEvent.CLAIMED, worker)
        fields = {
            "wake_id": standing.wake_id,
            "generation": standing.generation,
            "token": state.token(),
            "streams": state.told_streams(),
            "lease_ttl_ms": state.config.lease_ms,
        }
        return _json(200, fields)

    async def _callback(self, request: ObjectRequest) -> ObjectResponse:
        state = self._existing()
        if not state.config.is_webhook:
            raise CallerError("this subscription has no webhook", code="INVALID_REQUEST")
        return await self._acknowledge(state, request)

    async def _ack(self, request: ObjectRequest) -> ObjectResponse:
        return await self._acknowledge(self._pulled(), request)

    async def _acknowledge(
        self, state: SubscriptionState, request: ObjectRequest
    ) -> ObjectResponse:
        said = state.holder(request)
        for ack in said.acks:
            link = state.links.get(ack.name)
            if link is not None and ack.offset > link.tail:
                await self._catch_up(state, ack.name)
        state.holder(request)  # checked again: a later wake may have replaced it during the awaits
        for ack in said.acks:
            state.check_ack(ack)
        for ack in said.acks:
            state.links.ack(ack.name, ack.offset)
        state.step(WakeEvent.DONE if said.done else WakeEvent.EXTENDED)
        woken = said.done and state.standing.phase is Phase.WAKING
        return _json(200, {"ok": True, "next_wake": woken})

    async def _catch_up(self, state: SubscriptionState, path: str) -> None:
        """Look up a stream's end, as a worker may have read beyond the last update seen here."""
        tail = await self._tail(path)
        if tail is not None and state.links.get(path) is not None:
            state.links.reach(path, tail)

    async def _release(self, request: ObjectRequest) -> ObjectResponse:
        state = self._pulled()
        state.holder(request)
        state.step(WakeEvent.RELEASED)
        return answer(204)

    def _pulled(self) -> SubscriptionState:
        state = self._existing()
        if state.config.is_webhook:
            raise CallerError(
                "this subscription has a webhook, so workers cannot claim its work",
                code="INVALID_REQUEST",
            )
        return state

    # ---- reads of streams; other requests to this object may run during each ----

    async def _tail(self, path: str) -> str | None:
        """Return where a stream ends; None if it does not exist."""
        response = await self.context.call(ObjectKey(STREAM, path), ObjectRequest("HEAD", ""))
        return response.header(NEXT_OFFSET) if response.status == 200 else None

    async def _tails(self, paths: Iterable[str]) -> dict[str, str | None]:
        return {path: await self._tail(path) for path in paths}

    async def _matching(self, config: Config, limit: int) -> list[str]:
        """Return the names of existing streams that the pattern matches, `limit` at most."""
        if config.pattern is None:
            return []
        glob, found = Glob(config.pattern), list[str]()
        # `after` excludes the given name, so a shorter name is given to include the prefix itself.
        last = glob.prefix[:-1]
        while True:
            reading = self.context.ledger.objects.names(STREAM, after=last, limit=NAMES_PER_READ)
            names = await self.context.outside(reading)
            found += [
                n for n in names if glob.matches(n) and n != config.wake_stream and not parted(n)[0]
            ]
            beyond = names and names[-1] > glob.prefix and not names[-1].startswith(glob.prefix)
            if len(names) < NAMES_PER_READ or len(found) >= limit or beyond:
                return found[:limit]
            last = names[-1]


def _json(status: int, fields: Mapping[str, object]) -> ObjectResponse:
    return answer(status, (CONTENT_TYPE, JSON_TYPE), body=json.dumps(fields).encode())


def subscription_class(updates: Updates, webhooks: Webhooks) -> ObjectFactory:
    """Return the class of subscription objects, for an ObjectRuntime."""
    return lambda context: Subscription(context, updates, webhooks)
