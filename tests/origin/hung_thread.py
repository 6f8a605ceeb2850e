"""An object class whose module starts a job that hangs in a thread of the event loop's executor."""

from __future__ import annotations

import asyncio
import threading

from tailrace.ledger.objects.object import DurableObject, ObjectRequest, ObjectResponse
from tailrace.ledger.process import lifecycle


def hang() -> None:
    threading.current_thread().name = "hung"
    threading.Event().wait()


lifecycle.CLOSING_S = 1.0  # so that the test is short
asyncio.get_running_loop().run_in_executor(None, hang)


class Hanging(DurableObject):
    """Answers every request."""

    async def fetch(self, request: ObjectRequest) -> ObjectResponse:
        return ObjectResponse(200)
