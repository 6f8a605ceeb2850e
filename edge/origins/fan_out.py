"""One subscription for many readers: a stream's frames cross the link once, however many read it.

Sans-I/O. Each reader opens the stream with a request of its own, which the origin authorizes. As
soon as two readers of a stream are open, the subscription of the reader that is furthest ahead
becomes the *source* of all. The edge keeps the newest frames of the source in memory, as the
stream's *tail*. A reader joins the source if the tail holds the reader's next frame: the reader's
own subscription is detached, and the reader gets its frames from the tail, as its credit allows. A
reader whose next frame was dropped from the tail leaves the source: the relay requests the stream
again for this reader (a renewal), as after a lost link, and the origin sends older frames from the
ledger until the reader has caught up.

A relay has one `FanOut`, which has a `SharedStream` for each stream with several readers. Shared
streams exist only while the link is up. After a loss, the stream is requested again for each reader
separately, possibly at another origin, and the readers join again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from tailrace.edge.origins.route import Route, credit_on_link
from tailrace.edge.origins.route_table import RouteTable
from tailrace.edge.origins.sink import with_corr_bytes
from tailrace.ledger.frame import (
    CORR_OFFSET,
    PREFIX_BYTES,
    TAG_OFFSET,
    Detach,
    StreamEnd,
    encode,
)

MAX_TAIL_FRAMES = 256
"""Maximum number of frames in the tail of a shared stream: twice the window of a response."""
MAX_TAIL_BYTES = 16 << 10
"""Maximum bytes of frames in the tail of a shared stream: twice the window of a response. A single
frame may exceed it."""


class SharedStream:
    """The readers of one stream on one link; the `Sink` of their common subscription.

    Attributes:
        source: The route of the common subscription, which belongs to no client. None if there is
            no common subscription, or once this subscription has brought the end of the stream.
        members: The readers that have joined, and get their frames from the tail. A member that has
            credit for its next frame has every frame of the tail.
        own: The other readers, each with its own subscription.
        ahead: The readers in `own` that were ahead of the tail when they got their last frame.
        first: The index of the oldest frame in the tail.
        next: The index after the newest frame in the tail.
        ended: True if the newest frame in the tail is the end of the stream.
    """

    __slots__ = (
        "_behind",
        "_fastest",
        "_finished",
        "_stuck_at",
        "_stuck_from",
        "_tail",
        "_tail_bytes",
        "ahead",
        "ended",
        "first",
        "members",
        "next",
        "own",
        "source",
    )

    def __init__(self) -> None:
        """Begin without readers."""
        self.source: Route | None = None
        self.members: dict[Route, None] = {}
        self.own: dict[Route, None] = {}
        self.ahead: dict[Route, None] = {}
        self.first = self.next = 0
        self.ended = False
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._finished: list[Route] = []
        self._behind: list[Route] = []
        self._fastest: Route | None = None  # a member that had credit at the last check
        self._stuck_at = self._stuck_from = -1

    # ---- frames from the link ----

    def deliver(self, raw: bytes) -> None:
        """Take one frame, and give it to the members."""
        self._arrived([raw])

    def deliver_run(self, run: list[bytes], corr: bytes) -> None:
        """Take consecutive Tokens, and give them to the members."""
        self._arrived(with_corr_bytes(run, corr))

    def _arrived(self, frames: list[bytes]) -> None:
        self._tail += frames
        self._tail_bytes += sum(map(len, frames))
        begin, self.next = self.next, self.next + len(frames)
        self.ended = frames[-1][TAG_OFFSET] == StreamEnd.tag
        stalled: list[Route] = []
        for member in self.members:
            if member.next == begin:
                give(member, frames)
            if member.next != self.next:
                stalled.append(member)
        if self.ended:
            self._finished += [member for member in self.members if member.next == self.next]
        self._trim()
        self._behind += [member for member in stalled if member.next < self.first]

    def _trim(self) -> None:
        """Drop the oldest frames of a tail that is over its limits."""
        tail = self._tail
        while len(tail) > MAX_TAIL_FRAMES or (self._tail_bytes > MAX_TAIL_BYTES and len(tail) > 1):
            self._tail_bytes -= len(tail.popleft())
            self.first += 1

    # ---- readers ----

    def begin(self, source: Route) -> None:
        """Begin a tail with the next frame of `source`."""
        self.source = source
        self.first = self.next = source.next
        self._tail.clear()
        self._tail_bytes = 0

    def covers(self, route: Route) -> bool:
        """Return True if a reader can join the common subscription without missing a frame."""
        has_tail = self.source is not None or self.ended
        return has_tail and self.first <= route.next <= self.next and has_credit(route)

    def advance(self, member: Route) -> None:
        """Give a member the frames of the tail that its credit allows."""
        if member.next < self.next:
            give(member, islice(self._tail, member.next - self.first, None))
            if self.ended and member.next == self.next:
                self._finished.append(member)

    def demand(self, member: Route) -> bool:
        """Raise the credit of the source to that of a member; return True if it was raised.

        The source therefore has as much credit as the fastest reader. If one member has credit for
        more frames and another member for more bytes, the source gets both maxima. The tail then
        gets at most one window of frames that no member can take yet.
        """
        source = self.source
        if source is None or member.next != self.next or not has_credit(member):
            return False
        assert member.limit_bytes is not None
        assert source.limit_bytes is not None
        # Convert the member's byte limit into one of the source. Both are at the same frame, but
        # each counts bytes from the frame at which it began.
        limit_bytes = source.passed_bytes + member.limit_bytes - member.passed_bytes
        if member.limit <= source.limit and limit_bytes <= source.limit_bytes:
            return False
        source.limit = max(source.limit, member.limit)
        source.limit_bytes = max(source.limit_bytes, limit_bytes)
        self._fastest = member
        return True

    @property
    def is_unread(self) -> bool:
        """True if no member has credit for the next frame."""
        fastest = self._fastest
        if fastest is None or fastest not in self.members or not has_credit(fastest):
            self._fastest = next(filter(has_credit, self.members), None)
        return self._fastest is None

    def is_passed_by(self, route: Route) -> bool:
        """Return True if the subscription of a reader ahead of the tail should become the source.

        It should if most readers are far ahead of the tail, or if the source has brought no frame
        while this reader got MAX_TAIL_FRAMES frames.
        """
        if len(self.ahead) >= len(self.members) and route.next - self.next > MAX_TAIL_FRAMES:
            return True
        if self._stuck_at != self.next:
            self._stuck_at, self._stuck_from = self.next, route.next
        return route.next - self._stuck_from >= MAX_TAIL_FRAMES

    def take_finished(self) -> list[Route]:
        """Return the members that have got the end of the stream since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_behind(self) -> list[Route]:
        """Return the members whose next frame was dropped from the tail since the last call."""
        behind, self._behind = self._behind, []
        return behind


class FanOut:
    """Decides, for each stream of one link, which of its readers share a subscription.

    Call `settle` after each read of the link that brought frames for routes in `touched`, and
    `credit` when a client has given credit. Both return the readers that have got the end of their
    stream; the caller must remove them.
    """

    def __init__(
        self,
        table: RouteTable,
        send: Callable[[bytes], None],
        ask: Callable[[Route], None],
    ) -> None:
        """Begin without streams.

        Args:
            table: the routes of the link.
            send: sends an encoded frame to the origin.
            ask: requests the stream of a route again, from its next frame on.
        """
        self.touched: dict[Route, None] = {}  # routes with frames for shared streams
        self._table = table
        self._send = send
        self._ask = ask
        # Maps a stream's id to its shared state, or to the route of its reader if it has only one.
        self._by_stream: dict[bytes, Route | SharedStream] = {}

    def opened(self, route: Route) -> None:
        """Note a reader whose request the origin has answered with Opened on this connection.

        A reader shares a subscription only if the origin has sent a Pass for the reader's request.
        The Pass proves the reader's access: when the reader leaves the shared subscription, it is
        the capability with which the stream is requested again.
        """
        stream = route.stream
        may_share = route.follow and route.renewal is not None and route.limit_bytes is not None
        if stream is None or not may_share or route.shared:
            return
        found = self._by_stream.setdefault(stream, route)
        if found is route:
            return
        if isinstance(found, Route):
            first, found = found, SharedStream()
            self._by_stream[stream] = found
            first.shared = True
            found.own[first] = None
        route.shared = True
        found.own[route] = None

    def removed(self, route: Route) -> None:
        """Note that the route table has removed a route, perhaps that of a shared subscription."""
        stream, shared = route.stream, self._shared(route)
        if stream is None:
            return
        if shared is None:
            if self._by_stream.get(stream) is route:
                del self._by_stream[stream]
            return
        if route.is_source:
            # The subscription has brought the stream's end, which is delivered next.
            shared.source = None
            return
        route.shared = route.joined = False
        shared.own.pop(route, None)
        shared.ahead.pop(route, None)
        if route in shared.members:
            del shared.members[route]
            source = shared.source
            # The credit that this reader gave cannot be taken back. If the source stayed and no
            # other member had credit, the origin would believe that somebody still reads.
            if (
                source is not None
                and shared.is_unread
                and (has_credit(source) or not shared.members)
            ):
                self._dissolve(shared)
        if not (shared.own or shared.members):
            self._by_stream.pop(stream, None)

    def refused(self, source: Route) -> None:
        """Dissolve a shared subscription that the origin ended before the end of the stream."""
        if (shared := self._shared(source)) is not None:
            self._dissolve(shared)

    def _shared(self, route: Route) -> SharedStream | None:
        """Return the shared stream that a route belongs to, or None."""
        if route.stream is None or not route.shared:
            return None
        found = self._by_stream.get(route.stream)
        return found if isinstance(found, SharedStream) else None

    def credit(self, route: Route) -> list[Route]:
        """Handle credit of a reader of a shared stream."""
        shared = self._shared(route)
        assert shared is not None
        if route.joined:
            shared.advance(route)
            self._demand(shared, route)
        else:
            self._place(shared, route)
        return shared.take_finished()

    def settle(self) -> list[Route]:
        """Let readers join and leave, after a read of the link."""
        finished: list[Route] = []
        touched, self.touched = self.touched, {}
        for route in touched:
            shared = self._shared(route)
            if shared is None or route.joined:
                continue
            if not route.is_source:
                self._place(shared, route)
            elif route.sink is shared:
                for member in shared.take_behind():
                    if member in shared.members:
                        self._leave(shared, member)
                for reader in [reader for reader in shared.ahead if shared.covers(reader)]:
                    self._join(shared, reader)
            finished += shared.take_finished()
        return finished

    def _place(self, shared: SharedStream, route: Route) -> None:
        """Let a reader join the shared subscription, or share the reader's own subscription."""
        if not has_credit(route):
            return
        if shared.covers(route):
            self._join(shared, route)
        elif shared.ended:
            return
        elif shared.source is None:
            if len(shared.own) > 1:
                self._promote(shared, route)
        elif route.next > shared.next:
            shared.ahead[route] = None
            if shared.is_passed_by(route):
                leader = max(filter(has_credit, shared.ahead), key=lambda one: one.next)
                self._dissolve(shared)
                self._promote(shared, leader)

    def _dissolve(self, shared: SharedStream) -> None:
        """End the common subscription; each member gets a subscription of its own again."""
        self._end_source(shared)
        for route in list(shared.members):
            self._leave(shared, route)

    def clear(self) -> list[Route]:
        """Give each reader a route of its own again, because the link is lost or all routes end.

        The relay requests the streams again later, if it still needs them. Returns the readers that
        have got the end of their stream.
        """
        finished: list[Route] = []
        for shared in self._by_stream.values():
            if isinstance(shared, Route):
                continue
            finished += shared.take_finished()
            self._end_source(shared)
            for route in shared.members:
                self._table.rejoin_link(route)
            for route in (*shared.members, *shared.own):
                route.shared = route.joined = False
        self._by_stream.clear()
        self.touched.clear()
        return finished

    def _end_source(self, shared: SharedStream) -> None:
        if shared.source is not None:
            self._send(encode(Detach(), shared.source.link_corr))
            self._table.remove_source(shared.source)
            shared.source = None

    def _promote(self, shared: SharedStream, leader: Route) -> None:
        """Turn a reader's own subscription into the shared one, and make the reader a member."""
        source = Route(
            sink=shared,
            client_corr=0,
            request=b"",
            deadline=None,
            repeatable=True,
            changes=False,
            next=leader.next,
            limit=leader.limit,
            limit_bytes=leader.limit_bytes,
            credited=True,
            sent=True,
            asked=True,
            passed_bytes=leader.passed_bytes,
            passed_before=leader.passed_before,
            stream=leader.stream,
            renewal=leader.renewal,
            renewed=leader.renewed,
            shared=True,
            is_source=True,
        )
        self._table.promote(leader, source)
        shared.begin(source)
        self._became_member(shared, leader)

    def _join(self, shared: SharedStream, route: Route) -> None:
        """Let a reader get its frames from the tail instead of its own subscription."""
        self._send(encode(Detach(), route.link_corr))
        self._table.leave_link(route)
        self._became_member(shared, route)
        shared.advance(route)
        self._demand(shared, route)

    def _became_member(self, shared: SharedStream, route: Route) -> None:
        route.joined, route.asked = True, False
        del shared.own[route]
        shared.ahead.pop(route, None)
        shared.members[route] = None

    def _leave(self, shared: SharedStream, route: Route) -> None:
        """Give a member a subscription of its own again, from its next frame on."""
        del shared.members[route]
        route.shared = route.joined = False
        self._table.rejoin_link(route)
        self._ask(route)
        if not shared.members and shared.source is not None:
            self._dissolve(shared)
        if not (shared.own or shared.members) and route.stream is not None:
            self._by_stream.pop(route.stream, None)

    def _demand(self, shared: SharedStream, member: Route) -> None:
        if shared.demand(member):
            assert shared.source is not None
            self._send(credit_on_link(shared.source))


def has_credit(route: Route) -> bool:
    """Return True if a reader's credit, in frames and in bytes, allows its next frame.

    The route must have a limit in bytes.
    """
    assert route.limit_bytes is not None
    return route.next < route.limit and route.passed_bytes < route.limit_bytes


def give(member: Route, frames: Iterable[bytes]) -> None:
    """Give a member consecutive frames, beginning with its next one, as its credit allows.

    The frames have corr 0, so members whose clients use corr 0 get the same objects without a copy.
    """
    sink, corr = member.sink, member.corr_bytes
    limit, limit_bytes = member.limit, member.limit_bytes
    assert limit_bytes is not None
    is_zero = member.client_corr == 0
    for raw in frames:
        if member.next >= limit or member.passed_bytes >= limit_bytes:
            return
        member.next += 1
        member.passed_bytes += len(raw)
        sink.deliver(raw if is_zero else raw[:CORR_OFFSET] + corr + raw[PREFIX_BYTES:])
