"""Where a ledger on PostgreSQL lies: what libpq takes, and what of it may be shown."""

from __future__ import annotations

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo, PGconn, Ping

from ledger.errors import ConfigError, LedgerFailed

CONNECT_TIMEOUT_S = 5
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
        defaults: dict[str, str | int] = {
            "application_name": application,
            "connect_timeout": CONNECT_TIMEOUT_S,
        }
        options = f"{self._given.get('options', '')} -c search_path=tailrace".strip()
        conninfo = make_conninfo("", **{**defaults, **self._given, "options": options})
        try:
            return await psycopg.AsyncConnection.connect(conninfo)
        except psycopg.Error as error:
            message = self.first_line(error)
            if PGconn.ping(conninfo.encode()) in (Ping.OK, Ping.NO_ATTEMPT):
                hint = "check host, port, database, user and password"
                raise ConfigError(message, field="ledger.url", hint=hint) from error
            raise LedgerFailed(message, hint="is the server running?") from error

    def first_line(self, error: psycopg.Error) -> str:
        """What the error says, without secrets."""
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def _is_misread(text: str) -> bool:
    """Whether libpq has taken a part of the password for a host or a database."""
    _, is_url, rest = text.partition("://")
    authority, _, path = rest.partition("?")[0].partition("/")
    return bool(is_url) and (authority.count("@") > 1 or "@" in path)


def _are_ports(ports: str) -> bool:
    return all(not port or port.isdecimal() for port in ports.split(","))
