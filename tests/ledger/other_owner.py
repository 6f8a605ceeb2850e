"""An owner of a ledger in a process of its own, while the test's process reads it.

Two copies of SQLite must not have one file open in one process: the owner's is apsw's, that of
the tools is the system's. With `OtherOwner` a test says what the owner does, and when.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import apsw

from tailrace.ledger.interface import Ledger
from tests.ledger.ledger_files import Place, PostgresPlace, SqlitePlace, append, end, three_streams
from tests.ledger.ledger_files import token as token_at

ROOT = Path(__file__).resolve().parents[2]


class OtherOwner:
    """The owner of `three_streams` at a place, in a process of its own."""

    def __init__(self, place: Place) -> None:
        where = ("file", str(place.place.parent)) if isinstance(place, SqlitePlace) else ()
        if isinstance(place, PostgresPlace):
            where = ("database", place.dsn)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *where],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._require("done")

    def __enter__(self) -> OtherOwner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def append(self, stream: bytes, *indexes: int, ends: bool = False) -> None:
        """Tokens of these indexes, and an end behind them."""
        self._do("append", stream.hex(), indexes, ends)

    def delete(self, stream: bytes) -> None:
        self._do("delete", stream.hex())

    def begin_wal_anew(self) -> None:
        """Checkpoint the WAL; fails while a reader needs it."""
        self._do("begin_wal_anew")

    def _do(self, *order: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        self._require("done")

    def _require(self, answer: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == answer


async def _own(kind: str, where: str) -> None:
    place = SqlitePlace(Path(where)) if kind == "file" else PostgresPlace(where)
    ledger = await three_streams(place)
    try:
        print("done", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await _obey(ledger, place, *json.loads(line))
            print("done", flush=True)
    finally:
        await ledger.close()


async def _obey(ledger: Ledger, place: Place, order: str, stream: str = "", *rest: object) -> None:
    match order, rest:
        case "append", [list(indexes), ends]:
            records = [token_at(index) for index in indexes]
            await append(
                ledger, bytes.fromhex(stream), records + [end(indexes[-1] + 1)] * bool(ends)
            )
        case "delete", _:
            await ledger.delete(bytes.fromhex(stream))
        case "begin_wal_anew", _:
            path = Path(place.place)
            connection = apsw.Connection(str(path))
            connection.execute("SELECT 1 FROM sqlite_schema").fetchall()
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            assert path.with_name(path.name + "-wal").stat().st_size == 0
            connection.close()


if __name__ == "__main__":
    asyncio.run(_own(*sys.argv[1:]))
