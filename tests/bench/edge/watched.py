"""The edge, which writes down how long each collection of garbage has taken it.

    python tests/bench/edge/watched.py FILE ARGUMENTS_OF_THE_COMMAND_LINE

FILE gets the seconds of each, one a line. SIGUSR1 has it collect all generations.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from time import perf_counter

from tailrace.cli import main


class Watch:
    """A callback for `gc` that appends the duration of each collection to a file."""

    def __init__(self, file: str) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._began_s = 0.0

    def __call__(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began_s = perf_counter()
        else:
            os.write(self._file, b"%.6f\n" % (perf_counter() - self._began_s))


if __name__ == "__main__":
    gc.callbacks.append(Watch(sys.argv.pop(1)))
    signal.signal(signal.SIGUSR1, lambda _signal, _frame: gc.collect())
    main()
