"""Whether a worker still lives, by when it was last heard.

Plain rules; the clock is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass

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
