"""An edge of any kind under test, which can be killed and restarted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from tailrace.ledger.links.rights import Right
from tailrace.origin.generations.resume_tokens import TokenKeys
from tailrace.up import development_certificate
from tests.e2e.processes import Edge, Origin
from tests.worker.workerd import Workerd


class Door(NamedTuple):
    """Where a runtime speaks one version of HTTP."""

    url: str
    certificate: Path | None = None


class Runtime(Protocol):
    """An edge, and the origin behind it.

    `versions` are those of HTTP that it has `doors` for; `url` is the one of HTTP/1.1, without TLS.
    `origin` generates, and has the keys that sign tokens. `behind` is what it is in front of, the
    nearest one first.
    """

    versions: ClassVar[tuple[str, ...]]
    url: str
    doors: dict[str, Door]
    origin: Origin
    behind: Sequence[Origin | Edge]

    async def start(self) -> None:
        """Start the processes that are not up; after a kill, at the same addresses."""

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""

    async def stop(self) -> None: ...


class PythonEdge:
    """`tailrace edge`."""

    versions: ClassVar[tuple[str, ...]] = ("1.1", "2", "3")

    def __init__(self, origin: Origin, folder: Path, retention_s: float | None = None) -> None:
        """Streams are kept for as long as the origin keeps them."""
        files = development_certificate(folder / "certificate", datetime.now(UTC))
        self.origin = origin
        self.behind: Sequence[Origin | Edge] = [origin]
        self._edge = Edge(origin, certificate=(files.certificate, files.key))
        self.url = self._edge.url
        secured = (self._edge.tls_url, files.certificate)
        self.doors = {"1.1": Door(self.url), "2": Door(*secured), "3": Door(*secured)}

    async def start(self) -> None:
        await again(self.origin)
        await again(self._edge)

    async def kill(self) -> None:
        await self._edge.kill()

    async def stop(self) -> None:
        await self._edge.stop()


class WorkerdEdge:
    """The Worker of wrangler-compat/ in workerd, in front of an edge of the origin."""

    versions: ClassVar[tuple[str, ...]] = ("1.1",)

    def __init__(self, origin: Origin, folder: Path, retention_s: float | None = None) -> None:
        """Keep streams here for `retention_s`, or for as long as the wrangler file says."""
        kept = {} if retention_s is None else {"TAILRACE_RETENTION_S": str(retention_s)}
        self.origin = origin
        self._edge = Edge(origin)
        self.behind: Sequence[Origin | Edge] = [self._edge, origin]
        self._worker = Workerd(self._edge.url, folder, **kept)
        self.url = self._worker.url
        self.doors = {"1.1": Door(self.url)}
        self._is_made = self._is_up = False

    async def start(self) -> None:
        await again(self.origin)
        await again(self._edge)
        if not self._is_made:
            await self._worker.__aenter__()
        elif not self._is_up:
            await self._worker.start()
        self._is_made = self._is_up = True

    async def kill(self) -> None:
        await self._worker.kill()
        self._is_up = False

    async def stop(self) -> None:
        await self.kill()
        await self._edge.stop()


async def again(process: Origin | Edge) -> None:
    """Have it ready, at the same address, if it is not."""
    if not process.is_up:
        process.events.clear()
        await process.ready()


RUNTIMES: dict[str, type[PythonEdge] | type[WorkerdEdge]] = {
    "python": PythonEdge,
    "workerd": WorkerdEdge,
}


def token_for(origin: Origin, stream: str, rights: Right, *, expires_in_s: float) -> str:
    """Return a resume token signed with the origin's keys, with these rights and expiry."""
    keys = TokenKeys.load(origin.data / "resume-keys.json")
    return keys.issue(bytes.fromhex(stream), rights, int((time.time() + expires_in_s) * 1000))
