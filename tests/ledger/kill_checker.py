"""Kills producers, remembers what was acknowledged to them, and looks for it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tailrace.ledger.errors import NotFound
from tailrace.ledger.frame import Durability
from tailrace.ledger.interface import Record
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tests.ledger.producer import (
    LENGTH,
    OBJECTS,
    durability_of,
    object_key,
    object_record,
    object_stream,
    record,
    stream_id,
)

ROOT = Path(__file__).resolve().parents[2]
READ_BYTES = 65_536


@dataclass
class Findings:
    """Records of class `process` or `power`, unless said otherwise."""

    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    disagreeing: int = 0  # objects whose values and streams do not agree
    lost_of_relaxed: int = 0  # which may lose what it had not written yet

    @property
    def broken(self) -> dict[str, int]:
        """Return the counts that must be zero but are not."""
        kept = ("acknowledged", "lost_of_relaxed")
        return {name: n for name, n in asdict(self).items() if n and name not in kept}


@dataclass
class Checker:
    """`streams` and `objects`: how much was acknowledged of each, so far."""

    path: Path
    findings: Findings = field(default_factory=Findings)
    streams: dict[int, int] = field(default_factory=dict)
    objects: dict[int, int] = field(default_factory=dict)

    def acknowledged(self, line: str) -> None:
        """Take one line of a producer."""
        what, number, value = line.split()
        if what == "object":
            self._advance(self.objects, int(number), int(value))
        elif durability_of(int(number)) is Durability.RELAXED:
            self.streams[int(number)] = int(value) + 1  # may be less than in a life before
        else:
            self._advance(self.streams, int(number), int(value) + 1)

    def _advance(self, known: dict[int, int], number: int, value: int) -> None:
        self.findings.acknowledged += 1
        self.findings.doubled += value <= known.get(number, 0)
        known[number] = value

    async def check(self) -> None:
        """Open the ledger and compare: every stream is contiguous, whole, as it was made."""
        ledger = await SqliteLedger.open(self.path, lambda: 0)
        try:
            for number in sorted(self.streams):
                await self._check_stream(ledger, number)
            for number in range(OBJECTS):
                await self._check_object(ledger, number)
        finally:
            await ledger.close()

    async def _check_stream(self, ledger: SqliteLedger, number: int) -> None:
        held = await read_all(ledger, stream_id(number))
        lost = max(0, self.streams[number] - len(held))
        if durability_of(number) is Durability.RELAXED:
            self.findings.lost_of_relaxed += lost
            self.streams[number] -= lost
        else:
            self.findings.lost += lost
        self._compare(held, [record(number, index) for index in range(len(held))])
        if self.streams[number] > LENGTH:
            del self.streams[number]  # the stream has ended; one check is enough

    def _compare(self, held: list[Record], right: list[Record]) -> None:
        for index, (one, other) in enumerate(zip(held, right, strict=True)):
            if one != other:
                self.findings.doubled += one in right[:index]
                self.findings.reordered += one not in right[:index]

    async def _check_object(self, ledger: SqliteLedger, number: int) -> None:
        held = await read_all(ledger, object_stream(number))
        stored = await ledger.objects.get(object_key(number), ["n"])
        value = int(stored.get("n", b"0"))
        self.findings.disagreeing += value != len(held)
        self.findings.lost += max(0, self.objects.get(number, 0) - value)
        self._compare(held, [object_record(number, index) for index in range(len(held))])


async def read_all(ledger: SqliteLedger, stream: bytes) -> list[Record]:
    try:
        info = await ledger.info(stream)
    except NotFound:
        return []
    return await ledger.read(stream, 0, info.next_index + 1)


class Nursery:
    """The process that bears producers, seen from outside."""

    def __init__(self, path: Path, file_bytes: int | None = None) -> None:
        limit = [] if file_bytes is None else [str(file_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ledger.producer", str(path), *limit],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._data = b""

    def close(self) -> None:
        self._process.communicate()

    def life(self, checker: Checker, kill_after: int | None) -> int:
        """Start a producer, SIGKILL it after some acknowledgements, and return its status."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        born, pid = self._line().split()
        assert born == "born"
        count = 0
        while not (line := self._line()).startswith("gone"):
            checker.acknowledged(line)
            count += 1
            if count == kill_after:
                os.kill(int(pid), signal.SIGKILL)
        return int(line.split()[1])

    def _line(self) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._data:
            more = self._process.stdout.read(READ_BYTES)
            assert more, "the nursery ended"
            self._data += more
        line, _, self._data = self._data.partition(b"\n")
        return line.decode()
