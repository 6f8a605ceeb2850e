"""Sessions over connections of ours: messages are counted as they come, and every end is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import (
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    TextMessage,
)

from tailrace.edge.access.keys import KeyRing, digest_of, make_key
from tailrace.edge.server import websocket
from tailrace.edge.session import MAX_MESSAGE_BYTES
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Answer,
    BodyEnd,
    Cancel,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Opened,
    Resume,
    StreamError,
    decode,
    encode,
    split,
)
from tests.edge.access.test_authenticator import KEY as KEY_OF_ACME
from tests.edge.access.test_authenticator import api_key
from tests.edge.scripted_origin import STREAM, ScriptedOrigin
from tests.edge.server.serving import PATIENCE_S, Client, Served, serving

pytestmark = pytest.mark.anyio

WORDS = 2_000
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPTED = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # the answer to that key (RFC 6455, 1.3)
HANDSHAKE = {
    "Host": "localhost",
    "Connection": "keep-alive, Upgrade",
    "Upgrade": "WebSocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
}
HELLO = encode(Hello(SCHEMA_HASH, "test"))


@pytest.fixture(scope="module")
async def origin() -> AsyncIterator[ScriptedOrigin]:
    async with ScriptedOrigin(WORDS).listening() as origin:
        yield origin


@pytest.fixture(scope="module")
async def served(origin: ScriptedOrigin) -> AsyncIterator[Served]:
    async with serving(origin) as served:
        yield served


def handshake(**changed: str | None) -> bytes:
    fields = HANDSHAKE | {name.replace("_", "-"): value for name, value in changed.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value is not None)
    return f"GET /v1/ws HTTP/1.1\r\n{lines}\r\n".encode()


class Peer:
    """A client behind its handshake, which sees every frame of RFC 6455 that comes."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.protocol = Connection(ConnectionType.CLIENT)
        self._events: list[Event] = []

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, served: Served, first: bytes = HELLO, **fields: str
    ) -> AsyncIterator[Self]:
        async with Client.connected(served) as client:
            peer = cls(client)
            early = peer.protocol.send(BytesMessage(first)) if first else b""
            await client.send(handshake(**fields) + early)
            async with asyncio.timeout(PATIENCE_S):
                head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ")
            assert b"sec-websocket-accept: " + ACCEPTED in head
            assert b"sec-websocket-extensions" not in head.lower()
            yield peer

    async def send(self, *events: Event) -> None:
        await self.client.send(b"".join(map(self.protocol.send, events)))

    async def event(self) -> Event:
        """Return the next whole message, or control frame."""
        async with asyncio.timeout(PATIENCE_S):
            message = b""
            while True:
                while not self._events:
                    data = await self.client.reader.read(65_536)
                    self.protocol.receive_data(data or None)
                    self._events = list(self.protocol.events())
                event = self._events.pop(0)
                if not isinstance(event, BytesMessage):
                    return event
                message += event.data
                if event.message_finished:
                    return BytesMessage(message)

    async def frames(self, count: int) -> list[tuple[int, Frame]]:
        """Return the next frames of the protocol, so many at least."""
        frames: list[tuple[int, Frame]] = []
        while len(frames) < count:
            event = await self.event()
            assert isinstance(event, BytesMessage), event
            frames += map(decode, split(bytes(event.data)))
        return frames

    async def closed(self) -> int:
        """Return the code of the close frame, after which the server ends the connection."""
        while not isinstance(event := await self.event(), CloseConnection):
            pass
        await self.send(event.response())
        assert await self.client.rest() == b""
        return event.code


async def test_streams_come_whole_however_large_the_clients_credit(
    served: Served, origin: ScriptedOrigin
) -> None:
    async with Peer.connected(served) as peer:
        opens = [encode(Open("demo", prompt="Once", credit=1000), corr) for corr in (1, 2, 3)]
        await peer.send(BytesMessage(b"".join(opens)))
        seen: dict[int, list[Frame]] = {1: [], 2: [], 3: []}
        while any(len(frames) < WORDS + 2 for frames in seen.values()):
            for corr, frame in await peer.frames(1):
                if corr in seen:
                    seen[corr].append(frame)
                    if len(seen[corr]) % 500 == 0:
                        limit = len(seen[corr]) + 1000
                        await peer.send(BytesMessage(encode(Credit(limit), corr)))
    for opened, *frames in seen.values():
        assert isinstance(opened, Opened)
        assert frames == origin.frames


async def test_what_waits_goes_on_while_there_is_room_though_nothing_new_comes(
    served: Served, origin: ScriptedOrigin
) -> None:
    """All of it comes from the link at once: no later frame has the session looked at again."""
    streams = range(1, 51)
    async with Peer.connected(served) as peer:
        await peer.send(
            BytesMessage(b"".join(encode(Open("demo", prompt="Once"), n) for n in streams))
        )
        opened = {corr for corr, frame in await peer.frames(52) if isinstance(frame, Opened)}
        assert opened == set(streams)
        await peer.send(BytesMessage(b"".join(encode(Credit(50), n) for n in streams)))
        last = dict(await peer.frames(50 * 50))
    assert last == dict.fromkeys(streams, origin.frames[49])


async def test_a_message_is_counted_as_it_comes(served: Served) -> None:
    """One without an end, in pieces: of what is too long no more is kept, or read for long."""
    piece = bytes(MAX_MESSAGE_BYTES // 8)
    async with Peer.connected(served) as peer:
        await peer.send(*[BytesMessage(piece, message_finished=False) for _ in range(9)])
        assert await peer.closed() == 1009


async def test_compression_that_nobody_agreed_to_ends_the_connection(served: Served) -> None:
    async with Peer.connected(served) as peer:
        compressed = bytearray(peer.protocol.send(BytesMessage(b"x")))
        compressed[0] |= 0x40
        await peer.client.send(bytes(compressed))
        assert await peer.closed() == 1002


@pytest.mark.parametrize(
    ("sent", "code"), [(TextMessage("hello"), 1003), (BytesMessage(b"\x00"), 1002)]
)
async def test_what_is_no_frame_ends_the_connection(served: Served, sent: Event, code: int) -> None:
    async with Peer.connected(served) as peer:
        await peer.send(sent)
        assert await peer.closed() == code


async def test_pings_are_answered_and_a_close_too(served: Served) -> None:
    async with Peer.connected(served) as peer:
        await peer.send(Ping(b"alive?"))
        while not isinstance(event := await peer.event(), Pong):
            pass
        assert event.payload == b"alive?"
        await peer.send(CloseConnection(1000, "done"))
        while not isinstance(event := await peer.event(), CloseConnection):
            pass
        assert event.code == 1000


async def test_a_client_that_ends_without_a_close_frame_is_let_go(
    served: Served, origin: ScriptedOrigin
) -> None:
    before = sum(isinstance(frame, Detach) for frame in origin.received)
    async with Peer.connected(served) as peer:
        await peer.send(BytesMessage(encode(Open("demo", prompt="Once", credit=1), 1)))
        await peer.frames(2)
        peer.client.writer.write_eof()
        assert await peer.client.rest() == b""
    async with asyncio.timeout(PATIENCE_S):
        while sum(isinstance(frame, Detach) for frame in origin.received) == before:
            await origin.has_received(len(origin.received) + 1)


async def test_a_client_that_says_no_hello_is_closed(
    origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "HELLO_TIMEOUT_S", 0.1)
    async with serving(origin) as served, Peer.connected(served, first=b"") as peer:
        frames = await peer.frames(2)
        assert isinstance(frames[0][1], Hello)
        errors = [frame for _, frame in frames if isinstance(frame, StreamError)]
        assert [(error.code, error.status) for error in errors] == [("request_timeout", 408)]
        assert await peer.closed() == 1002


async def test_a_client_is_asked_whether_it_lives_and_cut_off_if_it_does_not(
    origin: ScriptedOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "HELLO_TIMEOUT_S", 0.1)
    monkeypatch.setattr(websocket, "PING_INTERVAL_S", 0.1)
    async with serving(origin) as served, Peer.connected(served) as peer:
        events = await _all(peer)
        assert sum(isinstance(event, Ping) for event in events) == websocket.MISSED_PINGS


async def _all(peer: Peer) -> list[Event]:
    """Return what comes until the connection is cut off."""
    events: list[Event] = []
    with suppress(ConnectionError):
        while not events or not isinstance(events[-1], CloseConnection):
            events.append(await peer.event())
    return events


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Origin": "https://foreign.example"}, 403),
        ({"Host": "foreign.example"}, 421),
        ({"Upgrade": None}, 426),
        ({"Sec_WebSocket_Version": "8"}, 426),
        ({"Sec_WebSocket_Key": None}, 426),
        ({"Sec_WebSocket_Key": "short"}, 426),
    ],
)
async def test_a_handshake_that_is_not_accepted_is_the_applications_to_refuse(
    served: Served, changed: dict[str, str | None], status: int
) -> None:
    async with Client.connected(served) as client:
        await client.send(handshake(**changed))
        answer = await client.answer()
    assert (answer.status, json.loads(answer.body)["error"]["retryable"]) == (status, False)


async def test_no_other_spelling_of_the_path_leads_to_a_session(served: Served) -> None:
    """Behind the application a message would have no limit."""
    async with Client.connected(served) as client:
        await client.send(handshake().replace(b"/v1/ws", b"/v1/%77s"))
        assert (await client.answer()).status == 426


async def test_requests_count_until_the_origin_answers_although_the_client_detaches() -> None:
    async with (
        ScriptedOrigin(1).listening() as origin,
        serving(origin, max_streams_per_connection=3) as served,
        Peer.connected(served) as peer,
    ):
        origin.silent = True
        asked = [encode(Cancel(STREAM), corr) + encode(Detach(), corr) for corr in range(1, 11)]
        await peer.send(BytesMessage(b"".join(asked)))
        refused = await until_errors(peer, 7)
        assert {error.code for _, error in refused} == {"too_many_streams"}
        assert [corr for corr, _ in refused] == list(range(4, 11))
        await origin.has_received(3)
        assert origin.received == [Cancel(STREAM)] * 3


RESUME = encode(Resume(STREAM, credit=1), 1)


@asynccontextmanager
async def two_streams_at_most(served: Served, **headers: str) -> AsyncIterator[StreamError]:
    """Hold two streams of a client on two connections, and yield the error of its third stream."""
    async with (
        Peer.connected(served, HELLO + RESUME, **headers) as first,
        Peer.connected(served, HELLO + RESUME, **headers) as second,
    ):
        for peer in (first, second):
            await opened(peer)
        async with Peer.connected(served, HELLO + RESUME, **headers) as third:
            [(corr, error)] = await until_errors(third, 1)
            assert (corr, error.code, error.status) == (1, "too_many_streams", 429)
        yield error


async def test_an_address_has_its_share_of_requests_over_all_of_its_connections() -> None:
    behind = {"trusted_proxies": ["127.0.0.1"], "max_streams_per_address": 2}
    one, other = "192.0.2.1", "192.0.2.2"
    async with ScriptedOrigin(9).listening() as origin, serving(origin, **behind) as served:
        async with two_streams_at_most(served, X_Forwarded_For=one):
            for path in (f"/v1/generate/{STREAM.hex()}", "/v1/stream/a"):
                for address, status in ((one, 429), (other, 200)):
                    async with Client.connected(served) as client:
                        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
                        view = "Accept: text/event-stream\r\n"
                        origin.answers = (Answer(200), BodyEnd())
                        told = f"X-Forwarded-For: {address}\r\n\r\n"
                        await client.send((head + view + told).encode())
                        assert (await client.answer()).status == status, (path, address)
        async with Peer.connected(served, HELLO + RESUME, X_Forwarded_For=one) as again:
            await opened(again)


OTHER_KEY_ID, OTHER_KEY = make_key(lambda count: b"\x08" * count)


async def test_a_tenant_has_its_share_of_requests_over_all_of_its_connections() -> None:
    other_key = api_key(id=OTHER_KEY_ID, tenant="bolt", sha256=digest_of(OTHER_KEY))
    acme, bolt = f"Bearer {KEY_OF_ACME}", f"Bearer {OTHER_KEY}"
    async with (
        ScriptedOrigin(9).listening() as origin,
        serving(origin, max_streams_per_tenant=2) as served,
    ):
        served.context.rules.authenticator.ring = KeyRing([api_key(), other_key], {})
        async with two_streams_at_most(served, Authorization=acme) as refused:
            assert "edge.max_streams_per_tenant" in str(refused.hint)
            for key, status in ((acme, 429), (bolt, 200)):
                async with Client.connected(served) as client:
                    path = f"/v1/generate/{STREAM.hex()}"
                    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\n"
                    await client.send((head + "Accept: text/event-stream\r\n\r\n").encode())
                    assert (await client.answer()).status == status, key
        async with Peer.connected(served, HELLO + RESUME, Authorization=acme) as again:
            await opened(again)


async def test_a_client_without_an_api_key_is_told_no_details_of_the_origins() -> None:
    async with ScriptedOrigin(1).listening() as origin:
        origin.ledger = "file:1"
        async with serving(origin) as served:
            served.context.rules.authenticator.ring = KeyRing([api_key()], {})
            async with (
                Peer.connected(served) as anonymous,
                Peer.connected(served, Authorization=f"Bearer {KEY_OF_ACME}") as known,
            ):
                told, all_told = await heartbeat(anonymous), await heartbeat(known)
    assert told.ready
    assert (told.models, told.devices, told.ledger) == ((), (), "")
    assert (all_told.models, all_told.devices) == (("demo",), ("cpu torch",))


async def heartbeat(peer: Peer) -> Heartbeat:
    """Return the next Heartbeat that the client gets."""
    while True:
        for _, frame in await peer.frames(1):
            if isinstance(frame, Heartbeat):
                return frame


async def until_errors(peer: Peer, count: int) -> list[tuple[int, StreamError]]:
    """Return the next errors of streams, so many at least."""
    found: list[tuple[int, StreamError]] = []
    while len(found) < count:
        found += [(c, f) for c, f in await peer.frames(1) if isinstance(f, StreamError)]
    return found


async def opened(peer: Peer) -> None:
    while not any(isinstance(frame, Opened) for _, frame in await peer.frames(1)):
        pass


async def test_every_frame_is_a_text_message_with_the_subprotocol_for_json(served: Served) -> None:
    offer = {"Sec-WebSocket-Protocol": "tailrace.json"}
    async with Peer.connected(served, b"", **offer) as peer:
        resume = {"type": "Resume", "corr": 5, "stream": STREAM.hex(), "tail": 3, "credit": 9}
        await peer.send(TextMessage(json.dumps(resume)))
        told = list[dict[str, object]]()
        while not told or told[-1]["type"] != "StreamEnd":
            event = await peer.event()
            assert isinstance(event, TextMessage)
            assert event.message_finished
            told.append(json.loads(event.data))
        assert told[0]["type"] == "Hello"
        stream = [each for each in told if each["corr"] == 5]
        assert [each["type"] for each in stream] == ["Opened", "Token", "Token", "StreamEnd"]
        assert [each.get("index") for each in stream[1:]] == [WORDS - 2, WORDS - 1, WORDS]


@pytest.mark.parametrize(
    ("event", "code", "error"),
    [
        (TextMessage("no JSON"), 1007, "invalid_json"),
        (TextMessage('{"type": "Nothing"}'), 1007, "invalid_json"),
        (TextMessage('{"type": "Resume", "stream": ""}'), 1002, "bad_frame"),
        (BytesMessage(b"\0"), 1003, "bad_frame"),
        (TextMessage(" " * (MAX_MESSAGE_BYTES + 1)), 1009, "too_large"),
    ],
)
async def test_a_fault_in_json_ends_the_connection_with_its_code(
    served: Served, event: Event, code: int, error: str
) -> None:
    offer = {"Sec-WebSocket-Protocol": "tailrace.json, tailrace"}
    async with Peer.connected(served, b"", **offer) as peer:
        await peer.send(event)
        told = list[dict[str, object]]()
        while isinstance(found := await peer.event(), TextMessage):
            told.append(json.loads(found.data))
        assert isinstance(found, CloseConnection)
        assert found.code == code
        assert (told[-1]["type"], told[-1]["code"]) == ("StreamError", error)


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ("tailrace", "tailrace"),
        ("tailrace, tailrace.json", "tailrace"),
        ("tailrace.json, tailrace", "tailrace.json"),
        ("graphql-ws, tailrace.json", "tailrace.json"),
        ("graphql-ws", None),
    ],
)
async def test_the_first_known_subprotocol_is_selected(
    served: Served, offered: str, chosen: str | None
) -> None:
    async with Client.connected(served) as client:
        await client.send(handshake(Sec_WebSocket_Protocol=offered))
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode().lower()
    lines = [line for line in head.split("\r\n") if line.startswith("sec-websocket-protocol")]
    assert lines == ([] if chosen is None else [f"sec-websocket-protocol: {chosen}"])
