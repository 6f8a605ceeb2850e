"""The process that packs for an origin: `python -m ledger.sqlite.compactor_child`.

It answers the questions on its standard input on its standard output, and ends when its input
does: with its parent, however that ends, or when the parent has no more for it. It opens no
file. `compactor_process` is its other side.
"""

from __future__ import annotations

import resource
import signal
import sys
from contextlib import suppress
from typing import BinaryIO

from ledger.errors import Damaged
from ledger.sqlite.compaction import Compaction
from ledger.sqlite.compactor_message import (
    HEADER,
    Kind,
    Message,
    body_size,
    decode,
    encode,
    rows_of,
)

MAX_MEMORY_BYTES = 512 * 1024 * 1024
"""Address space of the process, which takes a fifth of it; what would need more ends it."""


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the source ends; `ValueError` where it is not from a ledger."""
    work = Compaction()
    while header := source.read(HEADER.size):
        if len(header) < HEADER.size:
            return  # the parent died in the midst of it
        size = body_size(header)
        body = source.read(size)
        if len(body) < size:
            return
        sink.write(encode(answer(work, decode(body))))
        sink.flush()


def answer(work: Compaction, asked: Message) -> Message:
    """What the work gives for a question; a damaged segment or dictionary is an answer too."""
    try:
        return _answer(work, asked)
    except Damaged as error:
        return Message(Kind.DAMAGED, (), (error.message.encode(),))


def _answer(work: Compaction, asked: Message) -> Message:
    match asked.kind:
        case Kind.KNOW:
            return Message(Kind.DONE, work.know(asked.numbers[0], asked.blobs[0]))
        case Kind.BEGIN:
            work.begin()
            return Message(Kind.DONE)
        case Kind.SAMPLE:
            return Message(Kind.DONE, (work.sample(rows_of(asked)),))
        case Kind.LEARN:
            learnt = work.learn()
            return Message(Kind.DONE, (learnt.frames, learnt.pairs), (learnt.row,))
        case Kind.PACK:
            packed = work.pack(rows_of(asked), asked.numbers[-1])
            if packed is None:
                return Message(Kind.DONE)
            return Message(Kind.PACKED, (packed.strange,), (packed.row.records,))
        case _:
            raise ValueError(f"{asked.kind!r} is no question")


def main() -> None:
    # Who ends the whole group with Ctrl-C ends the parent, and with it this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > MAX_MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    with open(1, "wb", buffering=0, closefd=False) as sink, suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
