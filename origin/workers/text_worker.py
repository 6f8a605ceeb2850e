"""A worker process of kind `text`: one producer, served over the supervisor's Unix socket.

    python -m tailrace.origin.workers.text_worker SOCKET SETTINGS

SETTINGS is the JSON of an OriginConfig. The worker answers each StartTextRun with the frames of its
stream. Like `token_worker`, it exits with status 0 when the supervisor closes the socket, and with
1 and a line on stderr when its producer cannot be made. It imports torch only if the producer does.

The worker requests outputs of its producer no faster than the ledger stores their frames. The
frames of all streams wait in one bounded queue. A single task sends them to the supervisor, and
waits while the supervisor does not read the socket. The supervisor reads again once the ledger has
stored the earlier frames. All frames that are then in the queue are sent as one Step, so that busy
streams share a group commit.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import structlog
from pydantic import ValidationError

from tailrace.ledger.errors import CallerError, TailraceError
from tailrace.ledger.frame import FinishReason, Hello, StreamEnd, tag_of
from tailrace.ledger.process.logging_setup import configure_logging
from tailrace.ledger.process.tasks import background, cancel
from tailrace.ledger.validation import invalid_document
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.config import OriginConfig, PipelineConfig
from tailrace.origin.engine.batch_waits import LEAST_WAIT_S
from tailrace.origin.filter import FilterFactory, load_filter
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.producer import End, Producer, Request, Resumption, load_producer
from tailrace.origin.producers.embedder import open_embedder
from tailrace.origin.producers.production import Numbered, Production
from tailrace.origin.producers.upstream import Progress, open_upstream
from tailrace.origin.workers.liveness import BEAT_S, Watchdog
from tailrace.origin.workers.load_spans import PROCESS_SPANS
from tailrace.origin.workers.program import settings_of
from tailrace.origin.workers.worker_frame import (
    BRANCH,
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    SUPERVISOR,
    AtWork,
    CancelRun,
    Emission,
    Fault,
    Frame,
    LoadProgress,
    Ready,
    RunWaits,
    StageTime,
    StageTimes,
    StartTextRun,
    Step,
    check_hello,
    decode,
    encode,
)

SOFTWARE = "tailrace-text-worker"
RECEIVE_BYTES = 1 << 16
MAX_WAITING_STREAMS = 4096
"""Maximum number of streams that wait until they may be produced. Any further stream ends at once
as failed and retryable."""
OUTBOX_FRAMES = 256
"""Maximum number of frames, of all streams together, that wait to be sent to the supervisor."""
STEP_BYTES = 1 << 20
"""Size in bytes from which no further frame is added to a Step."""
UNSENT_BYTES = 64 * 1024
"""Number of bytes that may wait to be written to the socket; with more, the sender waits until the
supervisor reads."""

REPORT_BEATS = 5
"""Number of beats (of BEAT_S seconds) after which the times of all stages and the waits of all
streams are reported."""

log = structlog.get_logger("text_worker")


@dataclass(slots=True)
class TextRun:
    """One stream that this worker produces.

    The task `producing` puts the stream's frames into the outbox; a CancelRun cancels this task.
    The task `concluding` then sends the stream's end.
    """

    run: int
    request: Request
    production: Production
    waiting_since_s: float | None = None
    """When the stream began to wait until it may be produced; None if it does not wait."""
    producing: asyncio.Task[None] | None = None
    concluding: asyncio.Task[None] | None = None
    has_end: bool = False


class TextWorker:
    """The streams of one worker; at most `streams` are produced at a time, and others wait."""

    def __init__(
        self,
        producer: Producer,
        writer: asyncio.StreamWriter,
        streams: int,
        filter_factory: FilterFactory | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock_s = clock_s
        self._producer = producer
        self._filter_factory = filter_factory
        self._writer = writer
        self._turns = asyncio.Semaphore(streams)
        self._most = streams + MAX_WAITING_STREAMS
        self._outbox = asyncio.Queue[Emission](OUTBOX_FRAMES)
        self._answers: dict[int, TextRun] = {}
        self._at_work = AtWork(lambda begun: writer.write(encode(begun)))

    def take(self, corr: int, frame: Frame) -> None:
        """Carry out an order of the supervisor for the run `corr`."""
        match frame:
            case StartTextRun():
                self._at_work.take(corr)
                self._begin(corr, frame)
            case CancelRun():
                answer = self._answers.get(corr)
                if answer is not None:
                    answer.request.fate.is_over = frame.is_final
                if answer is not None and answer.producing is not None:
                    answer.producing.cancel()
            case _:
                raise CallerError(
                    f"a text worker cannot handle {type(frame).__name__}", field="tag"
                )

    async def send(self) -> None:
        """Send the frames of all streams, until cancelled or until the socket is closed."""
        while True:
            emissions = [await self._outbox.get()]
            size = len(emissions[0].frame)
            while size < STEP_BYTES and not self._outbox.empty():
                emissions.append(self._outbox.get_nowait())
                size += len(emissions[-1].frame)
            self._writer.write(encode(Step.of(emissions)))
            await self._writer.drain()

    async def beat(self, watchdog: Watchdog) -> None:
        """Send a frame every BEAT_S, so that the supervisor sees that this worker is alive."""
        for nth in itertools.count(1):
            watchdog.arm()
            self._at_work.repeat()
            if nth % REPORT_BEATS == 0:
                self.report_stages()
                self.report_waits()
            await asyncio.sleep(BEAT_S)

    def report_stages(self) -> None:
        """Send how long the stages of each stream of a pipeline took so far."""
        for answer in self._answers.values():
            if answer.request.stages and not answer.has_end:
                self._writer.write(encode(_stage_times(answer.request, is_final=False)))

    def report_waits(self) -> None:
        """Send how long the streams that wait have waited so far."""
        self._report_waits(self._answers.values())

    def _report_waits(self, answers: Iterable[TextRun]) -> None:
        now_s = self._clock_s()
        waits = {
            answer.run: now_s - answer.waiting_since_s
            for answer in answers
            if answer.waiting_since_s is not None and now_s - answer.waiting_since_s >= LEAST_WAIT_S
        }
        if waits:
            self._writer.write(encode(RunWaits.of(waits)))

    async def close(self) -> None:
        """Stop every stream and send no ends, because the supervisor has closed the socket."""
        await cancel(
            task
            for answer in self._answers.values()
            for task in (answer.concluding, answer.producing)
            if task is not None
        )
        await self._producer.close()

    def _begin(self, run: int, ask: StartTextRun) -> None:
        try:
            recipe = Recipe.model_validate_json(ask.recipe)
        except ValidationError as error:
            raise invalid_document(error, whole="recipe") from error
        request = Request(recipe, ask.delivered, ask.next_index, ask.calls, ask.stream)
        production = Production(self._producer, request, run, self._filter_factory, ask.inserted)
        answer = TextRun(run, request, production)
        if len(self._answers) < self._most:
            answer.producing = asyncio.create_task(self._produce(answer))
        self._answers[run] = answer
        answer.concluding = asyncio.create_task(self._conclude(answer))

    async def _produce(self, answer: TextRun) -> None:
        """Put the frames of a stream into the outbox; it may be cancelled at any time."""
        this = asyncio.current_task()
        # Log events of this task get the run. The supervisor's log event `stream.ordered` tells
        # which stream a run belongs to.
        structlog.contextvars.bind_contextvars(run=answer.run)
        answer.waiting_since_s = self._clock_s()
        async with self._turns, aclosing(answer.production.frames()) as frames:
            self._report_waits((answer,))
            answer.waiting_since_s = None
            self._at_work.begin((answer.run,))
            async for numbered in frames:
                await self._put(answer, numbered)
                if this is not None and this.cancelling():
                    break  # the producer has swallowed its CancelledError

    async def _conclude(self, answer: TextRun) -> None:
        """Ensure that the stream gets exactly one end."""
        if answer.producing is None:
            message = f"the worker already has {self._most} running and waiting streams"
            end = End(FinishReason.FAILED, message=message, retryable=True)
        else:
            await asyncio.wait((answer.producing,))
            end = _end_of(answer.producing)
            self._report_waits((answer,))  # if it has never been produced
        if not answer.has_end:
            await self._put(answer, answer.production.ending(end))
        del self._answers[answer.run]

    async def _put(self, answer: TextRun, numbered: Numbered) -> None:
        index, frame = numbered
        self._at_work.made((answer.run,))
        is_end = tag_of(frame) == StreamEnd.tag
        if is_end and answer.request.stages:
            self._writer.write(encode(_stage_times(answer.request, is_final=True)))
        can_retry = is_end and answer.production.can_retry
        emission = Emission(answer.run, index, (), (), frame, can_retry)
        if is_end:
            emission.counted = answer.production.counted
        await self._outbox.put(emission)
        answer.has_end = is_end


def _stage_times(request: Request, *, is_final: bool) -> StageTimes:
    now_s = time.perf_counter()
    times = tuple(
        StageTime(one.name, one.items, round(one.so_far_s(now_s) * 1e6)) for one in request.stages
    )
    return StageTimes(request.stream, times, is_final)


def _end_of(producing: asyncio.Task[None]) -> End:
    if not producing.cancelled() and (error := producing.exception()) is not None:
        log.error("stream.failed", exc_info=error)
        return End(
            FinishReason.FAILED, message="the producer raised an error; see the origin's log"
        )
    return End(FinishReason.CANCELLED)


def main(argv: Sequence[str]) -> int:
    """Run a worker, and return the exit status."""
    path, settings = argv
    PROCESS_SPANS.enter("connect")
    config = settings_of(settings)
    configure_logging(config.log_level)
    logging.getLogger("httpx").setLevel(
        logging.WARNING
    )  # otherwise httpx would log a line per request
    try:
        asyncio.run(serve(path, config))
    except (TailraceError, OSError) as exc:
        print(f"tailrace.origin.workers.text_worker: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


async def serve(path: str, config: OriginConfig) -> None:
    """Send Hello, make the producer, and answer until the supervisor closes the socket."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.transport.set_write_buffer_limits(high=UNSENT_BYTES)
    writer.write(encode(Hello(SCHEMA_HASH, SOFTWARE)))
    try:
        async with aclosing(_orders(reader)) as orders:
            await _serve(config, orders, writer)
    finally:
        writer.close()


Orders = AsyncGenerator[tuple[int, Frame], None]


async def _serve(config: OriginConfig, orders: Orders, writer: asyncio.StreamWriter) -> None:
    hello = await anext(orders, None)
    if hello is None:
        return
    check_hello(*hello)
    coming = asyncio.ensure_future(anext(orders, None))
    try:
        try:
            filter_factory = load_filter(config.filter) if config.filter else None
            producer = await _open(config, writer, coming)
        except Exception as error:
            writer.write(encode(Fault.of(error, starting=True)))
            raise
        if producer is None:
            return
        worker = TextWorker(producer, writer, config.text_streams, filter_factory)
        watchdog = Watchdog(config.worker_silence_s, config.worker_start_s)
        try:
            async with background((worker.send(), worker.beat(watchdog))):
                while (order := await coming) is not None:
                    worker.take(*order)
                    coming = asyncio.ensure_future(anext(orders, None))
        finally:
            await worker.close()
    finally:
        await cancel([coming])


async def _open(
    config: OriginConfig,
    writer: asyncio.StreamWriter,
    coming: asyncio.Future[tuple[int, Frame] | None],
) -> Producer | None:
    """Create the producer and send Ready; return None if the supervisor closes the socket first."""

    def progress(stage: str, done: int, total: int) -> None:
        PROCESS_SPANS.enter(stage)
        writer.write(encode(LoadProgress(stage, done, total)))

    started = time.monotonic()
    opening = asyncio.create_task(open_producer(config, progress))
    try:
        await asyncio.wait((opening, coming), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            return None
        producer = opening.result()
    finally:
        await cancel([opening])
    about = producer.about
    continues = about.resumption is Resumption.CONTINUES
    ready = Ready(
        kind="text",
        model=config.model_name or about.name,
        fingerprint=about.fingerprint,
        device=about.device,
        context=0,
        vocab=0,
        load_ms=round((time.monotonic() - started) * 1000),
        offers=(*about.offers, BRANCH) if continues else about.offers,
        spans=PROCESS_SPANS.close(),
    )
    writer.write(encode(ready))
    return producer


async def open_producer(config: OriginConfig, progress: Progress) -> Producer:
    """Return the producer that the settings name, ready for requests.

    Raises:
        TailraceError: The producer cannot be created.
    """
    if isinstance(config, PipelineConfig):
        # Imported here, because other workers have no use for stages.
        from tailrace.origin.pipelines.producer import open_pipeline

        return await open_pipeline(config, progress)
    if config.upstream is not None:
        return await open_upstream(config, progress)
    if config.producer is not None:
        progress(f"making {config.producer}", 0, 1)
        return await load_producer(config.producer)
    progress("loading the model", 0, 1)
    return await open_embedder(config.model, config.device)


async def _orders(reader: asyncio.StreamReader) -> Orders:
    """Yield (corr, frame) for each order, until the supervisor closes the socket."""
    splitter = FrameSplitter(SUPERVISOR, MAX_WORKER_FRAME_BYTES)
    while True:
        try:
            data = await reader.read(RECEIVE_BYTES)
        except ConnectionResetError:
            return
        if not data:
            return
        for raw in splitter.feed(data):
            yield decode(raw)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
