"""The link over real loopback sockets, and the reader that reads through it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from structlog.testing import capture_logs

from tailrace.edge.origins.breaker import TRIPS, origin_breaker
from tailrace.edge.origins.origin import Connection
from tailrace.edge.origins.origin_pool import MAX_HELD_BYTES, OriginPool
from tailrace.edge.origins.reader import CORR, WINDOW_BYTES, WINDOW_FRAMES, Reader, credited
from tailrace.ledger.errors import NotFound, Overloaded, TailraceError
from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.idle_timer import LONGEST_LOOK_S
from tailrace.ledger.frame import (
    SCHEMA_HASH,
    Call,
    Credit,
    Heartbeat,
    Hello,
    ModelTier,
    Open,
    Opened,
    Resume,
    StreamError,
    Token,
    decode,
    encode,
    split,
)
from tests.edge.origins.test_relay import Client
from tests.edge.scripted_origin import STREAM, TOKEN, ScriptedOrigin, linked, until

pytestmark = pytest.mark.anyio

OPEN = credited(Open("demo", prompt="hold", idempotency_key="key"))
LEFT_BYTES = WINDOW_BYTES - len(encode(Token(" w0", 0)))
REST = Resume(STREAM, 0, TOKEN, credit=WINDOW_FRAMES - 1, credit_bytes=LEFT_BYTES)
"""The request that follows a link that was lost after the first frame."""
PATIENCE_MS = 1_500
"""Several looks at a link: of a time in which the machine stood still only one is counted."""
NO_WAIT = Backoff(3600, 3600)
"""Whoever waits for this one waits for longer than any test may last."""


async def taken(reader: Reader, count: int) -> list[object]:
    """Return the next `count` frames at least."""
    frames: list[object] = []
    while len(frames) < count:
        frames += [decode(raw)[1] for raw in await reader.take()]
    return frames


async def test_a_dropped_link_is_only_a_pause() -> None:
    origin = ScriptedOrigin(3)
    async with origin.serving() as link:
        reader = Reader(link)
        opened = await reader.open(OPEN)
        assert opened == Opened(STREAM, 1, TOKEN, "demo", 3)
        assert await taken(reader, 1) == [Token(" w0", 0)]
        origin.released = len(origin.frames)
        origin.drop_links()
        assert await taken(reader, 3) == origin.frames[1:]
    assert origin.received == [OPEN, REST]


class FullReader(Reader):
    """Says when a stream's first window has come whole, however TCP has cut it."""

    def __init__(self, link: OriginPool) -> None:
        super().__init__(link)
        self.full = asyncio.Event()
        self._delivered = 0

    def deliver(self, raw: bytes) -> None:
        super().deliver(raw)
        self._delivered += 1
        if self._delivered == 1 + WINDOW_FRAMES:  # Opened comes first
            self.full.set()


async def test_credit_is_renewed_when_half_of_the_window_has_drained() -> None:
    origin = ScriptedOrigin(WINDOW_FRAMES * 2)
    async with origin.serving() as link:
        reader = FullReader(link)
        await reader.open(Open("demo", prompt="all"))
        await reader.full.wait()
        frames = await taken(reader, WINDOW_FRAMES)
        assert len(frames) == WINDOW_FRAMES  # and no more: this batch has not drained yet
        frames += await taken(reader, 1)
        frames += await taken(reader, len(origin.frames) - len(frames))
    assert frames == origin.frames
    limits = [frame.limit for frame in origin.received if isinstance(frame, Credit)]
    assert limits[0] == 2 * WINDOW_FRAMES
    assert limits == sorted(limits)


async def test_a_refusal_is_raised_where_the_request_was_made() -> None:
    async with ScriptedOrigin(1).serving() as link:
        with pytest.raises(NotFound):
            await Reader(link).open(Resume(bytes(16)))


async def test_silence_gives_no_frames() -> None:
    async with ScriptedOrigin(1).serving() as link:
        reader = Reader(link)
        await reader.open(OPEN)
        await taken(reader, 1)
        assert await reader.take(timeout_s=0) == []


def test_a_link_that_was_never_up_is_not_ready() -> None:
    heartbeat = OriginPool(("127.0.0.1", 9)).heartbeat
    assert not heartbeat.ready
    assert heartbeat.reasons == ("no link to the origin at 127.0.0.1:9",)


class Refusals:
    """A client that keeps the wait and the reason of each refusal."""

    def __init__(self) -> None:
        self.waits: list[int | None] = []
        self.reasons: set[str] = set()

    def deliver(self, raw: bytes) -> None:
        _, frame = decode(raw)
        assert isinstance(frame, StreamError)
        self.waits.append(frame.retry_after_ms)
        self.reasons.add(frame.message)

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        raise AssertionError("no stream is open")


def overfill(link: OriginPool, most_bytes: int) -> Refusals:
    """Send Calls of a megabyte until twenty were refused, and no more than so many bytes before."""
    client = Refusals()
    call = Call("stream", "s", "POST", "/", (), bytes(1_000_000), 1)
    corr = 0
    while len(client.waits) < 20:
        corr += 1
        link.ask(client, corr, call)
        assert corr * 1_000_000 <= most_bytes + (21 << 20)
    return client


def assert_spread(client: Refusals) -> None:
    assert None not in client.waits
    assert len(set(client.waits)) > 1, "all would come back at once"


async def test_who_is_refused_while_too_much_waits_for_a_link_is_told_different_times() -> None:
    client = overfill(OriginPool(("127.0.0.1", 9)), MAX_HELD_BYTES)
    assert client.reasons == {"too many requests wait for the origin"}
    assert_spread(client)


async def test_who_is_refused_while_the_origin_reads_nothing_is_told_different_times() -> None:
    origin = ScriptedOrigin(1)
    async with origin.serving() as link:
        client = overfill(link, MAX_HELD_BYTES)  # no turn of the loop: the origin reads nothing
        link.forget(client)
    assert client.reasons == {"the link to the origin is full"}
    assert_spread(client)


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_what_is_asked_for_in_the_turn_after_a_loss_waits_for_the_next_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On uvloop, as an edge runs: there a write to a connection that has ended raises."""
    origin = ScriptedOrigin(2 * WINDOW_FRAMES)
    lost = Connection.connection_lost
    async with origin.serving() as link:
        reader, other = Reader(link), Reader(link)
        await reader.open(Open("demo", prompt="all"))
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ask() -> None:
            try:
                link.credit(reader, CORR, Credit(2 * WINDOW_FRAMES))
                link.ask(other, CORR, OPEN)
            except RuntimeError as error:  # uvloop's
                asked.set_exception(error)
            else:
                asked.set_result(None)

        def lose(connection: Connection, exc: Exception | None) -> None:
            asyncio.get_running_loop().call_soon(ask)
            lost(connection, exc)

        monkeypatch.setattr(Connection, "connection_lost", lose)
        origin.drop_links()
        await asked
        monkeypatch.undo()
        assert await taken(reader, 2 * WINDOW_FRAMES) == origin.frames[: 2 * WINDOW_FRAMES]
        opened, *_ = await other.take(30)
        assert decode(opened)[1] == Opened(STREAM, 1, TOKEN, "demo", 3)


# ---- several origins ----


async def test_when_an_origin_is_lost_the_next_one_is_asked_for_the_rest_at_once() -> None:
    first, second = ScriptedOrigin(3), ScriptedOrigin(3)
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        assert link.address == f"127.0.0.1:{first.port}"
        reader = Reader(link)
        await reader.open(OPEN)
        assert await taken(reader, 1) == [Token(" w0", 0)]
        first.stop()
        assert await taken(reader, 3) == first.frames[1:]
        assert link.address == f"127.0.0.1:{second.port}"
    assert first.received == [OPEN]
    assert second.received == [REST]


async def test_an_open_that_was_not_answered_is_sent_to_the_next_origin() -> None:
    first, second = ScriptedOrigin(3), ScriptedOrigin(3)
    first.silent = True
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        reader = Reader(link)
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(reader.open(OPEN))
            await first.has_received(1)
            first.stop()
        assert opening.result() == Opened(STREAM, 1, TOKEN, "demo", 3)
    assert first.received == second.received == [OPEN]


async def test_a_silent_origin_that_is_alone_is_asked_for_the_rest_on_a_new_link() -> None:
    origin = ScriptedOrigin(3)
    origin.patience_ms = PATIENCE_MS
    async with origin.serving() as link:
        reader = Reader(link)
        await reader.open(OPEN)
        assert await taken(reader, 1) == [Token(" w0", 0)]
        origin.released = len(origin.frames)
        assert await taken(reader, 3) == origin.frames[1:]
    assert origin.received == [OPEN, REST]


async def test_a_silent_origin_is_left_after_the_time_that_it_has_told() -> None:
    first, second = ScriptedOrigin(3), ScriptedOrigin(3)
    first.patience_ms = PATIENCE_MS
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        reader = Reader(link)
        await reader.open(OPEN)
        assert await taken(reader, 1) == [Token(" w0", 0)]
        with capture_logs() as logged:
            assert await taken(reader, 3) == first.frames[1:]
        # The origin may be dialled, and fall silent, once more before this is read.
        reason, *_ = [line["reason"] for line in logged if line["event"] == "origin link down"]
        assert reason == "the origin was silent for 1.5 s"
        assert link.address == f"127.0.0.1:{second.port}"


class Memory(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


async def test_an_origin_that_sends_only_tokens_for_longer_than_its_timeout_is_kept() -> None:
    link = OriginPool(("127.0.0.1", 9))
    [origin] = link.origins
    connection, transport, client = Connection(origin), Memory(), Client()
    connection.connection_made(transport)
    patience = Heartbeat(1, ready=True, patience_ms=PATIENCE_MS)
    connection.data_received(encode(Hello(SCHEMA_HASH, "test")) + encode(patience))
    link.ask(client, 7, OPEN)
    [corr] = [c for c, f in map(decode, split(transport.written)) if isinstance(f, Open)]
    connection.data_received(encode(Opened(STREAM, 0, TOKEN, "demo", 3), corr))
    # The origin's link is looked at on a clock that the test moves, as often as that counts.
    looks = round(PATIENCE_MS / 1000 / LONGEST_LOOK_S) + 1
    at = asyncio.get_running_loop().time()
    for index in range(4 * looks):
        connection.data_received(encode(Token("x", index), corr))
        at += LONGEST_LOOK_S
        origin.look(at)
    assert not connection.lost.done()
    assert client.frames[1:] == [(7, Token("x", index)) for index in range(4 * looks)]
    for _ in range(looks):
        at += LONGEST_LOOK_S
        origin.look(at)
    assert str(connection.lost.result()) == "the origin was silent for 1.5 s"


async def test_the_first_origin_that_answers_is_used() -> None:
    dead, alive = ScriptedOrigin(1), ScriptedOrigin(1)
    async with dead.listening(), alive.listening():
        dead.stop()
        async with linked(dead, alive, backoff=NO_WAIT, up=1) as link:
            assert link.address == f"127.0.0.1:{alive.port}"


async def test_only_when_all_origins_have_failed_the_edge_waits() -> None:
    class Waiting(Backoff):
        begun = asyncio.Event()

        def next_delay_s(self) -> float:
            self.begun.set()
            return 3600.0

    backoff = Waiting(0, 0)
    one, two = ScriptedOrigin(1), ScriptedOrigin(1)
    async with one.listening(), two.listening(), linked(one, two, backoff=backoff) as link:
        assert not backoff.begun.is_set()
        one.stop()
        two.stop()
        await backoff.begun.wait()
        places = f"127.0.0.1:{one.port}, 127.0.0.1:{two.port}"
        assert link.heartbeat.reasons == (f"no link to the origin at {places}",)


LONG = Open("demo", prompt="hold")


@asynccontextmanager
async def two(first: ScriptedOrigin, second: ScriptedOrigin) -> AsyncIterator[OriginPool]:
    async with (
        first.listening(),
        second.listening(),
        linked(first, second, backoff=NO_WAIT) as link,
    ):
        yield link


async def opened_by(link: OriginPool, request: Open | Resume = LONG) -> Reader:
    reader = Reader(link)
    await reader.open(request)
    return reader


async def test_new_streams_are_spread_over_the_origins() -> None:
    one, other = ScriptedOrigin(3), ScriptedOrigin(3)
    async with two(one, other) as link:
        for _ in range(6):
            await opened_by(link)
    assert (len(one.received), len(other.received)) == (3, 3)


async def test_what_begins_alike_goes_to_one_origin() -> None:
    one, other = ScriptedOrigin(3), ScriptedOrigin(3)
    async with two(one, other) as link:
        for _ in range(3):
            await opened_by(link, Open("demo", prompt="You are a poet. " * 50))
    assert sorted((len(one.received), len(other.received))) == [0, 3]


async def test_an_origin_that_is_not_ready_gets_nothing_new_while_another_is() -> None:
    loading, ready = ScriptedOrigin(3), ScriptedOrigin(3)
    loading.ready = False
    async with two(loading, ready) as link:
        assert link.heartbeat.ready
        for _ in range(3):
            await opened_by(link)
        assert (len(loading.received), len(ready.received)) == (0, 3)
        ready.ready, loading.ready = False, True
        ready.say()
        loading.say()
        news = [loading.heartbeat(), ready.heartbeat()]
        await until(lambda: [origin.relay.heartbeat for origin in link.origins] == news)
        await opened_by(link)
    assert (len(loading.received), len(ready.received)) == (1, 3)


async def test_a_model_that_one_origin_has_is_asked_for_there() -> None:
    one, other = ScriptedOrigin(3), ScriptedOrigin(3)
    one.models = ("another",)
    async with two(one, other) as link:
        assert link.heartbeat.models == ("another", "demo")
        for _ in range(3):
            await opened_by(link)
    assert (len(one.received), len(other.received)) == (0, 3)


async def test_a_model_that_is_warm_at_one_origin_is_asked_for_there_and_readyz_shows_it() -> None:
    one, other = ScriptedOrigin(3), ScriptedOrigin(3)
    one.tiers = (ModelTier("demo", "host", 1500, "no worker starts"),)
    other.tiers = (ModelTier("demo", "compiled"),)
    async with two(one, other) as link:
        for _ in range(3):
            await opened_by(link)
        told = [origin.described()["tiers"] for origin in link.origins]
    assert (len(one.received), len(other.received)) == (0, 3)
    assert told[0] == [
        {"model": "demo", "tier": "host", "expected_ms": 1500, "reason": "no worker starts"}
    ]


async def test_who_is_refused_for_want_of_room_is_taken_by_the_other() -> None:
    full, free = ScriptedOrigin(3), ScriptedOrigin(3)
    full.refusal = Overloaded("256 streams run or wait")
    async with two(full, free) as link:
        await opened_by(link)
        free.refusal = full.refusal
        with pytest.raises(Overloaded):
            await opened_by(link)
    assert (len(full.received), len(free.received)) == (2, 2)


async def test_a_stream_that_one_ledger_has_not_is_looked_for_in_the_others_once_each() -> None:
    one, same, other = ScriptedOrigin(3), ScriptedOrigin(3), ScriptedOrigin(3)
    for origin, ledger in ((one, "postgresql:1"), (same, "postgresql:1"), (other, "file:2")):
        origin.ledger, origin.refusal = ledger, NotFound("no such stream", code="unknown_stream")
    async with (
        one.listening(),
        same.listening(),
        other.listening(),
        linked(one, same, other, backoff=NO_WAIT) as link,
    ):
        with pytest.raises(NotFound):
            await opened_by(link, Resume(STREAM))
        other.refusal = None
        await opened_by(link, Resume(STREAM))
    assert len(one.received) + len(same.received) <= 2
    assert len(other.received) == 2


async def test_without_a_shared_ledger_a_stream_waits_for_the_origin_that_has_it() -> None:
    one, other = ScriptedOrigin(3), ScriptedOrigin(3)
    one.ledger, other.ledger = "file:1", "file:2"
    async with (
        one.listening(),
        other.listening(),
        linked(one, other, backoff=Backoff(0, 0)) as link,
    ):
        reader = await opened_by(link)
        assert await taken(reader, 1) == [Token(" w0", 0)]
        one.released = len(one.frames)
        one.drop_links()
        assert await taken(reader, 3) == one.frames[1:]
    assert [type(frame) for frame in one.received] == [Open, Resume]
    assert other.received == []


async def test_an_origin_that_fails_again_and_again_is_left_alone() -> None:
    failing, sound = ScriptedOrigin(3), ScriptedOrigin(3)
    failing.refusal = TailraceError("a fault of the origin's")
    async with two(failing, sound) as link:
        link.origins[0].breaker = origin_breaker(NO_WAIT)
        for _ in range(4 * TRIPS):
            with suppress(TailraceError):
                await opened_by(link)
        assert link.origins[0].described()["breaker"] == "open"
    assert len(failing.received) == TRIPS
