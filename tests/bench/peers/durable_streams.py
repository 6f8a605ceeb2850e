"""The Durable Streams reference server (Node, file-backed), over HTTP/1.1 keep-alive.

64 connections, a POST on each per step. The client is bare sockets in Python, which is
quicker than Node's fetch: requests are built before the clock runs, and an answer is read
as far as its empty line. The server waits for the disk after each append.

It keeps at most 100 files open and answers 404 to an append whose file it has just closed,
so the streams of a batch are deleted before the next one, and bytes on disk are not stated.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from tests.bench.bench_ledger_work import (
    FRAME_BYTES,
    Batch,
    Missing,
    Mode,
    Replayer,
    Sample,
    check_replay,
    frame,
    timed_steps,
)
from tests.bench.peers.server import Server, connect, receive
from tests.e2e.processes import free_port

PACKAGE = "@durable-streams/server"
VERSION = "0.3.7"
SCRIPT = Path(__file__).with_name("durable_streams.mjs")
SLOW_STEPS = 20
"""Maximum number of steps: it stores a few hundred frames per second, so 500 would take minutes."""


class DurableStreams(Replayer):
    """The Durable Streams reference server, with one connection per stream."""

    name = f"Durable Streams reference server {VERSION}"
    mode = Mode.POWER
    max_steps = SLOW_STEPS

    def __init__(self) -> None:
        self._server: Server | None = None
        self._connections: list[socket.socket] = []
        self._written = range(0)

    def start(self, folder: Path) -> None:
        node = shutil.which("node")
        if node is None or shutil.which("npm") is None:
            raise Missing("Node 20 or newer with npm; this benchmark then installs the server")
        port = free_port()
        data = folder / "data"
        data.mkdir()
        self._server = Server([node, SCRIPT, installed_server(), port, data], "ready")
        self._port = port

    def append(self, batch: Batch) -> Sample:
        self._connect(batch.streams)
        for number in self._written:
            self._ask(_request("DELETE", number, None))
        self._written = batch.numbers
        for number in batch.numbers:
            self._ask(_request("PUT", number, b""))
        steps = [self._step(batch, index) for index in range(batch.steps)]
        return timed_steps(steps, batch.streams * batch.steps)

    def load(self, number: int, count: int) -> None:
        """Load a stream in one POST: in byte mode the result is the same."""
        self._connect(1)
        self._ask(_request("PUT", number, b""))
        self._ask(_request("POST", number, b"".join(frame(index) for index in range(count))))

    def replay(self, number: int, count: int) -> float:
        self._connect(1)
        began = perf_counter()
        body = self._ask(_request("GET", number, None, "?offset=-1"))
        frames = [body[at : at + FRAME_BYTES] for at in range(0, len(body), FRAME_BYTES)]
        took = perf_counter() - began
        check_replay(frames, count)
        return took

    def stop(self) -> None:
        self._connect(0)
        if self._server is not None:
            self._server.stop()

    def _connect(self, count: int) -> None:
        """Fresh connections, before the clock runs: Node closes one that idles for 5 s."""
        for connection in self._connections:
            connection.close()
        self._connections = [connect(self._port) for _ in range(count)]

    def _ask(self, request: bytes) -> bytes:
        """Return the body of the answer."""
        self._connections[0].sendall(request)
        return read_answer(self._connections[0])

    def _step(self, batch: Batch, index: int) -> Callable[[], None]:
        calls = [
            (connection, _request("POST", number, frame(index)))
            for connection, number in zip(self._connections, batch.numbers, strict=True)
        ]

        def run() -> None:
            for connection, request in calls:
                connection.sendall(request)
            for connection, _ in calls:
                read_answer(connection)

        return run


def installed_server() -> Path:
    """Return the folder that holds the server's package; installed there once by npm."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tailrace-bench" / f"durable-streams-{VERSION}"
    if not (folder / "node_modules" / PACKAGE / "package.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--save-exact"]
        done = subprocess.run(
            [*command, f"--prefix={folder}", f"{PACKAGE}@{VERSION}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Missing(f"npm install {PACKAGE}@{VERSION} failed: {done.stderr.strip()[-300:]}")
    return folder


def _request(method: str, number: int, body: bytes | None, query: str = "") -> bytes:
    lines = [f"{method} /v1/stream/bench-{number}{query} HTTP/1.1", "Host: 127.0.0.1"]
    if body is not None:
        lines += ["Content-Type: application/octet-stream", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (body or b"")


def read_answer(connection: socket.socket) -> bytes:
    """Return the body of the next answer; an error unless it is a success."""
    data = bytearray()
    while b"\r\n\r\n" not in data:
        data += receive(connection)
    head, _, rest = bytes(data).partition(b"\r\n\r\n")
    if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 201", b"HTTP/1.1 204")):
        raise ValueError(f"the server answered {head[:300]!r}")
    length = content_length(head)
    if length is None:
        return _chunked(connection, bytearray(rest))
    body = bytearray(rest)
    while len(body) < length:
        body += receive(connection)
    return bytes(body)


def content_length(head: bytes) -> int | None:
    """Return the length that the head of an answer states; None if the body comes in chunks."""
    if head.startswith(b"HTTP/1.1 204"):
        return 0
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return None


def _chunked(connection: socket.socket, data: bytearray) -> bytes:
    """Return a chunked body without extensions or trailers (RFC 9112, 7.1)."""
    body, at = bytearray(), 0
    while True:
        while (end := data.find(b"\r\n", at)) < 0:
            data += receive(connection)
        size = int(data[at:end], 16)
        while len(data) < end + 2 + size + 2:
            data += receive(connection)
        if size == 0:
            return bytes(body)
        body += data[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
