"""Reader presence: which streams are read at this origin.

A stream is read while a client with credit for the stream's next frame is connected through this
origin. Clients of other origins that share the ledger do not count. The core
(`origin.core.streams`) decides whether streams without readers continue, pause or end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Mapping
from contextlib import contextmanager

MAX_REACHED = 65_536
"""Maximum number of streams whose former readers' positions are kept; the oldest are dropped."""

Reach = Callable[[int], int]
"""Returns the index before which a reader will have all frames after the next release.

The argument is the index before which the next release makes all frames readable.
"""


class Readers:
    """Counts the readers of each stream, and notes how far they have come.

    `changed` is called with a stream if a reader of it comes or goes, or gets or uses up its
    credit. `replayed` is called when a reader gets frames from storage. Its arguments are the
    number of these frames, and True if the reader got frames from memory before and has fallen
    behind.
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
        self._joined: dict[bytes, dict[Reach, None]] = {}
        self._bodies: Counter[bytes] = Counter()  # number of readers of response bodies
        self._reached: dict[bytes, int] = {}  # furthest position of former readers

    def join(self, stream: bytes, reach: Reach) -> None:
        """Note a reader of a stream; `reach` returns its position until `leave` is called."""
        self._joined.setdefault(stream, {})[reach] = None
        self._changed(stream)

    def leave(self, stream: bytes, reach: Reach, next_index: int) -> None:
        """Note that a reader, which has the frames before `next_index`, has left."""
        readers = self._joined.get(stream, {})
        readers.pop(reach, None)
        if not readers:
            self._joined.pop(stream, None)
        self.keep_reached({stream: next_index})
        self._changed(stream)

    def reach(self, stream: bytes, released: int) -> int:
        """Return the index before which some reader will have all frames after the next release.

        The next release covers the frames before `released`. A reader that began in the middle of
        the stream counts as if it had the frames from the start.
        """
        now = [reach(released) for reach in self._joined.get(stream, ())]
        return max([self._reached.get(stream, 0), *now])

    def take_reached(self) -> dict[bytes, int]:
        """Return the furthest position of readers that left since the last call, by stream."""
        reached, self._reached = self._reached, {}
        return reached

    def keep_reached(self, reached: Mapping[bytes, int]) -> None:
        """Note the positions of readers that have left, for a later `take_reached`."""
        for stream, index in reached.items():
            if furthest := max(self._reached.pop(stream, 0), index):
                self._reached[stream] = furthest
        while len(self._reached) > MAX_REACHED:
            del self._reached[next(iter(self._reached))]

    def forget(self, stream: bytes) -> None:
        """Forget a stream's former readers, because all its tokens are stored as delivered."""
        self._reached.pop(stream, None)

    def begin(self, stream: bytes) -> None:
        """Count one more reader of a stream."""
        self._now[stream] += 1
        self._lately.add(stream)
        self._changed(stream)

    def end(self, stream: bytes) -> None:
        """Count one reader less for a stream."""
        self._now[stream] -= 1
        if not self._now[stream]:
            del self._now[stream]
        self._changed(stream)

    def count(self, stream: bytes) -> int:
        """Return the number of readers that can take the next frame of a stream."""
        return self._now[stream]

    def is_connected(self, stream: bytes) -> bool:
        """Return True if a stream has a reader, with or without credit."""
        return bool(self._joined.get(stream) or self._bodies[stream] or self._now[stream])

    def lately(self) -> set[bytes]:
        """Return the streams that had a reader at any time since the previous call."""
        lately, self._lately = self._lately, set(self._now)
        return lately

    @contextmanager
    def reading(self, stream: bytes) -> Iterator[None]:
        """Count one more reader of a stream during the `with` block."""
        self.begin(stream)
        try:
            yield
        finally:
            self.end(stream)

    async def counted(
        self, stream: bytes, body: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a response body; count its client as a reader while `body` is awaited.

        A stalled client does not count: it has not taken the part that was yielded last, so no
        further part is awaited for it.
        """
        parts = aiter(body)
        self._bodies[stream] += 1
        try:
            while True:
                with self.reading(stream):
                    part = await anext(parts, None)
                if part is None:
                    return
                yield part
        finally:
            self._bodies[stream] -= 1
            if not self._bodies[stream]:
                del self._bodies[stream]
            self._changed(stream)
            close = getattr(parts, "aclose", None)
            if close is not None:
                await close()
