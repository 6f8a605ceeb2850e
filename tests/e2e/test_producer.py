"""A Python producer behind a real origin and a real edge."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import resume, start

pytestmark = pytest.mark.anyio
SPEECH = "tests.origin.producers.text_producers:speech"
HEARD: dict[str, Any] = {"model": "speech", "prompt": "he said so. we heard it."}
FINAL = "He said so. We heard it. "


def shown(made: list[Any]) -> str:
    """Return what a page shows that takes revisions as the schema says."""
    texts: dict[int, str] = {}
    for event in made:
        if event.name == "revision":
            texts = {at: text for at, text in texts.items() if at < event.data["replaces"]}
            texts[event.id] = event.data["text"]
    return "".join(texts.values())


@pytest.fixture(scope="module")
async def speech(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yield the URL of an edge before a producer of revisions."""
    origin = Origin(tmp_path_factory.mktemp("speech"), producer=SPEECH)
    edge = Edge(origin)
    async with running(origin, edge):
        yield edge.url


async def test_revisions_reach_readers_over_sse_and_as_one_document(
    speech: str, client: httpx.AsyncClient
) -> None:
    reading = await start(client, speech, HEARD)
    assert reading.indexes == list(range(len(reading.events)))
    assert shown(reading.events) == FINAL
    assert shown(reading.events[:3]) == "he said so"
    data = next(event.data for event in reading.events if event.name == "chunk")
    assert base64.b64decode(data["data"]) == bytes(range(256))
    assert reading.end["finish_reason"] == "stop"
    document = (await client.get(f"{speech}/v1/generate/{reading.stream}")).json()
    assert document["state"] == "ended"
    assert document["text"] == FINAL


@pytest.mark.parametrize("cut", [0, 1, 4, 9])
async def test_a_cut_stream_of_revisions_goes_on_where_it_was_cut(
    speech: str, client: httpx.AsyncClient, cut: int
) -> None:
    reading = await start(client, speech, HEARD, stop_after=cut)
    await resume(client, speech, reading)
    assert shown(reading.events) == FINAL
    assert reading.indexes == list(range(len(reading.events)))
