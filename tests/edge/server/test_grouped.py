"""Grouped text in a response: when it is due, and its credit, keepalives and back-pressure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import zstandard

from tailrace.edge.compressed_encoder import CompressedEncoder
from tailrace.edge.flush import FlushBatch
from tailrace.edge.generate.encoders import KEEPALIVE_INTERVAL_S, Encoder, SseEncoder
from tailrace.edge.generate.group_encoder import grouped
from tailrace.edge.generate.grouping import Grouping
from tailrace.edge.generate.json_lines import PING, JsonLinesEncoder
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import WINDOW_FRAMES
from tailrace.edge.server.deadlines import Deadlines
from tailrace.edge.server.interfaces import Headers
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.sse import event
from tailrace.edge.telemetry.request_metrics import RequestMetrics
from tailrace.edge.unread import UnreadDefault
from tailrace.ledger.frame import (
    Credit,
    FinishReason,
    Frame,
    Open,
    Opened,
    StreamEnd,
    Token,
    encode,
)
from tailrace.ledger.text_units import Unit
from tests.edge.scripted_origin import STREAM
from tests.edge.server.manual_clock import ManualClock

HOLD_MS = 200
HOLD_S = HOLD_MS / 1000
SENTENCE = Grouping(Unit.SENTENCE, HOLD_MS)


class Body:
    """A writer that keeps the body, with room for as much as the test says."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.room = 1 << 16
        self.writes = 0
        self.ended = False

    def start(self, status: int, headers: Headers) -> None:
        assert status == 200

    def write(self, data: bytes) -> None:
        assert data
        self.data += data
        self.writes += 1

    def end(self) -> None:
        self.ended = True

    def reset(self) -> None: ...

    def writable_bytes(self) -> int:
        return self.room


class NoOrigin:
    """The part of a link that a stream reader uses: it keeps the credit that it gets."""

    unread = UnreadDefault()

    def __init__(self) -> None:
        self.limit = WINDOW_FRAMES

    def ask(self, sink: object, corr: int, request: Frame) -> None: ...

    def forget(self, sink: object) -> None: ...

    def credit(self, sink: object, corr: int, credit: Credit) -> None:
        self.limit = max(self.limit, credit.limit)


class Response:
    """A response whose frames, time and room the test decides."""

    def __init__(self, encoder: Encoder) -> None:
        self.clock, self.body, self.link = ManualClock(), Body(), NoOrigin()
        self._batch = FlushBatch()
        self.reader = StreamReader(
            cast(OriginPool, self.link),
            self._batch,
            Deadlines(self.clock, self._batch.flush),
            self.body,
            encoder,
            (),
            lambda: None,
            RequestMetrics(None, "h1", "POST", "/v1/generate", ()),
        )
        self.reader.ask(Open(model="demo", prompt="Once"))
        self._next = 0
        self.come(Opened(STREAM, 0, "", "demo", 1))

    def come(self, *frames: Frame) -> None:
        """Let frames come from the origin in one read."""
        for frame in frames:
            self.reader.deliver(encode(frame))
        self._batch.flush()

    def say(self, *texts: str) -> None:
        """Let Tokens come, each in a read of its own."""
        for text in texts:
            self.come(Token(text, self._next))
            self._next += 1

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.clock.fire()

    def make_room(self, room: int) -> None:
        """Change the writer's room; if there is some, the reader hears of it."""
        self.body.room = room
        if room > 0:
            self.reader.drained()
            self._batch.flush()

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """The text of each piece in the body, with its index."""
        lines = [json.loads(line) for line in bytes(self.body.data).splitlines()]
        return [(line["text"], line["index"]) for line in lines if line["type"] == "token"]


def lines_encoder(grouping: Grouping | None = SENTENCE) -> Encoder:
    return grouped(JsonLinesEncoder("application/jsonl"), grouping)


@pytest.fixture
def response() -> Iterator[Response]:
    with open_response(lines_encoder()) as made:
        yield made


@contextmanager
def open_response(encoder: Encoder) -> Iterator[Response]:
    made = Response(encoder)
    yield made
    made.reader.disconnected()


def test_a_unit_is_sent_when_it_is_complete_without_any_wait(response: Response) -> None:
    response.say("Hi", ".")
    assert response.pieces == []
    response.say(" So")
    assert response.pieces == [("Hi.", 1)]


def test_text_is_sent_when_its_first_frame_has_waited(response: Response) -> None:
    response.say("Hi")
    response.wait(HOLD_S / 2)
    response.say(" you")
    response.wait(HOLD_S / 2)
    assert response.pieces == [("Hi you", 1)]
    response.say(" and")
    response.wait(HOLD_S * 0.9)
    assert len(response.pieces) == 1
    response.wait(HOLD_S * 0.1)
    assert response.pieces[1:] == [(" and", 2)]


def test_the_time_begins_again_with_the_first_frame_of_the_next_piece(response: Response) -> None:
    response.say("Hi", ".")
    response.wait(HOLD_S * 0.9)
    response.say(" So")
    response.wait(HOLD_S * 0.9)
    assert response.pieces == [("Hi.", 1)]
    response.wait(HOLD_S * 0.1)
    assert response.pieces == [("Hi.", 1), (" So", 2)]


def test_the_end_of_the_stream_sends_what_is_held(response: Response) -> None:
    response.say("Hi", " you")
    response.come(StreamEnd(2, FinishReason.STOP, 2, 3))
    assert response.pieces == [("Hi you", 1)]
    assert response.body.ended
    response.wait(HOLD_S)
    assert response.body.data.splitlines()[-1].startswith(b'{"type":"end"')


def test_held_frames_count_as_read_so_a_long_piece_gets_credit(response: Response) -> None:
    for index in range(4 * WINDOW_FRAMES):
        assert index < response.link.limit
        response.say(" a")
    assert response.pieces == []
    response.wait(HOLD_S)
    assert response.pieces == [(" a" * 4 * WINDOW_FRAMES, 4 * WINDOW_FRAMES - 1)]


def test_a_client_that_gets_no_text_gets_keepalives() -> None:
    """Its frames come all the time, but nothing of them has been sent."""
    with open_response(lines_encoder(Grouping(Unit.PARAGRAPH))) as response:
        for _ in range(int(3 * KEEPALIVE_INTERVAL_S)):
            response.say(" a")
            response.wait(1)
        assert bytes(response.body.data) == 3 * PING
        response.say("\n\n", "b")
        response.wait(KEEPALIVE_INTERVAL_S - 1)
        assert bytes(response.body.data).count(PING) == 3
        assert len(response.pieces) == 1


def test_text_that_is_due_waits_for_a_client_that_does_not_read(response: Response) -> None:
    response.say("Hi")
    response.make_room(0)
    response.wait(HOLD_S)
    response.say(" you")
    assert response.pieces == []
    response.make_room(1 << 16)
    assert response.pieces == [("Hi", 0)]
    response.wait(HOLD_S)
    assert response.pieces == [("Hi", 0), (" you", 1)]


def test_text_that_is_due_is_sent_once_there_is_room_though_no_frame_comes(
    response: Response,
) -> None:
    response.say("Hi")
    response.make_room(0)
    response.wait(HOLD_S)
    response.make_room(1 << 16)
    assert response.pieces == [("Hi", 0)]
    response.make_room(1 << 16)
    assert response.body.writes == 1


def test_a_client_that_has_left_gets_nothing(response: Response) -> None:
    response.say("Hi")
    response.reader.disconnected()
    response.wait(HOLD_S)
    assert response.body.data == b""


def test_compressed_pieces_are_due_at_the_same_time() -> None:
    with open_response(CompressedEncoder(lines_encoder(), always=True)) as response:
        response.say("Hi", " you")
        assert response.body.data == b""
        response.wait(HOLD_S)
        reader = zstandard.ZstdDecompressor().decompressobj()
        assert json.loads(reader.decompress(bytes(response.body.data)))["text"] == "Hi you"


def test_readers_of_one_stream_get_their_own_pieces() -> None:
    """Frames are the same bytes objects for all readers, whose events are encoded once."""
    encoders = [SseEncoder(), grouped(SseEncoder(), SENTENCE), SseEncoder()]
    bodies = [b"" for _ in encoders]
    for encoder in encoders:
        encoder.frames([])
    frames = [Token(text, index) for index, text in enumerate(["Hi", ".", " So", " it", "! ", "x"])]
    for frame in frames:
        raw = encode(frame)
        bodies = [
            body + encoder.frames([raw]) for body, encoder in zip(bodies, encoders, strict=True)
        ]
    assert bodies[0] == bodies[2] == b"".join(map(event, frames))
    assert bodies[1] == b"".join(map(event, [Token("Hi.", 1), Token(" So it! ", 4)]))
