"""Sends one stream as one response: the callback that reads a frame from the origin writes it.

There is no task between the origin's link and the client, and no queue except for the few frames
that credit allows. Frames of one read are encoded together and sent in one write. While the client
does not read, nothing is encoded and no credit is renewed, so the origin waits: a stalled client
costs only the frames that were in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tailrace.edge.flush import FlushBatch
from tailrace.edge.generate.encoders import (
    KEEPALIVE_INTERVAL_S,
    LIVE_HEADERS,
    TIP_TIMEOUT_S,
    Encoder,
    stream_headers,
)
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import CORR, WINDOW_BYTES, WINDOW_FRAMES, Reader, credited
from tailrace.edge.origins.sink import with_corr_bytes
from tailrace.edge.response_context import fields_of
from tailrace.edge.server.deadlines import Deadline, Deadlines
from tailrace.edge.server.interfaces import Headers, ResponseWriter
from tailrace.edge.telemetry.request_metrics import RequestMetrics, with_trace
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
    StreamEnd,
    StreamError,
    Token,
    decode,
    tag_of,
    to_error,
)

CREDIT_UPDATE_FRAMES, CREDIT_UPDATE_BYTES = WINDOW_FRAMES // 8, WINDOW_BYTES // 8
"""Number of frames, and of bytes, that are written before the credit window is updated."""
TOKEN = Token.tag


class StreamReader:
    """The `Sink` for the frames of one stream, and the `ResponseSource` that writes them."""

    __slots__ = (
        "_access",
        "_batch",
        "_before_end",
        "_closed",
        "_deadline",
        "_deadlines",
        "_done",
        "_encoder",
        "_expansion_ratio",
        "_fast_path",
        "_first_held",
        "_head_only",
        "_headers",
        "_hold",
        "_is_overdue",
        "_is_resume",
        "_joined",
        "_last_write_s",
        "_link",
        "_metrics",
        "_opened",
        "_passed",
        "_passed_bytes",
        "_queue",
        "_stalled",
        "_started",
        "_tip",
        "_window",
        "_writer",
        "_writes",
    )

    def __init__(
        self,
        link: OriginPool,
        batch: FlushBatch,
        deadlines: Deadlines,
        writer: ResponseWriter,
        encoder: Encoder,
        access: Headers,
        done: Callable[[], None],
        metrics: RequestMetrics,
        *,
        head_only: bool = False,
    ) -> None:
        """Prepare a response, which `ask` or `take_over` begins.

        Args:
            link: The links to origins.
            batch: The batch to which the reader adds itself when frames arrive.
            deadlines: The deadlines of the server.
            writer: Writes the response.
            encoder: Encodes the stream.
            access: Headers of the response, whatever its status.
            done: Called once, when the response has ended or its client has left.
            metrics: Reports the progress of the response.
            head_only: The request was HEAD, so the response ends with its head.
        """
        self._link = link
        self._batch = batch
        self._deadlines = deadlines
        self._writer = writer
        self._encoder = encoder
        self._access = access
        self._done = done
        self._metrics = metrics
        self._head_only = head_only
        self._headers: dict[str, str] = {}
        self._queue: list[bytes] = []
        self._window = Window(0, 0)
        self._is_resume = False  # the client has some of the stream already
        self._opened = False  # the origin has answered
        self._started = False  # the head has been written
        self._closed = False
        self._stalled = False  # frames wait until the client reads more
        self._joined = False  # the first item of the queue holds several frames
        self._fast_path = False  # the head has been written, and no frame is waiting
        self._expansion_ratio = 1  # output bytes per frame byte in the last write
        self._writes = 0  # number of body writes
        self._passed = self._passed_bytes = 0  # frames and bytes written since `_renew`
        self._last_write_s = 0.0
        self._deadline = Deadline(deadlines, self._quiet)
        self._tip = Deadline(deadlines, self._waited_at_tip)
        self._before_end: asyncio.Future[None] | None = None
        # The text that the encoder holds back: when it is due, and the index of its first frame.
        holds = encoder.hold_s is not None
        self._hold = Deadline(deadlines, self._held_long) if holds else None
        self._first_held: int | None = None
        self._is_overdue = False  # held text waits until the client reads more

    @property
    def protocol(self) -> str:
        """The client's protocol, as metrics name it."""
        return self._metrics.protocol

    @property
    def address(self) -> str:
        """The client's address."""
        return self._metrics.address

    @property
    def is_stalled(self) -> bool:
        """True while frames wait because the client has no room."""
        return self._stalled

    @property
    def is_closed(self) -> bool:
        """True once the response has ended, or its client has left."""
        return self._closed

    # ---- the beginning ----

    def ask(self, request: Open | Resume) -> None:
        """Ask an origin for the stream; its answer becomes the head of the response."""
        if self._closed:
            return  # the client has left
        request = with_trace(credited(self._link.unread.applied(request)), self._metrics)
        self._is_resume = isinstance(request, Resume) and request.after is not None
        self._window = Window.starting(
            request.start, request.credit, WINDOW_FRAMES, request.credit_bytes
        )
        self._link.ask(self, CORR, request)

    def take_over(self, reader: Reader, opened: Opened, begin: bytes) -> None:
        """Continue a stream that `reader` has opened; `begin` is written before its frames."""
        if self._closed:
            reader.close()
            return
        self._queue, self._window = reader.hand_over(self)
        self._opened = True
        self._headers = stream_headers(opened, self._encoder.media_type)
        self._begin_body(begin)
        self._renew()
        self._batch.mark_dirty(self)
        self._batch.flush()

    # ---- from the link ----

    def deliver(self, raw: bytes) -> None:
        """Queue a frame, which is written after all frames of the same read are handled."""
        self._queue.append(raw)
        self._batch.dirty[self] = None

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Take several tokens that came in one read."""
        # Only an encoder that sends raw frames shows the correlation id; others need no copy.
        self._queue += with_corr_bytes(run, corr) if self._encoder.shows_corr else run
        self._batch.dirty[self] = None

    def flush(self) -> None:
        """Write the queued frames, as far as the client has room."""
        queue = self._queue
        if self._fast_path and len(queue) == 1 and self._pass_on(queue[0]):
            queue.clear()
            return
        if self._closed or not (queue or self._is_overdue):
            return
        if not self._started:
            self._start()
        if not self._started or self.is_closed or self._awaits_end():
            return
        # Write until writable_bytes() is below 1: only then is drained() called.
        if self._is_overdue and self._writer.writable_bytes() > 0:
            self._is_overdue = False
            if data := self._encoder.release():
                self._write_data(data)
        while self._queue and (room := self._writer.writable_bytes()) > 0:
            if self._write(room):
                self._end()
                return
        if self._queue and not self._stalled:
            self._metrics.stalled()
        self._stalled = bool(self._queue)
        # Join the waiting frames to save memory: a bytes object has 33 bytes of overhead, and most
        # frames are short.
        if self._stalled:
            self._queue, self._joined = [b"".join(self._queue)], True
        if self._hold is None:
            self._fast_path = not self._stalled
        else:
            self._watch_hold(self._hold)
        self._renew()

    def _awaits_end(self) -> bool:
        """Return True while the encoder waits for what it needs to encode the stream's end.

        The frames before the end wait, too. `flush` is called again when the wait is over.
        """
        if not self._queue or tag_of(self._queue[-1]) != StreamEnd.tag:
            return False
        if self._before_end is None:
            work = self._encoder.before_end(self._link)
            if work is None:
                return False
            self._before_end = asyncio.ensure_future(work)
            self._before_end.add_done_callback(self._end_is_ready)
        return not self._before_end.done()

    def _end_is_ready(self, _: asyncio.Future[None]) -> None:
        if not self._closed:
            self._batch.mark_dirty(self)
            self._batch.flush()

    def _pass_on(self, raw: bytes) -> bool:
        """Write one token if nothing else has to be done, which is so for nearly all frames.

        When one read brings tokens for hundreds of readers, the attributes of each are not in the
        CPU's caches, so this method uses as few as possible.
        """
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
        if passed >= CREDIT_UPDATE_FRAMES or self._passed_bytes >= CREDIT_UPDATE_BYTES:
            self._renew()
        return True

    def _renew(self) -> None:
        """Give the origin new credit when half of the window has been written."""
        self._window.passed(self._passed, self._passed_bytes)
        self._passed = self._passed_bytes = 0
        if self._window.renew(WINDOW_BYTES):
            credit = Credit(self._window.limit, self._window.limit_bytes)
            self._link.credit(self, CORR, credit)

    def _write(self, room: int) -> bool:
        """Write frames for about `room` bytes; return True if the stream ends with the last."""
        if self._joined:
            self._queue, self._joined = Splitter().feed(b"".join(self._queue)), False
        frames, most = self._queue, room // self._expansion_ratio
        count, size = len(frames), sum(map(len, frames))
        if size - len(frames[-1]) >= most:  # not all frames fit
            count = size = 0
            for raw in frames:
                if count and size >= most:
                    break
                size += len(raw)
                count += 1
        if count == len(frames):
            self._queue = []
        else:
            frames, self._queue = frames[:count], frames[count:]
        self._passed += count
        self._passed_bytes += size
        if data := self._encoder.frames(frames):
            self._expansion_ratio = -(-len(data) // size)
            self._write_data(data)
        last = tag_of(frames[-1])
        if last == StreamError.tag:
            _, error = decode(frames[-1])
            assert isinstance(error, StreamError)
            self._metrics.failed(error.code)
        return last in CLOSING

    def _write_data(self, data: bytes) -> None:
        """Write encoded frames."""
        self._writer.write(data)
        self._writes += 1
        self._metrics.wrote(self._writes)
        self._last_write_s = self._deadlines.clock_s()

    # ---- text that the encoder holds back ----

    def _watch_hold(self, hold: Deadline) -> None:
        """Set the deadline of the text that the encoder holds back, if its first frame is new."""
        first, hold_s = self._encoder.first_held, self._encoder.hold_s
        if first == self._first_held:
            return
        self._first_held, self._is_overdue = first, False
        if first is None or hold_s is None:
            hold.clear()
        else:
            hold.set(hold_s)

    def _held_long(self) -> None:
        """Have the held text written, at once or when the client has room again."""
        self._is_overdue = True
        self._batch.mark_dirty(self)

    # ---- the head ----

    def _start(self) -> None:
        """Write the head of the response, if the frames so far decide which head it is."""
        if not self._opened:
            self._opened = True
            _, answer = decode(self._queue.pop(0))
            if isinstance(answer, StreamError):
                self._refuse(answer)
                return
            assert isinstance(answer, Opened), answer
            self._is_resume |= answer.first > 0
            self._window.begin_at(answer.first)
            self._metrics.stream = answer.stream.hex()
            self._encoder.opened(answer)
            self._headers = stream_headers(answer, self._encoder.media_type)
            if self._is_resume and not self._queue:
                self._tip.set(TIP_TIMEOUT_S)  # the stream's end may follow at once: wait for it
                return
        if self._has_all and self._encoder.ends_by_204:
            self._begin(204, self._headers)
            self._end()
        else:
            self._begin_body()

    @property
    def _has_all(self) -> bool:
        """True if the origin reports that the client has every frame of the stream it resumes."""
        return self._is_resume and bool(self._queue) and tag_of(self._queue[0]) == Status.tag

    def _waited_at_tip(self) -> None:
        """Begin the body of a resumed stream that still runs, but has no new frame."""
        if not (self._closed or self._started):
            self._begin_body()

    def _begin_body(self, begin: bytes = b"") -> None:
        body = {"Content-Type": self._encoder.media_type, **self._encoder.headers}
        self._begin(200, self._headers | LIVE_HEADERS | body)
        if self._head_only:
            self._close()
            self._link.forget(self)
            self._writer.end()
            return
        if begin := begin + self._encoder.frames([]):
            self._writer.write(begin)
        self._deadline.set(KEEPALIVE_INTERVAL_S)

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._tip.clear()
        self._started = True
        self._metrics.answered(status)
        self._writer.start(status, [*fields_of(headers), *self._access])

    def _refuse(self, answer: StreamError) -> None:
        """Answer with the origin's error, in the format of the API that the client uses."""
        response = self._encoder.refusal(to_error(answer))
        self._metrics.failed(answer.code)
        self._metrics.answered(response.status_code)
        self._writer.start(response.status_code, [*response.raw_headers, *self._access])
        if not self._head_only:
            self._writer.write(bytes(response.body))
        self._end()

    def _end(self) -> None:
        self._close()
        self._writer.end()

    # ---- from the writer ----

    def drained(self) -> None:
        """Continue to write, because the client has room again."""
        self._batch.mark_dirty(self)

    def disconnected(self) -> None:
        """Detach from the stream, which runs on without this reader."""
        self._close()
        self._link.forget(self)

    # ---- time ----

    def _quiet(self) -> None:
        """Send a keepalive, if the stream has been quiet for long enough."""
        silent_s = self._deadlines.clock_s() - self._last_write_s
        if silent_s < KEEPALIVE_INTERVAL_S:
            self._deadline.set(KEEPALIVE_INTERVAL_S - silent_s)
            return
        if self._writer.writable_bytes() > 0:
            self._writer.write(self._encoder.keepalive())
        self._deadline.set(KEEPALIVE_INTERVAL_S)

    def _close(self) -> None:
        self._deadline.end()
        self._tip.end()
        if self._hold is not None:
            self._hold.end()
        if self._before_end is not None:
            self._before_end.cancel()
        self._queue = []
        if not self._closed:
            self._closed, self._fast_path = True, False
            self._metrics.writes = self._writes
            self._done()
