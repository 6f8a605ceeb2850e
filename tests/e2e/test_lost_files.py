"""An origin whose folder disappears, and the files that a folder holds."""

import asyncio
from pathlib import Path

import pytest

from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, encode
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.steady_clock import MARK_NAME, KeptClock, now_ms
from tests.e2e.processes import START_TIMEOUT_S, Origin

pytestmark = pytest.mark.anyio

STREAM = bytes(range(16))
DAY_MS = 86_400_000


async def leave_an_ended_stream(data: Path) -> None:
    """Its time is over by the system's clock, and not by that of the process before."""
    data.mkdir()
    clock = KeptClock(data)
    clock._now -= 3 * DAY_MS
    clock.keep()
    ledger = await SqliteLedger.open(data / "ledger.db", lambda: now_ms() - DAY_MS)
    await ledger.create(NewStream(STREAM, "{}", Durability.PROCESS, ttl_s=3600))
    end = Record(encode(StreamEnd(0, FinishReason.STOP, 0, 0)), ())
    await ledger.append([Append(STREAM, 1, 0, end)])
    await ledger.close()


async def has_swept(data: Path) -> None:
    """Wait until a sweep is over.

    Each sweep writes a new mark when it begins, so the third mark seen means that a whole sweep has
    passed.
    """
    seen = set[str]()
    async with asyncio.timeout(START_TIMEOUT_S):
        while len(seen) < 3:
            seen.add((data / MARK_NAME).read_text())
            await asyncio.sleep(0.01)


async def test_an_origin_whose_folder_is_moved_ends_and_says_so(tmp_path: Path) -> None:
    settings, data = tmp_path / "tailrace.toml", tmp_path / "data"
    settings.write_text("[ledger]\nsweep_s = 0.2\n")
    await leave_an_ended_stream(data)
    origin = Origin(data, config=settings)
    try:
        await origin.start()
        await origin.saw("origin.listening")
        await has_swept(data)
        data.rename(tmp_path / "moved")
        assert await origin.ended() == 1
        said = [str(event["message"]) for event in origin.events]
        assert said[-1] == "process.ended"
        assert f"{data / 'ledger.db'} was moved or deleted" in said[-2], said
        assert not any("Traceback" in line for line in said)
    finally:
        await origin.stop()
    ledger = await SqliteLedger.open(
        tmp_path / "moved" / "ledger.db", KeptClock(tmp_path / "moved")
    )
    assert (await ledger.info(STREAM)).ended  # the step of the clock has removed nothing
    await ledger.close()


async def test_an_origin_without_a_folder_to_write_in_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    origin = Origin(tmp_path / "file" / "data")
    await origin.start()
    assert await origin.ended() == 2
    said = [str(event["message"]) for event in origin.events if event != origin.events[-1]]
    assert len(said) == 1, said
    assert said[0].startswith(f"error: origin.data: {tmp_path / 'file' / 'data'} cannot be created")
