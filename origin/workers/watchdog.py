"""A worker's own end to a hang: where no step ends in time, its tracebacks on stderr, and exit.

The timer is a thread of C: it runs also where this process holds the interpreter for ever.
"""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ARM_AGAIN_S = 1.0
"""Setting the timer makes a thread, which costs as much as a quick step: not for each of them."""


class Watchdog:
    """Ends the process unless it is armed again, or rests, within `silence_s`."""

    def __init__(
        self, silence_s: float, start_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s = silence_s
        self._start_s = start_s
        self._clock_s = clock_s
        self._armed_s: float | None = None
        self._is_extended = False

    def arm(self) -> None:
        """The work goes on."""
        now = self._clock_s()
        if self._armed_s is None or self._is_extended or now - self._armed_s >= ARM_AGAIN_S:
            faulthandler.dump_traceback_later(self._silence_s, exit=True)
            self._armed_s, self._is_extended = now, False

    def extend(self) -> None:
        """What comes next may take as long as a start. Nothing, where it is not armed yet."""
        if self._armed_s is not None:
            faulthandler.dump_traceback_later(self._start_s, exit=True)
            self._is_extended = True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is due from this process meanwhile: it waits for the supervisor."""
        was_armed = self._armed_s is not None
        faulthandler.cancel_dump_traceback_later()
        self._armed_s = None
        yield
        if was_armed:
            self.arm()
