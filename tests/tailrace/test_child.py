"""The children of `tailrace up`, as real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.child import START_ATTEMPTS, Child
from tailrace.ledger.errors import Unavailable

# Connects to argv[1], says its pid and stays until something ends it.
STAYS = """
import os, signal, socket, sys
from tailrace.child import stop_when_orphaned
stop_when_orphaned()
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(b"%d\\n" % os.getpid())
while True:
    signal.pause()
"""

# A parent as `tailrace up` is one: runs argv[2:] as a child that logs to argv[1].
PARENT = """
import asyncio, sys
from pathlib import Path
from tailrace.child import Child
asyncio.run(Child("child", sys.argv[2:], Path(sys.argv[1]), print).keep_running())
"""


def listener() -> tuple[socket.socket, str]:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(60)
    return server, str(server.getsockname()[1])


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    announced: list[str] = []

    async def scenario(port: str, server: socket.socket) -> tuple[int, int]:
        child = Child(
            "relay", [sys.executable, "-c", STAYS, port], tmp_path / "log", announced.append
        )
        running = asyncio.create_task(child.keep_running())
        first = await asyncio.to_thread(accept_pid, server)
        first.process_killed()
        second = await asyncio.to_thread(accept_pid, server)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.to_thread(second.wait_closed)
        return first.pid, second.pid

    server, port = listener()
    with server:
        first, second = asyncio.run(scenario(port, server))
    assert first != second
    assert len(announced) == 1
    assert "the relay was ended by SIGKILL; starting it again" in announced[0]


def test_a_child_that_keeps_dying_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    announced: list[str] = []
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    child = Child("relay", command, tmp_path / "log", announced.append)
    with pytest.raises(Unavailable, match="the relay ended with exit code 1\n  no such thing"):
        asyncio.run(child.keep_running())
    assert len(announced) == START_ATTEMPTS - 1


def test_a_child_that_has_served_is_never_given_up(tmp_path: Path) -> None:
    announced: asyncio.Queue[str] = asyncio.Queue()

    async def scenario() -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('oh')"]
        child = Child("relay", command, tmp_path / "log", announced.put_nowait)
        child.proven = True
        running = asyncio.create_task(child.keep_running())
        for _ in range(START_ATTEMPTS + 1):
            assert "starting it again" in await announced.get()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(scenario())


def test_a_child_with_a_wrong_setting_is_not_started_again(tmp_path: Path) -> None:
    announced: list[str] = []
    command = [sys.executable, "-c", "import sys; sys.exit(2)"]
    child = Child("relay", command, tmp_path / "log", announced.append)
    with pytest.raises(Unavailable, match=r"exit code 2\n  \(its log is empty\)"):
        asyncio.run(child.keep_running())
    assert announced == []


def test_children_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    server, port = listener()
    with server:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path / "log"), sys.executable, "-c", STAYS, port]
        )
        child = accept_pid(server)
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        child.wait_closed()


class Peer:
    """The test's end of a child's connection, which the kernel closes with the child."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rb")
        connection.close()
        self.pid = int(self._stream.readline())

    def process_killed(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait_closed()

    def wait_closed(self) -> None:
        assert self._stream.read() == b""
        self._stream.close()


def accept_pid(server: socket.socket) -> Peer:
    connection, _ = server.accept()
    return Peer(connection)
