"""The fork server: a process that imports the workers' modules once, and then forks workers.

    python -P -m tailrace.origin.workers.bootstrap PARENT \
        tailrace.origin.workers.fork_server FD MODULE SETTINGS

FD is a socket for messages to and from the supervisor (SOCK_SEQPACKET, JSON). One worker is always
forked in advance and waits for its order. The fork server's first message has this worker's pid.
The supervisor then sends an order, which has the arguments of a worker. The fork server passes the
order to the waiting worker, forks the next worker, and answers with the next worker's pid.

A fork copies only the thread that calls it, and CUDA does not survive a fork. So a fork server
with other threads, or with CUDA initialized, forks nothing and reports why.

Each worker is forked by an intermediate process, which then ends. So the kernel makes the worker a
child of the nearest subreaper, which is the supervisor. The supervisor can wait for the worker as
for any child, and the fork server may be killed without harm to the workers.
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
from tailrace.origin.workers.load_spans import PROCESS_SPANS, LoadStage

MAX_ORDER_BYTES = 128 * 1024
ORDER_FD = 3
"""File descriptor from which a worker reads its order; the worker closes all others except 0, 1,
2."""
MOST_FDS = 1 << 20
PID_DIGITS = 32

StartRun = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True)
class ForkMessage:
    """A message to the supervisor: the `pid` of a new worker, or why none could be forked.

    The new worker waits for its order. `refusal` is empty if a worker was forked. The first message
    also has the `stages` of the fork server's start, and its memory in KiB.
    """

    pid: int = 0
    refusal: str = ""
    stages: tuple[LoadStage, ...] = ()
    rss_kib: int = 0
    pss_kib: int = 0


def main(argv: Sequence[str]) -> int:
    """Fork workers until the supervisor ends, and return the exit status.

    A forked worker does not return from here; it exits with its own status.
    """
    fd, module, settings = argv
    parent = os.getppid()
    worker = importlib.import_module(module)
    worker.prepare(settings)
    gc.collect()
    # Otherwise a garbage collection in a worker would write to every memory page that it shares
    # with the fork server, and so copy the page.
    gc.freeze()
    with socket.socket(fileno=int(fd)) as supervisor:
        stages = PROCESS_SPANS.close()
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
    """Return why this process must not be forked, or an empty string if it may be."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run in the fork server"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in the fork server"
    return ""


def _fork_ahead(run: StartRun, parent: int) -> tuple[ForkMessage, int]:
    """Fork a worker that waits for its order.

    Return the message about it, and the file descriptor to write the order to.
    """
    refusal = unclean()
    if refusal:
        return ForkMessage(refusal=refusal), -1
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
    return ForkMessage(pid), give


def _in_between(run: StartRun, parent: int, order: int, tell: int) -> None:
    """Fork the worker, write its pid to `tell`, and exit, so that the supervisor adopts it.

    This runs in the intermediate process; `order` is the descriptor that the worker reads from.
    """
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
        os._exit(status)  # without exit handlers, which are meant for the fork server


def _work(run: StartRun, parent: int) -> int:
    os.setsid()  # the worker's children join its process group, and are killed with the worker
    with os.fdopen(ORDER_FD, "rb") as order:
        given = order.read()
    PROCESS_SPANS.begin("connect")
    # By now the supervisor has adopted this process, unless the supervisor has ended.
    if not given or not end_with(parent):
        return 1
    order = json.loads(given)
    os.environ.update(order["environment"])  # early enough, since CUDA is not initialized yet
    return run(order["argv"])


def _send(supervisor: socket.socket, message: ForkMessage) -> None:
    supervisor.send(json.dumps(asdict(message)).encode())


def _memory_kib() -> tuple[int, int]:
    """Return this process's memory in KiB: resident (RSS) and proportional set size (PSS)."""
    sizes = {"Rss": 0, "Pss": 0}
    for line in Path("/proc/self/smaps_rollup").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0])
    return sizes["Rss"], sizes["Pss"]
