"""A worker process: one loaded model, served over the supervisor's Unix socket.

    python -m origin.worker --socket PATH --model DIR [--name demo] [--device auto]

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
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ledger.errors import CallerError, ModelError, SchemaMismatch, TailraceError
from ledger.frame import Hello
from origin.checkpoint import TOKENIZER_FILE
from origin.engine import Engine
from origin.model import Device, Model, load_model
from origin.worker_frame import (
    SCHEMA_HASH,
    SUPERVISOR,
    Frame,
    Halt,
    LoadProgress,
    Ready,
    Run,
    Splitter,
    Step,
    decode,
    encode,
)

SOFTWARE = "tailrace-worker"
RECEIVE_BYTES = 1 << 16
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
            serve(Link(connection), options.model, options.name, options.device)
    except (TailraceError, OSError) as exc:
        print(f"origin.worker: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def serve(link: Link, directory: Path, name: str, device: Device) -> None:
    """Greet, load, and generate until the supervisor closes the socket."""
    link.send(Hello(SCHEMA_HASH, SOFTWARE))
    frames = link.receive(wait=True)
    first = next(frames, None)
    if first is None:
        return
    _check_hello(*first)
    started = time.monotonic()
    model = load_model(directory, lambda *stage: link.send(LoadProgress(*stage)), device)
    engine = Engine(model, load_tokenizer(directory))
    _warm_up(model)
    load_ms = round((time.monotonic() - started) * 1000)
    link.send(_ready(model, name, load_ms))
    _take(frames, engine)  # what came right behind the Hello
    while not link.closed:
        _take(link.receive(wait=engine.idle), engine)
        emissions = engine.step()
        if emissions:
            link.send(Step(tuple(emissions)))


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


def _warm_up(model: Model) -> None:
    """Let BLAS and the allocator do their first-time work before a request waits for it."""
    cache = model.new_cache()
    model.advance([0], cache)
    model.logits(model.advance([0], cache))


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
    parser = argparse.ArgumentParser(prog="python -m origin.worker", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the supervisor's Unix socket")
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--name", default="demo", help="the model's name in requests")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.AUTO)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
