"""One worker slot of the supervisor: its process and its socket.

After `launch`, a slot starts a worker's process. It reads the worker's frames in order, kills the
worker if that hangs, and reports how the process ended. The slot's owner decides whether to start
another process. A slot may be launched before it has an owner, because loading takes long. The
worker's frames are then not read until there is an owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import structlog

from tailrace.ledger.errors import FrameError, SchemaMismatch
from tailrace.ledger.frame import Hello
from tailrace.ledger.process.lifecycle import import_environment
from tailrace.ledger.process.tasks import cancel
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.gpu.placement import gpu_environment
from tailrace.origin.workers import worker_frame
from tailrace.origin.workers.fork_client import ChildProcess, ForkServer, kill, spawn
from tailrace.origin.workers.liveness import (
    LOOK_S,
    ExitKind,
    Pulse,
    SilenceLimits,
    count_oom_kills,
    kind_of_exit,
)
from tailrace.origin.workers.load_spans import COMPILE, FORKED, SPAWNED, LoadStage, WorkerStart
from tailrace.origin.workers.socket_folder import socket_folder
from tailrace.origin.workers.worker_frame import (
    ActiveRuns,
    Emissions,
    Fault,
    Frame,
    Load,
    LoadProgress,
    Ready,
    RunWaits,
    StageTimes,
)

STOP_GRACE_S = 2.0
"""Seconds that a worker has to exit after its socket was closed, or after SIGABRT, before it is
killed."""
KILL_GRACE_S = 5.0
"""Seconds to wait for the end of a killed worker.

A worker that has not ended by then hangs in the kernel, so the slot stops waiting."""
LAST_WORDS_S = 1.0
"""Maximum seconds for reading the remaining output of a worker that has exited.

Without a limit, a child of the worker that holds the socket open would block the slot for ever."""
READ_BYTES = 64 * 1024
"""Maximum bytes of one read from a worker; all Steps of one read are stored in one group commit."""

log = structlog.get_logger("worker")


class Owner:
    """Receives the events of a slot. All handlers do nothing by default."""

    def worker_loading(self, slot: WorkerSlot, progress: LoadProgress) -> None:
        """Handle that the worker's start has reached a stage, or has made progress in it."""

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None:
        """Handle that the worker may be given streams."""

    def worker_begun(self, slot: WorkerSlot, begun: ActiveRuns) -> None:
        """Handle the worker's report of the runs that it works on."""

    def worker_load(self, slot: WorkerSlot, load: Load) -> None:
        """Handle the worker's report of how busy it is."""

    def worker_stages(self, slot: WorkerSlot, times: StageTimes) -> None:
        """Handle the times of a stream's stages; the stream ends next."""

    def worker_waits(self, slot: WorkerSlot, waits: RunWaits) -> None:
        """Handle the worker's report of how long runs have waited for the batch."""

    async def worker_step(self, slot: WorkerSlot, made: Emissions) -> None:
        """Store the output of engine steps."""

    def worker_silent(self, slot: WorkerSlot) -> None:
        """Handle that the worker has fallen silent."""

    async def worker_heard(self, slot: WorkerSlot) -> None:
        """Handle that a silent worker has sent something."""

    async def worker_lost(self, slot: WorkerSlot) -> None:
        """Handle that the process has ended without being told to."""

    async def worker_rested(self, slot: WorkerSlot) -> None:
        """Handle that the process has ended because it was told to."""


class WorkerSlot:
    """A place for one worker process.

    Attributes:
        number: The slot's number in the origin.
        model: Name of the model that it serves; empty if the origin serves a single model.
        pid: The pid of the running process, or None.
        ready: The worker's Ready frame, or None while there is no ready worker.
        start: The stages of the worker's start, once it is ready.
        exit_reason: How the last process ended, in words.
        exit_kind: Why the last process ended.
    """

    def __init__(
        self,
        number: int,
        program: tuple[str, str],
        limits: SilenceLimits | None = None,
        fork_server: ForkServer | None = None,
        model: str = "",
        gpu: str | None = None,
    ) -> None:
        """Create a slot without a process; `program` is the module to run, and its settings."""
        self.number = number
        self.model = model
        self.gpu = gpu
        """The only GPU that the worker sees, as CUDA_VISIBLE_DEVICES names it; None: no limit."""
        self.pid: int | None = None
        self.ready: Ready | None = None
        self.exit_reason = ""
        self.exit_kind = ExitKind.EXITED
        self.start: WorkerStart | None = None
        self._wanted, self._unwanted = asyncio.Event(), asyncio.Event()
        self._is_launched = False
        self._is_silent = False
        self._asked_s = 0.0
        self._forked = False
        self._module, self._settings = program
        self._limits = limits or SilenceLimits()
        self._fork_server = fork_server
        self._fault: tuple[str, ExitKind] | None = None
        self._welcoming: asyncio.Task[None] | None = None
        self._owner: Owner | None = None
        self._is_owned = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]](1)

    def belong_to(self, owner: Owner) -> None:
        """Set the owner, which also gets the earlier events: they have waited for an owner."""
        self._owner = owner
        self._is_owned.set()

    def send(self, frame: Frame, run: int) -> None:
        """Send an order to the worker; if the worker has died, the order is dropped."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(worker_frame.encode(frame, run))

    def launch(self) -> None:
        """Start a process, unless one runs or its end was not reported to the owner yet."""
        if not self._is_launched:
            self._is_launched, self._asked_s = True, time.monotonic()
            self._unwanted.clear()
            self._wanted.set()

    def stop(self) -> None:
        """End the process; the owner gets `worker_rested` when it has ended."""
        self._unwanted.set()

    async def keep(self) -> None:
        """Start a process after each call of `launch`, and report its end, until cancelled."""
        with socket_folder() as folder:
            path = folder / "worker.sock"
            server = await asyncio.start_unix_server(self._accept, path)
            # Not `async with`, which from Python 3.12 on waits until all clients have disconnected.
            with contextlib.closing(server):
                while True:
                    await self._wanted.wait()
                    self._wanted.clear()
                    if not self._unwanted.is_set():
                        await self._one_life(path)
                    await self._report_end()

    async def _report_end(self) -> None:
        owner = await self._told()
        self._is_launched = False
        if self._unwanted.is_set():
            await owner.worker_rested(self)
        else:
            await owner.worker_lost(self)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._connected.put_nowait((reader, writer))
        except asyncio.QueueFull:
            writer.close()

    async def _one_life(self, path: Path) -> None:
        """Start a process and read from it until it has ended."""
        oom_kills = count_oom_kills()
        self._connected = asyncio.Queue(1)
        self._fault, self._is_silent = None, False
        process = await self._start(path)
        self.pid = process.pid
        pulse = Pulse(self._limits, time.monotonic())
        exited = asyncio.create_task(process.wait())
        self._welcoming = None
        hearing = asyncio.create_task(self._hear(pulse))
        watching = asyncio.create_task(self._watch(pulse, process, exited))
        unwanted = asyncio.create_task(self._unwanted.wait())
        try:
            await asyncio.wait(
                (exited, hearing, watching, unwanted), return_when=asyncio.FIRST_COMPLETED
            )
            if unwanted.done() and self._writer is not None:
                self._disconnect()  # an idle worker exits when its socket closes
                await asyncio.wait((exited, hearing), timeout=STOP_GRACE_S)
            elif exited.done() and self._writer is not None:
                await self._hear_last_words(hearing)
        finally:
            tasks = (hearing, watching, unwanted, self._welcoming)
            await cancel(filter(None, tasks))
            if self._writer is None:
                kill(process)  # the worker never connected, or did not exit in time
            self._disconnect()
            await _reap(process, exited)
        if self._unwanted.is_set():
            log.info("worker.left", slot=self.number, pid=self.pid, model=self.model)
            self.pid = self.ready = None
            return
        for task in (hearing, self._welcoming):
            if task is not None and not task.cancelled():
                self._pass_on(task.exception())
        self._bury(process.returncode, count_oom_kills() - oom_kills)

    def _bury(self, status: int | None, oom_kills: int) -> None:
        """Set and log the reason why the process ended."""
        told = _fate(status), kind_of_exit(status, oom_kills)
        self.exit_reason, self.exit_kind = self._fault or told
        log.warning(
            "worker.lost",
            slot=self.number,
            pid=self.pid,
            exit=status,
            exit_reason=self.exit_reason,
            kind=self.exit_kind.value,
        )
        self.pid = self.ready = None

    async def _start(self, path: Path) -> ChildProcess:
        """Start a worker's process: forked if possible, otherwise spawned."""
        self._forked = False
        own = gpu_environment(self.gpu, os.environ)
        if self._fork_server is not None:
            forked = await self._fork_server.fork(str(path), self._settings, environment=own)
            if forked is not None:
                self._forked = True
                return forked
        environment = {**worker_environment(), **own}
        return await spawn(self._module, str(path), self._settings, env=environment)

    async def _watch(self, pulse: Pulse, process: ChildProcess, exited: asyncio.Task[int]) -> None:
        """Report when the worker falls silent, and kill the worker when it hangs.

        SIGABRT is sent first, at which a worker writes a traceback if it can.
        """
        while not pulse.is_hung:
            await asyncio.sleep(LOOK_S)
            pulse.look(time.monotonic())
            if self.ready is not None and pulse.is_silent and not self._is_silent:
                log.warning("worker.silent", slot=self.number, pid=self.pid)
                self._is_silent = True
                (await self._told()).worker_silent(self)
        self._fault = f"hung: it sent nothing for {pulse.silence_s:.0f} s", ExitKind.HUNG
        log.error("worker.hung", slot=self.number, pid=self.pid, silence_s=pulse.silence_s)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGABRT)
        await asyncio.wait((exited,), timeout=STOP_GRACE_S)
        kill(process)
        await asyncio.wait((exited,), timeout=KILL_GRACE_S)

    async def _hear_last_words(self, hearing: asyncio.Task[None]) -> None:
        """Wait until the task `hearing` has read the remaining output of an exited worker.

        If reading fails, the exception stays in the task. LAST_WORDS_S limits only the reading:
        output that was read is stored, however long that takes.
        """
        await asyncio.wait((hearing,), timeout=LAST_WORDS_S)
        if self._writer is not None:
            self._writer.transport.abort()
        await asyncio.wait((hearing,))

    def _pass_on(self, error: BaseException | None) -> None:
        """Log an error that the worker has caused; raise any other error."""
        if isinstance(error, FrameError | SchemaMismatch | OSError):
            log.error("worker.bad_frame", slot=self.number, error=str(error))
            if isinstance(error, FrameError | SchemaMismatch):
                self._fault = f"it sent a malformed frame: {error}", ExitKind.BAD_FRAME
        elif error is not None:
            raise error

    async def _told(self) -> Owner:
        """Wait until the slot has an owner, and return it."""
        await self._is_owned.wait()
        assert self._owner is not None
        return self._owner

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _hear(self, pulse: Pulse) -> None:
        reader, self._writer = await self._connected.get()
        self._writer.write(worker_frame.encode(Hello(worker_frame.SCHEMA_HASH, "supervisor")))
        owner = await self._told()
        splitter = FrameSplitter(worker_frame.WORKER, worker_frame.MAX_WORKER_FRAME_BYTES)
        greeted = False
        while data := await reader.read(READ_BYTES):
            pulse.turn_away()
            if self._is_silent:
                self._is_silent = False
                await owner.worker_heard(self)
            said = (worker_frame.decode(raw)[1] for raw in splitter.feed(data))
            for frame in worker_frame.together(said):
                if not greeted:
                    worker_frame.check_hello(0, frame)
                    greeted = True
                else:
                    await self._dispatch(owner, frame)
                    pulse.expect(starting=self.ready is None or isinstance(frame, LoadProgress))
            if self._welcoming is not None and self._welcoming.done():
                self._welcoming.result()
            pulse.listen(time.monotonic())

    async def _dispatch(self, owner: Owner, frame: Frame | Emissions) -> None:
        match frame:
            case Emissions():
                await owner.worker_step(self, frame)
            case ActiveRuns():
                owner.worker_begun(self, frame)
            case Load():
                owner.worker_load(self, frame)
            case StageTimes():
                owner.worker_stages(self, frame)
            case RunWaits():
                owner.worker_waits(self, frame)
            case Fault():
                self._fault = frame.error, ExitKind.of(frame.kind)
            case LoadProgress():
                if frame.stage == COMPILE:
                    where = {"slot": self.number, "model": self.model}
                    log.info("worker.compiling", kernel=frame.done, of=frame.total, **where)
                owner.worker_loading(self, frame)
            case Ready():
                self.ready = frame
                self.start = self._started(frame, time.monotonic())
                log.info(
                    "worker.ready",
                    slot=self.number,
                    pid=self.pid,
                    model=frame.model,
                    device=frame.device,
                    load_ms=frame.load_ms,
                    path=self.start.path,
                    stages={stage.name: stage.ms for stage in self.start.stages},
                    attributed=round(self.start.attributed, 4),
                )
                # In a task, so that Steps of the first streams are read while the owner still
                # assigns further streams.
                self._welcoming = asyncio.create_task(owner.worker_ready(self, frame))
            case _:
                raise FrameError(
                    "a worker must not send this frame", field=type(frame).__name__, offset=0
                )

    def _started(self, ready: Ready, heard_s: float) -> WorkerStart:
        """Return all stages of a start: of the fork server, of forking or spawning, of the worker.

        Stages of the fork server count only from the time at which the worker was requested.
        """
        own = ready.spans
        began_s = own[0].begin_s if own else heard_s
        fork_server = (
            self._fork_server.stages if self._fork_server is not None and self._forked else ()
        )
        before = [
            replace(stage, begin_s=max(stage.begin_s, self._asked_s))
            for stage in fork_server
            if stage.end_s > self._asked_s
        ]
        waited_s = before[-1].end_s if before else self._asked_s
        path = FORKED if self._forked else SPAWNED
        stages = (*before, LoadStage(path, waited_s, began_s), *own)
        return WorkerStart(path, self._asked_s, heard_s, stages)


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker; it sets one OpenMP thread, to leave cores to others."""
    return {"OMP_NUM_THREADS": "1", **import_environment()}


async def _reap(process: ChildProcess, exited: asyncio.Task[int]) -> None:
    """Wait until the process has ended; kill it if that takes too long."""
    done, _ = await asyncio.wait((exited,), timeout=STOP_GRACE_S)
    if not done:
        kill(process)
        done, _ = await asyncio.wait((exited,), timeout=KILL_GRACE_S)
    if not done:
        # The worker's socket is closed, so it can do no harm.
        log.error("worker.does_not_end", pid=process.pid)


def _fate(status: int | None) -> str:
    """Describe an exit status in words; None means that a killed process has not ended."""
    if status is None:
        return "was killed but has not ended"
    if status >= 0:
        return f"exit status {status}"
    with contextlib.suppress(ValueError):
        return f"ended by {signal.Signals(-status).name}"
    return f"ended by signal {-status}"
