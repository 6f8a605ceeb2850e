"""A ledger file of layout 6 is brought up to date when it is opened, and nothing of it is lost.

`ledger_layout_6.sql` was written by the last release of that layout. Its token ids hold marks: the
streams 1 (ended) and 2 (ended, steered) are cold, 3 (ended, steered) is in a plain segment, 4
(running, steered), 5 (running; a notice says which engine makes it) and 6 (empty) are in the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import apsw
import pytest

from tailrace.ledger.branch import BranchPoint
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.frame import FinishReason, Notice, StreamEnd, Token, decode
from tailrace.ledger.inspection.commands import json_lines, reading, verify
from tailrace.ledger.interface import Append, Ledger, ObjectKey, Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra, StreamLife
from tailrace.ledger.sqlite.disk.schema import SCHEMA_VERSION
from tailrace.ledger.sqlite.encoding import COLD
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.ledger.usage import UsageCounts, UsageQuery
from tailrace.origin.workers.worker_frame import StartRun, Steer
from tests.ledger.backends import A, B, finish, new, opened_file
from tests.ledger.test_behaviour_usage import OF_A, OF_B
from tests.ledger.test_behaviour_usage import finish as finish_counted
from tests.origin.stage import Stage

pytestmark = pytest.mark.anyio

LAYOUT_6 = Path(__file__).parents[2] / "vectors/ledger_layout_6.sql"
NOW_MS = 1_760_000_000_000
PACKED, PACKED_STEERED, STEERED, RUNNING, ENGINE, EMPTY = (bytes([n]) * 16 for n in range(1, 7))
TO_LAYOUT_7 = "DROP TABLE usage; DROP TABLE part; DROP TABLE answer; PRAGMA user_version = 7"
WORDS = " the cat sat on a mat".split()
LIFE = StreamLife(3, 14, 1592, 6, 53, 58, resumes=2, takeovers=None)
STEER = RecordExtra(steered=(IdSpan(1, 2), IdSpan(3, 1)))

Row = tuple[object, tuple[int, ...], RecordExtra]


def token(index: int) -> Row:
    place = index % len(WORDS)
    return Token(f" {WORDS[place]}", index), (place + 7,), RecordExtra()


def steered(index: int) -> Row:
    return Token(" and then", index), (7, 8, 9, 10), STEER


def end(index: int, ids: tuple[int, ...] = (), spans: tuple[IdSpan, ...] = ()) -> Row:
    frame = StreamEnd(index, FinishReason.STOP, index, 2)
    return frame, ids, RecordExtra(steered=spans, life=tuple(LIFE))


LOADING: Row = Notice("loading", "is loaded", 0), (), RecordExtra()
NAMED: Row = Notice("engine", "the first engine", 1), (), RecordExtra(engine="the first engine")
EXPECTED: dict[bytes, list[Row]] = {
    PACKED: [*map(token, range(40)), end(40)],
    PACKED_STEERED: [
        token(0),
        steered(1),
        *map(token, range(2, 40)),
        end(40, (8, 9), (IdSpan(0, 2),)),
    ],
    STEERED: [token(0), steered(1), token(2), end(3)],
    RUNNING: [token(0), steered(1), token(2)],
    ENGINE: [LOADING, NAMED, token(2)],
    EMPTY: [],
}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with closing(apsw.Connection(str(path))) as file:
        file.execute(LAYOUT_6.read_text(encoding="utf-8"))
    return path


def version(path: Path) -> int:
    with closing(apsw.Connection(str(path))) as file:
        return int(str(file.execute("PRAGMA user_version").get))


def understood(records: Sequence[Record]) -> list[Row]:
    return [(decode(each.frame)[1], each.ids, RecordExtra.of(each)) for each in records]


async def check_all(ledger: Ledger) -> None:
    for stream, expected in EXPECTED.items():
        assert understood(await ledger.read(stream, 0, 100)) == expected
        frames = [decode(raw)[1] for raw in await ledger.frames(stream, 0, 100)]
        assert frames == [frame for frame, _, _ in expected]
    for stream in (PACKED, PACKED_STEERED, STEERED):
        *_, last = await ledger.read(stream, 0, 100)
        assert StreamLife.of(last) == LIFE


async def test_every_token_statistic_and_fingerprint_is_there(old: Path) -> None:
    assert version(old) == 6
    for _ in range(2):  # and at every later start
        async with opened_file(old) as ledger:
            await check_all(ledger)
            assert await ledger.unfinished() == [RUNNING, ENGINE, EMPTY]
            assert await ledger.objects.get(ObjectKey("stream", "one"), ["value"]) == {
                "value": b"1"
            }
            assert await ledger.made_by("key 3", b"h") is not None
        assert version(old) == SCHEMA_VERSION


async def test_a_file_of_layout_7_gets_the_tables_of_branches(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with opened_file(path) as ledger:
        await ledger.create(new(A))
        records = await finish(ledger, A, 3)
    with closing(apsw.Connection(str(path))) as file:
        file.execute(TO_LAYOUT_7)
    async with opened_file(path) as ledger:
        assert await ledger.read(A, 0, 10) == records
        await ledger.create(replace(new(B), base=BranchPoint(A, 2)))
        assert await ledger.read(B, 0, 10) == records[:2]
    assert version(path) == SCHEMA_VERSION


async def test_old_segments_are_packed_anew_with_all_that_they_hold(old: Path) -> None:
    retention = RetentionSettings(cold_after_s=1, pause_s=0)
    ledger = await SqliteLedger.open(old, lambda: NOW_MS, retention=retention)
    try:
        await ledger.expire()
        await check_all(ledger)
    finally:
        await ledger.close()
    with closing(apsw.Connection(str(old))) as file:
        coding = file.execute("SELECT coding FROM segment WHERE sid = 3").get
    assert coding == COLD, "the plain segment of layout 6 became a cold one of today"
    async with opened_file(old) as again:
        await check_all(again)


async def test_running_streams_go_on_after_it(old: Path) -> None:
    async with opened_file(old) as ledger:
        stage = Stage(ledger)
        await stage.runs.restore([RUNNING, ENGINE, EMPTY])
        slot = stage.slots[0]
        await stage.ready(slot)
        orders = [order for _, order in slot.sent if isinstance(order, StartRun)]
        assert {(order.generated_ids, order.steered) for order in orders} == {
            ((7, 7, 8, 9, 10, 9), (IdSpan(2, 2), IdSpan(4, 1))),
            ((9,), ()),
            ((), ()),
        }
        assert not [order for _, order in slot.sent if isinstance(order, Steer)]
        *_, last = await ledger.read(ENGINE, 0, 100)
        notice = decode(last.frame)[1]
        assert isinstance(notice, Notice)
        assert notice.code == "inexact", "its log says that another engine made it"
        assert len(await ledger.read(RUNNING, 0, 100)) == 3


async def test_a_process_that_only_reads_it_is_told_what_brings_it_up_to_date(old: Path) -> None:
    with pytest.raises(ConfigError, match=f"version 6, not {SCHEMA_VERSION}") as refused:
        async with reading(old):
            pass
    assert "tailrace ledger gc" in (refused.value.hint or "")
    async with opened_file(old):
        pass
    async with reading(old) as reader:
        assert (await verify(reader)).whole
        lines = [line async for line in json_lines(reader, reader.streams())]
    assert any('"steered": [[1, 2], [3, 1]]' in line for line in lines)
    assert any('"engine": "the first engine"' in line for line in lines)


async def test_a_damaged_log_row_stays_as_damaged_as_it_was(old: Path) -> None:
    with closing(apsw.Connection(str(old))) as file:
        blob: Any = file.execute("SELECT batch FROM log WHERE seq = 3").get
        bad = blob[:-1] + bytes([blob[-1] ^ 1])
        file.execute("UPDATE log SET batch = ? WHERE seq = 3", (bad,))
    async with opened_file(old) as ledger:
        assert understood(await ledger.read(RUNNING, 0, 2)) == EXPECTED[RUNNING][:2]
        assert understood(await ledger.read(ENGINE, 0, 9)) == EXPECTED[ENGINE]
        append = Append(RUNNING, 1, 3, Record((await ledger.frames(RUNNING, 0, 1))[0], (1,)))
        assert await ledger.append([append]) == []


async def test_a_file_of_layout_7_gets_the_table_of_usage(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with opened_file(path) as ledger:
        await ledger.create(new())
        await finish_counted(ledger, A, OF_A)
    with closing(apsw.Connection(str(path))) as file:
        file.execute(TO_LAYOUT_7)
    for _ in range(2):
        async with opened_file(path) as ledger:
            assert (await ledger.usage(UsageQuery())).total == UsageCounts()
            assert len(await ledger.read(A, 0, 10)) == 3
        assert version(path) == SCHEMA_VERSION
    async with opened_file(path) as ledger:
        await ledger.create(new(B))
        await finish_counted(ledger, B, OF_B)
        assert (await ledger.usage(UsageQuery())).total.streams == 1
