"""Reads of a chat: its turns as one document, or all turns as they begin, as JSON lines.

Reads bypass the chat's object, like reads of a Durable Stream (`origin/streams/read.py`). A read
needs only the chat's log, so any origin of the ledger can answer it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from tailrace.ledger.errors import BeyondEnd, NotFound
from tailrace.ledger.frame import Chunk, StreamState, decode
from tailrace.ledger.interface import Ledger
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse, ReadContext
from tailrace.ledger.wire.bare import U64_MAX
from tailrace.origin.admin.query import Query
from tailrace.origin.objects.chat_presence import REPORT_INTERVAL_S, Presence
from tailrace.origin.streams.config import StreamConfig
from tailrace.origin.streams.protocol import CONTENT_TYPE, NO_STORE
from tailrace.origin.streams.state import CONFIG

MAX_LISTED_TURNS = 100
"""Maximum number of turns in one document."""
MAX_READ_TURNS = 256
"""Maximum number of turns that are read at once for a reader that follows the chat."""
CHECK_INTERVAL_S = 15.0
"""Seconds after which a following reader checks if the chat still exists."""
LINES_TYPE = "application/x-ndjson"
GONE = "gone"
"""The state of a turn whose stream was deleted or has expired."""
NOT_GIVEN = U64_MAX + 1
"""Stands for a parameter that is left out: no turn has this number."""

Turn = dict[str, Any]
"""A turn as JSON: its record, and in documents the state of its stream."""


async def read_chat(
    presence: Presence, context: ReadContext, request: ObjectRequest
) -> ObjectResponse:
    """Answer a GET of a chat.

    Parameters of the URL: `follow` asks for JSON lines, `running` for the running turns only. `at`
    is the number of the first turn, `after` that of the turn before the first, `tail` the number of
    turns.

    Raises:
        NotFound: There is no such chat.
        BeyondEnd: The chat has no turn with the number `at` or `after`.
    """
    query = Query(request.url)
    follows, running = query.flag("follow"), query.flag("running")
    stored = await context.ledger.objects.get(context.key, (CONFIG,))
    if CONFIG not in stored:
        raise unknown_chat()
    stream = StreamConfig.unpack(stored[CONFIG]).stream
    try:
        last = (await context.ledger.info(stream)).next_index
    except NotFound:
        raise unknown_chat() from None
    first = _first(query, last, 0 if follows else max(0, last - MAX_LISTED_TURNS))
    query.done()
    if follows:
        body = follow(presence, context, stream, first)
        return ObjectResponse(200, ((CONTENT_TYPE, LINES_TYPE), NO_STORE), body)
    found = [
        turn
        for turn in await _turns(context.ledger, stream, first, last)
        if not running or turn["state"] == StreamState.RUNNING.word
    ]
    document = {"turns": found, "next_turn": last, "readers": await presence.read(stream)}
    headers = ((CONTENT_TYPE, "application/json"), NO_STORE)
    return ObjectResponse(200, headers, json.dumps(document).encode())


def _first(query: Query, next_turn: int, default: int) -> int:
    """Return the number of the first turn that the request's parameters select."""
    if tail := query.number("tail", 0, U64_MAX):
        return max(0, next_turn - tail)
    for name, skipped in (("at", 0), ("after", 1)):
        number = query.number(name, NOT_GIVEN, NOT_GIVEN)
        if number == NOT_GIVEN:
            continue
        if number >= next_turn:
            raise BeyondEnd(
                f"turn {number} is beyond the chat's last, {next_turn - 1}"
                if next_turn
                else f"turn {number} of a chat that has no turn yet",
                field="after",
                hint=f"at most {next_turn - 1}" if next_turn else "leave it out",
            )
        return number + skipped
    return default


async def _turns(ledger: Ledger, stream: bytes, first: int, last: int) -> list[Turn]:
    """Return up to MAX_LISTED_TURNS turns from `first` on, with the states of their streams."""
    turns: list[Turn] = []
    last = min(last, first + MAX_LISTED_TURNS)
    while first < last and (records := await _records(ledger, stream, first, last)):
        turns += [json.loads(record) for record in records]
        first += len(records)
    for turn in turns:
        try:
            info = await ledger.info(bytes.fromhex(turn["stream"]))
        except NotFound:
            turn["state"] = GONE
        else:
            state = StreamState.ENDED if info.ended else StreamState.RUNNING
            turn |= {"state": state.word, "next_index": info.next_index}
    return turns


async def _records(ledger: Ledger, stream: bytes, first: int, last: int) -> list[bytes]:
    """Return a chat's turns `first` to `last` - 1 as JSON, but at most MAX_READ_TURNS of them."""
    records: list[bytes] = []
    for raw in await ledger.frames(stream, first, min(last - first, MAX_READ_TURNS)):
        _, frame = decode(raw)
        assert isinstance(frame, Chunk), frame
        records.append(frame.data)
    return records


async def follow(
    presence: Presence, context: ReadContext, stream: bytes, first: int
) -> AsyncGenerator[bytes, None]:
    """Yield lines until the chat is forgotten: turns from `first` on, and numbers of readers.

    The line of a turn is its record. `{"readers": N}` reports the number of clients that follow the
    chat, at the beginning and after each change.
    """
    ledger, clock = context.ledger, asyncio.get_running_loop().time
    woken = asyncio.Event()
    reported, report_at = 0, clock()
    try:
        await ledger.info(stream)  # a stream must be loaded before it can be watched
        ledger.watch(stream, woken.set)
    except NotFound:
        return
    presence.join(stream, woken.set)
    try:
        tail, check_at = ledger.tail(stream), clock() + CHECK_INTERVAL_S
        while not tail.gone:
            woken.clear()
            lines = list[bytes]()
            if clock() >= check_at:
                await ledger.info(stream)
                check_at = clock() + CHECK_INTERVAL_S
            # The tail is in memory. To call `ledger.info` here instead, a shared ledger would query
            # its database for each of many readers that are woken at the same time.
            last = tail.released
            if first < last:
                lines += await _records(ledger, stream, first, last)
                first += len(lines)
            wake_at, readers = check_at, presence.count(stream)
            if readers is not None and readers != reported:
                wake_at = min(check_at, report_at)
                if clock() >= report_at and first == last:
                    lines.append(b'{"readers":%d}' % readers)
                    reported, report_at = readers, clock() + REPORT_INTERVAL_S
            if lines:
                yield b"".join(line + b"\n" for line in lines)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(wake_at):
                    await woken.wait()
    except NotFound:
        return
    finally:
        presence.leave(stream, woken.set)
        ledger.unwatch(stream, woken.set)


def unknown_chat() -> NotFound:
    """Return the error for a chat that does not exist."""
    return NotFound(
        "no such chat",
        code="unknown_chat",
        field="id",
        hint="PUT creates a chat, and so does its first turn; it is forgotten 24 hours after its"
        " latest turn began",
    )
