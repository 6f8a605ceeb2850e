"""An origin as it is, whose one worker is the one beside this.

    python tests/bench/path/origin.py LINK DATA SETTINGS

SETTINGS are the worker's.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tailrace.ledger.process.lifecycle import Stop, look_less_often
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig
from tailrace.origin.supervisor import serve
from tailrace.origin.workers.worker_process import WorkerSlot


async def main(link: str, data: str, settings: str) -> None:
    config = OriginConfig(link=link, data=Path(data), max_streams=1024)
    slot = WorkerSlot(0, ("tests.bench.path.worker", settings))
    slot.launch()
    running = [asyncio.create_task(slot.keep())]
    look_less_often()
    await serve(config, LedgerConfig(), StreamsConfig(), [slot], running, Stop())


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
