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
    """The number of readers of each stream that has any.

    `changed` is called with a stream whose number of readers changes. `replayed` is called with the
    number of frames that a reader gets from storage, and True if the reader got frames from memory
    until it fell behind.
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
        """Count one reader of a stream fewer."""
        self._now[stream] -= 1
        if not self._now[stream]:
            del self._now[stream]
        self._changed(stream)

    def count(self, stream: bytes) -> int:
        return self._now[stream]

    def lately(self) -> set[bytes]:
        """Return the streams that were read at any time since the last call."""
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
        """Yield the parts of a body; its reader counts only while it waits for the next part."""
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
