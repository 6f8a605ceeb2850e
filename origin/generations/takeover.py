"""Requests of an origin to its ledger for one stream: find it, take it over, end it.

Several origins may share the ledger, so the core's record of a stream may be out of date. The
functions here do not change that record: their results are reported to the core as events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import structlog
from pydantic import ValidationError

from tailrace.ledger.errors import Damaged, NotFound, TailraceError, Unavailable
from tailrace.ledger.frame import Notice, StreamEnd, encode
from tailrace.ledger.interface import Append, Ledger, Record, Refusal, StreamKind
from tailrace.ledger.record_extra import RecordExtra, life_numbers
from tailrace.ledger.validation import path_of
from tailrace.origin.core.frame_tokens import delivered_tokens
from tailrace.origin.core.step import end_usage
from tailrace.origin.core.stream import UNKNOWN_EPOCH, PendingEnd, Stream
from tailrace.origin.core.stream_events import FoundStream
from tailrace.origin.generations.frame_times import time_to_store
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History, read_history

log = structlog.get_logger("runs")


async def find(ledger: Ledger, stream: bytes) -> FoundStream | None:
    """Return an unfinished generation, or None if it has ended or cannot be continued."""
    try:
        info = await ledger.info(stream)
    except NotFound:
        return None
    except Damaged as error:  # not even the stored epoch can be trusted, so nothing is changed
        log.error("stream.damaged", stream=stream.hex(), error=error.message)
        return None
    if info.ended or info.kind is not StreamKind.GENERATION:
        return None
    try:
        recipe = Recipe.model_validate_json(info.recipe)
    except ValidationError as error:
        # Another version wrote the recipe, and an origin of that version may continue the stream.
        # Only the names of invalid fields are logged, because values may hold a user's words.
        fields = [path_of(finding["loc"]) for finding in error.errors()]
        log.error("stream.unreadable", stream=stream.hex(), fields=fields)
        return None
    return FoundStream(recipe, info.epoch, info.next_index)


async def take_over(
    ledger: Ledger, stream: Stream, turn: asyncio.Lock
) -> tuple[int, History] | None:
    """Become a stream's producer, and return its epoch and its log.

    The log is read under the lock `turn`. The result is None if the stream has ended, was deleted,
    or was taken over by another origin while it waited here.

    Raises:
        Unavailable: The ledger did not answer; the takeover may have happened.
        Damaged: The log cannot be read.
        FrameError: A frame of the log is malformed.
    """
    epoch, history = stream.epoch, History()
    try:
        info = await ledger.info(stream.id)
        if stream.has_producer:
            if info.ended or epoch not in (info.epoch, UNKNOWN_EPOCH):
                return None
            epoch = await ledger.take_over(stream.id)
        if stream.has_producer or info.next_index:  # the log of a new stream is empty
            history = await read_history(ledger, stream.id, turn, stream.recipe.begin)
    except NotFound:
        return None
    return epoch, history


async def log_notices(
    ledger: Ledger,
    stream: bytes,
    epoch: int,
    notices: Sequence[Notice],
    history: History,
    now_ms: int,
) -> Refusal | None:
    """Append notices to a stream's log and to `history`; return the first refusal, if any."""
    appends = []
    for notice in notices:
        extra = RecordExtra(at_ms=time_to_store(history.at_ms, now_ms))
        record = Record(encode(notice), (), extra.pack())
        appends.append(Append(stream, epoch, history.next_index, record))
        history.add(record)
    refused = await ledger.append(appends)
    return refused[0] if refused else None


async def log_first_notices(ledger: Ledger, stream: bytes, recipe: Recipe, now_ms: int) -> None:
    """Append the recipe's notices to the log of a new stream that waits for its model."""
    if not (notices := recipe.first_notices(0)):
        return
    try:
        history = History(recipe.base, begin=recipe.base)
        refusal = await log_notices(ledger, stream, 1, notices, history, now_ms)
    except Unavailable as error:  # they are appended later, when a worker takes the stream
        log.warning("stream.notices_deferred", stream=stream.hex(), error=str(error))
    else:
        if refusal is not None:
            log_refusal(refusal)


class WrittenEnd(NamedTuple):
    """The result of `append_end`: the stream's new epoch, and the refusal, if there was one."""

    epoch: int
    refusal: Refusal | None = None


async def append_end(
    ledger: Ledger,
    stream: Stream,
    end: PendingEnd,
    turn: asyncio.Lock,
    now_s: float,
    now_ms: int,
    reach: Callable[[bytes, int], int],
) -> WrittenEnd:
    """Take a stream over and write its end, unless it has one.

    `now_s` is the time on the clock of `StreamProgress`, and `now_ms` the Unix time. `reach`
    returns how far the stream's readers have got: see `Readers.reach`.

    Raises:
        NotFound: The stream was deleted.
        Damaged: The ledger's row of the stream cannot be read.
        Unavailable: The ledger did not answer; the end may have been written.
    """
    takeovers = stream.epoch - 1
    epoch = await ledger.take_over(stream.id)
    at_ms: int | None = now_ms
    try:
        history = await read_history(ledger, stream.id, turn, stream.recipe.begin)
    except Damaged:
        # The tokens of a damaged log cannot be counted, so each frame counts as one token.
        index = tokens = (await ledger.info(stream.id)).next_index
        read = min(reach(stream.id, index), tokens)
    else:
        if history.has_end:
            return WrittenEnd(epoch)
        index, tokens = history.next_index, len(history.ids)
        at_ms = time_to_store(history.at_ms, now_ms)
        read = delivered_tokens(reach(stream.id, index), index, tokens, history.frame_tokens)
    frame = StreamEnd(
        total_tokens=tokens,
        finish_reason=end.reason,
        index=index,
        prompt_tokens=len(stream.recipe.prompt_ids),
        message=end.message,
        retryable=end.retryable,
    )
    life = life_numbers(stream.progress.life(takeovers, now_s))
    extra = RecordExtra(life=life, at_ms=at_ms, usage=end_usage(stream, now_ms, read))
    record = Record(encode(frame), (), extra.pack())
    refused = await ledger.append([Append(stream.id, epoch, index, record)])
    return WrittenEnd(epoch, refused[0] if refused else None)


def log_refusal(refusal: Refusal) -> TailraceError:
    """Log why an append was refused, and return the error."""
    log.warning(
        "append.refused",
        stream=refusal.append.stream.hex(),
        index=refusal.append.index,
        error=str(refusal.error),
    )
    return refusal.error
