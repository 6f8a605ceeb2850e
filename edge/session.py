"""One client's WebSocket session: many streams, each with a channel number (corr).

Sans-I/O: takes messages of the client and frames of the origin link; gives frames for the link and
messages for the client. The session checks what a client may send, and holds the limits. It knows
nothing of sockets.

An error in one stream ends that stream with a StreamError. An error after which the frames of the
connection have no meaning (no Hello, a bad frame, a corr used twice) ends the connection: with a
StreamError on corr 0, and then a close code of RFC 6455, 7.4.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from math import inf

from tailrace.edge.access.authenticator import ANONYMOUS
from tailrace.edge.access.key_class import with_class
from tailrace.edge.generate.snapshot import SnapshotMerge
from tailrace.edge.json_messages import MalformedFrame, MalformedMessage, parse
from tailrace.edge.starting_point import check_starting_point
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
    Compression,
    Credit,
    Detach,
    Frame,
    Heartbeat,
    Hello,
    Input,
    Open,
    Opened,
    Priority,
    Resume,
    Snapshot,
    Steer,
    StreamError,
    SwitchStages,
    Token,
    corr_of,
    decode,
    encode,
    error_frame,
    hello_schema,
    split,
    tag_and_corr_of,
)
from tailrace.ledger.process.version import software
from tailrace.ledger.wire.compression import packed

MAX_MESSAGE_BYTES = 64 << 10
"""Maximum size of a WebSocket message in either direction, in bytes. A message to the client is
larger if it holds a single frame that is larger."""
MAX_STREAMS_PER_CONNECTION = 256
MAX_CREDIT_FRAMES = 1024
"""Maximum credit that a client may give for one stream, in frames beyond the last one sent."""
WINDOW_BYTES = 8 << 10
MIN_WINDOW_BYTES = 4 << 10
"""Limits of the logged frames that wait in a session for its client, in bytes. All streams of the
client share WINDOW_BYTES equally, but each may use at least MIN_WINDOW_BYTES, and exceed its limit
by one frame. If a client gives more credit, the edge passes only this much on to the origin."""
MAX_MERGING_BYTES = 4 << 20
"""Maximum bytes held for the snapshots of one client. Beyond it, only the oldest snapshot grows."""
MIN_LEFT_BYTES = MIN_WINDOW_BYTES // 2
"""When the unused credit of a stream is below this number of bytes, the edge renews it."""
SMALL_BYTES = 125
"""Maximum size of a message whose length takes one byte (RFC 6455, 5.2)."""
ORIGIN_NOT_READY = "origin_not_ready"
"""The only reason for not being ready that clients without an API key get: they get no details."""
IDLE_POINTS, DETACH_POINTS, REFUSED_POINTS = 1.0, 2.0, 2.0
"""Points that are charged to a client's flood budget. IDLE_POINTS: a frame that changes nothing
(Credit or Detach for a corr that is not open, or a second Credit before a frame was sent).
DETACH_POINTS: a Detach. REFUSED_POINTS: a refused request."""
MAX_WAITING_REPLIES = 64
"""Maximum number of refusals that wait for a client that does not read. While there are more, the
edge reads nothing from this client."""

HELLO = encode(Hello(SCHEMA_HASH, software("edge"), Compression.ZSTD))
"""The Hello frame that the edge sends on every WebSocket."""
STARTING_POINTS = {"after": "Resume.after", "tail": "Resume.tail", "since": "Resume.since_ms"}
"""Names of the fields that say where a reader begins, for errors."""


@lru_cache(maxsize=4)  # all sessions get the same Heartbeat, so it is encoded once
def bare_heartbeat(raw: bytes) -> bytes:
    """Return a Heartbeat that says only whether the edge has an origin that is ready."""
    heartbeat = decode(raw)[1]
    assert isinstance(heartbeat, Heartbeat)
    reasons = () if heartbeat.ready else (ORIGIN_NOT_READY,)
    return encode(Heartbeat(heartbeat.clock_ms, heartbeat.ready, reasons))


class CloseCode(IntEnum):
    """Close codes of RFC 6455, 7.4.1."""

    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    INVALID_DATA = 1007
    POLICY_VIOLATION = 1008
    MESSAGE_TOO_BIG = 1009


@dataclass(frozen=True, slots=True)
class Close:
    """The code and reason with which to close the connection after the waiting messages."""

    code: CloseCode
    reason: str


ClientRequest = Open | Resume | Cancel | Steer | Input | SwitchStages
"""A frame with which a client requests something; the origin answers it."""
ToOrigin = tuple[int, ClientRequest | Credit | Detach]
"""The number of a client's channel (corr), and a frame of the client on it that goes to an
origin."""


@dataclass(slots=True)
class OpenStream:
    """The state of an open stream, which a client addresses by its channel number (corr).

    All bytes are counted from the beginning of the stream on this channel.

    Attributes:
        answered: True if the origin has answered the request.
        is_placed: False until Opened says where a Resume with `tail` or `since_ms` begins.
        next_index: The index of the frame that is sent to the client next.
        waiting: Frames that wait to be sent to the client.
        limit: The first index for which the client has given no credit.
        limit_bytes: The number of bytes up to which the client has given credit.
        sent_bytes: The number of bytes of logged frames that were sent to the client.
        granted_bytes: The number of bytes up to which the edge has given credit to the origin. It
            is at most `limit_bytes`, and bounds the bytes in `waiting`.
        credited_at: The value of `next_index` when the client's last Credit arrived.
        merge: Merges the frames for a snapshot; None without one, and once it has been sent. Until
            then, `sent_bytes` counts the frames that were merged, and `shown_bytes` the bytes that
            were sent to the client.
        merged: Number of frames in `waiting` that come from the merge. They must wait for credit
            of the client. All other frames were sent by the origin with the client's credit, but
            the frames for the merge with credit that the edge itself gave.
        ahead_bytes: The difference between the bytes that the origin has sent and those that the
            client was sent, because a snapshot is shorter than the frames that it replaces.
    """

    answered: bool = False
    is_placed: bool = True
    next_index: int = 0
    waiting: deque[bytes] = field(default_factory=deque)
    limit: int = 0
    limit_bytes: float = inf
    sent_bytes: int = 0
    granted_bytes: int = 0
    credited_at: int = -1
    merge: SnapshotMerge | None = None
    shown_bytes: int = 0
    merged: int = 0
    ahead_bytes: int = 0

    def begin(self, opened: Frame) -> None:
        """Note the first frame of the stream, from which the credit of the request counts."""
        assert isinstance(opened, Opened)
        if not self.is_placed:
            self.limit += opened.first - self.next_index
            self.next_index, self.is_placed = opened.first, True
        if self.merge is not None:
            self.merge.begin(opened)

    @property
    def is_merging(self) -> bool:
        """True while some frames for the snapshot have not arrived from the origin yet."""
        return self.merge is not None and self.merge.is_due

    @property
    def has_credit(self) -> bool:
        """True if the client's credit allows the next frame of a snapshot."""
        return self.next_index < self.limit and self.shown_bytes < self.limit_bytes

    @property
    def may_send(self) -> bool:
        """True if a frame waits that may be sent to the client."""
        return bool(self.waiting) and (not self.merged or self.has_credit)

    @property
    def origin_limit(self) -> int:
        """The first index for which the origin has no credit."""
        if self.merge is not None and self.merge.is_due and self.has_credit:
            return max(self.limit, self.merge.end)
        return self.limit

    def grant(self, window_bytes: int) -> int:
        """Raise the limit of bytes that the origin may send, and return it as `granted_bytes`.

        The new limit is `window_bytes` above what was sent to the client, but not above the
        client's own credit. Only frames that become a snapshot may exceed that credit, because the
        client gets the snapshot instead. The limit never falls, because credit cannot be taken
        back.
        """
        most = inf if self.is_merging and self.has_credit else self.limit_bytes
        wanted = min(most, self.sent_bytes + window_bytes)
        self.granted_bytes = max(self.granted_bytes, int(wanted))
        return self.granted_bytes

    def end_merge(self) -> None:
        """Forget the merge, because the snapshot has been sent.

        From now on the client's limit counts bytes as the origin does: not those of the snapshot,
        but those of the frames that it replaced.
        """
        self.merge, self.ahead_bytes = None, self.sent_bytes - self.shown_bytes
        self.limit_bytes += self.ahead_bytes


def none_detached() -> int:
    """Return 0: the default of `Session.detached`, for a session that detaches no requests."""
    return 0


@dataclass(slots=True, eq=False)
class Session:
    """One WebSocket session. Call `receive` and `deliver`; send the messages of `next_message`.

    Attributes:
        max_streams: Maximum number of open streams plus detached requests without an answer.
        caller: The authenticated client, which is put into every request to an origin.
        priority: The class that the client's key is bound to, if any.
        sees_details: False if the client gets Heartbeats without the names of models and devices.
        speaks_json: True if each message holds one frame as JSON text (see `json_messages`).
        unread: The edge's default for streams without a reader.
        detached: Returns the number of requests from which the client has detached and which no
            origin has answered yet. They count towards `max_streams`.
        failed: Called with the code of each error that the client gets.
        spend: Charges points of the flood budget; returns False if the client has none left.
        close: How to close the connection; None while the session goes on.
    """

    max_streams: int = MAX_STREAMS_PER_CONNECTION
    caller: Caller | None = None
    priority: Priority | None = None
    sees_details: bool = True
    speaks_json: bool = False
    unread: UnreadDefault = field(default_factory=UnreadDefault)
    detached: Callable[[], int] = none_detached
    failed: Callable[[str], None] = lambda _code: None
    spend: Callable[[float], bool] = lambda _points: True
    close: Close | None = None
    _greeted: bool = False
    _packs: bool = False  # the client takes compressed frames and TokenRuns
    _just_detached: int = 0  # requests detached by the current message; not in `detached()` yet
    _streams: dict[int, OpenStream] = field(default_factory=dict)
    # Frames that wait for the client. `_turns` holds the streams that have such frames; credit
    # limits how many frames of a stream may be sent. The streams send some frames each, one after
    # the other, so that no stream delays another. `_replies` holds the frames that need no credit,
    # such as refusals; they are sent first.
    _turns: dict[int, OpenStream] = field(default_factory=dict)
    _replies: deque[bytes] = field(default_factory=lambda: deque([HELLO]))
    _heartbeat: bytes | None = None
    _merging: dict[int, OpenStream] = field(default_factory=dict)  # streams with a `merge`
    _credits: list[ToOrigin] = field(default_factory=list)

    # ---- from the client ----

    def receive(self, message: bytes | str) -> list[ToOrigin]:
        """Take one WebSocket message and return the frames for the origins."""
        forward: list[ToOrigin] = []
        self._just_detached = 0
        if self.close is not None:
            return forward
        if isinstance(message, str) is not self.speaks_json:
            kind = "text messages of JSON" if self.speaks_json else "binary messages"
            wrong = CallerError(
                f"frames travel in {kind}",
                code="bad_frame",
                hint="with the subprotocol tailrace.json they are JSON, otherwise binary",
            )
            self._end(wrong, CloseCode.UNSUPPORTED_DATA)
            return forward
        if len(message) > MAX_MESSAGE_BYTES:
            # The transport stops reading a message that is too long, so the error cannot name its
            # length.
            hint = f"at most {MAX_MESSAGE_BYTES} bytes of frames in a message"
            self._end(TooLarge("a message is too large", hint=hint), CloseCode.MESSAGE_TOO_BIG)
            return forward
        try:
            if isinstance(message, str):
                self._receive_json(message, forward)
            else:
                for raw in split(message, CLIENT, MAX_MESSAGE_BYTES):
                    self._receive_frame(raw, forward)
        except MalformedMessage as error:
            self._end(error, CloseCode.INVALID_DATA)
        except TailraceError as error:
            self._end(error, CloseCode.PROTOCOL_ERROR)
        return forward

    def charge(self, points: float) -> None:
        """Charge unproductive input; end the connection of a client whose flood budget is spent."""
        if not self.spend(points) and self.close is None:
            flood = CallerError(
                "too many frames that change nothing",
                code="too_many_requests",
                status=429,
                retryable=True,
                hint="send a ping every few seconds, and Credit and Detach for open streams only",
            )
            self._end(flood, CloseCode.POLICY_VIOLATION)

    def _receive_frame(self, raw: bytes, forward: list[ToOrigin]) -> None:
        if self.close is not None:
            return
        try:
            corr, frame = decode(raw)
        except FrameError as error:
            corr = corr_of(raw)
            if not self._greeted and (schema := hello_schema(raw)) is not None:
                _check_schema(schema)
            if corr == 0 or not self._greeted:
                raise
            # The frame's header is valid and only its payload is not, so only its stream ends.
            self._abandon(corr, error, forward)
            return
        self._handle(corr, frame, forward)

    def _receive_json(self, message: str, forward: list[ToOrigin]) -> None:
        try:
            corr, frame = parse(message)
        except MalformedFrame as error:
            if error.corr == 0:
                raise
            self._abandon(error.corr, error, forward)
            return
        # JSON names the fields of a frame, so a client that sends JSON needs no Hello.
        self._greeted |= not isinstance(frame, Hello)
        self._handle(corr, frame, forward)

    def _handle(self, corr: int, frame: Frame, forward: list[ToOrigin]) -> None:
        if not self._greeted:
            self._greet(frame)
        elif isinstance(frame, Credit):
            self._credit(corr, frame, forward)
        elif isinstance(frame, Detach):
            self._detach(corr, forward)
        elif isinstance(frame, ClientRequest):
            self._request(corr, frame, forward)
        else:
            name = type(frame).__name__
            raise FrameError(f"clients must not send {name} frames here", field="tag", offset=4)

    def _greet(self, frame: Frame) -> None:
        if not isinstance(frame, Hello):
            raise SchemaMismatch("the first frame must be a Hello")
        _check_schema(frame.schema)
        self._greeted = True
        self._packs = frame.compression is Compression.ZSTD and not self.speaks_json

    def _request(self, corr: int, frame: ClientRequest, forward: list[ToOrigin]) -> None:
        if corr == 0 or corr in self._streams:
            raise CallerError(
                f"corr {corr} is not free",
                code="corr_in_use",
                field="corr",
                hint="use a corr other than 0 that has no open stream",
            )
        if len(self._streams) + self.detached() + self._just_detached >= self.max_streams:
            self._refuse_request(corr, _too_many(self.max_streams))
            return
        if frame.caller is not None:
            self._refuse_request(corr, caller_not_allowed())
            return
        if self.caller == ANONYMOUS and (isinstance(frame, Open) or not frame.token):
            self._refuse_request(corr, no_key(frame))
            return
        try:
            frame = self._allowed(frame)
        except CallerError as error:
            self._refuse_request(corr, error)
            return
        stream = self._streams[corr] = OpenStream()
        if isinstance(frame, Resume):
            stream.next_index = frame.start
            stream.is_placed = frame.tail is None and frame.since_ms is None
            if frame.snapshot:
                stream.merge = SnapshotMerge(corr=corr)
                self._merging[corr] = stream
                frame = replace(frame, snapshot=False)
        asked: ClientRequest = frame
        if isinstance(frame, Open | Resume):
            stream.limit = frame.start + frame.credit
            stream.limit_bytes = inf if frame.credit_bytes is None else frame.credit_bytes
            granted = stream.grant(self._window_bytes)
            asked = replace(self.unread.applied(frame), credit_bytes=granted)
        if self.caller is not None:
            asked = replace(asked, caller=self.caller)
        forward.append((corr, asked))

    def _allowed(self, frame: ClientRequest) -> ClientRequest:
        """Check a request and return it; an Open gets its priority class. Raises CallerError."""
        if isinstance(frame, Open | Resume) and frame.credit > MAX_CREDIT_FRAMES:
            raise _too_much_credit(f"{type(frame).__name__}.credit")
        if isinstance(frame, Resume):
            check_starting_point(frame, **STARTING_POINTS)
        return with_class(frame, self.priority) if isinstance(frame, Open) else frame

    def _credit(self, corr: int, frame: Credit, forward: list[ToOrigin]) -> None:
        stream = self._streams.get(corr)
        if stream is None:  # the stream ended while the Credit was on its way
            self.charge(IDLE_POINTS)
            return
        if not stream.is_placed:  # the client cannot know an index of the stream yet
            self._abandon(corr, _early_credit(), forward)
            return
        if stream.credited_at == stream.next_index:
            self.charge(IDLE_POINTS)
        stream.credited_at = stream.next_index
        if frame.limit > stream.next_index + MAX_CREDIT_FRAMES:
            self._abandon(corr, _too_much_credit("Credit.limit"), forward)
            return
        stream.limit = max(stream.limit, frame.limit)
        if frame.bytes is not None:
            given, is_first = frame.bytes + stream.ahead_bytes, stream.limit_bytes == inf
            stream.limit_bytes = given if is_first else max(stream.limit_bytes, given)
        forward.append((corr, Credit(stream.origin_limit, stream.grant(self._window_bytes))))
        if stream.may_send:
            self._turns[corr] = stream

    @property
    def _window_bytes(self) -> int:
        """Maximum bytes of a stream that may wait for the client: its share of WINDOW_BYTES."""
        return max(MIN_WINDOW_BYTES, WINDOW_BYTES // len(self._streams))

    def _detach(self, corr: int, forward: list[ToOrigin]) -> None:
        stream = self._streams.pop(corr, None)
        self.charge(IDLE_POINTS if stream is None else DETACH_POINTS)
        if stream is None:
            return
        self._just_detached += not stream.answered
        # The client may use the corr again at once, so frames of the old stream are dropped.
        self._turns.pop(corr, None)
        forward.append((corr, Detach()))
        self._leave_merge(corr)

    def _abandon(self, corr: int, error: TailraceError, forward: list[ToOrigin]) -> None:
        """End the stream of a corr with an error, because the client sent an invalid frame."""
        self._detach(corr, forward)
        self._refuse_request(corr, error)

    # ---- from the origin and the edge ----

    def deliver(self, raw: bytes) -> None:
        """Take one frame for the client. A frame on corr 0 concerns the whole connection."""
        tag, corr = tag_and_corr_of(raw)
        if tag == Heartbeat.tag:
            # Only the latest Heartbeat matters: it replaces an earlier one that is still unsent.
            self._heartbeat = raw if self.sees_details else bare_heartbeat(raw)
        elif (stream := self._streams.get(corr)) is not None:
            stream.answered = True
            if tag == Opened.tag:
                stream.begin(decode(raw)[1])
            elif tag == StreamError.tag:
                error = decode(raw)[1]
                assert isinstance(error, StreamError)
                self.failed(error.code)
            if stream.is_merging and tag != Opened.tag:
                self._merge(corr, stream, raw)
            else:
                stream.waiting.append(raw)
            if tag == Opened.tag and stream.merge is not None:
                self._begin_merge(corr, stream)
            if stream.may_send:
                self._turns[corr] = stream
        elif corr == 0 and tag == StreamError.tag and self.close is None:
            self._replies.append(raw)
            self.close = Close(CloseCode.GOING_AWAY, "this edge is shutting down")

    # ---- to the client ----

    def pass_on(self, raw: bytes, room: int) -> bytes | None:
        """Return a frame to send at once: a fast path past `deliver` and `next_message`.

        Nearly all frames take this path: a small Token, if no frame waits and no credit is due.
        Return None if the caller must give the frame to `deliver` instead, for example because
        `room`, the space for unsent data in bytes, is too small.
        """
        tag, corr = tag_and_corr_of(raw)
        size = len(raw)
        if tag != Token.tag or size > SMALL_BYTES or size > room:
            return None
        if self._turns or self._replies or self._heartbeat is not None or self.close is not None:
            return None
        stream = self._streams.get(corr)
        if stream is None or stream.granted_bytes - stream.sent_bytes - size < MIN_LEFT_BYTES:
            return None
        if stream.merge is not None:
            return None
        stream.next_index += 1
        stream.sent_bytes += size
        return raw

    @property
    def has_frames(self) -> bool:
        """Return True if frames of streams wait for the client."""
        return bool(self._turns)

    @property
    def congested(self) -> bool:
        """Return True if so many refusals wait that nothing more must be read from the client."""
        return len(self._replies) > MAX_WAITING_REPLIES

    def next_message(self, most_bytes: int = MAX_MESSAGE_BYTES) -> bytes | None:
        """Return the next message, or None if no frame waits.

        A message has at most `most_bytes`, or is a single frame that is larger. Send each message
        before the next call: its frames already count as sent, and corrs of ended streams as free.
        """
        if not (self._turns or self._replies or self._heartbeat):
            return None
        frames: list[bytes] = []
        replies, turns, left = self._replies, self._turns, most_bytes
        # A frame that is larger than `most_bytes` is sent alone.
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
            tag = raw[TAG_OFFSET]
            if tag in CLOSING:
                del self._streams[corr]
                self._leave_merge(corr)
            elif stream.merged and (tag in LOGGED or tag == Snapshot.tag):
                self._sent_merged(corr, stream, raw)
            elif tag in LOGGED:
                stream.next_index += 1
                stream.sent_bytes += size
                if stream.granted_bytes - stream.sent_bytes < MIN_LEFT_BYTES:
                    self._renew(corr, stream)
            if stream.may_send:
                turns[corr] = stream  # the stream moves behind the others
        beat = self._heartbeat
        if beat is not None and self._greeted and (len(beat) <= left or not frames):
            frames.append(beat)
            self._heartbeat = None
        if self._packs:
            # Limits and credit count the bytes of frames before packing.
            return packed(frames) or None
        return b"".join(frames) or None

    def _renew(self, corr: int, stream: OpenStream) -> None:
        """Give the origin more credit, unless all that the client has given is used up."""
        before = stream.granted_bytes
        if stream.grant(self._window_bytes) > before:
            self._credits.append((corr, Credit(stream.origin_limit, stream.granted_bytes)))

    def credits(self) -> list[ToOrigin]:
        """Return the Credit frames for the origins that are due after the last calls."""
        credits, self._credits = self._credits, []
        return credits

    def time_out(self) -> None:
        """End the connection if the client has not sent Hello yet. Called after the timeout."""
        if not self._greeted and self.close is None and not self.speaks_json:
            silent = CallerError(
                "no Hello frame was received in time", code="request_timeout", status=408
            )
            self._end(silent, CloseCode.PROTOCOL_ERROR)

    # ---- snapshots ----

    def _merge(self, corr: int, stream: OpenStream, raw: bytes) -> None:
        """Take a frame of a stream whose client asked for a snapshot."""
        assert stream.merge is not None
        stream.sent_bytes += len(raw)
        for ready in stream.merge.add([raw]):
            stream.waiting.append(ready)
            stream.merged += ready[TAG_OFFSET] not in CLOSING
        if stream.granted_bytes - stream.sent_bytes < MIN_LEFT_BYTES:
            self._grow_merge(corr, stream)

    def _sent_merged(self, corr: int, stream: OpenStream, raw: bytes) -> None:
        """Count a frame from the merge that was sent to the client."""
        stream.merged -= 1
        stream.shown_bytes += len(raw)
        frame = decode(raw)[1] if raw[TAG_OFFSET] == Snapshot.tag else None
        stream.next_index = 1 + (frame.index if isinstance(frame, Snapshot) else stream.next_index)
        if stream.is_merging:
            self._grow_merge(corr, stream)
        elif not stream.merged:
            stream.end_merge()
            self._leave_merge(corr)
            self._renew(corr, stream)

    def _begin_merge(self, corr: int, stream: OpenStream) -> None:
        """Give the origin credit for all frames that exist, if the client has given credit."""
        if not stream.is_merging:  # the client already has every frame that exists
            stream.end_merge()
            self._leave_merge(corr)
        elif stream.has_credit:
            granted = stream.grant(self._window_bytes)
            self._credits.append((corr, Credit(stream.origin_limit, granted)))

    def _grow_merge(self, corr: int, stream: OpenStream) -> None:
        """Give the origin credit for more bytes to merge, unless merged frames wait for the client.

        If many bytes are held for snapshots of this client, only the oldest snapshot grows.
        """
        is_oldest = stream is next(iter(self._merging.values()))
        if not stream.merged and (is_oldest or self._merging_bytes < MAX_MERGING_BYTES):
            self._renew(corr, stream)

    @property
    def _merging_bytes(self) -> int:
        """The bytes of frames that are held for snapshots of this client."""
        streams = self._merging.values()
        held = sum(each.merge.held_bytes for each in streams if each.merge is not None)
        return held + sum(sum(map(len, each.waiting)) for each in streams)

    def _leave_merge(self, corr: int) -> None:
        """Forget a snapshot that was sent or is no longer wanted, and let other snapshots grow."""
        if self._merging.pop(corr, None) is not None:
            for other, stream in [*self._merging.items()]:
                if stream.is_merging and stream.granted_bytes - stream.sent_bytes < MIN_LEFT_BYTES:
                    self._grow_merge(other, stream)

    # ---- errors ----

    def _refuse_request(self, corr: int, error: TailraceError) -> None:
        """Refuse a request and charge its flood points."""
        self._refuse(corr, error)
        self.charge(REFUSED_POINTS)

    def _refuse(self, corr: int, error: TailraceError) -> None:
        self.failed(error.code)
        self._replies.append(encode(error_frame(error), corr))

    def _end(self, error: TailraceError, code: CloseCode) -> None:
        """End the connection with an error on corr 0."""
        self._turns.clear()
        self._refuse(0, error)
        self.close = Close(code, error.code)


def _check_schema(schema: bytes) -> None:
    if schema != SCHEMA_HASH:
        raise SchemaMismatch(
            f"schema {schema.hex()} is not supported by this edge",
            field="Hello.schema",
            hint=f"this edge speaks {SCHEMA_HASH.hex()}",
        )


def _too_many(limit: int) -> CallerError:
    return CallerError(
        f"over {limit} open streams on this connection",
        code="too_many_streams",
        status=429,
        retryable=True,
        hint="detach or finish one first, or open another connection",
    )


def no_key(request: Frame) -> Unauthorized:
    """Return the error of a request that has neither an API key nor a resume token."""
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


def caller_not_allowed() -> CallerError:
    """Return the error of a request with a `caller`, which only an edge may set."""
    message = "`caller` is set by the edge and must not be sent by clients"
    return CallerError(message, field="caller", hint="leave it out")


def _early_credit() -> CallerError:
    return CallerError(
        "Credit came before Opened, which says at which index the stream begins",
        field="Credit.limit",
        hint="send the first credit in Resume.credit, and Credit after Opened",
    )


def _too_much_credit(field: str) -> CallerError:
    return CallerError(
        "more credit than may be in flight",
        code="too_much_credit",
        field=field,
        hint=f"at most {MAX_CREDIT_FRAMES} frames beyond the last one received",
    )
