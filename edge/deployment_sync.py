"""Sends the classes, bindings and crons of this edge's wrangler file to the origins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from tailrace.edge.origins.origin_pool import OriginPool
from tailrace.edge.origins.reader import whole_answer
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Call
from tailrace.ledger.objects.deployment import DEPLOYMENT, Deployment
from tailrace.ledger.process.tasks import background

RETRY_S = 5.0
"""Seconds until a deployment is sent again after an origin refused it or could not be reached."""

log = structlog.get_logger("tailrace.edge")


class DeploymentSync:
    """Sends a deployment to each origin, and again to an origin that has lost it."""

    def __init__(self, link: OriginPool, deployment: Deployment) -> None:
        self.deployment = deployment
        self._link = link
        self._refusals: dict[str, str] = {}
        self._synced: set[str] = set()
        self._lost = asyncio.Event()

    @property
    def faults(self) -> list[str]:
        """The reasons why this edge is not ready because of its deployment."""
        if not self._synced and not self._refusals:
            return ["no origin knows of this edge's deployment yet"]
        return [f"{self._refusals[address]}" for address in sorted(self._refusals)]

    def lost(self) -> None:
        """Send the deployment to all origins again, because the ledger of an origin has lost it."""
        self._lost.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the deployment of all origins up to date while the context is open."""
        async with background(self._sync(one.address) for one in self._link.origins):
            yield

    async def _sync(self, address: str) -> None:
        script, body = self.deployment.script, self.deployment.encoded()
        call = Call(DEPLOYMENT, script, "PUT", f"http://deployment/{script}", body=body)
        while True:
            self._lost.clear()
            try:
                await whole_answer(self._link, call, address)
            except TailraceError as error:
                if not error.retryable and self._refusals.get(address) != str(error):
                    self._refusals[address] = str(error)
                    log.error("deployment refused", origin=address, error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                self._refusals.pop(address, None)
                self._synced.add(address)
                await self._lost.wait()
