"""A real text worker process, with the test as its supervisor."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.ledger.frame import FinishReason, Hello, Notice, StreamEnd, Token
from tailrace.ledger.frame import decode as decode_client
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.config import OriginConfig
from tailrace.origin.workers.program import program
from tailrace.origin.workers.text_worker import OUTBOX_FRAMES, TextWorker
from tailrace.origin.workers.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    WORKER,
    ActiveRuns,
    CancelRun,
    Frame,
    LoadProgress,
    Ready,
    RunWaits,
    StartRun,
    StartTextRun,
    Step,
    decode,
    encode,
)
from tests.origin.blocked_phrase import MESSAGE
from tests.origin.emissions import rows
from tests.origin.producers.asked import recipe
from tests.origin.producers.text_producers import Endless

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]
HELLO = Hello(SCHEMA_HASH, "test")
TIMEOUT_S = 60.0
ENDLESS = "tests.origin.producers.text_producers:endless"
WAITING = "tests.origin.producers.text_producers:waiting"
ECHO = "tests.origin.producers.text_producers:echo"


class Worker:
    """A text worker process and the supervisor's end of its socket."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process = process
        self.fingerprint = ""
        """Fingerprint that the producer has reported; admission writes it into the recipe."""
        self.progress: list[LoadProgress] = []
        self.steps: list[Step] = []
        self.begun: list[tuple[int, ...]] = []
        self._frames: dict[int, list[Any]] = {}
        self._reader = reader
        self._writer = writer
        self._splitter = FrameSplitter(WORKER, MAX_WORKER_FRAME_BYTES)
        self._come: list[Frame] = []

    def send(self, *frames: Frame, run: int = 0) -> None:
        self._writer.write(b"".join(encode(frame, run) for frame in frames))

    def ask(self, run: int, prompt: str, delivered: str = "", next_index: int = 0) -> None:
        asked = recipe(prompt, fingerprint=self.fingerprint).model_dump_json()
        self.send(StartTextRun(asked, delivered, next_index), run=run)

    async def greet(self) -> Ready:
        self.send(HELLO)
        assert await self._next() == Hello(SCHEMA_HASH, "tailrace-text-worker")
        while not isinstance(frame := await self._next(), Ready):
            assert isinstance(frame, LoadProgress)
            self.progress.append(frame)
        self.fingerprint = frame.fingerprint
        return frame

    async def frames(self, run: int, count: int | None = None) -> list[Any]:
        """Return the stream's frames to its end, or at least `count` of them."""
        while not self._has(run, count):
            step = await self._next()
            if isinstance(step, ActiveRuns):
                self.begun.append(step.runs)
                continue
            if isinstance(step, RunWaits):
                continue
            assert isinstance(step, Step)
            self.steps.append(step)
            for emission in rows(step):
                frame: Any = decode_client(emission.frame)[1]
                assert frame.index == emission.index
                self._frames.setdefault(emission.run, []).append(frame)
        return self._frames[run]

    def _has(self, run: int, count: int | None) -> bool:
        made = self._frames.get(run, [])
        if count is not None and len(made) >= count:
            return True
        return bool(made) and isinstance(made[-1], StreamEnd)

    async def _next(self) -> Frame:
        async with asyncio.timeout(TIMEOUT_S):
            while not self._come:
                data = await self._reader.read(1 << 16)
                assert data, await self.errors()
                self._come += [decode(raw)[1] for raw in self._splitter.feed(data)]
        return self._come.pop(0)

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def leave(self) -> tuple[int, str]:
        """Close the socket; the worker's exit status and its stderr."""
        self._writer.close()
        async with asyncio.timeout(TIMEOUT_S):
            errors = await self.errors()
            return await self.process.wait(), errors


@asynccontextmanager
async def worker(folder: Path, config: OriginConfig, **environment: str) -> AsyncIterator[Worker]:
    path = folder / "worker.sock"
    came: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue(1)
    server = await asyncio.start_unix_server(lambda *streams: came.put_nowait(streams), path)
    module, settings = program(config)
    assert module == "tailrace.origin.workers.text_worker"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, str(path), settings),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        with closing(server):
            async with asyncio.timeout(TIMEOUT_S):
                reader, writer = await came.get()
        yield Worker(process, reader, writer)
        writer.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_producer_is_announced_and_answers_several_streams(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO, model_name="mine")) as it:
        ready = await it.greet()
        assert (ready.kind, ready.model, ready.fingerprint) == ("text", "mine", "echo 1")
        assert (ready.context, ready.vocab) == (0, 0)
        it.ask(1, "one two")
        it.ask(2, "three")
        assert await it.frames(1) == [
            Token("one ", 0),
            Token("two ", 1),
            StreamEnd(2, FinishReason.STOP, 2, 0),
        ]
        assert (await it.frames(2))[:-1] == [Token("three ", 0)]
        assert await it.leave() == (0, "")


async def test_it_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is blocked')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    async with worker(tmp_path, OriginConfig(producer=ECHO), PYTHONPATH=path) as it:
        assert (await it.greet()).model == "echo"


async def test_the_rest_of_a_stream_is_produced(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        await it.greet()
        it.ask(1, "one two three", "one two ", 2)
        assert await it.frames(1) == [Token("three ", 2), StreamEnd(3, FinishReason.STOP, 3, 0)]


async def test_a_worker_whose_producer_waits_shows_that_it_lives(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=WAITING)) as it:
        await it.greet()
        it.ask(1, "x")
        beats: list[Frame] = []
        while beats.count(ActiveRuns((1,))) < 3:
            beats.append(await it._next())


async def test_a_halt_ends_a_stream_as_cancelled_and_closes_its_producer(tmp_path: Path) -> None:
    noted = tmp_path / "closed"
    async with worker(tmp_path, OriginConfig(producer=ENDLESS), NOTED=str(noted)) as it:
        await it.greet()
        it.ask(1, "x")
        await it.frames(1, count=10)
        it.send(CancelRun(), run=1)
        made = await it.frames(1)
        assert [each.index for each in made] == list(range(len(made)))
        assert made[-1].finish_reason is FinishReason.CANCELLED
        assert noted.read_text() == "closed"


async def test_a_halt_right_behind_its_ask_still_gives_an_end(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ENDLESS)) as it:
        await it.greet()
        it.send(StartTextRun(recipe().model_dump_json(), "", 0), CancelRun(), run=1)
        assert (await it.frames(1))[-1].finish_reason is FinishReason.CANCELLED


async def test_a_stream_that_waits_for_its_turn_can_be_cancelled(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ENDLESS, text_streams=1)) as it:
        await it.greet()
        it.ask(1, "x")
        it.ask(2, "x")
        await it.frames(1, count=1)
        assert it.begun[-1] == (1,)  # if it dies now, it is not of the second
        it.send(CancelRun(), run=2)
        assert await it.frames(2) == [StreamEnd(0, FinishReason.CANCELLED, 0, 0)]
        it.ask(3, "x")
        it.send(CancelRun(), run=1)
        assert (await it.frames(3, count=1))[0].index == 0


async def test_a_halt_for_a_stream_that_is_over_is_nothing(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        await it.greet()
        it.send(CancelRun(), run=9)
        it.ask(1, "one")
        await it.frames(1)
        it.send(CancelRun(), run=1)
        it.ask(2, "two")
        await it.frames(2)
        assert len(await it.frames(1)) == 2


async def test_a_producer_is_pulled_no_faster_than_it_is_read(tmp_path: Path) -> None:
    noted = tmp_path / "closed"
    async with worker(tmp_path, OriginConfig(producer=ENDLESS), NOTED=str(noted)) as it:
        await it.greet()
        it.ask(1, "x" * 50_000)
        await it.frames(1, count=1)
        it.send(CancelRun(), run=1)
        # Nothing was read while it ran; the halt has it stop where the buffers were full.
        made = await it.frames(1)
        buffers = 4 << 20  # buffers of the socket, the transport and the reader
        assert len(made) < 3 * OUTBOX_FRAMES + buffers // 50_000


async def test_a_producer_that_raises_costs_only_its_own_stream(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        await it.greet()
        it.ask(1, "one raise")
        it.ask(2, "two")
        made = await it.frames(1)
        assert made[0] == Token("one ", 0)
        assert made[1].finish_reason is FinishReason.FAILED
        assert "secret" not in made[1].message
        assert (await it.frames(2))[-1].finish_reason is FinishReason.STOP
        status, errors = await it.leave()
        assert status == 0
        assert "producer.failed" in errors
        assert "secret" in errors


async def test_a_filter_ends_a_producers_stream_before_the_phrase(tmp_path: Path) -> None:
    config = OriginConfig(producer=ECHO, filter="tests.origin.blocked_phrase:make")
    async with worker(tmp_path, config) as it:
        await it.greet()
        it.ask(1, "to the secret hill and on")
        it.ask(2, "to the secret garden")
        made = await it.frames(1)
        assert "".join(each.text for each in made[:-1]) == "to the "
        assert made[-1] == StreamEnd(4, FinishReason.FILTERED, len(made) - 1, 0, MESSAGE)
        made = await it.frames(2)
        assert "".join(each.text for each in made[:-1]) == "to the secret garden "
        assert made[-1].finish_reason is FinishReason.STOP


async def test_a_filter_that_cannot_be_made_is_named_on_stderr(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO, filter="no_such_module:make")) as it:
        it.send(HELLO)
        async with asyncio.timeout(TIMEOUT_S):
            assert await it.process.wait() == 1
        assert "cannot import no_such_module" in await it.errors()


async def test_a_recipes_notices_come_first_and_once(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        await it.greet()
        asked = recipe("one", notices=(("said", "before"),)).model_dump_json()
        it.send(StartTextRun(asked, "", 0), run=1)
        it.send(StartTextRun(asked, "", 1), run=2)
        whole = await it.frames(1)
        assert whole[:2] == [Notice("said", "before", 0), Token("one ", 1)]
        assert await it.frames(2) == whole[1:]


async def test_an_order_of_another_kind_ends_the_worker(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        await it.greet()
        it.send(StartRun((1,), (), 0, 0, 5), run=1)
        async with asyncio.timeout(TIMEOUT_S):
            assert await it.process.wait() == 1
        assert "a text worker cannot handle StartRun" in await it.errors()


async def test_a_producer_that_cannot_be_made_is_named_on_stderr(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer="no_such_module:make")) as it:
        it.send(HELLO)
        async with asyncio.timeout(TIMEOUT_S):
            assert await it.process.wait() == 1
        errors = await it.errors()
        assert "No module named 'no_such_module'" in errors
        assert "Traceback" not in errors


async def test_a_supervisor_of_another_schema_is_refused(tmp_path: Path) -> None:
    async with worker(tmp_path, OriginConfig(producer=ECHO)) as it:
        it.send(Hello(bytes(8), "test"))
        async with asyncio.timeout(TIMEOUT_S):
            assert await it.process.wait() == 1
        assert "SchemaMismatch" in await it.errors()


async def test_a_supervisor_that_goes_while_nothing_is_ready_ends_the_worker(
    tmp_path: Path,
) -> None:
    # Nothing listens on port 9 of this host: the worker waits for an upstream server.
    async with worker(tmp_path, OriginConfig(upstream="http://127.0.0.1:9/v1")) as it:
        it.send(HELLO)
        while not isinstance(await it._next(), LoadProgress):
            pass
        status, errors = await it.leave()
        assert status == 0, errors


ASKED = StartTextRun(recipe("x").model_dump_json(), "", 0)


@asynccontextmanager
async def in_this_process(
    clock_s: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[TextWorker, AsyncIterator[Frame]]]:
    """Yield a worker that produces one stream at a time without an end, and the frames it sends."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, other = await asyncio.open_connection(sock=theirs)

    async def sent() -> AsyncIterator[Frame]:
        splitter = FrameSplitter(WORKER, MAX_WORKER_FRAME_BYTES)
        while True:
            for raw in splitter.feed(await reader.read(1 << 16)):
                yield decode(raw)[1]

    served = TextWorker(Endless(), writer, streams=1, clock_s=clock_s)
    sending = asyncio.create_task(served.send())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield served, sent()
    finally:
        await served.close()
        sending.cancel()
        writer.close()
        other.close()
        await asyncio.gather(sending, return_exceptions=True)


async def test_a_stream_that_waits_for_its_turn_says_how_long() -> None:
    now_s = 100.0
    async with in_this_process(lambda: now_s) as (served, frames):
        waits = (frame async for frame in frames if isinstance(frame, RunWaits))
        steps = (frame async for frame in frames if isinstance(frame, Step))
        served.take(1, ASKED)
        served.take(2, ASKED)
        assert {each.run for each in rows(await anext(steps))} == {1}
        now_s = 103.0
        served.report_waits()
        assert await anext(waits) == RunWaits.of({2: 3.0})
        now_s = 107.5
        served.take(1, CancelRun())
        assert await anext(waits) == RunWaits.of({2: 7.5})
        now_s = 200.0
        served.report_waits()  # no stream waits any more, so nothing is sent
        async for frame in frames:
            assert not isinstance(frame, RunWaits)
            if isinstance(frame, Step) and {each.run for each in rows(frame)} == {2}:
                break
        served.take(3, ASKED)
        await asyncio.sleep(0)  # its task begins to wait
        now_s = 201.0
        served.take(3, CancelRun())
        assert await anext(waits) == RunWaits.of({3: 1.0})


async def test_a_stream_too_many_ends_at_once_to_be_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tailrace.origin.workers.text_worker.MAX_WAITING_STREAMS", 1)
    async with in_this_process() as (served, frames):
        for run in (1, 2, 3):
            served.take(run, ASKED)
        end: Any = None
        while end is None:
            frame = await anext(frames)
            made = rows(frame) if isinstance(frame, Step) else []
            end = next((decode_client(each.frame)[1] for each in made if each.run == 3), None)
    assert (end.finish_reason, end.retryable, end.index) == (FinishReason.FAILED, True, 0)
    assert end.message == "the worker already has 2 running and waiting streams"
