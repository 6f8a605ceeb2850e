"""The two ends of an HTTP/2 connection, with h2's own client at the far one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event, StreamEnded
from hyperframe.frame import Frame

from tailrace.edge.server.http2_connection import (
    HeadReceived,
    Http2Connection,
    Http2Event,
    Http2Stream,
)

GET = [
    (":method", "GET"),
    (":scheme", "https"),
    (":authority", "edge.example"),
    (":path", "/v1/stream/a?offset=-1"),
]
POST = [(":method", "POST"), *GET[1:]]
PLENTY = 1 << 30


class Pair:
    """A server and a client that talk over nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.mark_dirty = 0
        self.server = Http2Connection(lambda: self.now, self._touch, peer=("192.0.2.1", 4000))
        # The server must find the fault, not the client that sends it.
        config = H2Configuration(
            client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.client = H2Connection(config)
        self.client.initiate_connection()
        self.happened: list[Http2Event] = []
        self.events: list[Event] = []
        self.bodies: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.talk()

    def _touch(self) -> None:
        self.mark_dirty += 1

    def talk(self, room: int = PLENTY) -> list[Event]:
        """Return what waits goes over in both directions, and the client's answers too."""
        new: list[Event] = []
        while True:
            there = self.client.data_to_send()
            self.happened += self.server.receive(there) if there else []
            back = self.server.take(room)
            room -= len(back)
            if not (there or back):
                return new
            events = self.client.receive_data(back) if back else []
            new += events
            self._keep(events)

    def _keep(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, DataReceived):
                assert event.stream_id is not None
                self.bodies.setdefault(event.stream_id, bytearray()).extend(event.data or b"")
            elif isinstance(event, StreamEnded):
                self.ended.add(event.stream_id)

    def sends(self, *frames: Frame) -> None:
        """Frames that the client's library would not send."""
        self.happened += self.server.receive(b"".join(frame.serialize() for frame in frames))

    def asks(self, headers: Any = GET, *, ended: bool = True) -> Http2Stream:
        """Return the stream of a new request."""
        stream_id = self.client.get_next_available_stream_id()
        self.client.send_headers(stream_id, headers, end_stream=ended)
        self.talk()
        asked = self.happened[-1]
        assert isinstance(asked, HeadReceived), self.happened
        return asked.stream

    def opens(self, increment: int, *streams: Http2Stream) -> None:
        """Open the client's windows: those of these streams, and the connection's."""
        self.client.increment_flow_control_window(increment)
        for stream in streams:
            self.client.increment_flow_control_window(increment, stream.id)
        self.talk()

    def said(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
