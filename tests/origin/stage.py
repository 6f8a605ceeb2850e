"""Runs over a real ledger; the workers' side is played by the test, frame by frame."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from tailrace.ledger.frame import (
    Durability,
    FinishReason,
    Sampling,
    StreamEnd,
    Token,
    decode,
    encode,
)
from tailrace.ledger.interface import NewStream
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.core.events import Tick
from tailrace.origin.core.states import WorkerState
from tailrace.origin.generations.recipe import Recipe, packed_ids, prompt_hash
from tailrace.origin.generations.runs import Runs
from tailrace.origin.metrics import Metrics
from tailrace.origin.serving.model_host import ModelHost, single_pool
from tailrace.origin.workers.worker_frame import (
    ActiveRuns,
    CancelRun,
    Emission,
    Frame,
    Ready,
    Step,
)
from tailrace.origin.workers.worker_frame import encode as encode_order
from tailrace.origin.workers.worker_process import WorkerSlot

_NUMBERS = itertools.count(1_000_000)
A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))
READY = Ready("tokens", "demo", "fingerprint", "cpu", context=64, vocab=300, load_ms=1)
RECIPE = Recipe(
    model="demo",
    fingerprint="fingerprint",
    prompt_ids=packed_ids((5, 6)),
    prompt_sha256=prompt_hash((5, 6)),
    max_tokens=9,
    stop=(),
    ignore_eos=True,
    priority="standard",
    sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=1),
)


def fresh(count: int = 1) -> list[bytes]:
    """Return ids of streams that are not there yet."""
    return [next(_NUMBERS).to_bytes(16, "big") for _ in range(count)]


class Slot(WorkerSlot):
    """A slot whose worker is the test: it keeps the frames that it is sent."""

    def __init__(self, number: int) -> None:
        super().__init__(number, ("", ""))
        self.sent: list[tuple[int, Frame]] = []
        self.ordered = asyncio.Event()
        self.halted = asyncio.Event()

    def send(self, frame: Frame, run: int) -> None:
        encode_order(frame, run)  # refuses what no worker could be sent
        self.sent.append((run, frame))
        self.ordered.set()
        if isinstance(frame, CancelRun):
            self.halted.set()

    @property
    def last(self) -> tuple[int, Frame]:
        return self.sent[-1]


def host_of(
    slots: Sequence[WorkerSlot], metrics: Metrics, changed: Callable[[], None] = lambda: None
) -> ModelHost:
    """Return the one model of an origin, whose workers are being started."""
    pool = single_pool(len(slots), metrics.clock)
    host = ModelHost(pool, slots, metrics, changed=changed)
    host.start()
    return host


class Stage:
    """A ledger, its runs, and a few slots."""

    def __init__(self, ledger: SqliteLedger) -> None:
        self.ledger = ledger
        self.changes = 0
        self.metrics = Metrics(lambda: self.clock_s)
        self.clock_s = 0.0
        self.slots = [Slot(number) for number in range(2)]
        self.models = host_of(self.slots, self.metrics, self._count)
        self.unix_ms = 1_764_322_200_000
        self.runs = Runs(ledger, 4, self.models, self.metrics, now_ms=lambda: self.unix_ms)

    def _count(self) -> None:
        self.changes += 1

    async def ready(self, slot: Slot, ready: Ready = READY) -> None:
        self._started(slot)
        slot.ready = ready
        await self.runs.worker_ready(slot, ready)

    def _started(self, slot: Slot) -> None:
        """Let so much time pass that the circuit breaker has a process of this slot started."""
        while self.models.worker(slot).state is WorkerState.WAITING:
            self.clock_s = self.models.core.wake_at()
            self.models.happen(Tick())

    async def lost(self, slot: Slot) -> None:
        self._started(slot)
        slot.ready = None
        slot.exit_reason = slot.exit_reason or "ended by SIGKILL"
        await self.runs.worker_lost(slot)

    async def rested(self, slot: Slot) -> None:
        """End a worker as it was told to."""
        slot.ready = None
        await self.runs.worker_rested(slot)

    def begun(self, slot: Slot, *streams: bytes) -> None:
        """Report that the worker has begun with these streams, or with all that it has."""
        runs = [
            stream.run
            for stream in self.runs.table.on(slot.number)
            if stream.id in (streams or (stream.id,))
        ]
        self.runs.worker_begun(slot, ActiveRuns(tuple(runs)))

    async def start(self, stream: bytes, recipe: Recipe = RECIPE) -> None:
        await self.create(stream, recipe.model_dump_json())
        await self.runs.start((stream, recipe))

    async def running(self, stream: bytes, slot: int = 0) -> tuple[Slot, int]:
        """Start a stream on a ready worker; return the slot and the number of the run."""
        await self.ready(self.slots[slot])
        await self.start(stream)
        return self.slots[slot], self.slots[slot].last[0]

    async def end_of(self, stream: bytes, *, after: int = 0) -> StreamEnd:
        """Return the end of a stream, which must come after `after` frames."""
        *before, end = await self.frames(stream)
        assert isinstance(end, StreamEnd)
        assert len(before) == after
        return end

    async def create(self, stream: bytes, recipe: str = RECIPE.model_dump_json()) -> None:
        """In the ledger, and not started here."""
        await self.ledger.create(NewStream(stream, recipe, Durability.PROCESS, 60))

    async def step(self, slot: Slot, run: int, index: int, text: str | None) -> None:
        """Send an engine step of one frame: a token, or the end if there is no text."""
        if text is None:
            frame = encode(StreamEnd(index, FinishReason.LENGTH, index, 2))
            emission = Emission(run, index, (), (), frame)
        else:
            emission = Emission(run, index, (index + 100,), (), encode(Token(text, index)))
        await self.runs.worker_step(slot, Step.of((emission,)).cut())

    async def cancelled(self, slot: Slot, run: int, index: int) -> None:
        """Answer a CancelRun as a worker does."""
        frame = encode(StreamEnd(index, FinishReason.CANCELLED, index, 2))
        await self.runs.worker_step(slot, Step.of((Emission(run, index, (), (), frame),)).cut())

    async def frames(self, stream: bytes) -> list[object]:
        return [decode(record.frame)[1] for record in await self.ledger.read(stream, 0, 100)]
