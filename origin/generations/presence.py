"""Who reads which stream, and what becomes of those that nobody reads; plain rules.

A stream is read while somebody is connected who may be sent its next frame, as far as this origin
can see: a reader without credit does not read, nor does one that is connected to another origin of
a shared ledger. `origin.generations.runs` carries out what the rules say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from contextlib import contextmanager

from tailrace.ledger.frame import Unread
from tailrace.origin.generations.stream import GeneratedStream

UNREAD_GRACE_S = 5.0
"""A stream that was read gives way to others only when nobody has for so long: its reader may
be about to come back over another connection."""
MAX_PAUSED = 4096
"""Of more, those that were paused first are cancelled."""


class Readers:
    """Counts the readers of each stream that has any; `changed` is told of which.

    `replayed` is told of frames that a reader gets from storage, and whether it was at the tip
    before.
    """

    def __init__(
        self,
        changed: Callable[[bytes], None] = lambda _: None,
        replayed: Callable[[int, bool], None] = lambda _frames, _demoted: None,
    ) -> None:
        self._changed = changed
        self.replayed = replayed
        self._now: Counter[bytes] = Counter()
        self._lately: set[bytes] = set()

    def begin(self, stream: bytes) -> None:
        self._now[stream] += 1
        self._lately.add(stream)
        self._changed(stream)

    def end(self, stream: bytes) -> None:
        self._now[stream] -= 1
        if not self._now[stream]:
            del self._now[stream]
        self._changed(stream)

    def count(self, stream: bytes) -> int:
        return self._now[stream]

    def lately(self) -> set[bytes]:
        """The streams that were read at any time since this was asked last."""
        lately, self._lately = self._lately, set(self._now)
        return lately

    @contextmanager
    def reading(self, stream: bytes) -> Iterator[None]:
        self.begin(stream)
        try:
            yield
        finally:
            self.end(stream)

    async def counted(
        self, stream: bytes, body: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """A body made of the stream; its reader reads while the next part is awaited."""
        parts = aiter(body)
        try:
            while True:
                with self.reading(stream):
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part
        finally:
            close = getattr(parts, "aclose", None)
            if close is not None:
                await close()


class Attendance:
    """`paused` says since when each stream is, the first one first; times are in seconds."""

    def __init__(self, paused_s: float) -> None:
        """`paused_s` is how long a paused stream is kept."""
        self.paused: dict[bytes, float] = {}
        self._paused_s = paused_s
        self.looked_for: set[bytes] = set()  # are read here, and are not ours to go on with

    def look(
        self, streams: Iterable[GeneratedStream], lately: set[bytes], now: float
    ) -> list[GeneratedStream]:
        """Note which of the streams were read `lately`; gives those that it makes a change for."""
        changed = []
        for stream in streams:
            was_unread = stream.unread
            if stream.id in lately:
                stream.read_s, stream.unread = now, False
            elif now - stream.read_s >= UNREAD_GRACE_S:
                stream.unread = True
            if stream.unread != was_unread:
                changed.append(stream)
        return changed

    def too_old(self, now: float) -> list[bytes]:
        """Paused streams that are to be cancelled."""
        late = [id_ for id_, since in self.paused.items() if now - since >= self._paused_s]
        return late or [*self.paused][:-MAX_PAUSED]

    def wanted(self, lately: set[bytes], ours: Iterable[bytes]) -> set[bytes]:
        """Streams that are read here and not generated, to be looked for.

        Once for as long as each is read without a pause: two origins would take it from each
        other.
        """
        ours = set(ours)
        self.looked_for = lately & (self.looked_for | ours)
        return lately - ours - self.looked_for


def is_idle(stream: GeneratedStream, now: float, idle_s: float) -> bool:
    """Whether for so long nobody has read it, and nothing has come of it."""
    return now - max(stream.read_s, stream.released_s or 0.0) >= idle_s


def is_left(stream: GeneratedStream, now: float) -> bool:
    """Whether what its request says of unread streams is due."""
    if stream.recipe.unread == Unread.RUN.word or stream.cancelled or stream.steering.orders:
        return False
    return now - stream.read_s >= stream.recipe.unread_after_s
