"""Connections that reconnect to PostgreSQL, and the conversion of its errors.

A lost connection is made again until a time limit. The interrupted work is repeated, so it must be
idempotent. If the URL names several hosts (a primary and its standbys), only one that accepts
writes is used. A server that is unresponsive for too long is treated as lost, and tried last from
then on.

What this process remembers of the tables is valid for one server, and for a standby of it that had
all of its commits. With any other server every operation raises `LedgerFailed`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.errors import Diagnostic
from psycopg.pq import Conninfo, PGconn, Ping, TransactionStatus

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, LedgerFailed, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.postgres.rows import register
from tailrace.ledger.postgres.schema import Identity, check_server
from tailrace.ledger.process.settings import MAX_PORT

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]

CONNECT_TIMEOUT_S = 5
OPERATORS = ("28", "3D", "42501")
"""Beginnings of SQLSTATEs that an operator must fix: login, database name, permission."""
SHOWN = ("host", "port", "dbname", "user")
RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0
"""Maximum seconds between attempts to connect."""
WRITE_TIMEOUT_S = 60.0
"""Seconds that a commit waits for a lost server; after that this process stops using the ledger."""
READ_TIMEOUT_S = 10.0
"""Seconds that other work waits for a lost server; then its caller gets a retryable error."""
OPEN_TIMEOUT_S = 5.0
MAX_UNDOINGS = 8
"""Maximum retries of a transaction that the server rolled back for a conflict or a cancellation."""
POOL_CONNECTIONS = 4
"""Number of connections for reads and ungrouped writes, besides the writer's."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds without an answer after which the connections are cut and another host is tried."""
IDLE_TRANSACTION_MS = 3_000
"""Milliseconds after which an origin that stalls inside a transaction loses its locks."""

_DEFAULTS: dict[str, str | int] = {
    "target_session_attrs": "read-write",
    "connect_timeout": CONNECT_TIMEOUT_S,
    # Detect a dead machine within about ten seconds.
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# Statements that join tables with arrays (`unnest`) must use the indexes of the tables, even if the
# tables were small when the server planned the statements. So other scans and joins are off.
# statement_timeout is off because it would also end a COMMIT's wait for a synchronous standby: the
# server would then report success, although the standby may lack the transaction (syncrep.c).
_SETTINGS = {
    "search_path": "tailrace",
    "plan_cache_mode": "force_generic_plan",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
    "statement_timeout": 0,
    "idle_in_transaction_session_timeout": IDLE_TRANSACTION_MS,
}
_HINT = (
    "like postgresql://user:password@host:5432/database, an @ or / of the password as %40 or %2F"
)
_PLACE = ("host", "hostaddr", "port")
# SQLSTATEs after which a retry may succeed: the server starts, stops or is not the primary now.
_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25006", "25P03")
# SQLSTATEs of a rollback by the server: a conflict with another transaction, or a cancellation.
_UNDONE = ("40001", "40P01", "55P03", "57014")
# SQLSTATEs of temporary faults: the server lacks memory or disk space, or a read has failed.
_PASSING = ("53", "58030")


class Connection(AsyncConnection[Any]):
    """A connection that is cut if the server does not answer for too long.

    PostgreSQL may hang without being gone: a primary without its standbys delays every commit for
    ever, and so does a disk that does not respond. A timeout set in the server is no solution,
    because it could let a commit return before a standby has the commit. The connection is cut by
    shutting down its socket, so that waiters get the error of a lost connection. Cancelling the
    query instead would wait for the server to confirm. `hung` is called before the socket is shut
    down.
    """

    hung: Callable[[Connection], None] | None = None
    _asked_at: float | None = None

    async def wait(self, gen: PQGen[Any], *arguments: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        self._asked_at = loop.time()
        timer = loop.call_later(ANSWER_TIMEOUT_S, self._give_up)
        try:
            return await super().wait(gen, *arguments, **options)
        finally:
            timer.cancel()
            self._asked_at = None

    @property
    def owed_since(self) -> float | None:
        """Start of the current wait for an answer, by the event loop's clock, or None.

        Waiting for notifications does not count, because it may take any time.
        """
        active = self.pgconn.transaction_status == TransactionStatus.ACTIVE
        return self._asked_at if active else None

    def cut(self) -> None:
        with suppress(OSError, psycopg.Error):  # raised if the connection is closed already
            twin = socket.socket(fileno=os.dup(self.pgconn.socket))
            with twin:
                twin.shutdown(socket.SHUT_RDWR)

    def _give_up(self) -> None:
        if self.owed_since is not None:
            if self.hung is not None:
                self.hung(self)
            self.cut()


def with_last(given: Mapping[str, Any], host: bytes, port: bytes) -> dict[str, Any]:
    """Return `given`, which are options for libpq, with one host moved to the end of its list.

    libpq tries hosts in the order of the list. `host` and `port` name the host to try last.
    """
    columns = [str(given.get(name, "")).split(",") for name in _PLACE]
    count = max(map(len, columns))
    if count == 1:
        return dict(given)
    # libpq uses a single value, such as one port, for all hosts.
    columns = [column * count if len(column) == 1 else column for column in columns]
    here = (host.decode(), port.decode())
    places = sorted(
        zip(*columns, strict=True),
        key=lambda place: (place[0] or place[1], place[2] or "5432") == here,
    )
    ordered = zip(_PLACE, zip(*places, strict=True), strict=True)
    return {**given, **{name: ",".join(values) for name, values in ordered if any(values)}}


class Doubt(psycopg.Error):
    """The server acknowledged a commit without waiting for its standby: the commit is repeated."""


class Server:
    """The server of the ledger, and how to connect to it.

    `synchronous` is True if commits waited for a standby when that was last checked.
    """

    def __init__(self, dsn: str, application: str) -> None:
        """Parse `dsn`, a URL or options for libpq.

        Raises:
            ConfigError: libpq cannot parse it.
        """
        self._url = PostgresUrl(dsn)
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        self._given = self._url.options(application, settings, _DEFAULTS)
        self.conninfo = make_conninfo("", **self._given)
        self.synchronous = False
        self.name = ""
        """Name of the database, independent of its current host."""
        # Time at which the server was lost, by the event loop's clock; None while it is reachable.
        self.lost_at: float | None = None
        self._identity: Identity | None = None
        self._connections: WeakSet[Connection] = WeakSet()

    # ---- connections ----

    async def connect(self) -> Connection:
        """Try to connect once.

        Raises:
            psycopg.OperationalError: The attempt failed.
            LedgerFailed: The server may lack commits that this process has seen.
        """
        # psycopg does not close a half-made connection if `connect` is cancelled. So a cancelled
        # attempt may finish, and its connection is closed then.
        attempt = asyncio.ensure_future(
            Connection.connect(self.conninfo, autocommit=True, cursor_factory=AsyncRawCursor)
        )
        try:
            connection = await asyncio.shield(attempt)
        except asyncio.CancelledError:
            attempt.add_done_callback(_discard)
            raise
        connection.hung = self._leave
        self._connections.add(connection)
        try:
            register(connection)
            self._recognise(connection, *await check_server(connection))
        except BaseException:
            await connection.close()
            raise
        return connection

    def _recognise(self, connection: Connection, found: Identity, synchronous: bool) -> None:
        known = self._identity or found
        if found.system == known.system and found.timeline < known.timeline:
            self._put_last(connection)
            raise psycopg.OperationalError(
                "this host was the primary before another one was promoted"
            )
        promoted = found.system == known.system and self.synchronous
        if found != known and not promoted:
            raise LedgerFailed(
                "PostgreSQL is another server than before, and may lack stored data",
                hint="it was restored, or an asynchronous standby was promoted; restart this"
                " origin to continue with the data that is left",
            )
        self._identity, self.synchronous = found, synchronous
        self.name = f"{found.system}/{connection.info.dbname}"

    def _leave(self, connection: Connection) -> None:
        """Cut all connections to this host, and try it last from now on."""
        self._put_last(connection)
        for other in list(self._connections):
            other.cut()

    def _put_last(self, connection: Connection) -> None:
        pgconn = connection.pgconn
        self._given = with_last(self._given, pgconn.host, pgconn.port)
        self.conninfo = make_conninfo("", **self._given)

    def silent_s(self) -> float:
        """Return the seconds for which the server has been away or unresponsive."""
        asked = [c.owed_since for c in list(self._connections) if not c.closed]
        since = min((at for at in (*asked, self.lost_at) if at is not None), default=None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    # ---- the first connection ----

    async def reach(self) -> None:
        """Check that a connection can be made, within OPEN_TIMEOUT_S.

        Raises:
            ConfigError: A setting must be wrong. This is raised without a further attempt.
            LedgerFailed: The server is away.
        """
        deadline = asyncio.get_running_loop().time() + OPEN_TIMEOUT_S
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
        while True:
            try:
                connection = await self.connect()
                break
            except psycopg.Error as error:
                told = await self._explain(error)
                if isinstance(told, ConfigError) or asyncio.get_running_loop().time() > deadline:
                    raise told from error
            await asyncio.sleep(backoff.next_delay_s())
        await connection.close()

    async def _explain(self, error: psycopg.Error) -> TailraceError:
        """Return the error for a failed first connection.

        The error is a `ConfigError` only if waiting for another host cannot help.
        """
        is_standby = "read-write" in str(error) or "read-only" in str(error)
        if is_standby and not (error.sqlstate or "").startswith(OPERATORS):
            return LedgerFailed(self._url.first_line(error), hint="is the server running?")
        return await asyncio.to_thread(self._url.refusal, error, self.conninfo)


class LastingConnection:
    """A connection that reconnects; it does one piece of work at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._doubtful = False

    async def run(self, work: Work[T], timeout_s: float = READ_TIMEOUT_S) -> T:
        """Run `work` on a live connection, and repeat it until it succeeds.

        Raises:
            LedgerAway: The server was away for too long, or cannot do the work now.
            Damaged: The server found damaged data.
            LedgerFailed: The server refused the work.
        """
        async with self._turn:
            deadline = asyncio.get_running_loop().time() + timeout_s
            backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
            # The first retry has no pause: perhaps only this idle connection was closed.
            pause, undoings = 0.0, 0
            while True:
                begun = asyncio.get_running_loop().time()
                try:
                    done = await self._once(work)
                    self.server.lost_at = None
                    return done
                except psycopg.Error as error:
                    undone = error.sqlstate in _UNDONE
                    undoings += undone
                    if undoings > MAX_UNDOINGS or not (undone or self._is_lost(error)):
                        raise failed(error) from error
                    if asyncio.get_running_loop().time() + pause > deadline:
                        raise (failed if undone else away)(error) from error
                    if not undone:
                        self.server.lost_at = self.server.lost_at or begun
                        await self.close()
                        await asyncio.sleep(pause)
                        pause = backoff.next_delay_s()

    async def _once(self, work: Work[T]) -> T:
        connection = self._connection
        if connection is None or connection.closed:
            connection = self._connection = await self.server.connect()
            connection.add_notice_handler(self._notice)
        self._doubtful = False
        try:
            done = await work(connection)
        finally:
            # If the caller was cancelled during a transaction, the transaction may still be open.
            if connection.info.transaction_status != TransactionStatus.IDLE:
                await self.close()
        if self._doubtful:
            raise Doubt("a commit did not wait for its standby")
        return done

    def _notice(self, diagnostic: Diagnostic) -> None:
        """Record that the server sent a warning: perhaps a commit did not wait for its standby."""
        if diagnostic.severity_nonlocalized == "WARNING":
            self._doubtful = True

    def _is_lost(self, error: psycopg.Error) -> bool:
        connection = self._connection
        gone = connection is None or connection.closed or connection.broken
        return isinstance(error, Doubt) or gone or (error.sqlstate or "").startswith(_LOST)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class Pool:
    """A pool of connections."""

    def __init__(self, server: Server, size: int = POOL_CONNECTIONS) -> None:
        self._free = deque(LastingConnection(server) for _ in range(size))
        self._all = tuple(self._free)
        self._places = asyncio.Semaphore(size)

    async def run(self, work: Work[T], timeout_s: float = READ_TIMEOUT_S) -> T:
        async with self._places:
            one = self._free.pop()  # the connection used last, so that few are ever opened
            try:
                return await one.run(work, timeout_s)
            finally:
                self._free.append(one)

    async def rows(self, statement: str, *parameters: object) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a statement, which must be idempotent, because it may run twice."""

        async def work(connection: AsyncConnection) -> Sequence[tuple[Any, ...]]:
            cursor = await connection.execute(
                statement.encode(), parameters, prepare=True, binary=True
            )
            return await cursor.fetchall()

        return await self.run(work)

    async def close(self) -> None:
        for one in self._all:
            await one.close()


def failed(error: psycopg.Error) -> TailraceError:
    """Convert an error of PostgreSQL into one of Tailrace."""
    sqlstate = error.sqlstate or ""
    if sqlstate == "42501":
        return ConfigError(
            first_line(error),
            field="ledger.url",
            hint="the role needs CREATE on the database, or all rights in its schema tailrace",
        )
    message = f"PostgreSQL: {first_line(error)}"
    if isinstance(error, psycopg.errors.DataCorrupted | psycopg.errors.IndexCorrupted):
        return Damaged(message, hint="check the disk, and restore the database from a backup")
    if sqlstate.startswith(_PASSING):
        return LedgerAway(message, hint="see the log of the PostgreSQL server")
    return LedgerFailed(message, hint="see the log of the PostgreSQL server")


def away(error: psycopg.Error) -> LedgerAway:
    return LedgerAway(f"PostgreSQL: {first_line(error)}", hint="is the server running?")


def _discard(attempt: asyncio.Future[Connection]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().pgconn.finish()


# ---- the URL: options for libpq, and the part of them that may be shown ----


class PostgresUrl:
    """A URL, or options such as `host=… dbname=…`; `str()` of it has no secrets.

    An invalid one raises `ConfigError` without quoting it, because parts of a badly escaped
    password may be anywhere in it.
    """

    def __init__(self, text: str) -> None:
        try:
            options = [option for option in Conninfo.parse(text.encode()) if option.val]
        except psycopg.OperationalError:
            raise ConfigError("the URL cannot be parsed", field="ledger.url", hint=_HINT) from None
        self._given = {o.keyword.decode(): (o.val or b"").decode() for o in options}
        self._secrets = [(o.val or b"").decode() for o in options if o.dispchar == b"*"]
        if _is_misread(text) or not _are_ports(self._given.get("port", "")):
            raise ConfigError("the URL cannot be parsed", field="ledger.url", hint=_HINT)

    def __str__(self) -> str:
        return " ".join(f"{name}={self._given[name]}" for name in SHOWN if name in self._given)

    async def connect(self, application: str) -> psycopg.AsyncConnection:
        """Connect with the ledger's search path, possibly to a standby.

        Raises:
            ConfigError: A setting must be wrong.
            LedgerFailed: The server is away.
        """
        defaults = {"connect_timeout": CONNECT_TIMEOUT_S}
        options = self.options(application, "-c search_path=tailrace", defaults)
        conninfo = make_conninfo("", **options)
        try:
            return await psycopg.AsyncConnection.connect(conninfo)
        except psycopg.Error as error:
            raise self.refusal(error, conninfo) from error

    def options(
        self, application: str, settings: str, defaults: Mapping[str, str | int]
    ) -> dict[str, str | int]:
        """Return the URL's options for libpq, with additions.

        `settings` are added to the option `options`; `defaults` apply where the URL has no value.
        """
        settings = f"{self._given.get('options', '')} {settings}".strip()
        given = {"application_name": application, **defaults, **self._given}
        return {**given, "options": settings}

    def refusal(self, error: psycopg.Error, conninfo: str) -> TailraceError:
        """Return the error for a failed connection.

        If the server answers a ping, or has refused the login, a setting must be wrong, and the
        result is a `ConfigError`. Otherwise the server is away, and the result is a `LedgerFailed`.
        """
        message = self.first_line(error)
        answers = (error.sqlstate or "").startswith(OPERATORS) or PGconn.ping(
            conninfo.encode()
        ) in (Ping.OK, Ping.NO_ATTEMPT)
        if answers:
            hint = "check host, port, database, user and password"
            return ConfigError(message, field="ledger.url", hint=hint)
        return LedgerFailed(message, hint="is the server running?")

    def first_line(self, error: psycopg.Error) -> str:
        """Return the first line of an error without secrets."""
        line = first_line(error)
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def _is_misread(text: str) -> bool:
    """Return True if libpq mistook a part of the password for a host or a database."""
    _, is_url, rest = text.partition("://")
    authority, _, path = rest.partition("?")[0].partition("/")
    return bool(is_url) and (authority.count("@") > 1 or "@" in path)


def _are_ports(ports: str) -> bool:
    """Return True if all ports are valid, which libpq checks only when it connects."""
    return all(
        not port or (port.isdecimal() and 0 < int(port) <= MAX_PORT) for port in ports.split(",")
    )


def first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
