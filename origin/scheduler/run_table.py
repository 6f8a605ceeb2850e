"""Waiting and running runs of one scheduler, with their pages; decides which are preempted.

A run that starts gets the pages of all its known tokens at once, so only decoding asks for more.
Two rules free pages, and both preempt the newest run of the class that is furthest ahead of its
share:

- A running run that needs a page may take one from a run that is further ahead or newer (`reach`).
  If there is none, the run skips the step and keeps its pages.
- A class that is behind, and runs less than its share of the running runs, may start a run in the
  place of one of a less urgent class that runs more than its share (`start`). So interactive runs
  need not wait for the end of batch runs that were started when there was no other work. If that is
  not enough, runs of the less urgent class with a common prefix may be preempted too, all together.

No run is preempted in vain: a page counts as free only if all of its holders are to be preempted.

Within a class, runs that are read come before runs that nobody reads, and may replace them if slots
or pages are taken; otherwise the order is that of arrival.

The senior is the running run that is first in that order. It gets its pages before all others in a
step, and is preempted at most once, for the start of a more urgent run. So whatever the load, the
senior ends, and then the next senior: no two runs can preempt each other for ever.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from math import inf

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import ScheduledRun, pages_for

# Weights of the classes: the proportions in which they are served tokens when all want more.
WEIGHTS: Mapping[Priority, int] = {
    Priority.INTERACTIVE: 8,
    Priority.STANDARD: 4,
    Priority.BATCH: 1,
}


# Maximum lead, in tokens of a class of weight 1, that other classes may gain while the first run of
# a class waits for pages. So short prompts cannot starve a long prompt, and need not all wait for
# the long prompt either.
PASSING_TOKENS = 16_384
# Expected number of tokens that a run generates: its initial value, and the weight of each ended
# run in its moving average.
EXPECTED_TOKENS = 128.0
EXPECTATION_GAIN = 1 / 8


class FairQueue:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996); each priority class is one flow.

    Each class has a virtual time: the tokens it was served, divided by its weight. The class with
    the smallest virtual time goes first, so classes that all want more than they get are served in
    proportion to their weights. A class that gets all it wants accumulates neither debt nor credit:
    its virtual time is at least that of the least served class that wants more (`settle`).
    """

    def __init__(self, weights: Mapping[Priority, int] = WEIGHTS) -> None:
        self.weights = weights
        self._times = dict.fromkeys(weights, 0.0)
        self._now = 0.0

    def time(self, priority: Priority) -> float:
        """Return the class's virtual time, in tokens of a class of weight 1."""
        return self._times[priority]

    def charge(self, priority: Priority, tokens: int) -> None:
        """Add tokens that the class was served."""
        self._times[priority] += tokens / self.weights[priority]

    def first(self, classes: Collection[Priority]) -> Priority:
        """Return the class of `classes` that is next; among equals the most urgent one."""
        # `_times` has the most urgent class first, and min() returns the first of equal classes.
        times = self._times
        return min((priority for priority in times if priority in classes), key=times.__getitem__)

    def turns(self, runs: Iterable[ScheduledRun]) -> Iterator[ScheduledRun]:
        """Yield the runs: each time the next run of the class with the smallest virtual time.

        The caller charges the classes between two runs. Runs of one class keep their given order.
        """
        queues: dict[Priority, deque[ScheduledRun]] = {}
        for run in runs:
            queues.setdefault(run.priority, deque()).append(run)
        while queues:
            first = self.first(queues)
            yield queues[first].popleft()
            if not queues[first]:
                del queues[first]

    def settle(self, backlogged: Collection[Priority]) -> None:
        """End a step in which the classes `backlogged` did not get all that they wanted.

        The current virtual time advances to the smallest virtual time of these classes. If no class
        had to wait, it advances to the largest of all classes, so that a class which used spare
        capacity is not at a disadvantage later.
        """
        times = self._times
        if backlogged:
            self._now = max(self._now, min(times[priority] for priority in backlogged))
        else:
            self._now = max(times.values())
        for priority, time in times.items():
            if priority not in backlogged:
                times[priority] = max(time, self._now)


class RunTable:
    """Waiting runs by class, in order, and at most `most` running ones.

    The limit `enough` adapts to the duration of steps, and is at most `most`. A run starts while
    fewer than `enough` runs of its class and more urgent classes are running; less urgent runs take
    turns, so they do not delay it. A run also starts if its class runs less than its share of
    `enough`: steps become a little longer until some run ends, which costs less than preempting a
    run and computing it again. Runs that another worker had begun start up to the limit `most`.
    """

    def __init__(self, pool: PagePool, queue: FairQueue, most: int) -> None:
        self.waiting: dict[Priority, list[ScheduledRun]] = {p: [] for p in queue.weights}
        self.running: dict[int, ScheduledRun] = {}
        self.preempted: list[int] = []
        """Ids of the runs that were preempted since the step began."""
        self.reused_tokens = 0
        self._pool = pool
        self._queue = queue
        self.enough = most
        self._most = most
        self._expected = dict.fromkeys(queue.weights, EXPECTED_TOKENS)

    @property
    def senior(self) -> ScheduledRun | None:
        """The running run that arrived first; only runs that are read count if there are any."""
        return min(self.running.values(), key=_order, default=None)

    def wait(self, run: ScheduledRun) -> None:
        insort(self.waiting[run.priority], run, key=_order)

    def set_unread(self, run: ScheduledRun, *, unread: bool) -> None:
        """Set whether the run's stream is without a reader, and reorder it if it waits."""
        waits = run.run not in self.running
        if waits:
            self.waiting[run.priority].remove(run)
        run.unread = unread
        if waits:
            self.wait(run)

    def remove(self, run: ScheduledRun) -> None:
        """Remove a run that has ended, whether it waits or runs."""
        if self.running.pop(run.run, None) is None:
            self.waiting[run.priority].remove(run)
        else:
            surprise = len(run.ids) - run.prompt - self._expected[run.priority]
            self._expected[run.priority] += surprise * EXPECTATION_GAIN
        self._pool.release(run.forget())

    def begin_step(self) -> None:
        """Forget the last step, and give the first run (`senior`) the pages of its known tokens."""
        self.preempted.clear()
        for run in self.running.values():
            run.work = None
        senior = self.senior
        if senior is not None:
            self.reach(senior, len(senior.ids), ())

    # ---- starting ----

    def start(self) -> None:
        """Start waiting runs while slots and pages suffice, lowest class tag (`_tags`) first."""
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
        """Return the tag of each class: its expected virtual time when its running runs have ended.

        If only the tokens served so far counted, a class could start many runs before the first of
        them counts. A run is expected to generate as many tokens as recent runs of its class,
        because few runs reach their maximum.
        """
        owed = dict.fromkeys(self.waiting, 0.0)
        for run in self.running.values():
            tokens = min(run.prompt + self._expected[run.priority], run.most)
            owed[run.priority] += max(tokens - run.cached, 0)
        weights = self._queue.weights
        return {p: self._queue.time(p) + owed[p] / weights[p] for p in weights}

    def _admit(self, run: ScheduledRun, tags: dict[Priority, float]) -> bool:
        """Start a run if slots and pages are free or can be freed by preemption; True if it starts.

        The run takes the pages of its longest cached prefix from the pool.
        """
        if run.run in self.preempted:
            return False
        counts = Counter(other.priority for other in self.running.values())
        behind = counts[run.priority] < self.share(run.priority)
        unread = self._unread(run)
        before = sum(count for priority, count in counts.items() if priority <= run.priority)
        enough = self._most if run.continued else self.enough
        if before - len(unread) >= enough and not behind:
            return False
        losers = unread + (list(self._losers(run, tags, counts)) if behind else [])
        if not losers and not self._has_room(1):
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

    def _unread(self, run: ScheduledRun) -> list[ScheduledRun]:
        """Return the unread runs of the class that may be preempted for a run that is read."""
        senior = self.senior
        others = (o for o in self.running.values() if o.priority is run.priority)
        unread = [o for o in others if o.unread and not run.unread and o is not senior]
        return sorted(unread, key=_order, reverse=True)

    def _make_room(self, count: int, losers: Iterable[ScheduledRun]) -> list[int] | None:
        """Return `count` pages for a run that starts, preempting as many of `losers` as needed.

        None if that does not free enough; then nothing has changed.
        """
        chosen = self._choose(losers, lambda *without: self._has_room(count, *without))
        if chosen is None:
            return None
        senior = self.senior
        for loser in chosen:
            loser.yielded = loser.yielded or loser is senior
            self._preempt(loser)
        return self._pool.take(count)

    def _choose(
        self, losers: Iterable[ScheduledRun], enough: Callable[[int, int], bool]
    ) -> list[ScheduledRun] | None:
        """Return the shortest beginning of `losers` that frees enough, or None if none does.

        `enough` is called with the numbers of pages and runs that preempting them would free.
        """
        chosen: list[ScheduledRun] = []
        held: Counter[int] = Counter()
        gained = 0
        remaining = iter(losers)
        while not enough(gained, len(chosen)):
            loser = next(remaining, None)
            if loser is None:
                return None
            chosen.append(loser)
            for page in loser.pages:
                held[page] += 1
                gained += held[page] == self._pool.holders(page)
        return chosen

    def _has_room(self, count: int, gained: int = 0, without: int = 0) -> bool:
        slots = len(self.running) - without < self._most
        return slots and self._fits(count, gained, without)

    def _fits(self, count: int, gained: int = 0, without: int = 0) -> bool:
        """Return True if `count` pages can be taken and one page is left for each running run.

        `gained` pages are counted as free, and `without` of the running runs as preempted.
        """
        return self._pool.free + gained >= count + len(self.running) - without

    def _losers(
        self, run: ScheduledRun, tags: dict[Priority, float], counts: Counter[Priority]
    ) -> Iterator[ScheduledRun]:
        """Yield the runs of less urgent classes that may be preempted to start this run.

        First come runs beyond their classes' shares, then other runs with a common prefix, whose
        pages become free only if all are preempted. In both groups, runs of the class that is
        furthest ahead come first.
        """
        senior = self.senior
        rest: list[ScheduledRun] = []
        for priority in sorted(tags, key=lambda p: (-tags[p], -p)):
            if priority <= run.priority or tags[priority] <= tags[run.priority]:
                continue
            others = [o for o in self.running.values() if o.priority is priority]
            others.sort(key=_order, reverse=True)
            spare = max(counts[priority] - self.share(priority), 0)
            juniors = [other for other in others if other is not senior]
            yield from juniors[:spare]
            rest += [o for o in juniors[spare:] if self._shares(o)]
            rest += [o for o in others if o is senior and self._shares(o) and not o.yielded]
        yield from rest

    def _shares(self, run: ScheduledRun) -> bool:
        """Return True if another run holds the first page of this run, so they share a prefix."""
        return self._pool.holders(run.pages[0]) > 1

    def share(self, priority: Priority) -> int:
        """Return a class's share of running runs, and of a step's rows, if all want more."""
        weights = self._queue.weights
        return self.enough * weights[priority] // sum(weights.values())

    # ---- growing ----

    def reach(self, run: ScheduledRun, tokens: int, safe: Container[int]) -> bool:
        """Give a running run the pages for `tokens` tokens; False if the run must skip the step.

        Runs in `safe` already have work in this step and keep their pages.
        """
        count = pages_for(tokens) - len(run.pages)
        if count <= 0:
            return True
        pool = self._pool
        victims = self._choose(self._victims(run, safe), lambda new, _: pool.free + new >= count)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        run.pages += pool.take(count) or []
        return True

    def reach_spare(self, run: ScheduledRun, tokens: int) -> bool:
        """Give a run pages like `reach`, but only pages that no run is likely to need soon."""
        count = pages_for(tokens) - len(run.pages)
        if count <= 0:
            return True
        pages = self._pool.take(count) if self._fits(count) else None
        run.pages += pages or []
        return pages is not None

    def find(self, run: ScheduledRun) -> None:
        """Let a run use cached pages instead of prefilling the same tokens again.

        Other runs with the same beginning may have computed these pages meanwhile. The run's pages
        are replaced in order, from the first that is not prefilled to the first that is not cached.
        """
        while run.prefilling and run.cached // PAGE_TOKENS < run.reusable_pages:
            place = run.cached // PAGE_TOKENS
            found = self._pool.find([run.key(place)])
            if not found:
                return
            self._pool.release([run.pages[place]])
            run.pages[place] = found[0]
            run.cached += PAGE_TOKENS
            self.reused_tokens += PAGE_TOKENS

    def _victims(self, run: ScheduledRun, safe: Container[int]) -> Iterator[ScheduledRun]:
        """Yield the runs that may be preempted for a running run, in the order of preemption."""
        senior = self.senior
        others = [o for o in self.running.values() if o is not run and o is not senior]
        for other in sorted(others, key=self._rank, reverse=True):
            if other.run not in safe and (run is senior or self._rank(other) > self._rank(run)):
                yield other

    def _rank(self, run: ScheduledRun) -> tuple[float, Priority, tuple[bool, int]]:
        return self._queue.time(run.priority), run.priority, run.order

    def _preempt(self, run: ScheduledRun) -> None:
        """Take all pages from a run, and put it back into the queue of its class."""
        del self.running[run.run]
        self._pool.release(run.forget())
        self.wait(run)
        self.preempted.append(run.run)


def _order(run: ScheduledRun) -> tuple[bool, int]:
    return run.order
