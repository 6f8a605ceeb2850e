"""Inspection of a ledger in a file: findings that only a file can have."""

import shutil
from pathlib import Path

import apsw
import pytest

from tailrace.ledger.errors import ConfigError
from tailrace.ledger.inspection.commands import Finding, reading, verify
from tailrace.ledger.inspection.sqlite_reader import reading_file
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tests.ledger.ledger_files import A, B, C, SqlitePlace, end, three_streams, token
from tests.ledger.other_owner import OtherOwner

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(tmp_path: Path) -> SqlitePlace:
    ledger = SqlitePlace(tmp_path)
    await (await three_streams(ledger)).close()
    return ledger


async def pack(ledger: SqlitePlace) -> None:
    """Have what has ended compressed."""
    opened = await SqliteLedger.open(
        ledger.place, ledger.clock, retention=RetentionSettings(cold_after_s=0)
    )
    assert await opened.expire() == 0
    await opened.close()


async def findings(ledger: SqlitePlace) -> list[Finding]:
    async with reading(ledger.place) as reader:
        return (await verify(reader)).findings


async def test_cold_segments_are_read_like_plain_ones(ledger: SqlitePlace) -> None:
    await pack(ledger)
    async with reading_file(ledger.place) as reader:
        row = await reader.stream(A)
        stored = await reader.stored(row)
        assert stored["cold_segments"] == stored["segments"] > 0
        whole: list[tuple[int, Record]] = [(n, token(n)) for n in range(1200)]
        whole.append((1200, end(1200)))
        assert [x async for x in reader.records(row)] == whole
        assert [x async for x in reader.records(row, 1100)] == whole[1100:]
        assert (await verify(reader)).whole


async def test_status_tells_what_a_cold_frame_takes(ledger: SqlitePlace) -> None:
    async with reading_file(ledger.place) as reader:
        before = await reader.status()
    assert (before.cold_segments, before.cold_bytes_per_frame) == (0, None)
    await pack(ledger)
    async with reading_file(ledger.place) as reader:
        status = await reader.status()
    assert status.cold_frames == 1201
    assert status.cold_bytes_per_frame == round(status.cold_bytes / 1201, 2)
    assert status.cold_bytes < before.segment_bytes // 4
    assert status.frames == before.frames


async def test_rows_that_do_not_match_their_checksums_are_named(ledger: SqlitePlace) -> None:
    ledger.edit("UPDATE stream SET recipe = replace(recipe, 'demo', 'dem0') WHERE id = ?", B)
    ledger.edit("UPDATE stream SET epoch = epoch + 1 WHERE id = ?", C)
    ledger.edit("UPDATE object SET epoch = epoch + 1")
    ledger.edit("UPDATE object_value SET value = x'32'")
    assert await findings(ledger) == [
        Finding(None, "the row of object 1 does not match its checksum"),
        Finding(None, "value b'value' of object 1 does not match its checksum"),
        Finding(B.hex(), "its row does not match its checksum"),
        Finding(C.hex(), "its row does not match its checksum"),
    ]


async def test_a_flipped_bit_in_a_cold_segment_is_named(ledger: SqlitePlace) -> None:
    await pack(ledger)
    flip(ledger)
    assert await findings(ledger) == [
        Finding(A.hex(), "segment at index 0 does not match its checksum")
    ]


async def test_a_flipped_bit_in_a_segment_is_named_and_the_other_streams_are_read(
    ledger: SqlitePlace,
) -> None:
    flip(ledger)
    async with reading(ledger.place) as reader:
        verdict = await verify(reader)
    what = "segment at index 0 does not match its checksum"
    assert verdict.findings == [Finding(A.hex(), what)]
    assert verdict.streams == 3
    assert verdict.frames == 5


def flip(ledger: SqlitePlace) -> None:
    """Another bit in the middle of the first segment of A."""
    with ledger.opened() as connection:
        [(blob,)] = connection.execute("SELECT records FROM segment WHERE first = 0 AND sid = 1")
    at = len(blob) // 2
    damaged = bytes([*blob[:at], blob[at] ^ 1, *blob[at + 1 :]])
    ledger.edit("UPDATE segment SET records = ? WHERE first = 0 AND sid = 1", damaged)


async def test_a_damaged_log_row_is_named(ledger: SqlitePlace) -> None:
    ledger.edit("UPDATE log SET batch = x'0011223344556677'")
    found = await findings(ledger)
    assert found[0].stream is None
    assert found[0].what.startswith("log row ")
    assert found[0].what.endswith("does not match its checksum")


async def test_a_segment_of_no_stream_is_named(ledger: SqlitePlace) -> None:
    ledger.edit("DELETE FROM stream WHERE id = ?", A)
    [finding] = await findings(ledger)
    assert finding.stream is None
    assert "segments belong to no stream" in finding.what


async def test_what_is_yet_to_be_taken_away_is_no_damage(ledger: SqlitePlace) -> None:
    ledger.edit("INSERT INTO removed SELECT sid FROM stream WHERE id = ?", A)
    ledger.edit("DELETE FROM stream WHERE id = ?", A)
    assert await findings(ledger) == []
    async with reading_file(ledger.place) as reader:
        status = await reader.status()
    assert (status.removed_streams, status.frames) == (1, 0)


async def test_a_broken_page_is_named_and_does_not_stop_it(ledger: SqlitePlace) -> None:
    with ledger.opened() as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        [(page,)] = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'object_value'"
        )
        [(size,)] = connection.execute("PRAGMA page_size")
    with ledger.place.open("r+b") as raw:
        raw.seek((page - 1) * size)
        raw.write(b"\xff" * size)
    async with reading(ledger.place) as reader:
        verdict = await verify(reader)
    assert verdict.findings
    assert all(finding.stream is None for finding in verdict.findings)
    assert (verdict.streams, verdict.frames) == (3, 1206)


async def test_what_is_read_after_a_release_is_of_a_later_moment(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    with OtherOwner(place) as owner:
        async with reading(place.place) as reader:
            row = await reader.stream(B)
            assert len([x async for x in reader.records(row)]) == 5
            owner.append(B, 5)
            owner.delete(B)
            assert len([x async for x in reader.records(row)]) == 5
            await reader.release()
            assert (await reader.status()).streams == 2


async def test_a_process_has_a_file_open_once(ledger: SqlitePlace) -> None:
    """Closing one descriptor would drop the locks of all. The second one is refused."""
    opened = await ledger.open()
    try:
        with pytest.raises(ConfigError, match="is open in this process already"):
            async with reading_file(ledger.place):
                pass
    finally:
        await opened.close()
    async with reading_file(ledger.place) as reader:
        with pytest.raises(ConfigError, match="is open in this process already"):
            await ledger.open()
        assert (await reader.status()).streams == 3


async def test_a_reader_writes_nothing_and_moves_nothing(tmp_path: Path) -> None:
    """Not even when it is the last one that closes: the owner was killed, its WAL lies there."""
    place = SqlitePlace(tmp_path)
    with OtherOwner(place) as owner:
        for copied in tmp_path.glob("ledger.db*"):
            shutil.copy(copied, tmp_path / copied.name.replace("ledger", "left"))
        owner.append(B, 5)
    left = tmp_path / "left.db"
    files = {path: path.read_bytes() for path in (left, Path(f"{left}-wal"))}
    assert all(files.values())
    async with reading_file(left) as reader:
        assert (await verify(reader)).frames == 1206
        with pytest.raises(apsw.ReadOnlyError):
            reader._snapshot.connection.execute("DELETE FROM stream")
    assert {path: path.read_bytes() for path in files} == files


async def test_a_copy_does_not_go_over_a_file(ledger: SqlitePlace, tmp_path: Path) -> None:
    async with reading_file(ledger.place) as reader:
        with pytest.raises(ConfigError, match="exists"):
            await reader.copy_to(ledger.place)
