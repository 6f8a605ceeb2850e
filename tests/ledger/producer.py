"""A process that appends to a ledger until it is killed, and says what was acknowledged.

    python -m tests.ledger.producer LEDGER

Each line on stdout is `stream index`, written when the append of that index has returned:
from then on it must never be lost. Texts follow from stream and index alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ledger.errors import NotFound
from ledger.frame import Durability, Token, encode
from ledger.interface import Append, NewStream, Record
from ledger.sqlite import SqliteLedger

STREAMS = 8


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record(number: int, index: int) -> Record:
    """What stream `number` holds at `index`; some are long, so that segments form."""
    text = f"{number}/{index} " + "x" * (1500 if index % 7 == 0 else index % 50)
    return Record(encode(Token(text, index)), (number, index))


async def produce(ledger: SqliteLedger, number: int) -> None:
    """Take the stream over and append to it, one record at a time, for ever."""
    stream = stream_id(number)
    try:
        epoch = await ledger.take_over(stream)
    except NotFound:
        await ledger.create(NewStream(stream, "{}", Durability.PROCESS, 3600))
        epoch = 1
    index = (await ledger.info(stream)).next_index
    while True:
        refused = await ledger.append([Append(stream, epoch, index, record(number, index))])
        assert refused == []
        os.write(1, f"{number} {index}\n".encode())
        index += 1


async def main(path: Path) -> None:
    ledger = await SqliteLedger.open(path, lambda: 0)
    await asyncio.gather(*(produce(ledger, number) for number in range(STREAMS)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
