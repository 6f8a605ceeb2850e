"""Random waits before a retry, so that many clients do not return at the same moment.

Full jitter, after "Exponential Backoff and Jitter" (AWS Architecture Blog, 2015): a uniform draw
from a range whose upper end doubles with each failure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from random import Random

SPREAD = 4.0
"""Maximum random addition to a wait, as a multiple of the minimum wait."""


def spread_ms(minimum_ms: int) -> int:
    """Return a random wait, so that clients that are refused together do not return together.

    The wait is in ms, uniform between `minimum_ms` and `minimum_ms` times 1 + SPREAD. HTTP servers
    round it up, because Retry-After has whole seconds.
    """
    return minimum_ms + round(random.uniform(0, SPREAD * minimum_ms))


@dataclass(slots=True)
class Backoff:
    """Random delays from `least_s` to a ceiling that doubles with each failure, up to `most_s`."""

    least_s: float
    most_s: float
    random: Random = field(default_factory=Random)
    failures: int = 0

    def next_delay_s(self) -> float:
        """Count one more failure and return the delay before the next try, in seconds."""
        self.failures += 1
        # The exponent is bounded: 2.0**1024 is an OverflowError after a long outage.
        ceiling = min(self.most_s, self.least_s * 2.0 ** min(self.failures, 32))
        return self.random.uniform(self.least_s, ceiling)

    def reset(self) -> None:
        """Forget all failures, because a try has succeeded."""
        self.failures = 0
