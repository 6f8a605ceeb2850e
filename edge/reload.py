"""What is read again while an edge runs: its API keys, its certificate.

A file is looked at now and then, because what renews a certificate may not know of this process;
SIGHUP says to read at once. What cannot be read leaves what was read before, and the log says so.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from edge.access.gate import Gate
from edge.access.key_file import read_keys
from edge.config import EdgeConfig
from ledger.errors import ConfigError

LOOK_S = 1.0
"""How late a change of a file may be noticed."""

Stamp = tuple[tuple[int, int, int] | None, ...]

log = structlog.get_logger("tailrace.edge")


@dataclass(slots=True)
class Reloaded:
    """Files and what reads them anew; `read` raises ConfigError where that cannot be."""

    name: str
    files: Sequence[Path]
    read: Callable[[], None]
    _stamp: Stamp = field(init=False)

    def __post_init__(self) -> None:
        self._stamp = _stamp(self.files)

    def look(self, *, asked: bool = False) -> None:
        """Read the files anew if they have changed, or somebody asks."""
        stamp = _stamp(self.files)
        if stamp == self._stamp and not asked:
            return
        self._stamp = stamp
        try:
            self.read()
        except ConfigError as error:
            log.error("reload failed", what=self.name, error=str(error))
        else:
            log.info("reloaded", what=self.name)


@asynccontextmanager
async def reloading(*what: Reloaded) -> AsyncIterator[None]:
    """Look at the files while the block runs, and at each SIGHUP."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    async def look() -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await asked.wait()
            by_signal = asked.is_set()
            asked.clear()
            for each in what:
                each.look(asked=by_signal)

    loop.add_signal_handler(signal.SIGHUP, asked.set)
    task = asyncio.create_task(look())
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def reloaded_keys(config: EdgeConfig, gate: Gate) -> Reloaded:
    """The file of API keys, as `gate` goes by it: one that is made later closes the gate.

    One that goes does not open it: what was read last stays.
    """

    def read() -> None:
        if gate.ring is not None or config.api_keys.exists():
            gate.ring = read_keys(config.api_keys).ring()

    return Reloaded("API keys", (config.api_keys,), read)


def _stamp(files: Sequence[Path]) -> Stamp:
    return tuple(_stamp_of(file) for file in files)


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
