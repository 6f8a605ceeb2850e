"""A stream of the Durable Streams protocol, as an object on top of the ledger.

The rules are in the other files of this folder; this one applies them to the object's storage.
Reads bypass the object (`read.py`). The protocol:
https://github.com/durable-streams/durable-streams. A generation of an engine can be read like any
other stream, under its id as name, and written by no client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from urllib.parse import urlsplit

from tailrace.ledger.errors import CallerError, Conflict, NotFound, TailraceError
from tailrace.ledger.frame import STREAM_ID_BYTES
from tailrace.ledger.objects.object import (
    ObjectContext,
    ObjectRequest,
    ObjectResponse,
    ReadableClass,
)
from tailrace.origin.streams.append import (
    AppendContext,
    Refused,
    Repeated,
    judge,
    messages_of,
    place_headers,
)
from tailrace.origin.streams.config import Create, packed
from tailrace.origin.streams.events import Change, StreamEvent
from tailrace.origin.streams.fork import (
    GIVE_BACK,
    TAKE,
    ForkRequest,
    Grant,
    References,
    confirms,
    created,
    inherited,
    wake_by,
)
from tailrace.origin.streams.offsets import BEGINNING
from tailrace.origin.streams.page import Tip
from tailrace.origin.streams.protocol import (
    CONTENT_TYPE,
    LOCATION,
    METHODS,
    READ_METHODS,
    answer,
    check_name,
    error_answer,
    essence,
    not_allowed,
    parted,
    tip_headers,
)
from tailrace.origin.streams.read import (
    READS,
    USE,
    StreamReader,
    described,
    generation,
    gone,
    in_slices,
    read_stream,
)
from tailrace.origin.streams.request import AppendRequest, Place, parse_append, parse_create
from tailrace.origin.streams.settings import StreamSettings
from tailrace.origin.streams.state import PRODUCER, StoredStream
from tailrace.origin.streams.stored_object import StoredStreamObject

WRITES = frozenset(("PUT", "POST", "DELETE"))
"""Methods of clients that change a stream; a generation accepts none of them."""


class StreamObject(StoredStreamObject):
    """The object of one stream name: it has a stream, or a client may create one there.

    The name may also be the id of a generation, which clients can read but not write.
    `fetch` answers every request, errors included; it raises only faults of the storage.
    """

    def __init__(self, context: ObjectContext, settings: StreamSettings) -> None:
        super().__init__(context)
        self._settings = settings
        self._references = References(context)
        self._methods: dict[str, Callable[[ObjectRequest], Awaitable[ObjectResponse]]] = {
            "PUT": self._put,
            "POST": self._post,
            "HEAD": self._head,
            "DELETE": self._delete,
        }
        self._operations: dict[str, Callable[[ObjectRequest], Awaitable[ObjectResponse]]] = {
            USE: self._use,
            TAKE: self._take,
            GIVE_BACK: self._give_back,
        }

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        if request.operation is None:
            method = self._methods.get(request.method)
        else:
            method = self._operations.get(request.operation)
        if method is None:
            return not_allowed(METHODS)
        try:
            check_name(parted(self.context.key.name)[1])
            await self._load()
            if request.method in WRITES and await self._is_generation():
                return not_allowed(READ_METHODS)
            return await method(request)
        except CallerError as error:
            return error_answer(error)

    async def alarm(self, retries: int) -> None:
        """End a stream that has expired, and return owed references."""
        await self._load()
        state = await self._living()
        await self._references.give_back()
        if state is not None and (deadline_ms := state.deadline_ms()) is not None:
            wake_by(self.context, deadline_ms)

    # ---- the stream's life ----

    async def _living(self) -> StoredStream | None:
        """Return the stream, or None if it does not exist or has expired."""
        if self._state is not None and self._state.is_over(self.context.now_ms()):
            await self._end(self._state)
        return self._state

    async def _existing(self) -> StoredStream:
        """Return the stream.

        Raises NotFound, or CallerError (410) if only its forks may still see it.
        """
        state = await self._living()
        if state is None:
            raise NotFound("no such stream")
        if state.config.deleted:
            raise gone()
        return state

    async def _end(self, state: StoredStream) -> None:
        """Delete the stream, or hide it while forks need its frames."""
        if await self._references.held():
            state.hide()
        else:
            await self._remove(state)
        await self._tell(Change.DELETED, state.tip)

    async def _remove(self, state: StoredStream) -> None:
        owed = await self._references.owed()
        storage, config = self.context.storage, state.config
        async with storage.transaction():
            storage.delete_all()
            storage.drop_stream(config.stream)
            for name, source in owed.items():
                storage.put(name, source)
            if config.asked.fork is not None:
                now_ms = self.context.now_ms()
                self._references.owe(config.stream.hex(), config.asked.fork.source, now_ms)
            elif not owed:
                storage.delete_alarm()
        self._state = None

    async def _tell(self, kind: Change, tip: Tip, since: Tip | None = None) -> None:
        """Report a change of the stream to subscriptions, once the change is durable."""
        # Tenants cannot make subscriptions, so changes of a tenant's streams are not reported.
        is_open = not parted(self.context.key.name)[0]
        if self._settings.on_event is not None and is_open:
            await self.context.outside(_nothing())
            before = BEGINNING if since is None else str(since.offset)
            event = StreamEvent(kind, self.context.key.name, str(tip.offset), before)
            self._settings.on_event(event)

    # ---- PUT ----

    async def _put(self, request: ObjectRequest) -> ObjectResponse:
        asked = self._within(parse_create(request, self._settings.max_body_bytes))
        if (there := await self._confirmed(asked)) is not None:
            return there
        if asked.fork is None:
            return await self._create(request, asked, self.context.random(STREAM_ID_BYTES), None)
        return await self._fork(request, asked, asked.fork.source)

    def _within(self, asked: Create) -> Create:
        """Restrict a fork's source to streams of the same tenant."""
        if asked.fork is None:
            return asked
        source = parted(self.context.key.name)[0] + asked.fork.source
        return replace(asked, fork=replace(asked.fork, source=source))

    async def _confirmed(self, asked: Create) -> ObjectResponse | None:
        """Return the answer 200 if the stream exists as requested; None if there is no stream.

        Raises Conflict if a stream with another configuration exists.
        """
        state = await self._living()
        if state is None:
            return None
        if state.config.deleted:
            raise Conflict(
                "the stream was deleted, but forks of it still exist",
                code="gone",
                hint="delete the forks first, or use another name",
            )
        if not confirms(asked, state.config, closed=state.tip.closed):
            raise Conflict(
                "a stream with this name and another configuration exists", code="stream_exists"
            )
        state.touch(self.context.now_ms())
        return answer(200, *_described(state))

    async def _fork(self, request: ObjectRequest, asked: Create, source: str) -> ObjectResponse:
        assert asked.fork is not None
        if source == self.context.key.name:
            raise NotFound("the stream to fork does not exist")
        stream = self.context.random(STREAM_ID_BYTES)
        claim = ForkRequest(stream.hex(), self.context.key.name, asked.content_type, asked.fork)
        response = await self._references.take(claim)
        if response.status != 200:
            return response
        assert isinstance(response.body, bytes)
        try:
            # Another request may have created the stream during the call to the source.
            if (there := await self._confirmed(asked)) is None:
                return await self._create(request, asked, stream, Grant.unpack(response.body))
        except TailraceError:
            wake_by(self.context, self.context.now_ms())
            raise
        wake_by(self.context, self.context.now_ms())
        return there

    async def _create(
        self, request: ObjectRequest, asked: Create, stream: bytes, grant: Grant | None
    ) -> ObjectResponse:
        config = created(stream, asked, grant)
        head = (grant.head,) if grant is not None and grant.head else ()
        messages = await in_slices(messages_of(config.content_type, request.body))
        now_ms, storage = self.context.now_ms(), self.context.storage
        async with storage.transaction():
            state = StoredStream.create(storage, config, now_ms, self._settings.durability)
            state.append((*head, *messages), closes=asked.closed)
            if grant is not None:
                self._references.settle(stream.hex())
            if (deadline_ms := state.deadline_ms()) is not None:
                wake_by(self.context, deadline_ms)
        self._state = state
        headers = _described(state)
        await self._tell(Change.CREATED, state.tip)
        location = urlsplit(request.url)._replace(query="", fragment="").geturl()
        return answer(201, (LOCATION, location), *headers)

    # ---- POST and DELETE ----

    async def _post(self, request: ObjectRequest) -> ObjectResponse:
        append = parse_append(request, self._settings.max_body_bytes)
        state = await self._existing()
        last = await self._last_of(append)
        standing = AppendContext(state.config.content_type, state.tip, state.seq, last)
        verdict = judge(append, standing)
        if isinstance(verdict, Refused):
            return error_answer(verdict.error, *verdict.headers)
        if isinstance(verdict, Repeated):
            state.touch(self.context.now_ms())
            return answer(204, *tip_headers(state.tip), *place_headers(last))
        messages = await in_slices(messages_of(state.config.content_type, append.body))
        if append.body and not messages:
            raise CallerError(
                "an empty array has nothing to append",
                field="body",
                hint="send an array with at least one value",
            )
        since = state.tip
        async with state.change():
            if append.producer is not None and last is None:
                await state.room_for_producer()
            state.append(messages, closes=append.closes)
            state.remember(append.producer, append.seq)
            state.write_use(self.context.now_ms())
        tip = state.tip
        place = None if append.producer is None else append.producer.place
        await self._tell(Change.APPENDED, tip, since)
        return answer(verdict.status, *tip_headers(tip), *place_headers(place))

    async def _last_of(self, append: AppendRequest) -> Place | None:
        """Return the last accepted request of the request's producer."""
        if append.producer is None:
            return None
        value = await self.context.storage.get(PRODUCER + append.producer.name)
        return None if value is None else Place.unpack(value)

    async def _delete(self, request: ObjectRequest) -> ObjectResponse:
        await self._end(await self._existing())
        return answer(204)

    # ---- requests of reads (`read.py`) ----

    async def _use(self, request: ObjectRequest) -> ObjectResponse:
        (await self._existing()).touch(self.context.now_ms())
        return answer(204)

    async def _head(self, request: ObjectRequest) -> ObjectResponse:
        state = await self._existing()
        return described(state.config, state.tip)

    async def _is_generation(self) -> bool:
        """Return True if the name is a generation's id, and no stream has been created there."""
        if self._state is not None:
            return False
        found = generation(self.context.ledger, self.context.key.name)
        return await self.context.outside(found) is not None

    # ---- requests of forks of this stream ----

    async def _take(self, request: ObjectRequest) -> ObjectResponse:
        claim = ForkRequest.unpack(request.body)
        if await self._is_generation():
            raise Conflict("a generation cannot be forked", code="not_forkable")
        state = self._forkable(await self._living(), claim)
        config = state.config
        reader = StreamReader(self.context.ledger, config)
        cut = await self.context.outside(reader.cut(claim.order))
        parts = inherited(config, cut.end)
        # This stream may have been deleted, or deleted and created again, during the read.
        if self._forkable(await self._living(), claim).config.stream != config.stream:
            raise NotFound("the stream to fork was deleted")
        self._references.add(claim.reference, claim.fork)
        grant = Grant(config.content_type, config.expiry, parts, cut.head)
        return answer(200, body=packed(grant))

    def _forkable(self, state: StoredStream | None, claim: ForkRequest) -> StoredStream:
        if state is None:
            raise NotFound("the stream to fork does not exist")
        if state.config.deleted:
            raise Conflict("a deleted stream cannot be forked", code="gone")
        wanted = claim.content_type
        if wanted is not None and essence(wanted) != essence(state.config.content_type):
            raise Conflict(
                "a fork must have the content type of its source",
                code="content_type_mismatch",
                field=CONTENT_TYPE,
                hint=f"the source's content type is {state.config.content_type}",
            )
        return state

    async def _give_back(self, request: ObjectRequest) -> ObjectResponse:
        self._references.remove(request.body.decode())
        state = self._state
        if state is not None and state.config.deleted and not await self._references.held():
            await self._remove(state)
        return answer(204)


def stream_class(settings: StreamSettings) -> ReadableClass:
    """Return the class of stream objects, for an ObjectRuntime."""
    return ReadableClass(
        make=lambda context: StreamObject(context, settings),
        read=lambda context, request: read_stream(context, request, settings),
        reads=READS,
    )


def _described(state: StoredStream) -> tuple[tuple[str, str], ...]:
    return ((CONTENT_TYPE, state.config.content_type), *tip_headers(state.tip))


async def _nothing() -> None:
    """Do nothing: awaiting this with `context.outside` waits until earlier writes are durable."""
