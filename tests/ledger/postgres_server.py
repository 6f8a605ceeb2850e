"""Real PostgreSQL servers in temporary folders, to be killed and promoted by tests.

Debian and Ubuntu: `apt-get install postgresql`; macOS: `brew install postgresql@17`. The
server refuses to run as root, so root starts it as the user `postgres`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg

from tests.needs import needs

PROGRAMS = ("initdb", "postgres", "pg_basebackup")
HOW_TO_GET_POSTGRES = "apt-get install postgresql, or brew install postgresql@17"
DEBIAN = Path("/usr/lib/postgresql")
START_TIMEOUT_S = 60.0
POLL_S = 0.02
USER = "postgres"
PORT = 5432  # only in the name of the Unix socket

# fsync stays on: what these tests prove is durability. The sizes are for small machines.
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "1GB",
    "wal_level": "replica",
    "max_wal_senders": "8",
    "log_min_messages": "warning",
}


def binaries() -> Path | None:
    """Return the folder of the newest server programs that this machine has."""
    on_path = shutil.which("postgres")
    found = [Path(on_path).resolve().parent] if on_path else []
    if shutil.which("pg_config"):
        asked = subprocess.run(
            ["pg_config", "--bindir"], capture_output=True, text=True, check=True
        )
        found.append(Path(asked.stdout.strip()))
    if DEBIAN.is_dir():
        versions = [path for path in DEBIAN.iterdir() if path.name.isdigit()]
        found += [path / "bin" for path in sorted(versions, key=lambda p: -int(p.name))]
    return next((folder for folder in found if all((folder / p).exists() for p in PROGRAMS)), None)


def require_binaries() -> Path:
    """Return the programs; without them the test is skipped, but in CI it fails."""
    folder = binaries()
    if folder is None:
        programs = ", ".join(PROGRAMS)
        needs(f"no PostgreSQL 15 or newer ({programs})", HOW_TO_GET_POSTGRES)
    return folder


class PostgresServer:
    """A PostgreSQL server on a Unix socket in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.bin = require_binaries()
        self.folder = folder
        self.data = folder / "data"
        self.port = PORT
        self._process: subprocess.Popen[bytes] | None = None
        self._free: list[str] = []  # databases that hold nothing
        self._numbers = itertools.count(1)

    @classmethod
    def make(cls) -> PostgresServer:
        """Return a new empty server, started."""
        server = cls(_folder())
        server._run("initdb", "-D", server.data, "-U", USER, "--auth=trust", "--no-sync")
        server.start()
        return server

    def standby(self) -> PostgresServer:
        """Return a started synchronous standby: commits here wait for it from now on."""
        other = PostgresServer(_folder())
        self._run(
            "pg_basebackup", "-h", self.folder, "-p", self.port, "-U", USER, "-D", other.data, "-R",
            "--checkpoint=fast", "--no-sync",
        )  # fmt: skip
        other.start()
        self.set("synchronous_standby_names", "ANY 1 (*)")
        self.until("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'")
        return other

    # ---- life ----

    def start(self, port: int = PORT, **settings: str) -> None:
        """Start it and wait until it answers; `settings` are for this start only.

        On another `port` those who know it by the usual one cannot reach it.
        """
        self.port = port
        place = {"unix_socket_directories": str(self.folder), "port": str(port)}
        chosen = {**SETTINGS, **place, **settings}
        flags = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", self.data, *flags),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # So that ^C in the test run does not stop the server under its tests.
                start_new_session=True,
            )
        self._wait_until_it_answers()

    def kill(self) -> None:
        """SIGKILL the postmaster and every process of it at once."""
        assert self._process is not None
        pids = [self._process.pid, *_children(self._process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        # Orphans are gone once they give up the shared memory that the pid file names; a
        # new postmaster checks that too and refuses to start beside them.
        _wait_for_the_end_of(pids)

    def promote(self) -> None:
        """Make a standby the primary; it waits for no standby of its own."""
        self.set("synchronous_standby_names", "")
        self.execute("SELECT pg_promote(true, 60)")

    def stop(self) -> None:
        """End it without ceremony and remove its folder."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- use ----

    def dsn(self, database: str = "postgres") -> str:
        return f"host={self.folder} port={self.port} user={USER} dbname={database}"

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield the DSN of a database that holds nothing and that no other test has meanwhile."""
        if not self._free:
            self._free.append(f"t{next(self._numbers)}")
            self.execute(f"CREATE DATABASE {self._free[-1]}")
        name = self._free.pop()
        yield self.dsn(name)
        # Emptying it takes a tenth of the time and the disk of making another.
        self.execute("DROP SCHEMA IF EXISTS tailrace, tailrace_history CASCADE", self.dsn(name))
        self._free.append(name)

    def execute(self, sql: str, dsn: str | None = None) -> list[tuple[object, ...]]:
        """Run one statement as superuser, outside a transaction; returns its rows."""
        with psycopg.connect(dsn or self.dsn(), autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        self.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        self.execute("SELECT pg_reload_conf()")
        self.until(f"SELECT count(*) WHERE current_setting('{name}') = '{value}'")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    # ---- inside ----

    def until(self, sql: str) -> None:
        """Wait until the number that `sql` selects is not 0."""
        for _ in _attempts():
            if self.execute(sql) != [(0,)]:
                return
        raise AssertionError(f"{sql} did not become true: {self.log()}")

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        for _ in _attempts():
            assert self._process.poll() is None, f"the server ended: {self.log()}"
            with suppress(psycopg.OperationalError):
                self.execute("SELECT 1")
                return
        raise AssertionError(f"the server does not answer: {self.log()}")

    def _run(self, program: str, *arguments: object) -> None:
        done = subprocess.run(
            self._command(program, *arguments), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def _command(self, program: str, *arguments: object) -> list[str]:
        command = [str(self.bin / program), *map(str, arguments)]
        return [*_as_server_user(), *command]


def _as_server_user() -> Sequence[str]:
    """Return a prefix that drops root's rights, and ends the server with the test run."""
    if os.geteuid() != 0:
        return ()
    return ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--pdeathsig=QUIT")


def _folder() -> Path:
    """Return a short path, as a Unix socket's may have no more than about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="tailrace-pg-"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER, USER)
    return folder


def _children(pid: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(child) for child, parent in pairs if int(parent) == pid]


def _wait_for_the_end_of(pids: Sequence[int]) -> None:
    for _ in _attempts():
        listed = subprocess.run(
            ["ps", "-o", "stat=", "-p", ",".join(map(str, pids))],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if all(line.startswith("Z") for line in listed.stdout.split()):
            return
    raise AssertionError(f"processes {pids} outlive SIGKILL")


def _attempts() -> Iterator[int]:
    """Numbers, a pause between them, for START_TIMEOUT_S."""
    for attempt in range(int(START_TIMEOUT_S / POLL_S)):
        yield attempt
        time.sleep(POLL_S)
