"""Rules about workers: when one counts as hung, why its process ended, when to start a new one.

The rules do no I/O except `count_oom_kills` and `Watchdog`; callers pass the current time. The
supervisor imports this module but not torch, so torch's exceptions are recognized by name.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from tailrace.ledger.flow.backoff import Backoff
from tailrace.ledger.flow.circuit_breaker import CircuitBreaker, CircuitState

VMSTAT = Path("/proc/vmstat")
OOM_COUNT = "oom_kill"

# Parts of messages in lower case, by which out-of-memory errors without an exception class of their
# own are recognised.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate")
_OF_DEVICE = ("cuda error", "cublas", "cudnn", "triton error", "device-side assert", "nvrtc")

BEAT_S = 1.0
"""Interval in seconds at which a ready worker sends at least one frame, unless a step is longer."""
SILENT_S = 5.0
"""Seconds of silence after which a worker gets no further streams until it sends again."""
LOOK_S = 0.5
"""Interval in seconds at which the supervisor checks whether a worker is silent."""
BLIND_S = 2.0
"""If more seconds than this pass between two checks, the supervisor itself was stopped or busy. The
time between such checks does not count as silence of a worker."""
WATCHDOG_LEAD_S = 2.0
"""Seconds by which the supervisor kills a hung worker later than the worker's own watchdog would,
because only the watchdog writes a traceback of every thread."""
MOST_DEATHS = 6
"""Number of workers that must die in a row to open the circuit breaker: one more than a poison
stream can kill before the stream is ended."""
SETTLED_S = 10.0
"""Seconds that a ready worker must live to close the circuit breaker without any output."""
RESTART_MIN_S = 0.05
RESTART_MAX_S = 5.0
"""Bounds in seconds of the wait before a restart, if the worker died before it was ready.

The wait doubles with each such death in a row."""
OPEN_MIN_S = 1.0
OPEN_MAX_S = 60.0
"""Bounds in seconds of the time that the circuit breaker stays open before a trial.

The time doubles with each failed trial."""
TRIAL_LOOK_S = 0.5
"""Interval in seconds at which other slots ask if they may start a worker while another slot's
worker is on trial."""
ARM_AGAIN_S = 1.0
"""Minimum interval in seconds between two restarts of the watchdog's timer.

Each restart starts a thread, which takes as long as a short engine step."""


class ExitKind(StrEnum):
    """Why a worker's process ended; the value appears in logs and as a label of metrics."""

    START = "start"
    """The worker could not load its model, and reported why."""
    MEMORY = "out_of_memory"
    """The device or the machine ran out of memory; the kernel may have killed the worker."""
    DEVICE = "device"
    """CUDA or one of its libraries failed; after this the process cannot use the GPU any more."""
    HUNG = "hung"
    KILLED = "killed"
    """The worker got a SIGKILL, but not from the kernel's out-of-memory killer."""
    CRASHED = "crashed"
    """The worker was ended by another signal, by an exception, or exited with an error status."""
    EXITED = "exited"
    """The worker exited with status 0, although it was not told to."""
    BAD_FRAME = "bad_frame"

    @classmethod
    def of(cls, word: str) -> ExitKind:
        """Return the member with this value, or CRASHED for an unknown value."""
        return next((kind for kind in cls if kind.value == word), cls.CRASHED)


def kind_of(error: BaseException, *, starting: bool) -> ExitKind:
    """Return the kind for an exception that ends a worker.

    `starting`: True if the worker was not ready yet.
    """
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OF_MEMORY):
        return ExitKind.MEMORY
    if type(error).__name__ == "AcceleratorError" or any(word in text for word in _OF_DEVICE):
        return ExitKind.DEVICE
    return ExitKind.START if starting else ExitKind.CRASHED


def kind_of_exit(status: int | None, oom_kills: int) -> ExitKind:
    """Return the kind for an exit status; None means that a killed process has not ended.

    `oom_kills` is the number of processes that the kernel killed for lack of memory while the
    worker ran.
    """
    if status == -signal.SIGKILL:
        return ExitKind.MEMORY if oom_kills else ExitKind.KILLED
    if status is None:
        return ExitKind.HUNG
    return ExitKind.EXITED if status == 0 else ExitKind.CRASHED


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot.

    The result is 0 if that is unknown.
    """
    with suppress(OSError, ValueError):
        for line in VMSTAT.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == OOM_COUNT:
                return int(count)
    return 0


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Maximum silence of a worker in seconds.

    `silence_s` is for a ready worker, `start_s` for one that loads its model or compiles kernels.
    """

    silence_s: float = 30.0
    start_s: float = 600.0


class Pulse:
    """Measures the silence of one worker; every `now` is seconds of one clock."""

    def __init__(self, limits: SilenceLimits, now: float) -> None:
        self._limits = limits
        self._limit_s = limits.start_s
        self._heard = self._looked = now
        self._is_heard = True

    def expect(self, *, starting: bool) -> None:
        """Choose the limit: the one for starting or compiling, or the one for a ready worker."""
        self._limit_s = self._limits.start_s if starting else self._limits.silence_s

    def turn_away(self) -> None:
        """Record that the supervisor stops reading until it has stored the frames it has read."""
        self._is_heard = False

    def listen(self, now: float) -> None:
        """Record that the supervisor reads again; the worker counts as heard at `now`."""
        self._heard = now
        self._is_heard = True

    def look(self, now: float) -> None:
        """Measure the silence at `now`."""
        if now - self._looked > BLIND_S:
            self._heard += now - self._looked
        if not self._is_heard:
            self._heard = now
        self._looked = now

    @property
    def silence_s(self) -> float:
        """Seconds of silence at the last call of `look`."""
        return max(0.0, self._looked - self._heard)

    @property
    def is_silent(self) -> bool:
        return self.silence_s > SILENT_S

    @property
    def is_hung(self) -> bool:
        return self.silence_s > self._limit_s + WATCHDOG_LEAD_S


class Circuit:
    """Decides when the workers of a model are started again after deaths.

    A worker that dies after it was ready is replaced at once; one that dies before is replaced
    after a short wait. After MOST_DEATHS deaths in a row without any output the circuit breaker
    opens, and no worker is started for a while. Then one worker is started as a trial. If it has
    output or lives for SETTLED_S, all slots start again; if it dies, the next pause is longer. All
    slots of a model share one Circuit. Every `now` is seconds of one clock.
    """

    def __init__(self, random: Random | None = None) -> None:
        random = random or Random()
        self._breaker = CircuitBreaker(MOST_DEATHS, Backoff(OPEN_MIN_S, OPEN_MAX_S, random))
        self._restart = Backoff(RESTART_MIN_S, RESTART_MAX_S, random)
        self._restart_at = 0.0  # no worker starts before this time, even if the breaker is closed
        self._trial: int | None = None  # number of the slot whose worker is on trial

    @property
    def state(self) -> CircuitState:
        return self._breaker.state

    @property
    def deaths(self) -> int:
        """Number of workers that died since one had output or lived for SETTLED_S."""
        return self._breaker.failures

    def wait_s(self, slot: int, now: float) -> float:
        """Return 0 if this slot may start a worker now, or else the seconds until it may ask again.

        If a trial is due, the first slot that calls this method starts the trial worker.
        """
        if self._breaker.allows(now):
            if self.state is CircuitState.CLOSED:
                return max(self._restart_at - now, 0.0)
            self._trial = slot
            self._breaker.sent(now)
        if self.state is CircuitState.OPEN:
            return self._breaker.rest_s(now)
        return 0.0 if self._trial == slot else TRIAL_LOOK_S

    def made(self) -> None:
        """Record that a worker has had output, or has lived for SETTLED_S."""
        if self.deaths:
            self._breaker.reset()
            self._restart.reset()

    def died(self, slot: int, now: float, *, was_ready: bool) -> None:
        """Record that the worker of a slot has died."""
        self._breaker.failed(now)
        if was_ready:
            self._restart.reset()
        self._restart_at = now if was_ready else now + self._restart.next_delay_s()

    def retry_s(self, now: float) -> float:
        """Return the seconds until a worker is started again, which clients get as Retry-After."""
        if self.state is CircuitState.OPEN:
            return self._breaker.rest_s(now)
        return max(self._restart_at - now, 0.0)

    @property
    def reason(self) -> str:
        """Why no worker is started; empty while the circuit is closed."""
        if self.state is CircuitState.CLOSED:
            return ""
        is_trial = self.state is CircuitState.HALF_OPEN
        next_try = "one is on trial" if is_trial else "another one will be tried"
        return f"{self.deaths} workers in a row died without any output; {next_try}"


class Watchdog:
    """Ends its own process when it hangs, with the tracebacks of all threads on stderr.

    A timer ends the process `silence_s` seconds after the last `arm`, except while `resting`. The
    timer is a thread in C, so it works even if a thread never releases the GIL.
    """

    def __init__(
        self, silence_s: float, start_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s = silence_s
        self._start_s = start_s
        self._clock_s = clock_s
        self._armed_s: float | None = None
        self._is_extended = False

    def arm(self) -> None:
        """Restart the timer, because the process makes progress."""
        now = self._clock_s()
        if self._armed_s is None or self._is_extended or now - self._armed_s >= ARM_AGAIN_S:
            faulthandler.dump_traceback_later(self._silence_s, exit=True)
            self._armed_s, self._is_extended = now, False

    def extend(self) -> None:
        """Allow `start_s` seconds until the next `arm`, for example to compile a kernel."""
        if self._armed_s is not None:
            faulthandler.dump_traceback_later(self._start_s, exit=True)
            self._is_extended = True

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Stop the timer while the process waits for the supervisor."""
        was_armed = self._armed_s is not None
        faulthandler.cancel_dump_traceback_later()
        self._armed_s = None
        yield
        if was_armed:
            self.arm()
