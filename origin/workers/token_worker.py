"""A worker process: one loaded model, served over the supervisor's Unix socket.

    python -m tailrace.origin.workers.token_worker SOCKET SETTINGS

SETTINGS is the JSON of an OriginConfig. The worker exits with status 0 when the supervisor closes
the socket, which also happens when the supervisor dies. It exits with 1 and a line on stderr when
the model cannot be loaded or the supervisor has another schema.
"""

from __future__ import annotations

import importlib
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import version

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.ledger.errors import CallerError, ModelError, TailraceError
from tailrace.ledger.frame import Hello
from tailrace.ledger.process.logging_setup import configure_logging
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.checkpoint.file_digests import FileDigests, Identity, identities
from tailrace.origin.checkpoint.tokenizer_file import load_tokenizer
from tailrace.origin.config import OriginConfig
from tailrace.origin.engine.drafts import Drafter, DraftModel, PromptLookup
from tailrace.origin.engine.engine import Engine
from tailrace.origin.engine.generation import ModelContext
from tailrace.origin.filter import load_filter
from tailrace.origin.formats import AS_STORED
from tailrace.origin.models.load import load_model
from tailrace.origin.models.model import (
    Device,
    Draw,
    Model,
    Piece,
    Progress,
    StepDevice,
)
from tailrace.origin.models.tensors import checkpoint_bytes
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.workers.kernel_cache import keep_compiled
from tailrace.origin.workers.liveness import BEAT_S, Watchdog
from tailrace.origin.workers.load_spans import PROCESS_SPANS
from tailrace.origin.workers.worker_frame import (
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
    SetShedding,
    SetUnread,
    StartRun,
    Steer,
    Step,
    check_hello,
    decode,
    encode,
)

SOFTWARE = "tailrace-worker"
RECEIVE_BYTES = 1 << 16
MIB = 1 << 20
MAX_STEP_BYTES = MAX_WORKER_FRAME_BYTES // 8
"""Maximum size in bytes of a Step with emissions of several runs.

The emissions of a single run are never split, and are far below the limit of a frame."""
EMISSION_BYTES = 32
"""Maximum bytes that one token id takes in a Step, including its share of the other columns.
"""
LOAD_S = 0.5
"""Interval in seconds between two Load frames of a busy worker."""
BYTE_STAGES = ("read", "hash")
"""Stages of a load whose progress is counted in bytes."""
DIGESTS_FILE = "digests.json"
"""File in the data folder with the digests of checkpoint files, so that each is hashed once."""
LOAD_AHEAD_BYTES = 256 * MIB
"""Maximum size in bytes of a checkpoint that the fork server loads and shares with its workers.

A worker that replaces a dead one then needs no load. A larger checkpoint is not shared, because
loading takes twice its size in memory."""
# For matrices of these sizes a second thread costs more than it gains. The number is fixed because
# the rounding of results depends on it.
TORCH_THREADS = 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was loaded with the settings `config`, and its tokenizer, filter and drafter.

    `files` has the identity of each of the checkpoint's files at that time, by the file's name.
    """

    config: OriginConfig
    files: dict[str, Identity]
    model: Model
    around: ModelContext


_ahead: list[Loaded] = []
"""Models that the fork server has loaded before it forked this process; at most one."""


class FrameSocket:
    """Sends and receives frames on the socket to the supervisor.

    `closed` is True once the supervisor has closed the socket.
    """

    def __init__(self, connection: socket.socket, watchdog: Watchdog) -> None:
        self._connection = connection
        self._watchdog = watchdog
        self._splitter = FrameSplitter(SUPERVISOR, MAX_WORKER_FRAME_BYTES)
        self.closed = False

    def send(self, frame: Frame) -> None:
        """Send one frame; this blocks while the supervisor does not read."""
        data = encode(frame)
        try:
            with suppress(BlockingIOError):
                data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
            if data:
                with self._watchdog.resting():
                    self._connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, *, wait_s: float | None) -> Iterator[tuple[int, Frame]]:
        """Wait up to `wait_s` seconds for frames, and yield (corr, frame) of all that have arrived.

        None waits without limit.
        """
        while not self.closed and self._readable(wait_s):
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            self.closed = not data
            frames = self._splitter.feed(data)
            yield from map(decode, frames)
            wait_s = 0 if frames else wait_s

    def _readable(self, wait_s: float | None) -> bool:
        return bool(select.select([self._connection], [], [], wait_s)[0])


def main(argv: Sequence[str]) -> int:
    """Run a worker, and return the exit status."""
    path, settings = argv
    PROCESS_SPANS.enter("connect")
    config = _config_of(settings)
    configure_logging(config.log_level)
    torch.set_num_threads(TORCH_THREADS)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            watchdog = Watchdog(config.worker_silence_s, config.worker_start_s)
            serve(FrameSocket(connection, watchdog), config, watchdog)
    except (TailraceError, OSError) as exc:
        print(f"tailrace.origin.workers.token_worker: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def prepare(settings: str) -> None:
    """Import a worker's modules in the fork server, and load a small model for all workers.

    No thread is started and no device is initialized, because the process is forked afterwards.
    `settings` are the settings of a worker as JSON, or only the name of a device. In the latter
    case no model is loaded.
    """
    config = None if settings in [*Device] else _config_of(settings)
    device = Device(settings if config is None else config.device)
    torch.set_num_threads(TORCH_THREADS)
    if device != Device.CUDA:
        importlib.import_module("tailrace.origin.models.cpu_model")
    if device != Device.CPU and version.cuda is not None:
        with suppress(ImportError):  # triton may be missing
            importlib.import_module("tailrace.origin.models.gpu_model")
    # torch.cuda.is_available() may initialize CUDA, and then forked processes cannot use the GPU.
    is_cpu = device == Device.CPU or (device == Device.AUTO and not (version.cuda or version.hip))
    if is_cpu and config is not None:
        configure_logging(config.log_level)
        with suppress(Exception):  # a worker will fail with the same error, and report it
            _load_ahead(config)


@lru_cache(1)
def _config_of(settings: str) -> OriginConfig:
    """Parse settings. The result is cached, so workers inherit it from the fork server."""
    return OriginConfig.model_validate_json(settings)


def _load_ahead(config: OriginConfig) -> None:
    """Load the model if it is small and runs no code of the user, which might start threads."""
    large = checkpoint_bytes(config.model) > LOAD_AHEAD_BYTES
    if large or config.filter or config.draft_model is not None:
        return
    files = identities(config.model)
    _ahead.append(Loaded(config, files, *_load(config, _enter)))


def serve(supervisor: FrameSocket, config: OriginConfig, watchdog: Watchdog) -> None:
    """Send Hello, load the model, and generate until the supervisor closes the socket."""
    supervisor.send(Hello(SCHEMA_HASH, SOFTWARE))
    frames = supervisor.receive(wait_s=None)
    first = next(frames, None)
    if first is None:
        return
    check_hello(*first)

    def progress(stage: str, done: int, total: int) -> None:
        _enter(stage, done, total)
        supervisor.send(LoadProgress(stage, done, total))
        watchdog.extend()

    at_work = AtWork(supervisor.send)
    try:
        engine = _load_engine(config, progress, at_work, supervisor)
    except Exception as error:
        supervisor.send(Fault.of(error, starting=True))
        raise
    watchdog.arm()
    try:
        _take(frames, engine, at_work)  # orders that arrived together with the supervisor's Hello
        generate(supervisor, engine, at_work, watchdog)
    except Exception as error:
        supervisor.send(Fault.of(error, starting=False))
        raise


def generate(
    supervisor: FrameSocket,
    engine: Engine,
    at_work: AtWork,
    watchdog: Watchdog,
    clock_s: Callable[[], float] = time.monotonic,
) -> None:
    """Run engine steps, and send their output and Load frames, until the socket is closed."""
    told = clock_s()
    while not supervisor.closed:
        watchdog.arm()
        _take(supervisor.receive(wait_s=BEAT_S if engine.idle else 0), engine, at_work)
        emissions = engine.step()
        at_work.made(emission.run for emission in emissions)
        if waits := engine.take_ended_waits():
            supervisor.send(RunWaits.of(waits))
        for step in steps(emissions):
            supervisor.send(step)
        if engine.idle or clock_s() - told >= LOAD_S:
            supervisor.send(engine.load())
            if waits := engine.waits():
                supervisor.send(RunWaits.of(waits))
            told = clock_s()


def steps(emissions: Sequence[Emission], max_bytes: int = MAX_STEP_BYTES) -> Iterator[Step]:
    """Yield the emissions as one Step, or as several of at most `max_bytes`.

    All emissions of one run are in the same Step, so that its last text and its end are stored
    together.
    """
    by_run: dict[int, list[Emission]] = {}
    for emission in emissions:
        by_run.setdefault(emission.run, []).append(emission)
    together: list[Emission] = []
    size = 0
    for some in by_run.values():
        more = sum(len(emission.frame) + EMISSION_BYTES * len(emission.ids) for emission in some)
        if together and size + more > max_bytes:
            yield Step.of(together)
            together, size = [], 0
        together += some
        size += more
    if together:
        yield Step.of(together)


def _load_engine(
    config: OriginConfig, progress: Progress, at_work: AtWork, supervisor: FrameSocket
) -> Engine:
    """Load the model, send Ready, and return the engine."""
    started = time.monotonic()
    model, around = _loaded_ahead(config) or _load(config, progress)
    limits = Limits(running=config.running_streams, step_seconds=config.step_ms / 1000)
    device = model if isinstance(model, StepDevice) else None
    engine = Engine(model, around, limits, begin=at_work.begin, device=device)
    ready = Ready(
        kind="tokens",
        model=config.served_name,
        fingerprint=model.fingerprint,
        device=model.device,
        context=model.config.context,
        vocab=model.config.vocab,
        load_ms=round((time.monotonic() - started) * 1000),
        spans=PROCESS_SPANS.close(),
    )
    supervisor.send(ready)
    return engine


def _loaded_ahead(config: OriginConfig) -> tuple[Model, ModelContext] | None:
    """Return the model that the fork server has loaded.

    The result is None if it has loaded none, or if settings or files have changed since.
    """
    for loaded in _ahead:
        if loaded.config == config and loaded.files == identities(config.model):
            return loaded.model, loaded.around
    return None


def _load(config: OriginConfig, progress: Progress) -> tuple[Model, ModelContext]:
    model = _load_model(config.model, config, progress)
    progress("tokenizer", 0, 1)
    around = ModelContext(
        tokenizer=load_tokenizer(config.model),
        eos_ids=model.config.eos_ids,
        context=model.config.context,
        vocab=model.config.vocab,
        filter_factory=load_filter(config.filter) if config.filter else None,
        drafter=_drafter(model, config, progress),
    )
    keep_compiled(config.data)
    progress("warm-up", 0, 1)
    _warm_up(model, around)
    return model, around


def _enter(stage: str, _done: int, total: int) -> None:
    PROCESS_SPANS.enter(stage, total if stage in BYTE_STAGES else 0)


def _load_model(directory: Path, config: OriginConfig, progress: Progress) -> Model:
    device = Device(config.device)
    kv_bytes = None if config.kv_mib is None else config.kv_mib * MIB
    # The settings choose number formats for the main model only; a draft model keeps those of its
    # checkpoint.
    formats = config.formats if directory == config.model else AS_STORED
    return load_model(
        *(directory, progress, device, kv_bytes, formats),
        dependent=config.dependent_launches,
        step_rows=config.running_streams,
        digests=FileDigests(config.data / DIGESTS_FILE),
    )


def _drafter(model: Model, config: OriginConfig, progress: Progress) -> Drafter | None:
    """Return the drafter of speculative decoding: a draft model, prompt lookup, or None."""
    if config.draft_model is not None:
        small = _load_model(config.draft_model, config, progress)
        if small.config.vocab != model.config.vocab:
            raise ModelError(
                f"the draft model has a vocabulary of {small.config.vocab} tokens, but the model"
                f" has {model.config.vocab}",
                field=str(config.draft_model),
                hint="use a draft model with the same tokenizer",
            )
        return DraftModel(small, PagePool(small.pages))
    return PromptLookup() if config.speculate == "prompt-lookup" else None


def _take(frames: Iterator[tuple[int, Frame]], engine: Engine, at_work: AtWork) -> None:
    for corr, frame in frames:
        match frame:
            case StartRun():
                at_work.take(corr)
                engine.add(corr, frame)
            case Steer():
                engine.steer(corr, frame.ids)
            case CancelRun():
                engine.cancel(corr)
            case SetUnread():
                engine.set_unread(corr, unread=frame.unread)
            case SetShedding():
                engine.set_shedding(small_steps=frame.small_steps, guess=frame.guess)
            case _:
                raise CallerError(
                    f"a token worker cannot handle {type(frame).__name__}", field="tag"
                )


def _warm_up(model: Model, around: ModelContext) -> None:
    """Run a few steps, so that the one-time work of libraries does not delay the first request."""
    with suppress(ModelError):  # a tokenizer without grammar support still serves other requests
        around.prepare_grammars()
    model.forward([Piece((0,), 0, (0,), prefill=True)])
    hidden = model.forward([Piece((0,), 1, (0,), prefill=False)])
    draw = Draw(Sampling(temperature=1.0), 0)
    model.draw(hidden, [draw])
    if isinstance(model, StepDevice):
        model.launch([Piece((0,), 1, (0,), prefill=False)], [0], [draw]).read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
