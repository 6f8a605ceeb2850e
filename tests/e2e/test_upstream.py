"""An OpenAI-compatible server behind a real origin and a real edge, and what kills do to it.

The faults come from a server that counts, on a raw socket: its text says where it began. The real
server is `transformers serve` with the demo model: `pip install 'tailrace[dev]'` brings what it
needs (fastapi, uvicorn, openai).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.client import Client
from tailrace.ledger.frame import Reasoning, Token
from tailrace.origin.config import DEMO_MODEL
from tests.e2e.fault_proxy import FaultProxy
from tests.e2e.processes import START_TIMEOUT_S, Edge, Origin, free_port, running
from tests.e2e.sse import SSE, TIMEOUT, Event, Reading, events, resume, start
from tests.needs import needs_packages
from tests.origin.producers.raw_server import (
    DONE,
    STREAM_HEAD,
    Asked,
    RawServer,
    answer,
    chat,
    completion,
    finish,
    serving,
    thought,
)

pytestmark = pytest.mark.anyio

LAST = 120
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Count: ", "max_tokens": 1000}
COUNTED = "".join(f"{n} " for n in range(LAST))
MODELS = answer(200, {"data": [{"id": "m"}]})
needs_serve = needs_packages("fastapi", "uvicorn", "openai", hint="pip install 'tailrace[dev]'")


class Counter:
    """Counts on from where the prompt, or the assistant's message, has got to.

    It dies at the numbers in `deaths`, once at each.
    """

    def __init__(self, *deaths: int) -> None:
        self.deaths = set(deaths)
        self.under_way = asyncio.Event()

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path.endswith("/models"):
            writer.write(MODELS)
            return
        messages = asked.body.get("messages", [])
        delivered = [each["content"] for each in messages if each["role"] == "assistant"]
        said = "".join(delivered) if messages else asked.body["prompt"].removeprefix("Count: ")
        assert COUNTED.startswith(said)
        writer.write(STREAM_HEAD)
        for number in range(len(said.split()), LAST):
            if number in self.deaths:
                self.deaths.remove(number)
                return
            writer.write((chat if messages else completion)(f"{number} "))
            await writer.drain()
            await asyncio.sleep(0.002)
            if number == LAST // 2:
                self.under_way.set()
        writer.write(finish() + DONE)


@asynccontextmanager
async def served(folder: Path, url: str, **flags: Any) -> AsyncIterator[tuple[Origin, Edge]]:
    origin = Origin(folder, upstream=url, **flags)
    edge = Edge(origin)
    async with running(origin, edge):
        yield origin, edge


@dataclass
class House:
    """An origin and an edge before a server, which each test tells what to say."""

    server: RawServer
    origin: Origin
    edge: Edge


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with serving(Counter()) as server:
        folder = tmp_path_factory.mktemp("house")
        async with served(folder, server.url) as (origin, edge):
            yield House(server, origin, edge)


def notices(reading: Reading) -> list[str]:
    return [event.data["code"] for event in reading.events if event.name == "notice"]


async def test_what_a_reader_has_when_the_server_dies_is_neither_lost_nor_doubled(
    shared: House, client: httpx.AsyncClient
) -> None:
    shared.server.scripts[:] = [Counter(0, 10, 11, 70)]
    reading = await start(client, shared.edge.url, PROMPT)
    assert reading.text == COUNTED
    assert notices(reading) == ["inexact"] * 3
    assert reading.indexes == list(range(len(reading.events)))
    assert reading.end["finish_reason"] == "stop"
    assert reading.end["total_tokens"] == LAST


async def test_a_chat_goes_on_behind_the_assistants_words(
    shared: House, client: httpx.AsyncClient
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 500}
    shared.server.scripts[:] = [Counter(50)]
    reading = await start(client, shared.edge.url, body)
    assert reading.text == COUNTED
    assert notices(reading) == ["inexact"]


async def test_a_stream_of_a_server_is_read_again_from_any_frame(
    shared: House, client: httpx.AsyncClient
) -> None:
    shared.server.scripts[:] = [Counter(30)]
    whole = await start(client, shared.edge.url, PROMPT)
    for after in range(0, len(whole.events) - 1, 7):
        reading = Reading(whole.stream, whole.token, whole.events[: after + 1])
        assert (await resume(client, shared.edge.url, reading)).events == whole.events


async def test_a_killed_worker_goes_on_from_what_the_ledger_has(
    shared: House, client: httpx.AsyncClient
) -> None:
    counter = Counter()
    shared.server.scripts[:] = [counter]
    reading = asyncio.create_task(start(client, shared.edge.url, PROMPT))
    await counter.under_way.wait()
    await shared.origin.kill_worker()
    made = await reading
    assert made.text == COUNTED
    assert notices(made) == ["inexact"]
    assert made.indexes == list(range(len(made.events)))


async def test_no_setting_is_made_up_for_a_server_not_even_after_its_worker_was_killed(
    shared: House, client: httpx.AsyncClient
) -> None:
    counter = Counter(10)
    shared.server.scripts[:] = [counter]
    shared.server.asked.clear()
    reading = asyncio.create_task(start(client, shared.edge.url, PROMPT))
    await counter.under_way.wait()
    await shared.origin.kill_worker()
    assert (await reading).text == COUNTED
    bodies = [asked.body for asked in shared.server.asked if asked.path.endswith("/completions")]
    assert len(bodies) == 3
    expected = {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert [body.keys() for body in bodies] == [expected] * 3


async def test_thoughts_are_frames_of_their_own_and_no_text(
    shared: House, client: httpx.AsyncClient
) -> None:
    said = STREAM_HEAD + thought("hm ") + thought("so") + chat("Four.") + finish() + DONE
    body = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}
    shared.server.scripts[:] = [said]
    url = shared.edge.url
    reading = await start(client, url, body)
    document = (await client.get(f"{url}/v1/generate/{reading.stream}")).json()
    stream = await client.get(f"{url}/v1/stream/{reading.stream}")
    async with Client([url]) as reader:
        frames = [frame async for frame in reader.resume(reading.stream)]
    assert [event.name for event in reading.events] == ["reasoning"] * 2 + ["message", "end"]
    assert reading.indexes == [0, 1, 2, 3]
    assert (document["reasoning"], document["text"]) == ("hm so", "Four.")
    assert stream.text == "Four."
    assert frames[:3] == [Reasoning("hm ", 0), Reasoning("so", 1), Token("Four.", 2)]


async def test_a_cancel_reaches_the_server(shared: House, client: httpx.AsyncClient) -> None:
    async def endless(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + completion("word "))
        await asyncio.Event().wait()

    server, url = shared.server, shared.edge.url
    server.scripts[:] = [endless]
    reading = await start(client, url, PROMPT, stop_after=1)
    server.gone.clear()  # perhaps set by a worker that was killed
    headers = {"Tailrace-Token": reading.token}
    answered = await client.post(f"{url}/v1/generate/{reading.stream}/cancel", headers=headers)
    assert answered.status_code == 200
    async with asyncio.timeout(60):
        await server.gone.wait()
    assert (await resume(client, url, reading)).end["finish_reason"] == "cancelled"


async def test_readyz_says_that_the_server_is_not_there_until_it_is(
    tmp_path: Path, client: httpx.AsyncClient
) -> None:
    async def loading(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(503, {"error": {"message": "loading weights"}}))

    async with serving(loading) as server:
        origin = Origin(tmp_path, upstream=server.url)
        edge = Edge(origin)
        await origin.start()
        try:
            away = await origin.saw("upstream.away")
            assert away["reason"].startswith("the upstream server answered 503")
            async with running(edge):
                ready = await client.get(f"{edge.url}/readyz")
                while "answered 503" not in ready.text:
                    ready = await client.get(f"{edge.url}/readyz")
                assert ready.status_code == 503
                server.scripts[:] = [Counter()]
                await origin.saw("worker.ready")
                assert origin.count("upstream.back") == 1
                assert (await start(client, edge.url, PROMPT)).text == COUNTED
        finally:
            await origin.stop()


# ---- a real server ----


class Serve:
    """`transformers serve` with the demo model, started and killed as a process."""

    def __init__(self, home: Path) -> None:
        (home / "hub").mkdir(exist_ok=True)  # where it looks for models to list
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._home = home
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        command = ("-m", "transformers.cli.transformers", "serve", str(DEMO_MODEL))
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "--device", "cpu", "--port", str(self.port)),
            *("--host", "127.0.0.1", "--log-level", "info"),
            env={**os.environ, "HF_HOME": str(self._home), "HF_HUB_OFFLINE": "1"},
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        async with asyncio.timeout(4 * START_TIMEOUT_S):
            while b"Uvicorn running" not in (line := await self._process.stderr.readline()):
                assert line, "it ended before it served"
        self._reading = asyncio.create_task(_drain(self._process.stderr))

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
        if self._reading is not None:
            await self._reading


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


@pytest.fixture(scope="module")
async def serve(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("home"))
    await made.start()
    yield made
    await made.kill()


STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me."}],
    "max_tokens": 12,
    "temperature": 0.0,
}


async def told(serve: Serve, path: str, body: dict[str, Any]) -> tuple[str, str, int]:
    """Text, finish reason and tokens of an answer that the server gives whole."""
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        asked = await client.post(f"{serve.url}/{path}", json={"model": str(DEMO_MODEL), **body})
    whole = asked.raise_for_status().json()
    choice = whole["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], whole["usage"]["completion_tokens"]


@needs_serve
async def test_a_real_server_is_served_as_it_would_answer_itself(
    serve: Serve, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    flags = {"upstream-model": str(DEMO_MODEL)}
    async with served(tmp_path, serve.url, **flags) as (_, edge):
        for path, body in (("completions", STORY), ("chat/completions", CHAT)):
            reading = await start(client, edge.url, {"model": str(DEMO_MODEL), **body})
            end = reading.end
            said = reading.text, end["finish_reason"], end["total_tokens"]
            assert said == await told(serve, path, body)
            assert end["prompt_tokens"] > 0
            again = Reading(reading.stream, reading.token, reading.events[:3])
            assert (await resume(client, edge.url, again)).events == reading.events


@needs_serve
async def test_up_puts_itself_in_front_of_a_real_server(serve: Serve, tmp_path: Path) -> None:
    ports = ("--http-port", "0", "--https-port", "0", "--link-port", "0")
    front = ("--upstream", serve.url, "--model", str(DEMO_MODEL), "--data", str(tmp_path / "data"))
    up = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tailrace.cli", "up", "--json", *ports, *front),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert up.stdout is not None and up.stderr is not None
    shown = ""
    try:
        async with asyncio.timeout(4 * START_TIMEOUT_S):
            ready = json.loads(await up.stdout.readline())
            while "Ctrl-C stops it." not in shown:
                shown += (await up.stderr.readline()).decode()
    finally:
        up.terminate()
        await up.communicate()
    assert ready["models"] == [str(DEMO_MODEL)] and ready["upstream"] == serve.url
    assert f"⟨cut after 24 tokens · resumed on {ready['http']}, from index 24⟩" in shown, shown


class Holding(FaultProxy):
    """Lets `most` events of a stream pass, and keeps the rest until the connection is cut."""

    most = 0

    async def _let_pass(self, data: bytes, sink: asyncio.StreamWriter) -> None:
        *events, rest = data.split(b"\n\n")
        passes = [event + b"\n\n" for event in events[: self.most]]
        self.most -= len(passes)
        has_passed = len(passes) == len(events)
        await super()._let_pass(b"".join(passes) + (rest if has_passed else b""), sink)
        if not has_passed:
            await asyncio.Event().wait()


@needs_serve
async def test_a_real_server_that_is_killed_goes_on_from_what_was_read(
    serve: Serve, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    settings = tmp_path / "tailrace.toml"
    settings.write_text("[origin]\nupstream_retry_s = 280\n")  # the server comes back late
    flags = {"upstream-model": str(DEMO_MODEL), "config": settings}
    proxy = Holding(serve.port)
    body = {"model": str(DEMO_MODEL), **STORY}
    async with (
        proxy.serving(),
        served(tmp_path, f"http://{proxy.link}/v1", **flags) as (_, edge),
    ):
        read = await _read_and_kill(client, edge, serve, proxy, body)
    assert [event.id for event in read] == list(range(len(read)))
    at = next(n for n, event in enumerate(read) if event.name == "notice")
    before = "".join(event.data["text"] for event in read[:at])
    after = "".join(event.data["text"] for event in read[at + 1 : -1])
    assert read[-1].data["finish_reason"] == "length"
    rest = {**STORY, "prompt": STORY["prompt"] + before, "max_tokens": STORY["max_tokens"] - at}
    assert after == (await told(serve, "completions", rest))[0]
    assert (await told(serve, "completions", STORY))[0].startswith(before)


async def _read_and_kill(
    client: httpx.AsyncClient, edge: Edge, serve: Serve, proxy: Holding, body: dict[str, Any]
) -> list[Event]:
    """Return all events of a stream whose server is killed, and started again, after the third."""
    read: list[Event] = []
    url = f"{edge.url}/v1/generate"
    proxy.most = 6  # 6 of 24 pieces, as more may pass before the kill
    async with client.stream("POST", url, json=body, headers=SSE) as response:
        async for event in events(response):
            read.append(event)
            if len(read) == 3:
                await serve.kill()
                proxy.most = 100
                proxy.cut()
                await serve.start()
    return read
