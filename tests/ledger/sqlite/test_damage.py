"""Bytes of a ledger file that have rotted: who is told what, and who goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import apsw
import pytest

from ledger.errors import ConfigError, Damaged, TailraceError
from ledger.frame import Durability, FinishReason, StreamEnd, StreamError, Token, decode, encode
from ledger.interface import Append, NewStream, Record
from ledger.sqlite.ledger import SqliteLedger
from ledger.subscriber import Subscriber
from origin.feed import Feed
from tests.ledger.backends import Clock, opened_file

pytestmark = pytest.mark.anyio

PAGE_BYTES = 4096
LEAF, LEAF_HEADER_BYTES = 13, 8  # https://sqlite.org/fileformat2.html#b_tree_pages
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
    """A ledger of three streams in segments; the first two have ended."""
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
        assert await ledger.read(ROTTEN, 0, 2) == whole(ROTTEN)[:2]  # what is whole is read
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

    def closed(self, corr: int) -> None:
        self.done.set()


async def test_a_reader_of_a_rotten_stream_is_told_so(path: Path) -> None:
    rot(path, ROTTEN, 0)
    async with opened_file(path) as ledger:
        outlet = Outlet()
        feed = Feed(outlet, 7, Subscriber.starting(0, 100, follow=True), ledger)
        feed.attach(ROTTEN, (await ledger.info(ROTTEN)).next_index)
        await outlet.done.wait()
        corr, error = decode(outlet.sent[-1])
        assert isinstance(error, StreamError)
        assert (corr, error.code, error.retryable) == (7, "damaged", False)
        assert ROTTEN.hex() in error.message


async def test_a_rotten_log_row_is_named_and_the_ledger_is_not_opened(path: Path) -> None:
    """The log holds the last frames of every stream: none of them could be trusted."""
    async with opened_file(path) as ledger:
        tip = (await ledger.info(RUNNING)).next_index
        await ledger.append([Append(RUNNING, 1, tip, record(RUNNING, tip))])
    flip(path, path.read_bytes().index(mark(RUNNING, COUNT)) + 100)
    with pytest.raises(TailraceError, match=r"ledger\.db: log row \d+ does not match"):
        await SqliteLedger.open(path, Clock())


def last_page_of_the_log(path: Path) -> tuple[int, bytes]:
    """The leaf with its last rows, counted from 0, and what is on it."""
    reader, data = apsw.Connection(str(path)), path.read_bytes()
    number = int(str(reader.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'log'").get))
    reader.close()
    while (page := data[(number - 1) * PAGE_BYTES : number * PAGE_BYTES])[0] != LEAF:
        number = int.from_bytes(page[8:12], "big")
    return number - 1, page


async def test_a_log_page_whose_rows_are_zeros_is_named_and_the_ledger_is_not_opened(
    path: Path,
) -> None:
    """Of a page that reached the disk in part SQLite makes row 0, and its columns are NULL."""
    async with opened_file(path) as ledger:
        tip = (await ledger.info(RUNNING)).next_index
        await ledger.append([Append(RUNNING, 1, tip, record(RUNNING, tip))])
    number, page = last_page_of_the_log(path)
    overwrite(path, number, page[:LEAF_HEADER_BYTES] + bytes(PAGE_BYTES - LEAF_HEADER_BYTES))
    with pytest.raises(Damaged, match=r"ledger\.db: log row 0 does not match"):
        await SqliteLedger.open(path, Clock())
