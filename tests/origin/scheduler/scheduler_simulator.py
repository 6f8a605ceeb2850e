"""An engine without a model: the scheduler's plans, carried out on a virtual clock.

The KV cache is a list of numbers: what lies at a position is a hash of all that its keys and
values would follow from, so a page with two writers, a wrong block table or a prefix that is not
the run's own is seen at once. A token is drawn from the hash at the last known position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.errors import Overloaded
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import Drafts, Plan, Work
from tailrace.origin.scheduler.scheduler import Scheduler

VOCABULARY = 50_000


@dataclass(frozen=True)
class Cost:
    """Seconds that a step takes: itself, each row of decoding, each token of a prompt."""

    step: float = 0.004
    row: float = 0.0001
    prefill: float = 0.00005

    def seconds(self, plan: Plan) -> float:
        rows = sum(len(work.ids) for work in plan.work if not work.prefill)
        return self.step + self.row * rows + self.prefill * (plan.tokens - rows)


@dataclass(frozen=True)
class Arrival:
    """A run that comes at a time in seconds, draws `tokens` tokens and may draw `max_tokens`."""

    at: float
    priority: Priority
    prompt: Sequence[int]
    tokens: int
    max_tokens: int
    generated: int = 0
    """Number of tokens that are known already: the run continues another worker's."""
    halt: float = inf
    """When it is cancelled, in seconds."""


@dataclass
class Outcome:
    """Outcome of one run, with times in seconds."""

    arrival: Arrival
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token that it drew was known."""
    refused: bool = False
    halted: bool = False
    preempted: int = 0

    @property
    def ended(self) -> bool:
        done = len(self.ids) == len(self.arrival.prompt) + self.arrival.tokens
        return done or self.refused or self.halted


def history(before: int, token: int, *, prefilled: bool) -> int:
    """Return what a position holds, from what the one before it holds."""
    return hash((before, token, prefilled))


def drawn(last: int) -> int:
    """Return the token that follows a position which holds `last`."""
    return hash((last, 7)) % VOCABULARY


def whole(arrival: Arrival) -> list[int]:
    """Return the ids that a run must end with, whatever other runs do."""
    ids, last = list(arrival.prompt), 0
    for token in arrival.prompt:
        last = history(last, token, prefilled=True)
    for _ in range(arrival.tokens):
        ids.append(drawn(last))
        last = history(last, ids[-1], prefilled=False)
    return ids


class Cache:
    """Contents of the pages. Raises AssertionError for a plan that reads or writes wrongly."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._slots = [[0] * PAGE_TOKENS for _ in range(pool.pages)]

    def write(self, work: Work, right: Sequence[int], written: set[int]) -> list[int]:
        """Do one Work; returns what the positions of its ids hold.

        `right` is what each position of the run holds by the run's own account; the pages
        `written` by others in this step grow by those of this Work.
        """
        table, start, end = work.pages, work.start, work.start + len(work.ids)
        for place in range(-(-start // PAGE_TOKENS)):
            content = right[place * PAGE_TOKENS : min(start, (place + 1) * PAGE_TOKENS)]
            found = self._slots[table[place]][: len(content)]
            assert found == content, f"run {work.run}: page {place} is not its own"
        touched = set(table[start // PAGE_TOKENS : (end - 1) // PAGE_TOKENS + 1])
        assert not touched & written, f"run {work.run}: a page with two writers"
        assert all(self._pool.holders(page) == 1 for page in touched), "a write to a shared page"
        written |= touched
        last, values = right[start - 1] if start else 0, []
        for position, token in enumerate(work.ids, start):
            last = history(last, token, prefilled=work.prefill)
            self._slots[table[position // PAGE_TOKENS]][position % PAGE_TOKENS] = last
            values.append(last)
        return values


class Simulator:
    """Runs arrive by themselves; `step` does one step of the engine, `run` all of them."""

    def __init__(
        self,
        arrivals: Iterable[Arrival],
        pages: int,
        limits: Limits | None = None,
        cost: Cost | None = None,
        *,
        guess: float | None = None,
        masked: float = 0.0,
        seed: int = 0,
    ) -> None:
        """guess: how often a guess of speculative decoding is right; None: there are none.

        masked: how often a grammar allows only some of a step's guesses to be drawn from.
        """
        self.pool = PagePool(pages)
        self.limits = limits or Limits()
        self.scheduler = Scheduler(self.pool, self.limits)
        self.cost = cost or Cost()
        self.cache = Cache(self.pool)
        self.now = 0.0
        self.plans: list[Plan] = []
        self.seconds: list[float] = []
        self.outcomes = [Outcome(arrival) for arrival in sorted(arrivals, key=lambda a: a.at)]
        self._coming = list(reversed(range(len(self.outcomes))))
        self._live: dict[int, list[int]] = {}  # by run: what its cached positions must hold
        self._wholes: dict[int, list[int]] = {}
        self._guess, self._masked, self._random = guess, masked, Random(seed)

    def run(self, most_steps: int) -> None:
        """Until all runs have ended; AssertionError if that takes more steps."""
        while self._coming or self._live:
            assert len(self.plans) < most_steps, "the runs do not end"
            self.step()

    def until(self, seconds: float) -> None:
        while self.now < seconds and (self._coming or self._live):
            self.step()

    def step(self) -> None:
        """Let the clock go on to the next arrival if there is nothing to do, then do one step."""
        if not self._live:
            self.now = max(self.now, self.outcomes[self._coming[-1]].arrival.at)
        self._arrive()
        self._halt()
        if not self._live:
            return
        plan = self.scheduler.plan(self._drafts)
        self._check(plan)
        seconds = self.cost.seconds(plan)
        self.now += seconds
        written: set[int] = set()
        for work in plan.work:
            self._do(work, written)
        self.scheduler.done(plan, seconds)
        self.plans.append(plan)
        self.seconds.append(seconds)

    def _arrive(self) -> None:
        while self._coming and self.outcomes[self._coming[-1]].arrival.at <= self.now:
            run = self._coming.pop()
            outcome = self.outcomes[run]
            arrival = outcome.arrival
            ids = whole(arrival)
            known = len(arrival.prompt) + arrival.generated
            generated = ids[len(arrival.prompt) : known]
            try:
                self.scheduler.add(
                    run, arrival.priority, arrival.prompt, generated, arrival.max_tokens
                )
            except Overloaded:
                outcome.refused = True
                continue
            outcome.ids = ids[:known]
            self._live[run], self._wholes[run] = [], ids

    def _halt(self) -> None:
        for run in [r for r in self._live if self.outcomes[r].arrival.halt <= self.now]:
            self.outcomes[run].halted = True
            self._end(run)

    def _end(self, run: int) -> None:
        self.scheduler.remove(run)
        del self._live[run], self._wholes[run]

    def _check(self, plan: Plan) -> None:
        """Assert what holds for every plan, whatever the load."""
        assert plan.work, "nothing is done though there are runs"
        load = self.scheduler.load()
        assert plan.tokens <= load.batch_limit <= self.limits.step_tokens_most
        runs = [work.run for work in plan.work]
        assert len(set(runs)) == len(runs)
        assert len(runs) <= sum(load.running) <= self.limits.running
        assert not set(runs) & set(plan.preempted)
        for run in plan.preempted:
            self.outcomes[run].preempted += 1

    def _do(self, work: Work, written: set[int]) -> None:
        outcome, right = self.outcomes[work.run], self._live[work.run]
        known = work.ids[: len(work.ids) - work.drafts]
        end, prompt = work.start + len(known), len(outcome.arrival.prompt)
        assert list(known) == outcome.ids[work.start : end]
        assert work.draws == (end == len(outcome.ids))
        if work.prefill:
            assert work.start % PAGE_TOKENS == 0 < len(known)
            assert end == prompt or end % PAGE_TOKENS == 0 < end < prompt
        else:
            assert work.start >= prompt
            assert work.draws or len(known) <= self.limits.replay_rows
        self._account(work.run, work.start)
        values = self.cache.write(work, right, written)
        right[work.start :] = values[: len(known)]
        if work.draws:
            self._draw(work, values[len(known) - 1 :])

    def _account(self, run: int, start: int) -> None:
        """Extend what the run's positions before `start` must hold, also the skipped ones."""
        right, outcome = self._live[run], self.outcomes[run]
        prompt = len(outcome.arrival.prompt)
        for position in range(len(right), start):
            last = right[-1] if right else 0
            right.append(history(last, outcome.ids[position], prefilled=position < prompt))

    def _draw(self, work: Work, values: Sequence[int]) -> None:
        """From the last known row, and from each guess's row while the guess before is right."""
        outcome = self.outcomes[work.run]
        guesses = work.ids[len(work.ids) - work.drafts :]
        new = [drawn(values[0])]
        if self._random.random() < self._masked:
            guesses = guesses[: self._random.randint(0, len(guesses))]
        for guess, value in zip(guesses, values[1:], strict=False):
            if guess != new[-1] or len(outcome.ids) + len(new) == len(self._wholes[work.run]):
                break
            new.append(drawn(value))
        outcome.ids += new
        outcome.times += [self.now] * len(new)
        if outcome.ended:
            assert outcome.ids == self._wholes[work.run]
            self._end(work.run)
        else:
            self.scheduler.extend(work.run, new)

    @property
    def _drafts(self) -> Drafts | None:
        return None if self._guess is None else self._guesses

    def _guesses(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        """Return drafts of the next ids of each run, some of them wrong."""
        return [self._guesses_of(run, most) for run, most in wanted]

    def _guesses_of(self, run: int, most: int) -> list[int]:
        start = len(self.outcomes[run].ids)
        right = self._wholes[run][start : start + self._random.randint(0, most)]
        assert self._guess is not None
        return [t if self._random.random() < self._guess else t + 1 for t in right]
