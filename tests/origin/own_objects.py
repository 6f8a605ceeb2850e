"""Classes of objects as an operator writes them."""

from __future__ import annotations

from tailrace.ledger.objects.object import DurableObject, ObjectRequest, ObjectResponse

START_MS = 1_800_000_000_000  # at 08:00
MINUTE_MS = 60_000


class Counter(DurableObject):
    """Counts its requests; it tells of the crons that it has been called for."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        count = int(await self.context.storage.get("count") or b"0") + 1
        self.context.storage.put("count", b"%d" % count)
        return ObjectResponse(200, body=b"%d" % count)


class Clerk(DurableObject):
    """Fails at the cron of every third minute."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(200, body=await self.context.storage.get("times") or b"")

    async def scheduled(self, cron: str, at_ms: int) -> None:
        if cron.startswith("*/3"):
            raise ValueError("as it is written")
        told = await self.context.storage.get("times") or b""
        self.context.storage.put("times", told + b"%d " % ((at_ms - START_MS) // MINUTE_MS))
