"""Stop sequences over streamed text: the text before one goes out, the sequence never does."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text for as long as it may be the beginning of a stop sequence.

    What comes out depends on the text alone, not on how it is cut into tokens. Once `matched`,
    the text from the first stop sequence on is gone and nothing comes any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that is now certain to be no part of a stop sequence."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.matched = bool(found)
        # Of several, the first to be complete counts, so that it is of no account how many
        # tokens brought the text; of several that end there, the one that began first.
        certain = min(found)[1] if found else len(self._held) - self._suspect_length()
        released = self._held[:certain]
        self._held = "" if self.matched else self._held[certain:]
        return released

    def flush(self) -> str:
        """What is held back, when no more text will come, or none that belongs to it."""
        held, self._held = self._held, ""
        return held

    def _suspect_length(self) -> int:
        """Length of the longest end of the held text that some stop sequence begins with."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
