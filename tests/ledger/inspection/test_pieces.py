"""Streams in pieces: the same whatever their size, and nothing is held while one is used."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from tailrace.ledger.inspection import reader as tools_reader
from tailrace.ledger.inspection.commands import json_lines, raw_frames, reading, verify
from tailrace.ledger.inspection.reader import LedgerReader
from tailrace.ledger.sqlite.storage import StreamRow
from tests.ledger.ledger_files import A, B, C, Place, PostgresPlace, SqlitePlace, three_streams
from tests.ledger.other_owner import OtherOwner

pytestmark = pytest.mark.anyio


Export = Callable[[LedgerReader], AsyncIterator[object]]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return each kind of place in turn, without a ledger."""
    if request.param == "sqlite":
        return SqlitePlace(tmp_path)
    return PostgresPlace(request.getfixturevalue("database"))


@pytest.mark.parametrize("size", [61, 1_201])
async def test_what_is_read_in_pieces_is_what_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    await (await three_streams(place)).close()
    async with reading(place.place) as reader:
        whole = [line async for line in json_lines(reader, reader.streams())]
        frames = [frame async for frame in raw_frames(reader, reader.streams())]
        monkeypatch.setattr(tools_reader, "PIECE_RECORDS", size)
        assert [line async for line in json_lines(reader, reader.streams())] == whole
        assert [frame async for frame in raw_frames(reader, reader.streams())] == frames
        verdict = await verify(reader)
    assert len(whole) == 3 + 1206
    assert (verdict.whole, verdict.streams, verdict.frames) == (True, 3, 1206)


async def test_what_changes_between_two_pieces_is_no_damage(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_reader, "PIECE_RECORDS", 50)
    with OtherOwner(place) as owner:
        async with reading(place.place) as reader:
            read = tools_reader.pieces(reader, each([row async for row in reader.streams()]))
            seen = [await anext(read)]
            owner.append(B, *range(5, 80), ends=True)
            owner.delete(C)
            seen += [piece async for piece in read]
        assert [p.damage for p in seen if p.damage is not None] == []
        indexes = [(p.row.id, index) for p in seen for index, _ in p.records]
        assert indexes == [(A, n) for n in range(1201)] + [(B, n) for n in range(81)]
        assert [p.row.id for p in seen if p.last] == [A, B]


async def each(rows: Sequence[StreamRow]) -> AsyncIterator[StreamRow]:
    for row in rows:
        yield row


@pytest.mark.parametrize(
    "export",
    [
        lambda reader: json_lines(reader, reader.streams()),
        lambda reader: raw_frames(reader, reader.streams()),
    ],
    ids=["jsonl", "frames"],
)
async def test_an_export_that_nobody_takes_lets_the_wal_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export
) -> None:
    monkeypatch.setattr(tools_reader, "PIECE_RECORDS", 50)
    place = SqlitePlace(tmp_path)
    with OtherOwner(place) as owner:
        async with reading(place.place) as reader:
            exported = export(reader)
            for _ in range(200):  # in the middle of the third piece of A
                await anext(exported)
            owner.append(B, *range(5, 200))
            owner.begin_wal_anew()
            assert len([line async for line in exported]) > 1_000


async def test_verifying_lets_the_wal_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools_reader, "PIECE_RECORDS", 1)
    place = SqlitePlace(tmp_path)
    with OtherOwner(place) as owner:
        async with reading(place.place) as reader:
            assert (await verify(reader, lambda _: owner.begin_wal_anew())).whole
