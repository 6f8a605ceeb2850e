"""Measures where the time of a stream goes at this origin. Pure arithmetic: callers give the time.

Queue, prefill and decode follow one another, so they add up to the time since this origin made its
record of the stream. The waits for the batch, for commits and for readers are parts of them.
Nothing is added up for each token: a stream notes the sum of its worker's commits when it comes and
leaves.
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


class ReaderWait(StrEnum):
    """The reason why no reader can take the next frame of a stream."""

    RELAY = "relay"
    """Readers are connected, but none of them has credit for it: the edge that relays the stream,
    or the client behind it, is slow."""
    AWAY = "away"
    """No reader is connected."""


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
    _batch_s: float = 0.0  # on earlier workers
    _batch_here_s: float = 0.0
    _ledger_s: float = 0.0
    _commits: CommitTime | None = None
    _commits_before_s: float = 0.0
    _reader_waits_s: dict[ReaderWait, float] = field(
        default_factory=lambda: dict.fromkeys(ReaderWait, 0.0)
    )
    _reader_wait: ReaderWait | None = None
    _reader_wait_since_s: float = 0.0

    def placed(self, now: float, commits: CommitTime, *, is_begun: bool) -> None:
        """Note that a worker is ordered to generate the stream; `is_begun`: it has had output."""
        self._turn(now, Phase.DECODE if is_begun else Phase.PREFILL)
        self._commits, self._commits_before_s = commits, commits.seconds

    def begun(self, now: float) -> None:
        """Note the first output."""
        self._turn(now, Phase.DECODE)

    def waited_for_batch(self, seconds: float) -> None:
        """Note how long the stream has waited for the batch of its current worker in all."""
        self._batch_here_s = seconds

    def queued(self, now: float) -> None:
        """Note that the stream has no worker; repeated calls change nothing."""
        self._turn(now, Phase.QUEUE)
        self._leave_worker()

    def ended(self, now: float) -> None:
        """Note the end: the times stay as they are now."""
        self._turn(now, None)
        self._leave_worker()
        self.readers_changed(now, None)

    def readers_changed(self, now: float, wait: ReaderWait | None) -> None:
        """Note why no reader can take the next frame; None if one can, or the stream has ended.

        Before the first call no wait is counted.
        """
        if self._reader_wait is not None:
            self._reader_waits_s[self._reader_wait] += now - self._reader_wait_since_s
        self._reader_wait = None if self._phase is None else wait
        self._reader_wait_since_s = now

    def parts(self, now: float) -> dict[str, float]:
        """Return the seconds so far, by the name of the part."""
        spent, waited = dict(self._spent_s), dict(self._reader_waits_s)
        if self._phase is not None:
            spent[self._phase] += now - self.since_s
        if self._reader_wait is not None:
            waited[self._reader_wait] += now - self._reader_wait_since_s
        ledger_s = self._ledger_s + self._pending_commits_s()
        return {
            **{phase.value: round(seconds, 4) for phase, seconds in spent.items()},
            "batch": round(self._batch_s + self._batch_here_s, 4),
            "ledger": round(ledger_s, 4),
            **{wait.value: round(seconds, 4) for wait, seconds in waited.items()},
        }

    def _turn(self, now: float, phase: Phase | None) -> None:
        if self._phase is not None:
            self._spent_s[self._phase] += now - self.since_s
        self._phase, self.since_s = phase, now

    def _leave_worker(self) -> None:
        self._ledger_s += self._pending_commits_s()
        self._commits = None
        self._batch_s, self._batch_here_s = self._batch_s + self._batch_here_s, 0.0

    def _pending_commits_s(self) -> float:
        return 0.0 if self._commits is None else self._commits.seconds - self._commits_before_s
