"""Several edge processes on the same addresses, one per CPU core.

The first process holds the sockets, forks the others, and serves no requests itself. It forwards
signals to the others and replaces those that have ended. The process that first accepts a TCP
connection serves it. A UDP datagram goes to the process that serves its QUIC connection
(`edge/quic/reuseport_bpf.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

import structlog

from tailrace.edge.server.listen import Sockets
from tailrace.ledger.errors import EXIT_USAGE, ConfigError
from tailrace.ledger.process.lifecycle import STOP_SIGNALS

RESTART_AFTER_S = 1.0
"""Delay before a crashed process is replaced, in seconds: the new one may crash at once, too."""

log = structlog.get_logger("tailrace.edge")


class Processes:
    """Forks `count` processes that run `work(number)`, and restarts them until a stop signal."""

    def __init__(self, sockets: Sockets, count: int, work: Callable[[int], None]) -> None:
        self._sockets = sockets
        self._count = count
        self._work = work
        self._numbers: dict[int, int] = {}  # maps a child's process id to its number
        self._stopping = False
        self._misled = False
        # Only this process holds the write end. Children read the pipe, and so notice when
        # this process ends.
        self._alive, self._holds = os.pipe()

    def run(self) -> None:
        """Run until all processes have ended; raise ConfigError if one could not start."""
        for each in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(each, self._pass_on)
        for number in range(self._count):
            self._start(number)
        while self._numbers:
            pid, status = os.wait()
            number = self._numbers.pop(pid)
            if not self._stopping:
                self._lost(number, os.waitstatus_to_exitcode(status))
        if self._misled:
            raise ConfigError("a process of this edge could not start; see its error above")

    def _lost(self, number: int, code: int) -> None:
        if code == EXIT_USAGE:
            self._misled = True
            self._pass_on(signal.SIGTERM, None)
            return
        log.warning("edge process lost", number=number, status=code)
        time.sleep(RESTART_AFTER_S)
        if not self._stopping:
            self._start(number)

    def _start(self, number: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._numbers[pid] = number
            if self._stopping:  # a stop signal arrived during the fork, so the child missed it
                os.kill(pid, signal.SIGTERM)
            return
        # os._exit, because the child must not return into the code of the first process.
        os._exit(self._serve(number))

    def _serve(self, number: int) -> int:
        os.setpgrp()  # Ctrl-C then reaches only the first process, which stops its children
        for each in (*STOP_SIGNALS, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)
        os.close(self._holds)
        threading.Thread(target=self._watch, name="first-process", daemon=True).start()
        try:
            self._work(number)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return EXIT_USAGE
        except BaseException:  # noqa: BLE001 - whatever it is, it ends here
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return 0

    def _watch(self) -> None:
        """End this child when the first process has ended, even if the first process was killed."""
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in STOP_SIGNALS and not self._stopping:
            self._stopping = True
            # Clients would connect to a socket that is still open, and get no answer.
            self._sockets.close()
        for pid in list(self._numbers):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # this child has ended already
