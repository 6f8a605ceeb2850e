"""What workers are forked from: a process that has imported what they need, and begun nothing.

    python -P -m origin.workers.launch PARENT origin.workers.launcher FD MODULE SETTINGS

FD is a socket of messages to the supervisor (SOCK_SEQPACKET, JSON). It says first whether it is
`clean`; then each order, a worker's arguments, is answered with the worker's pid. A fork copies
the thread that calls it and no other, and CUDA does not survive one; so a process with another
thread, or in which CUDA was begun, is not clean, forks nothing and says why.

A worker is no child of this process: it is forked twice, and its parent in between ends, so that
the nearest subreaper, which is the supervisor, gets it. The supervisor learns of its end and waits
for it as for any child, and this process may be killed without harm to what it has forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from origin.workers.launch import end_with

MAX_ORDER_BYTES = 128 * 1024
STANDARD_FDS = 3
"""Of the files of this process a worker keeps these: 0, 1 and 2."""
MOST_FDS = 1 << 20
PID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Prepared:
    """The first message: whether workers can be forked, or why not; its own memory."""

    refusal: str = ""
    rss_kib: int = 0
    pss_kib: int = 0
    threads: int = 0


def main(argv: Sequence[str]) -> int:
    """Serve until the supervisor has gone; returns the exit status. A worker returns it too."""
    fd, module, settings = argv
    # Ctrl-C in a terminal reaches every process; the supervisor decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    worker = importlib.import_module(module)
    worker.prepare(settings)
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, every page of objects
    with socket.socket(fileno=int(fd)) as supervisor:
        supervisor.send(json.dumps(asdict(_prepared())).encode())
        while order := supervisor.recv(MAX_ORDER_BYTES):
            given = json.loads(order)
            refusal = unclean()
            if refusal:
                supervisor.send(json.dumps({"refusal": refusal}).encode())
                continue
            pid = fork_away(partial(_work, worker.main, given["argv"], parent))
            supervisor.send(json.dumps({"pid": pid}).encode())
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


def fork_away(work: Callable[[], int]) -> int:
    """Run `work` in a child of the nearest subreaper, which it ends with; gives its pid."""
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if not between:
        os.close(go)
        _in_between(work, told=wait, tell=tell)
    for end in (tell, wait):
        os.close(end)
    pid = os.read(told, PID_DIGITS)
    os.waitpid(between, 0)  # by now the worker has its parent
    os.close(told)
    os.write(go, b"\n")
    os.close(go)
    return int(pid)


def _in_between(work: Callable[[], int], *, told: int, tell: int) -> None:
    """Fork the worker, tell its pid and end; the worker begins when it is told to."""
    status = 1
    try:
        worker = os.fork()
        if worker:
            os.write(tell, str(worker).encode())
            status = 0
        elif os.read(told, 1):
            os.closerange(STANDARD_FDS, MOST_FDS)
            status = work()
    finally:
        if sys.exception() is not None:
            sys.excepthook(*sys.exc_info())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # what was registered to run at an exit is the launcher's


def _work(run: Callable[[Sequence[str]], int], argv: Sequence[str], parent: int) -> int:
    if not end_with(parent):
        return 1
    os.setsid()  # what a worker starts is of its group, and ends with it
    return run(argv)


def _prepared() -> Prepared:
    sizes = dict.fromkeys(("Rss", "Pss"), 0)
    for line in Path("/proc/self/smaps_rollup").read_text("ascii").splitlines():
        name, _, rest = line.partition(":")
        if name in sizes:
            sizes[name] = int(rest.split()[0])
    threads = len(os.listdir("/proc/self/task"))
    return Prepared(unclean(), sizes["Rss"], sizes["Pss"], threads)
