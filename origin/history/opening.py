"""Where an origin's history lies: beside its ledger file, or in the PostgreSQL of a shared one."""

from __future__ import annotations

import socket
from pathlib import Path

from prometheus_client import CollectorRegistry

from origin.config import URL_SCHEMES, LedgerConfig
from origin.history.recorder import HistoryRecorder
from origin.history.schema import DAY_MS, HistoryStore, Keeping
from origin.history.sqlite_file import SqliteHistory
from origin.steady_clock import now_ms

FILE_NAME = "history.db"


def history_place(config: LedgerConfig, data: Path) -> str:
    """A path, or the URL of a shared ledger, with its password."""
    if config.url is not None:
        return config.url.get_secret_value()
    beside = (config.path or data / "ledger.db").parent
    return str(config.history or beside / FILE_NAME)


def recorder_of(config: LedgerConfig, data: Path, registry: CollectorRegistry) -> HistoryRecorder:
    """What records for an origin whose folder is `data`; nothing is opened before it runs."""

    place = history_place(config, data)

    async def opening() -> HistoryStore:
        if config.url is not None:
            from origin.history.postgres_tables import PostgresHistory  # needs the extra postgres

            return await PostgresHistory.open(place)
        return await SqliteHistory.open(Path(place), now_ms())

    keeping = Keeping(round(config.history_days * DAY_MS), config.history_requests)
    return HistoryRecorder(
        opening if config.history_days else None,
        config.owner or socket.gethostname(),
        keeping,
        now_ms,
        registry,
        place=place,
        is_shared=config.url is not None,
    )


async def reading(place: str) -> HistoryStore:
    """The history at a place, in whichever process, beside whoever writes it."""
    if place.startswith(URL_SCHEMES):
        from origin.history.postgres_tables import PostgresHistory  # needs the extra postgres

        return await PostgresHistory.open(place, make=False)
    return await SqliteHistory.read(Path(place))
