"""How often a sign that a model will soon be asked for was right."""

from __future__ import annotations

from dataclasses import dataclass

HINT_WINDOW_S = 30.0
"""A request within so long after a hint makes it a right one; so long it keeps a model, too."""
PRIOR_RIGHT, PRIOR_SEEN = 1.0, 2.0
"""Before anything was seen, every second hint is taken to be right."""


@dataclass(slots=True)
class HintRecord:
    """Of one kind of hint for one model. Hints within one window are one."""

    seen: float = PRIOR_SEEN
    right: float = PRIOR_RIGHT
    last_s: float | None = None

    def came(self, now: float) -> None:
        if self.last_s is None or now - self.last_s > HINT_WINDOW_S:
            self.seen += 1
            self.last_s = now

    def asked(self, now: float) -> None:
        """A request came: the hint before it was right, if it was not long ago."""
        if self.last_s is not None and now - self.last_s <= HINT_WINDOW_S:
            self.right += 1
        self.last_s = None

    @property
    def share(self) -> float:
        return self.right / self.seen
