"""A connection that is cut when the server owes it an answer for too long.

PostgreSQL may hang without being gone: a primary that has lost its standbys lets every commit
wait for ever, and a disk that does not answer holds up all of it. There is no timeout on the
server's side that would do: it could let a commit return before a standby has it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus

ANSWER_PATIENCE_S = 10.0
"""How long a server may owe an answer; then its connections are cut, and another is looked for."""

_PLACE = ("host", "hostaddr", "port")


class Connection(AsyncConnection[Any]):
    """Cut by closing its socket, so that whoever waits gets the error of a lost connection.

    To cancel the wait would have the server asked to cancel, and wait for that in turn.
    `hung` is told, before anybody who waits.
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
