"""One origin with several models, as real processes: each by its name, with a fate of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import SSE, Reading, events, start

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).resolve().parents[2] / "origin" / "demo" / "model"
TOKENS = 300


def tables(**models: str) -> str:
    return "".join(
        f'[models.{name}]\nfolder = "{DEMO}"\nkv_mib = 16\n{more}\n'
        for name, more in models.items()
    )


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
        file.write_text(tables(one="", two=""))
        self.origin = Origin(folder / "data", config=file)
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


async def test_a_worker_killed_leaves_the_other_model_alone_and_its_own_goes_on(
    two: Two, client: httpx.AsyncClient
) -> None:
    url = two.edge.url
    listed = (await client.get(f"{url}/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["one", "two"]
    whole = await start(client, url, request("two"))
    killed = asyncio.Event()
    other_pid = two.worker_pid("two")

    async def read(model: str) -> Reading:
        reading = Reading()
        async with client.stream(
            "POST", f"{url}/v1/generate", json=request(model), headers=SSE
        ) as response:
            async for event in events(response):
                reading.events.append(event)
                if model == "one" and len(reading.events) == 30:
                    os.kill(two.worker_pid("one"), signal.SIGKILL)
                    killed.set()
        return reading

    async with asyncio.TaskGroup() as tasks:
        one, other = (tasks.create_task(read(model)) for model in ("one", "two"))
    assert killed.is_set()
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
