"""OpenAI's chat completions at every runtime: as they come, and the rest of one that was cut."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.e2e.sse import TIMEOUT
from tests.runtimes.runtime import Runtime

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "max_tokens": 24,
    "seed": 5,
}
CUT_AT = 7


async def chunks(response: httpx.Response, cut_at: int | None = None) -> list[dict[str, Any]]:
    """Up to the one of that sequence number, or to the end."""
    assert response.status_code == 200, await response.aread()
    read: list[dict[str, Any]] = []
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return read
        if line.startswith("data: "):
            read.append(json.loads(line.removeprefix("data: ")))
            if cut_at is not None and read[-1].get("sequence_number") == cut_at:
                return read
    raise AssertionError("the stream broke off")


def text_of(read: list[dict[str, Any]]) -> str:
    deltas = [choice["delta"] for chunk in read for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_a_chat_streams_and_goes_on_where_it_was_cut(runtime: Runtime) -> None:
    path = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=runtime.url, timeout=TIMEOUT) as client:
        whole = (await client.post(path, json=CHAT)).json()
        async with client.stream("POST", path, json=CHAT | {"stream": True}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            read = await chunks(response, CUT_AT)
        rest = f"{path}/{read[0]['id']}?stream=true&starting_after={CUT_AT}"
        async with client.stream("GET", rest) as response:
            read += await chunks(response)
    [choice] = whole["choices"]
    assert text_of(read) == choice["message"]["content"]
    numbers = [chunk["sequence_number"] for chunk in read if "sequence_number" in chunk]
    assert numbers == sorted(set(numbers))
    assert CUT_AT in numbers
    assert read[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
