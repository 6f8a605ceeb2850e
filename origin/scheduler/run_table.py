"""Who runs, who waits, and who has to make room: the runs of one scheduler, and their pages.

A run that starts gets the pages of all its known tokens at once, so only decoding asks for more.
Two rules make room, and both let the class furthest ahead of its share lose its newest run:

- A running run that needs a page may take it from a run that is further ahead or newer
  (`reach`); if there is none, it stands still for a step and keeps what it has.
- A class that runs less than its share of the running runs, and is behind, may start a run in
  the place of one of a less urgent class that runs more than its share (`start`): interactive
  runs do not wait for the end of batch runs that came when nobody else was there.

The senior, the running run that arrived first, never has to make room, and has it made before
anybody else in a step. So whatever the load, the senior ends, then the next one: no two runs can
preempt each other for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Container
from math import inf

from ledger.schema import Priority
from origin.scheduler.fair_queue import FairQueue
from origin.scheduler.pages import PAGE_TOKENS, PagePool
from origin.scheduler.scheduled_run import ScheduledRun, pages_for

# While a run waits for pages, others are started past it for so many tokens of a class of
# weight 1: a long prompt is not starved by short ones, nor do they all wait for it.
PASSING_TOKENS = 16_384

# What a run is expected to generate: at first, and how far each that ends moves it.
EXPECTED_TOKENS = 128.0
EXPECTATION_GAIN = 1 / 8


class RunTable:
    """Waiting runs by class, in order of arrival, and at most `most` running ones.

    `enough`, at most that, may change. A run starts while fewer than that run that are as urgent
    as it, or more: the less urgent ones take turns and hold up nobody. So does a run of a class
    that runs less than its share of `enough`: that makes steps a little longer, until some run
    ends, which costs less than to preempt that one and compute it again.
    """

    def __init__(self, pool: PagePool, queue: FairQueue, most: int) -> None:
        self.waiting: dict[Priority, list[ScheduledRun]] = {p: [] for p in queue.weights}
        self.running: dict[int, ScheduledRun] = {}
        self.preempted: list[int] = []
        """Since the step began."""
        self.reused_tokens = 0
        self._pool = pool
        self._queue = queue
        self.enough = most
        self._most = most
        self._expected = dict.fromkeys(queue.weights, EXPECTED_TOKENS)

    @property
    def senior(self) -> ScheduledRun | None:
        """The running run that arrived first."""
        return min(self.running.values(), key=_sequence, default=None)

    def wait(self, run: ScheduledRun) -> None:
        insort(self.waiting[run.priority], run, key=_sequence)

    def remove(self, run: ScheduledRun) -> None:
        """It has ended, wherever it is."""
        if self.running.pop(run.run, None) is None:
            self.waiting[run.priority].remove(run)
        else:
            surprise = len(run.ids) - run.prompt - self._expected[run.priority]
            self._expected[run.priority] += surprise * EXPECTATION_GAIN
        self._pool.release(run.forget())

    def begin_step(self) -> None:
        """Forget the step before, and give the senior the pages of all that it knows."""
        self.preempted.clear()
        for run in self.running.values():
            run.work = None
        senior = self.senior
        if senior is not None:
            self.reach(senior, len(senior.ids), ())

    # ---- starting ----

    def start(self) -> None:
        """Start waiting runs, the class with the earliest tag first, as far as there is room."""
        classes = [p for p, runs in self.waiting.items() if runs]
        tags = self._tags() if classes else {}
        latest = inf
        while classes:
            first = min(classes, key=lambda p: (tags[p], p))
            if tags[first] > latest:
                return
            run = self.waiting[first][0]
            if self._admit(run, tags):
                tags = self._tags()
            else:
                latest = min(latest, tags[first] + PASSING_TOKENS)
                classes.remove(first)
            classes = [p for p in classes if self.waiting[p]]

    def _tags(self) -> dict[Priority, float]:
        """Virtual times as they will be when the running runs have ended, as far as one can tell.

        By these, and not by what was served so far, a class cannot start many runs while the
        first of them have not cost anything yet. A run is expected to generate as many tokens as
        those of its class lately did: few runs use up what they may generate.
        """
        owed = dict.fromkeys(self.waiting, 0.0)
        for run in self.running.values():
            tokens = min(run.prompt + self._expected[run.priority], run.most)
            owed[run.priority] += max(tokens - run.cached, 0)
        weights = self._queue.weights
        return {p: self._queue.time(p) + owed[p] / weights[p] for p in weights}

    def _admit(self, run: ScheduledRun, tags: dict[Priority, float]) -> bool:
        """Start the run, its known prefix found in the pool, if there is room or can be made."""
        if run.run in self.preempted:
            return False
        counts = Counter(other.priority for other in self.running.values())
        behind = counts[run.priority] < self.share(run.priority)
        before = sum(count for priority, count in counts.items() if priority <= run.priority)
        if before >= self.enough and not behind:
            return False
        losers = self._losers(run, tags, counts) if behind else []
        if not losers and not self._has_room(1, []):
            return False
        found = self._pool.find(run.reusable_keys())
        pages = self._make_room(pages_for(len(run.ids)) - len(found), losers)
        if pages is None:
            self._pool.release(found)
            return False
        self.waiting[run.priority].remove(run)
        self.running[run.run] = run
        run.pages = found + pages
        run.cached = len(found) * PAGE_TOKENS
        self.reused_tokens += run.cached
        return True

    def _make_room(self, count: int, losers: list[ScheduledRun]) -> list[int] | None:
        """So many pages for a run that starts, in the place of as few losers as that takes."""
        chosen: list[ScheduledRun] = []
        for loser in losers:
            if self._has_room(count, chosen):
                break
            chosen.append(loser)
        if not self._has_room(count, chosen):
            return None
        for loser in chosen:
            self._preempt(loser)
        return self._pool.take(count)  # None where the losers' pages were shared with others

    def _has_room(self, count: int, without: list[ScheduledRun]) -> bool:
        slots = len(self.running) - len(without) < self._most
        return slots and self._fits(count, without)

    def _fits(self, count: int, without: list[ScheduledRun]) -> bool:
        """`count` pages leave each running run one more page, to go on for a while."""
        gained = sum(len(run.pages) for run in without)
        left = len(self.running) - len(without)
        return self._pool.free + gained >= count + left

    def _losers(
        self, run: ScheduledRun, tags: dict[Priority, float], counts: Counter[Priority]
    ) -> list[ScheduledRun]:
        """Whom this run may be started in the place of, the class furthest ahead first."""
        senior = self.senior
        losers = []
        for priority in sorted(tags, key=lambda p: (-tags[p], -p)):
            if priority <= run.priority or tags[priority] <= tags[run.priority]:
                continue
            spare = max(counts[priority] - self.share(priority), 0)
            others = [
                o for o in self.running.values() if o.priority is priority and o is not senior
            ]
            losers += sorted(others, key=_sequence, reverse=True)[:spare]
        return losers

    def share(self, priority: Priority) -> int:
        """Of the running runs, and of a step's rows, when all classes want more."""
        weights = self._queue.weights
        return self.enough * weights[priority] // sum(weights.values())

    # ---- growing ----

    def reach(self, run: ScheduledRun, tokens: int, safe: Container[int]) -> bool:
        """Give a running run the pages of so many tokens; False if it has to stand still.

        Runs in `safe` already have their work in this step and keep their pages.
        """
        count = pages_for(tokens) - len(run.pages)
        if count <= 0:
            return True
        while (pages := self._pool.take(count)) is None:
            victim = self._victim(run, safe)
            if victim is None:
                return False
            self._preempt(victim)
        run.pages += pages
        return True

    def reach_spare(self, run: ScheduledRun, tokens: int) -> bool:
        """The same, but only with pages that nobody is likely to need soon."""
        count = pages_for(tokens) - len(run.pages)
        if count <= 0:
            return True
        pages = self._pool.take(count) if self._fits(count, []) else None
        run.pages += pages or []
        return pages is not None

    def find(self, run: ScheduledRun) -> None:
        """Skip the chunks that another run has computed since this one started."""
        while run.prefilling and run.cached // PAGE_TOKENS < run.reusable_pages:
            place = run.cached // PAGE_TOKENS
            found = self._pool.find([run.key(place)])
            if not found:
                return
            self._pool.release([run.pages[place]])
            run.pages[place] = found[0]
            run.cached += PAGE_TOKENS
            self.reused_tokens += PAGE_TOKENS

    def _victim(self, run: ScheduledRun, safe: Container[int]) -> ScheduledRun | None:
        senior = self.senior
        others = [o for o in self.running.values() if o is not run and o is not senior]
        victim = max((o for o in others if o.run not in safe), key=self._rank, default=None)
        if victim is None or run is senior or self._rank(victim) > self._rank(run):
            return victim
        return None

    def _rank(self, run: ScheduledRun) -> tuple[float, Priority, int]:
        return self._queue.time(run.priority), run.priority, run.sequence

    def _preempt(self, run: ScheduledRun) -> None:
        """Back to where it was in its class's queue, with all its known tokens and no pages."""
        del self.running[run.run]
        self._pool.release(run.forget())
        self.wait(run)
        self.preempted.append(run.run)


def _sequence(run: ScheduledRun) -> int:
    return run.sequence
