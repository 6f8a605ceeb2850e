"""A body of an object's response that is made while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ledger.objects.gate import OutputGate


class LiveBody:
    """Reads `source` behind the output gate. It ends when read to its end, or with `aclose`.

    `ended` is called once, whichever comes first.
    """

    def __init__(
        self, source: AsyncIterator[bytes], output: OutputGate, ended: Callable[[], None]
    ) -> None:
        self._source = source
        self._output = output
        self._ended: Callable[[], None] | None = ended

    def __aiter__(self) -> LiveBody:
        return self

    async def __anext__(self) -> bytes:
        if self._ended is None:
            raise StopAsyncIteration
        more = False
        try:
            self._output.check()
            chunk = await anext(self._source)
            # It may tell of changes that are on their way to storage.
            await self._output.wait()
            more = True
            return chunk
        finally:
            if not more:
                await self.aclose()

    async def aclose(self) -> None:
        """Close the source. Not while a chunk is being waited for: cancel that first."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        try:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
        finally:
            ended()
