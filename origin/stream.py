"""One stream that this origin generates, or may: what it knows of it, and asks of the ledger.

Several origins may share the ledger, so what is known here may be out of date: the epoch
tells, and the ledger has the last word.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog
from pydantic import ValidationError

from ledger.errors import Damaged, NotFound
from ledger.frame import FinishReason, StreamEnd, Tag, encode, tag_of
from ledger.interface import Append, Ledger, Record, Refusal, StreamKind
from origin.recipe import Recipe
from origin.worker_process import WorkerSlot

REPLAY_RECORDS = 4096
"""Records read at a time when a stream is taken over."""
UNKNOWN_EPOCH = 0
"""Of a stream whose takeover got no answer: it may have come through."""

log = structlog.get_logger("runs")


@dataclass(slots=True, eq=False)
class Stream:
    """A stream that is generated or waits for it; `slot` and `run` while on a worker.

    `started` says that epoch 1 was handed out: the next worker must take over. `epoch` is the
    last one that is known here, and `claiming` is held while it changes. `proven`: it has
    made a token on its worker. A worker that dies may have died of any stream that was not
    proven; each of them is a `suspect` then, and is tried again with no other unproven one
    beside it, so that the one which kills workers is found and its neighbours are not blamed.
    """

    id: bytes
    recipe: Recipe
    started: bool
    epoch: int = 1
    run: int = 0
    slot: WorkerSlot | None = None
    cancelled: bool = False
    proven: bool = False
    suspect: bool = False
    deaths: int = 0
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def claim(self, ledger: Ledger) -> list[Record] | None:
        """Become the stream's producer; gives what there is of it.

        None where nothing is left to do here: it has ended, retention took it, or another
        origin took it over while it waited.
        """
        try:
            if self.started:
                info = await ledger.info(self.id)
                if info.ended or self.epoch not in (info.epoch, UNKNOWN_EPOCH):
                    return None
                self.epoch = await ledger.take_over(self.id)
            self.started = True
            records = await self._records(ledger)
        except NotFound:
            return None
        return None if _have_end(records) else records

    async def append_end(
        self, ledger: Ledger, reason: FinishReason, message: str | None
    ) -> Refusal | None:
        """Take it over and write its end, unless it has one; gives why that was refused."""
        self.epoch = await ledger.take_over(self.id)
        try:
            records = await self._records(ledger)
        except Damaged:
            # What cannot be read cannot be counted: a frame is at least one token.
            index = tokens = (await ledger.info(self.id)).next_index
        else:
            if _have_end(records):
                return None
            index, tokens = len(records), sum(len(record.ids) for record in records)
        end = StreamEnd(
            total_tokens=tokens,
            finish_reason=reason,
            index=index,
            prompt_tokens=len(self.recipe.prompt_ids),
            message=message,
        )
        record = Record(encode(end), ())
        refused = await ledger.append([Append(self.id, self.epoch, index, record)])
        return refused[0] if refused else None

    async def _records(self, ledger: Ledger) -> list[Record]:
        records: list[Record] = []
        while more := await ledger.read(self.id, len(records), REPLAY_RECORDS):
            records += more
        return records


async def find(ledger: Ledger, stream: bytes) -> Stream | None:
    """A generation that has not ended, as the ledger knows it; None where there is none."""
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    if info.ended or info.kind is not StreamKind.GENERATION:
        return None
    try:
        recipe = Recipe.model_validate_json(info.recipe)
    except ValidationError as error:
        # Another version's, and left to an origin of that one. What it says stays out of the log.
        fields = [".".join(map(str, finding["loc"])) for finding in error.errors()]
        log.error("stream.unreadable", stream=stream.hex(), fields=fields)
        return None
    return Stream(stream, recipe, started=True, epoch=info.epoch)


def _have_end(records: list[Record]) -> bool:
    return bool(records) and tag_of(records[-1].frame) == Tag.STREAM_END
