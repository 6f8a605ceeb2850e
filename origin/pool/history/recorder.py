"""Records the events of a warm pool, without blocking the pool; lost records are counted.

A history is stored beside the ledger's file, or in the PostgreSQL of a shared ledger.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter

from tailrace.ledger.errors import Damaged, TailraceError
from tailrace.origin.config import URL_SCHEMES, LedgerConfig
from tailrace.origin.pool.history import schema
from tailrace.origin.pool.history.schema import (
    COLD,
    DAY_MS,
    HOT,
    HistoryEntry,
    HistoryStore,
    Keeping,
)
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tailrace.origin.pool.records import PoolDecision, PoolRecord, TierChange
from tailrace.origin.steady_clock import now_ms
from tailrace.origin.workers.load_spans import WorkerStart

MAX_QUEUED = 16_384
"""Maximum entries that wait to be written; more are dropped and counted."""
MAX_BATCH = 4_096
"""Maximum entries per write."""
FLUSH_S = 1.0
"""Interval between writes in seconds."""
KEEP_S = 600.0
"""Interval in seconds between roll-ups, which also delete old records."""
LAST_WORDS_S = 3.0
"""Timeout in seconds for writing the rest of the queue when the origin ends."""
MAX_NAME_CHARS = 512
"""Maximum characters of a name or a reason."""
OF_THE_POOL = -1
"""Value in place of a worker's number, in records about a model as a whole."""
log = structlog.get_logger("history")

FILE_NAME = "history.db"


class HistoryRecorder:
    """Records to the history that `opening` opens; records nothing if `opening` is None.

    `now_ms` returns Unix time, and `clock_s` the time by which the starts of workers are measured.
    `place` is the path or URL of the history, by which other processes can open it. `is_shared` is
    True if other origins write to the same history.
    """

    def __init__(
        self,
        opening: Callable[[], Awaitable[HistoryStore]] | None,
        origin: str,
        keeping: Keeping,
        now_ms: Callable[[], int],
        registry: CollectorRegistry | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        place: str | None = None,
        is_shared: bool = False,
    ) -> None:
        self.place = place if opening else None
        self.store: HistoryStore | None = None
        self.problem: str | None = None if opening else "ledger.history_days is 0"
        self.dropped = 0
        self.written = 0
        self._opening = opening
        self._origin, self._is_shared = _clean(origin), is_shared
        self._keeping = keeping
        self.now_ms = now_ms
        self._clock_s = clock_s
        self._queue: deque[HistoryEntry] = deque()
        self.learner: Callable[[HistoryStore, str], Coroutine[Any, Any, None]] | None = None
        """Function that is called once, when the store is open, with the store and this origin's
        name; the name is empty if the store is not shared."""
        told = "Entries of the history that are stored"
        self._written = Counter("tailrace_history_written", told, registry=registry)
        told = "Number of history entries lost to a full queue, or refused by the database"
        self._dropped = Counter("tailrace_history_dropped", told, registry=registry)

    # ---- what happens ----

    def arrived(self, stream: bytes, model: str, found: str) -> None:
        """Record a request for a model that was in the tier `found` at that time."""
        values = (stream.hex(), self._origin, self.now_ms(), _clean(model), found)
        self._put(schema.ARRIVED, *values)

    def served(self, stream: bytes, first_ms: int | None, tokens: int, outcome: str) -> None:
        """Record the end of a request.

        `first_ms` is the time in ms to the request's first frame, if this origin has sent it one.
        """
        self._put(schema.SERVED, stream.hex(), self.now_ms(), first_ms, tokens, outcome)

    def loaded(self, worker: int, model: str, start: WorkerStart | None) -> None:
        """Record that a worker is ready; `start` has the stages of its start, if they are known."""
        self.changed_tier(worker, model, HOT, "it is ready")
        if start is None:
            return
        zero_ms = self.now_ms() - self._clock_s() * 1e3

        def unix_ms(at_s: float) -> int:
            return round(zero_ms + at_s * 1e3)

        whole_ms = round((start.ready_s - start.asked_s) * 1e3, 3)
        for place, stage in enumerate(start.stages):
            self._put(
                schema.LOADED,
                *(self._origin, worker, unix_ms(start.asked_s), place, _clean(model), start.path),
                *(_clean(stage.name), unix_ms(stage.begin_s)),
                *(round((stage.end_s - stage.begin_s) * 1e3, 3), stage.size, whole_ms),
            )

    def changed_tier(self, worker: int, model: str, tier: str, reason: str) -> None:
        now_ms = self.now_ms()
        values = (self._origin, worker, now_ms, _clean(model), tier, _clean(reason))
        self._put(schema.CHANGED_TIER, *values)

    def record(self, told: PoolRecord, *, shadow: bool = False) -> None:
        """Record a decision or a change of the pool.

        Requests are left out here, because `arrived` and `served` record them.
        """
        now_ms = self.now_ms()
        if isinstance(told, TierChange):
            self.changed_tier(OF_THE_POOL, told.model, told.tier.word, told.reason)
        if not isinstance(told, PoolDecision):
            return
        times = (told.keep_until_s, told.prewarm_at_s)
        until_ms, prewarm_ms = (
            None
            if at_s is None or not isfinite(at_s)
            else min(now_ms + round((at_s - told.at_s) * 1e3), schema.MAX_BIGINT)
            for at_s in times
        )
        self._put(
            schema.DECIDED,
            *(self._origin, now_ms, _clean(told.model), told.policy, int(shadow)),
            *(told.choice.value, _clean(told.reason), json.dumps(told.features)),
            *(until_ms, prewarm_ms),
        )

    def _put(self, statement: str, *values: str | int | float | None) -> None:
        if self._opening is None:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._drop(1)
        else:
            self._queue.append(HistoryEntry(statement, values))

    def _drop(self, entries: int) -> None:
        """Count entries that are lost."""
        self.dropped += entries
        self._dropped.inc(entries)

    # ---- what is kept ----

    async def run(self) -> None:
        """Write and roll up until cancelled; no error of the history ends the origin."""
        self.changed_tier(OF_THE_POOL, "", COLD, "the origin has started")
        kept_s = None
        loop = asyncio.get_running_loop()
        try:
            while self._opening is not None:
                await self.attempt(self.flush)
                await self.attempt(self._teach)
                if self.store is not None and (kept_s is None or loop.time() - kept_s > KEEP_S):
                    kept_s = loop.time()
                    await self.attempt(self.keep)
                await asyncio.sleep(FLUSH_S)
            await asyncio.Event().wait()
        finally:
            self.changed_tier(OF_THE_POOL, "", COLD, "the origin ends")
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await self.attempt(self.flush)
            finally:
                if self.store is not None:
                    await self.store.close()

    async def flush(self) -> None:
        """Write the queued entries. A batch that the store would always refuse is dropped."""
        if self._opening is None:
            return
        if self.store is None:
            self.store = await self._opening()
            log.info("history.open", history=self.store.name)
        while batch := list(islice(self._queue, MAX_BATCH)):
            try:
                await self.store.write(batch)
            except (TailraceError, OSError):
                raise  # `run` tries this batch again
            except Exception as error:  # noqa: BLE001 - no history ends its origin
                log.error("history.batch_dropped", error=repr(error), entries=len(batch))
                self._drop(len(batch))
            else:
                self.problem = None
                self.written += len(batch)
                self._written.inc(len(batch))
            for _ in batch:
                self._queue.popleft()

    async def _teach(self) -> None:
        learner = self.learner
        if learner is not None and self.store is not None:
            self.learner = None
            await learner(self.store, self._origin if self._is_shared else "")

    async def keep(self) -> None:
        """Roll up and delete old records."""
        if self.store is not None:
            await self.store.write(self._keeping.entries(self.now_ms()), alone=True)

    async def attempt(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do `work`, and record its error, if any.

        `problem` keeps the error until a batch is written. A damaged store is closed, so that the
        next attempt sets it aside and creates another.
        """
        working = asyncio.ensure_future(work())
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            # Let a write finish, since an interrupted batch would be written twice.
            with suppress(Exception):
                await asyncio.wait_for(working, LAST_WORDS_S)
            raise
        except Exception as error:  # noqa: BLE001 - no history ends its origin
            problem = str(error) if isinstance(error, TailraceError | OSError) else repr(error)
            if self.problem != problem:
                log.error("history.failed", error=problem, waiting=len(self._queue))
            self.problem = problem
            if isinstance(error, Damaged) and self.store is not None:
                store, self.store = self.store, None
                await store.close()

    def described(self) -> dict[str, Any]:
        """Return the recorder's state for operators."""
        return {
            "history": None if self.store is None else self.store.name,
            "problem": self.problem,
            "written": self.written,
            "waiting": len(self._queue),
            "dropped": self.dropped,
        }


def no_history() -> HistoryRecorder:
    return HistoryRecorder(None, "", Keeping(0, 0), lambda: 0)


def _clean(text: str) -> str:
    """Return a text without characters that some databases refuse."""
    return text.replace("\0", "�").encode("utf-8", "replace").decode()[:MAX_NAME_CHARS]


def history_place(config: LedgerConfig, data: Path) -> str:
    """Return where an origin keeps its history: the path of its file, or a shared ledger's URL.

    The URL includes the ledger's password.
    """
    if config.url is not None:
        return config.url.get_secret_value()
    beside = (config.path or data / "ledger.db").parent
    return str(config.history or beside / FILE_NAME)


def recorder_of(config: LedgerConfig, data: Path, registry: CollectorRegistry) -> HistoryRecorder:
    """Return the recorder of an origin whose folder is `data`; nothing is opened before it runs."""
    place = history_place(config, data)
    return HistoryRecorder(
        partial(reading, place, writes=True) if config.history_days else None,
        config.owner or socket.gethostname(),
        Keeping(round(config.history_days * DAY_MS), config.history_requests),
        now_ms,
        registry,
        place=place,
        is_shared=config.url is not None,
    )


async def reading(place: str, *, writes: bool = False) -> HistoryStore:
    """Open the history at a path or URL, for reading unless `writes` is True.

    Any process may read a history, also while an origin writes it.
    """
    if place.startswith(URL_SCHEMES):
        # Imported here, because it needs the extra `postgres`.
        from tailrace.origin.pool.history.postgres_tables import PostgresHistory

        return await PostgresHistory.open(place, make=writes)
    path = Path(place)
    return await (SqliteHistory.open(path, now_ms()) if writes else SqliteHistory.read(path))
