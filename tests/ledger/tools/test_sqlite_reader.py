"""What only a file can have, and what can only happen to a file."""

import sqlite3
from pathlib import Path

import pytest

from ledger.errors import ConfigError
from ledger.interface import Record
from ledger.sqlite.ledger import SqliteLedger
from ledger.sqlite.retention import RetentionSettings
from ledger.tools.reader import reading
from ledger.tools.sqlite_reader import reading_file
from ledger.tools.verify import Finding, verify
from tests.ledger.ledger_files import A, B, SqlitePlace, end, three_streams, token

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ledger(tmp_path: Path) -> SqlitePlace:
    ledger = SqlitePlace(tmp_path)
    await (await three_streams(ledger)).close()
    return ledger


async def pack(ledger: SqlitePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what has ended compressed, although it is too little to learn much from."""
    monkeypatch.setattr("ledger.sqlite.dictionary_maker.MIN_TRAIN_FRAMES", 1_000)
    opened = await SqliteLedger.open(
        ledger.place, ledger.clock, retention=RetentionSettings(cold_after_s=0)
    )
    assert await opened.expire() == 0
    await opened.close()


def findings(ledger: SqlitePlace) -> list[Finding]:
    with reading(ledger.place) as reader:
        return verify(reader).findings


async def test_cold_segments_are_read_like_plain_ones(
    ledger: SqlitePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pack(ledger, monkeypatch)
    with reading_file(ledger.place) as reader:
        row = reader.stream(A)
        assert reader.stored(row).cold_segments == reader.stored(row).segments > 0
        whole: list[tuple[int, Record]] = [(n, token(n)) for n in range(1200)]
        whole.append((1200, end(1200)))
        assert list(reader.records(row)) == whole
        assert list(reader.records(row, 1100)) == whole[1100:]
        assert verify(reader).whole


async def test_status_tells_what_a_cold_frame_takes(
    ledger: SqlitePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading_file(ledger.place) as reader:
        before = reader.status()
    assert (before.cold_segments, before.cold_bytes_per_frame) == (0, None)
    await pack(ledger, monkeypatch)
    with reading_file(ledger.place) as reader:
        status = reader.status()
    assert status.cold_frames == 1201
    assert status.cold_bytes_per_frame == round(status.cold_bytes / 1201, 2)
    assert status.cold_bytes < before.segment_bytes // 4
    assert status.frames == before.frames
    assert (status.dictionaries, status.dictionary_bytes > 0) == (1, True)


async def test_a_dictionary_that_is_gone_is_named_with_the_stream(
    ledger: SqlitePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pack(ledger, monkeypatch)
    ledger.edit("DELETE FROM dictionary")
    [finding] = findings(ledger)
    assert finding == Finding(A.hex(), "segment at index 0: its dictionary is gone")


async def test_a_flipped_bit_in_a_cold_segment_is_named(
    ledger: SqlitePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pack(ledger, monkeypatch)
    flip(ledger)
    assert findings(ledger) == [Finding(A.hex(), "segment at index 0 does not match its checksum")]


async def test_a_flipped_bit_in_a_segment_is_named_and_the_other_streams_are_read(
    ledger: SqlitePlace,
) -> None:
    flip(ledger)
    with reading(ledger.place) as reader:
        verdict = verify(reader)
    what = "segment at index 0 does not match its checksum"
    assert verdict.findings == [Finding(A.hex(), what)]
    assert verdict.streams == 3
    assert verdict.frames == 5


def flip(ledger: SqlitePlace) -> None:
    """Another bit in the middle of the first segment of A."""
    connection = sqlite3.connect(ledger.place)
    [(blob,)] = connection.execute(
        "SELECT records FROM segment WHERE first = 0 AND sid = 1"
    ).fetchall()
    connection.close()
    at = len(blob) // 2
    damaged = bytes([*blob[:at], blob[at] ^ 1, *blob[at + 1 :]])
    ledger.edit("UPDATE segment SET records = ? WHERE first = 0 AND sid = 1", damaged)


async def test_a_damaged_log_row_is_named(ledger: SqlitePlace) -> None:
    ledger.edit("UPDATE log SET batch = x'0011223344556677'")
    found = findings(ledger)
    assert found[0].stream is None
    assert found[0].what.startswith("log row ")
    assert found[0].what.endswith("does not match its checksum")


async def test_a_segment_of_no_stream_is_named(ledger: SqlitePlace) -> None:
    ledger.edit("DELETE FROM stream WHERE id = ?", A)
    [finding] = findings(ledger)
    assert finding.stream is None
    assert "segments belong to no stream" in finding.what


async def test_what_is_yet_to_be_taken_away_is_no_damage(ledger: SqlitePlace) -> None:
    ledger.edit("INSERT INTO removed SELECT sid FROM stream WHERE id = ?", A)
    ledger.edit("DELETE FROM stream WHERE id = ?", A)
    assert findings(ledger) == []
    with reading_file(ledger.place) as reader:
        status = reader.status()
    assert (status.removed_streams, status.frames) == (1, 0)


async def test_a_broken_page_is_named_and_does_not_stop_it(ledger: SqlitePlace) -> None:
    connection = sqlite3.connect(ledger.place)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    [(page,)] = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'object_value'"
    ).fetchall()
    [(size,)] = connection.execute("PRAGMA page_size").fetchall()
    connection.close()
    with ledger.place.open("r+b") as raw:
        raw.seek((page - 1) * size)
        raw.write(b"\xff" * size)
    with reading(ledger.place) as reader:
        verdict = verify(reader)
    assert verdict.findings
    assert all(finding.stream is None for finding in verdict.findings)
    assert (verdict.streams, verdict.frames) == (3, 1206)


async def test_what_is_read_after_a_release_is_of_a_later_moment(tmp_path: Path) -> None:
    place = SqlitePlace(tmp_path)
    opened = await three_streams(place)
    with reading(place.place) as reader:
        row = reader.stream(B)
        assert len(list(reader.records(row))) == 5
        await opened.append([])
        await opened.delete(B)
        assert len(list(reader.records(row))) == 5
        reader.release()
        assert reader.stream_count() == 2
    await opened.close()


async def test_a_copy_does_not_go_over_a_file(ledger: SqlitePlace, tmp_path: Path) -> None:
    with reading_file(ledger.place) as reader, pytest.raises(ConfigError, match="exists"):
        reader.copy_to(ledger.place)
