"""The streams that run or wait at an origin, a page at a time, and what has changed of them.

A page is a window of the sorted list, so that looking at ten thousand streams costs no more than
looking at the fifty that somebody sees. Asked with the cursor of an earlier answer, what has not
changed since is named only, and of what has ended only what ended since is told.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from origin.generations.runs import Runs
from origin.generations.stream import EndedStream, GeneratedStream
from origin.operator.query import Query

MAX_PAGE = 1000
"""Streams of one page."""
DEFAULT_PAGE = 100
MAX_OFFSET = 1_000_000
MAX_TOLD_ENDED = 100
"""Of the streams that have ended, the last ones."""

Document = dict[str, Any]


class LivePages:
    """`unix_ms` gives the Unix time of a moment of the metrics' clock."""

    def __init__(self, runs: Runs, unix_ms: Callable[[float], int]) -> None:
        self._runs = runs
        self._unix_ms = unix_ms
        self._incarnation = secrets.token_hex(4)
        count = runs.readers.count
        self._sorts: dict[str, Callable[[GeneratedStream], Any]] = {
            "began_ms": attrgetter("progress.began_s"),
            "last_ms": lambda stream: stream.released_s or 0.0,
            "tokens": attrgetter("made"),
            "frames": attrgetter("progress.next_index"),
            "resumes": attrgetter("progress.resumes"),
            "takeovers": attrgetter("epoch"),
            "readers": lambda stream: count(stream.id),
            "state": state_of,
            "tenant": attrgetter("recipe.tenant"),
            "model": attrgetter("recipe.model"),
            "priority": attrgetter("recipe.priority"),
            "id": attrgetter("id"),
        }

    def page(self, query: Query) -> Document:
        sort = query.word("sort", self._sorts, "began_ms")
        falls = query.word("order", ("asc", "desc"), "desc") == "desc"
        offset = query.number("offset", 0, MAX_OFFSET)
        limit = query.number("limit", DEFAULT_PAGE, MAX_PAGE)
        since = self._since(query.text("since"))
        wanted = {name: query.text(name) for name in ("tenant", "model", "state", "id")}
        query.done()
        live = self._runs.table.by_id.values()
        found = sorted(_matching(live, wanted), key=self._sorts[sort], reverse=falls)
        return {
            "now_ms": self._unix_ms(self._runs.clock()),
            "live": len(live),
            "paused": self._runs.paused_count,
            "states": Counter(map(state_of, live)),
            "found": len(found),
            "streams": [
                self._row(stream)
                if stream.progress.revision > since
                else {"id": stream.id.hex(), sort: self._row(stream)[sort]}
                for stream in found[offset : offset + limit]
            ],
            "ended": [self._ended(one) for one in self._ended_since(since)],
            "cursor": f"{self._incarnation}.{self._runs.table.revision}",
        }

    def live(self, stream: bytes) -> Document | None:
        """One that runs or waits here."""
        known = self._runs.table.by_id.get(stream)
        return None if known is None else self._row(known)

    def ended(self, stream: bytes) -> Document | None:
        """One that ended here lately."""
        found = self._found(stream)
        return None if found is None else self._ended(found)

    def frame_ms(self, stream: bytes) -> Callable[[int], int | None]:
        """When each frame of it was released here, in Unix ms, as far as that is known."""
        live, ended = self._runs.table.by_id.get(stream), self._found(stream)
        known = live or ended

        def at_ms(index: int) -> int | None:
            at_s = None if known is None else known.progress.time_s(index)
            return None if at_s is None else self._unix_ms(at_s)

        return at_ms

    def _found(self, stream: bytes) -> EndedStream | None:
        return next((one for one in self._runs.table.ended if one.id == stream), None)

    def _since(self, cursors: str) -> int:
        """The revision that a cursor of ours names; those of other origins stand beside it."""
        for cursor in cursors.split(","):
            incarnation, _, revision = cursor.partition(".")
            if incarnation == self._incarnation and revision.isascii() and revision.isdecimal():
                return int(revision)
        return -1

    def _ended_since(self, since: int) -> list[EndedStream]:
        """The latest first."""
        lately = [one for one in self._runs.table.ended if one.progress.revision > since]
        return lately[: -MAX_TOLD_ENDED - 1 : -1]

    def _row(self, stream: GeneratedStream) -> Document:
        recipe, progress = stream.recipe, stream.progress
        released_s = stream.released_s
        return {
            "id": stream.id.hex(),
            "tenant": recipe.tenant,
            "model": recipe.model,
            "state": state_of(stream),
            "priority": recipe.priority,
            "began_ms": self._unix_ms(progress.began_s),
            "last_ms": None if released_s is None else self._unix_ms(released_s),
            "tokens": stream.made,
            "frames": progress.next_index,
            "readers": self._runs.readers.count(stream.id),
            "resumes": progress.resumes,
            "takeovers": max(0, stream.epoch - 1),
            "worker": None if stream.slot is None else stream.slot.number,
        }

    def _ended(self, ended: EndedStream) -> Document:
        return {
            "id": ended.id.hex(),
            "tenant": ended.tenant,
            "model": ended.model,
            "priority": ended.priority,
            "began_ms": self._unix_ms(ended.progress.began_s),
            "ended_ms": self._unix_ms(ended.ended_s),
            "tokens": ended.tokens,
            "frames": ended.progress.next_index,
            "resumes": ended.progress.resumes,
            "takeovers": max(0, ended.epoch - 1),
            "finish_reason": ended.reason.word,
        }


def unix_clock(now_ms: Callable[[], int], clock: Callable[[], float]) -> Callable[[float], int]:
    """What turns a moment of `clock`, in seconds, into Unix ms: always into the same."""
    zero_ms = now_ms() - clock() * 1000
    return lambda at_s: round(zero_ms + at_s * 1000)


def state_of(stream: GeneratedStream) -> str:
    if stream.cancelled:
        return "cancelling"
    if stream.slot is None:
        return "waiting"
    return "running" if stream.ordered else "starting"


def encoded(document: Document) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _matching(
    streams: Iterable[GeneratedStream], wanted: dict[str, str]
) -> Iterable[GeneratedStream]:
    """Those of this tenant, model and state, whose id begins so; what is empty is any."""
    tenant, model, state, prefix = (wanted[key] for key in ("tenant", "model", "state", "id"))
    if tenant:
        streams = (one for one in streams if one.recipe.tenant == tenant)
    if model:
        streams = (one for one in streams if one.recipe.model == model)
    if state:
        streams = (one for one in streams if state_of(one) == state)
    if prefix:
        streams = (one for one in streams if one.id.hex().startswith(prefix.lower()))
    return streams
