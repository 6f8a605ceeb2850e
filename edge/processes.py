"""Several processes that serve at the same addresses: each is an edge, with a core of its own.

The first one holds the sockets and starts the others by fork. It serves nothing: it passes signals
on, and starts another in the place of one that was lost. TCP connections go to whichever process
accepts them first, datagrams to the one that has their connection (`edge/quic/reuseport_bpf.py`).
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
"""A process that was lost comes back so much later: what ended it may end it again."""

log = structlog.get_logger("tailrace.edge")


class Processes:
    """So many, which each do `work` with its number, until this one is told to stop."""

    def __init__(self, sockets: Sockets, count: int, work: Callable[[int], None]) -> None:
        self._sockets = sockets
        self._count = count
        self._work = work
        self._numbers: dict[int, int] = {}  # by process id
        self._stopping = False
        self._misled = False
        self._alive, self._holds = os.pipe()  # held open by this process as long as it lives

    def run(self) -> None:
        """Raises ConfigError where one says that it cannot start."""
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
            raise ConfigError("a process of this edge could not start; its line says why")

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
            if self._stopping:  # it was told while this one was being started
                os.kill(pid, signal.SIGTERM)
            return
        # Nothing of the first process may go on here: not its signals, not what called it.
        os._exit(self._serve(number))

    def _serve(self, number: int) -> int:
        os.setpgrp()  # Ctrl-C in a terminal is for the first one, which passes it on
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
            self._sockets.close()  # or who connects now would wait for nobody
        for pid in list(self._numbers):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it has ended, and is about to be waited for
