"""The log of a stage that is not deterministic: its outputs are durable before they are used.

A worker that continues a stream takes the outputs of earlier items from the log. So the frames that
the client has, and the items that later stages have, stay the same.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable

from tailrace.origin.pipelines.inner_stream import caller_of
from tailrace.origin.pipelines.item_json import items_json, parsed_items
from tailrace.origin.pipelines.stage import AnyStage, Item, Items, Stage, StageOptions
from tailrace.origin.producer import End

MAX_LOG_BYTES = 64 << 20
"""Maximum size of the outputs of one stage of one stream, as JSON, in bytes."""


class LoggedStage(Stage[StageOptions]):
    """Stores the outputs of the stage `inner` in a log, one line for each of its input items."""

    def __init__(self, inner: AnyStage) -> None:
        """Begin; the log of an earlier run is read when the first item comes."""
        super().__init__(inner.options, inner.context)
        self._inner = inner
        self._name = f"{inner.context.stream.hex()}:{inner.context.key}"
        self._caller = caller_of(inner.context.recipe.tenant)
        self._logged: deque[bytes] | None = None  # lines that were written by an earlier run
        self._size = 0
        self._loading = asyncio.Lock()

    @property
    def repeats(self) -> bool:
        """Return True if the log may have the outputs of the next item."""
        return self._logged is None or bool(self._logged)

    async def read_log(self) -> None:
        """Read the log, unless it was read before."""
        origin = self.context.origin
        assert origin is not None
        async with self._loading:
            if self._logged is None:
                log = await origin.read_log(self._name, self._caller)
                self._size = len(log)
                self._logged = deque(log.splitlines())

    def process(self, item: Item) -> Items:
        """Return the items that replace `item`: from the log if it has them, else of `inner`."""
        return self._outputs(item)

    def finish(self, end: End) -> Items:
        """Return the items after the last one: from the log if it has them, else of `inner`."""
        return self._outputs(end)

    def held(self) -> Iterable[Item]:
        """Return the items that the stage `inner` holds back."""
        return self._inner.held()

    def close(self, has_ended: bool) -> None:
        """Close the stage `inner`."""
        self._inner.close(has_ended)

    async def _outputs(self, item: Item) -> AsyncIterator[Item]:
        origin = self.context.origin
        assert origin is not None
        await self.read_log()
        # `inner` processes items even if the log has their outputs, to reach the same state again.
        self._inner.is_repeated = bool(self._logged)
        made = self._inner.finish(item) if isinstance(item, End) else self._inner.process(item)
        items = tuple([one async for one in made] if isinstance(made, AsyncIterable) else made)
        if self._logged:
            items = parsed_items(self._logged.popleft())
        else:
            line = items_json(items)
            await origin.append_log(self._name, self._caller, self._size, line, MAX_LOG_BYTES)
            self._size += len(line)
        for each in items:
            yield each
