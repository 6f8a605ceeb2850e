"""Answers admin requests of one origin.

An edge sends an admin request as a Call to an object of class `operator`. The object's name is the
path of the request below /v1/admin.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from tailrace.ledger.errors import Forbidden, NotFound, TailraceError, error_body
from tailrace.ledger.interface import Ledger, StreamInfo
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.admin.query import Document, Query, require
from tailrace.origin.admin.simulation import simulate
from tailrace.origin.admin.streams import (
    MAX_FRAMES,
    LivePages,
    encoded,
    frame_row,
    prompt_document,
    stored_document,
)
from tailrace.origin.admin.warm import WarmHandler, pool_document
from tailrace.origin.config import OriginConfig
from tailrace.origin.generations.permissions import generation
from tailrace.origin.generations.runs import Runs
from tailrace.origin.generations.usage import usage_of_all
from tailrace.origin.metrics import Metrics
from tailrace.origin.serving.live_pool import LivePool
from tailrace.origin.workers.worker_process import WorkerSlot

DEFAULT_FRAMES = 200
MAX_INDEX = 2**63

_STREAM = re.compile(r"streams/([0-9a-f]{32})(?:/(frames|cancel))?")

log = structlog.get_logger("operator")


@dataclass(frozen=True, slots=True)
class AdminHandler:
    """The handler of admin requests of one origin; its answers cover this origin only.

    `links` returns descriptions of the connected edges. `end` cancels a stream and returns its
    status. `unix_ms` converts times of the metrics' clock to Unix time.
    """

    ledger: Ledger
    runs: Runs
    metrics: Metrics
    config: OriginConfig
    pages: LivePages
    slots: Sequence[WorkerSlot]
    links: Callable[[], list[Document]]
    end: Callable[[StreamInfo], Awaitable[StreamInfo]]
    unix_ms: Callable[[float], int]
    pool: LivePool | None = None
    simulating: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, asked: str, request: ObjectRequest) -> ObjectResponse:
        try:
            document = await self._answer(asked, request)
        except TailraceError as error:
            return _json(error.status, error_body(error))
        return _json(200, document)

    async def _answer(self, asked: str, request: ObjectRequest) -> Document:
        query = Query(request.url)
        if (one := _STREAM.fullmatch(asked)) is not None:
            return await self._stream(bytes.fromhex(one[1]), one[2], request.method, query)
        if asked == "warm" or asked.startswith("warm/"):
            handler = WarmHandler(self.runs.recorder, self.runs.models, self.pool)
            part = asked.partition("/")[2]
            return await handler.answer(part, query, request.method, request.body)
        if asked == "usage":
            require(request.method, "GET")
            return await usage_of_all(self.ledger, query.rest(), self.unix_ms(self.runs.clock()))
        if asked == "simulate":
            require(request.method, "POST")
            query.done()
            return await simulate(request.body, self.simulating, self.runs.recorder.place)
        if asked not in ("streams", "pool", "histograms", "ledger", "health"):
            raise NotFound(f"there is no admin route {asked!r}")
        require(request.method, "GET")
        if asked == "streams":
            return self.pages.page(query)
        query.done()
        if asked == "pool":
            room = self.config.max_streams
            return pool_document(self.runs, self.metrics, self.slots, room, self.unix_ms)
        if asked == "histograms":
            return {"histograms": self.metrics.histograms()}
        return await self._ledger() if asked == "ledger" else self._health()

    # ---- streams ----

    async def _stream(self, stream: bytes, part: str | None, method: str, query: Query) -> Document:
        require(method, "POST" if part == "cancel" else "GET")
        info = await generation(self.ledger, stream)
        if part == "frames":
            return await self._frames(info, query)
        text = part is None and query.flag("text")
        query.done()
        if part == "cancel":
            log.info("operator.cancelled", stream=stream.hex())
            info = await self.end(info)
        document = await stored_document(self.ledger, info)
        document |= {"live": self.pages.live(stream), "lately": self.pages.ended(stream)}
        if text:
            self._check_text(stream)
            reader = self.runs.models.reader(document["recipe"]["model"])
            document |= prompt_document(info, reader)
        return document

    async def _frames(self, info: StreamInfo, query: Query) -> Document:
        start = query.number("start", 0, MAX_INDEX)
        limit = query.number("limit", DEFAULT_FRAMES, MAX_FRAMES, least=1)
        text = query.flag("text")
        query.done()
        if text:
            self._check_text(info.stream)
        records = await self.ledger.read(info.stream, start, limit)
        at_ms = self.pages.frame_ms(info.stream)
        return {
            "id": info.stream.hex(),
            "frames": [
                frame_row(record, index, at_ms(index), text=text)
                for index, record in enumerate(records, start)
            ],
            "next_index": info.next_index,
            "ended": info.ended,
        }

    def _check_text(self, stream: bytes) -> None:
        if not self.config.operator_text:
            raise Forbidden(
                "operators of this origin must not read the text of streams",
                field="text",
                hint="the setting origin.operator_text = true allows operators to read text",
            )
        log.info("operator.read", stream=stream.hex())

    # ---- the origin ----

    async def _ledger(self) -> Document:
        size = await self.ledger.size()
        return {
            "ledger": self.ledger.name,
            "silent_s": self.ledger.silent_s(),
            "text": self.config.operator_text,
            **size._asdict(),
        }

    def _health(self) -> Document:
        return {
            "version": tailrace_version(),
            "reasons": list(self.runs.models.reasons),
            "ledger_silent_s": self.ledger.silent_s(),
            "history": self.runs.recorder.described(),
            "edges": self.links(),
        }


def _json(status: int, document: Document) -> ObjectResponse:
    headers = (("content-type", "application/json"), ("cache-control", "no-store"))
    return ObjectResponse(status, headers, encoded(document))
