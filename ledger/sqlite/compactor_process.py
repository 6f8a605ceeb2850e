"""Learning and packing in a child process of the origin.

Both are seconds of Python and zstd, and a thread that does them takes the interpreter from the
event loop for 5 ms at a time. The child is sent the bytes of segments and sends back those of
cold ones, instead of reading the file itself: the origin spends some hundred microseconds more
on each, but no second process ever has a lock in the file, pins its WAL while it hangs, reads a
segment that has just gone, or needs to know what lies under SQLite; and what becomes of a
question is decided where the answer is taken. It only computes, so that killing it at any
moment costs what it was about to answer.

It starts with the first question, at a low priority, and ends after `idle_s` without one. A thread
starts it, by the standard library, which on Linux borrows the parent's memory until the program
is loaded (vfork): uvloop copies the page tables, on the event loop, 30 ms where 500 MiB are in use.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ledger.errors import Damaged
from ledger.sqlite.cold import Packed
from ledger.sqlite.compaction import Learnt
from ledger.sqlite.compactor import CompactorLost
from ledger.sqlite.compactor_message import (
    HEADER,
    Kind,
    Message,
    body_size,
    decode,
    encode,
    with_rows,
)
from ledger.sqlite.storage import SegmentRow

COMMAND = (sys.executable, "-P", "-m", "ledger.sqlite.compactor_child")
NICENESS = 10
"""Of the child: a tenth of what another has of a processor that both want. With the lowest
priority it would not get anywhere beside workers that decode on all of them."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a child is waited for, in seconds."""

    answer_s: float = 300.0
    """Learning takes some seconds, tens of them on a busy machine; this long is hanging."""
    idle_s: float = 10.0
    """Without a question for so long it ends; its memory is the system's again."""
    stop_s: float = 2.0
    """A child that has not exited so long after its input ended is killed."""


class Child(NamedTuple):
    """A process, and our end of the socket that is its standard input and output."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class CompactorProcess:
    """`ledger.sqlite.compactor.Compactor` in a process that runs `command`.

    For one event loop, and one question at a time.
    """

    def __init__(self, command: Sequence[str] = COMMAND, patience: Patience = Patience()) -> None:
        self._command = command
        self._patience = patience
        self._child: Child | None = None
        self._asking = False
        self._closed = False
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None  # of one that was idle
        self.known: Collection[int] = ()

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return None if self._child is None else self._child.process.pid

    # ---- questions ----

    async def know(self, coding: int, row: bytes) -> None:
        self.known = (await self._ask(Message(Kind.KNOW, (coding,), (row,)))).numbers

    async def begin(self) -> None:
        await self._ask(Message(Kind.BEGIN))

    async def sample(self, rows: Sequence[SegmentRow]) -> int:
        return (await self._ask(with_rows(Kind.SAMPLE, rows))).numbers[0]

    async def learn(self) -> Learnt:
        answer = await self._ask(Message(Kind.LEARN))
        frames, pairs = answer.numbers
        return Learnt(answer.blobs[0], frames, pairs)

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        answer = await self._ask(with_rows(Kind.PACK, rows, coding))
        if answer.kind is not Kind.PACKED:
            return None
        length = sum(row.length for row in rows)
        row = SegmentRow(rows[0].sid, rows[0].first, length, coding, answer.blobs[0])
        return Packed(row, answer.numbers[0])

    async def close(self) -> None:
        self._closed = True
        await self._end(kill=self._asking)
        if self._ending is not None:
            await self._ending

    async def _ask(self, message: Message) -> Message:
        self._hold()
        child = await self._started()
        self._asking = True
        try:
            async with asyncio.timeout(self._patience.answer_s):
                answer = await _exchange(child, message)
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            self._asking = False
            await self._end(kill=True)
            why = f"process {child.process.pid} gave no answer: {error!r}"
            raise CompactorLost(why) from error
        # Whoever is cancelled above leaves `_asking` set: what comes next is no answer to him.
        self._asking = False
        self._idle = asyncio.get_running_loop().call_later(self._patience.idle_s, self._let_go)
        if answer.kind is Kind.DAMAGED:
            raise Damaged(answer.blobs[0].decode(errors="replace"))
        return answer

    # ---- the child ----

    async def _started(self) -> Child:
        if self._ending is not None:
            await self._ending
        child = self._child
        if child is not None and (self._asking or child.process.poll() is not None):
            await self._end(kill=True)
        if self._child is None:
            self._child = await self._start()
        return self._child

    async def _start(self) -> Child:
        self._check_open()
        ours, its = socket.socketpair()
        spawning = asyncio.ensure_future(asyncio.to_thread(_spawn, self._command, its))
        try:
            process = await asyncio.shield(spawning)
        except OSError as error:
            ours.close()
            raise CompactorLost(f"no process could be started: {error}") from error
        except asyncio.CancelledError:
            ours.close()  # the end of its input: it ends as it begins
            with suppress(OSError):
                await asyncio.to_thread(_reap, await spawning, self._patience.stop_s)
            raise
        reader, writer = await asyncio.open_connection(sock=ours)
        child = self._child = Child(process, reader, writer)
        try:
            self._check_open()
        except CompactorLost:  # meanwhile
            await self._end(kill=True)
            raise
        return child

    def _check_open(self) -> None:
        if self._closed:
            raise CompactorLost("the ledger is being closed")

    def _hold(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _let_go(self) -> None:
        self._idle = None
        self.known = ()
        self._ending = asyncio.get_running_loop().create_task(self._end(kill=False))

    async def _end(self, *, kill: bool) -> None:
        """The end of its input ends a child; one that does not heed it is killed."""
        self._hold()
        child, self._child = self._child, None
        self.known = ()
        self._asking = False
        if child is None:
            return
        if kill:
            child.process.kill()
        child.writer.transport.abort()
        await asyncio.to_thread(_reap, child.process, self._patience.stop_s)


async def _exchange(child: Child, message: Message) -> Message:
    child.writer.write(encode(message))
    await child.writer.drain()
    size = body_size(await child.reader.readexactly(HEADER.size))
    answer = decode(await child.reader.readexactly(size))
    if not _answers(message, answer):
        raise ValueError(f"{answer.kind!r} is no answer to {message.kind!r}")
    return answer


def _answers(asked: Message, answer: Message) -> bool:
    """Whether it has the form of an answer to what was asked."""
    match asked.kind, answer.kind, len(answer.numbers), len(answer.blobs):
        case ((Kind.KNOW | Kind.SAMPLE | Kind.PACK), Kind.DAMAGED, 0, 1):
            return True
        case Kind.KNOW, Kind.DONE, count, 0:
            return count > 0
        case ((Kind.BEGIN | Kind.PACK), Kind.DONE, 0, 0):
            return True
        case Kind.SAMPLE, Kind.DONE, 1, 0:
            return True
        case Kind.LEARN, Kind.DONE, 2, 1:
            return True
        case Kind.PACK, Kind.PACKED, 1, 1:
            return True
    return False


def _spawn(command: Sequence[str], its: socket.socket) -> subprocess.Popen[bytes]:
    """Start a child; its end of the socket is closed here in any case."""
    with its:
        process = subprocess.Popen(
            command, stdin=its.fileno(), stdout=its.fileno(), env=_environment()
        )
    with suppress(OSError):  # it has ended already, which the first question will find out
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    return process


def _reap(process: subprocess.Popen[bytes], stop_s: float) -> None:
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    """It finds this package where its parent did."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
