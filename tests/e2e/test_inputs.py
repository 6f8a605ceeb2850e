"""Input of a pipeline: sent in pieces by any edge, stored, and read again after a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tailrace.client import Client
from tailrace.ledger.frame import (
    FRAMES,
    SCHEMA_HASH,
    Frame,
    Hello,
    Input,
    InputStored,
    Notice,
    StageSwitch,
    Status,
    StreamError,
    StreamState,
    SwitchStages,
    Token,
    decode,
    encode,
    split,
)
from tailrace.origin.config import DEMO_MODEL
from tests.e2e.processes import Edge, Origin, running
from tests.e2e.sse import Reading, resume, start
from tests.schema_text import ROOT

pytestmark = pytest.mark.anyio

SETTINGS = f"""
[models.demo]
folder = "{DEMO_MODEL.resolve()}"
device = "cpu"
kv_mib = 16

[pipelines.hex]
input = "bytes"
max_input_mib = 1
[[pipelines.hex.stages]]
stage = "tests.origin.pipelines.staged:Hex"

[pipelines.impatient]
input = "bytes"
input_wait_s = 0.2
[[pipelines.impatient.stages]]
stage = "tests.origin.pipelines.staged:Hex"
"""
SWITCHED_SETTINGS = """
[pipelines.switched]
input = "bytes"
[[pipelines.switched.stages]]
stage = "tests.origin.pipelines.staged:Hex"
[[pipelines.switched.stages]]
stage = "tests.origin.pipelines.staged:ShoutOutside"
name = "shout"
optional = true
"""
SCATTERED_SETTINGS = """
[pipelines.scattered]
input = "bytes"
[[pipelines.scattered.stages]]
stage = "tests.origin.pipelines.staged:Hex"
[[pipelines.scattered.stages]]
stage = "tests.origin.pipelines.staged:Scattered"
[[pipelines.scattered.stages]]
stage = "tests.origin.pipelines.staged:ShoutOutside"
"""
REQUEST: dict[str, Any] = {"model": "hex", "prompt": ""}
BYTES = Random(5).randbytes(401)
TEXT = BYTES.hex(" ", -4)


class House:
    """An origin with pipelines that take input, and two edges."""

    def __init__(self, folder: Path) -> None:
        settings = folder / "tailrace.toml"
        settings.write_text(SETTINGS + SCATTERED_SETTINGS + SWITCHED_SETTINGS)
        self.origin = Origin(folder / "data", config=settings)
        self.edges = [Edge(self.origin), Edge(self.origin)]
        self.urls = [edge.url for edge in self.edges]


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    made = House(tmp_path_factory.mktemp("inputs"))
    async with running(made.origin, *made.edges):
        await made.origin.saw("worker.ready", 5)
        yield made


async def begin(client: httpx.AsyncClient, url: str, model: str = "hex") -> Reading:
    """Open a stream that has no frame yet."""
    return await start(client, url, REQUEST | {"model": model}, stop_after=0)


async def send(
    client: httpx.AsyncClient, url: str, stream: str, data: Any, offset: int, last: bool = False
) -> httpx.Response:
    """Send one body of input."""
    params = {"offset": offset, "last": int(last)}
    return await client.post(f"{url}/v1/generate/{stream}/input", content=data, params=params)


def code_of(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of an error."""
    return response.status_code, response.json()["error"]["code"]


async def test_input_is_stored_and_read_again_whoever_is_killed(
    house: House, client: httpx.AsyncClient
) -> None:
    one, two = house.urls
    reading = await begin(client, one)
    stored = await send(client, one, reading.stream, BYTES[:100], 0)
    assert stored.json() == {"id": reading.stream, "bytes": 100, "complete": False}
    await resume(client, two, reading, stop_after=25)
    assert reading.text == TEXT[: 25 * 9]
    await house.origin.replace_worker("hex")
    # The first 50 bytes are sent twice, by another edge.
    stored = await send(client, two, reading.stream, BYTES[50:250], 50)
    assert stored.json()["bytes"] == 250
    await resume(client, one, reading, stop_after=10)
    await house.origin.replace_worker("hex")
    stored = await send(client, one, reading.stream, BYTES[250:], 250, last=True)
    assert stored.json() == {"id": reading.stream, "bytes": len(BYTES), "complete": True}
    await resume(client, two, reading)
    assert reading.text == TEXT
    assert reading.end["finish_reason"] == "stop"
    assert reading.indexes == list(range(len(reading.indexes)))


async def test_a_stage_that_never_gives_the_same_twice_is_not_run_again(
    house: House, client: httpx.AsyncClient
) -> None:
    one, two = house.urls
    reading = await begin(client, one, "scattered")
    for at in (0, 100, 200, 300):
        await send(client, two, reading.stream, BYTES[at : at + 100], at)
        await resume(client, one, reading, stop_after=25)
        await house.origin.replace_worker("scattered")
    await send(client, one, reading.stream, BYTES[400:], 400, last=True)
    await resume(client, two, reading)
    assert reading.indexes == list(range(len(reading.indexes)))
    assert reading.text == " ".join(f"{n}:{text}" for n, text in enumerate(TEXT.upper().split()))
    again = await resume(client, one, Reading(reading.stream, reading.token))
    assert again.events == reading.events


async def switch(
    client: httpx.AsyncClient, url: str, stream: str, stages: object
) -> httpx.Response:
    """Switch stages of a stream."""
    return await client.post(f"{url}/v1/generate/{stream}/stages", json={"stages": stages})


async def read_pieces(client: httpx.AsyncClient, url: str, reading: Reading, pieces: int) -> None:
    """Read on until the text has this many pieces, which `Hex` makes of four bytes each."""
    while len(reading.text) < pieces * 9:
        await resume(client, url, reading, stop_after=1)


def switched(reading: Reading) -> list[str]:
    """Return the notices about switched stages."""
    said = [event.data for event in reading.events if event.name == "notice"]
    return [each["message"] for each in said if each["code"] == "stage_switched"]


async def test_stages_are_switched_while_workers_die(
    house: House, client: httpx.AsyncClient
) -> None:
    one, two = house.urls
    reading = await begin(client, one, "switched")
    await send(client, one, reading.stream, BYTES[:100], 0)
    await read_pieces(client, two, reading, 24)  # the stage holds back the last piece
    answer = await switch(client, two, reading.stream, {"shout": False})
    next_index = reading.indexes[-1] + 1
    assert answer.json() == {"id": reading.stream, "state": "running", "next_index": next_index}
    await house.origin.replace_worker("switched")  # it has had no item since
    await send(client, one, reading.stream, BYTES[100:200], 100)
    await read_pieces(client, two, reading, 50)
    await house.origin.replace_worker("switched")
    answer = await switch(client, one, reading.stream, {"shout": True})
    assert answer.status_code == 200
    sent = 200
    while len(switched(reading)) < 2:
        await send(client, two, reading.stream, BYTES[sent : sent + 4], sent)
        await resume(client, two, reading, stop_after=1)
        sent += 4
    lost = house.origin.count("stage.process_lost")
    os.kill(house.origin.stage_pid("switched"), signal.SIGKILL)  # its worker sees it later
    await send(client, two, reading.stream, BYTES[sent:], sent, last=True)
    await resume(client, one, reading)
    assert house.origin.count("stage.process_lost") == lost + 1
    notices = switched(reading)
    off, on = (int(said.split()[5]) for said in notices)
    assert notices == [f"shout is off from item {off} on", f"shout is on from item {on} on"]
    assert 25 <= off < 50 <= on
    first, last = (off - 1) * 9, on * 9  # the piece before `off` was held back
    assert reading.text == TEXT[:first].upper() + TEXT[first:last] + TEXT[last:].upper()
    assert reading.indexes == list(range(len(reading.indexes)))
    again = await resume(client, two, Reading(reading.stream, reading.token))
    assert again.events == reading.events


async def test_the_python_client_switches_stages(house: House) -> None:
    async with Client(house.urls) as client:
        stream = client.generate(model="switched", prompt="", stages={"shout": False})
        await stream.send(BYTES[:8])
        texts = [(await anext(stream)).text for _ in range(2)]  # type: ignore[union-attr]
        assert (await stream.switch_stages({"shout": True})).state is StreamState.RUNNING
        await stream.send(BYTES[8:], last=True)
        rest = [frame async for frame in stream]
    texts += [frame.text for frame in rest if isinstance(frame, Token)]
    assert "".join(texts) == TEXT[:18] + TEXT[18:].upper()
    assert isinstance(rest[0], Notice)
    assert rest[0].code == "stage_switched"


async def test_a_wrong_switch_is_refused_by_name(house: House, client: httpx.AsyncClient) -> None:
    [url, _] = house.urls
    reading = await begin(client, url, "switched")

    async def refused(stages: object, stream: str = reading.stream) -> tuple[int, str, str]:
        answer = await switch(client, url, stream, stages)
        return (*code_of(answer), answer.json()["error"].get("field"))

    assert await refused({"shouts": False}) == (400, "invalid_request", "stages.shouts")
    assert await refused({"Hex": False}) == (400, "invalid_request", "stages.Hex")
    assert await refused({"shout": "off"}) == (400, "invalid_request", "stages.shout")
    assert await refused({}) == (400, "invalid_request", "stages")
    assert await refused(None) == (400, "invalid_request", "stages")
    plain = await start(client, url, REQUEST | {"model": "demo", "prompt": "a"}, stop_after=1)
    assert await refused({"shout": False}, plain.stream) == (400, "invalid_request", "stages.shout")
    assert (await refused({"shout": False}, "0" * 32))[:2] == (404, "unknown_stream")
    await send(client, url, reading.stream, b"", 0, last=True)
    await resume(client, url, reading)
    assert (await refused({"shout": False}))[:2] == (409, "stream_ended")


async def test_a_body_that_is_cut_off_is_kept_as_far_as_it_came(
    house: House, client: httpx.AsyncClient
) -> None:
    [url, _] = house.urls
    reading = await begin(client, url)

    async def cut() -> AsyncIterator[bytes]:
        yield BYTES[:120]
        await resume(client, url, reading, stop_after=30)  # all of it was stored and processed
        raise OSError("cut off")

    with pytest.raises(OSError, match="cut off"):
        await send(client, url, reading.stream, cut(), 0, last=True)
    stored = (await send(client, url, reading.stream, b"", 0)).json()
    assert stored == {"id": reading.stream, "bytes": 120, "complete": False}
    await send(client, url, reading.stream, BYTES[stored["bytes"] :], stored["bytes"], last=True)
    assert (await resume(client, url, reading)).text == TEXT


async def test_wrong_input_is_refused_by_name(house: House, client: httpx.AsyncClient) -> None:
    [url, _] = house.urls
    reading = await begin(client, url)
    stream = reading.stream
    assert code_of(await send(client, url, stream, b"abc", 1)) == (409, "input_gap")
    too_much = bytes(1 << 20)
    assert (await send(client, url, stream, b"abcd", 0)).json()["bytes"] == 4
    refused = await send(client, url, stream, too_much, 4)
    assert code_of(refused) == (413, "input_too_large")
    assert "1048576 bytes" in refused.json()["error"]["hint"]
    stored = (await send(client, url, stream, b"", 0)).json()["bytes"]
    assert (await send(client, url, stream, b"", stored, last=True)).json()["complete"]
    ended = await send(client, url, stream, b"abc", stored)
    assert code_of(ended) in ((409, "input_complete"), (409, "stream_ended"))
    await resume(client, url, reading)
    assert code_of(await send(client, url, stream, b"abc", 0)) == (409, "stream_ended")
    plain = await start(client, url, REQUEST | {"model": "demo", "prompt": "a"}, stop_after=1)
    assert code_of(await send(client, url, plain.stream, b"abc", 0)) == (409, "no_input")
    assert code_of(await send(client, url, "0" * 32, b"abc", 0)) == (404, "unknown_stream")
    for params in ({"offset": "x"}, {"last": "yes"}):
        path = f"{url}/v1/generate/{stream}/input"
        answer = await client.post(path, content=b"abc", params=params)
        assert code_of(answer) == (400, "invalid_request")
        assert answer.json()["error"]["field"] in params


async def test_a_stream_without_input_ends_after_a_while(
    house: House, client: httpx.AsyncClient
) -> None:
    [url, _] = house.urls
    reading = await start(client, url, REQUEST | {"model": "impatient"})
    assert reading.end["finish_reason"] == "failed"
    assert reading.end["message"] == "the input failed: no input has come for 0.2 s"


async def answer(socket: ClientConnection) -> Frame:
    """Return the next frame on channel 1."""
    while True:
        message = await socket.recv()
        assert isinstance(message, bytes)
        for raw in split(message, frozenset(FRAMES), 1 << 20):
            corr, frame = decode(raw)
            if corr == 1:
                return frame


async def test_input_over_a_websocket(house: House, client: httpx.AsyncClient) -> None:
    [url, _] = house.urls
    reading = await begin(client, url)
    stream = bytes.fromhex(reading.stream)
    async with connect(url.replace("http", "ws") + "/v1/ws", subprotocols=None) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")))
        await socket.send(encode(Input(stream, reading.token, 0, BYTES[:200]), 1))
        assert await answer(socket) == InputStored(stream, 200, False)
        await socket.send(encode(Input(stream, reading.token, 300, BYTES[300:]), 1))
        refused = await answer(socket)
        assert isinstance(refused, StreamError)
        assert (refused.code, refused.hint) == ("input_gap", "send the bytes from 200 on")
        await socket.send(encode(Input(stream, reading.token, 100, BYTES[100:], last=True), 1))
        assert await answer(socket) == InputStored(stream, len(BYTES), True)
    assert (await resume(client, url, reading)).text == TEXT


async def test_stages_are_switched_over_a_websocket(
    house: House, client: httpx.AsyncClient
) -> None:
    [url, _] = house.urls
    reading = await begin(client, url, "switched")
    stream = bytes.fromhex(reading.stream)
    async with connect(url.replace("http", "ws") + "/v1/ws", subprotocols=None) as socket:
        await socket.send(encode(Hello(SCHEMA_HASH, "test")))

        async def asked(*stages: StageSwitch) -> Frame:
            await socket.send(encode(SwitchStages(stream, reading.token, stages), 1))
            return await answer(socket)

        assert await asked(StageSwitch("shout", False)) == Status(stream, StreamState.RUNNING, 0)
        refused = await asked()
        assert isinstance(refused, StreamError)
        assert (refused.code, refused.field) == ("invalid_request", "stages")
        many = [StageSwitch("shout", True)] * 16
        while isinstance(said := await asked(*many), Status):
            many = [*many[1:], many[0]]
        assert isinstance(said, StreamError)
        assert (said.code, said.status) == ("too_many_switches", 413)


async def test_the_python_client_sends_input_through_another_edge_if_one_dies(
    house: House,
) -> None:
    third = await Edge(house.origin).ready()
    try:
        async with Client([third.url, house.urls[0]]) as client:
            stream = client.generate(model="hex", prompt="")
            assert await stream.send(BYTES[:100]) == 100
            first = [await anext(stream) for _ in range(25)]
            await third.kill()
            assert await stream.send(BYTES[100:], last=True) == len(BYTES)
            frames = [*first, *[frame async for frame in stream]]
    finally:
        await third.kill()
    assert "".join(frame.text for frame in frames if isinstance(frame, Token)) == TEXT


SCRIPT = """
import { stream } from "%(client)s/index.js";
import { InputWriter } from "%(client)s/input.js";
import { switchStages } from "%(client)s/stages.js";

const bytes = new Uint8Array(await new Response(process.stdin).arrayBuffer());
const reading = stream("%(url)s/v1/generate", { input: { model: "hex", prompt: "" } });
const writer = new InputWriter("%(url)s/v1/generate", reading);
writer.write(bytes.subarray(0, 50));
writer.write(bytes.subarray(50, 100));
await writer.write(bytes.subarray(100, 200));
// Another writer, such as that of a page that was loaded again, continues where the first one was.
const { id, token } = reading;
const other = new InputWriter("%(url)s/v1/generate", { id, token });
const { bytes: stored } = await other.write(new Uint8Array());
other.write(bytes.subarray(stored, 300));
await other.write(bytes.subarray(300));
const { complete } = await other.close();
const late = await other.write(bytes).catch((error) => error.code);
const text = await reading.text();
const switched = stream("%(url)s/v1/generate", { input: { model: "switched", prompt: "" } });
const input = new InputWriter("%(url)s/v1/generate", switched);
await input.write(bytes.subarray(0, 8));
const { state } = await switchStages("%(url)s/v1/generate", switched, { shout: false });
await input.write(bytes.subarray(8));
await input.close();
const wrong = switchStages("%(url)s/v1/generate", switched, { shouts: true });
const unknown = await wrong.catch((error) => error.field);
const quiet = await switched.text();
console.log(JSON.stringify({ stored, complete, late, text, state, quiet, unknown }));
"""


async def test_the_browser_client_sends_input(house: House) -> None:
    script = SCRIPT % {"client": (ROOT / "edge/web/tailrace").as_uri(), "url": house.urls[0]}
    node = await asyncio.create_subprocess_exec(
        "node",
        "--input-type=module",
        "--eval",
        script,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await asyncio.wait_for(node.communicate(BYTES), 60)
    found = json.loads(said)
    assert found.pop("late") in ("input_complete", "stream_ended")
    quiet = found.pop("quiet")
    assert quiet.lower() == TEXT
    assert quiet.endswith(TEXT[-9:])
    assert found == {
        "stored": 200,
        "complete": True,
        "text": TEXT,
        "state": "running",
        "unknown": "stages.shouts",
    }
