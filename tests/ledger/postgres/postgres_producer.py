"""Appends to a ledger on PostgreSQL until it is killed, and prints what was stored.

    python -m tests.ledger.postgres.postgres_producer DSN OWNER

It takes the streams over that nobody owns, makes those that are missing, and writes a line
`stream index` when the append of that index has returned: from then on it must never be lost.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from tailrace.ledger.interface import Append
from tailrace.ledger.postgres.ledger import PostgresLedger
from tests.ledger.backends import new, token

STREAMS = 8
LEASE_S = 0.3


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


async def produce(ledger: PostgresLedger, number: int, epoch: int) -> None:
    """Append one record after the other, for ever."""
    stream = stream_id(number)
    index = (await ledger.info(stream)).next_index
    while True:
        batch = [Append(stream, epoch, index, token(index, f" {number}/{index}"))]
        assert await ledger.append(batch) == []
        os.write(1, f"{number} {index}\n".encode())
        index += 1


async def main(dsn: str, owner: str) -> None:
    ledger = await PostgresLedger.open(
        dsn, lambda: time.time_ns() // 1_000_000, owner=owner, lease_s=LEASE_S
    )
    epochs = {}
    for number in range(STREAMS):
        _, made = await ledger.create(new(stream_id(number), key=str(number)))
        if made:
            epochs[number] = 1
    while len(epochs) < STREAMS:  # until the leases of killed producers have expired
        for stream in await ledger.unfinished():
            epochs[int.from_bytes(stream, "big")] = await ledger.take_over(stream)
    await asyncio.gather(*(produce(ledger, number, epoch) for number, epoch in epochs.items()))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
