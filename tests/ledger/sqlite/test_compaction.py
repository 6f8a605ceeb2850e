"""Which segments become cold, and what becomes of streams meanwhile."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import Damaged, NotFound
from tailrace.ledger.frame import Token, encode
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite import compaction
from tailrace.ledger.sqlite.compaction import (
    COLD_BYTES,
    COLD_FRAMES,
    RUN_SEGMENTS,
    Compactor,
    SegmentRun,
    take_run,
)
from tailrace.ledger.sqlite.encoding import COLD, PLAIN, Unpacked, pack_cold
from tailrace.ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import (
    COLD_AFTER_S,
    Clock,
    all_is_there,
    codings,
    extend,
    fill,
    flip_bit,
    opened,
    plain_rows,
    sentence,
    store,
)
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs

pytestmark = pytest.mark.anyio

# ---- runs ----


def plain(first: int, length: int, size: int = 100, coding: int = PLAIN) -> SegmentRow:
    return SegmentRow(1, first, length, coding, bytes(size))


def test_a_run_is_bounded_in_frames_bytes_and_segments() -> None:
    by_frames = [plain(at, 1_000) for at in range(0, 5_000, 1_000)]
    assert take_run(by_frames, 0, None).beyond == COLD_FRAMES // 1_000 * 1_000
    by_bytes = [plain(at, 10, size=COLD_BYTES // 2) for at in range(0, 50, 10)]
    assert take_run(by_bytes, 0, None).beyond == 20
    by_segments = [plain(at, 1) for at in range(100)]
    assert len(take_run(by_segments, 0, None).rows) == RUN_SEGMENTS


def test_a_run_passes_over_cold_segments_and_ends_before_the_next() -> None:
    rows = [plain(0, 10, coding=COLD), plain(10, 10), plain(20, 10), plain(30, 10, coding=COLD)]
    run = take_run(rows, 0, None)
    assert (run.rows, run.beyond) == (rows[1:3], 30)


def test_a_run_ends_at_a_gap_and_before_what_is_still_warm() -> None:
    assert take_run([plain(0, 10), plain(20, 10)], 0, None).beyond == 10
    assert take_run([plain(0, 10), plain(10, 10)], 0, 15).beyond == 10
    assert take_run([plain(0, 10)], 0, 5).beyond == 0


def test_a_segment_that_holds_fewer_frames_than_its_row_says_is_damaged() -> None:
    [row, *_] = plain_rows(7, sentence(300))
    run = take_run([row._replace(length=51)], 0, None)
    with pytest.raises(Damaged, match="segment at index 0 has 50 frames, not 51"):
        run.unpacked()


# ---- in a ledger ----


async def test_ended_streams_become_cold_and_read_the_same(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        await ledger.expire()
        assert codings(tmp_path) == [(0, 40)]
        clock.pass_s(COLD_AFTER_S)
        assert await ledger.expire() == 0
        assert codings(tmp_path) == [(1, 20)]
        await all_is_there(ledger, held)
    async with opened(tmp_path, clock) as ledger:
        await all_is_there(ledger, held)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(1, 20)]


async def test_a_stream_that_is_read_stays_plain(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        clock.pass_s(COLD_AFTER_S / 2)
        read = next(iter(held))
        await ledger.read(read, 0, 10)
        clock.pass_s(COLD_AFTER_S / 2)
        await ledger.expire()
        assert codings(tmp_path) == [(0, 2), (1, 19)]


async def test_a_segment_that_would_hold_the_loop_up_stays_plain(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        records = sentence(100, ends=False)
        records.append(Record(encode(Token("x" * COLD_BYTES, 100)), (1,)))
        records += [Record(encode(Token(" more", n)), (2,)) for n in range(101, 200)]
        records.append(sentence(200)[-1])
        held = {await store(ledger, 1, records): records}
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert dict(codings(tmp_path))[0] == 1
        await all_is_there(ledger, held)
        assert await ledger.expire() == 0  # and is not looked at again


async def test_of_a_long_running_stream_the_old_part_becomes_cold(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        records = sentence(4 * COLD_FRAMES, ends=False)
        stream = await store(ledger, 1, records)
        await ledger.expire()
        cold = dict(codings(tmp_path))
        assert cold[1] >= 2
        assert cold[0] > 1
        more = [
            *records,
            *[Record(encode(Token(" more", len(records) + n)), (1,)) for n in range(500)],
        ]
        await extend(ledger, stream, more[len(records) :], len(records))
        await all_is_there(ledger, {stream: more})
    async with opened(tmp_path, clock) as ledger:
        await all_is_there(ledger, {stream: more})


async def test_a_damaged_cold_segment_names_its_stream_and_spares_the_others(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
    flip_bit(tmp_path, 1, 20)
    bad = next(iter(held))
    async with opened(tmp_path, clock) as ledger:
        with pytest.raises(Damaged, match=f"stream {bad.hex()}: segment at index 0"):
            await ledger.read(bad, 0, 10)
        del held[bad]
        await all_is_there(ledger, held)


async def test_a_damaged_plain_segment_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
    flip_bit(tmp_path, 2, 50)
    bad = list(held)[1]
    clock.pass_s(COLD_AFTER_S)
    async with opened(tmp_path, clock) as ledger:
        with capture_logs() as said:
            await ledger.expire()
        [named] = [line["stream"] for line in said if line["event"] == "stream.damaged"]
        assert named == bad.hex()
        assert codings(tmp_path) == [(0, 2), (1, 19)]
        with pytest.raises(Damaged, match=bad.hex()):
            await ledger.read(bad, 0, 10)
        del held[bad]
        await all_is_there(ledger, held)


def renumber(sid: int, first: int, records: Unpacked) -> SegmentRow:
    return pack_cold(sid, first, records._replace(ids=[(1, *some) for some in records.ids]))


def flip(sid: int, first: int, records: Unpacked) -> SegmentRow:
    row = pack_cold(sid, first, records)
    return row._replace(records=row.records[:-1] + bytes((row.records[-1] ^ 1,)))


@pytest.mark.parametrize("mistake", [renumber, flip])
async def test_nothing_is_replaced_by_what_is_not_the_same(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[int, int, Unpacked], SegmentRow],
) -> None:
    monkeypatch.setattr(compaction, "pack_cold", mistake)
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger, 3)
        clock.pass_s(COLD_AFTER_S)
        with capture_logs() as said:
            await ledger.expire()
        named = [line["stream"] for line in said if line["event"] == "stream.cannot_be_packed"]
        assert named == [stream.hex() for stream in held]
        assert codings(tmp_path) == [(0, 6)]
        await all_is_there(ledger, held)


async def test_a_stream_that_is_deleted_while_it_is_packed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger)
        streams = list(held)
        pack = Compactor._pack

        async def delete_first(self: Compactor, run: SegmentRun, name: str) -> None:
            sid = run.rows[0].sid
            if sid <= 5:
                await ledger.delete(streams[sid - 1])
                del held[streams[sid - 1]]
            await pack(self, run, name)

        monkeypatch.setattr(Compactor, "_pack", delete_first)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        for stream in streams[:5]:
            with pytest.raises(NotFound):
                await ledger.info(stream)
        await all_is_there(ledger, held)
    assert codings(tmp_path) == [(1, 15)]


async def test_a_power_cut_while_segments_are_packed_takes_nothing_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.ledger.sqlite.disk.checkpointer.CHECKPOINT_PAGES", 20)
    first = tmp_path / "first"
    first.mkdir()
    clock = Clock()
    async with opened(first, clock) as ledger:
        held = await fill(ledger, 8)
    clock.pass_s(COLD_AFTER_S)
    found = set()
    for seed in range(20):
        random, folder, left = Random(seed), tmp_path / f"{seed}", tmp_path / f"{seed}left"
        for made in (folder, left):
            made.mkdir()
        (folder / "ledger.db").write_bytes((first / "ledger.db").read_bytes())
        disk = Disk(random)
        vfs = FaultyVfs("faulty", disk)
        async with opened(folder, clock, vfs="faulty") as ledger:
            disk.call_at_write(random.randint(1, 60), lambda: disk.cut_power(left))  # noqa: B023
            await ledger.expire()
        vfs.unregister()
        async with opened(left, clock) as ledger:
            await all_is_there(ledger, held)
        found.add(dict(codings(left)).get(1, 0))
    assert len(found) > 3, "every cut left the same"
