"""The phases of a checkpoint, on a real file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tailrace.ledger.sqlite.disk.checkpointer import NEXT, Event, Phase
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tests.ledger.sqlite.cold_material import Clock, sentence, store

pytestmark = pytest.mark.anyio


async def test_a_checkpoint_that_begins_meanwhile_takes_the_last_pages_from_the_writer(
    tmp_path: Path,
) -> None:
    file = await SqliteFile.open(tmp_path / "ledger.db")
    ledger = await SqliteLedger.recover(file, Clock())
    checkpointer = file._checkpointer
    asked = []
    await store(ledger, 1, sentence(10))
    await checkpointer.checkpoint(cut=False)
    asked.append(checkpointer.asks_writer)
    second = asyncio.create_task(checkpointer.checkpoint(cut=False))
    await asyncio.sleep(0)
    asked.append(checkpointer.asks_writer)
    assert not checkpointer.finish()
    await second
    asked.append(checkpointer.asks_writer)
    await store(ledger, 2, sentence(10))
    asked.append(checkpointer.asks_writer)
    assert asked == [True, False, True, False]
    await ledger.close()


async def test_a_wal_that_is_cut_is_cut_once(tmp_path: Path) -> None:
    file = await SqliteFile.open(tmp_path / "ledger.db")
    ledger = await SqliteLedger.recover(file, Clock())
    checkpointer = file._checkpointer
    await store(ledger, 1, sentence(10))
    await checkpointer.checkpoint(cut=True)
    assert checkpointer.finish()
    assert file._wal.size_bytes == 0
    await store(ledger, 2, sentence(10))
    await checkpointer.checkpoint(cut=False)
    assert not checkpointer.finish()
    assert file._wal.size_bytes > 0
    await ledger.close()


def test_every_phase_can_be_left_and_all_lead_back_to_rest() -> None:
    assert {phase for phase, _ in NEXT} == set(Phase)
    assert {event for _, event in NEXT} == set(Event)
    assert NEXT[Phase.MOVING, Event.STOPPED] is Phase.IDLE
    assert NEXT[Phase.FINISHING, Event.FINISHED] is Phase.IDLE
