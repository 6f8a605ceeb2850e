"""What becomes of an origin whose folder goes away."""

from pathlib import Path

import pytest

from origin.steady_clock import MARK_NAME
from tests.e2e.processes import Origin

pytestmark = pytest.mark.anyio


async def test_an_origin_whose_folder_is_moved_ends_and_says_so(tmp_path: Path) -> None:
    settings, data = tmp_path / "tailrace.toml", tmp_path / "data"
    settings.write_text("[ledger]\nsweep_s = 0.2\n")
    origin = Origin(data, config=settings)
    try:
        await origin.start()
        await origin.saw("origin.listening")
        assert (data / MARK_NAME).exists()  # it lives by the clock that leaves it
        data.rename(tmp_path / "moved")
        assert await origin.ended() == 1
        said = [str(event["message"]) for event in origin.events]
        assert any(f"{data / 'ledger.db'} was moved or deleted" in line for line in said), said
        assert not any("Traceback" in line for line in said)
    finally:
        await origin.stop()


async def test_an_origin_without_a_folder_to_write_in_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    origin = Origin(tmp_path / "file" / "data")
    await origin.start()
    assert await origin.ended() == 2
    said = [str(event["message"]) for event in origin.events if event != origin.events[-1]]
    assert len(said) == 1, said
    assert said[0].startswith("error: ledger.path: ")
