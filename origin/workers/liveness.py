"""Whether a worker lives, of what it died, and whether another one is started.

Plain rules; the clock is the caller's. Imported by workers, whose exceptions are torch's, and by
the supervisor, which has none of it.
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

# How libraries name what has no class of its own, in lower case.
_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate")
_OF_DEVICE = ("cuda error", "cublas", "cudnn", "triton error", "device-side assert", "nvrtc")

BEAT_S = 1.0
"""A worker that is ready says something at least this often, unless a step takes longer."""
SILENT_S = 5.0
"""A worker that has said nothing for so long is given no further streams until it does."""
LOOK_S = 0.5
"""How often the supervisor looks."""
BLIND_S = 2.0
"""A supervisor that did not look for so long, because it was stopped or busy, may have missed
what its workers said meanwhile; that time does not count."""
WATCHDOG_LEAD_S = 2.0
"""A worker's own watchdog has so long to end it, before its supervisor does."""
MOST_DEATHS = 6
"""One more than what ends a stream that kills workers: the model outlives such a stream."""
SETTLED_S = 10.0
"""A worker that was ready for so long has shown that workers live, though nobody asked it."""
RESTART_MIN_S = 0.05
RESTART_MAX_S = 5.0
"""Wait before the successor of a worker that did not become ready; doubles while none does."""
OPEN_MIN_S = 1.0
OPEN_MAX_S = 60.0
"""How long the circuit is open; doubles with each trial that dies."""
TRIAL_LOOK_S = 0.5
"""While one worker is tried, the others' slots look so often whether they may start."""
ARM_AGAIN_S = 1.0
"""Setting the timer makes a thread, which costs as much as a quick step: not for each of them."""


class Death(StrEnum):
    """A kind; its value is a label of metrics, and a word in logs."""

    START = "start"
    """It could not load, and said why."""
    MEMORY = "out_of_memory"
    """Of the device or the machine; the kernel may have killed it."""
    DEVICE = "device"
    """CUDA, or what is built on it, failed: nothing more can be done in that process."""
    HUNG = "hung"
    KILLED = "killed"
    """By a SIGKILL that was not the kernel's for want of memory."""
    CRASHED = "crashed"
    """By another signal, or an exception."""
    EXITED = "exited"
    """By itself, and it had no reason to."""
    SPOKE_WRONGLY = "bad_frame"

    @classmethod
    def of(cls, word: str) -> Death:
        """As a worker says it; whatever else it says, it has crashed."""
        return next((kind for kind in cls if kind.value == word), cls.CRASHED)


def kind_of(error: BaseException, *, starting: bool) -> Death:
    """What an exception means for the process that it ends."""
    text = f"{type(error).__name__}: {error}".lower()
    if isinstance(error, MemoryError) or any(word in text for word in _OF_MEMORY):
        return Death.MEMORY
    if type(error).__name__ == "AcceleratorError" or any(word in text for word in _OF_DEVICE):
        return Death.DEVICE
    return Death.START if starting else Death.CRASHED


def kind_of_exit(status: int | None, oom_kills: int) -> Death:
    """By its exit status, and how many processes the kernel has killed for memory meanwhile."""
    if status == -signal.SIGKILL:
        return Death.MEMORY if oom_kills else Death.KILLED
    if status is None:
        return Death.HUNG
    return Death.EXITED if status == 0 else Death.CRASHED


def count_oom_kills() -> int:
    """Of the whole machine so far; 0 where that is not counted."""
    with suppress(OSError, ValueError):
        for line in VMSTAT.read_text("ascii").splitlines():
            name, _, count = line.partition(" ")
            if name == OOM_COUNT:
                return int(count)
    return 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may be silent: when it is ready, and while it starts or compiles."""

    silence_s: float = 30.0
    start_s: float = 600.0


class Pulse:
    """One worker's life as its supervisor hears it; every `now` is seconds of one clock."""

    def __init__(self, patience: Patience, now: float) -> None:
        self._patience = patience
        self._limit_s = patience.start_s
        self._heard = self._looked = now
        self._is_heard = True

    def expect(self, *, starting: bool) -> None:
        """It has said that it starts or compiles, or what only a ready worker says."""
        self._limit_s = self._patience.start_s if starting else self._patience.silence_s

    def turn_away(self) -> None:
        """It has been heard; nobody listens while what it said is stored."""
        self._is_heard = False

    def listen(self, now: float) -> None:
        """What it says from now on is heard."""
        self._heard = now
        self._is_heard = True

    def look(self, now: float) -> None:
        """Take note of the time."""
        if now - self._looked > BLIND_S:
            self._heard += now - self._looked
        if not self._is_heard:
            self._heard = now
        self._looked = now

    @property
    def silence_s(self) -> float:
        """As of the last look."""
        return max(0.0, self._looked - self._heard)

    @property
    def is_silent(self) -> bool:
        return self.silence_s > SILENT_S

    @property
    def is_hung(self) -> bool:
        return self.silence_s > self._limit_s + WATCHDOG_LEAD_S


class Circuit:
    """When workers of a model are started again, after several died without having made anything.

    A worker that died is replaced, at once if it was ready. After MOST_DEATHS in a row that had
    made nothing the circuit breaker opens, and none is started for a while. Then one is started
    as a trial: if it makes something, or lives for SETTLED_S, all slots go on; if it dies, the
    next pause is longer. All slots of a model share it; every `now` is seconds of one clock.
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
        """Deaths in a row of workers that had made nothing."""
        return self._breaker.failures

    def wait_s(self, slot: int, now: float) -> float:
        """Return how long this slot waits before it asks again; 0 if it starts a worker now."""
        if self._breaker.allows(now):
            if self.state is CircuitState.CLOSED:
                return max(self._restart_at - now, 0.0)
            self._trial = slot
            self._breaker.sent(now)
        if self.state is CircuitState.OPEN:
            return self._breaker.rest_s(now)
        return 0.0 if self._trial == slot else TRIAL_LOOK_S

    def made(self) -> None:
        """Note that a worker has made something of a stream, or has lived for SETTLED_S."""
        if self.deaths:
            self._breaker.reset()
            self._restart.reset()

    def died(self, slot: int, now: float, *, was_ready: bool) -> None:
        """Note that the worker of a slot is gone."""
        self._breaker.failed(now)
        if was_ready:
            self._restart.reset()
        self._restart_at = now if was_ready else now + self._restart.next_delay_s()

    def retry_s(self, now: float) -> float:
        """Return how long it is until the next trial, as clients are told."""
        if self.state is CircuitState.OPEN:
            return self._breaker.rest_s(now)
        return max(self._restart_at - now, 0.0)

    @property
    def reason(self) -> str:
        """Why no worker can be expected now; empty while the circuit is closed."""
        if self.state is CircuitState.CLOSED:
            return ""
        tried = "one is on trial" if self.state is CircuitState.HALF_OPEN else "it is tried again"
        return f"{self.deaths} workers in a row died and had made nothing; {tried}"


class Watchdog:
    """A worker's own end to a hang: unless it is armed again, or rests, within `silence_s`, there
    are its tracebacks on stderr, and it exits.

    The timer is a thread of C: it runs also where this process holds the interpreter for ever.
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
