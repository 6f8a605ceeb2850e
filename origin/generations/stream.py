"""One stream that this origin generates, or may: what it knows of it, and asks of the ledger.

Several origins may share the ledger, so what is known here may be out of date: the epoch
tells, and the ledger has the last word.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import structlog
from pydantic import ValidationError

from ledger.errors import Conflict, Damaged, NotFound, Unavailable
from ledger.frame import FinishReason, Notice, StreamEnd, encode
from ledger.interface import Append, Ledger, Record, Refusal, StreamKind
from origin.generations.history import History, read_history
from origin.generations.progress import StreamProgress
from origin.generations.recipe import ENGINE, Recipe
from origin.generations.steering import Steering
from origin.generations.suspects import Suspicion
from origin.workers.worker_frame import ID_BITS, Ready
from origin.workers.worker_process import WorkerSlot

TEXT = "text"
"""The kind of workers that take Asks, not Runs."""
UNKNOWN_EPOCH = 0
"""Of a stream whose takeover got no answer: it may have come through."""

SHOWN_FINGERPRINT_CHARS = 16

log = structlog.get_logger("runs")


@dataclass(frozen=True, slots=True)
class Claim:
    """A stream that was just claimed for a worker: all that is in its log.

    `lost` says why that worker cannot go on with it, `refusal` why its notices were not stored.
    """

    history: History
    lost: str | None = None
    refusal: Refusal | None = None


@dataclass(slots=True, eq=False)
class GeneratedStream:
    """A stream that is generated or waits for it; `slot` and `run` while on a worker.

    `started` says that epoch 1 was handed out: the next worker must take over. `epoch` is the
    last one that is known here, and `claiming` is held while it changes. `standing` says whether
    a worker's death may be its doing.

    `read_s` is when somebody last read it, or it came here; `unread` says that it gives way to
    streams of its class that are read.

    `ordered`: the worker has its order to run. `asked_s` is when it was admitted here, if it
    was, and `released_s` when the last frame of its run was released (monotonic clock).
    """

    id: bytes
    recipe: Recipe
    started: bool
    epoch: int = 1
    run: int = 0
    slot: WorkerSlot | None = None
    cancelled: bool = False
    ordered: bool = False
    read_s: float = 0.0
    unread: bool = False
    asked_s: float | None = None
    released_s: float | None = None
    standing: Suspicion = field(default_factory=Suspicion)
    steering: Steering = field(default_factory=Steering)
    progress: StreamProgress = field(default_factory=StreamProgress)
    claiming: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def claim(self, ledger: Ledger, ready: Ready, turn: asyncio.Lock) -> Claim | None:
        """Become the stream's producer, for a worker, and log what its readers should know.

        Its log is read when it is its `turn`; one that was just created does not wait for that.

        None where nothing is left to do here: it has ended, retention took it, or another
        origin took it over while it waited.
        """
        history = History()
        try:
            info = await ledger.info(self.id)
            if self.started:
                if info.ended or self.epoch not in (info.epoch, UNKNOWN_EPOCH):
                    return None
                self.epoch = await ledger.take_over(self.id)
            if self.started or info.next_index:
                history = await read_history(ledger, self.id, turn)
            self.started = True
        except NotFound:
            return None
        if history.has_end:
            return None
        self.steering.begin(history.ids)
        if not self.recipe.fingerprint:
            told = [notice.message for notice in history.notices if notice.code == ENGINE]
            self.recipe = self.recipe.made_by(told[0] if told else ready.fingerprint)
        if (lost := _cannot_continue(self.recipe, ready, history)) is not None:
            return Claim(history, lost)
        notices = self.recipe.first_notices(history.next_index)
        appends = []
        for notice in notices + _inexact(self.recipe, ready, history):
            record = Record(encode(notice), ())
            appends.append(Append(self.id, self.epoch, history.next_index, record))
            history.add(record)
        refused = await ledger.append(appends) if appends else []
        return Claim(history, refusal=refused[0] if refused else None)

    async def append_end(
        self,
        ledger: Ledger,
        reason: FinishReason,
        message: str | None,
        retryable: bool,
        turn: asyncio.Lock,
        now: float,
    ) -> Refusal | None:
        """Take it over and write its end, unless it has one; gives why that was refused.

        `now` is on the metrics' clock.
        """
        takeovers = self.epoch - 1
        self.epoch = await ledger.take_over(self.id)
        try:
            history = await read_history(ledger, self.id, turn)
        except Damaged:
            # What cannot be read cannot be counted: a frame is at least one token.
            index = tokens = (await ledger.info(self.id)).next_index
        else:
            if history.has_end:
                return None
            index, tokens = history.next_index, len(history.ids)
        end = StreamEnd(
            total_tokens=tokens,
            finish_reason=reason,
            index=index,
            prompt_tokens=len(self.recipe.prompt_ids),
            message=message,
            retryable=retryable,
        )
        record = Record(encode(end), self.progress.life(takeovers, now).behind(()))
        refused = await ledger.append([Append(self.id, self.epoch, index, record)])
        return refused[0] if refused else None

    @property
    def made(self) -> int:
        """Tokens so far; frames, where its workers know of no tokens."""
        progress = self.progress
        return progress.tokens if self.recipe.prompt_ids else progress.next_index

    def not_taken(self) -> Conflict:
        """What becomes of text that it was to be steered with, when it is over here."""
        fate = "was cancelled" if self.cancelled else "ended, or went to another origin,"
        return Conflict(
            f"the stream {fate} before it took up the text", hint="open a new stream with it"
        )


async def find(ledger: Ledger, stream: bytes) -> GeneratedStream | None:
    """A generation that has not ended, as the ledger knows it; None where there is none."""
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    except Damaged as error:  # not even its epoch can be believed: it is left as it is
        log.error("stream.damaged", stream=stream.hex(), error=error.message)
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
    return GeneratedStream(stream, recipe, started=True, epoch=info.epoch)


def log_refusal(refusal: Refusal) -> None:
    log.warning(
        "append.refused",
        stream=refusal.append.stream.hex(),
        index=refusal.append.index,
        error=str(refusal.error),
    )


async def tell_first(ledger: Ledger, stream: bytes, recipe: Recipe) -> None:
    """Log what its readers are to be told before anything else, while a new stream waits."""
    appends = [
        Append(stream, 1, notice.index, Record(encode(notice), ()))
        for notice in recipe.first_notices(0)
    ]
    try:
        for refusal in await ledger.append(appends) if appends else ():
            log_refusal(refusal)
    except Unavailable as error:  # whoever claims the stream logs them
        log.warning("stream.not_told", stream=stream.hex(), error=str(error))


def _cannot_continue(recipe: Recipe, ready: Ready, history: History) -> str | None:
    """Why this worker cannot go on with what a lost one has begun."""
    if recipe.model != ready.model:
        return f"this origin serves {ready.model!r} now, not {recipe.model!r}"
    if (ready.kind == TEXT) != (not recipe.prompt_ids):
        return f"{ready.model!r} is now served by workers of another kind"
    if ready.kind == TEXT:
        return None
    # The same engine has the same vocabulary, which is not held against a million ids again.
    if recipe.fingerprint != ready.fingerprint and max(_ids(recipe, history)) >= ready.vocab:
        return f"{ready.model!r} has another vocabulary now"
    if len(recipe.prompt_ids) >= ready.context:
        return f"{ready.model!r} has a shorter context now"
    return None


def _ids(recipe: Recipe, history: History) -> Iterator[int]:
    return chain(recipe.prompt_ids, (id_ & ID_BITS for id_ in history.ids))


def _inexact(recipe: Recipe, ready: Ready, history: History) -> list[Notice]:
    """What is to be logged where the continuation is not the one of the uninterrupted run.

    Workers of kind `text` know better what another version of theirs means, and say so themselves.
    """
    begun = history.next_index > len(recipe.notices)
    if not begun or recipe.fingerprint == ready.fingerprint or ready.kind == TEXT:
        return []
    before, now = (
        text[:SHOWN_FINGERPRINT_CHARS] for text in (recipe.fingerprint, ready.fingerprint)
    )
    notice = Notice(
        "inexact",
        f"another engine goes on ({now}, on {ready.device}) than the one that began ({before}): "
        "the text may differ from that of an uninterrupted run",
        history.next_index,
    )
    said = {(notice.code, notice.message) for notice in history.notices}
    return [] if (notice.code, notice.message) in said else [notice]
