"""Where a ledger on PostgreSQL lies: what libpq takes, and what of it may be shown."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo, PGconn, Ping

from ledger.errors import ConfigError, LedgerFailed, TailraceError
from ledger.settings import MAX_PORT

CONNECT_TIMEOUT_S = 5
OPERATORS = ("28", "3D", "42501")
"""What an operator has to see to: logins, databases and rights, by SQLSTATE."""
SHOWN = ("host", "port", "dbname", "user")

_HINT = (
    "like postgresql://user:password@host:5432/database, an @ or / of the password as %40 or %2F"
)


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
