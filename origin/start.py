"""`tailrace origin`: starts the workers, and then the supervisor that keeps them.

In this order, because a worker takes longest: torch alone is two seconds of imports. So this
imports little, and what the supervisor needs is imported while the workers import theirs.
"""

from __future__ import annotations

import asyncio
import logging
import signal

import uvloop

from ledger.log import configure_logging
from origin.config import LedgerConfig, OriginConfig, StreamsConfig
from origin.garbage import look_less_often
from origin.program import program
from origin.worker_process import WorkerSlot


def run(config: OriginConfig, ledger: LedgerConfig, streams: StreamsConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises `TailraceError` if it cannot start or go on."""
    configure_logging(config.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # or a line per webhook, with its URL
    uvloop.run(_start(config, ledger, streams))


async def _start(config: OriginConfig, ledger: LedgerConfig, streams: StreamsConfig) -> None:
    command = program(config)
    slots = [WorkerSlot(number, command) for number in range(config.workers)]
    running = [asyncio.create_task(slot.keep()) for slot in slots]
    running.append(asyncio.create_task(_stop_signal()))
    try:
        await asyncio.to_thread(_import_supervisor)  # meanwhile the loop starts the workers
        from origin.supervisor import serve

        look_less_often()
        await serve(config, ledger, streams, slots, running)
    finally:
        for part in running:
            part.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _import_supervisor() -> None:
    import origin.supervisor  # noqa: F401


async def _stop_signal() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
