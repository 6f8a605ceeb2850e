"""Several edge processes on the same addresses, one per CPU core.

The first process holds the sockets, forks the others, and serves nothing. It passes signals on and
replaces processes that have ended. A TCP connection goes to the process that accepts it first, a
datagram to the process that has its connection (`edge/quic/reuseport_bpf.py`).
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
"""Delay before a lost process is started again, in seconds, because it may fail again."""

log = structlog.get_logger("tailrace.edge")


class Processes:
    """Forks `count` processes running `work(number)` and restarts them until told to stop."""

    def __init__(self, sockets: Sockets, count: int, work: Callable[[int], None]) -> None:
        self._sockets = sockets
        self._count = count
        self._work = work
        self._numbers: dict[int, int] = {}  # by process id
        self._stopping = False
        self._misled = False
        self._alive, self._holds = os.pipe()  # held open by this process as long as it lives

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
            raise ConfigError("a process of this edge could not start; its error is above")

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
            if self._stopping:  # the signal came during the fork
                os.kill(pid, signal.SIGTERM)
            return
        # The child never returns to the first process's callers.
        os._exit(self._serve(number))

    def _serve(self, number: int) -> int:
        os.setpgrp()  # Ctrl-C goes to the first process, which passes it on
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
        """End with the first process, however that ends."""
        os.read(self._alive, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in STOP_SIGNALS and not self._stopping:
            self._stopping = True
            self._sockets.close()  # or clients would connect and wait in vain
        for pid in list(self._numbers):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it has ended
