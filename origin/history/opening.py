"""Where an origin's history lies: beside its ledger file, or in the PostgreSQL of a shared one."""

from __future__ import annotations

import socket
from pathlib import Path

from prometheus_client import CollectorRegistry

from origin.config import LedgerConfig
from origin.history.recorder import HistoryRecorder
from origin.history.schema import DAY_MS, Keeping
from origin.history.sqlite_file import SqliteHistory
from origin.history.store import HistoryStore
from origin.steady_clock import now_ms

FILE_NAME = "history.db"


def history_path(config: LedgerConfig, data: Path) -> Path:
    """The file, where there is no shared ledger."""
    beside = (config.path or data / "ledger.db").parent
    return config.history or beside / FILE_NAME


def recorder_of(config: LedgerConfig, data: Path, registry: CollectorRegistry) -> HistoryRecorder:
    """What records for an origin whose folder is `data`; nothing is opened before it runs."""

    async def opening() -> HistoryStore:
        if config.url is not None:
            return await _shared(config)
        return await SqliteHistory.open(history_path(config, data), now_ms())

    keeping = Keeping(round(config.history_days * DAY_MS), config.history_requests)
    return HistoryRecorder(
        opening if config.history_days else None,
        config.owner or socket.gethostname(),
        keeping,
        now_ms,
        registry,
    )


async def reading(config: LedgerConfig, data: Path) -> HistoryStore:
    """The history of these settings, to be read beside whoever writes it."""
    if config.url is not None:
        return await _shared(config)
    return await SqliteHistory.read(history_path(config, data))


async def _shared(config: LedgerConfig) -> HistoryStore:
    from origin.history.postgres_tables import PostgresHistory  # needs the extra postgres

    assert config.url is not None
    return await PostgresHistory.open(config.url.get_secret_value())
