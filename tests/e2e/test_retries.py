"""A worker whose model computes no numbers any more: another one goes on with the same text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import Event, Reading, resume, start
from tests.origin.no_numbers import FACTORY, PLACE, order

pytestmark = pytest.mark.anyio

REQUEST: dict[str, Any] = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
}
BREAKS_AT = 80
"""Characters of the text after which a worker breaks: somewhere in its middle."""


class House:
    """An origin with two workers, and two edges."""

    def __init__(self, folder: Path) -> None:
        self.orders = folder / "orders"
        self.origin = Origin(folder / "data")
        self.origin.environment |= {
            "TAILRACE_ORIGIN_WORKERS": "2",
            "TAILRACE_ORIGIN_KV_MIB": "16",
            "TAILRACE_ORIGIN_FILTER": FACTORY,
            PLACE: str(self.orders),
        }
        self.edges = [Edge(self.origin), Edge(self.origin)]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    async with running(made.origin, *made.edges):
        await made.origin.saw("worker.ready", 2)
        yield made


def without_index(event: Event) -> tuple[str, dict[str, Any]]:
    return event.name, {name: value for name, value in event.data.items() if name != "index"}


async def test_a_run_without_numbers_goes_on_at_another_worker(
    house: House, client: httpx.AsyncClient
) -> None:
    one, two = (edge.url for edge in house.edges)
    whole = await start(client, one, REQUEST)
    assert len(whole.text) > BREAKS_AT
    order(house.orders, BREAKS_AT, workers=1)
    broken = await start(client, one, REQUEST)
    assert not list(house.orders.iterdir())
    [notice] = [event for event in broken.events if event.name == "notice"]
    assert notice.data["code"] == "retried"
    assert "NaN" in notice.data["message"]
    assert 0 < notice.id < len(whole.events) - 1
    assert broken.text == whole.text
    rest = [event for event in broken.events if event is not notice]
    assert list(map(without_index, rest)) == list(map(without_index, whole.events))
    assert broken.indexes == list(range(len(whole.events) + 1))
    # No worker has ended: the one that breaks would break again, so the other one went on.
    assert house.origin.count("worker.lost") == 0
    assert house.origin.count("stream.retried") == 1
    for cut in (notice.id - 1, notice.id, notice.id + 1):
        again = Reading(broken.stream, broken.token, broken.events[:cut])
        await resume(client, two, again)
        assert again.events == broken.events


async def test_a_run_that_fails_again_ends_its_stream_as_retryable(
    house: House, client: httpx.AsyncClient
) -> None:
    url = house.edges[0].url
    whole = await start(client, url, REQUEST)
    order(house.orders, BREAKS_AT, workers=2)
    broken = await start(client, url, REQUEST)
    assert not list(house.orders.iterdir())
    assert [event.name for event in broken.events].count("notice") == 1
    assert broken.end["finish_reason"] == "failed"
    assert broken.end["retryable"] is True
    assert "NaN" in broken.end["message"]
    assert whole.text.startswith(broken.text)
    assert house.origin.count("stream.retried") == 1
