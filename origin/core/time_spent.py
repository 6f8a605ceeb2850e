"""Measures where the time of a stream goes at this origin. Pure arithmetic: callers give the time.

Queue, prefill and decode follow one another, so they add up to the time since this origin made its
record of the stream. The time for commits and the time without credit are parts of them. Nothing is
added up for each token: a stream notes the sum of its worker's commits when it comes and leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """The activity of a stream that has not ended."""

    QUEUE = "queue"
    """It waits for a worker."""
    PREFILL = "prefill"
    """It is on a worker, and has no output yet."""
    DECODE = "decode"
    """It is on a worker, and has had output."""


@dataclass(slots=True)
class CommitTime:
    """Seconds for which the output of one worker has waited for commits of the ledger so far."""

    seconds: float = 0.0


@dataclass(slots=True)
class TimeSpent:
    """The time of one stream, in seconds of the core's clock; `since_s` is when it began."""

    since_s: float = 0.0
    _phase: Phase | None = Phase.QUEUE
    _spent_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    _ledger_s: float = 0.0
    _commits: CommitTime | None = None
    _commits_before_s: float = 0.0
    _reader_s: float = 0.0
    _stalled_since_s: float | None = None

    def placed(self, now: float, commits: CommitTime, *, is_begun: bool) -> None:
        """Note that a worker is ordered to generate the stream; `is_begun`: it has had output."""
        self._turn(now, Phase.DECODE if is_begun else Phase.PREFILL)
        self._commits, self._commits_before_s = commits, commits.seconds

    def begun(self, now: float) -> None:
        """Note the first output."""
        self._turn(now, Phase.DECODE)

    def queued(self, now: float) -> None:
        """Note that the stream has no worker; repeated calls change nothing."""
        self._turn(now, Phase.QUEUE)
        self._leave_worker()

    def ended(self, now: float) -> None:
        """Note the end: the times stay as they are now."""
        self._turn(now, None)
        self._leave_worker()
        self.read(now, is_read=True)

    def read(self, now: float, *, is_read: bool) -> None:
        """Note if some reader can take the next frame; before the first call nothing is counted."""
        if self._stalled_since_s is not None:
            self._reader_s += now - self._stalled_since_s
        self._stalled_since_s = None if is_read or self._phase is None else now

    def parts(self, now: float) -> dict[str, float]:
        """Return the seconds so far, by the name of the part."""
        spent = dict(self._spent_s)
        if self._phase is not None:
            spent[self._phase] += now - self.since_s
        ledger_s, reader_s = self._ledger_s + self._pending_commits_s(), self._reader_s
        if self._stalled_since_s is not None:
            reader_s += now - self._stalled_since_s
        return {phase.value: round(seconds, 4) for phase, seconds in spent.items()} | {
            "ledger": round(ledger_s, 4),
            "reader": round(reader_s, 4),
        }

    def _turn(self, now: float, phase: Phase | None) -> None:
        if self._phase is not None:
            self._spent_s[self._phase] += now - self.since_s
        self._phase, self.since_s = phase, now

    def _leave_worker(self) -> None:
        self._ledger_s += self._pending_commits_s()
        self._commits = None

    def _pending_commits_s(self) -> float:
        return 0.0 if self._commits is None else self._commits.seconds - self._commits_before_s
