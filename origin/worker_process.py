"""One worker slot of the supervisor: its process, its socket, and its restarts.

A slot runs a program of `origin.program`, hears its frames in order and starts a new process
when one dies. What the frames mean is the business of the `Owner`. A slot begins without one,
because a worker takes longer to load than its owner; what it says waits for the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import structlog

from ledger.errors import FrameError, SchemaMismatch
from ledger.frame import Hello
from origin import worker_frame
from origin.worker_frame import Frame, Load, LoadProgress, Ready, Step

RESTART_MIN_S = 0.1
RESTART_MAX_S = 5.0
"""Wait before a dead worker's successor starts; doubles while none becomes ready."""
STOP_GRACE_S = 2.0
"""A worker that has not exited so long after its socket closed is killed."""
READ_BYTES = 256 * 1024

log = structlog.get_logger("worker")


class Owner(Protocol):
    """Who hears what happens in a slot."""

    def worker_loading(self, slot: WorkerSlot, progress: LoadProgress) -> None: ...

    async def worker_ready(self, slot: WorkerSlot, ready: Ready) -> None: ...

    def worker_load(self, slot: WorkerSlot, load: Load) -> None: ...

    async def worker_step(self, slot: WorkerSlot, step: Step) -> None: ...

    async def worker_lost(self, slot: WorkerSlot) -> None: ...


class WorkerSlot:
    """`number` is the slot's place in the pool; `pid` that of its process now, if any.

    `program` is the module to run and its arguments but for the socket.
    """

    def __init__(self, number: int, program: Sequence[str]) -> None:
        self.number = number
        self.pid: int | None = None
        self.ready: Ready | None = None
        self._program = program
        self._owner: Owner | None = None
        self._is_owned = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]](1)

    def belong_to(self, owner: Owner) -> None:
        """Tell `owner` from now on, and what has happened before."""
        self._owner = owner
        self._is_owned.set()

    def send(self, frame: Frame, run: int) -> None:
        """Give the worker an order; lost with the worker if it dies, as its runs are."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(worker_frame.encode(frame, run))

    async def keep(self) -> None:
        """Run workers in this slot, one after another, until cancelled."""
        wait = RESTART_MIN_S
        with tempfile.TemporaryDirectory(prefix="tailrace-") as folder:
            path = Path(folder) / "worker.sock"
            server = await asyncio.start_unix_server(self._accept, path)
            async with server:
                while True:
                    became_ready = await self._one_life(path)
                    wait = RESTART_MIN_S if became_ready else min(wait * 2, RESTART_MAX_S)
                    await asyncio.sleep(wait)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._connected.put_nowait((reader, writer))
        except asyncio.QueueFull:
            writer.close()

    async def _one_life(self, path: Path) -> bool:
        """Start a worker and hear it until it is gone; returns whether it became ready."""
        self._connected = asyncio.Queue(1)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", *self._program, "--socket", str(path)),
            env=_worker_environment(),
            stdin=asyncio.subprocess.DEVNULL,
        )
        self.pid = process.pid
        exited = asyncio.create_task(process.wait())
        hearing = asyncio.create_task(self._hear())
        try:
            await asyncio.wait((exited, hearing), return_when=asyncio.FIRST_COMPLETED)
            if exited.done() and self._writer is not None:
                await hearing  # what it said before it died is in the socket still
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            if self._writer is None:
                _kill(process)  # it has not called yet: nothing is lost, and it would not hear us
            self._disconnect()
            await _reap(process, exited)
        if not hearing.cancelled() and (error := hearing.exception()) is not None:
            if not isinstance(error, FrameError | SchemaMismatch | OSError):
                raise error
            log.error("worker.bad_frame", slot=self.number, error=str(error))
        was_ready = self.ready is not None
        log.warning("worker.lost", slot=self.number, pid=self.pid, exit=process.returncode)
        self.pid = self.ready = None
        await (await self._told()).worker_lost(self)
        return was_ready

    async def _told(self) -> Owner:
        """Who is told, once there is somebody."""
        await self._is_owned.wait()
        assert self._owner is not None
        return self._owner

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _hear(self) -> None:
        reader, self._writer = await self._connected.get()
        self._writer.write(worker_frame.encode(Hello(worker_frame.SCHEMA_HASH, "supervisor")))
        owner = await self._told()
        splitter = worker_frame.Splitter(tags=worker_frame.WORKER)
        greeted = False
        while data := await reader.read(READ_BYTES):
            for raw in splitter.feed(data):
                _, frame = worker_frame.decode(raw)
                if not greeted:
                    _check_hello(frame)
                    greeted = True
                else:
                    await self._dispatch(owner, frame)

    async def _dispatch(self, owner: Owner, frame: Frame) -> None:
        match frame:
            case Step():
                await owner.worker_step(self, frame)
            case Load():
                owner.worker_load(self, frame)
            case LoadProgress():
                owner.worker_loading(self, frame)
            case Ready():
                self.ready = frame
                log.info(
                    "worker.ready",
                    slot=self.number,
                    pid=self.pid,
                    model=frame.model,
                    device=frame.device,
                    load_ms=frame.load_ms,
                )
                await owner.worker_ready(self, frame)
            case _:
                raise FrameError("not expected here", field=type(frame).__name__, offset=0)


def _check_hello(frame: Frame) -> None:
    if not isinstance(frame, Hello) or frame.schema != worker_frame.SCHEMA_HASH:
        raise SchemaMismatch("the worker speaks another schema", hint="install one version")


def _worker_environment() -> dict[str, str]:
    """The worker decodes on one thread: the other cores belong to its neighbours."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


async def _reap(process: asyncio.subprocess.Process, exited: asyncio.Task[int]) -> None:
    """Wait for the process; one that hangs must not write another frame, so it is killed."""
    done, _ = await asyncio.wait((exited,), timeout=STOP_GRACE_S)
    if not done:
        _kill(process)
        await exited


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
