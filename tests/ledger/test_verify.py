from pathlib import Path

import pytest

from ledger.frame import Token, encode
from ledger.reader import reading
from ledger.record import pack_batch, pack_segment
from ledger.verify import Finding, verify
from tests.ledger.ledger_files import A, B, C, editing, three_streams, token

pytestmark = pytest.mark.anyio


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    await (await three_streams(path)).close()
    return path


def findings(path: Path) -> list[Finding]:
    with reading(path) as reader:
        return verify(reader).findings


async def test_a_whole_ledger_is_said_to_be_whole(path: Path) -> None:
    seen: list[int] = []
    with reading(path) as reader:
        verdict = verify(reader, seen.append)
    assert verdict.whole
    assert (verdict.streams, verdict.ended) == (3, 1)
    assert (verdict.frames, verdict.tokens) == (1206, 2 * 1205)
    assert seen == [1, 2, 3]


async def test_it_is_verified_while_its_owner_writes(tmp_path: Path) -> None:
    ledger = await three_streams(tmp_path / "ledger.db")
    try:
        assert findings(tmp_path / "ledger.db") == []
    finally:
        await ledger.close()


async def test_a_missing_segment_is_named_with_its_stream(path: Path) -> None:
    with editing(path) as file:
        [(first,)] = file.execute("SELECT min(first) FROM segment WHERE first > 0").fetchall()
        file.execute("DELETE FROM segment WHERE first = ?", (first,))
    [finding] = findings(path)
    assert finding.stream == A.hex()
    assert f"does not follow index {first - 1}" in finding.what


async def test_a_flipped_bit_in_a_segment_is_named_and_the_other_streams_are_read(
    path: Path,
) -> None:
    with editing(path) as file:
        [(blob,)] = file.execute("SELECT records FROM segment WHERE first = 0").fetchall()
        damaged = bytes([*blob[:100], blob[100] ^ 1, *blob[101:]])
        file.execute("UPDATE segment SET records = ? WHERE first = 0", (damaged,))
    with reading(path) as reader:
        verdict = verify(reader)
    what = "segment at index 0 does not match its checksum"
    assert verdict.findings == [Finding(A.hex(), what)]
    assert verdict.streams == 3
    assert verdict.frames == 5


async def test_a_damaged_log_row_is_named(path: Path) -> None:
    with editing(path) as file:
        file.execute("UPDATE log SET batch = x'0011223344556677'")
    found = findings(path)
    assert found[0] == Finding(None, "log row 14 does not match its checksum")


async def test_a_gap_in_the_log_is_named(path: Path) -> None:
    with editing(path) as file:
        [(sid,)] = file.execute("SELECT sid FROM stream WHERE id = ?", (B,)).fetchall()
        record = token(9)
        late = pack_batch([sid], [9], [record.frame], [record.ids])
        file.execute("INSERT INTO log VALUES (1000, ?)", (late,))
    assert findings(path) == [Finding(B.hex(), "the log jumps from index 4 to 9")]


async def test_a_frame_that_says_another_index_is_named(path: Path) -> None:
    with editing(path) as file:
        [(sid,)] = file.execute("SELECT sid FROM stream WHERE id = ?", (C,)).fetchall()
        blob = pack_segment([encode(Token("x", 5))], [()])
        file.execute("INSERT INTO segment VALUES (?, 0, 1, 0, ?)", (sid, blob))
    [finding] = findings(path)
    assert finding.stream == C.hex()
    assert "says index 5" in finding.what


async def test_an_end_that_is_only_claimed_is_named(path: Path) -> None:
    with editing(path) as file:
        file.execute("UPDATE stream SET ended = 1 WHERE id = ?", (B,))
    assert findings(path) == [Finding(B.hex(), "it is marked as ended, and has no StreamEnd")]


async def test_something_behind_the_end_is_named(path: Path) -> None:
    with editing(path) as file:
        [(sid,)] = file.execute("SELECT sid FROM stream WHERE id = ?", (A,)).fetchall()
        record = token(1201)
        late = pack_batch([sid], [1201], [record.frame], [record.ids])
        file.execute("INSERT INTO log VALUES (1000, ?)", (late,))
    assert findings(path) == [Finding(A.hex(), "index 1201 follows the end at index 1200")]


async def test_a_broken_page_is_named_and_does_not_stop_it(path: Path) -> None:
    with editing(path) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [(page,)] = file.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = 'object_value'"
        ).fetchall()
        [(size,)] = file.execute("PRAGMA page_size").fetchall()
    with path.open("r+b") as raw:
        raw.seek((page - 1) * size)
        raw.write(b"\xff" * size)
    found = findings(path)
    assert found
    assert all(finding.stream is None for finding in found)
