"""Reader presence: which streams are read at this origin.

A stream is read while a client with credit for the stream's next frame is connected through this
origin. Clients of other origins that share the ledger do not count. The core
(`origin.core.streams`) decides whether streams without readers continue, pause or end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import contextmanager


class Readers:
    """Counts the readers of each stream.

    `changed` is called with a stream whose number of readers changes. `replayed` is called when a
    reader gets frames from storage. Its arguments are their number, and True if the reader got
    frames from memory before and has fallen behind.
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
        return self._now[stream]

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
        """Yield the parts of a response body; its client counts as a reader between two parts.

        While the client does not take a part, it does not count.
        """
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
