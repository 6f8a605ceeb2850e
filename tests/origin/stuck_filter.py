"""A filter whose check never returns."""

from __future__ import annotations

import signal

from tailrace.origin.filter import Verdict


class Stuck:
    """A filter that never returns."""

    def check(self, text: str, last: bool) -> Verdict:
        signal.pause()
        return Verdict()


make = Stuck
