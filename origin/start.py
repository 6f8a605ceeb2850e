"""`tailrace origin`: starts the workers, and then the supervisor that keeps them.

In this order, because a worker takes longest: torch alone is two seconds of imports. So this
imports little, and what the supervisor needs is imported while the workers import theirs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvloop

from ledger.log import configure_logging
from ledger.process import look_less_often, stop_signal
from origin.config import LedgerConfig, OriginConfig, StreamsConfig
from origin.workers.circuit import Circuit
from origin.workers.forked import Launcher
from origin.workers.liveness import Patience
from origin.workers.program import makes_tokens, program
from origin.workers.worker_process import WorkerSlot, worker_environment


def run(config: OriginConfig, ledger: LedgerConfig, streams: StreamsConfig) -> None:
    """Serve until SIGTERM or SIGINT; raises `TailraceError` if it cannot start or go on."""
    configure_logging(config.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # or a line per webhook, with its URL
    uvloop.run(_start(config, ledger, streams))


async def _start(config: OriginConfig, ledger: LedgerConfig, streams: StreamsConfig) -> None:
    command = program(config)
    patience = Patience(config.worker_silence_s, config.worker_start_s)
    launcher = None
    if config.fork_workers and makes_tokens(config):
        launcher = Launcher(*command, worker_environment())
    circuit = Circuit()
    slots = [
        WorkerSlot(number, command, patience, launcher, circuit) for number in range(config.workers)
    ]
    parts = [slot.keep() for slot in slots] + ([launcher.keep()] if launcher else [])
    running: list[asyncio.Task[Any]] = [asyncio.create_task(part) for part in parts]
    running.append(asyncio.create_task(stop_signal().wait()))
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
