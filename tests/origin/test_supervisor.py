"""Periodic tasks of a supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import apsw
import pytest
from structlog.testing import capture_logs

from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import NewStream
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig
from tailrace.origin.objects.object_host import OriginObjects
from tailrace.origin.steady_clock import KeptClock, now_ms
from tailrace.origin.supervisor import Supervisor
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs

pytestmark = pytest.mark.anyio


class Enough(Exception):
    """Ends what would go on for ever."""


@pytest.mark.parametrize("lease_s", [2.0, 3.0, 60.0])
async def test_edges_hear_at_the_pace_that_goes_with_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    retention = LedgerConfig(lease_s=lease_s)
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", now_ms)
    objects = OriginObjects(ledger, StreamsConfig(), now_ms)
    config = OriginConfig(data=tmp_path)
    supervisor = Supervisor(config, retention, ledger, objects, KeptClock(tmp_path))
    did: list[float | str] = []

    async def sleep(seconds: float) -> None:
        if len(did) == 4:
            raise Enough
        did.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(supervisor, "_say_heartbeat", lambda: did.append("heartbeat"))
        with pytest.raises(Enough):
            await supervisor._beat()
    assert did == [retention.heartbeat_s, "heartbeat"] * 2
    await objects.close()
    await ledger.close()


@pytest.mark.parametrize("misread", [apsw.SQLITE_IOERR_READ, apsw.SQLITE_CORRUPT])
async def test_an_origin_goes_on_while_its_ledger_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, misread: int
) -> None:
    disk = Disk(Random(0))
    vfs = FaultyVfs("faulty", disk)
    path = tmp_path / "ledger.db"
    ledger = await SqliteLedger.open(path, now_ms, vfs="faulty", wal_sync=disk.wal_sync)
    for number in range(100):  # enough that they lie on pages that were not read before
        stream = number.to_bytes(16, "big")
        await ledger.create(NewStream(stream, "x" * 200, Durability.PROCESS, 60))
    objects = OriginObjects(ledger, StreamsConfig(), now_ms)
    config = OriginConfig(data=tmp_path)
    supervisor = Supervisor(config, LedgerConfig(), ledger, objects, KeptClock(tmp_path))
    disk.misread = misread
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 2:
            raise Enough

    for forever in (supervisor._adopt, supervisor._sweep):
        waits.clear()
        with monkeypatch.context() as patch, capture_logs() as said:
            patch.setattr(asyncio, "sleep", sleep)
            with pytest.raises(Enough):
                await forever()
        assert {line["event"] for line in said} & {"ledger.away", "ledger.damaged"}
    disk.misread = None
    await objects.close()
    await ledger.close()
    vfs.unregister()
