"""A real child process: what it answers, and that its end costs nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from ledger.errors import Damaged, NotFound
from ledger.frame import MAX_FRAME_BYTES, Chunk, encode
from ledger.interface import Record
from ledger.sqlite import compactor_message, dictionary_maker
from ledger.sqlite.cold import MAX_PAYLOAD_BYTES, Packed, unpack_cold
from ledger.sqlite.compactor import CompactorLost, InlineCompactor
from ledger.sqlite.compactor_message import HEADER, Kind, Message
from ledger.sqlite.compactor_process import COMMAND, NICENESS, CompactorProcess, Patience
from ledger.sqlite.dictionary import Dictionary
from ledger.sqlite.storage import SegmentRow
from tests.ledger.sqlite.cold_material import (
    COLD_AFTER_S,
    Clock,
    all_is_there,
    codings,
    fill,
    flip_bit,
    learnt,
    opened,
    plain_rows,
    sentence,
)

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]
ROW = learnt().pack()
STREAMS = 10
PATIENCE = Patience()


@asynccontextmanager
async def compactor(
    command: Sequence[str] = COMMAND, patience: Patience = PATIENCE
) -> AsyncIterator[CompactorProcess]:
    made = CompactorProcess(command, patience)
    try:
        yield made
    finally:
        await made.close()


def says(what: bytes, then: str = "sys.stdin.buffer.read()") -> tuple[str, ...]:
    """A child that says this and nothing else."""
    return (
        sys.executable,
        "-c",
        f"import sys; sys.stdout.buffer.write({what!r}); sys.stdout.flush(); {then}",
    )


# ---- questions ----


async def test_it_answers_as_one_in_this_process_does() -> None:
    inline = InlineCompactor()
    async with compactor() as process:
        for one in (process, inline):
            for seed in range(40):
                assert await one.sample(plain_rows(seed, sentence(100, seed))) == 101
        found = await process.learn()
        assert found == await inline.learn()
        rows = plain_rows(7, sentence(900, seed=99))
        for one in (process, inline):
            await one.know(3, found.row)
            assert tuple(one.known) == (3,)
        assert await process.pack(rows, 3) == await inline.pack(rows, 3)
        await process.begin()
        assert (await process.learn()).frames == 0


async def test_it_names_the_segment_that_is_damaged_and_goes_on() -> None:
    rows = plain_rows(7, sentence(300))
    bad = [*rows[:2], rows[2]._replace(records=rows[2].records[:-1]), *rows[3:]]
    async with compactor() as process:
        await process.know(1, ROW)
        pid = process.pid
        with pytest.raises(Damaged, match="segment at index 100"):
            await process.pack(bad, 1)
        packed = await process.pack(rows, 1)
        assert packed is not None
        assert unpack_cold(packed.row, learnt(), where="").records() == sentence(300)
        assert process.pid == pid


async def test_it_starts_with_the_first_question_and_is_nice() -> None:
    async with compactor() as process:
        before = process.pid
        await process.begin()
        pid = process.pid
        assert before is None
        assert pid is not None
        assert os.getpriority(os.PRIO_PROCESS, pid) == NICENESS
    with pytest.raises(ProcessLookupError):
        os.getpriority(os.PRIO_PROCESS, pid)


async def test_it_ends_when_it_is_idle_and_another_one_starts() -> None:
    async with compactor(patience=Patience(idle_s=0)) as process:
        await process.know(1, ROW)
        first, child = process.pid, process._child
        assert child is not None
        assert await asyncio.to_thread(child.process.wait) == 0
        assert (process.pid, tuple(process.known)) == (None, ())
        await process.know(2, ROW)
        assert process.pid not in (None, first)


# ---- children that fail ----


async def killed_while_it_works(process: CompactorProcess, rows: Sequence[SegmentRow]) -> None:
    """It cannot answer: it stands still, and then it is killed."""
    await process.know(1, ROW)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    asked = asyncio.create_task(process.pack(rows, 1))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CompactorLost, match=f"process {pid} gave no answer"):
        await asked


async def test_after_one_that_was_killed_comes_another() -> None:
    rows = plain_rows(7, sentence(300))
    async with compactor() as process:
        for _ in range(3):
            await killed_while_it_works(process, rows)
            assert (process.pid, tuple(process.known)) == (None, ())
        await process.know(1, ROW)
        assert await process.pack(rows, 1) is not None


async def test_one_that_was_killed_between_two_questions_is_not_missed() -> None:
    async with compactor() as process:
        await process.begin()
        child = process._child
        assert child is not None
        child.process.kill()
        await asyncio.to_thread(child.process.wait)
        await process.begin()
        assert process.pid not in (None, child.process.pid)


async def test_one_that_hangs_is_killed() -> None:
    async with compactor(patience=Patience(answer_s=0.05)) as process:
        with pytest.raises(CompactorLost, match="TimeoutError"):
            await process.begin()  # which takes longer than to start Python
        assert process.pid is None
    async with compactor(says(b"", "import time; time.sleep(1e9)"), Patience(0.05)) as process:
        with pytest.raises(CompactorLost, match="TimeoutError"):
            await process.begin()


async def test_one_that_does_not_heed_the_end_of_its_input_is_killed() -> None:
    deaf = says(compactor_message.encode(Message(Kind.DONE)), "import time; time.sleep(1e9)")
    process = CompactorProcess(deaf, Patience(stop_s=0.05))
    await process.begin()
    child = process._child
    assert child is not None
    await process.close()
    assert child.process.returncode == -signal.SIGKILL


DONE = compactor_message.encode(Message(Kind.DONE))


@pytest.mark.parametrize(
    "what",
    [
        b"Traceback (most recent call last):",
        bytes(20_000),
        HEADER.pack(0x31_43_52_54, 2**31) + bytes(20_000),
        DONE[: HEADER.size] + b"\xff" * 5,
        DONE[:-1] + b"\x07",
        compactor_message.encode(Message(Kind.PACKED, (1,), (b"",))),
        compactor_message.encode(Message(Kind.DONE, (1, 2))),
        compactor_message.encode(Message(Kind.DAMAGED, (), (b"",))),
    ],
    ids="text zeros long kind blobs packed numbers damaged".split(),
)
async def test_one_that_talks_nonsense_is_ended(what: bytes) -> None:
    async with compactor(says(what)) as process:
        with pytest.raises(CompactorLost, match="gave no answer"):
            await process.begin()
        assert process.pid is None


async def test_one_that_never_stops_talking_is_ended() -> None:
    endless = says(b"", "[sys.stdout.buffer.write(bytes(65536)) for _ in iter(int, 1)]")
    async with compactor(endless) as process:
        with pytest.raises(CompactorLost, match="begins no message"):
            await process.begin()


@pytest.mark.parametrize("command", [("/no/such/program",), (sys.executable, "-c", "")])
async def test_one_that_cannot_start_is_lost(command: Sequence[str]) -> None:
    async with compactor(command) as process:
        with pytest.raises(CompactorLost):
            await process.begin()


async def test_who_is_cancelled_leaves_no_answer_to_the_next() -> None:
    rows = plain_rows(7, sentence(300))
    async with compactor() as process:
        await process.know(1, ROW)
        asked = asyncio.create_task(process.pack(rows, 1))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await process.know(2, ROW)
        assert tuple(process.known) == (2,)  # another child, which knows no other


async def test_closing_it_ends_what_waits_for_an_answer() -> None:
    process = CompactorProcess(says(DONE))
    await process.begin()
    asked = asyncio.create_task(process.begin())
    await asyncio.sleep(0)
    await process.close()
    with pytest.raises(CompactorLost):
        await asked
    with pytest.raises(CompactorLost, match="being closed"):
        await process.begin()


async def test_who_is_cancelled_while_it_starts_leaves_no_process() -> None:
    async with compactor() as process:
        asked = asyncio.create_task(process.begin())
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert process.pid is None
        await process.begin()


async def test_closing_it_while_it_starts_leaves_nothing() -> None:
    process = CompactorProcess()
    asked = asyncio.create_task(process.begin())
    await asyncio.sleep(0)
    await process.close()
    with pytest.raises(CompactorLost, match="being closed"):
        await asked
    assert process.pid is None


PARENT = """
import asyncio, signal
from ledger.sqlite.compactor_process import CompactorProcess

async def main():
    process = CompactorProcess()
    await process.begin()
    print(process.pid, flush=True)
    await asyncio.sleep(1e9)

asyncio.run(main())
"""


def test_it_dies_with_its_parent() -> None:
    """Both hold the same pipe for errors, which ends with the last of them."""
    with subprocess.Popen(
        (sys.executable, "-c", PARENT),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = int(parent.stdout.readline())
        assert os.getpriority(os.PRIO_PROCESS, child) == NICENESS
        parent.kill()
        assert parent.stderr.read() == b""


def test_it_runs_without_torch_and_sqlite() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, apsw=None, sqlite3=None);"
        "import ledger.sqlite.compactor_child as c; c.main()"
    )
    ended = subprocess.run(
        (sys.executable, "-c", code), cwd=ROOT, input=b"", capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# ---- in a ledger ----


@pytest.fixture
def learns_from_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dictionary_maker, "MIN_TRAIN_FRAMES", 2_000)


class Mortal(CompactorProcess):
    """Is killed with every question to pack, until it is spared."""

    spared = False

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        if not self.spared:
            self.spared = True
            pid = self.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            asyncio.get_running_loop().call_soon(os.kill, pid, signal.SIGKILL)
        return await super().pack(rows, coding)


@pytest.mark.usefixtures("learns_from_little")
async def test_a_ledger_whose_child_is_killed_packs_with_the_next_sweep(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock, Mortal()) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        with capture_logs() as said:
            await ledger.expire()
        assert [line["event"] for line in said] == ["ledger.dictionary", "ledger.compactor_lost"]
        assert codings(tmp_path) == [(0, 2 * STREAMS)]
        await all_is_there(ledger, held)
        clock.pass_s(COLD_AFTER_S)
        await ledger.expire()
        assert codings(tmp_path) == [(1, STREAMS)]
        await all_is_there(ledger, held)


@pytest.mark.usefixtures("learns_from_little")
async def test_a_damaged_segment_is_named_and_left_and_the_others_are_packed(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        held = await fill(ledger, STREAMS)
    flip_bit(tmp_path, 2, 50)
    bad = list(held)[1]
    clock.pass_s(COLD_AFTER_S)
    async with opened(tmp_path, clock, CompactorProcess()) as ledger:
        with capture_logs() as said:
            await ledger.expire()
        [line] = [line for line in said if line["log_level"] == "error"]
        assert (line["event"], line["stream"]) == ("stream.damaged", bad.hex())
        assert "segment at index 0" in line["error"]
        assert codings(tmp_path) == [(0, 2), (1, STREAMS - 1)]
        with pytest.raises(Damaged, match=bad.hex()):
            await ledger.read(bad, 0, 10)
        del held[bad]
        await all_is_there(ledger, held)


@pytest.mark.usefixtures("learns_from_little")
async def test_a_stream_is_deleted_while_a_child_packs_it(tmp_path: Path) -> None:
    clock = Clock()
    slow = Slow()
    async with opened(tmp_path, clock, slow) as ledger:
        held = await fill(ledger, STREAMS)
        clock.pass_s(COLD_AFTER_S)
        sweep = asyncio.create_task(ledger.expire())
        await slow.packing.wait()
        gone = next(iter(held))
        await ledger.delete(gone)
        slow.go_on.set()
        await sweep
        with pytest.raises(NotFound):
            await ledger.info(gone)
        del held[gone]
        await all_is_there(ledger, held)
        assert codings(tmp_path) == [(1, STREAMS - 1)]


class Slow(CompactorProcess):
    """Holds its first cold segment back until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.packing, self.go_on = asyncio.Event(), asyncio.Event()

    async def pack(self, rows: Sequence[SegmentRow], coding: int) -> Packed | None:
        packed = await super().pack(rows, coding)
        self.packing.set()
        await self.go_on.wait()
        return packed


async def test_a_dictionary_that_it_learnt_is_whole() -> None:
    async with compactor() as process:
        for seed in range(20):
            await process.sample(plain_rows(seed, sentence(100, seed)))
        found = await process.learn()
    assert Dictionary.unpack(found.row, where="").frames == found.frames == 20 * 101


async def test_a_run_as_large_as_may_be_is_packed_within_the_memory_of_a_child() -> None:
    data = Random(1).randbytes(MAX_FRAME_BYTES - 100)
    frames = [Record(encode(Chunk(data, True, index)), ()) for index in range(15)]
    [row] = plain_rows(1, frames)
    assert MAX_PAYLOAD_BYTES * 0.9 < len(row.records) <= MAX_PAYLOAD_BYTES
    async with compactor() as process:
        await process.know(1, ROW)
        packed = await process.pack([row], 1)
        assert packed is not None
        assert unpack_cold(packed.row, learnt(), where="").records() == frames
