"""A producer killed by SIGKILL a hundred times: what it was acknowledged is never lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from ledger.errors import NotFound
from ledger.sqlite import SqliteLedger
from tests.ledger.producer import STREAMS, record, stream_id

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
KILLS = 100
SEED = 20_26
CHECK_EVERY = 5
"""Kills between two looks into the ledger; in between its successor recovers it."""


def killed_after(path: Path, acknowledgements: int) -> dict[int, int]:
    """Run a producer, SIGKILL it then; the highest acknowledged index of each stream."""
    command = [sys.executable, "-m", "tests.ledger.producer", str(path)]
    highest: dict[int, int] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        data = b""
        while data.count(b"\n") < acknowledgements:
            more = process.stdout.read(4096)
            assert more, "the producer ended by itself"
            data += more
        process.kill()
        data += process.stdout.read()
    for line in data.decode().splitlines():
        number, index = map(int, line.split())
        highest[number] = max(index, highest.get(number, -1))
    return highest


async def check(path: Path, acknowledged: dict[int, int]) -> int:
    """Every stream is contiguous, as it was produced, and holds all that was acknowledged."""
    ledger = await SqliteLedger.open(path, lambda: 0)
    total = 0
    try:
        for number in range(STREAMS):
            try:
                info = await ledger.info(stream_id(number))
            except NotFound:
                assert number not in acknowledged
                continue
            assert info.next_index > acknowledged.get(number, -1), "an acknowledged record is lost"
            records = await ledger.read(stream_id(number), 0, info.next_index)
            assert records == [record(number, index) for index in range(info.next_index)]
            total += len(records)
    finally:
        await ledger.close()
    return total


@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_doubled_or_reordered(tmp_path: Path) -> None:
    path, random = tmp_path / "ledger.db", Random(SEED)
    acknowledged: dict[int, int] = {}
    for kill in range(1, KILLS + 1):
        for number, index in killed_after(path, random.randint(1, 120)).items():
            assert index > acknowledged.get(number, -1), "an index was acknowledged twice"
            acknowledged[number] = index
        if kill % CHECK_EVERY == 0:
            assert await check(path, acknowledged) >= sum(acknowledged.values())
