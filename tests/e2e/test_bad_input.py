"""Bad input over real sockets: each is answered, names what is wrong, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from ledger.frame import (
    SCHEMA_HASH,
    Cancel,
    Credit,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Resume,
    Sampling,
    StreamEnd,
    StreamError,
    Token,
    decode,
    encode,
    split,
)
from tests.e2e.conftest import House
from tests.e2e.sse import SSE, start

pytestmark = pytest.mark.anyio

GOOD = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
FRAMES = {"Accept": "application/vnd.tailrace.frames"}


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


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"]
    assert error["message"]
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "demo", "prompt": NaN}',
        b'{"model": "demo", "prompt": "\\ud800"}',  # a lone surrogate, which no UTF-8 can hold
    ],
)
async def test_a_body_that_is_no_request_is_refused(
    url: str, client: httpx.AsyncClient, body: bytes
) -> None:
    error_of(await client.post(f"{url}/v1/generate", content=body), 400)


@pytest.mark.parametrize(
    ("change", "status", "field"),
    [
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -3}, 400, "max_tokens"),
        ({"max_tokens": 2.5}, 400, "max_tokens"),
        ({"max_tokens": "8"}, 400, "max_tokens"),
        ({"max_tokens": 1e30}, 400, "max_tokens"),
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"temperature": -0.1}, 400, "temperature"),
        ({"temperature": 2.1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_p": 1.1}, 400, "top_p"),
        ({"top_k": -1}, 400, "top_k"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": 2**64}, 400, "seed"),
        ({"stop": [""]}, 400, "stop"),
        ({"stop": ["x"] * 9}, 400, "stop"),
        ({"stop": 5}, 400, "stop"),
        ({"ignore_eos": "yes"}, 400, "ignore_eos"),
        ({"durability": "forever"}, 400, "durability"),
        ({"priority": 7}, 400, "priority"),
        ({"max_token": 8}, 400, "max_token"),
        ({"model": "gpt"}, 404, "model"),
        ({"model": 3}, 400, "model"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": ["Once"]}, 400, "prompt"),
        ({"prompt": "word " * 2000}, 400, "prompt"),
        ({"prompt": "x" * 900_000}, 400, "prompt"),
        ({"messages": [{"role": "user", "content": "hi"}]}, 400, "prompt"),
        ({"prompt": None, "messages": []}, 400, "prompt"),
        ({"prompt": None, "messages": [{"role": "wizard", "content": "hi"}]}, 400, "messages"),
        ({"prompt": None, "messages": [{"role": "user"}]}, 400, "messages"),
    ],
)
async def test_a_bad_field_is_named(
    url: str, client: httpx.AsyncClient, change: dict[str, Any], status: int, field: str
) -> None:
    body = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    error = error_of(await client.post(f"{url}/v1/generate", json=body), status)
    assert str(error["field"]).startswith(field), error


async def test_an_unknown_model_says_which_there_are(url: str, client: httpx.AsyncClient) -> None:
    body = {**GOOD, "model": "dmo"}
    error = error_of(await client.post(f"{url}/v1/generate", json=body), 404)
    assert error["code"] == "unknown_model"
    assert "'demo'" in error["hint"]


async def test_a_prompt_beyond_the_context_says_how_long_it_may_be(
    url: str, client: httpx.AsyncClient
) -> None:
    body = {**GOOD, "prompt": "word " * 2000}
    error = error_of(await client.post(f"{url}/v1/generate", json=body), 400)
    assert error["code"] == "prompt_too_long"
    assert "tokens" in error["hint"]


async def test_a_body_over_the_limit_is_refused(url: str, client: httpx.AsyncClient) -> None:
    body = {**GOOD, "prompt": "x" * (1 << 20)}
    error_of(await client.post(f"{url}/v1/generate", json=body), 413)


async def test_an_accept_that_we_do_not_speak_is_refused(
    url: str, client: httpx.AsyncClient
) -> None:
    headers = {"Accept": "image/png"}
    error_of(await client.post(f"{url}/v1/generate", json=GOOD, headers=headers), 406)


@pytest.mark.parametrize("name", ["0" * 32, "f" * 31, "F" * 32, "..%2f..%2fx", "%00", "é" * 32])
@pytest.mark.parametrize("accept", [SSE, FRAMES, {"Accept": "application/json"}])
async def test_an_unknown_stream_is_not_found(
    url: str, client: httpx.AsyncClient, name: str, accept: dict[str, str]
) -> None:
    error_of(await client.get(f"{url}/v1/generate/{name}", headers=accept), 404)
    if "%" not in name:
        error_of(await client.post(f"{url}/v1/generate/{name}/cancel"), 404)


@pytest.mark.parametrize("index", ["-1", "1e3", "NaN", "٣", "1 2", "1.0", "9" * 30, "0x1"])
async def test_an_index_that_is_none_is_refused(
    url: str, client: httpx.AsyncClient, index: str
) -> None:
    stream = (await start(client, url, GOOD)).stream
    target = f"{url}/v1/generate/{stream}"
    error_of(await client.get(target, params={"after": index}, headers=FRAMES), 400)
    headers = {**SSE, "Last-Event-ID": index.encode()}
    error_of(await client.get(target, headers=headers), 400)  # type: ignore[arg-type]


async def test_an_index_beyond_the_end_is_refused_not_waited_for(
    url: str, client: httpx.AsyncClient
) -> None:
    reading = await start(client, url, GOOD)
    target = f"{url}/v1/generate/{reading.stream}"
    last = reading.events[-1].id
    error = error_of(await client.get(f"{target}?after={last + 1}", headers=FRAMES), 416)
    assert error["code"] == "beyond_end"
    assert str(last) in error["hint"]
    error_of(await client.get(target, headers={**SSE, "Last-Event-ID": "999"}), 416)
    # A reader that has everything is told to stop asking, as EventSource understands it.
    done = await client.get(target, headers={**SSE, "Last-Event-ID": str(last)})
    assert (done.status_code, done.content) == (204, b"")


async def test_two_different_indexes_are_refused(url: str, client: httpx.AsyncClient) -> None:
    stream = (await start(client, url, GOOD)).stream
    headers = {**SSE, "Last-Event-ID": "3"}
    error_of(await client.get(f"{url}/v1/generate/{stream}?after=4", headers=headers), 400)


async def test_a_forged_resume_token_is_refused(url: str, client: httpx.AsyncClient) -> None:
    reading, other = await start(client, url, GOOD), await start(client, url, GOOD)
    target = f"{url}/v1/generate/{reading.stream}"

    async def get(token: str) -> httpx.Response:
        return await client.get(target, headers={**SSE, "Tailrace-Token": token})

    assert (await get(reading.token)).status_code == 200
    version, kid, payload, mac = reading.token.split(".")
    forged = [
        f"{version}.{kid}.{payload}.{mac[::-1]}",
        f"{version}.{kid}.{payload.swapcase()}.{mac}",
        f"{version}.nokey.{payload}.{mac}",
        f"v2.{kid}.{payload}.{mac}",
        reading.token[:-1],
        "rubbish",
        "v1." + "A" * 10_000,
    ]
    bodies = [error_of(await get(token), 401) for token in forged]
    assert all(body == bodies[0] for body in bodies)  # nothing tells them apart
    error_of(await get(other.token), 404)
    cancelled = await client.post(f"{target}/cancel", headers={"Tailrace-Token": forged[0]})
    error_of(cancelled, 401)


async def test_an_unknown_path_and_method_are_answered_in_json(
    url: str, client: httpx.AsyncClient
) -> None:
    error_of(await client.get(f"{url}/v2/nothing"), 404)
    error_of(await client.delete(f"{url}/v1/generate"), 405)


async def test_one_idempotency_key_for_two_requests_is_a_conflict(
    url: str, client: httpx.AsyncClient
) -> None:
    headers = {"Idempotency-Key": "one-key"}
    first = await client.post(f"{url}/v1/generate", json=GOOD, headers=headers)
    again = await client.post(f"{url}/v1/generate", json=GOOD, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    other = {**GOOD, "seed": 2}
    error_of(await client.post(f"{url}/v1/generate", json=other, headers=headers), 409)


# ---- frames ----


async def ws(url: str) -> ClientConnection:
    return await connect(url.replace("http", "ws", 1) + "/v1/ws", compression=None)


async def until_closed(socket: ClientConnection) -> tuple[list[StreamError], int | None]:
    """The errors that come before the server closes, and its close code."""
    errors = []
    with suppress(ConnectionClosed):
        while True:
            received = await socket.recv()
            assert isinstance(received, bytes)
            frames = [decode(raw)[1] for raw in split(received)]
            errors += [frame for frame in frames if isinstance(frame, StreamError)]
    return errors, socket.close_code


HELLO = encode(Hello(SCHEMA_HASH, "test"))
OPEN = encode(Open(model="demo", prompt="Once", max_tokens=4, credit=100), 1)
VERSION_2 = bytes([*OPEN[:3], 0x02, *OPEN[4:]])
UNKNOWN_TAG = bytes([*OPEN[:4], 0x0F, *OPEN[5:]])
SERVERS_TAG = encode(Token("x", 0), 1)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([VERSION_2], "bad_version"),
        ([HELLO, VERSION_2], "bad_version"),
        ([OPEN], "schema_mismatch"),
        ([encode(Hello(bytes(8), "other"))], "schema_mismatch"),
        ([HELLO, UNKNOWN_TAG], "bad_frame"),
        ([HELLO, SERVERS_TAG], "bad_frame"),
        ([HELLO, OPEN[:-1]], "bad_frame"),
        ([HELLO, b"\x00"], "bad_frame"),
        ([HELLO, b"\xff\xff\xff\x01" + bytes(32)], "bad_frame"),
        ([HELLO, encode(Open(model="demo", prompt="x"), 0)], None),
        ([HELLO, OPEN, OPEN], None),
    ],
)
async def test_a_broken_connection_is_told_why_and_closed(
    url: str, messages: list[bytes], code: str | None
) -> None:
    socket = await ws(url)
    for message in messages:
        await socket.send(message)
    errors, close_code = await until_closed(socket)
    assert len(errors) == 1
    assert code is None or errors[0].code == code
    assert close_code in (1002, 1003, 1008, 1009)


@pytest.mark.parametrize("text", ["hello", "{}", ""])
async def test_a_text_message_is_refused(url: str, text: str) -> None:
    socket = await ws(url)
    await socket.send(HELLO)
    await socket.send(text)
    _, close_code = await until_closed(socket)
    assert close_code in (1002, 1003)


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


async def test_a_message_that_is_too_long_is_told_so(url: str) -> None:
    socket = await ws(url)
    await socket.send(HELLO)
    await socket.send(encode(Open("demo", prompt="x" * 70_000), 1))
    [error], close_code = await until_closed(socket)
    assert (error.code, error.status, close_code) == ("too_large", 413, 1009)


async def test_a_huge_message_is_refused(url: str) -> None:
    socket = await ws(url)
    await socket.send(HELLO)
    with suppress(ConnectionClosed):  # it may be closed before all of it is sent
        await socket.send(bytes(1 << 20))
    _, close_code = await until_closed(socket)
    assert close_code == 1009


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (Open(model="demo", prompt="x", max_tokens=0), 400),
        (Open(model="demo", prompt="x", sampling=Sampling(temperature=9.0)), 400),
        (Open(model="demo", prompt="x", sampling=Sampling(temperature=float("nan"))), 400),
        (Open(model="demo", prompt="x", sampling=Sampling(top_p=float("inf"))), 400),
        (Open(model="nope", prompt="x"), 404),
        (Open(model="demo"), 400),
        (Resume(bytes(16)), 404),
        (Resume(bytes(16), token="v1.x.y.z"), 401),
        (Cancel(bytes(16)), 404),
    ],
)
async def test_a_bad_request_costs_its_own_stream_only(
    url: str, frame: Open | Resume | Cancel, status: int
) -> None:
    socket = await ws(url)
    await socket.send(HELLO)
    await socket.send(encode(frame, 7) + OPEN)
    answers: dict[int, list[object]] = {1: [], 7: []}
    async for message in socket:
        assert isinstance(message, bytes)
        for corr, answer in map(decode, split(message)):
            if not isinstance(answer, Hello | Heartbeat):
                answers[corr].append(answer)
        if answers[7] and answers[1] and isinstance(answers[1][-1], StreamEnd):
            break
    await socket.close()
    [error] = answers[7]
    assert isinstance(error, StreamError)
    assert error.status == status
    assert isinstance(answers[1][0], Opened)


async def test_a_payload_that_does_not_decode_names_field_and_offset(url: str) -> None:
    bad = bytearray(OPEN)
    bad[-1] |= 0x80  # the last varint, the credit in bytes, never ends now
    socket = await ws(url)
    await socket.send(HELLO)
    await socket.send(bytes(bad))
    async for message in socket:
        assert isinstance(message, bytes)
        errors = [f for _, f in map(decode, split(message)) if isinstance(f, StreamError)]
        if errors:
            break
    await socket.close()
    assert errors[0].code == "bad_frame"
    assert errors[0].field == "Open.credit_bytes"
    assert "byte" in errors[0].message


async def test_credit_for_a_stream_that_is_not_there_is_harmless(url: str) -> None:
    socket = await ws(url)
    await socket.send(HELLO)
    await socket.send(encode(Credit(5), 99) + OPEN)
    async for message in socket:
        assert isinstance(message, bytes)
        frames = [frame for _, frame in map(decode, split(message))]
        assert not any(isinstance(frame, StreamError) for frame in frames), frames
        if any(isinstance(frame, StreamEnd) for frame in frames):
            break
    await socket.close()
