"""A worker that makes a token for each of its runs a step, and computes nothing.

    python tests/bench/path/worker.py SOCKET SETTINGS

SETTINGS is JSON: `runs`, how many it waits for before it begins, and `steps_per_s`, or null for as
many as the supervisor takes. A token's text is the time at which it was made, as readers.py reads
it.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from select import select
from typing import Any, cast

from tailrace.ledger.frame import Hello, Token
from tailrace.ledger.frame import encode as encode_logged
from tailrace.ledger.wire.codec import FrameSplitter
from tailrace.origin.config import DEMO_MODEL
from tailrace.origin.workers.worker_frame import (
    MAX_WORKER_FRAME_BYTES,
    SCHEMA_HASH,
    SUPERVISOR,
    ActiveRuns,
    CancelRun,
    Emission,
    Ready,
    StartRun,
    Step,
    decode,
    encode,
)
from tests.bench.edge.source import stamp

HELD_BYTES = 1 << 17
"""Maximum size of steps that the supervisor has not read yet, in bytes."""
NONE_STEERED: Any = () if "steered" in Emission.__slots__ else 0
"""Value of an emission's `steered` that means none; it is a number in older trees."""
ALIVE_S = 1.0
"""Between two signs of life while it waits: a silent worker is given no runs."""


def step_of(emissions: Sequence[Emission]) -> Step:
    """Return a step of emissions, made as the tree under test makes it."""
    make: Callable[[Sequence[Emission]], Step] = getattr(
        Step, "of", lambda some: cast(Any, Step)(tuple(some))
    )
    return make(emissions)


def main(argv: Sequence[str]) -> int:
    place, settings = argv
    told = json.loads(settings)
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
    connection.connect(place)
    ready = Ready("tokens", "demo", "bench", "none", 1 << 20, 1 << 15, 0)
    connection.sendall(encode(Hello(SCHEMA_HASH, "bench")) + encode(ready))
    splitter = FrameSplitter(SUPERVISOR, MAX_WORKER_FRAME_BYTES)
    places: dict[int, int] = {}  # next index by run
    due, is_on = 0.0, False
    while True:
        is_on = is_on or len(places) == told["runs"]
        wait_s = max(0.0, due - time.monotonic()) if is_on else ALIVE_S
        if select([connection], [], [], wait_s)[0]:
            data = connection.recv(1 << 16)
            if not data:
                return 0
            for corr, frame in map(decode, splitter.feed(data)):
                if isinstance(frame, StartRun):
                    places[corr] = frame.next_index
                elif isinstance(frame, CancelRun):
                    places.pop(corr, None)
        elif is_on:
            text = stamp()
            logged = {at: encode_logged(Token(text, at)) for at in set(places.values())}
            emissions = []
            for run, index in places.items():
                emissions.append(
                    Emission(run, index, (index & 0x7FFF,), NONE_STEERED, logged[index])
                )
                places[run] = index + 1
            connection.sendall(encode(step_of(emissions)))
            if told["steps_per_s"]:
                due = max(due + 1 / told["steps_per_s"], time.monotonic() - 1)
        else:
            connection.sendall(encode(ActiveRuns(())))


def ready_model() -> str:
    """Return the folder whose tokenizer admits requests for it."""
    return str(DEMO_MODEL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
