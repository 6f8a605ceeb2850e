"""Tells origins of several models what may soon be asked for, so that they can load it ahead.

Nobody waits for it, and what cannot be told is left out. An origin learns which signs are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ssl import SSLContext

from tailrace.edge.origins.link import Link, whole_answer
from tailrace.edge.origins.origin import now
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Call
from tailrace.ledger.links.hints import HINT, Hint

EVERY_S = 5.0
"""The same sign is told once in so long."""
MAX_TELLING = 16
"""Signs on their way; more are left out."""
PATIENCE_S = 5.0


@dataclass(slots=True, eq=False)
class Hints:
    """`hosts` are names that TLS clients ask for, each with the model that is behind it."""

    link: Link
    hosts: Mapping[str, str] = field(default_factory=dict)
    clock_s: Callable[[], float] = now
    _told_s: dict[tuple[Hint, str], float] = field(default_factory=dict)
    _telling: set[asyncio.Task[None]] = field(default_factory=set)

    def say(self, hint: Hint, model: str = "") -> None:
        """`model` is empty for a sign of any."""
        models = self.link.heartbeat.models
        if len(models) < 2 or (model and model not in models):
            return  # the one model there is, or none, is not to be loaded ahead
        now_s = self.clock_s()
        last_s = self._told_s.get((hint, model))
        if (last_s is not None and now_s - last_s < EVERY_S) or len(self._telling) >= MAX_TELLING:
            return
        self._told_s[hint, model] = now_s
        task = asyncio.create_task(self._tell(hint, model))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def listen(self, context: SSLContext) -> None:
        """To the names that handshakes of this context ask for."""
        if self.hosts:
            context.sni_callback = lambda _, name, __: self.asked_for(name)

    def asked_for(self, name: str | None) -> None:
        """A handshake was for this host, if for any."""
        if name is not None and (model := self.hosts.get(name.lower())) is not None:
            self.say(Hint.HANDSHAKE, model)

    async def _tell(self, hint: Hint, model: str) -> None:
        usable = [origin.address for origin in self.link.origins if origin.usable]
        await asyncio.gather(*(self._tell_one(address, hint, model) for address in usable))

    async def _tell_one(self, address: str, hint: Hint, model: str) -> None:
        call = Call(HINT, hint.value, "POST", f"http://hint/{hint.value}", body=model.encode())
        with suppress(TailraceError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await whole_answer(self.link, call, address)
