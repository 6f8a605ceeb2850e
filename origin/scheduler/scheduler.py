"""The scheduler: which runs' tokens the next step of the engine pushes through the model.

Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024,
Sarathi-Serve) over the pages of one KV cache. One rule gives prefill, replay and decode: while a
run's prompt is not cached, the next chunk of it; then rows for the known tokens that are not.

A step is filled in this order, up to its limits of tokens (`batch_limit.py`) and of rows
(`row_limit.py`), which also says how many runs hold pages:

1. One row for each decoding run, but for PAGE_TOKENS tokens that are kept back while any run
   has catching up to do: a long prompt slows its neighbours and never stops them, nor they it.
2. Chunks of prompts, and rows of continued runs, at most one Work for each run.
3. Guesses of speculative decoding, with what is left: they never displace work.

Within 1 and 2 weighted fair queueing (`fair_queue.py`) decides between the classes. In a class
decoding runs take turns, and all else is first come, first served.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from ledger.errors import Conflict, Overloaded, TooLarge
from ledger.schema import Priority
from origin.scheduler.batch_limit import BatchLimit
from origin.scheduler.fair_queue import FairQueue
from origin.scheduler.limits import Limits
from origin.scheduler.pages import PAGE_TOKENS, PagePool
from origin.scheduler.plan import Drafts, Plan, Work, rows_of
from origin.scheduler.row_limit import RowLimit
from origin.scheduler.run_table import RunTable
from origin.scheduler.scheduled_run import ScheduledRun, pages_for
from origin.worker_frame import Load

AIM = 0.85
"""Of the time that a step may take: what the limits aim at is passed now and then."""


class Scheduler:
    """Runs in, plans out. Its only clock is the tokens it has given out, and what `done` says.

    The engine calls `plan`, has the model do it, then for each run that drew `extend` or
    `remove`, then `done`. A plan that is not done is forgotten, and its work planned again.
    """

    def __init__(self, pool: PagePool, limits: Limits | None = None) -> None:
        self._pool = pool
        self._limits = limits = limits or Limits()
        self._queue = FairQueue()
        self._table = RunTable(pool, self._queue, limits.running)
        self._target = target = limits.step_seconds * AIM
        self._limit = BatchLimit(limits.step_tokens_least, limits.step_tokens_most, target)
        most = max(limits.running + limits.replay_rows, limits.step_rows_least)
        self._row_limit = RowLimit(limits.step_rows_least, most, target)
        self._runs: dict[int, ScheduledRun] = {}
        self._sequence = count()
        self._turns = count(1)
        self._step_us = 0
        self._tokens = self._prompt_tokens = self._preemptions = 0
        self._drafted = self._accepted = 0

    @property
    def idle(self) -> bool:
        """There are no runs."""
        return not self._runs

    def add(
        self,
        run: int,
        priority: Priority,
        prompt: Sequence[int],
        generated: Sequence[int],
        max_tokens: int,
    ) -> None:
        """Queue a run that is to generate up to `max_tokens` in all, `generated` among them.

        Conflict: the id is in use. TooLarge: the pool could not hold it even alone.
        Overloaded: its class's queue is full. ValueError: an empty prompt.
        """
        if run in self._runs:
            raise Conflict(f"run {run} exists", field="corr")
        if not prompt:
            raise ValueError("prompt: empty")
        queued = len(self._table.waiting[priority])
        if queued >= self._limits.waiting:
            raise Overloaded(f"{queued} {priority.name.lower()} runs wait", field="priority")
        new = ScheduledRun(run, priority, next(self._sequence), prompt, generated, max_tokens)
        if pages_for(new.most) > self._pool.pages:
            raise TooLarge(
                f"{len(prompt)} tokens and up to {new.most - len(prompt)} generated ones",
                field="max_tokens",
                hint=f"the KV cache holds {self._pool.pages * PAGE_TOKENS} tokens",
            )
        self._runs[run] = new
        self._table.wait(new)

    def extend(self, run: int, ids: Sequence[int]) -> None:
        """The run's next known tokens: drawn ones, accepted guesses among them, or steered ones.

        ValueError: more than the run's max_tokens.
        """
        known = self._runs[run]
        if len(known.ids) + len(ids) > known.most:
            raise ValueError(f"ids: run {run} may have {known.most} tokens")
        accepted = known.learn(ids)
        self._accepted += accepted
        self._queue.charge(known.priority, accepted)
        self._tokens += len(ids)

    def remove(self, run: int) -> None:
        """The run has ended; at any time, also for one that waits or is unknown."""
        known = self._runs.pop(run, None)
        if known is not None:
            self._table.remove(known)

    def plan(self, drafts: Drafts | None = None) -> Plan:
        """The next step. Its work is empty only if no run has anything to do."""
        table = self._table
        table.begin_step()
        table.enough = self._row_limit.rows
        table.start()
        works: dict[int, Work] = {}
        room = self._limit.tokens
        catching = [r for r in table.running.values() if r.missing and not r.decoding]
        full = self._decode(works, room - PAGE_TOKENS if catching else room)
        room -= len(works)
        rows = len(works)
        held: set[int] = set()
        room, cut = self._catch_up(catching, works, held, room)
        if drafts is not None:
            room = min(room, self._row_limit.rows - rows_of(works.values()))
            self._speculate(drafts, list(works.values())[:rows], works, room)
        self._settle(works, held)
        self._preemptions += len(table.preempted)
        for run, work in works.items():
            table.running[run].work = work
            table.running[run].accepted = 0
        return Plan(tuple(works.values()), tuple(table.preempted), full or cut)

    def done(self, plan: Plan, seconds: float) -> None:
        """The plan's keys and values are written; it took so long."""
        if not plan.work:
            return
        for work in plan.work:
            if work.prefill:
                self._prompt_tokens += len(work.ids)
            self._drafted += work.drafts
            run = self._runs.get(work.run)
            if run is not None and run.work is work:
                self._advance(run, work)
        self._observe(plan, seconds)
        self._step_us = round(seconds * 1e6)

    def _observe(self, plan: Plan, seconds: float) -> None:
        """Tokens of prompts are made fewer first: rows only when a late step had few of them."""
        if self._limit.is_least or seconds <= self._target:
            self._row_limit.observe(
                plan.rows,
                seconds,
                chunks=any(work.prefill for work in plan.work),
                wanted=plan.full or any(self._table.waiting.values()),
            )
        self._limit.observe(plan.tokens, seconds, full=plan.full)

    def load(self) -> Load:
        """How busy it is, for the supervisor."""
        running = [run.priority for run in self._table.running.values()]
        return Load(
            waiting=tuple(len(runs) for runs in self._table.waiting.values()),
            running=tuple(running.count(priority) for priority in self._queue.weights),
            batch_limit=self._limit.tokens,
            row_limit=self._row_limit.rows,
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

    def _decode(self, works: dict[int, Work], room: int) -> bool:
        """One row for each decoding run; True if there was no room for all of them."""
        table = self._table
        runs = [run for run in table.running.values() if run.decoding]
        short = len(runs) > room
        if short:
            runs.sort(key=lambda run: run.turn)
        for run in self._queue.turns(runs) if short else runs:
            if len(works) >= room:
                break
            if run.run in table.running and table.reach(run, len(run.ids), works):
                run.turn = next(self._turns)
                works[run.run] = self._work(run, len(run.ids))
        return short

    def _catch_up(
        self, runs: Iterable[ScheduledRun], works: dict[int, Work], held: set[int], room: int
    ) -> tuple[int, bool]:
        """Chunks of prompts and known rows; what room is left, and whether it was too little.

        A chunk that another run computes in this step is held: the next step finds it.
        """
        computing: set[bytes] = set()
        table = self._table
        rows = max(self._row_limit.rows - len(works), self._limits.step_rows_least)
        cut = False
        for run in self._queue.turns(sorted(runs, key=lambda run: run.sequence)):
            if run.run not in table.running:
                continue
            table.find(run)
            if run.prefilling:
                end = run.chunk_end
                place = run.cached // PAGE_TOKENS
                if place < run.reusable_pages and end == (place + 1) * PAGE_TOKENS:
                    key = run.key(place)
                    if key in computing:
                        held.add(run.run)
                        continue
                    computing.add(key)
            else:
                most = min(self._limits.replay_rows, room, rows)
                end = min(len(run.ids), run.cached + most)
            size = end - run.cached
            if size > room or not room:
                return room, True
            if not size:
                cut = True  # of rows only: chunks may go on
                continue
            if not table.reach(run, end, works):
                continue
            works[run.run] = self._work(run, end)
            room -= size
            if not run.prefilling:
                rows -= size
        return room, cut

    def _speculate(
        self, drafts: Drafts, rows: Iterable[Work], works: dict[int, Work], room: int
    ) -> None:
        for work in rows:
            run = self._runs[work.run]
            most = min(self._limits.draft_rows, room, run.most - len(run.ids) - 1)
            if most > 0 and not self._table.reach_spare(run, len(run.ids) + most):
                most = min(most, len(run.pages) * PAGE_TOKENS - len(run.ids))
            guesses = drafts(work.run, most)[:most] if most > 0 else ()
            if guesses:
                room -= len(guesses)
                works[work.run] = work._replace(ids=[*work.ids, *guesses], drafts=len(guesses))

    def _work(self, run: ScheduledRun, end: int) -> Work:
        start = run.cached
        self._queue.charge(run.priority, end - start)
        known = run.ids
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
        """What the step has written is cached; pages that are full by it can be found."""
        before = run.cached
        run.cached = work.start + len(work.ids) - work.drafts + run.accepted
        run.work = None
        for place in range(before // PAGE_TOKENS, run.cached // PAGE_TOKENS):
            self._pool.publish(run.pages[place], run.key(place))
