"""When a worker counts as silent, and when as hung; no process, and no clock but the test's."""

from __future__ import annotations

from tailrace.origin.workers.liveness import (
    BLIND_S,
    LOOK_S,
    SILENT_S,
    WATCHDOG_LEAD_S,
    Pulse,
    SilenceLimits,
)

LIMITS = SilenceLimits(silence_s=30, start_s=600)


class Watched:
    """A pulse that is looked at as often as a supervisor does."""

    def __init__(self, *, starting: bool = False) -> None:
        self.now = 100.0
        self.pulse = Pulse(LIMITS, self.now)
        if not starting:
            self.say()

    def say(self, *, starting: bool = False) -> None:
        self.pulse.turn_away()
        self.pulse.expect(starting=starting)
        self.pulse.listen(self.now)

    @property
    def state(self) -> str:
        if self.pulse.is_hung:
            return "hung"
        return "silent" if self.pulse.is_silent else "heard"

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            self.pulse.look(self.now)


def test_a_worker_is_first_silent_and_then_hung() -> None:
    it = Watched()
    it.wait(SILENT_S)
    assert it.state == "heard"
    it.wait(LOOK_S)
    assert it.state == "silent"
    it.wait(LIMITS.silence_s + WATCHDOG_LEAD_S - SILENT_S)
    assert it.state == "hung"


def test_what_it_says_begins_the_wait_anew() -> None:
    it = Watched()
    for _ in range(10):
        it.wait(LIMITS.silence_s)
        it.say()
    assert it.state == "heard"


def test_a_start_and_a_compilation_may_take_longer_but_not_for_ever() -> None:
    for it in (Watched(starting=True), Watched()):
        it.say(starting=True)
        it.wait(LIMITS.start_s)
        assert it.state == "silent"
        it.wait(WATCHDOG_LEAD_S + LOOK_S)
        assert it.state == "hung"


def test_the_usual_limit_is_back_after_a_compilation() -> None:
    it = Watched()
    it.say(starting=True)
    it.say()
    it.wait(LIMITS.silence_s + WATCHDOG_LEAD_S + LOOK_S)
    assert it.state == "hung"


def test_a_worker_is_not_silent_while_nobody_listens() -> None:
    it = Watched()
    it.pulse.turn_away()  # its step waits for the ledger
    it.wait(10 * LIMITS.silence_s)
    assert it.state == "heard"
    it.pulse.listen(it.now)
    it.wait(LIMITS.silence_s)
    assert it.state == "silent"


def test_time_in_which_the_supervisor_was_stopped_does_not_count() -> None:
    it = Watched()
    it.now += 10 * BLIND_S + LIMITS.silence_s
    it.pulse.look(it.now)
    assert it.state == "heard"
    it.wait(LIMITS.silence_s + WATCHDOG_LEAD_S + LOOK_S)
    assert it.state == "hung"
