"""What workers are forked from: a process that has imported what they need, and begun nothing.

    python -P -m tailrace.origin.workers.bootstrap PARENT \
        tailrace.origin.workers.fork_server FD MODULE SETTINGS

FD is a socket of messages to the supervisor (SOCK_SEQPACKET, JSON). One worker is always forked
ahead, and waits for its order. The first message names it; each order, a worker's arguments, goes
to the one that waits, and is answered with the next one. A fork copies the thread that calls it
and no other, and CUDA does not survive one; so a process with another thread, or in which CUDA
was begun, forks nothing and says why.

A worker is no child of this process: it is forked twice, and its parent in between ends, so that
the nearest subreaper, which is the supervisor, gets it. The supervisor learns of its end and waits
for it as for any child, and this process may be killed without harm to what it has forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tailrace.origin.workers.bootstrap import end_with
from tailrace.origin.workers.load_spans import OF_THIS_PROCESS, LoadStage

MAX_ORDER_BYTES = 128 * 1024
ORDER_FD = 3
"""Where a worker reads its order; of the files of this process it keeps that, and 0, 1 and 2."""
MOST_FDS = 1 << 20
PID_DIGITS = 32

Run = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class Forked:
    """A message: the worker that waits, or why there is none. `stages` are of the start."""

    pid: int = 0
    refusal: str = ""
    stages: tuple[LoadStage, ...] = ()
    rss_kib: int = 0
    pss_kib: int = 0


def main(argv: Sequence[str]) -> int:
    """Serve until the supervisor has gone; returns the exit status. A worker returns its own."""
    fd, module, settings = argv
    parent = os.getppid()
    worker = importlib.import_module(module)
    worker.prepare(settings)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, every page of objects
    with socket.socket(fileno=int(fd)) as supervisor:
        stages = OF_THIS_PROCESS.close()
        waiting, order = _fork_ahead(worker.main, parent)
        rss_kib, pss_kib = _memory_kib()
        first = replace(waiting, stages=stages, rss_kib=rss_kib, pss_kib=pss_kib)
        _send(supervisor, first)
        while given := supervisor.recv(MAX_ORDER_BYTES):
            if waiting.pid:
                with os.fdopen(order, "wb") as worker_order:
                    worker_order.write(given)
            waiting, order = _fork_ahead(worker.main, parent)
            _send(supervisor, waiting)
    return 0


def unclean() -> str:
    """Why this process must not be forked; empty when it may be."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run in it"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was begun in it"
    return ""


def _fork_ahead(run: Run, parent: int) -> tuple[Forked, int]:
    """A worker that waits, and the file that its order is written to."""
    refusal = unclean()
    if refusal:
        return Forked(refusal=refusal), -1
    told, tell = os.pipe()
    order, give = os.pipe()
    between = os.fork()
    if not between:
        os.close(give)
        _in_between(run, parent, order, tell)
    for end in (tell, order):
        os.close(end)
    with os.fdopen(told, "rb") as answer:
        pid = int(answer.read(PID_DIGITS))
    os.waitpid(between, 0)
    return Forked(pid), give


def _in_between(run: Run, parent: int, order: int, tell: int) -> None:
    """Fork the worker, tell its pid and end, so that it gets its parent; then it may begin."""
    status = 1
    try:
        worker = os.fork()
        if worker:
            os.write(tell, str(worker).encode())
            status = 0
        else:
            os.dup2(order, ORDER_FD)
            os.closerange(ORDER_FD + 1, MOST_FDS)
            status = _work(run, parent)
    finally:
        if sys.exception() is not None:
            sys.excepthook(*sys.exc_info())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # what was registered to run at an exit is the launcher's


def _work(run: Run, parent: int) -> int:
    os.setsid()  # what a worker starts is of its group, and ends with it
    with os.fdopen(ORDER_FD, "rb") as order:
        given = order.read()
    OF_THIS_PROCESS.begin("connect")
    # It was forked long ago: only now has it certainly got its parent, unless that is gone.
    if not given or not end_with(parent):
        return 1
    order = json.loads(given)
    os.environ.update(order["environment"])  # CUDA, which was not begun here, reads it when it is
    return run(order["argv"])


def _send(supervisor: socket.socket, message: Forked) -> None:
    supervisor.send(json.dumps(asdict(message)).encode())


def _memory_kib() -> tuple[int, int]:
    """What this process has of memory, and with what it shares counted in parts."""
    sizes = {"Rss": 0, "Pss": 0}
    for line in Path("/proc/self/smaps_rollup").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0])
    return sizes["Rss"], sizes["Pss"]
