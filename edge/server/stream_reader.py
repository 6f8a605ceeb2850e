"""One response's end of a stream, past ASGI: a frame of the link leaves in the turn that read it.

There is no task and no queue but the one that credit keeps short: frames that have come in one
read are encoded together and leave as one write. While the client has no room nothing is taken,
so no credit goes back, and the origin waits; what it has sent by then is all that a client costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tailrace.edge.generate.encoders import (
    LIVE_HEADERS,
    SILENCE_S,
    TIP_PATIENCE_S,
    Encoder,
    FrameEncoder,
    stream_headers,
)
from tailrace.edge.origins.link import CORR, WINDOW_BYTES, WINDOW_FRAMES, Link
from tailrace.edge.origins.relay import TOKEN, under
from tailrace.edge.server.deadlines import Deadline, Deadlines
from tailrace.edge.server.flush import FlushBatch
from tailrace.edge.server.interfaces import Headers, ResponseWriter
from tailrace.edge.telemetry.request_metrics import RequestMetrics
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    CLOSING,
    TAG_OFFSET,
    Credit,
    Open,
    Opened,
    Resume,
    Splitter,
    Status,
    StreamError,
    decode,
    encode,
    tag_of,
    to_error,
)

TELL_FRAMES, TELL_BYTES = WINDOW_FRAMES // 8, WINDOW_BYTES // 8
"""What passes before the window is told."""


class StreamReader:
    """A `Sink` of the link, and the `ResponseSource` of its writer."""

    __slots__ = (
        *(
            "_access",
            "_deadline",
            "_deadlines",
            "_done",
            "_encoder",
            "_metrics",
            "_flows",
            "_headers",
        ),
        *("_link", "_writer", "_over", "_passed", "_passed_bytes", "_patience"),
        *(
            "_queue",
            "_last_write_s",
            "_stalled",
            "_started",
            "_swell",
            "_batch",
            "_wanted",
            "_window",
            "_writes",
        ),
    )

    def __init__(
        self,
        link: Link,
        batch: FlushBatch,
        deadlines: Deadlines,
        writer: ResponseWriter,
        encoder: Encoder,
        wanted: Open | Resume,
        access: Headers,
        done: Callable[[], None],
        metrics: RequestMetrics,
    ) -> None:
        """`access` are headers of the answer, whatever it is; `done` is called at its end."""
        self._metrics = metrics
        self._stalled = False  # frames wait for room
        self._link = link
        self._batch = batch
        self._writer = writer
        self._wanted: Open | Resume | None = wanted
        self._access = access
        self._headers: dict[str, str] = {}
        self._done = done
        self._encoder = encoder
        self._queue: list[bytes] = []
        self._window = Window.starting(
            wanted.start, wanted.credit, WINDOW_FRAMES, wanted.credit_bytes
        )
        self._swell = 1  # how many bytes one of a frame has lately become for the client
        self._writes = 0  # of pieces of the body
        self._passed = self._passed_bytes = 0  # frames of which the window does not know yet
        self._flows = False  # nothing waits, and the response's head has been given
        self._started = False
        self._over = False
        self._patience: asyncio.TimerHandle | None = None  # with a stream that may have ended
        self._deadlines = deadlines
        self._last_write_s = 0.0  # when the body had its last frame
        self._deadline = Deadline(deadlines, self._quiet)

    @property
    def protocol(self) -> str:
        return self._metrics.protocol

    @property
    def address(self) -> str:
        """The client's address."""
        return self._metrics.address

    @property
    def is_stalled(self) -> bool:
        """The client has no room for what has come."""
        return self._stalled

    def ask(self) -> None:
        """Begin."""
        assert self._wanted is not None
        self._link.submit(self, encode(self._wanted, CORR))

    # ---- from the link ----

    def deliver(self, raw: bytes) -> None:
        self._queue.append(raw)
        self._batch.dirty[self] = None

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        # Of all bodies one shows frames as they are: no other needs a copy of each.
        self._queue += under(run, corr) if isinstance(self._encoder, FrameEncoder) else run
        self._batch.dirty[self] = None

    def flush(self) -> None:
        """Write what has come, as far as there is room."""
        queue = self._queue
        if self._flows and len(queue) == 1 and self._pass_on(queue[0]):
            queue.clear()
            return
        if self._over or not queue:
            return
        if not self._started and not self._start():
            return
        # Until there is no room: it is who has been told so that is told when there is some again.
        while self._queue and (room := self._writer.writable_bytes()) > 0:
            if self._write(room):
                self._end()
                return
        self._note_stall()
        if self._queue:  # by itself a frame of a few bytes takes seventy
            self._queue = [b"".join(self._queue)]
        self._flows = not self._queue
        self._last_write_s = self._deadlines.clock_s()
        self._renew()

    def _pass_on(self, raw: bytes) -> bool:
        """The same for nearly all of the traffic: one Token, before which nothing waits. False:
        it is something else. With hundreds of readers in a step what each is made of is no longer
        near the processor, so that little of it is touched here."""
        writer = self._writer
        if raw[TAG_OFFSET] != TOKEN or writer.writable_bytes() < 1:
            return False
        if data := self._encoder.frames(self._queue):
            writer.write(data)
            self._writes = writes = self._writes + 1
            if not writes & (writes - 1):
                self._metrics.wrote(writes)
        self._last_write_s = self._deadlines.clock_s()
        self._passed = passed = self._passed + 1
        self._passed_bytes += len(raw)
        if passed >= TELL_FRAMES or self._passed_bytes >= TELL_BYTES:
            self._renew()
        return True

    def _renew(self) -> None:
        """Say what more may come, when half of a window has passed."""
        self._window.passed(self._passed, self._passed_bytes)
        self._passed = self._passed_bytes = 0
        if self._window.renew(WINDOW_BYTES):
            credit = Credit(self._window.limit, self._window.limit_bytes)
            self._link.submit(self, encode(credit, CORR))

    def _note_stall(self) -> None:
        """Note whether frames wait for room now; the origin waits as long."""
        if self._queue and not self._stalled:
            self._metrics.stalled()
        self._stalled = bool(self._queue)

    def _write(self, room: int) -> bool:
        """Write frames for about `room` bytes; return True if the stream ends with the last one."""
        if self._stalled:
            self._queue = Splitter().feed(b"".join(self._queue))
        queue, most = self._queue, room // self._swell
        taken, size = len(queue), sum(map(len, queue))
        if size - len(queue[-1]) >= most:  # there is no room for all
            taken = size = 0
            for raw in queue:
                if taken and size >= most:
                    break
                size += len(raw)
                taken += 1
        if taken == len(queue):
            self._queue = []
        else:
            queue, self._queue = queue[:taken], queue[taken:]
        self._passed += taken
        self._passed_bytes += size
        data = self._encoder.frames(queue)
        if data:
            self._swell = -(-len(data) // size)
            self._writer.write(data)
            self._writes += 1
            self._metrics.wrote(self._writes)
        last = tag_of(queue[-1])
        if last == StreamError.tag:
            _, error = decode(queue[-1])
            assert isinstance(error, StreamError)
            self._metrics.failed(error.code)
        return last in CLOSING

    def _start(self) -> bool:
        """The head, from what the origin answered; whether the body follows now."""
        wanted = self._wanted
        if wanted is None:  # the answer is here, the body's first frame was awaited
            return self._begin_body(self._queue[0])
        raw = self._queue.pop(0)
        _, answer = decode(raw)
        self._wanted = None
        if isinstance(answer, StreamError):
            self._refuse(answer)
            return False
        assert isinstance(answer, Opened), answer
        self._metrics.stream = answer.stream.hex()
        self._encoder.opened(answer)
        self._headers = stream_headers(answer, self._encoder.media_type)
        if isinstance(wanted, Resume) and wanted.after is not None and not self._queue:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(TIP_PATIENCE_S, self._waited)
            return False
        return self._begin_body(self._queue[0] if self._queue else None, wanted)

    def _waited(self) -> None:
        """A stream that goes on, and says nothing now: the client is not to wait for that."""
        self._patience = None
        if not (self._over or self._started):
            self._begin_body(None)
            self._batch.flush()

    def _begin_body(self, first: bytes | None, wanted: Open | Resume | None = None) -> bool:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._started = True
        resumes = wanted is None or (isinstance(wanted, Resume) and wanted.after is not None)
        has_all = first is not None and resumes and tag_of(first) == Status.tag
        if has_all and self._encoder.ends_by_204:
            self._metrics.answered(204)
            self._writer.start(204, [*fields_of(self._headers), *self._access])
            self._end()
            return False
        self._metrics.answered(200)
        media_type = (b"content-type", self._encoder.media_type.encode())
        live = fields_of(self._headers | LIVE_HEADERS)
        self._writer.start(200, [*live, *self._access, media_type])
        if begin := self._encoder.frames([]):
            self._writer.write(begin)
        self._deadline.set(SILENCE_S)
        return bool(self._queue)

    def _refuse(self, answer: StreamError) -> None:
        response = self._encoder.refusal(to_error(answer))
        self._metrics.failed(answer.code)
        self._metrics.answered(response.status_code)
        self._writer.start(response.status_code, [*response.raw_headers, *self._access])
        self._writer.write(bytes(response.body))
        self._end()

    def _end(self) -> None:
        self._close()
        self._writer.end()

    # ---- from the writer ----

    def drained(self) -> None:
        self._batch.mark_dirty(self)

    def disconnected(self) -> None:
        """The stream runs on without this reader."""
        self._close()
        self._link.forget(self)

    # ---- time ----

    def _quiet(self) -> None:
        silent_s = self._deadlines.clock_s() - self._last_write_s
        if silent_s < SILENCE_S:
            self._deadline.set(SILENCE_S - silent_s)
            return
        if self._writer.writable_bytes() > 0:
            self._writer.write(self._encoder.sign_of_life())
        self._deadline.set(SILENCE_S)

    def _close(self) -> None:
        if not self._over:
            self._over, self._flows = True, False
            self._done()
            self._metrics.writes = self._writes
            self._metrics.ended()
        self._queue = []
        self._deadline.end()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def fields_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
