"""`tailrace up` with its real children: what it prints, restarts and leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tailrace.client import Client
from tailrace.ledger.frame import Token

TIMEOUT_S = 60.0
ANY_PORTS = ("--http-port", "0", "--https-port", "0", "--link-port", "0")


@contextmanager
def tailrace_up(data: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The running command and its ready line; killed if the test leaves it running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", "up", "--data", str(data), "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def lines_until(stream: IO[str] | None, last: str) -> Iterator[str]:
    assert stream is not None
    for line in stream:
        yield line
        if line.rstrip() == last:
            return


async def generate(url: str) -> str:
    async with Client([url], patience_s=TIMEOUT_S) as client:
        stream = client.generate(prompt="Once upon a time", max_tokens=8, seed=1)
        return "".join([frame.text async for frame in stream if isinstance(frame, Token)])


def read_to_end(connection: socket.socket) -> None:
    """Return when the peer is gone, whether it said goodbye or not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass


def test_up_shows_a_sample_replaces_an_edge_that_dies_and_stops_when_told(tmp_path: Path) -> None:
    with tailrace_up(tmp_path, *ANY_PORTS) as (process, ready):
        assert ready["ready"] is True
        shown = "".join(lines_until(process.stderr, "Ctrl-C stops it."))
        text = asyncio.run(generate(ready["http"]))
        assert text

        os.kill(ready["pids"]["edge"], signal.SIGKILL)
        assert asyncio.run(generate(ready["http"])) == text

        process.terminate()
        _, shown_later = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert f"curl -N {ready['http']}/v1/generate" in shown
    assert f"⟨cut after 24 tokens · resumed on {ready['http']}, from index 24⟩" in shown
    assert "the edge was ended by SIGKILL; starting it again" in shown_later
    assert (tmp_path / "ledger.db").is_file()


def test_nothing_that_up_started_outlives_a_sigkill_of_it(tmp_path: Path) -> None:
    with tailrace_up(tmp_path, "--no-sample", *ANY_PORTS) as (process, ready):
        host, port = ready["link"].split(":")
        edge = urlsplit(ready["http"])
        to_origin = socket.create_connection((host, int(port)), TIMEOUT_S)
        to_edge = socket.create_connection((edge.hostname, edge.port), TIMEOUT_S)
        with to_origin, to_edge:
            process.kill()
            read_to_end(to_edge)
            read_to_end(to_origin)


def test_a_port_in_use_ends_up_with_the_flag_that_chooses_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "tailrace.cli",
                "up",
                "--http-port",
                port,
                "--data",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 2
    assert f"error: --http-port: port {port} is in use" in result.stderr
    assert list(tmp_path.iterdir()) == []
