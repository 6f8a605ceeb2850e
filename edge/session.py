"""One WebSocket client: many streams, told apart by corr.

Sans-I/O: messages in; frames for the origin link and messages for the client out. The
session knows what a client may send and holds the bounds; it knows nothing of sockets.

A fault that concerns one stream ends that stream with a StreamError. A fault after which
the frames of the connection mean nothing (no Hello, a bad frame, a corr used twice) ends
the connection: StreamError on corr 0, then a close code of RFC 6455, 7.4.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from math import inf

from tailrace.edge.access.rules import NOBODY
from tailrace.edge.unread import UnreadDefault
from tailrace.ledger.errors import (
    CallerError,
    FrameError,
    SchemaMismatch,
    TailraceError,
    TooLarge,
    Unauthorized,
)
from tailrace.ledger.frame import (
    CLIENT,
    CLOSING,
    LOGGED,
    SCHEMA_HASH,
    TAG_OFFSET,
    Caller,
    Cancel,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Open,
    Resume,
    Steer,
    StreamError,
    Token,
    corr_of,
    decode,
    encode,
    error_frame,
    split,
    tag_and_corr_of,
)
from tailrace.ledger.process.version import software

MAX_MESSAGE_BYTES = 64 << 10
"""Of one WebSocket message, in either direction, unless one frame alone is larger."""
MAX_STREAMS_PER_CONNECTION = 256
MAX_CREDIT_FRAMES = 1024
"""Frames of one stream that a client may ask to have in flight; bounds what waits here."""
WINDOW_BYTES = 8 << 10
LEAST_WINDOW_BYTES = 4 << 10
"""Of logged frames that wait here for a client: WINDOW_BYTES for all of its streams together, but
at least so many for each, and one frame. The client's credit does not bound them by itself."""
LEAST_LEFT_BYTES = LEAST_WINDOW_BYTES // 2
"""Of a stream's credit at the origin, before it is renewed."""
SMALL_BYTES = 125
"""Of a message whose length is one byte (RFC 6455, 5.2)."""
ORIGIN_NOT_READY = "origin_not_ready"
"""The reason that clients without a key get, whatever the origin says."""
IDLE_POINTS, DETACH_POINTS, REFUSED_POINTS = 1.0, 2.0, 2.0
"""Points of the flood budget: of a frame that changes nothing (Credit or Detach for a corr that is
not open, Credit again before a frame has left), of a Detach, of what is refused here."""
MAX_WAITING_REPLIES = 64
"""Refusals that may wait for a client that does not read; then it is not read either."""


@lru_cache(maxsize=4)  # one Heartbeat goes to all sessions
def bare_heartbeat(raw: bytes) -> bytes:
    """Return a Heartbeat that says only if the edge has an origin which is ready."""
    heartbeat = decode(raw)[1]
    assert isinstance(heartbeat, Heartbeat)
    reasons = () if heartbeat.ready else (ORIGIN_NOT_READY,)
    return encode(Heartbeat(heartbeat.clock_ms, heartbeat.ready, reasons))


class CloseCode(IntEnum):
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    POLICY_VIOLATION = 1008
    MESSAGE_TOO_BIG = 1009


@dataclass(frozen=True, slots=True)
class Close:
    """The connection is to be closed once what waits has been sent."""

    code: CloseCode
    reason: str


@dataclass(slots=True)
class OpenStream:
    """What the session knows of an open corr."""

    answered: bool = False
    next_index: int = 0  # of the frame that leaves for the client next
    waiting: deque[bytes] = field(default_factory=deque)  # frames for the client
    limit: int = 0  # the first index that the client has given no credit for
    limit_bytes: float = inf  # and what it bounds their bytes to
    sent_bytes: int = 0
    granted_bytes: int = 0  # of credit at the origin: the client's, but no more than may wait here
    credited_at: int = -1  # `next_index` at the last Credit

    def grant(self, window_bytes: int) -> int:
        """Raise the credit at the origin to so many bytes beyond those that have left."""
        wanted = min(self.limit_bytes, self.sent_bytes + window_bytes)
        self.granted_bytes = max(self.granted_bytes, int(wanted))
        return self.granted_bytes


def none_left() -> int:
    """Return 0: no request has been left."""
    return 0


@dataclass(slots=True, eq=False)
class Session:
    """Feed it `receive` and `deliver`; send what `next_message` gives until `close` is set.

    `caller` is who the client is, and said of all that it asks. A client that does not see details
    gets Heartbeats without the names of models and devices. `failed` is called with the code of
    each error that the client gets.
    `left` gives the number of requests that the client has detached from and that no origin has
    answered yet. They count as open.
    `spend` charges points of the flood budget, and is False where the client owes too many.
    """

    max_streams: int = MAX_STREAMS_PER_CONNECTION
    caller: Caller | None = None
    sees_details: bool = True
    unread: UnreadDefault = field(default_factory=UnreadDefault)
    left: Callable[[], int] = none_left
    failed: Callable[[str], None] = lambda _code: None
    spend: Callable[[float], bool] = lambda _points: True
    close: Close | None = None
    _greeted: bool = False
    _just_left: int = 0  # requests of this message that `left` does not count yet
    _streams: dict[int, OpenStream] = field(default_factory=dict)
    # What waits for the client: frames that credit bounds, of each stream by itself so that none
    # waits behind another, then what credit does not bound. The first stream is next.
    _turns: dict[int, OpenStream] = field(default_factory=dict)
    _replies: deque[bytes] = field(
        default_factory=lambda: deque([encode(Hello(SCHEMA_HASH, software("edge")))])
    )
    _heartbeat: bytes | None = None
    _credits: list[bytes] = field(default_factory=list)

    # ---- from the client ----

    def receive(self, message: bytes | str) -> list[bytes]:
        """One WebSocket message; gives the frames for the origin link."""
        forward: list[bytes] = []
        self._just_left = 0
        if self.close is not None:
            return forward
        if isinstance(message, str):
            text = CallerError("frames travel in binary messages", code="bad_frame")
            self._end(text, CloseCode.UNSUPPORTED_DATA)
            return forward
        if len(message) > MAX_MESSAGE_BYTES:
            # How long it is nobody knows who reads no more of it.
            hint = f"at most {MAX_MESSAGE_BYTES} bytes of frames in a message"
            self._end(TooLarge("a message is too large", hint=hint), CloseCode.MESSAGE_TOO_BIG)
            return forward
        try:
            for raw in split(message, CLIENT, MAX_MESSAGE_BYTES):
                self._receive_frame(raw, forward)
        except TailraceError as error:
            self._end(error, CloseCode.PROTOCOL_ERROR)
        return forward

    def charge(self, points: float) -> None:
        """Charge input that asks for nothing; end the connection of a client that owes too much."""
        if not self.spend(points) and self.close is None:
            flood = CallerError(
                "too many frames that ask for nothing",
                code="too_many_requests",
                status=429,
                retryable=True,
                hint="send a ping every few seconds, and Credit and Detach for open streams only",
            )
            self._end(flood, CloseCode.POLICY_VIOLATION)

    def _receive_frame(self, raw: bytes, forward: list[bytes]) -> None:
        if self.close is not None:
            return
        try:
            corr, frame = decode(raw)
        except FrameError as error:
            corr = corr_of(raw)
            if corr == 0 or not self._greeted:
                raise
            # The framing around a bad payload is sound: only its stream suffers.
            self._abandon(corr, error, forward)
            return
        if not self._greeted:
            self._greet(frame)
        elif isinstance(frame, Credit):
            self._credit(corr, frame, forward)
        elif isinstance(frame, Detach):
            self._detach(corr, forward)
        elif isinstance(frame, Open | Resume | Cancel | Steer):
            self._request(raw, corr, frame, forward)
        else:
            name = type(frame).__name__
            raise FrameError(f"{name} is not for a client to send here", field="tag", offset=4)

    def _greet(self, frame: Frame) -> None:
        if not isinstance(frame, Hello):
            raise SchemaMismatch("the first frame must be a Hello")
        if frame.schema != SCHEMA_HASH:
            raise SchemaMismatch(
                f"schema {frame.schema.hex()} is not spoken here",
                field="Hello.schema",
                hint=f"this edge speaks {SCHEMA_HASH.hex()}",
            )
        self._greeted = True

    def _request(
        self, raw: bytes, corr: int, frame: Open | Resume | Cancel | Steer, forward: list[bytes]
    ) -> None:
        if corr == 0 or corr in self._streams:
            raise CallerError(
                f"corr {corr} is not free",
                code="corr_in_use",
                field="corr",
                hint="a request takes a corr that is not 0 and has no open stream",
            )
        if len(self._streams) + self.left() + self._just_left >= self.max_streams:
            self._refuse_request(corr, _too_many(self.max_streams))
            return
        if frame.caller is not None:
            self._refuse_request(corr, not_a_clients())
            return
        if self.caller == NOBODY and (isinstance(frame, Open) or not frame.token):
            self._refuse(corr, no_key(frame))
            return
        credit = frame.credit if isinstance(frame, Open | Resume) else 0
        if credit > MAX_CREDIT_FRAMES:
            self._refuse_request(corr, _too_much_credit(f"{type(frame).__name__}.credit"))
            return
        stream = self._streams[corr] = OpenStream()
        if isinstance(frame, Resume):
            stream.next_index = frame.start
        asked: Frame = frame
        if isinstance(frame, Open | Resume):
            stream.limit = frame.start + frame.credit
            stream.limit_bytes = inf if frame.credit_bytes is None else frame.credit_bytes
            granted = stream.grant(self._window_bytes)
            asked = replace(self.unread.applied(frame), credit_bytes=granted)
        if self.caller is not None:
            asked = replace(asked, caller=self.caller)
        forward.append(raw if asked is frame else encode(asked, corr))

    def _credit(self, corr: int, frame: Credit, forward: list[bytes]) -> None:
        stream = self._streams.get(corr)
        if stream is None:  # it has closed while the credit was on its way
            self.charge(IDLE_POINTS)
            return
        if stream.credited_at == stream.next_index:
            self.charge(IDLE_POINTS)
        stream.credited_at = stream.next_index
        if frame.limit > stream.next_index + MAX_CREDIT_FRAMES:
            self._abandon(corr, _too_much_credit("Credit.limit"), forward)
            return
        stream.limit = max(stream.limit, frame.limit)
        if frame.bytes is not None:
            is_first = stream.limit_bytes == inf
            stream.limit_bytes = frame.bytes if is_first else max(stream.limit_bytes, frame.bytes)
        forward.append(encode(Credit(stream.limit, stream.grant(self._window_bytes)), corr))

    @property
    def _window_bytes(self) -> int:
        """Of frames of one stream that may wait here: streams share what a connection may hold."""
        return max(LEAST_WINDOW_BYTES, WINDOW_BYTES // len(self._streams))

    def _detach(self, corr: int, forward: list[bytes]) -> None:
        stream = self._streams.pop(corr, None)
        self.charge(IDLE_POINTS if stream is None else DETACH_POINTS)
        if stream is None:
            return
        self._just_left += not stream.answered
        # The client may use the corr again at once: nothing old may follow on it.
        self._turns.pop(corr, None)
        forward.append(encode(Detach(), corr))

    def _abandon(self, corr: int, error: TailraceError, forward: list[bytes]) -> None:
        """End one stream, or refuse one request, for what the client sent on its corr."""
        self._detach(corr, forward)
        self._refuse_request(corr, error)

    # ---- from the origin and the edge ----

    def deliver(self, raw: bytes) -> None:
        """One frame under the client's corr; on corr 0 a Heartbeat, or the edge's farewell."""
        tag, corr = tag_and_corr_of(raw)
        if tag == Heartbeat.tag:
            # It replaces one that is still unsent.
            self._heartbeat = raw if self.sees_details else bare_heartbeat(raw)
        elif (stream := self._streams.get(corr)) is not None:
            stream.answered = True
            if tag == StreamError.tag:
                error = decode(raw)[1]
                assert isinstance(error, StreamError)
                self.failed(error.code)
            stream.waiting.append(raw)
            self._turns[corr] = stream
        elif corr == 0 and tag == StreamError.tag and self.close is None:
            self._replies.append(raw)
            self.close = Close(CloseCode.GOING_AWAY, "this edge is shutting down")

    # ---- to the client ----

    def pass_on(self, raw: bytes, room: int) -> bytes | None:
        """The same as `deliver` and `next_message`, for nearly all of the traffic: a small Token
        that nothing waits before, and that asks for no credit. None: `deliver` is to have it."""
        tag, corr = tag_and_corr_of(raw)
        size = len(raw)
        if tag != Token.tag or size > SMALL_BYTES or size > room:
            return None
        if self._turns or self._replies or self._heartbeat is not None or self.close is not None:
            return None
        stream = self._streams.get(corr)
        if stream is None or stream.granted_bytes - stream.sent_bytes - size < LEAST_LEFT_BYTES:
            return None
        stream.next_index += 1
        stream.sent_bytes += size
        return raw

    @property
    def has_frames(self) -> bool:
        """Frames of streams wait for the client."""
        return bool(self._turns)

    @property
    def congested(self) -> bool:
        """The client leaves its answers unread: read nothing more from it."""
        return len(self._replies) > MAX_WAITING_REPLIES

    def next_message(self, most_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """The frames to send next, as one message of `most_bytes` or one frame; None without any.

        Call it again only when the message has been sent: it frees corrs and counts credit.
        """
        if not (self._turns or self._replies or self._heartbeat):
            return None
        frames: list[bytes] = []
        replies, turns, left = self._replies, self._turns, most_bytes
        # What is larger than a message travels alone.
        while replies and (len(replies[0]) <= left or not frames):
            left -= len(replies[0])
            frames.append(replies.popleft())
        while turns and not replies:
            corr, stream = next(iter(turns.items()))
            raw = stream.waiting[0]
            size = len(raw)
            if size > left and frames:
                break
            left -= size
            frames.append(stream.waiting.popleft())
            del turns[corr]
            if stream.waiting:
                turns[corr] = stream  # behind the others
            tag = raw[TAG_OFFSET]
            if tag in CLOSING:
                del self._streams[corr]
            elif tag in LOGGED:
                stream.next_index += 1
                stream.sent_bytes += size
                if stream.granted_bytes - stream.sent_bytes < LEAST_LEFT_BYTES:
                    self._renew(corr, stream)
        beat = self._heartbeat
        if beat is not None and self._greeted and (len(beat) <= left or not frames):
            frames.append(beat)
            self._heartbeat = None
        return b"".join(frames) or None

    def _renew(self, corr: int, stream: OpenStream) -> None:
        before = stream.granted_bytes
        if stream.grant(self._window_bytes) > before:
            self._credits.append(encode(Credit(stream.limit, stream.granted_bytes), corr))

    def credits(self) -> list[bytes]:
        """Frames for the origin link, for what `next_message` has let go."""
        credits, self._credits = self._credits, []
        return credits

    def time_out(self) -> None:
        """The client has not said Hello in its time."""
        if not self._greeted and self.close is None:
            silent = CallerError("no Hello has come", code="request_timeout", status=408)
            self._end(silent, CloseCode.PROTOCOL_ERROR)

    # ---- errors ----

    def _refuse_request(self, corr: int, error: TailraceError) -> None:
        """Refuse what a client asks on a corr, which cost it nothing to ask."""
        self._refuse(corr, error)
        self.charge(REFUSED_POINTS)

    def _refuse(self, corr: int, error: TailraceError) -> None:
        self.failed(error.code)
        self._replies.append(encode(error_frame(error), corr))

    def _end(self, error: TailraceError, code: CloseCode) -> None:
        self._turns.clear()
        self._refuse(0, error)
        self.close = Close(code, error.code)


def _too_many(limit: int) -> CallerError:
    return CallerError(
        f"over {limit} open streams on this connection",
        code="too_many_streams",
        status=429,
        retryable=True,
        hint="detach or finish one first, or open another connection",
    )


def no_key(request: Frame) -> Unauthorized:
    """Return the refusal of a request that no origin would allow, as nothing speaks for it."""
    if isinstance(request, Open):
        message, hint = "an API key is needed to open a stream", ""
    else:
        message, hint = "an API key or a resume token is needed", "set `token`, or "
    return Unauthorized(
        message,
        code="no_key",
        field="Authorization",
        hint=f"{hint}open the WebSocket with Authorization: Bearer KEY, or with the subprotocols"
        " tailrace and tailrace-key.KEY",
    )


def not_a_clients() -> CallerError:
    return CallerError("who asks is the edge's to say", field="caller", hint="leave it out")


def _too_much_credit(field: str) -> CallerError:
    return CallerError(
        "more credit than may be in flight",
        code="too_much_credit",
        field=field,
        hint=f"at most {MAX_CREDIT_FRAMES} frames beyond the last one received",
    )
