"""Hints to origins with several models: which model may soon get requests, so it can be loaded.

No request waits for a hint, and a hint that cannot be sent is dropped. An origin learns how often
requests follow each kind of hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tailrace.edge.origins.origin import now
from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import whole_answer
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Call
from tailrace.ledger.links.hints import HINT, Hint

EVERY_S = 5.0
"""Minimum interval between two hints of the same kind for the same model, in seconds."""
MAX_IN_FLIGHT = 16
"""Maximum number of hints that are being sent; further ones are dropped."""
HINT_TIMEOUT_S = 5.0
"""Timeout for an origin's answer to a hint, in seconds."""


@dataclass(slots=True, eq=False)
class Hints:
    """Sends hints to every origin that is connected."""

    link: OriginPool
    clock_s: Callable[[], float] = now
    _last_sent_s: dict[tuple[Hint, str], float] = field(default_factory=dict)
    _sending: set[asyncio.Task[None]] = field(default_factory=set)

    def send(self, hint: Hint, model: str = "") -> None:
        """Send a hint for one model, or a hint that names no model if `model` is empty."""
        models = self.link.heartbeat.models
        if len(models) < 2 or (model and model not in models):
            return  # with a single model there is nothing to load in advance
        now_s = self.clock_s()
        last_s = self._last_sent_s.get((hint, model))
        if last_s is not None and now_s - last_s < EVERY_S:
            return
        if len(self._sending) >= MAX_IN_FLIGHT:
            return
        self._last_sent_s[hint, model] = now_s
        task = asyncio.create_task(self._send(hint, model))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, hint: Hint, model: str) -> None:
        usable = [origin.address for origin in self.link.origins if origin.usable]
        await asyncio.gather(*(self._send_to(address, hint, model) for address in usable))

    async def _send_to(self, address: str, hint: Hint, model: str) -> None:
        call = Call(HINT, hint.value, "POST", f"http://hint/{hint.value}", body=model.encode())
        with suppress(TailraceError, TimeoutError):
            async with asyncio.timeout(HINT_TIMEOUT_S):
                await whole_answer(self.link, call, address)
