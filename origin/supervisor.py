"""`tailrace origin`: ledger, link server and workers in one supervised process. No torch."""

from __future__ import annotations

import asyncio
import signal
import time

import structlog
import uvloop

from ledger.errors import ConfigError, LedgerFailed
from ledger.frame import encode
from ledger.log import configure_logging
from ledger.sqlite import SqliteLedger
from origin.config import LedgerConfig, OriginConfig
from origin.link import EdgeLink
from origin.prompt import PromptReader
from origin.recipe import Recipe
from origin.resume_token import TokenKeys
from origin.runs import Runs
from origin.service import Service
from origin.worker_process import WorkerSlot

HEARTBEAT_S = 5.0

log = structlog.get_logger("origin")


def run(config: OriginConfig, ledger: LedgerConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises `TailraceError` if it cannot start or go on."""
    configure_logging(config.log_level)
    uvloop.run(serve(config, ledger))


async def serve(config: OriginConfig, retention: LedgerConfig) -> None:
    path = retention.path or config.data / "ledger.db"
    reader = PromptReader(config.model)
    ledger = await SqliteLedger.open(path, now_ms)
    try:
        supervisor = Supervisor(config, retention, ledger, reader)
        await supervisor.serve()
    finally:
        await ledger.close()


class Supervisor:
    """Wires the parts together and keeps them running."""

    def __init__(
        self,
        config: OriginConfig,
        retention: LedgerConfig,
        ledger: SqliteLedger,
        reader: PromptReader,
    ) -> None:
        self._config = config
        self._retention = retention
        self._ledger = ledger
        self._links: set[EdgeLink] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runs = Runs(ledger, config.max_streams, self._say_heartbeat)
        self._service = Service(
            ledger=ledger,
            runs=self._runs,
            keys=TokenKeys.load(config.data / "resume-keys.json"),
            reader=reader,
            config=config,
            retention=retention,
            now_ms=now_ms,
        )

    async def serve(self) -> None:
        """Run until a signal stops it; the first error of a part stops it with that error."""
        host, port = self._config.link_address
        try:
            server = await asyncio.get_running_loop().create_server(self._link, host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._config.link}: {error.strerror or error}",
                field="origin.link",
                hint="another origin may be running; choose another port",
            ) from error
        bound = server.sockets[0].getsockname()
        log.info("origin.listening", link=f"{bound[0]}:{bound[1]}", data=str(self._config.data))
        for stream in await self._ledger.unfinished():
            info = await self._ledger.info(stream)
            await self._runs.restore(stream, Recipe.model_validate_json(info.recipe))
        try:
            await self._run_parts()
        finally:
            server.close()
            for link in list(self._links):
                link.close()
            await server.wait_closed()

    async def _run_parts(self) -> None:
        parts = [asyncio.create_task(slot.keep()) for slot in self._slots()]
        parts += [asyncio.create_task(self._beat()), asyncio.create_task(self._sweep())]
        stopped = asyncio.create_task(_stop_signal())
        try:
            await asyncio.wait((*parts, stopped, self._failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in (*parts, stopped):
                part.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
        for result in (*results, self._failed.exception() if self._failed.done() else None):
            if isinstance(result, Exception):
                raise result

    def _slots(self) -> list[WorkerSlot]:
        config = self._config
        return [
            WorkerSlot(number, config.model.resolve(), config.model_name, self._runs)
            for number in range(config.workers)
        ]

    def _link(self) -> EdgeLink:
        return EdgeLink(self._service, self._links, self._fail)

    def _fail(self, error: LedgerFailed) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _say_heartbeat(self) -> None:
        heartbeat = encode(self._service.heartbeat())
        for link in self._links:
            link.send(heartbeat)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._say_heartbeat()

    async def _sweep(self) -> None:
        """Remove expired streams, a few at a time."""
        while True:
            await asyncio.sleep(self._retention.sweep_s)
            await self._ledger.expire()


async def _stop_signal() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def now_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000
