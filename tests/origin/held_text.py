"""A filter that keeps a worker's streams where a test wants them, so that none ends too soon."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tailrace.origin.filter import PASS, Verdict

FACTORY = "tests.origin.held_text:Held"
PLACE = "HELD_AT"
"""The variable that names a worker's `Brake`."""
POLL_S = 0.005


class Brake:
    """A brake: a worker waits before one of its streams would pass a number of characters."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def hold(self, characters: int) -> None:
        draft = self.place.with_suffix(".draft")
        draft.write_text(str(characters))
        draft.replace(self.place)

    def go_on(self) -> None:
        """To the end, all of them."""
        self.place.unlink()

    def most(self) -> float:
        try:
            return int(self.place.read_text())
        except FileNotFoundError:
            return float("inf")


class Held:
    """The filter."""

    def __init__(self) -> None:
        self._brake = Brake(Path(os.environ[PLACE]))
        self._characters = 0

    def check(self, text: str, last: bool) -> Verdict:
        self._characters += len(text)
        while self._characters > self._brake.most():
            time.sleep(POLL_S)
        return PASS
