"""What a ledger makes of a compactor that fails it, and of streams that go meanwhile."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import apsw
import pytest
from structlog.testing import capture_logs

from ledger.errors import Damaged, NotFound
from ledger.sqlite import dictionary_maker
from ledger.sqlite.cold import Packed
from ledger.sqlite.cold_packer import MAX_TRIES
from ledger.sqlite.compaction import Learnt
from ledger.sqlite.compactor import CompactorLost, InlineCompactor
from ledger.sqlite.ledger import SqliteLedger
from ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import (
    COLD_AFTER_S,
    Clock,
    all_is_there,
    codings,
    fill,
    opened,
    sentence,
    store,
)
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs

pytestmark = pytest.mark.anyio

STREAMS = 20
SEGMENTS = 2 * STREAMS


@pytest.fixture(autouse=True)
def learns_from_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary_maker, "MIN_TRAIN_FRAMES", 2_000)


class Failing(InlineCompactor):
    """Is lost with the question of this number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._left = at

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.known = ()
            raise CompactorLost("gone")

    async def know(self, coding: int, row: bytes) -> None:
        self._count()
        await super().know(coding, row)

    async def begin(self) -> None:
        self._count()
        await super().begin()

    async def sample(self, rows: Sequence[SegmentRow]) -> int:
        self._count()
        return await super().sample(rows)

    async def learn(self) -> Learnt:
        self._count()
        return await super().learn()

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        self._count()
        return await super().pack(rows, coding)


@pytest.mark.parametrize("at", [1, 2, 10, 21, 22, 23, 24, 30, 40, 43])
async def test_whatever_question_it_is_lost_with_the_next_sweep_packs_the_rest(
    tmp_path: Path, at: int
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, Failing(at)) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        with capture_logs() as said:
            await ledger.expire()
        assert [line["event"] for line in said if line["log_level"] == "warning"] == [
            "ledger.compactor_lost"
        ]
        assert dict(codings(tmp_path))[0] > 0
        await all_is_there(ledger, held)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(1, STREAMS)]
        await all_is_there(ledger, held)


class Lying(InlineCompactor):
    """Flips a bit in all that it gives."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self._learns = learns

    async def learn(self) -> Learnt:
        learnt = await super().learn()
        return learnt._replace(row=_flipped(learnt.row)) if self._learns else learnt

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        packed = await super().pack(rows, coding)
        assert packed is not None
        row = packed.row
        return packed._replace(row=row._replace(records=_flipped(row.records)))


def _flipped(blob: bytes) -> bytes:
    return blob[:-1] + bytes((blob[-1] ^ 1,))


@pytest.mark.parametrize("learns", [False, True])
async def test_nothing_is_replaced_by_what_does_not_match_its_checksum(
    tmp_path: Path, learns: bool
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, Lying(learns=learns)) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        with capture_logs() as said:
            await ledger.expire()
        [why] = [line["error"] for line in said if line["event"] == "ledger.compactor_lost"]
        assert "does not match its checksum" in why
        assert codings(tmp_path) == [(0, SEGMENTS)]
        await all_is_there(ledger, held)


class Allergic(InlineCompactor):
    """Is lost with every segment of one stream."""

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        if rows[0].sid == 4:
            raise CompactorLost("gone")
        return await super().pack(rows, coding)


async def test_a_stream_that_costs_every_compactor_is_left_as_it_is(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, Allergic()) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        for _ in range(MAX_TRIES - 1):
            await ledger.expire()
            assert codings(tmp_path) == [(0, SEGMENTS - 2 * 3), (1, 3)]
        with capture_logs() as said:
            await ledger.expire()
        [stream] = [s["stream"] for s in said if s["event"] == "stream.cannot_be_packed"]
        assert stream == list(held)[3].hex()
        assert codings(tmp_path) == [(0, 2), (1, STREAMS - 1)]
        await all_is_there(ledger, held)


class Absent(InlineCompactor):
    """Learns, and then cannot be started any more."""

    async def know(self, coding: int, row: bytes) -> None:
        raise CompactorLost("no process")


async def test_no_stream_is_blamed_for_a_compactor_that_is_not_there(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, Absent()) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        for _ in range(2 * MAX_TRIES):
            await ledger.expire()
    async with opened(tmp_path, clock) as ledger:
        await ledger.expire()
        assert codings(tmp_path) == [(1, STREAMS)]
        await all_is_there(ledger, held)


class Interrupted(InlineCompactor):
    """While it packs the streams that it is given, they are deleted."""

    ledger: SqliteLedger

    def __init__(self) -> None:
        super().__init__()
        self.doomed: dict[int, bytes] = {}

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        doomed = self.doomed.get(rows[0].sid)
        if doomed is not None:
            await self.ledger.delete(doomed)
        return await super().pack(rows, coding)


async def test_a_stream_that_is_deleted_while_it_is_packed_leaves_nothing(tmp_path: Path) -> None:
    clock, compactor = Clock(), Interrupted()
    async with opened(tmp_path, clock, compactor) as ledger:
        held = await fill(ledger, STREAMS)
        compactor.ledger = ledger
        compactor.doomed = {sid: list(held)[sid - 1] for sid in range(1, 6)}
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        for stream in compactor.doomed.values():
            del held[stream]
            with pytest.raises(NotFound):
                await ledger.info(stream)
        await all_is_there(ledger, held)
    assert codings(tmp_path) == [(1, STREAMS - 5)]


async def test_a_dictionary_that_is_damaged_is_named_and_another_one_is_made(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        lost = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
    connection = apsw.Connection(str(tmp_path / "ledger.db"))
    connection.execute("UPDATE dictionary SET bytes = substr(bytes, 2)")
    connection.close()
    async with opened(tmp_path, clock) as ledger:
        held = {}
        for number in range(100, 110):
            records = sentence(300, seed=number)
            held[await store(ledger, number, records)] = records
        clock.pass_s(COLD_AFTER_S)
        with capture_logs() as said:
            await ledger.expire()
        [error] = [line["error"] for line in said if line["log_level"] == "error"]
        assert "dictionary 1" in error
        assert codings(tmp_path) == [(1, STREAMS), (2, 10)]
        await all_is_there(ledger, held)
        with pytest.raises(Damaged, match="dictionary 1"):
            await ledger.read(next(iter(lost)), 0, 1)


async def test_a_reader_is_not_told_of_a_compactor(tmp_path: Path) -> None:
    """The dictionary is loaded by who reads first, piece by piece, with other readers beside."""
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
    async with opened(tmp_path, clock, Failing(1)) as ledger:
        await all_is_there(ledger, held)


async def test_a_power_cut_while_segments_are_packed_takes_nothing_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledger.sqlite.file.CHECKPOINT_PAGES", 20)
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
