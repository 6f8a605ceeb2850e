"""A Python producer behind a real origin and a real edge."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import Reading, resume, start

pytestmark = pytest.mark.anyio
SPEECH = "tests.origin.producers.text_producers:speech"
FLAKY = "tests.origin.producers.text_producers:flaky"
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
async def flaky(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Origin, str]]:
    """Yield an origin with two workers whose producer fails at times, and the URL of its edge."""
    noted = tmp_path_factory.mktemp("noted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTED", str(noted))
        origin = Origin(tmp_path_factory.mktemp("flaky"), producer=FLAKY, workers=2)
        edge = Edge(origin)
        async with running(origin, edge):
            yield origin, edge.url


async def test_a_run_that_fails_once_is_retried_and_readers_miss_nothing(
    flaky: tuple[Origin, str], client: httpx.AsyncClient
) -> None:
    origin, url = flaky
    prompt = "one two fail three four"
    whole = await start(client, url, {"model": "flaky", "prompt": prompt})
    assert whole.text == prompt + " "
    assert whole.indexes == list(range(len(whole.events)))
    [notice] = [event for event in whole.events if event.name == "notice"]
    assert notice.data["code"] == "retried"
    assert "the device is busy" in notice.data["message"]
    assert whole.end["finish_reason"] == "stop"
    await origin.saw("stream.retried")
    for cut in range(len(whole.events)):
        reading = Reading(whole.stream, whole.token, whole.events[:cut])
        await resume(client, url, reading)
        assert reading.events == whole.events


@pytest.mark.parametrize("cut", range(5))
async def test_a_reader_that_is_cut_while_a_run_is_retried_goes_on(
    flaky: tuple[Origin, str], client: httpx.AsyncClient, cut: int
) -> None:
    _, url = flaky
    prompt = f"one fail two{cut} three"
    reading = await start(client, url, {"model": "flaky", "prompt": prompt}, stop_after=cut)
    await resume(client, url, reading)
    assert reading.text == prompt + " "
    assert reading.indexes == list(range(len(reading.events)))


async def test_a_run_that_fails_again_ends_its_stream(
    flaky: tuple[Origin, str], client: httpx.AsyncClient
) -> None:
    reading = await start(client, flaky[1], {"model": "flaky", "prompt": "one always two"})
    # The worker may send the word and its failure together; then the second run says the word.
    assert sorted(event.name for event in reading.events) == ["end", "message", "notice"]
    assert reading.indexes == [0, 1, 2]
    assert reading.text == "one "
    assert reading.end["finish_reason"] == "failed"
    assert reading.end["retryable"] is True
    assert reading.end["message"] == "the device is busy"


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
