"""When a worker's own timer is set, and when it is off; what it does then, real workers show."""

from __future__ import annotations

import faulthandler
from typing import Any

import pytest

from tailrace.origin.workers.liveness import ARM_AGAIN_S, Watchdog


class Timer:
    """Takes the place of the timer of `faulthandler`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        self.set_to: list[float | None] = []
        monkeypatch.setattr(faulthandler, "dump_traceback_later", self.set)
        monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", self.cancel)
        self.dog = Watchdog(30, 600, lambda: self.now)

    def set(self, seconds: float, **_: Any) -> None:
        self.set_to.append(seconds)

    def cancel(self) -> None:
        self.set_to.append(None)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    return Timer(monkeypatch)


def test_it_is_set_anew_now_and_then_not_for_each_step(timer: Timer) -> None:
    for _ in range(100):
        timer.dog.arm()
        timer.now += ARM_AGAIN_S / 50
    assert timer.set_to == [30, 30]


def test_what_takes_longer_has_longer_and_then_the_usual_time_is_back(timer: Timer) -> None:
    timer.dog.extend()  # while nothing is due, it stays off
    timer.dog.arm()
    timer.dog.extend()
    timer.dog.arm()
    timer.dog.arm()
    assert timer.set_to == [30, 600, 30]


def test_it_is_off_while_the_worker_waits_for_its_supervisor(timer: Timer) -> None:
    with timer.dog.resting():
        pass
    timer.dog.arm()
    with timer.dog.resting():
        assert timer.set_to == [None, 30, None]
    assert timer.set_to == [None, 30, None, 30]
