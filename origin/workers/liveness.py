"""Rules for workers' lives: hangs, why a process ended, and when a new one is started.

They do no I/O except `count_oom_kills` and `Watchdog`; callers pass the time. Both workers and the
supervisor import this, so torch's exceptions are recognized by name.
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

# Parts of messages by which errors are recognized that have no class of their own; lower case.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate")
_OF_DEVICE = ("cuda error", "cublas", "cudnn", "triton error", "device-side assert", "nvrtc")

BEAT_S = 1.0
"""Maximum interval in seconds between two frames of a ready worker, unless a step is longer."""
SILENT_S = 5.0
"""Seconds of silence after which a worker gets no further streams until it sends again."""
LOOK_S = 0.5
"""Interval in seconds between two checks by the supervisor."""
BLIND_S = 2.0
"""Interval in seconds between two checks beyond which the supervisor itself was stopped or busy.

Such time does not count as silence of a worker."""
WATCHDOG_LEAD_S = 2.0
"""Seconds that a worker's own watchdog has to end it before the supervisor does."""
MOST_DEATHS = 6
"""Deaths in a row that open the circuit breaker: one more than end a poison stream."""
SETTLED_S = 10.0
"""Seconds after which a ready worker closes the circuit breaker even if it had no request."""
RESTART_MIN_S = 0.05
RESTART_MAX_S = 5.0
"""Bounds in seconds of the wait before a restart after a worker that did not become ready.

It doubles with each of them."""
OPEN_MIN_S = 1.0
OPEN_MAX_S = 60.0
"""Bounds in seconds of the time that the circuit is open; it doubles with each failed trial."""
TRIAL_LOOK_S = 0.5
"""Interval in seconds at which the other slots ask again while one worker is on trial."""
ARM_AGAIN_S = 1.0
"""Minimum interval in seconds between two settings of the watchdog's timer.

Each setting starts a thread, which costs as much as a quick step."""


class ExitKind(StrEnum):
    """Why a worker's process ended; the value is a label of metrics and a word in logs."""

    START = "start"
    """It could not load, and reported why."""
    MEMORY = "out_of_memory"
    """The device or the machine had too little memory; the kernel may have killed it."""
    DEVICE = "device"
    """CUDA or a library on it failed, after which the process cannot use the device."""
    HUNG = "hung"
    KILLED = "killed"
    """It got a SIGKILL, and the kernel killed nothing for lack of memory."""
    CRASHED = "crashed"
    """It got another signal or raised an exception."""
    EXITED = "exited"
    """It exited with status 0 without being told to."""
    BAD_FRAME = "bad_frame"

    @classmethod
    def of(cls, word: str) -> ExitKind:
        """Return the member with this value, or CRASHED for an unknown value."""
        return next((kind for kind in cls if kind.value == word), cls.CRASHED)


def kind_of(error: BaseException, *, starting: bool) -> ExitKind:
    """Return the member for an exception that ends a worker; `starting` is before it is ready."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OF_MEMORY):
        return ExitKind.MEMORY
    if type(error).__name__ == "AcceleratorError" or any(word in text for word in _OF_DEVICE):
        return ExitKind.DEVICE
    return ExitKind.START if starting else ExitKind.CRASHED


def kind_of_exit(status: int | None, oom_kills: int) -> ExitKind:
    """Return the member for an exit status.

    `oom_kills` counts the processes that the kernel killed for lack of memory meanwhile. A status
    of None is a process that has not ended although it was killed.
    """
    if status == -signal.SIGKILL:
        return ExitKind.MEMORY if oom_kills else ExitKind.KILLED
    if status is None:
        return ExitKind.HUNG
    return ExitKind.EXITED if status == 0 else ExitKind.CRASHED


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory; 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in VMSTAT.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == OOM_COUNT:
                return int(count)
    return 0


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """Maximum silence of a worker in seconds: when it is ready, and while it starts or compiles."""

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
        """Set the limit of silence: that of a worker that starts or compiles, or of a ready one."""
        self._limit_s = self._limits.start_s if starting else self._limits.silence_s

    def turn_away(self) -> None:
        """Note that the worker is not read while its last frames are stored."""
        self._is_heard = False

    def listen(self, now: float) -> None:
        """Note that the worker was heard at `now` and is read again."""
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

    A dead worker is replaced, at once if it was ready. After MOST_DEATHS deaths in a row without
    any output the circuit breaker opens, and no worker is started for a while. Then one worker is
    started as a trial. If it has output or lives for SETTLED_S, all slots start again; if it dies,
    the next pause is longer. All slots of a model share one Circuit; every `now` is seconds of one
    clock.
    """

    def __init__(self, random: Random | None = None) -> None:
        random = random or Random()
        self._breaker = CircuitBreaker(MOST_DEATHS, Backoff(OPEN_MIN_S, OPEN_MAX_S, random))
        self._restart = Backoff(RESTART_MIN_S, RESTART_MAX_S, random)
        self._restart_at = 0.0  # while the breaker is closed
        self._trial: int | None = None  # the slot whose worker is on trial

    @property
    def state(self) -> CircuitState:
        return self._breaker.state

    @property
    def deaths(self) -> int:
        """Number of deaths in a row without any output."""
        return self._breaker.failures

    def wait_s(self, slot: int, now: float) -> float:
        """Return the seconds until this slot may ask again; 0 if it may start a worker now."""
        if self._breaker.allows(now):
            if self.state is CircuitState.CLOSED:
                return max(self._restart_at - now, 0.0)
            self._trial = slot
            self._breaker.sent(now)
        if self.state is CircuitState.OPEN:
            return self._breaker.rest_s(now)
        return 0.0 if self._trial == slot else TRIAL_LOOK_S

    def made(self) -> None:
        """Note that a worker has had output, or has lived for SETTLED_S."""
        if self.deaths:
            self._breaker.reset()
            self._restart.reset()

    def died(self, slot: int, now: float, *, was_ready: bool) -> None:
        """Note that the worker of a slot has died."""
        self._breaker.failed(now)
        if was_ready:
            self._restart.reset()
        self._restart_at = now if was_ready else now + self._restart.next_delay_s()

    def retry_s(self, now: float) -> float:
        """Return the seconds until the next trial, which clients get as the time to retry."""
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

    It fires if it is neither armed again nor resting for `silence_s`. The timer is a thread in C,
    so it fires even if a thread holds the interpreter's lock for ever.
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
        """Start the timer anew, because the work makes progress."""
        now = self._clock_s()
        if self._armed_s is None or self._is_extended or now - self._armed_s >= ARM_AGAIN_S:
            faulthandler.dump_traceback_later(self._silence_s, exit=True)
            self._armed_s, self._is_extended = now, False

    def extend(self) -> None:
        """Allow `start_s` for what comes next, if the watchdog is armed."""
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
