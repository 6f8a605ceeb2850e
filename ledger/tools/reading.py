"""Which reader is for which ledger."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from ledger.tools.reader import LedgerReader


def reading(place: Path | str) -> AbstractAsyncContextManager[LedgerReader]:
    """The ledger in a file, or in the database that a URL names, as it is at this moment.

    Raises `ConfigError` where there is none, `LedgerFailed` where the server is away.
    """
    # Imported here, because the driver for PostgreSQL is an extra.
    if isinstance(place, Path):
        from ledger.tools.sqlite_reader import reading_file

        return reading_file(place)
    from ledger.tools.postgres_reader import reading_database

    return reading_database(place)
