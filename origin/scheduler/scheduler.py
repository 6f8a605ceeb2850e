"""The scheduler: decides which runs' tokens the next engine step pushes through the model.

It does continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024,
Sarathi-Serve) over the pages of one KV cache. One rule covers prefill, replay and decode: as long
as a run's prompt is not cached, take the next chunk of it; then rows of known tokens that are not
cached.

A step is filled in this order, up to its limits of tokens and of rows (`limits.py`):

1. One row for each decoding run. While any run has to catch up, PAGE_TOKENS tokens are reserved for
   that run: so a long prompt slows other runs but never stops them, and they never stop it. If so
   many rows make steps late, runs of all but the most urgent class take turns.
2. For each run that has to catch up, a chunk of its prompt or known rows; then, for each run with a
   longer prompt, the next chunk, and so on.
3. Drafts of speculative decoding, with the tokens that are left: drafts never displace other work.

Within 1 and 2 weighted fair queueing (`run_table.py`) decides between the classes. Within a class
decoding runs take turns, and everything else is first come, first served, except that unread runs
come last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.errors import Overloaded, TooLarge
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.limits import Limits, StepLimits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import Drafts, Plan, ScheduledRun, Work, pages_for, rows_of
from tailrace.origin.scheduler.run_table import FairQueue, RunTable
from tailrace.origin.workers.worker_frame import Load

AWAITED = -1
"""Placeholder for a token that is being drawn."""


class Scheduler:
    """Turns runs into plans. It reads no clock: `done` reports the duration of each step.

    The engine calls `plan`, runs the plan on the model, calls `extend` or `remove` for each run
    that drew a token, then `done`. A plan for which `done` is not called is forgotten, and its work
    is planned again. After `sent`, the next plan may be made before `done`.
    """

    def __init__(self, pool: PagePool, limits: Limits | None = None) -> None:
        self._pool = pool
        self._limits = limits = limits or Limits()
        self._queue = FairQueue()
        self._table = RunTable(pool, self._queue, limits.running)
        self._step = StepLimits(limits)
        self._runs: dict[int, ScheduledRun] = {}
        self._sequence = count()
        self._turns = count(1)
        self._step_us = 0
        self._tokens = self._prompt_tokens = self._preemptions = 0
        self._drafted = self._accepted = 0

    @property
    def idle(self) -> bool:
        """True if there are no runs."""
        return not self._runs

    def add(
        self,
        run: int,
        priority: Priority,
        prompt: Sequence[int],
        generated: Sequence[int],
        max_tokens: int,
    ) -> None:
        """Queue a run that may generate up to `max_tokens` in all, including `generated`.

        Raises TooLarge if the pool could not hold the run even alone, and Overloaded if the queue
        of its class is full.
        """
        queued = len(self._table.waiting[priority])
        if queued >= self._limits.waiting:
            raise Overloaded(
                f"{queued} {priority.name.lower()} runs are waiting, which is the maximum",
                field="priority",
            )
        new = ScheduledRun(run, priority, next(self._sequence), prompt, generated, max_tokens)
        if pages_for(new.most) > self._pool.pages:
            raise TooLarge(
                f"a prompt of {len(prompt)} tokens and up to {new.most - len(prompt)} generated"
                " ones do not fit the KV cache",
                field="max_tokens",
                hint=f"the KV cache holds {self._pool.pages * PAGE_TOKENS} tokens",
            )
        self._runs[run] = new
        self._table.wait(new)

    def extend(self, run: int, ids: Sequence[int]) -> None:
        """Append a run's next known tokens: drawn ones, accepted drafts included, or steered ones.

        Raises ValueError if they exceed the run's max_tokens.
        """
        known = self._runs[run]
        if known.awaited:
            known.ids.pop()
            known.awaited = False
        if len(known.ids) + len(ids) > known.most:
            raise ValueError(f"ids: run {run} would exceed its maximum of {known.most} tokens")
        accepted = known.learn(ids)
        self._accepted += accepted
        self._queue.charge(known.priority, accepted)
        self._tokens += len(ids)

    def set_small_steps(self, *, enabled: bool) -> None:
        """Set whether steps are limited to their minimum of tokens."""
        self._step.small = enabled

    def set_unread(self, run: int, *, unread: bool) -> None:
        """Set whether the run's stream is without a reader; an ended run is ignored."""
        known = self._runs.get(run)
        if known is not None:
            self._table.set_unread(known, unread=unread)

    def remove(self, run: int) -> None:
        """Remove a run that has ended; it may be waiting or unknown."""
        known = self._runs.pop(run, None)
        if known is not None:
            self._table.remove(known)

    def plan(self, drafts: Drafts | None = None) -> Plan:
        """Return the next step. Its work is empty only if no run has anything to do."""
        table = self._table
        table.begin_step()
        table.enough = self._step.started
        table.start()
        running = [run for run in table.running.values() if not run.spent]
        works: dict[int, Work] = {}
        room = self._step.tokens
        catching = [run for run in running if run.missing and not run.decoding]
        in_time = self._step.rows_in_time(chunks=any(run.prefilling for run in catching))
        decoding = [run for run in running if run.decoding]
        full, skipped = self._decode(
            decoding, works, room - PAGE_TOKENS if catching else room, in_time
        )
        room -= len(works)
        rows = len(works)
        held: set[int] = set()
        room, cut = self._catch_up(catching, works, held, room)
        if drafts is not None and not skipped:
            room = min(room, self._step.rows - rows_of(works.values()))
            self._speculate(drafts, list(works.values())[:rows], works, room)
        self._settle(works, held)
        self._preemptions += len(table.preempted)
        for run, work in works.items():
            table.running[run].work = work
            table.running[run].accepted = 0
        return Plan(tuple(works.values()), tuple(table.preempted), full or cut, skipped)

    def sent(self, plan: Plan) -> None:
        """Let the next plan be made while this one runs, as if each run had one more known token.

        This is allowed only for a plan without drafts in which all work draws, and only if all
        plans that were sent before are done.
        """
        for work in plan.work:
            run = self._runs.get(work.run)
            if run is not None and run.work is work:
                run.cached = work.start + len(work.ids)
                run.work = None
                run.ids.append(AWAITED)
                run.awaited = True

    def done(self, plan: Plan, seconds: float, *, typical: bool = True) -> None:
        """Record that the plan's keys and values are written, and its duration.

        typical: True if later steps will take about as long, so that the limits adapt to this
        duration.
        """
        if not plan.work:
            return
        for work in plan.work:
            if work.prefill:
                self._prompt_tokens += len(work.ids)
            self._drafted += work.drafts
            run = self._runs.get(work.run)
            if run is not None and run.pages is work.pages:
                self._advance(run, work)
        if typical:
            self._step.observe(plan, seconds, waiting=any(self._table.waiting.values()))
        self._step_us = round(seconds * 1e6)

    def load(self) -> Load:
        """Return numbers for the supervisor: waiting and running runs, limits, pages and tokens."""
        running = [run.priority for run in self._table.running.values()]
        return Load(
            waiting=tuple(len(runs) for runs in self._table.waiting.values()),
            running=tuple(running.count(priority) for priority in self._queue.weights),
            batch_limit=self._step.tokens,
            row_limit=self._step.rows,
            turn_limit=self._step.rows_in_time(chunks=False),
            pages=self._pool.pages,
            pages_free=self._pool.free,
            step_us=self._step_us,
            tokens=self._tokens,
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._table.reused_tokens,
            preemptions=self._preemptions,
            drafted=self._drafted,
            accepted=self._accepted,
        )

    # ---- filling a step ----

    def _decode(
        self, runs: Sequence[ScheduledRun], works: dict[int, Work], room: int, most: int
    ) -> tuple[bool, bool]:
        """Plan one row per decoding run.

        Return True as the first value if there were too few tokens for all runs, and as the second
        if there was too little time.
        """
        table = self._table
        short = len(runs) > room
        order, skipped = (self._turns_of(runs), False) if short else self._in_time(runs, most)
        for run in order:
            if len(works) >= room:
                break
            if run.run in table.running and table.reach(run, len(run.ids), works):
                run.turn = next(self._turns)
                works[run.run] = self._work(run, len(run.ids), run.cached)
        return short, skipped

    def _in_time(
        self, runs: Sequence[ScheduledRun], most: int
    ) -> tuple[Iterable[ScheduledRun], bool]:
        """Choose the decoding runs that get a row in this step, which has time for `most` rows.

        Return the runs, and True if any run was left out. Runs of the most urgent class are never
        left out, unless no client reads them. Other classes take turns for the remaining rows, and
        get at least their shares of them.
        """
        first = min(((run.priority, run.unread) for run in runs), default=None)
        urgent = [run for run in runs if (run.priority, run.unread) == first]
        others = [run for run in runs if (run.priority, run.unread) != first]
        shares = sum(max(self._table.share(p), 1) for p in {other.priority for other in others})
        spare = max(most - len(urgent), shares)
        if len(others) <= spare:
            return runs, False
        return chain(urgent, islice(self._turns_of(others), spare)), True

    def _turns_of(self, runs: Iterable[ScheduledRun]) -> Iterator[ScheduledRun]:
        """Order runs: classes by weight; in a class, read runs first, then by their last turn."""
        return self._queue.turns(sorted(runs, key=lambda run: (run.unread, run.turn)))

    def _catch_up(
        self, runs: Iterable[ScheduledRun], works: dict[int, Work], held: set[int], room: int
    ) -> tuple[int, bool]:
        """Plan chunks of prompts, and rows of known tokens, for runs that are not fully cached.

        Return the tokens left, and True if some work did not fit. If another run computes a run's
        next chunk in this step, the run is added to `held` and finds the chunk in the next step.
        """
        computing: set[bytes] = set()
        rows = max(self._step.rows - len(works), self._limits.step_rows_least)
        cut = False
        turn = sorted(runs, key=lambda run: run.order)
        while turn:
            longer: list[ScheduledRun] = []
            for run in self._queue.turns(turn):
                start = self._planned(run, works)
                if start is None or self._is_held(run, start, computing, held):
                    continue
                if start < run.prompt:
                    end = run.chunk_end(start)
                else:
                    end = min(len(run.ids), start + min(self._limits.replay_rows, room, rows))
                    rows -= end - start
                if end - start > room or not room:
                    return room, True
                if end == start:
                    cut = True  # no rows are left for this run; chunks of others may still fit
                elif self._table.reach(run, end, works):
                    works[run.run] = self._work(run, end, start)
                    room -= end - start
                    if end < run.prompt:
                        longer.append(run)
            turn = longer
        return room, cut

    def _planned(self, run: ScheduledRun, works: dict[int, Work]) -> int | None:
        """Return the start of the run's next work in this step.

        None if the run has just been preempted.
        """
        if run.run in works:
            work = works[run.run]
            return work.start + len(work.ids)
        if run.run not in self._table.running:
            return None
        self._table.find(run)
        return run.cached

    def _is_held(
        self, run: ScheduledRun, start: int, computing: set[bytes], held: set[int]
    ) -> bool:
        """Return True if another run computes the same chunk in this step, so that `run` waits."""
        place = start // PAGE_TOKENS
        if place >= run.reusable_pages or start + PAGE_TOKENS > run.prompt:
            return False
        key = run.key(place)
        if key in computing:
            held.add(run.run)
            return True
        computing.add(key)
        return False

    def _speculate(
        self, drafts: Drafts, rows: Iterable[Work], works: dict[int, Work], room: int
    ) -> None:
        """Append drafts to the works in `rows`, in this order, while there is room."""
        wanted: list[tuple[int, int]] = []
        for work in rows:
            run = self._runs[work.run]
            most = min(self._limits.draft_rows, room, run.most - len(run.ids) - 1)
            if most > 0 and not self._table.reach_spare(run, len(run.ids) + most):
                most = min(most, len(run.pages) * PAGE_TOKENS - len(run.ids))
            if most > 0:
                wanted.append((run.run, most))
        for (run_id, most), guessed in zip(wanted, drafts(wanted) if wanted else (), strict=True):
            guesses = guessed[: min(most, room)]
            if guesses:
                room -= len(guesses)
                work = works[run_id]
                works[run_id] = work._replace(ids=[*work.ids, *guesses], drafts=len(guesses))

    def _work(self, run: ScheduledRun, end: int, planned: int) -> Work:
        """Return the work for a run's tokens up to position `end`.

        The run's class is charged for the tokens from `planned` on; earlier ones were charged
        before.
        """
        self._queue.charge(run.priority, end - planned)
        start, known = run.cached, run.ids
        return Work(
            run.run, start, known[start:end], run.pages, start < run.prompt, 0, end == len(known)
        )

    def _settle(self, works: dict[int, Work], held: set[int]) -> None:
        backlogged = {p for p, runs in self._table.waiting.items() if runs}
        for run in self._table.running.values():
            if run.run not in works and run.run not in held and run.missing:
                backlogged.add(run.priority)
        self._queue.settle(backlogged)

    def _advance(self, run: ScheduledRun, work: Work) -> None:
        """Mark the step's positions as cached, and let others find pages that are now full."""
        end = work.start + len(work.ids)
        if run.work is work:  # otherwise `sent` has advanced the run already
            end = run.cached = end - work.drafts + run.accepted
            run.work = None
        for place in range(work.start // PAGE_TOKENS, end // PAGE_TOKENS):
            self._pool.publish(run.pages[place], run.key(place))
