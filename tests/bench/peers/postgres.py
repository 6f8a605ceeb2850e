"""PostgreSQL: one row per frame, one INSERT of 64 rows per step, with psycopg.

The primary key (stream, idx) is what orders the frames and refuses a second one of the
same index. The statement is prepared and its parameters are binary.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import psycopg

from tests.bench.bench_ledger_work import (
    Batch,
    Disk,
    Missing,
    Mode,
    Replayer,
    Sample,
    check_replay,
    frame,
    timed_steps,
)
from tests.bench.peers.server import Server, is_root, owned_folder, run_as
from tests.e2e.processes import free_port
from tests.ledger.postgres_server import HOW_TO_GET_POSTGRES, USER, binaries

INSERT = (
    "INSERT INTO frame (stream, idx, data)"
    " SELECT * FROM unnest(%s::int8[], %s::int4[], %s::bytea[])"
)
SELECT = "SELECT data FROM frame WHERE stream = %s ORDER BY idx"
LOAD_FRAMES = 5000
"""Rows per INSERT while a long stream is loaded."""


class Postgres(Replayer):
    """A default server: fsync and synchronous_commit are on, shared_buffers 128 MB."""

    name = "PostgreSQL, one INSERT per step"
    mode = Mode.POWER

    def __init__(self) -> None:
        self._server: Server | None = None
        self._connection: psycopg.Connection[Any] | None = None

    def start(self, folder: Path) -> None:
        programs = binaries()
        if programs is None:
            raise Missing(f"needs PostgreSQL 15 or newer: {HOW_TO_GET_POSTGRES}")
        user = USER if is_root() else None  # the server refuses to run as root
        data = owned_folder(folder / "data", user)
        port = free_port()
        initdb = ["-D", data, "-U", USER, "--auth=trust", "--locale=C", "-E", "UTF8"]
        run_as(user, [programs / "initdb", *initdb])
        options = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        self._server = Server(
            [programs / "postgres", "-D", data, *flags],
            "ready to accept connections",
            user=user,
            end=signal.SIGINT,  # a fast shutdown
        )
        self._connection = psycopg.connect(
            f"host=127.0.0.1 port={port} user={USER} dbname=postgres", autocommit=True
        )
        self._connection.execute(
            "CREATE TABLE frame (stream int8, idx int4, data bytea, PRIMARY KEY (stream, idx))"
        )
        self._cursor = self._connection.cursor(binary=True)

    def append(self, batch: Batch) -> Sample:
        numbers = list(batch.numbers)
        steps = [self._insert(numbers, [i] * batch.streams) for i in range(batch.steps)]
        return timed_steps(steps, batch.streams * batch.steps)

    def load(self, number: int, count: int) -> None:
        for start in range(0, count, LOAD_FRAMES):
            some = list(range(start, min(start + LOAD_FRAMES, count)))
            self._insert([number] * len(some), some)()

    def settle(self) -> Disk:
        """Table and index, before and after VACUUM FULL; the WAL is not counted."""
        assert self._connection is not None
        sizes = []
        for step in ("CHECKPOINT", "VACUUM (FULL, ANALYZE) frame"):
            self._connection.execute(step)
            row = self._connection.execute("SELECT pg_total_relation_size('frame')").fetchone()
            assert row is not None
            sizes.append(int(row[0]))
        return Disk(*sizes)

    def replay(self, number: int, count: int) -> float:
        began = perf_counter()
        rows = self._cursor.execute(SELECT, (number,), prepare=True).fetchall()
        frames = [row[0] for row in rows]
        took = perf_counter() - began
        check_replay(frames, count)
        return took

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._server is not None:
            self._server.stop()

    def _insert(self, numbers: list[int], indexes: list[int]) -> Callable[[], None]:
        frames = [frame(index) for index in indexes]
        values = (numbers, indexes, frames)
        return partial(_execute, self._cursor, values)


def _execute(cursor: psycopg.Cursor[Any], values: tuple[object, ...]) -> None:
    cursor.execute(INSERT, values, prepare=True)
