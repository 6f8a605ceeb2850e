"""What a supervisor does again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ledger.sqlite.ledger import SqliteLedger
from origin.config import LedgerConfig, OriginConfig, StreamsConfig
from origin.objects import OriginObjects
from origin.steady_clock import KeptClock, now_ms
from origin.supervisor import Supervisor

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
    supervisor = Supervisor(config, retention, ledger, objects, None, KeptClock(tmp_path))
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
