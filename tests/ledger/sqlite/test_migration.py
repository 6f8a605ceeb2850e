"""Files that older versions wrote, opened by this one."""

from __future__ import annotations

import base64
import struct
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest
from structlog.testing import capture_logs

from ledger.errors import ConfigError, Damaged
from ledger.frame import FinishReason, StreamEnd, Token, encode
from ledger.interface import ObjectKey, Record
from ledger.sqlite.disk.opening import APPLICATION_ID, SCHEMA_VERSION
from ledger.sqlite.record import pack_segment
from ledger.tools.reading import reading
from ledger.tools.verify import verify
from tests.ledger.backends import A, B, Clock, indexes, opened_file, token, tokens
from tests.ledger.sqlite.cold_material import all_is_there, codings, sentence, store

pytestmark = pytest.mark.anyio

KEY = ObjectKey("counter", "one")
RECIPE = '{"prompt":"é"}'

VERSION_3 = """
PRAGMA auto_vacuum = INCREMENTAL;
CREATE TABLE stream (
    sid             INTEGER PRIMARY KEY,      -- short local id, used by log and segment
    id              BLOB    NOT NULL UNIQUE,  -- 16 random bytes, the public id
    kind            INTEGER NOT NULL,         -- 0: an engine's, 1: an object's
    epoch           INTEGER NOT NULL,         -- fencing number of the current producer
    ended           INTEGER NOT NULL,         -- 1 once the StreamEnd is in a segment
    durability      INTEGER NOT NULL,
    recipe          TEXT    NOT NULL,         -- what a continuation needs, JSON
    created_ms      INTEGER NOT NULL,         -- Unix time
    ttl_ms          INTEGER NOT NULL,
    expires_ms      INTEGER NOT NULL,         -- Unix time; slides with reads and writes
    idempotency_key TEXT    UNIQUE,
    request_hash    BLOB    NOT NULL,
    cold            INTEGER NOT NULL DEFAULT 0  -- 1 once every segment of an ended stream is
);
CREATE INDEX stream_by_expiry ON stream (kind, expires_ms) WHERE ended = 1;
CREATE INDEX stream_unfinished ON stream (kind, created_ms) WHERE ended = 0;
-- By the time of the last read, until it is cold.
CREATE INDEX stream_warm ON stream (expires_ms - ttl_ms) WHERE ended = 1 AND cold = 0;
CREATE TABLE removed (sid INTEGER PRIMARY KEY);  -- streams whose segments are yet to go
CREATE TABLE log (seq INTEGER PRIMARY KEY, batch BLOB NOT NULL);
CREATE TABLE segment (
    sid     INTEGER NOT NULL,
    first   INTEGER NOT NULL,                 -- index of its first record
    length  INTEGER NOT NULL,                 -- records in it
    coding  INTEGER NOT NULL,                 -- 0: plain, else the dictionary it is packed with
    records BLOB    NOT NULL,
    PRIMARY KEY (sid, first)
) WITHOUT ROWID;
CREATE INDEX segment_cold ON segment (coding) WHERE coding > 0;
CREATE TABLE dictionary (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE object (
    oid           INTEGER PRIMARY KEY,        -- short local id, used by object_value
    kind          TEXT    NOT NULL,
    name          TEXT    NOT NULL,
    epoch         INTEGER NOT NULL,
    alarm_ms      INTEGER,                    -- Unix time
    alarm_retries INTEGER NOT NULL,
    UNIQUE (kind, name)
);
CREATE INDEX object_by_alarm ON object (alarm_ms) WHERE alarm_ms IS NOT NULL;
CREATE TABLE object_value (
    oid   INTEGER NOT NULL,
    name  TEXT    NOT NULL,
    value BLOB    NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
"""


VERSION_4 = """
CREATE INDEX segment_cold ON segment (coding) WHERE coding > 0;
CREATE TABLE dictionary (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
CREATE TABLE dictionary_copy (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL);
PRAGMA user_version = 4;
"""
# As a Tailrace of version 4 has packed `of_version_4()`, and with which dictionary.
PACKED_4 = base64.b64decode(
    "CQhzBc4CAADNBAAjDiM7duw4TOy4TJgdEHgs4hVO8AIYvtAAwpd27FB+vVNG3d6To9b4Qoft2r3qiqoyRpFUr1QxW/"
    "pkazk7FSOp2asTFWSEPGlPVyV5jRJqtM4YRJicG54aRa71OH0VZZj5WUoS4iq1KSlGaTmr8Lf1SVlSSsn8ObWIWaXo"
    "nIqQYlMokXWzyk16tkwJKbxMBAIMWNNNGZKmLCw="
)
DICTIONARY_4 = base64.b64decode(
    "ta86ESi1L/1g5AGdEACGJXYzMFXav2pVVfPqhxSpAMPQidvtDzZ0T9RFEej+C+BwYUjB9Gs1ZpLLkezu7l7akltyy9"
    "QCewBrAFwAJRMgQUKiwqBF4QF18gBhEuJygieBhJWdG1BwgND0k8DCoFoV9cTF/qdBKI56w71QxeXP0yiViqlRGarL"
    "P6k3fHqFcbUfapR/UHOkUhke13sjjcsfqDcmrvZInbpYXf473aFSoZR6tZH6uNwTtYXqar/UqwmPy7+nMwFN/ljfOd"
    "tOed9Xx+2yCxvN7qNjEVu/sVkyMtYVMhuptNdBr7DC5zJ72Fm/1pLmSCmOuFJ8M7PetU5a9Btsj6W8l0YK4BWyMOLs"
    "Y3K8b2w8UnQGiGoELkiqQANHjoyIiAoKzAvOymEBYEYBRgQtLXn9MctZ7xv9Tp/uRmZx14gvtLG6fDgdvG222m51T4"
    "c5P8f5H5PdZnbW2r5tcM78qMfaVMIonzZJ8WuYVltvtbI+2rbf6xpZhZJ2vTijuk8neSI4UefepxX7tQxW9vbKamFq"
    "1fq44+0XqTdzFLfLMUonn3XYb30u1mzdaPWzscnbDMtq/9/8W2nuybJ7bMGZr5Pto3t5/7VrvWrZ3JyFlrJmjUHcYK"
    "by8YO0zYmjV9o4Mm+bq7w3GCgQKKWK+FA1J/Ucg88TILpGkjAKE/GH5+N2y2O11/FeevM1zGkCgHocUw0eh3rPBML0"
    "mzeiMnk="
)


def of_version_4() -> list[Record]:
    text = Record(encode(Token(" straße", 299)), (7, 8))
    ending = Record(encode(StreamEnd(301, FinishReason.STOP, 300, 0)), ())
    return [*sentence(299, seed=7, ends=False), text, ending]


def log_row_3(sid: int, first: int, records: list[Record]) -> bytes:
    """As version 3 packed records of one stream, each with ids below 65,536."""
    count = len(records)
    ids = [number for record in records for number in record.ids]
    body = b"".join(
        (
            struct.pack("<I", count),
            b"\x01" + bytes([sid]) * count,
            b"\x01" + bytes(range(first, first + count)),
            b"\x01" + bytes(len(record.ids) for record in records),
            b"\x02" + array("H", ids).tobytes(),
            *(record.frame for record in records),
        )
    )
    return struct.pack("<I", zlib.crc32(body)) + body


def write_version_3(path: Path) -> None:
    """An ended stream in a segment, a running one half in the log, and an object."""
    connection = apsw.Connection(str(path))
    connection.execute(VERSION_3)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 3")
    connection.execute("PRAGMA journal_mode = WAL")
    put = "INSERT INTO stream VALUES (?, ?, 0, ?, ?, 1, ?, 1000, 60000, ?, ?, ?, 0)"
    connection.execute(put, (1, A, 1, 1, "{}", 10_000_000, None, b""))
    connection.execute(put, (2, B, 3, 0, RECIPE, 61_000, "ü", b"hash"))
    end = Record(encode(StreamEnd(3, FinishReason.STOP, 3, 0)), ())
    of_a = [*(token(index) for index in range(3)), end]
    for sid, records in ((1, of_a), (2, [token(0), token(1)])):
        blob = pack_segment([one.frame for one in records], [one.ids for one in records])
        connection.execute("INSERT INTO segment VALUES (?, 0, ?, 0, ?)", (sid, len(records), blob))
    for seq, index in ((8, 2), (9, 3)):
        row = log_row_3(2, index, [token(index)])
        connection.execute("INSERT INTO log VALUES (?, ?)", (seq, row))
    connection.execute("INSERT INTO object VALUES (1, ?, ?, 5, 9000, 1)", KEY)
    connection.execute("INSERT INTO object_value VALUES (1, 'né', ?)", (b"41",))
    connection.close()


async def test_a_file_of_version_3_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    write_version_3(path)
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            assert indexes(await ledger.read(A, 0, 9)) == [0, 1, 2, 3]
            assert await ledger.read(B, 0, 9) == [token(index) for index in range(4)]
            info = await ledger.info(B)
            assert (info.epoch, info.recipe, info.next_index) == (3, RECIPE, 4)
            assert await ledger.take_over(B) == 4
            append = tokens(B, [4])[0]
            assert await ledger.append([append._replace(epoch=4)]) == []
            assert await ledger.objects.get(KEY, ["né"]) == {"né": b"41"}
            claimed = await ledger.objects.claim(KEY)
            assert claimed.alarm is not None and claimed.alarm.at_ms == 9_000
    assert [line["version"] for line in said if line["event"] == "ledger.migrated"] == [
        SCHEMA_VERSION
    ]
    async with reading(path) as reader:
        found = await verify(reader)
    assert found.whole
    assert (found.streams, found.frames) == (2, 9)
    with capture_logs() as said:
        async with opened_file(path) as ledger:
            assert indexes(await ledger.read(B, 0, 9)) == [0, 1, 2, 3, 4]
    assert not said


async def test_what_has_rotted_before_is_not_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    write_version_3(path)
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE log SET batch = CAST(batch || x'00' AS BLOB) WHERE seq = 9")
    connection.close()
    async with opened_file(path):
        pass
    async with reading(path) as reader:
        whats = [finding.what for finding in (await verify(reader)).findings]
    assert "segment at index 6 does not follow index 2" in whats  # index 3 is lost


async def write_version_4(path: Path, dictionaries: Sequence[bytes]) -> dict[bytes, list[Record]]:
    """A packed stream, number 1, and a plain one, with two copies of its dictionary."""
    held = {}
    async with opened_file(path) as ledger:
        for number, records in ((1, of_version_4()), (2, sentence(50))):
            held[await store(ledger, number, records)] = records
    connection = apsw.Connection(str(path))
    connection.execute(VERSION_4)
    connection.execute("DELETE FROM segment WHERE sid = 1")
    connection.execute("INSERT INTO segment VALUES (1, 0, 301, 3, ?)", (PACKED_4,))
    connection.execute("UPDATE stream SET cold = 1 WHERE sid = 1")
    for table, row in zip(("dictionary", "dictionary_copy"), dictionaries, strict=True):
        connection.execute(f"INSERT INTO {table} VALUES (3, ?)", (row,))
    connection.close()
    return held


ROTTEN = DICTIONARY_4[:-1] + b"\0"


@pytest.mark.parametrize("dictionaries", [(DICTIONARY_4, ROTTEN), (ROTTEN, DICTIONARY_4)])
async def test_what_version_4_has_packed_is_packed_anew(
    tmp_path: Path, dictionaries: Sequence[bytes]
) -> None:
    path = tmp_path / "ledger.db"
    held = await write_version_4(path, dictionaries)
    async with opened_file(path) as ledger:
        await all_is_there(ledger, held)
    assert codings(tmp_path) == [(0, 1), (1, 1)]
    async with reading(path) as reader:
        assert (await verify(reader)).whole


async def test_what_cannot_be_unpacked_any_more_costs_its_stream_only(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    held = await write_version_4(path, (ROTTEN, ROTTEN))
    lost = next(iter(held))
    async with opened_file(path) as ledger:
        with pytest.raises(Damaged, match=f"{lost.hex()}: segment at index 0"):
            await ledger.read(lost, 0, 1)
        del held[lost]
        await all_is_there(ledger, held)


async def test_one_that_is_not_brought_up_to_date_yet_is_not_read_by_a_tool(
    tmp_path: Path,
) -> None:
    write_version_3(tmp_path / "ledger.db")
    with pytest.raises(ConfigError, match="brings it up to date"):
        async with reading(tmp_path / "ledger.db"):
            pass


async def test_one_that_is_older_still_is_refused(tmp_path: Path) -> None:
    write_version_3(tmp_path / "ledger.db")
    connection = apsw.Connection(str(tmp_path / "ledger.db"))
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(ConfigError, match=r"of version 2.*move it away"):
        async with opened_file(tmp_path / "ledger.db", Clock()):
            pass
