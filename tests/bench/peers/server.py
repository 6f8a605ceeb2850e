"""A peer's server process, and the sockets it is spoken to with."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

STOP_TIMEOUT_S = 20.0
SOCKET_TIMEOUT_S = 60.0
RECEIVE_BYTES = 1 << 20
KEPT_LINES = 20
"""Lines of output that are shown when a server does not start."""


class Server:
    """A process on loopback. It is up once a line of its output holds `ready`.

    It ends with the benchmark even if that is killed, where the system has `setpriv`.
    """

    def __init__(
        self, command: Sequence[object], ready: str, *, user: str | None = None, end: int = 15
    ) -> None:
        self._end = end
        self._process = subprocess.Popen(
            [*_as_user(user), *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the benchmark, which then stops it
        )
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if ready in line:
                break
        else:
            raise RuntimeError(f"{command[0]} did not start:\n{''.join(self._lines)}")
        drain = threading.Thread(
            target=self._lines.extend, args=(self._process.stdout,), daemon=True
        )
        drain.start()

    def stop(self) -> None:
        self._process.send_signal(self._end)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _as_user(user: str | None) -> list[str]:
    """Return what to put before a command so that it runs as `user` and dies with us."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    switch = [f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
    return [setpriv, *switch, f"--pdeathsig={signal.Signals.SIGKILL.name[3:]}", "--"]


def run_as(user: str | None, command: Sequence[object]) -> None:
    """Run a command to its end; its output is in the error if it fails."""
    done = subprocess.run(
        [*_as_user(user), *map(str, command)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")


def connect(port: int) -> socket.socket:
    """Return a blocking connection to a server on loopback that sends at once."""
    connection = socket.create_connection(("127.0.0.1", port), SOCKET_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket) -> bytes:
    """Return the next bytes; an error if the other side has closed."""
    data = connection.recv(RECEIVE_BYTES)
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


def owned_folder(path: Path, user: str | None) -> Path:
    """Return a new folder for a server that runs as `user`."""
    path.mkdir(parents=True)
    if user is not None:
        shutil.chown(path, user, user)
    return path


def is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0
