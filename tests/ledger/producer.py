"""Appends to a ledger until it is killed, and prints what was acknowledged.

    python -m tests.ledger.producer LEDGER [FILE_BYTES]

It is a nursery: each line on stdin starts one producer, a fork of it, so that a life costs
no start of an interpreter. With FILE_BYTES no file may grow beyond that (`RLIMIT_FSIZE`).
On stdout:

    born PID            a producer has started
    stream N INDEX      the append of that index to stream N has returned
    object N VALUE      the write of that value to object N has returned
    gone CODE           the producer has ended: its exit code, or minus the signal

From its line on, what was acknowledged must never be lost, unless the stream is `relaxed`.
Frames follow from stream and index alone.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path
from random import Random

from tailrace.ledger.errors import LedgerFailed, NotFound, StaleEpoch
from tailrace.ledger.frame import Durability, FinishReason, StreamEnd, Token, encode
from tailrace.ledger.interface import Append, NewStream, ObjectKey, ObjectWrite, Record, StreamKind
from tailrace.ledger.sqlite.disk import checkpointer
from tailrace.ledger.sqlite.ledger import SqliteLedger

LINES = 9
"""Streams at a time, a third of them of each durability."""
LENGTH = 150
"""Tokens of a stream; then it ends, and the next one of its line begins."""
OBJECTS = 2
FAILED = 3
"""Exit code of a producer whose ledger has failed."""
CHECKPOINT_PAGES = 30
"""So few that the WAL is moved, and begins anew, many times in a life."""
TAKE_OVER = 0.05
"""Probability that another producer takes over, at each append."""


def stream_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def durability_of(number: int) -> Durability:
    return list(Durability)[number % len(Durability)]


def record(number: int, index: int) -> Record:
    """Return what stream `number` holds at `index`; some are long, so that segments form."""
    if index == LENGTH:
        return Record(encode(StreamEnd(index, FinishReason.LENGTH, index, 0)), (number, index))
    text = f"{number}/{index} " + "x" * (1500 if index % 7 == 0 else index % 50)
    return Record(encode(Token(text, index)), (number, index))


def object_key(number: int) -> ObjectKey:
    return ObjectKey("counter", str(number))


def object_stream(number: int) -> bytes:
    return b"object%10d" % number


def object_durability(number: int) -> Durability:
    return (Durability.PROCESS, Durability.POWER)[number]


def object_record(number: int, index: int) -> Record:
    return Record(encode(Token(f"{number}:{index} " + "y" * (index % 90), index)), (number, index))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Producer:
    """One life: a line of streams and an object each, until the end of the process."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self._ledger = ledger
        self._random = Random(os.getpid())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for number in range(LINES):
                group.create_task(self._produce(number))
            for number in range(OBJECTS):
                group.create_task(self._count(number))

    async def _produce(self, number: int) -> None:
        """Take the last stream of a line over and append to it, one record at a time."""
        while True:
            epoch, index = await self._claim(number)
            while index <= LENGTH:
                append = Append(stream_id(number), epoch, index, record(number, index))
                refused = await self._ledger.append([append])
                if refused:
                    assert isinstance(refused[0].error, StaleEpoch)
                    return  # another one goes on
                if durability_of(number) is not Durability.RELAXED:
                    say(f"stream {number} {index}")
                # `relaxed` appends do not wait, and must not crowd out the others.
                elif index % 10 == 0:
                    say(f"stream {number} {index}")
                    await asyncio.sleep(0)
                index += 1
                if self._random.random() < TAKE_OVER:
                    self._group.create_task(self._produce(number))
            number += LINES

    async def _claim(self, number: int) -> tuple[int, int]:
        stream = stream_id(number)
        try:
            epoch = await self._ledger.take_over(stream)
        except NotFound:
            await self._ledger.create(NewStream(stream, "{}", durability_of(number), 3600))
            epoch = 1
        return epoch, (await self._ledger.info(stream)).next_index

    async def _count(self, number: int) -> None:
        """Write an object whose value is the length of its stream, each time in one write."""
        key, stream, objects = object_key(number), object_stream(number), self._ledger.objects
        epoch = (await objects.claim(key)).epoch
        value = int((await objects.get(key, ["n"])).get("n", b"0"))
        durability = object_durability(number)
        new = NewStream(stream, "", durability, 0.0, kind=StreamKind.OBJECT)
        while True:
            write = ObjectWrite(
                key,
                epoch,
                puts={"n": b"%d" % (value + 1)},
                creates=() if value else (new,),
                appends=(Append(stream, 1, value, object_record(number, value)),),
                durability=durability,
            )
            await objects.write(write)
            value += 1
            say(f"object {number} {value}")


async def live(path: Path) -> None:
    await Producer(await SqliteLedger.open(path, lambda: 0)).run()


def bear(path: Path) -> None:
    """Fork a producer, and wait for its end."""
    child = os.fork()
    if child == 0:
        say(f"born {os.getpid()}")
        try:
            asyncio.run(live(path))
        except* LedgerFailed as errors:
            print(errors.exceptions[0], file=sys.stderr)
            os._exit(FAILED)
    _, status = os.waitpid(child, 0)
    say(f"gone {os.waitstatus_to_exitcode(status)}")


def main() -> None:
    path = Path(sys.argv[1])
    checkpointer.CHECKPOINT_PAGES, checkpointer.CHECKPOINT_REST_PAGES = CHECKPOINT_PAGES, 4
    if len(sys.argv) > 2:
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for _ in sys.stdin:
        bear(path)


if __name__ == "__main__":
    main()
