"""What an origin does for an edge: open, resume and cancel streams, and call objects.

Each method takes a decoded frame and gives a value or raises a `TailraceError`; the link
turns both into frames.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ledger.errors import BeyondEnd, CallerError, Conflict, NotFound, Unauthorized
from ledger.frame import Call, Cancel, Heartbeat, Open, Opened, Resume, Status, StreamState
from ledger.interface import (
    STREAM_ID_BYTES,
    Ledger,
    NewStream,
    ObjectKey,
    StreamInfo,
    StreamKind,
)
from ledger.objects.object import ObjectRequest, ObjectResponse
from ledger.streams.name import generation_id
from ledger.subscriptions.route import SUBSCRIPTION, object_of
from origin.admission import admit, request_hash
from origin.config import LedgerConfig, OriginConfig
from origin.prompt import PromptReader
from origin.recipe import Recipe
from origin.resume_token import Right, TokenKeys
from origin.runs import Runs

CANCEL_PATIENCE_S = 5.0
"""How long a cancel waits for the stream's end before it answers `running`."""
METHODS = frozenset(("GET", "HEAD", "PUT", "POST", "DELETE"))
"""Of Calls. Objects have other methods for each other."""


class Objects(Protocol):
    """What the object runtime offers."""

    async def fetch(self, key: ObjectKey, request: ObjectRequest) -> ObjectResponse: ...


@dataclass(frozen=True, slots=True)
class Service:
    """One origin's streams. `now_ms` is Unix time; `random` draws ids and seeds."""

    ledger: Ledger
    objects: Objects
    runs: Runs
    keys: TokenKeys
    reader: PromptReader
    config: OriginConfig
    retention: LedgerConfig
    now_ms: Callable[[], int]
    random: Callable[[int], bytes] = secrets.token_bytes

    async def open(self, request: Open) -> Opened:
        """Create and start a stream, or find the one that its idempotency key made."""
        ready = self.runs.require_room()
        recipe = admit(
            request,
            model=ready.model,
            fingerprint=ready.fingerprint,
            reader=self.reader,
            draw_seed=lambda: int.from_bytes(self.random(8), "little"),
        )
        new = NewStream(
            stream=self.random(STREAM_ID_BYTES),
            recipe=recipe.model_dump_json(),
            durability=request.durability,
            ttl_s=self.retention.retention_s,
            idempotency_key=request.idempotency_key,
            request_hash=request_hash(request),
        )
        info, created = await self.ledger.create(new)
        if created:
            await self.runs.start(info.stream, recipe)
        return self._opened(await self.ledger.info(info.stream))

    async def resume(self, request: Resume) -> Opened:
        """Check that the reader may go on after `request.after`."""
        self._check(request.token, request.stream, Right.READ)
        info = await self._generation(request.stream)
        if request.after is not None and request.after >= info.next_index:
            last = info.next_index - 1
            raise BeyondEnd(
                f"index {request.after} is beyond the stream's last, {last}"
                if last >= 0
                else f"index {request.after} of a stream that has no frame yet",
                field="after",
                hint=f"at most {last}" if last >= 0 else "leave it out",
            )
        return self._opened(info)

    async def cancel(self, request: Cancel) -> Status:
        """End a stream as cancelled; one that has ended stays as it is."""
        self._check(request.token, request.stream, Right.CANCEL)
        info = await self._generation(request.stream)
        if not info.ended:
            changed = asyncio.Event()
            self.ledger.watch(info.stream, changed.set)
            try:
                await self.runs.cancel(info.stream)
                info = await self._ended(info, changed)
            finally:
                self.ledger.unwatch(request.stream, changed.set)
        return status(info)

    async def _generation(self, stream: bytes) -> StreamInfo:
        """The stream; an object's is as if absent, because only its object may show or end it."""
        info = await self.ledger.info(stream)
        if info.kind is not StreamKind.GENERATION:
            raise NotFound(f"no stream {stream.hex()}", code="unknown_stream")
        return info

    async def _ended(self, info: StreamInfo, changed: asyncio.Event) -> StreamInfo:
        try:
            async with asyncio.timeout(CANCEL_PATIENCE_S):
                while not (info := await self.ledger.info(info.stream)).ended:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass  # the answer says that it is still running
        return info

    async def call(self, call: Call) -> ObjectResponse:
        """Hand a request to its object, if the caller may read what that shows."""
        if call.method not in METHODS:
            raise CallerError("no such method", code="method_not_allowed", status=405)
        headers = tuple((header.name, header.value) for header in call.headers)
        request = ObjectRequest(call.method, call.url, headers, call.body)
        if call.object == "stream":
            await self._check_generation(call.name, request.header("tailrace-token"))
        return await self.objects.fetch(object_key(call), request)

    async def _check_generation(self, name: str, token: str | None) -> None:
        """A generation is as protected here as it is from a Resume."""
        stream = generation_id(name)
        if stream is None:
            return
        try:
            info = await self.ledger.info(stream)
        except NotFound:
            return  # whatever has this name, it is no generation
        if info.kind is StreamKind.GENERATION:
            self._check(token, stream, Right.READ)

    def heartbeat(self) -> Heartbeat:
        reasons, model = self.runs.reasons, self.runs.model
        models = (model.model,) if model is not None else ()
        devices = (model.device,) if model is not None else ()
        return Heartbeat(self.now_ms(), not reasons, reasons, models, devices)

    def _check(self, token: str | None, stream: bytes, right: Right) -> None:
        if token is not None:
            self.keys.check(token, stream, right, self.now_ms())
        elif self.config.require_token:
            raise Unauthorized(
                "this origin needs a resume token",
                field="token",
                hint="send the Tailrace-Token of the response that opened the stream",
            )

    def _opened(self, info: StreamInfo) -> Opened:
        recipe = Recipe.model_validate_json(info.recipe)
        expires_ms = self.now_ms() + int(self.retention.retention_s * 1000)
        return Opened(
            stream=info.stream,
            next_index=info.next_index,
            token=self.keys.issue(info.stream, Right.READ | Right.CANCEL, expires_ms),
            model=recipe.model,
            prompt_tokens=len(recipe.prompt_ids),
        )


def status(info: StreamInfo) -> Status:
    state = StreamState.ENDED if info.ended else StreamState.RUNNING
    return Status(info.stream, state, info.next_index)


def object_key(call: Call) -> ObjectKey:
    """The object that a Call is for; NotFound for a class that edges have no business with."""
    if call.object == "stream":
        return ObjectKey("stream", call.name)
    if call.object == SUBSCRIPTION:
        return object_of(call.name)
    raise NotFound(f"no objects of class {call.object!r}")


def steer_refused() -> Conflict:
    """The answer to Steer: the schema carries it, this engine does not take it."""
    return Conflict(
        "this engine cannot be steered", code="unsupported", hint="open a new stream instead"
    )
