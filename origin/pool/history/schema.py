"""The tables of a history, described once for SQLite and PostgreSQL, and statements on them.

Times are Unix time in ms, and docs/warm-pools.md describes each column. A change of a table or
column needs a new `VERSION`. Parameters are written as in PostgreSQL, `$1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

VERSION = 1
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
HOURS_KEPT_MS = 400 * DAY_MS
"""Time in ms for which hourly figures are kept, after the requests themselves are deleted."""

TABLES = """
CREATE TABLE IF NOT EXISTS arrival (
    stream   text PRIMARY KEY,
    origin   text   NOT NULL,
    at_ms    bigint NOT NULL,
    model    text   NOT NULL,
    found    text   NOT NULL,
    first_ms bigint,
    took_ms  bigint,
    tokens   bigint,
    outcome  text
);
CREATE INDEX IF NOT EXISTS arrival_by_time ON arrival (at_ms);
CREATE INDEX IF NOT EXISTS arrival_by_model ON arrival (model, at_ms);
CREATE TABLE IF NOT EXISTS arrival_hour (
    hour_ms  bigint NOT NULL,
    origin   text   NOT NULL,
    model    text   NOT NULL,
    arrivals bigint NOT NULL,
    cold     bigint NOT NULL,
    took_ms  bigint NOT NULL,
    tokens   bigint NOT NULL,
    PRIMARY KEY (hour_ms, origin, model)
);
CREATE TABLE IF NOT EXISTS load_span (
    origin   text   NOT NULL,
    worker   bigint NOT NULL,
    asked_ms bigint NOT NULL,
    place    bigint NOT NULL,
    model    text   NOT NULL,
    path     text   NOT NULL,
    stage    text   NOT NULL,
    begin_ms bigint NOT NULL,
    ms       double precision NOT NULL,
    bytes    bigint NOT NULL,
    whole_ms double precision NOT NULL,
    PRIMARY KEY (origin, worker, asked_ms, place)
);
CREATE INDEX IF NOT EXISTS load_span_by_model ON load_span (model, asked_ms);
CREATE TABLE IF NOT EXISTS tier (
    origin text   NOT NULL,
    worker bigint NOT NULL,
    at_ms  bigint NOT NULL,
    model  text   NOT NULL,
    tier   text   NOT NULL,
    reason text   NOT NULL
);
CREATE INDEX IF NOT EXISTS tier_by_time ON tier (at_ms);
CREATE TABLE IF NOT EXISTS decision (
    origin     text     NOT NULL,
    at_ms      bigint   NOT NULL,
    model      text     NOT NULL,
    policy     text     NOT NULL,
    shadow     smallint NOT NULL,
    action     text     NOT NULL,
    reason     text     NOT NULL,
    features   text     NOT NULL,
    until_ms   bigint,
    prewarm_ms bigint
);
CREATE INDEX IF NOT EXISTS decision_by_model ON decision (model, at_ms);
CREATE INDEX IF NOT EXISTS decision_by_time ON decision (at_ms);
"""
MAX_BIGINT = 2**63 - 1
"""Maximum value of an integer column."""
HOT, COLD = "hot", "cold"
"""The highest and the lowest tier, as stored."""
WARM = "('compiled', 'hot')"
"""The tiers in which a model answers at once, as an SQL list."""

ARRIVED = """INSERT INTO arrival (stream, origin, at_ms, model, found)
    VALUES ($1, $2, $3, $4, $5) ON CONFLICT (stream) DO NOTHING"""
SERVED = """UPDATE arrival SET took_ms = $2 - at_ms, first_ms = $3, tokens = $4, outcome = $5
    WHERE stream = $1"""
LOADED = """INSERT INTO load_span (origin, worker, asked_ms, place, model, path, stage, begin_ms,
    ms, bytes, whole_ms)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) ON CONFLICT DO NOTHING"""
CHANGED_TIER = """INSERT INTO tier (origin, worker, at_ms, model, tier, reason)
    VALUES ($1, $2, $3, $4, $5, $6)"""
DECIDED = """INSERT INTO decision (origin, at_ms, model, policy, shadow, action, reason, features,
    until_ms, prewarm_ms) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"""

# Condition for requests to delete: those before $1 (Unix ms), or not among the newest $2.
_TOO_OLD = """at_ms < $1
    OR at_ms <= (SELECT at_ms FROM arrival ORDER BY at_ms DESC LIMIT 1 OFFSET $2)"""
ROLL_UP = (
    f"""INSERT INTO arrival_hour (hour_ms, origin, model, arrivals, cold, took_ms, tokens)
    SELECT at_ms - at_ms % 3600000, origin, model, count(*),
        sum(CASE WHEN found IN {WARM} THEN 0 ELSE 1 END), sum(coalesce(took_ms, 0)),
        sum(coalesce(tokens, 0))
    FROM arrival WHERE {_TOO_OLD} GROUP BY 1, 2, 3
    ON CONFLICT (hour_ms, origin, model) DO UPDATE SET
        arrivals = arrival_hour.arrivals + excluded.arrivals,
        cold = arrival_hour.cold + excluded.cold,
        took_ms = arrival_hour.took_ms + excluded.took_ms,
        tokens = arrival_hour.tokens + excluded.tokens""",
    f"DELETE FROM arrival WHERE {_TOO_OLD}",
)
FORGET_DETAILS = (
    "DELETE FROM load_span WHERE asked_ms < $1",
    "DELETE FROM tier WHERE at_ms < $1",
    "DELETE FROM decision WHERE at_ms < $1",
)
FORGET_HOURS = "DELETE FROM arrival_hour WHERE hour_ms < $1"


class HistoryEntry(NamedTuple):
    """One record: the statement and its values."""

    statement: str
    values: tuple[str | int | float | None, ...]


class Keeping(NamedTuple):
    """Limits of a history: records are kept for `details_ms`, and at most `arrivals` requests."""

    details_ms: int
    arrivals: int

    def entries(self, now_ms: int) -> list[HistoryEntry]:
        """Return the statements that roll up and delete old records."""
        before_ms = now_ms - self.details_ms
        return [
            *(HistoryEntry(statement, (before_ms, self.arrivals)) for statement in ROLL_UP),
            *(HistoryEntry(statement, (before_ms,)) for statement in FORGET_DETAILS),
            HistoryEntry(FORGET_HOURS, (now_ms - HOURS_KEPT_MS,)),
        ]


class HistoryStore(Protocol):
    """Stores a history: in a file, or in the tables of a shared PostgreSQL.

    Methods raise Damaged, Unavailable or ConfigError.
    """

    @property
    def name(self) -> str:
        """Path or URL of the history, without a password."""

    async def write(self, entries: Sequence[HistoryEntry], *, alone: bool = False) -> None:
        """Write all entries or none; `alone` excludes other writers meanwhile.

        Raises ValueError or OverflowError for entries that the tables cannot hold.
        """

    async def rows(self, query: str, *values: str | int) -> Sequence[tuple[Any, ...]]:
        """Return the rows of one SELECT, with values for `$1`, …."""

    async def close(self) -> None: ...


ORDER = (ARRIVED, SERVED, LOADED, CHANGED_TIER, DECIDED, *ROLL_UP, *FORGET_DETAILS, FORGET_HOURS)


def in_groups(entries: Sequence[HistoryEntry]) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
    """Group entries by statement, so that arrivals are written before ends."""
    found: dict[str, list[tuple[object, ...]]] = {statement: [] for statement in ORDER}
    for entry in entries:
        found[entry.statement].append(entry.values)
    return ((statement, rows) for statement, rows in found.items() if rows)
