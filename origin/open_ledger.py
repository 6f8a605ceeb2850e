"""Opens the ledger that the settings name: a SQLite file, or a shared PostgreSQL database."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.interface import Ledger
from tailrace.ledger.process.durable_file import replace_file
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.config import LedgerConfig

SEEN_NAME = "ledger.db.seen"
"""Name of a file in the data folder that holds the path of the ledger. It is written once the
ledger exists. If the ledger then disappears, the origin refuses to start with an empty one."""

log = structlog.get_logger("origin")


async def open_ledger(
    config: LedgerConfig,
    data: Path,
    now_ms: Callable[[], int],
    reached: tuple[str | None, int] | None = None,
) -> Ledger:
    """Open the ledger of an origin.

    Args:
        config: The settings of the ledger.
        data: The origin's data folder.
        now_ms: A function that returns Unix time in ms.
        reached: Host and port at which other origins reach this one; see `PostgresLedger.open`.

    Raises:
        ConfigError: The driver for PostgreSQL is not installed, or the file has disappeared.
        LedgerFailed: The storage cannot be opened.
    """
    if config.url is None:
        retention = RetentionSettings(
            max_stream_bytes=config.max_stream_bytes,
            max_ledger_bytes=config.max_ledger_bytes,
            object_share=config.object_share,
            cold_after_s=config.cold_after_s,
            usage_s=config.usage_retention_s,
        )
        path = config.path or data / "ledger.db"
        _require_known(path, data)
        ledger = await SqliteLedger.open(path, now_ms, retention=retention)
        _note_known(path, data)
        return ledger
    try:
        from tailrace.ledger.postgres.ledger import PostgresLedger
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "tailrace":
            raise  # a module of Tailrace is missing, so installing a package cannot help
        raise ConfigError(
            f"the package {error.name!r} is not installed",
            field="ledger.url",
            hint="pip install 'tailrace[postgres]'",
        ) from error
    owner = owner_name(config.owner)
    log.info("ledger.shared", owner=owner, lease_s=config.lease_s)
    url = config.url.get_secret_value()
    return await PostgresLedger.open(
        url,
        now_ms,
        owner=owner,
        lease_s=config.lease_s,
        reached=reached,
        usage_s=config.usage_retention_s,
    )


def _require_known(path: Path, data: Path) -> None:
    """Raise `ConfigError` if the ledger of this data folder has disappeared.

    A new, empty ledger would answer 404 for every stream that the old one acknowledged.
    """
    seen = data / SEEN_NAME
    with suppress(OSError):
        if not path.exists() and seen.read_text("utf-8") == _named(path, data):
            raise ConfigError(
                f"the ledger {path} has disappeared",
                field="ledger.path",
                hint="mount its disk, or restore the file and the files beside it;"
                f" to begin with an empty ledger, remove {seen}",
            )


def _note_known(path: Path, data: Path) -> None:
    """Record in the data folder that there is a ledger at `path`."""
    seen, named = data / SEEN_NAME, _named(path, data)
    with suppress(OSError):  # without this file, `_require_known` only skips its check
        if not seen.exists() or seen.read_text("utf-8") != named:
            data.mkdir(parents=True, exist_ok=True)
            replace_file(seen, named.encode())


def _named(path: Path, data: Path) -> str:
    """Return the ledger's path relative to the data folder, so both may be moved together."""
    return os.path.relpath(path, data)


def owner_name(name: str | None, random: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Return the name of this process in a shared ledger: `name` or HOST:PID, and a random part.

    A restarted origin has lost its running streams. Because of the random part, it does not count
    as the living owner of these streams, so they are taken over.
    """
    return f"{name or f'{socket.gethostname()}:{os.getpid()}'}:{random(4).hex()}"
