"""Origins that share a PostgreSQL: each object has one that runs it, whoever is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tailrace.ledger.errors import HeldElsewhere, OriginUnreachable, Unavailable
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Call,
    Challenge,
    Heartbeat,
    Hello,
    Splitter,
    StreamError,
    encode,
)
from tailrace.ledger.interface import ObjectKey
from tailrace.ledger.objects.object import ObjectRequest, ObjectResponse
from tailrace.ledger.postgres.ledger import PostgresLedger
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.wire.handshake import PEER, Handshake, Side
from tailrace.origin.config import StreamsConfig
from tailrace.origin.edges import peers
from tailrace.origin.edges.peer_frame import ASKING, PEER_CODEC, PEER_SCHEMA_HASH, ObjectCall
from tailrace.origin.edges.peers import ALONE, SOFTWARE, Outages
from tailrace.origin.generations.resume_tokens import TokenKeys
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.steady_clock import now_ms
from tailrace.origin.streams.fork import GIVE_BACK
from tests.e2e.processes import free_port
from tests.origin.edges.test_calls import LiveBody, answering
from tests.origin.edges.test_link import House, serving

pytestmark = pytest.mark.anyio

URL = "http://host/v1/stream/"
TEXT = ("content-type", "text/plain")
PATIENCE_S = 60.0


KEYS = TokenKeys({"k": bytes(32)})
WAY = replace(ALONE, secrets=KEYS.peer_secrets(None))


class Greeter:
    """The other origin's side of a greeting; then it says one thing, if any."""

    def __init__(self, write: Callable[[bytes], object], then: Heartbeat | None = None) -> None:
        self._write, self._then = write, then
        self._splitter = Splitter(tags=ASKING)
        self._handshake = Handshake(Side.ORIGIN, *WAY.secrets, shared=PEER)
        self.has_call = False
        write(encode(Hello(SCHEMA_HASH, SOFTWARE)) + encode(Hello(PEER_SCHEMA_HASH, SOFTWARE)))
        assert self._handshake.challenge is not None
        write(encode(self._handshake.challenge))

    def hear(self, data: bytes) -> None:
        for raw in self._splitter.feed(data):
            _, frame = PEER_CODEC.decode(raw)
            if isinstance(frame, Challenge):
                self._write(encode(self._handshake.answer(frame)))
                if self._then is not None:
                    self._write(encode(self._then))
            self.has_call |= isinstance(frame, ObjectCall)


class Origin:
    """One origin without workers: its ledger, its objects, and its link while it is `up`."""

    def __init__(self, ledger: PostgresLedger, port: int, checkpoint: Path) -> None:
        self.ledger = ledger
        self.objects = OriginObjects(ledger, StreamsConfig(), now_ms, transport=WAY)
        self._house = House(cast(SqliteLedger, ledger), checkpoint)
        self._house.service = replace(self._house.service, objects=self.objects)
        self.port = port
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._house.link, "127.0.0.1", self.port)

    def fall_silent(self) -> None:
        """Be reached by nobody any more."""
        if self._server is not None:
            self._server.close()
        for link in list(self._house.links):
            link.close()

    async def ask(self, method: str, name: str, body: bytes = b"", *more: tuple[str, str]) -> int:
        request = ObjectRequest(method, URL + name, (TEXT, *more), body)
        async with asyncio.timeout(PATIENCE_S):
            return (await self.objects.fetch(ObjectKey("stream", name), request)).status

    async def text(self, name: str) -> object:
        request = ObjectRequest("GET", URL + name)
        return (await self.objects.fetch(ObjectKey("stream", name), request)).body

    @property
    def resident(self) -> int:
        return self.objects.runtime.resident


@asynccontextmanager
async def origin(dsn: str, checkpoint: Path, lease_s: float = 3.0) -> AsyncIterator[Origin]:
    port = free_port()
    ledger = await PostgresLedger.open(
        dsn, now_ms, owner=f"origin {port}", lease_s=lease_s, reached=("127.0.0.1", port)
    )
    made = Origin(ledger, port, checkpoint)
    try:
        await made.listen()
        yield made
    finally:
        made.fall_silent()
        await made.objects.close()
        await ledger.close()


async def test_writers_on_two_origins_are_served_by_the_one_that_holds_the_stream(
    database: str, checkpoint: Path
) -> None:
    async with origin(database, checkpoint) as one, origin(database, checkpoint) as other:
        assert await one.ask("PUT", "s") == 201

        async def write(at: Origin, mark: str) -> None:
            for index in range(40):
                assert await at.ask("POST", "s", f"{mark}{index};".encode()) == 204

        await asyncio.gather(*(write(at, mark) for at in (one, other) for mark in "ab"))
        assert (one.resident, other.resident) == (1, 0)
        stored = await other.text("s")
        assert isinstance(stored, bytes)
        assert len(stored.split(b";")) == 161
        assert await other.ask("POST", "s", b"x", ("content-type", "text/html")) == 204
        assert await other.ask("DELETE", "s") == 204
        assert await one.ask("HEAD", "s") == 404


async def test_a_fork_is_made_of_a_stream_that_another_origin_holds(
    database: str, checkpoint: Path
) -> None:
    async with origin(database, checkpoint) as one, origin(database, checkpoint) as other:
        assert await one.ask("PUT", "s", b"abc") == 201
        assert await other.ask("PUT", "f", b"d", ("stream-forked-from", "/v1/stream/s")) == 201
        assert await one.text("f") == b"abcd"
        assert (one.resident, other.resident) == (1, 1)


async def test_what_comes_while_a_link_is_closing_goes_by_a_new_one(
    database: str, checkpoint: Path
) -> None:
    async with origin(database, checkpoint) as one, origin(database, checkpoint) as other:
        assert await one.ask("PUT", "s", b"a") == 201
        assert await other.ask("POST", "s", b"b") == 204
        ours, key = other.objects._peers, ObjectKey("stream", "s")
        [(address, link)] = ours._links.items()
        link.close()  # like a peer whose answer came too late
        held = HeldElsewhere("another origin has it")
        held.address = address
        response = await ours.ask(held, key, ObjectRequest("POST", URL + "s", (TEXT,), b"c"))
        assert response is not None
        assert response.status == 204
        assert await one.text("s") == b"abc"


async def test_an_origin_that_ends_leaves_its_objects_to_the_next_that_is_asked(
    database: str, checkpoint: Path
) -> None:
    async with origin(database, checkpoint) as other:
        async with origin(database, checkpoint) as one:
            assert await one.ask("PUT", "s", b"a") == 201
            assert await other.ask("POST", "s", b"b") == 204
        assert await other.ask("POST", "s", b"c") == 204
        assert await other.text("s") == b"abc"
        assert other.resident == 1


async def test_a_writer_waits_for_the_lease_of_an_origin_that_is_gone(
    database: str, checkpoint: Path
) -> None:
    async with (
        origin(database, checkpoint, lease_s=0.5) as one,
        origin(database, checkpoint) as other,
    ):
        assert await one.ask("PUT", "s", b"a") == 201
        assert await other.ask("POST", "s", b"b") == 204
        await one.ledger._lease.stop()  # as if the process had stopped
        one.fall_silent()
        assert await other.ask("POST", "s", b"c") == 204
        assert await other.text("s") == b"abc"


def test_an_address_that_failed_once_long_ago_is_waited_for_when_it_fails_again() -> None:
    outages = Outages()
    assert outages.failed("other", 0.0) == 0.0
    assert outages.failed("other", 5.0) == 5.0
    assert outages.failed("other", 1000.0) == 0.0  # no request was made in the meantime
    assert outages.failed("other", 1006.0) == 6.0
    outages.over("other")
    assert outages.failed("other", 1007.0) == 0.0


async def test_an_origin_that_lives_but_cannot_be_reached_loses_its_objects(
    database: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.peers.PEER_OUTAGE_S", 0.2)
    async with origin(database, checkpoint) as one, origin(database, checkpoint) as other:
        assert await one.ask("PUT", "s", b"a") == 201
        one.fall_silent()
        assert await other.ask("POST", "s", b"b") == 204
        assert await one.ask("POST", "s", b"c") == 204  # the other origin is asked now
        assert await other.text("s") == b"abc"


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_what_was_under_way_at_an_origin_that_is_lost_may_have_been_done(
    database: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, hangs_up: bool
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.peers.PEER_SILENCE_S", 30.0 if hangs_up else 0.2)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeter = Greeter(writer.write)
        while not greeter.has_call:  # until it has come
            greeter.hear(await reader.read(1 << 16))
        if not hangs_up:
            with suppress(ConnectionError):
                await reader.read()
        writer.close()

    port = free_port()
    with closing(await asyncio.start_server(greet, "127.0.0.1", port)):
        dying = await PostgresLedger.open(
            database, now_ms, owner="dying", reached=("127.0.0.1", port)
        )
        await dying.objects.claim(ObjectKey("stream", "s"))
        async with origin(database, checkpoint) as other:
            with pytest.raises(OriginUnreachable) as raised:
                await other.ask("PUT", "s")
        assert raised.value.code == "outcome_unknown"
        await dying.close()


async def test_an_address_that_leads_to_another_origin_costs_time_and_nothing_else(
    database: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.origin.edges.peers.PEER_OUTAGE_S", 0.2)
    async with origin(database, checkpoint) as other:
        at_the_other = ("127.0.0.1", other.port)
        ledger = await PostgresLedger.open(database, now_ms, owner="lost", reached=at_the_other)
        await ledger.objects.claim(ObjectKey("stream", "s"))
        assert await other.ask("PUT", "s") == 201  # which it has asked itself for in between
        await ledger.close()


class Mute(asyncio.Protocol):
    """An origin that greets, tells its patience, and then says nothing."""

    def __init__(self, patience_ms: int) -> None:
        self._alive = Heartbeat(0, ready=True, patience_ms=patience_ms)
        self._greeter: Greeter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._greeter = Greeter(cast(asyncio.Transport, transport).write, self._alive)

    def data_received(self, data: bytes) -> None:
        assert self._greeter is not None
        self._greeter.hear(data)


@pytest.mark.parametrize(("told_ms", "else_s"), [(50, 3600.0), (0, 0.05)])
async def test_an_origin_that_is_asked_is_waited_for_as_long_as_it_has_told(
    monkeypatch: pytest.MonkeyPatch, told_ms: int, else_s: float
) -> None:
    monkeypatch.setattr(peers, "PEER_SILENCE_S", else_s)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Mute, told_ms), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with closing(server):
        async with asyncio.timeout(PATIENCE_S):
            _, link = await loop.create_connection(
                lambda: peers.PeerLink(WAY.secrets), "127.0.0.1", port
            )
            await link.greeted.wait()
            with pytest.raises(Unavailable) as caught:
                await link.call(ObjectKey("stream", "a"), ObjectRequest("GET", URL + "a"))
            link.close()
    assert caught.value.code == "outcome_unknown"


# ---- bodies that come bit by bit ----


KEY = ObjectKey("clock", "a")
GET = ObjectRequest("GET", URL + "a")


@asynccontextmanager
async def holder(folder: Path, checkpoint: Path) -> AsyncIterator[tuple[House, peers.PeerLink]]:
    """Yield an origin whose objects are the test's, and the link of another one to it."""
    async with serving(folder, checkpoint) as house:
        link = await peers.connect(f"127.0.0.1:{house.port}", WAY)
        assert link is not None
        try:
            yield house, link
        finally:
            link.close()


def body_of(response: ObjectResponse) -> AsyncIterator[bytes]:
    assert not isinstance(response.body, bytes)
    return response.body


async def test_a_live_body_of_another_origin_is_passed_on_as_it_comes_and_closed_with_its_reader(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with holder(tmp_path, checkpoint) as (house, link), asyncio.timeout(PATIENCE_S):
        live = LiveBody()
        house.objects.answer = answering(ObjectResponse(200, (("x", "y"),), live))
        response = await link.call(KEY, GET)
        assert (response.status, response.headers) == (200, (("x", "y"),))
        body = body_of(response)
        for part in (b"one", b"two"):
            live.parts.put_nowait(part)
            assert await anext(body) == part
        await cast(peers.PeerCall, body).aclose()
        await live.closed.wait()


async def test_a_caller_that_leaves_before_the_answer_frees_the_corr_at_the_other_origin(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with holder(tmp_path, checkpoint) as (house, link), asyncio.timeout(PATIENCE_S):
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def think(_request: ObjectRequest) -> ObjectResponse:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        house.objects.answer = think
        call = asyncio.create_task(link.call(KEY, GET))
        await begun.wait()
        call.cancel()
        await cancelled.wait()


async def test_a_large_body_of_another_origin_comes_whole(tmp_path: Path, checkpoint: Path) -> None:
    content = bytes(range(256)) * (20 << 12)  # 20 MiB: more than the first credit
    async with holder(tmp_path, checkpoint) as (house, link), asyncio.timeout(PATIENCE_S):
        house.objects.answer = answering(ObjectResponse(200, (), content))
        body = body_of(await link.call(KEY, GET))
        assert b"".join([part async for part in body]) == content
        house.objects.answer = answering(ObjectResponse(201, (), b"small"))
        small = await link.call(KEY, GET)
        assert (small.status, small.body) == (201, b"small")


async def test_a_body_that_is_not_read_is_not_fetched(tmp_path: Path, checkpoint: Path) -> None:
    async with holder(tmp_path, checkpoint) as (house, link), asyncio.timeout(PATIENCE_S):
        live = LiveBody()
        for _ in range(10 * peers.WINDOW_BODIES):
            live.parts.put_nowait(b"x")
        house.objects.answer = answering(ObjectResponse(200, (), live))
        body = body_of(await link.call(KEY, GET))
        house.objects.answer = answering(ObjectResponse(200, (), b"behind it"))
        for _ in range(peers.WINDOW_BODIES):
            await link.call(KEY, GET)
        assert live.given <= peers.WINDOW_BODIES + 1  # one waits there for credit
        for _ in range(10 * peers.WINDOW_BODIES):
            assert await anext(body) == b"x"


async def test_a_body_that_its_origin_takes_along_ends_with_an_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with holder(tmp_path, checkpoint) as (house, link), asyncio.timeout(PATIENCE_S):
        live = LiveBody()
        live.parts.put_nowait(b"one")
        house.objects.answer = answering(ObjectResponse(200, (), live))
        body = body_of(await link.call(KEY, GET))
        assert await anext(body) == b"one"
        for there in list(house.links):
            there.close()
        with pytest.raises(OriginUnreachable) as caught:
            await anext(body)
        assert caught.value.code == "origin_unreachable"


# ---- who may ask as an origin ----


GIVE = ObjectCall("stream", "s", GIVE_BACK, "", "", (), b"x", 8)


async def test_an_edge_cannot_send_what_only_objects_ask_each_other(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint) as house, asyncio.timeout(PATIENCE_S):
        client = await house.greeted()
        client.send_raw(PEER_CODEC.encode(GIVE, 1))
        _, refused = await client.next()
        assert isinstance(refused, StreamError)
        assert (refused.code, "unknown tag 48" in refused.message) == ("bad_frame", True)
        assert house.objects.requests == []


async def test_who_calls_itself_an_origin_has_the_rights_of_an_edge(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with serving(tmp_path, checkpoint) as house, asyncio.timeout(PATIENCE_S):
        client = await house.connected()
        client.send(Hello(SCHEMA_HASH, SOFTWARE))
        assert await client.next() == (0, Hello(SCHEMA_HASH, SOFTWARE))
        client.send(Call("stream", "s", GIVE_BACK, "", (), b"x", 8), 1)
        _, refused = await client.next()
        assert isinstance(refused, StreamError)
        assert refused.code == "method_not_allowed"
        assert house.objects.requests == []


@pytest.mark.parametrize("secret", [None, b"a link secret that edges have"])
async def test_who_asks_as_an_origin_without_its_keys_is_refused(
    tmp_path: Path, checkpoint: Path, secret: bytes | None
) -> None:
    async with serving(tmp_path, checkpoint) as house, asyncio.timeout(PATIENCE_S):
        for proof in (None, Handshake(Side.EDGE, secret or b"guessed", shared=PEER)):
            client = await house.connected()
            client.send(Hello(PEER_SCHEMA_HASH, SOFTWARE))
            hellos = [await client.next() for _ in range(3)]
            assert hellos[1] == (0, Hello(PEER_SCHEMA_HASH, SOFTWARE))
            challenge = hellos[2][1]
            assert isinstance(challenge, Challenge)
            if proof is not None:
                assert proof.challenge is not None
                client.send(proof.challenge)
                await client.next()
                client.send(proof.answer(challenge))
            else:
                client.send_raw(PEER_CODEC.encode(GIVE, 1))
            _, refused = await client.next()
            assert isinstance(refused, StreamError)
            assert refused.code == "link_refused"
        assert house.objects.requests == []
