"""Input of all connections, handled in slices, so that no client holds up the others.

A kilobyte of input can be a hundred frames or a dozen requests, and the event loop may read
megabytes in one iteration. So each connection gives its protocol one slice at a time, connections
take turns, and after TURN_S the rest waits for the next iteration of the event loop.

Sans-I/O: the owner of the loop passes the clock and `call_soon`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE_BYTES = 512
"""Maximum input that a protocol gets in one call, in bytes."""
TURN_S = 0.002
"""Time for handling input in one iteration of the event loop, in seconds. The rest of the input
waits for the next iteration. The last slice may exceed this time."""
MAX_HELD_BYTES = 64 << 10
"""Maximum input that is buffered for a protocol that has paused its input, in bytes, for instance
while a response is sent. Beyond it the socket is not read. One read of the event loop, up to
256 KiB, may exceed this limit."""


class Input(Protocol):
    """A connection that has received input which is not handled yet."""

    in_line: bool
    """True while the connection waits for its turn. Only `InputTurns` sets this."""

    def take_slice(self) -> bool:
        """Handle one slice of the input; return True if there is more to handle. Must not raise."""


class InputTurns:
    """The queue of connections whose input waits to be handled."""

    def __init__(
        self, clock_s: Callable[[], float], call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._clock_s = clock_s
        self._call_soon = call_soon
        self._line: deque[Input] = deque()
        self._spent_s = 0.0
        self._waits = False  # input waits for the next iteration of the event loop

    def add(self, who: Input) -> None:
        """Queue a connection, and handle as much input as this iteration of the loop allows."""
        if not who.in_line:
            who.in_line = True
            self._line.append(who)
        if not self._waits:
            self._work()

    def add_later(self, who: Input) -> None:
        """Queue a connection, whose input is handled in the next iteration of the loop."""
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
            # TURN_S limits all callbacks in one iteration of the event loop together, so add up
            # their times. Only a wait resets the sum. If the sum spans several iterations, the only
            # effect is a wait that was not necessary.
            self._spent_s += now_s - began_s
            began_s = now_s
            if self._spent_s >= TURN_S:
                self._wait()
