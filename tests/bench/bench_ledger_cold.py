"""Bytes on disk per token of real text: documents of the demo model's corpus.

Every document is one generation, tokenised and framed as the engine does it, stored with
its token ids.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import apsw
import uvloop
from tokenizers import Tokenizer

from demo import corpus
from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Append, NewStream, Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.ledger.sqlite.retention import RetentionSettings
from tailrace.origin.engine.transcript import Detokeniser, Vocabulary
from tests.bench.bench_ledger_ours import TTL_S, now_ms, stream_id
from tests.bench.bench_ledger_work import folder_bytes

TOKENIZER = Path(__file__).parents[2] / "origin" / "demo" / "model" / "tokenizer.json"
SEED = 3
DOCUMENTS = 1_000
AT_A_TIME = 64
COLD_AFTER_S = 60.0
RETENTION = RetentionSettings(cold_after_s=COLD_AFTER_S)
SWEEPS = 8
"""Number of sweeps, more than packing needs; packing stops when nothing is left."""


@dataclass(frozen=True, slots=True)
class Cold:
    """Bytes per token, ids included, of real text.

    `warm_file` is the closed file as stored, `cold_file` the file after retention has packed it,
    and `cold_segments` the packed segments alone.
    """

    documents: int
    tokens: int
    warm_file: float
    cold_file: float
    cold_segments: float


def measure_cold(folder: Path) -> Cold:
    """Store the corpus in a new folder, pack it, and divide."""
    folder.mkdir()
    return uvloop.run(_measure(folder))


async def _measure(folder: Path) -> Cold:
    path = folder / "ledger.sqlite"
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    documents = islice(corpus.documents(SEED, long=True), DOCUMENTS)
    streams = [list(_records(tokenizer, corpus.text(document))) for document in documents]
    tokens = sum(len(record.ids) for records in streams for record in records)
    ledger = await SqliteLedger.open(path, now_ms, retention=RETENTION)
    numbered = list(enumerate(streams))
    for at in range(0, len(numbered), AT_A_TIME):
        some = numbered[at : at + AT_A_TIME]
        await asyncio.gather(*[_store(ledger, stream_id(n), records) for n, records in some])
    await ledger.close()
    warm = folder_bytes(folder)
    await _pack(path)
    if not await _all_there(path, streams):
        raise ValueError("what was packed does not come back")
    file, segments = folder_bytes(folder), _segment_bytes(path)
    return Cold(len(streams), tokens, warm / tokens, file / tokens, segments / tokens)


async def _pack(path: Path) -> None:
    """Run retention as if nobody had touched the streams for `COLD_AFTER_S`."""
    later_ms = int(COLD_AFTER_S * 1000) + 1
    ledger = await SqliteLedger.open(path, lambda: now_ms() + later_ms, retention=RETENTION)
    for _ in range(SWEEPS):
        await ledger.expire()
    await ledger.close()


def _segment_bytes(path: Path) -> int:
    with closing(apsw.Connection(str(path))) as connection:
        sql = "SELECT sum(length(records)) FROM segment WHERE coding IN (1, 3)"
        return int(str(connection.execute(sql).get))


async def _all_there(path: Path, streams: list[list[Record]]) -> bool:
    ledger = await SqliteLedger.open(path, now_ms, retention=RETENTION)
    read = [await ledger.read(stream_id(n), 0, len(r) + 1) for n, r in enumerate(streams)]
    await ledger.close()
    return read == streams


def _records(tokenizer: Tokenizer, text: str) -> Iterator[Record]:
    """Yield the records that an engine would have made of this text."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    detokeniser, held, index = Detokeniser(Vocabulary(tokenizer)), [], 0
    for token_id in ids:
        held.append(token_id)
        piece = detokeniser.step(token_id)
        if piece:
            yield Record(encode(Token(piece, index)), tuple(held))
            held, index = [], index + 1
    end = StreamEnd(len(ids), FinishReason.STOP, index, 0)
    yield Record(encode(end), tuple(held))


async def _store(ledger: SqliteLedger, stream: bytes, records: list[Record]) -> None:
    await ledger.create(NewStream(stream, "{}", Durability.PROCESS, TTL_S))
    for index, record in enumerate(records):
        await ledger.append([Append(stream, 1, index, record)])


if __name__ == "__main__":
    print(measure_cold(Path(sys.argv[1])))
