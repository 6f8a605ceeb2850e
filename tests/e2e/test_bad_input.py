"""Clients that leave, and ask for what is not there, over real sockets; the server goes on.

What is refused, and how, is in the tables that tests/runtimes runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.e2e.conftest import House

pytestmark = pytest.mark.anyio

GOOD = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "seed": 1}


@pytest.fixture(scope="module")
async def url(standing_house: House) -> str:
    return standing_house.edges[0].url


@pytest.fixture(autouse=True)
async def _the_server_goes_on(url: str, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """After every test of this file a good request still gets its whole answer."""
    yield
    answer = await client.post(f"{url}/v1/generate", json=GOOD)
    assert answer.status_code == 200
    assert answer.json()["text"]


async def test_a_websocket_to_an_unknown_path_is_told_so(url: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        await connect(url.replace("http", "ws", 1) + "/v1/nowhere")
    refused = caught.value.response
    assert refused.status_code == 404
    assert json.loads(refused.body)["error"]["message"] == "nothing is served at /v1/nowhere"


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
    [line] = edge.events[len(before) :]
    assert (line["level"], line["method"], line["path"]) == ("info", "POST", path)
