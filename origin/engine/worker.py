"""A worker process: one loaded model, served over the supervisor's Unix socket.

    python -m origin.engine.worker --socket PATH --model DIR [--name demo] [--device auto] …

It ends with status 0 when the supervisor closes the socket, and 1 with a line on stderr when
the model cannot be loaded or the supervisor speaks another schema. It needs no signal: a
supervisor that dies closes the socket too.
"""

from __future__ import annotations

import argparse
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kernels.sampler import Sampling
from ledger.errors import CallerError, ModelError, SchemaMismatch, TailraceError
from ledger.frame import Hello
from origin.checkpoint.tokenizer_file import TOKENIZER_FILE
from origin.engine.drafts import Drafter, DraftModel, PromptLookup
from origin.engine.engine import Engine
from origin.engine.generation import Surroundings
from origin.filter import load_filter
from origin.models.model import DEFAULT_KV_BYTES, Device, Draw, Model, Piece, load_model
from origin.scheduler.limits import Limits
from origin.scheduler.pages import PagePool
from origin.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    SUPERVISOR,
    Emission,
    Frame,
    Halt,
    LoadProgress,
    Ready,
    Run,
    Splitter,
    Steer,
    Step,
    decode,
    encode,
)

SOFTWARE = "tailrace-worker"
RECEIVE_BYTES = 1 << 16
MIB = 1 << 20
MAX_STEP_BYTES = MAX_WORKER_FRAME_BYTES // 4
"""Of the emissions of several runs; what one run emits in a step is far below a frame's limit."""
EMISSION_BYTES = 32
"""Around a frame, and of each id, at most."""
LOAD_S = 0.5
"""How often a busy worker says how busy it is."""
# One: at these sizes a second thread costs more than it brings, and a fixed number is part
# of being deterministic.
TORCH_THREADS = 1


class Link:
    """The supervisor's socket as frames; `closed` once the other side has gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._splitter = Splitter(tags=SUPERVISOR)
        self.closed = False

    def send(self, frame: Frame) -> None:
        """Send one frame whole; waits while the supervisor does not read."""
        try:
            self._connection.sendall(encode(frame))
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def receive(self, *, wait: bool) -> Iterator[tuple[int, Frame]]:
        """(corr, frame) of what has come, after waiting for something if `wait`."""
        while not self.closed and (wait or self._readable()):
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            self.closed = not data
            frames = self._splitter.feed(data)
            yield from map(decode, frames)
            wait = wait and not frames

    def _readable(self) -> bool:
        return bool(select.select([self._connection], [], [], 0)[0])


def main(argv: list[str] | None = None) -> int:
    """Run a worker; returns the exit status."""
    options = _parse(argv)
    # Ctrl-C in a terminal reaches every process; the supervisor decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(TORCH_THREADS)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(options.socket))
            serve(Link(connection), options)
    except (TailraceError, OSError) as exc:
        print(f"origin.engine.worker: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def serve(link: Link, options: argparse.Namespace) -> None:
    """Greet, load, and generate until the supervisor closes the socket."""
    link.send(Hello(SCHEMA_HASH, SOFTWARE))
    frames = link.receive(wait=True)
    first = next(frames, None)
    if first is None:
        return
    _check_hello(*first)
    started = time.monotonic()
    model = _load(link, options.model, options)
    around = _surroundings(link, model, options)
    engine = Engine(model, around, _limits(options))
    _warm_up(model, around)
    load_ms = round((time.monotonic() - started) * 1000)
    link.send(_ready(model, options.name, load_ms))
    _take(frames, engine)  # what came right behind the Hello
    generate(link, engine)


def generate(link: Link, engine: Engine, clock_s: Callable[[], float] = time.monotonic) -> None:
    """Steps for as long as the supervisor listens; now and then, how busy the engine is."""
    told = clock_s()
    while not link.closed:
        _take(link.receive(wait=engine.idle), engine)
        for step in steps(engine.step()):
            link.send(step)
        if engine.idle or clock_s() - told >= LOAD_S:
            link.send(engine.load())
            told = clock_s()


def steps(emissions: Sequence[Emission], max_bytes: int = MAX_STEP_BYTES) -> Iterator[Step]:
    """The emissions as one Step, or as several where many are long.

    What one run emits stays together: a run is logged with its end, or without both.
    """
    by_run: dict[int, list[Emission]] = {}
    for emission in emissions:
        by_run.setdefault(emission.run, []).append(emission)
    together: list[Emission] = []
    size = 0
    for some in by_run.values():
        more = sum(len(emission.frame) + EMISSION_BYTES * len(emission.ids) for emission in some)
        if together and size + more > max_bytes:
            yield Step(tuple(together))
            together, size = [], 0
        together += some
        size += more
    if together:
        yield Step(tuple(together))


def _load(link: Link, directory: Path, options: argparse.Namespace) -> Model:
    def progress(stage: str, done: int, total: int) -> None:
        link.send(LoadProgress(stage, done, total))

    return load_model(directory, progress, options.device, options.kv_mib * MIB)


def _surroundings(link: Link, model: Model, options: argparse.Namespace) -> Surroundings:
    config = model.config
    return Surroundings(
        tokenizer=load_tokenizer(options.model),
        eos_ids=config.eos_ids,
        context=config.context,
        vocab=config.vocab,
        filter_factory=load_filter(options.filter) if options.filter else None,
        drafter=_drafter(link, model, options),
    )


def _drafter(link: Link, model: Model, options: argparse.Namespace) -> Drafter | None:
    """What guesses tokens: another model, the text itself, or nothing."""
    if options.draft_model is not None:
        small = _load(link, options.draft_model, options)
        if small.config.vocab != model.config.vocab:
            raise ModelError(
                f"a draft model with {small.config.vocab} tokens for one with {model.config.vocab}",
                field=str(options.draft_model),
                hint="both need the same tokenizer",
            )
        return DraftModel(small, PagePool(small.pages))
    return PromptLookup() if options.prompt_lookup else None


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(running=options.running, step_seconds=options.step_ms / 1000)


def load_tokenizer(directory: Path) -> Tokenizer:
    """tokenizer.json of a checkpoint; ModelError if it cannot be read."""
    path = directory / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises nothing narrower
        raise ModelError(f"cannot be read: {exc}", field=str(path)) from exc


def _take(frames: Iterator[tuple[int, Frame]], engine: Engine) -> None:
    for corr, frame in frames:
        match frame:
            case Run():
                engine.add(corr, frame)
            case Steer():
                engine.steer(corr, frame.ids)
            case Halt():
                engine.halt(corr)
            case _:
                raise CallerError(f"{type(frame).__name__} is out of place here", field="tag")


def _check_hello(corr: int, frame: Frame) -> None:
    if corr or not isinstance(frame, Hello) or frame.schema != SCHEMA_HASH:
        raise SchemaMismatch(
            "the supervisor does not begin with a Hello of this worker's schema",
            hint="run one version of both",
        )


def _warm_up(model: Model, around: Surroundings) -> None:
    """Let BLAS, the allocator and llguidance do what they do once before a request waits for it."""
    with suppress(ModelError):  # a tokenizer that no grammar can use serves all other requests
        around.prepare_grammars()
    model.forward([Piece((0,), 0, (0,), prefill=True)])
    hidden = model.forward([Piece((0,), 1, (0,), prefill=False)])
    model.draw(hidden, [Draw(Sampling(temperature=1.0), 0)])


def _ready(model: Model, name: str, load_ms: int) -> Ready:
    return Ready(
        kind="tokens",
        model=name,
        fingerprint=model.fingerprint,
        device=model.device,
        context=model.config.context,
        vocab=model.config.vocab,
        load_ms=load_ms,
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m origin.engine.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the supervisor's Unix socket")
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--name", default="demo", help="the model's name in requests")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.AUTO)
    limits, kv_mib = Limits(), DEFAULT_KV_BYTES // MIB
    step_ms = limits.step_seconds * 1000
    parser.add_argument("--kv-mib", type=int, default=kv_mib, help="size of the KV cache")
    parser.add_argument("--running", type=int, default=limits.running, help="runs in the cache")
    parser.add_argument("--step-ms", type=float, default=step_ms, help="how long a step may take")
    parser.add_argument("--filter", help="MODULE:FACTORY of an origin.filter.Filter")
    drafts = parser.add_mutually_exclusive_group()
    drafts.add_argument("--prompt-lookup", action="store_true", help="guess from the text itself")
    drafts.add_argument("--draft-model", type=Path, help="guess with this smaller checkpoint")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
