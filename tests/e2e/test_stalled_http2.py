"""Memory that HTTP/2 readers cost an edge if they request much and read nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.e2e.processes import Edge, Origin
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.http2_peer import Peer

pytestmark = pytest.mark.anyio

READERS = 100
WORDS = 10_000
"""Number of words of the stream that each reader opens: 180 kB, of which its window takes 64 kB."""
MAX_READER_KIB = 64
"""Without flow control it was the rest of the stream."""
MAX_WINDOW_BYTES = 65_535
FRAMES = {"Accept": "application/vnd.tailrace.frames"}
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


def resident_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB


async def test_a_hundred_readers_that_stall_cost_what_they_hold_and_not_what_they_asked_for() -> (
    None
):
    origin = ScriptedOrigin(WORDS)
    origin.patience_ms = 3_600_000
    async with origin.listening():
        link = f"127.0.0.1:{origin.port}"
        edge = Edge(cast(Origin, SimpleNamespace(link=link)))
        await edge.ready()
        try:
            async with Peer.of(edge) as peer:
                # Modules that the first request imports are not a reader's cost.
                await stall(peer, 10)
                before = resident_kib(edge.pid)
                await stall(peer, READERS)
                grown = resident_kib(edge.pid) - before
                assert grown / READERS <= MAX_READER_KIB
        finally:
            await edge.stop()


async def stall(peer: Peer, readers: int) -> None:
    """Open `readers` more streams, each of which fills its window and stalls."""
    peer.h2.increment_flow_control_window(2 * readers * MAX_WINDOW_BYTES)
    asked = [peer.ask("GET", f"/v1/generate/{STREAM.hex()}", FRAMES) for _ in range(readers)]

    def all_full() -> Any:
        return all(len(peer.bodies.get(each, b"")) == MAX_WINDOW_BYTES for each in asked)

    await peer.until(all_full, acknowledge=False)
    for _ in range(20):  # in the meantime comes what the origin still has credit for
        health = peer.ask("GET", "/healthz")
        await peer.until(lambda each=health: each in peer.ended, acknowledge=False)
