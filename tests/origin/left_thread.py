"""An object class whose module leaves a thread that never ends, as some libraries do."""

from __future__ import annotations

import threading

from tailrace.ledger.objects.object import DurableObject, ObjectRequest, ObjectResponse

threading.Thread(target=threading.Event().wait, name="left").start()


class Lingering(DurableObject):
    """Answers every request."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(200)
