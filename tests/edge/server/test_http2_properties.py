"""One HTTP/2 connection under whatever order of events, and under bytes that mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, StreamEnded
from h2.settings import SettingCodes
from hyperframe.frame import FRAMES
from hypothesis import given
from hypothesis import strategies as st

from tailrace.edge.server.http2_connection import (
    MAX_CONNECTION_UNSENT_BYTES,
    BodyReceived,
    HeadReceived,
    Http2Connection,
    Http2Stream,
    RequestReset,
)
from tailrace.edge.server.interfaces import UNSENT_BYTES

GET = [(":method", "GET"), (":scheme", "https"), (":authority", "edge"), (":path", "/")]
MAX_PIECE_BYTES = 5_000
PLENTY = 1 << 30

# ---- unsent <= W ----

which = st.integers(0, 7)
steps = st.one_of(
    st.tuples(st.just("ask")),
    st.tuples(st.just("write"), which, st.integers(1, MAX_PIECE_BYTES)),
    st.tuples(st.just("end"), which),
    st.tuples(st.just("break"), which),
    st.tuples(st.just("window"), which, st.integers(1, 40_000)),
    st.tuples(st.just("connection"), st.integers(1, 80_000)),
    st.tuples(st.just("initial"), st.integers(0, 100_000)),
    st.tuples(st.just("reset"), which),
    st.tuples(st.just("take"), st.integers(0, 40_000)),
)


class Trial:
    """A server and a client, and the bytes that were written and have arrived."""

    def __init__(self) -> None:
        self.server = Http2Connection(lambda: 0.0, lambda: None)
        self.client = H2Connection(H2Configuration(client_side=True))
        self.client.initiate_connection()
        self.streams: list[Http2Stream] = []
        self.written: dict[int, bytearray] = {}
        self.arrived: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.broken: set[int] = set()
        self.waiting: set[int] = set()
        """Streams whose writer had no room, and awaits to hear of it."""
        self.pass_on(PLENTY)

    def pass_on(self, room: int) -> None:
        """Both directions once; nothing a client says makes the server raise."""
        for event in self.server.receive(self.client.data_to_send()):
            if isinstance(event, HeadReceived):
                stream = event.stream
                stream.source = Waker(self, stream.id)
                stream.start(200, [])
                self.streams.append(stream)
                self.written[stream.id], self.arrived[stream.id] = bytearray(), bytearray()
        before = sum(stream.unsent_bytes for stream in self.server.streams.values())
        sent = self.server.take(room)
        after = sum(stream.unsent_bytes for stream in self.server.streams.values())
        assert before - after <= room + (16 << 10)
        for arrived in self.client.receive_data(sent):  # raises where a window is overrun
            self._arrives(arrived)
        for source in self.server.drained():
            source.drained()

    def _arrives(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            assert event.stream_id is not None
            self.arrived[event.stream_id] += event.data or b""
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)

    def do(self, step: tuple[Any, ...]) -> None:
        kind, *rest = step
        getattr(self, f"_{kind}")(*rest)

    def _ask(self) -> None:
        if len(self.streams) < 40:
            self.client.send_headers(self.client.get_next_available_stream_id(), GET, True)

    def _pick(self, n: int) -> Http2Stream | None:
        return self.streams[n % len(self.streams)] if self.streams else None

    def _known(self, n: int) -> Http2Stream | None:
        """One that the client holds open."""
        stream = self._pick(n)
        if stream is None or stream.id not in self.client.streams:
            return None
        return None if self.client.streams[stream.id].closed else stream

    def _write(self, n: int, size: int) -> None:
        stream = self._pick(n)
        if stream is None or stream.is_closed:
            return
        if stream.writable_bytes() < 1:
            self.waiting.add(stream.id)
            return
        assert stream.id not in self.waiting  # there is room, and the writer knows
        data = Random(size).randbytes(size)
        stream.write(data)
        self.written[stream.id] += data
        assert stream.unsent_bytes < UNSENT_BYTES + MAX_PIECE_BYTES

    def _end(self, n: int) -> None:
        if (stream := self._pick(n)) is not None:
            stream.end()

    def _break(self, n: int) -> None:
        if (stream := self._pick(n)) is not None and not stream.is_closed:
            stream.reset()
            self.broken.add(stream.id)

    def _window(self, n: int, increment: int) -> None:
        if (stream := self._known(n)) is not None:
            self.client.increment_flow_control_window(increment, stream.id)

    def _connection(self, increment: int) -> None:
        self.client.increment_flow_control_window(increment)

    def _initial(self, size: int) -> None:
        self.client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: size})

    def _reset(self, n: int) -> None:
        if (stream := self._known(n)) is not None:
            self.client.reset_stream(stream.id, ErrorCodes.CANCEL)
            self.broken.add(stream.id)

    def _take(self, room: int) -> None:
        self.pass_on(room)

    def check(self) -> None:
        streams = self.server.streams.values()
        for stream in streams:
            assert stream.unsent_bytes < UNSENT_BYTES + MAX_PIECE_BYTES
        excess = MAX_PIECE_BYTES * len(streams)
        assert sum(s.unsent_bytes for s in streams) < 2 * MAX_CONNECTION_UNSENT_BYTES + excess
        for stream_id, arrived in self.arrived.items():
            assert self.written[stream_id].startswith(arrived)

    def finish(self) -> None:
        """With room for everything, all that was not broken off arrives."""
        self.pass_on(0)
        for stream in self.streams:
            stream.end()
        self.client.increment_flow_control_window(PLENTY)
        for stream_id, stream_of_client in list(self.client.streams.items()):
            if not stream_of_client.closed:
                self.client.increment_flow_control_window(PLENTY, stream_id)
        for _ in range(3):
            self.pass_on(PLENTY)
        whole = {stream.id for stream in self.streams} - self.broken
        assert whole <= self.ended
        for stream_id in whole:
            assert self.arrived[stream_id] == self.written[stream_id]
        assert not self.server.streams


class Waker:
    """A writer that is told there is room: then there is, and it was waiting."""

    def __init__(self, trial: Trial, stream_id: int) -> None:
        self._trial = trial
        self._stream_id = stream_id

    def drained(self) -> None:
        assert self._trial.server.streams[self._stream_id].writable_bytes() >= 1
        self._trial.waiting.discard(self._stream_id)

    def disconnected(self) -> None: ...


@given(st.lists(steps, max_size=120))
def test_what_waits_is_bounded_whatever_the_client_does_and_what_was_written_arrives(
    todo: list[tuple[Any, ...]],
) -> None:
    trial = Trial()
    for step in todo:
        trial.do(step)
        trial.check()
    trial.finish()


# ---- bytes that mean nothing ----

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00" + bytes(4)
BLOCKS = (b"\x82\x87\x84\x41\x01a", b"\x83\x87\x84\x41\x01a", b"", b"\x82", b"\xff" * 9)


def random_frames(random: Random) -> Iterator[bytes]:
    """Frames of every type, known or not, with likely and unlikely flags, streams and payloads."""
    types: list[int] = [kind for kind in FRAMES if kind is not None] + [0x10, 0x7F]
    while True:
        kind = random.choice(types)
        stream_id = random.choice((0, 1, 1, 3, 3, 5, 2, random.getrandbits(31)))
        flags = random.choice((0, 1, 4, 5, 5, 8, 0x20, random.getrandbits(8)))
        payload = random.choice(
            (
                *BLOCKS,
                random.randbytes(4),
                random.randbytes(8),
                random.randbytes(random.randrange(40)),
                (1).to_bytes(4, "big"),
                b"\x00\x04" + random.randbytes(4),
            )
        )
        length = len(payload) if random.random() < 0.98 else random.getrandbits(14)
        yield (
            length.to_bytes(3, "big")
            + bytes((kind, flags))
            + stream_id.to_bytes(4, "big")
            + payload
        )


@pytest.mark.parametrize("seed", range(20))
def test_no_frames_make_the_server_raise_or_keep_what_is_over(seed: int) -> None:
    random = Random(seed)
    frames = random_frames(random)
    for _ in range(100):
        server = Http2Connection(lambda: 0.0, lambda: None)
        server.receive(PREFACE)
        for _ in range(40):
            for event in server.receive(next(frames)):
                answer(event, random)
            server.take(random.choice((0, 100, PLENTY)))
            for source in server.drained():
                source.drained()
        server.lost()
        assert server.closed
        assert not server.streams


def answer(event: HeadReceived | BodyReceived | RequestReset, random: Random) -> None:
    """Somehow; what is done to a stream that has left does nothing."""
    stream = event.stream
    if isinstance(event, HeadReceived):
        stream.start(200, [])
    for _ in range(random.randrange(3)):
        random.choice(
            (
                lambda: stream.write(bytes(100)),
                stream.end,
                stream.reset,
                stream.writable_bytes,
                lambda: stream.consumed(1 << 20),
            )
        )()


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_of_a_good_client_make_nothing_raise(seed: int) -> None:
    random = Random(seed)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    for n in range(6):
        client.send_headers(2 * n + 1, [*GET, ("accept", f"text/{n}")], end_stream=n % 2 == 0)
        if n % 2:
            client.send_data(2 * n + 1, bytes(50), end_stream=True)
    client.ping(b"12345678")
    good = client.data_to_send()
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(random.randrange(1, 6)):
            bad[random.randrange(24, len(bad))] ^= 1 << random.randrange(8)
        server = Http2Connection(lambda: 0.0, lambda: None)
        cut = random.randrange(len(bad))
        for event in (*server.receive(bytes(bad[:cut])), *server.receive(bytes(bad[cut:]))):
            answer(event, random)
        server.take(PLENTY)
