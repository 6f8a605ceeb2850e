"""The table of faults on a WebSocket, at every runtime."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tailrace.ledger.frame import Open, StreamEnd, StreamError, decode, encode, split
from tests.runtimes.runtime import Runtime

pytestmark = pytest.mark.anyio

TABLE = Path(__file__).parents[1] / "vectors" / "sessions.json"
SESSIONS = json.loads(TABLE.read_text("utf-8"))
GOOD = 1000
"""The corr of a request that nothing is wrong with, sent behind what is."""


@pytest.mark.parametrize("row", SESSIONS, ids=[row["name"] for row in SESSIONS])
async def test_a_fault_is_answered_as_the_table_says(runtime: Runtime, row: dict[str, Any]) -> None:
    url = runtime.url.replace("http", "ws", 1) + "/v1/ws"
    async with connect(url, compression=None) as socket:
        with suppress(ConnectionClosed):  # the edge may close before all of it is sent
            for message in row["messages"]:
                await socket.send(read(message))
            good = Open("demo", prompt="Once", max_tokens=4, credit=64)
            await socket.send(encode(good, GOOD))
        told = await errors_until_end(socket)
        closed = socket.close_code
    assert told == row["errors"]
    assert closed == row["close"]


def read(message: str | dict[str, Any]) -> bytes | str:
    if isinstance(message, str):
        return bytes.fromhex(message)
    text: str | None = message.get("text")
    return bytes(message["zeros"]) if text is None else text


async def errors_until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    """Until the server closes, or the good request is answered."""
    told = []
    with suppress(ConnectionClosed):
        async for message in socket:
            assert isinstance(message, bytes)
            for corr, frame in map(decode, split(message)):
                if isinstance(frame, StreamError):
                    said = {name: one for name, one in asdict(frame).items() if one is not None}
                    told.append({"corr": corr} | said)
                elif corr == GOOD and isinstance(frame, StreamEnd):
                    return told
    return told
