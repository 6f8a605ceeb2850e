"""Who reads which stream, as far as this origin can see: readers on its own links.

A stream is read while somebody is connected who may be sent its next frame. A reader without
credit does not read, nor does one that is connected to another origin of a shared ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import contextmanager


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
        """Somebody reads it meanwhile."""
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
