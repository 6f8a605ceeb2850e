"""Input of all connections, worked off in slices, so that no client holds up the others.

A kilobyte of input can be a hundred frames or a dozen requests, and the event loop may read
megabytes in one callback. So each connection hands its protocol one slice at a time, connections
take turns, and after TURN_S the rest waits for the next turn of the event loop.

Sans-I/O: the owner of the loop gives the clock and `call_soon`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE_BYTES = 512
"""Maximum input of one connection that a protocol gets in one call."""
TURN_S = 0.002
"""Time after which the rest of the input waits for the next turn of the event loop, in seconds.
One slice may exceed it."""
MAX_HELD_BYTES = 64 << 10
"""Maximum input that waits for a protocol which takes none at the moment, for instance because
its last request is being answered. Beyond it the client is not read. One read of the event loop,
256 KiB, may come on top."""


class Input(Protocol):
    """A connection with input that waits."""

    in_line: bool
    """True while it waits for its turn. Only `InputTurns` sets it."""

    def take_slice(self) -> bool:
        """Work off one slice; return True if there is more to work off. Must not raise."""


class InputTurns:
    """The line in which connections wait to have their input worked off."""

    def __init__(
        self, clock_s: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._clock_s = clock_s
        self._call_soon = call_soon
        self._line: deque[Input] = deque()
        self._spent_s = 0.0
        self._waits = False  # until the loop has had its turn

    def add(self, who: Input) -> None:
        """Put a connection in the line, and work off as much as this turn of the loop allows."""
        if not who.in_line:
            who.in_line = True
            self._line.append(who)
        if not self._waits:
            self._work()

    def add_later(self, who: Input) -> None:
        """Put a connection in the line, and leave the work to the next turn of the loop."""
        if not who.in_line:
            who.in_line = True
            self._line.append(who)
        self._wait()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._call_soon(self._go_on)

    def _go_on(self) -> None:
        self._waits, self._spent_s = False, 0.0
        self._work()

    def _work(self) -> None:
        line, clock_s = self._line, self._clock_s
        began_s = clock_s()
        while line and not self._waits:
            who = line.popleft()
            who.in_line = False
            if who.take_slice() and not who.in_line:
                who.in_line = True
                line.append(who)
            now_s = clock_s()
            # It adds up over the callbacks of a turn of the loop. That it also adds up over turns
            # only costs an honest client one turn after every TURN_S of work.
            self._spent_s += now_s - began_s
            began_s = now_s
            if self._spent_s >= TURN_S:
                self._wait()
