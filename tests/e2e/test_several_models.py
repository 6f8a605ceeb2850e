"""One origin with several models, as real processes: each by its name, and each fails alone."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.ledger.frame import FRAMES_TYPE, Notice, Splitter, decode
from tailrace.origin.pool.history.sqlite_file import SqliteHistory
from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, free_port, running
from tests.e2e.sse import SSE, Reading, events, start

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).resolve().parents[2] / "origin" / "demo" / "model"
TOKENS = 200
BEGUN = 30
"""Number of tokens after which a stream counts as under way."""


KEPT = '[origin]\npolicy = "greedy-dual"\n'
"""However slow this machine is, none leaves because its time is over."""
OURS = f'folder = "{DEMO}"\nkv_mib = 16\n'
SILENT = 'producer = "tests.origin.producers.text_producers:Waiting"\n'


def tables(*models: str, each: str = OURS) -> str:
    return "".join(f"[models.{name}]\n{each}\n" for name in models)


def request(model: str, tokens: int = TOKENS, seed: int = 7) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
    }


class Two:
    """An origin of two models that are both loaded, and an edge."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tailrace.toml"
        file.write_text(KEPT + tables("one", "two"))
        self.origin = HeldOrigin(folder / "data", config=file)
        self.edge = Edge(self.origin)

    def worker_pid(self, model: str) -> int:
        ready = [e for e in self.origin.events if e.get("message") == "worker.ready"]
        return int([e for e in ready if e["model"] == model][-1]["pid"])


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    made = Two(tmp_path)
    async with running(made.origin, made.edge):
        await made.origin.saw("worker.ready", 2)
        yield made


class Three:
    """An origin of three models, of which two fit in its cap, and an edge."""

    def __init__(self, folder: Path, wait_s: float, served: str = OURS) -> None:
        file = folder / "tailrace.toml"
        self.metrics = f"127.0.0.1:{free_port()}"
        origin = f"{KEPT}cpu_memory_mib = 130\ncold_wait_s = {wait_s}\n"
        origin += f'metrics = "{self.metrics}"\n'
        each = served + "memory_mib = 60\n"
        file.write_text(origin + tables("one", "two", "three", each=each))
        self.origin = HeldOrigin(folder / "data", config=file)
        self.edge = Edge(self.origin)

    async def decided(self, choice: str) -> dict[str, Any]:
        """Return the first decision of this kind."""
        for nth in itertools.count(1):
            decision = await self.origin.saw("model.decision", nth)
            if decision["choice"] == choice:
                return decision
        raise AssertionError

    async def wanted(self, client: httpx.AsyncClient, model: str) -> None:
        """Wait until a request for it runs or waits here."""
        line, shown = f'tailrace_model_requests{{model="{model}"}} 1.0', ""
        async with asyncio.timeout(60):
            while line not in shown:
                shown = (await client.get(f"http://{self.metrics}/metrics")).text

    def loaded(self) -> list[str]:
        """Return the models that have a worker, by what was logged."""
        found: dict[str, bool] = {}
        for event in self.origin.events:
            if event.get("message") == "worker.ready":
                found[event["model"]] = True
            elif event.get("message") == "worker.left":
                found[event["model"]] = False
        return sorted(model for model, is_there in found.items() if is_there)


async def shown(client: httpx.AsyncClient, url: str, tiers: dict[str, str]) -> None:
    """Wait until an edge tells these tiers."""
    seen: object = None
    async with asyncio.timeout(60):
        while seen != tiers:
            [origin] = (await client.get(f"{url}/readyz")).json()["origins"]
            seen = {tier["model"]: tier["tier"] for tier in origin["tiers"]}
            await asyncio.sleep(0.02)


async def read(client: httpx.AsyncClient, url: str, model: str, begun: asyncio.Event) -> Reading:
    """Return the whole of a stream; `begun` when some of it has come."""
    reading = Reading()
    body = request(model)
    async with client.stream("POST", f"{url}/v1/generate", json=body, headers=SSE) as response:
        async for event in events(response):
            reading.events.append(event)
            if len(reading.events) == BEGUN:
                begun.set()
    return reading


async def test_of_three_models_two_fit_and_the_third_waits_for_its_turn(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    house = Three(tmp_path, wait_s=120)
    async with running(house.origin, house.edge):
        url = house.edge.url
        await house.origin.saw("worker.ready", 2)
        assert house.loaded() == ["one", "two"]
        listed = (await client.get(f"{url}/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["one", "two", "three"]
        # A request for the list of models is a hint for the origin, which unloads nothing for it.
        declined = await house.decided("decline")
        assert (declined["model"], declined["reason"]) == ("three", "there is no free memory")
        await shown(client, url, {"one": "compiled", "two": "compiled", "three": "cold"})
        whole = await start(client, url, request("one"))
        await start(client, url, request("two", 5))
        await start(client, url, request("two", 5, seed=8))
        # The model was never loaded, so the estimate follows from its files.
        third = await start(client, url, request("three"))
        told = third.events[0]
        assert (told.id, told.name, told.data["code"]) == (0, "notice", "loading")
        assert "for the first time, which by the size of its files takes" in told.data["message"]
        assert third.text == whole.text
        await house.origin.saw("worker.left")
        assert house.loaded() == ["three", "two"]
        # While both of them stream, the first one waits for room; no stream is cut for it.
        both = {name: asyncio.Event() for name in ("two", "three")}
        house.origin.hold_behind(whole, BEGUN)
        async with asyncio.TaskGroup() as tasks:
            running_both = [
                tasks.create_task(read(client, url, name, begun)) for name, begun in both.items()
            ]
            for begun in both.values():
                await begun.wait()
            waiting = tasks.create_task(start(client, url, request("one")))
            await house.wanted(client, "one")
            house.origin.go_on()
        for task in running_both:
            assert (task.result().text, task.result().indexes) == (whole.text, whole.indexes)
        again = waiting.result()
        notice = again.events[0]
        assert (notice.id, notice.name, notice.data["code"]) == (0, "notice", "loading")
        assert "'one' is being loaded, which takes about" in notice.data["message"]
        assert again.text == whole.text
        assert len(house.loaded()) == 2
        assert "one" in house.loaded()
    history = await SqliteHistory.read(tmp_path / "data" / "history.db")
    try:
        found = [*await history.rows("SELECT model, found FROM arrival ORDER BY at_ms")]
    finally:
        await history.close()
    assert found[0] == ("one", "hot")
    assert ("three", "cold") in found and found[-1] == ("one", "cold")


async def test_readers_of_a_model_that_was_never_loaded_are_told_so_while_it_loads(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    """Its load never ends, so nothing that they see came after it."""
    file = tmp_path / "tailrace.toml"
    producers = "tests.origin.producers.text_producers"
    file.write_text(
        f'[models.slow]\nproducer = "{producers}:stuck"\n'
        f'[models.quick]\nproducer = "{producers}:echo"\n'
    )
    origin = HeldOrigin(tmp_path / "data", config=file)
    edge = Edge(origin)
    why = "'slow' is being loaded, for the first time: how long that takes is not known"
    async with running(origin, edge):
        native = await start(client, edge.url, request("slow"), 1)
        [told] = native.events
        assert told.data == {"code": "loading", "message": why, "index": 0}
        asked = {"model": "slow", "prompt": "Hi", "stream": True}
        url = f"{edge.url}/v1/completions"
        async with client.stream("POST", url, json=asked) as response:
            chunk = await anext(events(response))
        assert chunk.data["notice"] == {"code": "loading", "message": why}
        url, accept = f"{edge.url}/v1/generate", {"Accept": FRAMES_TYPE}
        async with client.stream("POST", url, json=request("slow"), headers=accept) as response:
            frames = Splitter()
            async for data in response.aiter_bytes():
                if raw := [*frames.feed(data)]:
                    break
        assert decode(raw[0])[1] == Notice("loading", why, 0)


async def test_who_waits_too_long_for_room_is_told_when_to_ask_again(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    house = Three(tmp_path, wait_s=1, served=SILENT)
    async with running(house.origin, house.edge):
        url = house.edge.url
        await house.origin.saw("worker.ready", 2)
        silent = [await start(client, url, request(name), 0) for name in ("one", "two")]
        refused = await client.post(f"{url}/v1/generate", json=request("three"))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "loading"
        assert "waits for memory" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert house.loaded() == ["one", "two"]
        for reading in silent:
            await client.post(f"{url}/v1/generate/{reading.stream}/cancel")


async def test_a_worker_killed_leaves_the_other_model_alone_and_its_own_goes_on(
    two: Two, client: httpx.AsyncClient
) -> None:
    url = two.edge.url
    listed = (await client.get(f"{url}/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["one", "two"]
    whole = await start(client, url, request("two"))
    other_pid = two.worker_pid("two")
    begun = {name: asyncio.Event() for name in ("one", "two")}
    two.origin.hold_behind(whole, BEGUN)
    async with asyncio.TaskGroup() as tasks:
        one, other = (
            tasks.create_task(read(client, url, name, event)) for name, event in begun.items()
        )
        await begun["one"].wait()
        os.kill(two.worker_pid("one"), signal.SIGKILL)
        two.origin.go_on()
    for reading in (one.result(), other.result()):
        assert (reading.text, reading.indexes, reading.end) == (
            whole.text,
            whole.indexes,
            whole.end,
        )
    [taken_over] = [e for e in two.origin.events if e.get("message") == "stream.taken_over"]
    assert taken_over["epoch"] == 2
    [lost] = [e for e in two.origin.events if e.get("message") == "worker.lost"]
    assert lost["pid"] != other_pid == two.worker_pid("two")
    refused = await client.post(f"{url}/v1/generate", json=request("three"))
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert error["code"] == "unknown_model"
    assert "'one', 'two'" in error["hint"]
