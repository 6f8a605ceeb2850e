"""Damaged bytes of a ledger file: which streams are affected, and which continue."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import apsw
import pytest
from structlog.testing import capture_logs

from tailrace.ledger.errors import ConfigError, Damaged, LedgerAway, LedgerFull
from tailrace.ledger.flow.credit_window import Window
from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    StreamEnd,
    StreamError,
    Token,
    decode,
    encode,
    with_corr,
)
from tailrace.ledger.inspection.commands import reading, verify
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite, Record, Refusal
from tailrace.ledger.sqlite.capacity import MIB
from tailrace.ledger.sqlite.disk.checksum import crc_of
from tailrace.ledger.sqlite.disk.file import SqliteFile
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.edges.feed import Feed
from tailrace.origin.generations.presence import Readers
from tailrace.origin.generations.takeover import find
from tests.ledger.backends import Clock, opened_file
from tests.ledger.sqlite.faulty_vfs import Disk, FaultyVfs

pytestmark = pytest.mark.anyio

PAGE_BYTES = 4096
LEAF, INDEX_LEAF, LEAF_HEADER_BYTES = 13, 10, 8  # https://sqlite.org/fileformat2.html#b_tree_pages
COUNT = 40
ROTTEN, WHOLE, RUNNING = (bytes([n]) * 16 for n in (1, 2, 3))
STREAMS = (ROTTEN, WHOLE, RUNNING)
TTL_S = 60.0


def record(stream: bytes, index: int) -> Record:
    text = f"{stream.hex()}:{index}:" + "x" * 900
    return Record(encode(Token(text, index)), (index,))


def mark(stream: bytes, index: int) -> bytes:
    """Bytes that only this record has."""
    return f"{stream.hex()}:{index}:".encode()


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """Return a ledger of three streams in segments; the first two have ended."""
    path = tmp_path / "ledger.db"
    async with opened_file(path) as ledger:
        for stream in STREAMS:
            await ledger.create(NewStream(stream, "{}", Durability.PROCESS, TTL_S))
        for index in range(COUNT):
            await ledger.append([Append(s, 1, index, record(s, index)) for s in STREAMS])
        end = Record(encode(StreamEnd(COUNT, FinishReason.STOP, COUNT, 0)), ())
        await ledger.append([Append(s, 1, COUNT, end) for s in (ROTTEN, WHOLE)])
    return path


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def overwrite(path: Path, page: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        file.write(data)


def pages_of(path: Path, stream: bytes) -> Iterator[int]:
    """Pages with text of this stream and of no other."""
    data = path.read_bytes()
    for page in range(1, len(data) // PAGE_BYTES):
        held = data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        if [s for s in STREAMS if s.hex().encode() in held] == [stream]:
            yield page


def rot(path: Path, stream: bytes, index: int) -> None:
    """Flip a byte of a record wherever it lies: pages that were the log's may hold it, too."""
    data, text = path.read_bytes(), mark(stream, index)
    at = data.find(text)
    assert at >= 0
    while at >= 0:
        flip(path, at)
        at = data.find(text, at + 1)


async def read_all(ledger: SqliteLedger, stream: bytes) -> list[Record]:
    return (await ledger.read(stream, 0, COUNT + 10))[:COUNT]


def whole(stream: bytes) -> list[Record]:
    return [record(stream, index) for index in range(COUNT)]


async def require_that_others_go_on(ledger: SqliteLedger) -> None:
    assert await read_all(ledger, WHOLE) == whole(WHOLE)
    assert await read_all(ledger, RUNNING) == whole(RUNNING)
    tip = (await ledger.info(RUNNING)).next_index
    assert await ledger.append([Append(RUNNING, 1, tip, record(RUNNING, tip))]) == []
    other = NewStream(bytes([9]) * 16, "{}", Durability.POWER, TTL_S)
    await ledger.create(other)


async def test_a_flipped_byte_costs_the_stream_it_lies_in_and_no_other(path: Path) -> None:
    rot(path, ROTTEN, 20)
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match=f"stream {ROTTEN.hex()}: segment at index") as error:
            await ledger.read(ROTTEN, 20, 1)
        assert not error.value.retryable
        assert await ledger.read(ROTTEN, 0, 2) == whole(ROTTEN)[:2]  # undamaged records can be read
        assert (await ledger.frames(ROTTEN, COUNT - 1, 1)) == [record(ROTTEN, COUNT - 1).frame]
        await require_that_others_go_on(ledger)


async def test_an_unreadable_page_costs_the_stream_it_lies_in_and_no_other(path: Path) -> None:
    pages = list(pages_of(path, ROTTEN))
    assert len(pages) > 5
    for page in pages:
        copy = path.with_name(f"{page}.db")
        shutil.copy(path, copy)
        overwrite(copy, page, bytes(PAGE_BYTES))
        async with opened_file(copy) as ledger:
            with pytest.raises(Damaged, match=f"stream {ROTTEN.hex()}: "):
                await read_all(ledger, ROTTEN)
            await require_that_others_go_on(ledger)


@contextmanager
def suppress_into(told: list[str]) -> Iterator[None]:
    try:
        yield
    except (Damaged, ConfigError) as error:
        told.append(str(error))


async def test_whatever_page_rots_nothing_wrong_is_read(path: Path) -> None:
    """It says so, naming the stream or the file, or it was not needed."""
    size = path.stat().st_size // PAGE_BYTES
    told: list[str] = []
    for page in range(size):
        copy = path.with_name(f"{page}.db")
        shutil.copy(path, copy)
        overwrite(copy, page, Random(page).randbytes(PAGE_BYTES))
        with suppress_into(told):
            async with opened_file(copy) as ledger:
                for stream in STREAMS:
                    assert await read_all(ledger, stream) == whole(stream)
    names = [str(path.parent), *(stream.hex() for stream in STREAMS)]
    assert len(told) > size // 4  # the others are free, or hold what was not asked for
    assert all(any(name in error for name in names) for error in told)


@pytest.mark.parametrize(
    "rot", [bytes(PAGE_BYTES), Random(1).randbytes(PAGE_BYTES)], ids=["zeros", "noise"]
)
async def test_a_rotten_stream_that_expires_does_not_stop_the_ledger(
    path: Path, rot: bytes
) -> None:
    for page in pages_of(path, ROTTEN):
        copy, clock = path.with_name(f"{page}.db"), Clock()
        shutil.copy(path, copy)
        overwrite(copy, page, rot)
        async with opened_file(copy, clock) as ledger:
            clock.now += int(TTL_S * 1000)
            await ledger.expire()
            tip = (await ledger.info(RUNNING)).next_index
            assert await ledger.append([Append(RUNNING, 1, tip, record(RUNNING, tip))]) == []
            assert await read_all(ledger, RUNNING) == whole(RUNNING)


class Outlet:
    """A link that keeps what it is sent."""

    def __init__(self) -> None:
        self.congested = False
        self.sent: list[bytes] = []
        self.done = asyncio.Event()

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def relay(self, frames: Sequence[bytes], corr: int) -> None:
        self.send(b"".join(with_corr(frame, corr) for frame in frames))

    def closed(self, corr: int) -> None:
        self.done.set()


async def test_a_reader_of_a_rotten_stream_is_told_so(path: Path) -> None:
    rot(path, ROTTEN, 0)
    async with opened_file(path) as ledger:
        outlet = Outlet()
        feed = Feed(outlet, 7, Window.starting(0, 100), ledger, Readers())
        feed.attach(ROTTEN, (await ledger.info(ROTTEN)).next_index)
        await outlet.done.wait()
        corr, error = decode(outlet.sent[-1])
        assert isinstance(error, StreamError)
        assert (corr, error.code, error.retryable) == (7, "damaged", False)
        assert ROTTEN.hex() in error.message


def rot_log_row(path: Path, seq: int, *, at: int) -> None:
    """Flip a bit of one row of the log."""
    connection = apsw.Connection(str(path))
    [(blob,)] = connection.execute("SELECT batch FROM log WHERE seq = ?", (seq,)).fetchall()
    assert isinstance(blob, bytes)
    bad = bytearray(blob)
    bad[at] ^= 0x10
    connection.execute("UPDATE log SET batch = ? WHERE seq = ?", (bytes(bad), seq))
    connection.close()


def short(stream: bytes, index: int) -> Record:
    return Record(encode(Token(f"{stream[0]}:{index}", index)), (index,))


FRAMES, HEAD = -1, 9
"""Where a log row is about frames, and where it says whose they are."""


async def logged(path: Path, *rows: dict[bytes, int]) -> None:
    """Make a ledger with three running streams.

    Each of `rows` is a row of the log, with a number of records for each stream.
    """
    next_index = dict.fromkeys(STREAMS, 0)
    async with opened_file(path) as ledger:
        for stream in STREAMS:
            await ledger.create(NewStream(stream, "{}", Durability.PROCESS, TTL_S))
        for row in rows:
            batch = []
            for stream, count in row.items():
                first = next_index[stream]
                next_index[stream] += count
                batch += [
                    Append(stream, 1, at, short(stream, at)) for at in range(first, first + count)
                ]
            assert await ledger.append(batch) == []


async def require_a_hole(ledger: SqliteLedger, stream: bytes, begin: int, end: int) -> None:
    """Check that exactly the records from `begin` to before `end` of a stream are lost."""
    before = [short(stream, index) for index in range(begin)]
    assert await ledger.read(stream, 0, begin) == before
    for index in (begin, end - 1):
        with pytest.raises(Damaged, match=f"stream {stream.hex()}: index {index} is missing"):
            await ledger.read(stream, index, 1)
    tip = (await ledger.info(stream)).next_index
    assert tip >= end
    assert await ledger.read(stream, end, 100) == [short(stream, i) for i in range(end, tip)]


async def require_whole(ledger: SqliteLedger, stream: bytes, count: int) -> None:
    assert await ledger.read(stream, 0, 100) == [short(stream, index) for index in range(count)]


async def damaged_streams(path: Path) -> list[str | None]:
    async with reading(path) as reader:
        return [finding.stream for finding in (await verify(reader)).findings]


async def test_a_rotten_log_row_costs_the_streams_that_it_is_about(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    rows = [{ROTTEN: 1, WHOLE: 1}, {ROTTEN: 2, RUNNING: 1}, {ROTTEN: 1, WHOLE: 1}]
    await logged(path, *rows)
    rot_log_row(path, 2, at=FRAMES)
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            await require_whole(ledger, WHOLE, 2)
            await require_a_hole(ledger, ROTTEN, 1, 3)
            await require_a_hole(ledger, RUNNING, 0, 1)
            for stream, index in ((ROTTEN, 4), (RUNNING, 1), (WHOLE, 2)):
                append = Append(stream, 1, index, short(stream, index))
                assert await ledger.append([append]) == []
    [row] = [line for line in said if line["event"] == "ledger.log_row_damaged"]
    assert "ledger.db: log row 2 does not match its checksum" in row["error"]
    named = [line["stream"] for line in said if line["event"] == "stream.damaged"]
    assert set(named) == {ROTTEN.hex(), RUNNING.hex()}
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            await require_whole(ledger, WHOLE, 3)
            await require_a_hole(ledger, ROTTEN, 1, 3)
            await require_a_hole(ledger, RUNNING, 0, 1)
    assert not said
    assert await damaged_streams(path) == [ROTTEN.hex(), RUNNING.hex()]


async def test_no_index_is_given_twice_where_the_last_log_row_has_rotted(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    await logged(path, {ROTTEN: 2, WHOLE: 2}, {ROTTEN: 3})
    rot_log_row(path, 2, at=FRAMES)
    for _ in range(3):  # whatever becomes of the log meanwhile
        async with opened_file(path) as ledger:
            assert (await ledger.info(ROTTEN)).next_index == 5
            await require_a_hole(ledger, ROTTEN, 2, 5)
    async with opened_file(path) as ledger:
        end = Record(encode(StreamEnd(5, FinishReason.FAILED, 5, 0)), ())
        assert await ledger.append([Append(ROTTEN, 1, 5, end)]) == []
    async with opened_file(path) as ledger:
        assert (await ledger.info(ROTTEN)).ended
        await require_whole(ledger, WHOLE, 2)


async def test_a_row_whose_head_has_rotted_costs_what_no_later_one_shows_to_be_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    await logged(path, {WHOLE: 1, RUNNING: 2}, {ROTTEN: 2, RUNNING: 1}, {WHOLE: 1, RUNNING: 1})
    rot_log_row(path, 2, at=HEAD)
    for _ in range(2):
        async with opened_file(path) as ledger:
            await require_whole(ledger, WHOLE, 2)
            await require_a_hole(ledger, RUNNING, 2, 3)
            tip = (await ledger.info(ROTTEN)).next_index
            assert tip > 2
            await require_a_hole(ledger, ROTTEN, 0, tip)
    assert await damaged_streams(path) == [ROTTEN.hex(), RUNNING.hex()]


def last_page_of_the_log(path: Path) -> tuple[int, bytes]:
    """Return the leaf with its last rows, counted from 0, and what is on it."""
    reader, data = apsw.Connection(str(path)), path.read_bytes()
    number = int(str(reader.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'log'").get))
    reader.close()
    while (page := data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES])[0] != LEAF:
        number = int.from_bytes(page[8:12], "big")
    return number - 1, page


async def test_a_log_page_whose_rows_are_zeros_is_named_and_the_ledger_is_not_opened(
    path: Path,
) -> None:
    """SQLite reads a partly written page of zeros as row 0, with NULL in each column."""
    async with opened_file(path) as ledger:
        tip = (await ledger.info(RUNNING)).next_index
        await ledger.append([Append(RUNNING, 1, tip, record(RUNNING, tip))])
    number, page = last_page_of_the_log(path)
    overwrite(path, number, page[:LEAF_HEADER_BYTES] + bytes(PAGE_BYTES - LEAF_HEADER_BYTES))
    with pytest.raises(Damaged, match=r"ledger\.db: not all log rows"):
        await SqliteLedger.open(path, Clock())


# ---- rows ----

KEY = ObjectKey("counter", "one")


async def test_a_value_that_has_rotted_is_named_and_not_given(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with opened_file(path) as ledger:
        epoch = (await ledger.objects.claim(KEY)).epoch
        puts = {"n": b"0 5555555", "other": b"whole"}
        await ledger.objects.write(ObjectWrite(KEY, epoch, puts=puts))
    flip(path, path.read_bytes().index(b"0 5555555") + 2)
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match="value b'n' of object 1 does not match its checksum"):
            await ledger.objects.get(KEY, ["n"])
        with pytest.raises(Damaged, match="value b'n' of object 1"):
            await ledger.objects.list(KEY)
        assert await ledger.objects.get(KEY, ["other"]) == {"other": b"whole"}


async def test_an_object_whose_row_has_rotted_is_damaged_and_no_other(tmp_path: Path) -> None:
    """An epoch that is too low would let an owner write that was fenced."""
    path, other = tmp_path / "ledger.db", ObjectKey("counter", "two")
    async with opened_file(path) as ledger:
        for key in (KEY, other):
            epoch = (await ledger.objects.claim(key)).epoch
            await ledger.objects.write(ObjectWrite(key, epoch, puts={"n": b"1"}))
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE object SET epoch = epoch - 1 WHERE name = ?", (KEY.name,))
    connection.close()
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match="the row of object 1 does not match its checksum"):
            await ledger.objects.claim(KEY)
        await ledger.objects.claim(other)
        assert await ledger.objects.get(other, ["n"]) == {"n": b"1"}


def test_a_checksum_tells_where_one_column_ends_and_the_next_begins() -> None:
    assert crc_of((1, "ab", b"c")) != crc_of((1, "a", b"bc"))
    assert crc_of((1, "1", b"c")) != crc_of((11, "", b"c"))


@pytest.mark.parametrize("rot", [b"1", b"\xff"], ids=["another_text", "no_text"])
async def test_a_stream_whose_row_has_rotted_is_damaged_and_no_other(
    path: Path, rot: bytes
) -> None:
    """Its row holds `{}` for a recipe; where it lies, another one is put."""
    connection = apsw.Connection(str(path))
    sql = "UPDATE stream SET recipe = CAST(? AS TEXT), cold = 0 WHERE id = ?"
    connection.execute(sql, (rot, ROTTEN))
    connection.close()
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match=f"stream {ROTTEN.hex()}: its row does not match"):
            await ledger.info(ROTTEN)
        assert await find(ledger, ROTTEN) is None  # an origin leaves it, and takes the others
        await require_that_others_go_on(ledger)


async def test_a_step_for_a_rotten_row_is_refused_for_that_stream_alone(path: Path) -> None:
    other = bytes([9]) * 16
    async with opened_file(path) as ledger:
        await ledger.create(NewStream(other, "{}", Durability.PROCESS, TTL_S))
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE stream SET recipe = '1' WHERE id = ?", (other,))
    connection.close()
    async with opened_file(path) as ledger:
        bad = Append(other, 1, 0, record(other, 0))
        good = [Append(RUNNING, 1, index, record(RUNNING, index)) for index in (COUNT, COUNT + 1)]
        [refusal] = await ledger.append([good[0], bad, good[1]])
        assert refusal.append == bad
        assert isinstance(refusal.error, Damaged)
        assert await ledger.read(RUNNING, COUNT, 9) == [each.record for each in good]


async def test_whatever_page_rots_the_unfinished_streams_of_all_others_are_found(
    tmp_path: Path,
) -> None:
    path, count = tmp_path / "ledger.db", 300
    async with opened_file(path) as ledger:
        made = {index.to_bytes(16, "big") for index in range(count)}
        for stream in made:
            await ledger.create(NewStream(stream, "x" * 200, Durability.PROCESS, TTL_S))
    data, lost = path.read_bytes(), list[int]()
    for page in range(1, len(data) // PAGE_BYTES):
        if data[page * PAGE_BYTES] not in (LEAF, INDEX_LEAF):
            continue
        copy = path.with_name(f"{page}.db")
        shutil.copy(path, copy)
        async with opened_file(copy) as ledger:
            overwrite(copy, page, bytes(PAGE_BYTES))  # when what a start needs has been read
            found = set(await ledger.unfinished())
            assert found <= made
            lost.append(count - len(found))
    assert len(lost) > 20
    assert max(lost) <= 20  # the number of rows on a page
    assert sum(lost) >= count / 2  # and those on the page are lost indeed


READ_ERRORS = [
    *(apsw.SQLITE_IOERR_READ, apsw.SQLITE_BUSY, apsw.SQLITE_LOCKED, apsw.SQLITE_NOMEM),
    *(apsw.SQLITE_CANTOPEN, apsw.SQLITE_PROTOCOL, apsw.SQLITE_INTERRUPT),
]


@pytest.mark.parametrize("error", READ_ERRORS)
async def test_a_read_that_fails_costs_its_caller_a_retry_and_nobody_else(
    tmp_path: Path, error: int
) -> None:
    disk = Disk(Random(0))
    vfs = FaultyVfs("faulty", disk)
    path, recipe = tmp_path / "ledger.db", "x" * 3 * PAGE_BYTES
    ledger = await SqliteLedger.open(path, Clock(), vfs="faulty", wal_sync=disk.wal_sync)
    for stream in STREAMS:
        await ledger.create(NewStream(stream, recipe, Durability.PROCESS, TTL_S))
    await ledger.close()
    ledger = await SqliteLedger.open(path, Clock(), vfs="faulty", wal_sync=disk.wal_sync)
    first = Append(RUNNING, 1, 0, record(RUNNING, 0))
    assert await ledger.append([first]) == []  # the writer has its pages in memory
    batch = [Append(ROTTEN, 1, 0, record(ROTTEN, 0)), Append(RUNNING, 1, 1, record(RUNNING, 1))]
    disk.misread = error
    [refusal] = await ledger.append(batch)
    assert (refusal.append.stream, type(refusal.error)) == (ROTTEN, LedgerAway)
    for read in (ledger.info(ROTTEN), ledger.unfinished()):
        with pytest.raises(LedgerAway, match=r"ledger\.db cannot be read now") as told:
            await read
        assert told.value.retryable
    disk.misread = None
    assert await ledger.append(batch[:1]) == []
    assert await ledger.unfinished() == list(STREAMS)
    assert await ledger.read(ROTTEN, 0, 9) == [record(ROTTEN, 0)]
    assert await ledger.read(RUNNING, 0, 9) == [record(RUNNING, 0), record(RUNNING, 1)]
    await ledger.close()
    vfs.unregister()


@pytest.mark.parametrize("error", [apsw.SQLITE_IOERR_READ, apsw.SQLITE_CORRUPT])
async def test_a_step_that_a_full_ledger_refuses_is_not_failed_by_a_read(
    tmp_path: Path, error: int
) -> None:
    """Looking for space reads the file, which may fail."""
    disk = Disk(Random(0))
    vfs = FaultyVfs("faulty", disk)
    full = RetentionSettings(pause_s=0, max_ledger_bytes=2 * MIB, object_share=0)
    file = await SqliteFile.open(tmp_path / "ledger.db", "faulty", disk.wal_sync)
    ledger = await SqliteLedger.recover(file, Clock(), retention=full)
    for stream in (RUNNING, WHOLE):
        await ledger.create(NewStream(stream, "{}", Durability.PROCESS, TTL_S))
    refused: list[Refusal] = []
    index = 0
    while not refused:
        refused = await ledger.append([Append(RUNNING, 1, index, record(RUNNING, index))])
        index += not refused
    end = Record(encode(StreamEnd(0, FinishReason.STOP, 0, 0)), ())
    assert await ledger.append([Append(WHOLE, 1, 0, end)]) == []  # outdates what is in memory
    disk.misread = error
    with capture_logs() as said:
        [refusal] = await ledger.append([Append(RUNNING, 1, index, record(RUNNING, index))])
    assert isinstance(refusal.error, LedgerFull)
    assert refusal.error.retryable
    assert [line["event"] for line in said] == ["ledger.room_not_found"]
    disk.misread = None
    last = Record(encode(StreamEnd(index, FinishReason.STOP, index, 0)), ())
    assert await ledger.append([Append(RUNNING, 1, index, last)]) == []
    await ledger.close()
    vfs.unregister()


async def test_what_changes_in_a_rotten_row_does_not_make_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    async with opened_file(path) as ledger:
        await ledger.create(NewStream(RUNNING, "{}", Durability.PROCESS, TTL_S))
        await ledger.take_over(RUNNING)
        connection = apsw.Connection(str(path))
        connection.execute("UPDATE stream SET epoch = 7")
        connection.close()
        await ledger.take_over(RUNNING)
        end = Record(encode(StreamEnd(0, FinishReason.STOP, 0, 0)), ())
        assert await ledger.append([Append(RUNNING, 3, 0, end)]) == []
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match="its row does not match its checksum"):
            await ledger.info(RUNNING)


async def test_a_row_matches_its_checksum_whatever_has_changed_in_it(tmp_path: Path) -> None:
    path, clock = tmp_path / "ledger.db", Clock()
    async with opened_file(path, clock) as ledger:
        new = NewStream(
            RUNNING,
            '{"prompt":"é"}',
            Durability.PROCESS,
            TTL_S,
            idempotency_key="ü",
            request_hash=b"h",
        )
        await ledger.create(new)
        for epoch in (2, 3):
            assert await ledger.take_over(RUNNING) == epoch
        end = Record(encode(StreamEnd(0, FinishReason.STOP, 0, 0)), ())
        assert await ledger.append([Append(RUNNING, 3, 0, end)]) == []
        clock.now += 1_000
        await ledger.frames(RUNNING, 0, 1)
        await ledger.expire()
    async with opened_file(path, clock) as ledger:
        info = await ledger.info(RUNNING)
        assert (info.epoch, info.ended, info.recipe) == (3, True, new.recipe)
