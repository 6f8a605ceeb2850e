"""References between streams: a source keeps what its forks have inherited.

A fork names itself by its ledger stream, so asking twice is asking once. It writes down that
it may hold a reference before it asks for one, and strikes that out with the write that
creates it; deleting the fork writes it down again. Whatever stands there is given back by
the alarm, as often as it takes: nothing leaks when a process dies, and nothing is held twice.
"""

from __future__ import annotations

from ledger.errors import TailraceError
from ledger.interface import ObjectKey
from ledger.objects.object import ObjectContext, ObjectRequest, ObjectResponse
from ledger.streams.fork import Claim

TAKE = "FORK"
GIVE_BACK = "UNFORK"
"""The methods by which objects ask each other; an edge passes no such method on."""

FORK = "fork:"
"""A value of a source: a reference that a fork holds."""
OWED = "release:"
"""A value of a fork: a reference to give back to the source that the value names."""
RETRY_MS = 30_000
"""How long the alarm waits before it gives back again what it could not, in ms."""


class References:
    """The references of one object, both ways."""

    def __init__(self, context: ObjectContext) -> None:
        self._context, self._storage = context, context.storage
        self._asking: set[str] = set()  # not to be given back while the source is being asked

    # ---- as a source ----

    def add(self, reference: str, fork: str) -> None:
        self._storage.put(FORK + reference, fork.encode())

    def remove(self, reference: str) -> None:
        self._storage.delete(FORK + reference)

    async def held(self) -> bool:
        """Whether any fork needs this stream."""
        return bool(await self._storage.list(prefix=FORK, limit=1))

    # ---- as a fork ----

    async def take(self, claim: Claim) -> ObjectResponse:
        """Ask the source for a reference; what it answers is a Grant, or the problem."""
        self.owe(claim.reference, claim.order.source, self._context.now_ms() + RETRY_MS)
        self._asking.add(claim.reference)
        try:
            response = await self._ask(claim.order.source, TAKE, claim.pack())
        finally:
            self._asking.discard(claim.reference)
        if response.status != 200:
            self.settle(claim.reference)
        return response

    def settle(self, reference: str) -> None:
        """The reference is not owed any more: it is held, or was never given."""
        self._storage.delete(OWED + reference)

    def owe(self, reference: str, source: str, at_ms: int) -> None:
        """Have the alarm give a reference back, from `at_ms` (Unix ms) on."""
        self._storage.put(OWED + reference, source.encode())
        wake_by(self._context, at_ms)

    async def owed(self) -> dict[str, bytes]:
        """The values that say what is owed."""
        return await self._storage.list(prefix=OWED)

    async def give_back(self) -> None:
        """Give back all that is owed; what cannot be now is left to the next alarm."""
        for name, source in (await self.owed()).items():
            reference = name.removeprefix(OWED)
            if reference not in self._asking:
                try:
                    await self._ask(source.decode(), GIVE_BACK, reference.encode())
                except TailraceError:
                    break
                self.settle(reference)
        if await self.owed():
            wake_by(self._context, self._context.now_ms() + RETRY_MS)

    async def _ask(self, source: str, method: str, body: bytes) -> ObjectResponse:
        key = ObjectKey(self._context.key.kind, source)
        return await self._context.call(key, ObjectRequest(method, "", (), body))


def wake_by(context: ObjectContext, at_ms: int) -> None:
    """Have the alarm ring at `at_ms` or before; it rings in vain where it rings too early."""
    alarm = context.storage.get_alarm()
    if alarm is None or at_ms < alarm:
        context.storage.set_alarm(at_ms)
