"""Readers of one stream that share a subscription: what crosses the link, and what each gets."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest

from tailrace.edge.origins.fan_out import MAX_TAIL_BYTES, MAX_TAIL_FRAMES
from tailrace.edge.origins.relay import LOST_LINK_TIMEOUT_S, Relay
from tailrace.edge.origins.route import route_of
from tailrace.edge.origins.sink import with_corr_bytes
from tailrace.ledger.errors import Unavailable
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    CLOSING,
    LINK_CODEC,
    LOGGED,
    SCHEMA_HASH,
    Credit,
    Detach,
    FinishReason,
    Frame,
    Hello,
    Notice,
    Opened,
    Pass,
    Renew,
    Resume,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    Token,
    decode,
    encode,
    tag_of,
    with_corr,
)

STREAM = bytes(range(16))
MAC = bytes(32)
PLENTY = 1 << 20


class FakeOrigin:
    """The origin's side of a link: feeds of one log, with the origin's own flow control."""

    def __init__(self, log: list[bytes]) -> None:
        self.log = log
        self.feeds: dict[int, Window] = {}
        self.sent = 0  # logged frames on the link
        self.asked: list[Frame] = []
        self.refuses = False
        self._out: deque[bytes] = deque()

    def connect(self) -> None:
        self.feeds.clear()
        self._out.clear()
        self._out.append(encode(Hello(SCHEMA_HASH, "test")))

    def receive(self, raw: bytes) -> None:
        corr, frame = LINK_CODEC.decode(raw)
        if not isinstance(frame, Credit | Hello):
            self.asked.append(frame)
        if isinstance(frame, Resume | Renew):
            self._begin(corr, frame)
        elif isinstance(frame, Credit) and corr in self.feeds:
            self.feeds[corr].grant(frame.limit, frame.bytes)
        elif isinstance(frame, Detach):
            self.feeds.pop(corr, None)
        self.pump()

    def _begin(self, corr: int, frame: Resume | Renew) -> None:
        assert corr not in self.feeds
        if self.refuses:
            self._out.append(encode(StreamError("bad_token", "no", False, 401), corr))
            return
        window = Window.starting(frame.start, frame.credit, credit_bytes=frame.credit_bytes)
        self._out.append(encode(Pass(MAC), corr))
        self._out.append(encode(Opened(STREAM, len(self.log), "t", "m", 0), corr))
        if self.ended and window.next >= len(self.log):
            self._out.append(encode(Status(STREAM, StreamState.ENDED, len(self.log)), corr))
        else:
            self.feeds[corr] = window

    @property
    def ended(self) -> bool:
        return bool(self.log) and tag_of(self.log[-1]) == StreamEnd.tag

    def pump(self) -> None:
        for corr, window in list(self.feeds.items()):
            while wanted := window.wanted(len(self.log)):
                frames = window.passing(self.log[window.next : window.next + wanted])
                self._out += [with_corr(raw, corr) for raw in frames]
                self.sent += len(frames)
                if tag_of(frames[-1]) == StreamEnd.tag:
                    del self.feeds[corr]
                    break

    def read(self, most: int) -> list[bytes]:
        return [self._out.popleft() for _ in range(min(most, len(self._out)))]


@dataclass(eq=False)
class Client:
    """A reader that checks each frame against the log, and its own credit."""

    log: list[bytes]
    corr: int
    start: int
    limit: int
    limit_bytes: int
    next: int = 0
    got_bytes: int = 0
    opened: bool = False
    closed: bool = False
    last: Frame | None = None
    raw: bytes = b""

    def __post_init__(self) -> None:
        self.next = self.start

    def deliver(self, raw: bytes) -> None:
        assert not self.closed, "a frame after the last one"
        self.raw = raw
        corr, frame = decode(raw)
        assert corr == self.corr
        tag = tag_of(raw)
        if isinstance(frame, Opened):
            assert not self.opened
            self.opened = True
        elif tag in LOGGED:
            assert self.next < self.limit
            assert self.got_bytes < self.limit_bytes
            assert with_corr(self.log[self.next], self.corr) == raw
            self.next += 1
            self.got_bytes += len(raw)
        if tag in CLOSING:
            self.closed, self.last = True, frame

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        for raw in with_corr_bytes(run, corr):
            self.deliver(raw)

    @property
    def has_all(self) -> bool:
        return self.next == len(self.log)


@dataclass
class World:
    """One log, a relay with its origin, and clients."""

    log: list[bytes] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origin = FakeOrigin(self.log)
        self.relay = Relay()
        self.connect()

    def connect(self) -> None:
        self.origin.connect()
        self.relay.connected()
        self.run()

    def run(self) -> None:
        """Carry all frames in both directions."""
        while (sent := self.relay.frames_to_send()) or (came := self.origin.read(1 << 20)):
            for raw in sent:
                self.origin.receive(raw)
            if not sent:
                self.relay.receive(came)

    def writes(self, count: int = 1, size: int = 3) -> None:
        for _ in range(count):
            self.log.append(encode(Token("x" * size, len(self.log))))
            self.origin.pump()
            self.run()

    def ends(self) -> None:
        self.log.append(encode(StreamEnd(len(self.log), FinishReason.LENGTH, len(self.log), 3)))
        self.origin.pump()
        self.run()

    def reads(
        self, corr: int = 0, start: int = 0, credit: int = 1 << 15, credit_bytes: int = PLENTY
    ) -> Client:
        """Return a new client; those of HTTP have corr 0."""
        client = Client(self.log, corr, start, start + credit, credit_bytes)
        after = start - 1 if start else None
        request = Resume(STREAM, after, credit=credit, credit_bytes=credit_bytes)
        self.relay.adopt(route_of(client, corr, request, 0.0))
        self.clients.append(client)
        self.run()
        return client

    def gives(self, client: Client, frames: int, size: int = PLENTY) -> None:
        client.limit = max(client.limit, client.next + frames)
        client.limit_bytes = max(client.limit_bytes, client.got_bytes + size)
        self.relay.credit(client, client.corr, Credit(client.limit, client.limit_bytes))
        self.run()

    def cost(self, frames: int) -> int:
        """Return how many frames cross the link while the stream gets so many."""
        before = self.origin.sent
        self.writes(frames)
        return self.origin.sent - before


@pytest.fixture
def world() -> World:
    return World()


def test_a_frame_crosses_the_link_once_for_all_readers_of_its_stream(world: World) -> None:
    clients = [world.reads(corr) for corr in range(20)]
    world.writes()
    assert world.relay.shared_count == 1
    assert world.relay.shared_reader_count == world.relay.route_count == 20
    assert world.cost(10) == 10
    world.ends()
    assert all(client.has_all and client.closed for client in clients)
    assert world.relay.route_count == world.relay.shared_count == 0
    assert world.origin.feeds == {}


def test_one_reader_has_a_subscription_of_its_own(world: World) -> None:
    world.reads()
    world.writes(10)
    assert world.relay.shared_count == 0
    assert world.origin.asked == [Resume(STREAM, credit=1 << 15, credit_bytes=PLENTY)]


def test_readers_of_http_get_the_same_object(world: World) -> None:
    one, two = world.reads(), world.reads()
    world.writes(2)
    assert one.raw is two.raw


def test_a_late_reader_reads_the_log_by_itself_and_then_joins(world: World) -> None:
    world.reads(1)
    world.writes(2000)
    late = world.reads(2, credit=100)
    world.writes()
    assert world.relay.shared_reader_count == 1
    assert late.next == 100
    for _ in range(25):
        world.gives(late, 100)
    assert late.has_all
    world.writes()
    assert world.relay.shared_reader_count == 2
    assert world.cost(5) == 5


def test_a_reader_that_falls_out_of_the_tail_reads_the_log_and_joins_again(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2)]
    slow = world.reads(3, credit=10)
    world.writes(10 + MAX_TAIL_FRAMES)
    assert world.relay.shared_reader_count == 3
    assert slow.next == 10
    before = len(world.origin.asked)
    world.writes()
    assert world.relay.shared_reader_count == 2
    [left] = world.origin.asked[before:]
    assert isinstance(left, Renew)
    assert (left.after, left.credit, left.mac) == (9, 0, MAC)
    world.gives(slow, 1000)
    assert slow.has_all
    world.writes()
    assert world.relay.shared_reader_count == 3
    world.ends()
    assert all(client.has_all for client in (*clients, slow))


def test_the_tail_is_bounded_in_bytes(world: World) -> None:
    world.reads(1)
    world.reads(2)
    slow = world.reads(3, credit=1)
    size = 1000
    world.writes(1)
    world.writes(MAX_TAIL_BYTES // size - 1, size)
    assert world.relay.shared_reader_count == 3
    world.writes(2, size)
    assert world.relay.shared_reader_count == 2
    world.writes(1, 3 * MAX_TAIL_BYTES)  # a frame that exceeds the limit by itself
    world.gives(slow, 100)
    assert all(client.has_all for client in world.clients)


def test_a_reader_without_credit_delays_no_other_and_gets_the_rest_from_the_tail(
    world: World,
) -> None:
    fast, slow = world.reads(1), world.reads(2, credit=3)
    world.writes(10)
    assert (fast.next, slow.next) == (10, 3)
    before = world.origin.sent
    world.gives(slow, 4)
    world.gives(slow, 100)
    assert slow.has_all
    assert world.origin.sent == before


def test_a_reader_whose_credit_in_bytes_is_used_up_waits(world: World) -> None:
    world.reads(1)
    slow = world.reads(2, credit_bytes=50)
    world.writes(20)
    assert slow.next == -(-50 // len(world.log[0]))
    world.gives(slow, 100, 100)
    assert slow.got_bytes >= 100
    assert world.relay.shared_reader_count == 2


def test_the_origin_gets_the_credit_of_the_fastest_reader(world: World) -> None:
    one, two = world.reads(1, credit=5), world.reads(2, credit=8)
    world.writes(3)
    [window] = world.origin.feeds.values()
    assert window.limit == 8
    world.gives(one, 17)
    assert window.limit == 20
    world.gives(two, 5)
    assert window.limit == 20


def test_other_readers_go_on_when_the_one_leaves_whose_subscription_they_share(
    world: World,
) -> None:
    clients = [world.reads(corr) for corr in range(3)]
    world.writes(2)
    for client in clients[:2]:
        world.relay.detach(client, client.corr)
        client.closed = True
    assert world.cost(3) == 3
    assert clients[2].has_all
    world.relay.forget(clients[2])
    world.run()
    assert world.origin.feeds == {}
    assert world.relay.shared_count == world.relay.route_count == 0


def test_credit_of_a_reader_that_has_left_does_not_count(world: World) -> None:
    """Otherwise the origin would take a stream for read that nobody reads."""
    fast, stalled = world.reads(1), world.reads(2, credit=2)
    world.writes(5)
    assert world.relay.shared_reader_count == 2
    world.relay.detach(fast, 1)
    fast.closed = True
    world.run()
    assert [window.open for window in world.origin.feeds.values()] == [False]
    assert world.cost(5) == 0
    world.gives(stalled, 100)
    assert stalled.has_all


def test_a_source_that_stands_still_is_replaced(world: World) -> None:
    first, second = world.reads(1, credit=20), world.reads(2, credit=10)
    world.writes(20)
    assert world.relay.shared_reader_count == 2
    others = [world.reads(corr) for corr in (3, 4, 5)]
    world.writes(3 * MAX_TAIL_FRAMES)
    assert world.cost(5) == 5
    assert all(client.has_all for client in others)
    for client in (first, second):
        world.gives(client, 10_000)
    world.writes()
    assert world.relay.shared_reader_count == 5


def test_a_slow_reader_of_old_frames_is_not_the_source_for_those_that_read_live(
    world: World,
) -> None:
    live = world.reads(1)
    world.writes(5000)
    old = [world.reads(corr, credit=10) for corr in (2, 3)]
    for _ in range(60):
        for client in old:
            world.gives(client, 10)
        world.writes()
    assert live.has_all
    live_too = world.reads(4, start=len(world.log))
    world.writes(3)
    before = world.origin.sent
    world.writes(10)
    assert world.origin.sent - before <= 10
    assert live.has_all
    assert live_too.has_all


def test_if_the_shared_subscription_is_refused_each_reader_asks_for_itself(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2)]
    world.writes()
    [corr] = world.origin.feeds
    error = encode(StreamError("unavailable", "no", True, 503), corr)
    del world.origin.feeds[corr]
    world.relay.receive([error])
    world.run()
    assert not any(client.closed for client in clients)
    assert [type(frame) for frame in world.origin.asked[-2:]] == [Renew, Renew]
    world.writes(3)
    assert all(client.has_all for client in clients)
    assert world.relay.shared_reader_count == 2


def test_a_reader_that_the_origin_does_not_let_in_gets_no_frame(world: World) -> None:
    world.reads(1)
    world.reads(2)
    world.writes(3)
    world.origin.refuses = True
    stranger = world.reads(3)
    world.writes(3)
    assert isinstance(stranger.last, StreamError)
    assert stranger.next == 0


def test_readers_that_do_not_follow_or_give_no_credit_in_bytes_do_not_share(world: World) -> None:
    for corr, request in enumerate(
        (
            Resume(STREAM, credit=100, credit_bytes=PLENTY),
            Resume(STREAM, credit=100, credit_bytes=PLENTY, follow=False),
            Resume(STREAM, credit=100),
        )
    ):
        client = Client(world.log, corr, 0, 100, PLENTY)
        world.relay.adopt(route_of(client, corr, request, 0.0))
        world.clients.append(client)
    world.run()
    world.writes(3)
    assert world.relay.shared_count == 0
    assert all(client.has_all for client in world.clients)


def test_after_a_lost_link_each_reader_is_renewed_and_joins_again(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2, 3)]
    world.writes(3)
    world.relay.disconnected(0.0)
    assert world.relay.shared_count == 0
    assert world.relay.route_count == 3
    before = len(world.origin.asked)
    world.log.append(encode(Token("while the link was down", len(world.log))))
    world.connect()
    assert [type(frame) for frame in world.origin.asked[before : before + 3]] == [Renew] * 3
    assert world.cost(5) <= 5 + 2
    assert world.relay.shared_reader_count == 3
    assert all(client.has_all for client in clients)


def test_readers_of_a_shared_stream_are_told_when_the_link_stays_down(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2)]
    world.writes()
    world.relay.disconnected(0.0)
    world.relay.expire(LOST_LINK_TIMEOUT_S)
    assert [type(client.last) for client in clients] == [StreamError, StreamError]
    assert world.relay.route_count == 0


def test_readers_of_a_shared_stream_are_told_of_the_edges_end(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2)]
    world.writes()
    world.relay.refuse_all(Unavailable("shutting down"))
    world.run()
    assert [type(client.last) for client in clients] == [StreamError, StreamError]
    assert world.origin.feeds == {}


def test_frames_that_are_no_tokens_are_shared_too(world: World) -> None:
    clients = [world.reads(corr) for corr in (1, 2)]
    world.writes()
    world.log.append(encode(Notice("inexact", "a notice", len(world.log))))
    world.origin.pump()
    world.run()
    assert world.relay.shared_reader_count == 2
    assert all(client.has_all for client in clients)


# ---- simulation ----


class Simulation:
    """Two origins of one ledger, their relays and many readers, all moved by a seed.

    Frames travel in both directions with delays; links are lost with what is under way.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.log: list[bytes] = []
        self.origins = [FakeOrigin(self.log), FakeOrigin(self.log)]
        self.relays = [Relay(), Relay(last_corr=2**32 - 10)]
        self.up = [False, False]
        self.to_origin: list[deque[bytes]] = [deque(), deque()]
        self.clients: list[Client] = []
        self.shared = 0
        for nth in range(2):
            self.connect(nth)

    def connect(self, nth: int) -> None:
        self.up[nth] = True
        self.origins[nth].connect()
        self.relays[nth].connected()

    def lose(self, nth: int) -> None:
        self.up[nth] = False
        self.to_origin[nth].clear()
        relay, other = self.relays[nth], self.relays[1 - nth]
        relay.disconnected(0.0)
        if self.up[1 - nth] and self.random.random() < 0.7:
            for route in relay.waiting():
                relay.release(route)
                other.adopt(route)

    def carry(self, nth: int) -> None:
        relay, origin, waiting = self.relays[nth], self.origins[nth], self.to_origin[nth]
        if not self.up[nth]:
            return
        waiting += relay.frames_to_send()
        for _ in range(self.random.randint(0, len(waiting))):
            origin.receive(waiting.popleft())
        origin.pump()
        relay.receive(origin.read(self.random.choice((1, 3, 40, 1000))))
        self.shared = max(self.shared, relay.shared_reader_count)

    def join(self) -> None:
        start = self.random.choice((0, len(self.log), self.random.randint(0, len(self.log))))
        credit = self.random.choice((0, 1, 20, 128))
        size = self.random.choice((1, 200, 8192))
        client = Client(self.log, self.random.choice((0, len(self.clients) + 1)), start, 0, size)
        client.limit = start + credit
        after = start - 1 if start else None
        request = Resume(STREAM, after, credit=credit, credit_bytes=size)
        relay = self.relays[self.random.random() < 0.2]
        relay.adopt(route_of(client, client.corr, request, 0.0))
        self.clients.append(client)

    def reads(self, client: Client, frames: int, size: int) -> None:
        client.limit = max(client.limit, client.next + frames)
        client.limit_bytes = max(client.limit_bytes, client.got_bytes + size)
        credit = Credit(client.limit, client.limit_bytes)
        assert any(relay.credit(client, client.corr, credit) for relay in self.relays)

    def open_clients(self) -> list[Client]:
        return [client for client in self.clients if not client.closed]

    def step(self) -> None:
        random = self.random
        kind = random.random()
        if kind < 0.15:
            for _ in range(random.choice((1, 1, 1, 2, 5, 5, 60))):
                self.log.append(self.frame())
        elif kind < 0.19 and len(self.clients) < 25:
            self.join()
        elif kind < 0.40:
            for nth, client in enumerate(self.clients):
                # One in four reads slowly, and one in eight hardly ever.
                pace = (1.0, 1.0, 0.9, 0.1, 1.0, 0.8, 1.0, 0.005)[nth % 8]
                if not client.closed and client.opened and random.random() < pace:
                    self.reads(
                        client, random.choice((1, 64, 128)), random.choice((100, 8192, 8192))
                    )
        elif kind < 0.405 and (readers := self.open_clients()):
            leaving = random.choice(readers)
            for relay in self.relays:
                relay.detach(leaving, leaving.corr)
            leaving.closed = True
        elif kind < 0.409:
            nth = random.randrange(2)
            self.lose(nth) if self.up[nth] else self.connect(nth)
        else:
            self.carry(random.randrange(2))
        self.check_demand()

    def frame(self) -> bytes:
        text = "é" * self.random.choice((0, 1, 5, 5, 5, 5, 5, 5, 5, 5, 100, 1500))
        if self.random.random() < 0.05:
            return encode(Notice("inexact", text, len(self.log)))
        return encode(Token(text, len(self.log)))

    def check_demand(self) -> None:
        """No origin has credit for a frame that no reader has given credit for."""
        most = max((client.limit for client in self.clients), default=0)
        for origin in self.origins:
            assert all(window.limit <= most for window in origin.feeds.values())

    def finish(self) -> None:
        self.log.append(encode(StreamEnd(len(self.log), FinishReason.LENGTH, len(self.log), 3)))
        for nth in range(2):
            if not self.up[nth]:
                self.connect(nth)
        for _ in range(4000):
            for nth in range(2):
                self.carry(nth)
            readers = self.open_clients()
            if not (readers or any(self.to_origin)):
                return
            for client in readers:
                if client.opened:
                    self.reads(client, 1 << 14, PLENTY)
        raise AssertionError([(client.next, len(self.log)) for client in self.open_clients()])


@pytest.mark.parametrize("seed", range(40))
def test_each_reader_gets_its_part_of_the_log_once_and_in_order(seed: int) -> None:
    simulation = Simulation(seed)
    for _ in range(1500):
        simulation.step()
    left = [client for client in simulation.clients if client.closed]
    simulation.finish()
    for client in simulation.clients:
        assert client in left or client.has_all
    for relay, origin in zip(simulation.relays, simulation.origins, strict=True):
        assert relay.route_count == relay.shared_count == relay.shared_reader_count == 0
        assert origin.feeds == {}


def test_readers_of_the_simulation_share() -> None:
    simulation = Simulation(1)
    for _ in range(1500):
        simulation.step()
    assert simulation.shared > 5
