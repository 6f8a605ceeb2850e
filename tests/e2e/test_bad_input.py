"""Clients that leave in what they ask. What is refused, and how, is in tests/runtimes."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.conftest import House

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/stream/left"])
async def test_a_client_that_leaves_in_its_body_costs_one_line_of_the_log(
    standing_house: House, path: str
) -> None:
    edge = standing_house.edges[0]
    before = list(edge.events)
    _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    writer.write(head.encode() + b'{"model":')
    await writer.drain()
    writer.close()
    await edge.saw("client gone", 1 + sum(event["message"] == "client gone" for event in before))
    lines = edge.events[len(before) :]
    # The link is not this client's: it is lost where a process stands still for long.
    [line] = [each for each in lines if not each["message"].startswith("origin link")]
    assert (line["level"], line["method"], line["path"]) == ("info", "POST", path)
