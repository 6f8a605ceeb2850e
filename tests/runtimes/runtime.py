"""An edge under test: what it is made of does not matter, only that it can be killed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from ledger.rights import Right
from origin.generations.resume_token import TokenKeys
from tailrace.certificate import development_certificate
from tests.e2e.processes import Edge, Origin
from tests.worker.workerd import Workerd


class Door(NamedTuple):
    """Where a runtime speaks one version of HTTP."""

    url: str
    certificate: Path | None = None


class Runtime(Protocol):
    """An edge, and the origin behind it."""

    versions: ClassVar[tuple[str, ...]]
    """Of HTTP, that it has doors for."""

    @property
    def url(self) -> str:
        """Where it speaks HTTP/1.1, without TLS."""

    @property
    def doors(self) -> Mapping[str, Door]:
        """By the version of HTTP."""

    @property
    def origin(self) -> Origin:
        """What is behind it, and has the keys that sign its tokens."""

    async def start(self) -> None:
        """Also after a kill, at the same addresses."""

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""

    async def stop(self) -> None: ...


class PythonEdge:
    """`tailrace edge`."""

    versions: ClassVar[tuple[str, ...]] = ("1.1", "2", "3")

    def __init__(self, origin: Origin, folder: Path) -> None:
        files = development_certificate(folder / "certificate", datetime.now(UTC))
        self.origin = origin
        self._edge = Edge(origin, certificate=(files.certificate, files.key))
        self.url = self._edge.url
        secured = (self._edge.tls_url, files.certificate)
        self.doors = {"1.1": Door(self.url), "2": Door(*secured), "3": Door(*secured)}

    async def start(self) -> None:
        self._edge.events.clear()
        await self._edge.ready()

    async def kill(self) -> None:
        await self._edge.kill()

    async def stop(self) -> None:
        await self._edge.stop()


class WorkerdEdge:
    """The Worker of wrangler-compat/ in workerd, in front of an edge of the origin."""

    versions: ClassVar[tuple[str, ...]] = ("1.1",)

    def __init__(self, origin: Origin, folder: Path) -> None:
        self.origin = origin
        self._behind = Edge(origin)
        self._worker = Workerd(self._behind.url, folder)
        self.url = self._worker.url
        self.doors = {"1.1": Door(self.url)}
        self._is_made = False

    async def start(self) -> None:
        if self._is_made:
            await self._worker.start()
            return
        await self._behind.ready()
        await self._worker.__aenter__()
        self._is_made = True

    async def kill(self) -> None:
        await self._worker.kill()

    async def stop(self) -> None:
        await self._worker.kill()
        await self._behind.stop()


RUNTIMES: dict[str, type[PythonEdge] | type[WorkerdEdge]] = {
    "python": PythonEdge,
    "workerd": WorkerdEdge,
}


def token_for(origin: Origin, stream: str, rights: Right, *, expires_in_s: float) -> str:
    """A resume token as the origin signs them, with the rights and the expiry that a test needs."""
    keys = TokenKeys.load(origin.data / "resume-keys.json")
    return keys.issue(bytes.fromhex(stream), rights, int((time.time() + expires_in_s) * 1000))
