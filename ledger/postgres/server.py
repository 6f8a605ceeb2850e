"""Connections to the server that come back after it has gone, and what its errors mean.

A lost connection is made again until a limit has passed; the work that was under way is
done again, so it has to be such that twice is as good as once. Where the name of the server
stands for several (a primary and its standbys), only one that takes writes is used. A server
that owes an answer for too long is taken for lost too, and tried last from then on.

What this process remembers of the tables holds for one server, and for a standby of it that
had all of its commits. Of any other one everything that is asked raises `LedgerFailed`.
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
"""What an operator has to see to: logins, databases and rights, by SQLSTATE."""
SHOWN = ("host", "port", "dbname", "user")
RETRY_MIN_S = 0.05
RETRY_MAX_S = 1.0
"""Between attempts to connect."""
WRITE_PATIENCE_S = 60.0
"""How long commits wait for a lost server; then the ledger has failed."""
READ_PATIENCE_S = 10.0
"""How long everything else waits for it; then the caller gets an error that says to retry."""
OPEN_PATIENCE_S = 5.0
MAX_UNDOINGS = 8
"""Times that work is done again because it crossed another transaction's, or was cancelled."""
POOL_CONNECTIONS = 4
"""Connections beside the writer's, for reading and for what is not grouped."""
ANSWER_PATIENCE_S = 10.0
"""How long a server may owe an answer; then its connections are cut, and another is looked for."""
IDLE_TRANSACTION_MS = 3_000
"""An origin that stops in the middle of a transaction gives its locks up after this."""

_DEFAULTS: dict[str, str | int] = {
    "target_session_attrs": "read-write",
    "connect_timeout": CONNECT_TIMEOUT_S,
    # A server whose machine is gone says nothing: notice that within about ten seconds.
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# Statements over columns must go from the column to the index, whatever the size of a table
# was when they were planned. statement_timeout would let a commit return before a standby
# has it (syncrep.c), so there is none.
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
# Where a new attempt may go better: the server ends or starts, or is not the primary any more.
_LOST = ("08", "57P01", "57P02", "57P03", "57P05", "25006", "25P03")
# Undone by the server, and none of it is stored: it crossed another one, or was cancelled there.
_UNDONE = ("40001", "40P01", "55P03", "57014")
# The server could not do it now: it lacks memory or disk, or a read has failed.
_PASSING = ("53", "58030")


class Connection(AsyncConnection[Any]):
    """It is cut when the server owes it an answer for too long.

    PostgreSQL may hang without being gone: a primary that has lost its standbys lets every commit
    wait for ever, and a disk that does not answer holds up all of it. There is no timeout on the
    server's side that would do: it could let a commit return before a standby has it. It is cut
    by closing its socket, so that whoever waits gets the error of a lost connection: to cancel
    the wait would have the server asked to cancel, and wait for that in turn. `hung` is told,
    before anybody who waits.
    """

    hung: Callable[[Connection], None] | None = None
    _asked_at: float | None = None

    async def wait(self, gen: PQGen[Any], *arguments: Any, **options: Any) -> Any:
        loop = asyncio.get_running_loop()
        self._asked_at = loop.time()
        timer = loop.call_later(ANSWER_PATIENCE_S, self._give_up)
        try:
            return await super().wait(gen, *arguments, **options)
        finally:
            timer.cancel()
            self._asked_at = None

    @property
    def owed_since(self) -> float | None:
        """Since when it waits for an answer, by the event loop's clock.

        To wait for notices is no such thing: that may take any time.
        """
        active = self.pgconn.transaction_status == TransactionStatus.ACTIVE
        return self._asked_at if active else None

    def cut(self) -> None:
        with suppress(OSError, psycopg.Error):  # it is closed already
            twin = socket.socket(fileno=os.dup(self.pgconn.socket))
            with twin:
                twin.shutdown(socket.SHUT_RDWR)

    def _give_up(self) -> None:
        if self.owed_since is not None:
            if self.hung is not None:
                self.hung(self)
            self.cut()


def with_last(given: Mapping[str, Any], host: bytes, port: bytes) -> dict[str, Any]:
    """What libpq is given, but for the place that `host` and `port` name, which is tried last."""
    columns = [str(given.get(name, "")).split(",") for name in _PLACE]
    count = max(map(len, columns))
    if count == 1:
        return dict(given)
    # One port, or none, is that of all hosts.
    columns = [column * count if len(column) == 1 else column for column in columns]
    here = (host.decode(), port.decode())
    places = sorted(
        zip(*columns, strict=True),
        key=lambda place: (place[0] or place[1], place[2] or "5432") == here,
    )
    ordered = zip(_PLACE, zip(*places, strict=True), strict=True)
    return {**given, **{name: ",".join(values) for name, values in ordered if any(values)}}


class Doubt(psycopg.Error):
    """The server says that it did not wait for a standby; what was done must be done again."""


class Server:
    """Where the ledger lies, and how a connection there is made.

    `synchronous`: whether its commits wait for a standby, as far as is known.
    """

    def __init__(self, dsn: str, application: str) -> None:
        """`dsn` is what libpq takes; `ConfigError` if it does not take it."""
        self._url = PostgresUrl(dsn)
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        self._given = self._url.options(application, settings, _DEFAULTS)
        self.conninfo = make_conninfo("", **self._given)
        self.synchronous = False
        self.name = ""
        """Of the database, wherever its server is at the time."""
        self.lost_at: float | None = None  # by the event loop's clock
        self._identity: Identity | None = None
        self._connections: WeakSet[Connection] = WeakSet()

    # ---- connections ----

    async def connect(self) -> Connection:
        """One attempt; `psycopg.OperationalError` if it fails.

        `LedgerFailed` where the server cannot have all that this process has seen stored.
        """
        # psycopg leaves a connection that is cancelled half-made to the garbage collector, and
        # the server with it: such an attempt is let finish, then it is closed.
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
            raise psycopg.OperationalError("this was the primary before another was promoted")
        promoted = found.system == known.system and self.synchronous
        if found != known and not promoted:
            raise LedgerFailed(
                "PostgreSQL is not the server that it was, and need not have all that was stored",
                hint="it was restored, or a standby promoted that no commit had waited for;"
                " start this origin again",
            )
        self._identity, self.synchronous = found, synchronous
        self.name = f"{found.system}/{connection.info.dbname}"

    def _leave(self, connection: Connection) -> None:
        """Let nobody wait for this host any more, and try it last from now on."""
        self._put_last(connection)
        for other in list(self._connections):
            other.cut()

    def _put_last(self, connection: Connection) -> None:
        pgconn = connection.pgconn
        self._given = with_last(self._given, pgconn.host, pgconn.port)
        self.conninfo = make_conninfo("", **self._given)

    def silent_s(self) -> float:
        """For how long it has been away, or has owed an answer."""
        asked = [c.owed_since for c in list(self._connections) if not c.closed]
        since = min((at for at in (*asked, self.lost_at) if at is not None), default=None)
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    # ---- the first one ----

    async def reach(self) -> None:
        """Try whether a connection can be made at all, for OPEN_PATIENCE_S.

        Raises `ConfigError` at once where a setting must be wrong, `LedgerFailed` where the
        server is away.
        """
        deadline = asyncio.get_running_loop().time() + OPEN_PATIENCE_S
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
        """As an error of a setting only where another server would not say so."""
        is_standby = "read-write" in str(error) or "read-only" in str(error)
        if is_standby and not (error.sqlstate or "").startswith(OPERATORS):
            return LedgerFailed(self._url.first_line(error), hint="is the server running?")
        return await asyncio.to_thread(self._url.refusal, error, self.conninfo)


class LastingConnection:
    """One connection that is made again when it is lost. One piece of work at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._doubtful = False

    async def run(self, work: Work[T], patience_s: float = READ_PATIENCE_S) -> T:
        """Do `work` on a live connection, again and again until it is done.

        Raises `LedgerAway` when the server is away for longer or cannot do it now, `Damaged` for
        what it finds damaged, `LedgerFailed` when it refuses.
        """
        async with self._turn:
            deadline = asyncio.get_running_loop().time() + patience_s
            backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S)
            pause, undoings = 0.0, 0  # a connection that went stale is made again at once
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
            # A caller that was cancelled may have left a transaction open.
            if connection.info.transaction_status != TransactionStatus.IDLE:
                await self.close()
        if self._doubtful:
            raise Doubt("a commit did not wait for its standby")
        return done

    def _notice(self, diagnostic: Diagnostic) -> None:
        """A commit that was told not to wait for its standby succeeds with a warning."""
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
    """A few connections; work goes to one that is free."""

    def __init__(self, server: Server, size: int = POOL_CONNECTIONS) -> None:
        self._free = deque(LastingConnection(server) for _ in range(size))
        self._all = tuple(self._free)
        self._places = asyncio.Semaphore(size)

    async def run(self, work: Work[T], patience_s: float = READ_PATIENCE_S) -> T:
        async with self._places:
            one = self._free.pop()  # the one used last: the others may never be needed
            try:
                return await one.run(work, patience_s)
            finally:
                self._free.append(one)

    async def rows(self, statement: str, *parameters: object) -> Sequence[tuple[Any, ...]]:
        """What one statement gives. It may be done twice, so twice must be as good as once."""

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
    """An error of the server as one of ours."""
    sqlstate = error.sqlstate or ""
    if sqlstate == "42501":
        return ConfigError(
            first_line(error),
            field="ledger.url",
            hint="the role needs CREATE on the database, or all rights in its schema tailrace",
        )
    message = f"PostgreSQL: {first_line(error)}"
    if isinstance(error, psycopg.errors.DataCorrupted | psycopg.errors.IndexCorrupted):
        return Damaged(message, hint="see to the disk; restore the database from a copy")
    if sqlstate.startswith(_PASSING):
        return LedgerAway(message, hint="see the server's log")
    return LedgerFailed(message, hint="see the server's log")


def away(error: psycopg.Error) -> LedgerAway:
    return LedgerAway(f"PostgreSQL: {first_line(error)}", hint="is the server running?")


def _discard(attempt: asyncio.Future[Connection]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().pgconn.finish()


# ---- where it lies: what libpq takes, and what of it may be shown ----


class PostgresUrl:
    """A URL, or words as `host=… dbname=…`; `str()` of it holds no secrets.

    Raises `ConfigError` for what cannot be one, without quoting it: where a password has
    characters that should have been escaped, any part of it may turn up in any place.
    """

    def __init__(self, text: str) -> None:
        try:
            options = [option for option in Conninfo.parse(text.encode()) if option.val]
        except psycopg.OperationalError:
            raise ConfigError("it cannot be read", field="ledger.url", hint=_HINT) from None
        self._given = {o.keyword.decode(): (o.val or b"").decode() for o in options}
        self._secrets = [(o.val or b"").decode() for o in options if o.dispchar == b"*"]
        if _is_misread(text) or not _are_ports(self._given.get("port", "")):
            raise ConfigError("it cannot be read", field="ledger.url", hint=_HINT)

    def __str__(self) -> str:
        return " ".join(f"{name}={self._given[name]}" for name in SHOWN if name in self._given)

    async def connect(self, application: str) -> psycopg.AsyncConnection:
        """A connection whose search path is the ledger's; it may be to a standby.

        Raises `ConfigError` where a setting must be wrong, `LedgerFailed` where the server
        is away.
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
        """What libpq is given: these `settings` always, the `defaults` where nothing was said."""
        settings = f"{self._given.get('options', '')} {settings}".strip()
        given = {"application_name": application, **defaults, **self._given}
        return {**given, "options": settings}

    def refusal(self, error: psycopg.Error, conninfo: str) -> TailraceError:
        """`ConfigError` where it is no server that is away; asks it whether it is there."""
        message = self.first_line(error)
        answers = (error.sqlstate or "").startswith(OPERATORS) or PGconn.ping(
            conninfo.encode()
        ) in (Ping.OK, Ping.NO_ATTEMPT)
        if answers:
            hint = "check host, port, database, user and password"
            return ConfigError(message, field="ledger.url", hint=hint)
        return LedgerFailed(message, hint="is the server running?")

    def first_line(self, error: psycopg.Error) -> str:
        """What the error says, without secrets."""
        line = first_line(error)
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def _is_misread(text: str) -> bool:
    """Whether libpq has taken a part of the password for a host or a database."""
    _, is_url, rest = text.partition("://")
    authority, _, path = rest.partition("?")[0].partition("/")
    return bool(is_url) and (authority.count("@") > 1 or "@" in path)


def _are_ports(ports: str) -> bool:
    """libpq itself would only say so for each attempt to connect."""
    return all(
        not port or (port.isdecimal() and 0 < int(port) <= MAX_PORT) for port in ports.split(",")
    )


def first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
