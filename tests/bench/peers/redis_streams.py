"""Redis Streams: one pipelined write of XADDs per step, over a bare socket.

Requests are built and replies are known before the clock runs, so that what is measured is
the server and loopback, not a client library. The id of an entry is its index plus one.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

from tests.bench.bench_ledger_work import (
    Disk,
    Missing,
    Mode,
    check_replay,
    folder_bytes,
    frame,
)
from tests.bench.peers.pipelined import Pipelined
from tests.bench.peers.server import Server, connect, receive
from tests.e2e.processes import free_port

LINES_PER_ENTRY = 8
"""Number of lines per entry in XRANGE's reply: *2, $n, id, *2, $1, f, $18, frame.

The array's own line comes first. Our frames hold no line break.
"""


class RedisStreams(Pipelined):
    """Redis Streams with pipelined XADDs."""

    load_frames = 1000

    def __init__(self, fsync: str, mode: Mode) -> None:
        self.name = f"Redis Streams {fsync}"
        self.mode = mode
        self._fsync = fsync

    def start(self, folder: Path) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise Missing("apt-get install redis-server")
        port = free_port()
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": folder,
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": "",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._server = Server([program, *flags], "Ready to accept connections")
        self._folder = folder
        self._socket = connect(port)

    def settle(self) -> Disk:
        """Return the append-only file as written, and as a rewrite makes it."""
        appended = folder_bytes(self._folder)
        self._ask(b"BGREWRITEAOF")
        while b"aof_rewrite_in_progress:1" in self._ask(b"INFO", b"persistence"):
            pass
        return Disk(appended, folder_bytes(self._folder))

    def replay(self, number: int, count: int) -> float:
        request = _command(b"XRANGE", _key(number), b"-", b"+")
        end = b"%s\r\n" % frame(count - 1)
        began = perf_counter()
        self._socket.sendall(request)
        answer = bytearray(receive(self._socket))
        while not answer.endswith(end):
            answer += receive(self._socket)
        frames = bytes(answer).split(b"\r\n")[LINES_PER_ENTRY::LINES_PER_ENTRY]
        took = perf_counter() - began
        check_replay(frames, count)
        return took

    def _step(self, entries: list[tuple[int, int]]) -> Callable[[], None]:
        request = b"".join(
            _command(b"XADD", _key(number), b"0-%d" % (index + 1), b"f", frame(index))
            for number, index in entries
        )
        ids = [b"0-%d" % (index + 1) for _, index in entries]
        expected = b"".join(b"$%d\r\n%s\r\n" % (len(name), name) for name in ids)
        return partial(_exchange, self._socket, request, expected)

    def _ask(self, *words: bytes) -> bytes:
        """Return a command whose answer is one line or one string."""
        self._socket.sendall(_command(*words))
        answer = receive(self._socket)
        while not answer.endswith(b"\r\n"):
            answer += receive(self._socket)
        return answer


def _exchange(connection: socket.socket, request: bytes, expected: bytes) -> None:
    connection.sendall(request)
    answer = receive(connection)
    while len(answer) < len(expected):
        answer += receive(connection)
    if answer != expected:
        raise ValueError(f"Redis answered {answer[:200]!r}")


def _key(number: int) -> bytes:
    return b"s%d" % number


def _command(*words: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)
