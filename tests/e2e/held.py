"""Streams that wait where a test wants them to: none has ended before the test has acted."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.processes import Origin
from tests.e2e.sse import Reading
from tests.origin.held_text import FACTORY, PLACE, Brake

BEHIND = 40
"""Number of events that may still come after the one that a test waits for."""


class HeldOrigin(Origin):
    """An origin whose streams go as far as it is told, however late their reader is.

    Without this a reader that gets no processor for a second finds a stream at its end which it
    wanted to cut in the middle. One that goes on with the same `data` is held at the same place.
    """

    def __init__(self, data: Path, port: int | None = None, **flags: object) -> None:
        super().__init__(data, port, **flags)
        self._brake = Brake(data.with_name(f"{data.name}.held"))
        self.environment["TAILRACE_ORIGIN_FILTER"] = FACTORY
        self.environment[PLACE] = str(self._brake.place)

    def hold(self, characters: int) -> None:
        """Let no stream come further than that."""
        self._brake.hold(characters)

    def hold_behind(self, whole: Reading, events: int) -> None:
        """Hold the text shortly behind `events` events, so that no stream of it ends."""
        self.hold(len(Reading(events=whole.events[: events + BEHIND]).text))

    def go_on(self) -> None:
        self._brake.go_on()
