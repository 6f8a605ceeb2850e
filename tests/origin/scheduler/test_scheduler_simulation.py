"""The scheduler under loads that nobody chose: seeded runs on a virtual clock.

`Simulator` checks each step: no page with two writers, every run's history in its own pages,
every plan within its limit and never empty, every token the one that it has to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import inf
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler import run_table
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.plan import Plan, pages_for
from tailrace.origin.scheduler.run_table import WEIGHTS
from tests.origin.scheduler.scheduler_simulator import Arrival, Cost, Simulator

INTERACTIVE, STANDARD, BATCH = Priority
MOST_STEPS = 20_000


def pages_of(arrival: Arrival) -> int:
    return pages_for(len(arrival.prompt) + arrival.max_tokens)


def prompt(random: Random, tokens: int) -> list[int]:
    return random.choices(range(50_000), k=tokens)


def finish(simulator: Simulator) -> Simulator:
    """To the end; then every run has its tokens and every page is free, exactly once."""
    simulator.run(MOST_STEPS)
    assert all(outcome.ended for outcome in simulator.outcomes)
    assert simulator.scheduler.idle
    pool = simulator.pool
    assert pool.free == pool.pages
    assert sorted(pool.take(pool.pages) or ()) == list(range(pool.pages))
    return simulator


def mixed(seed: int) -> Simulator:
    """Simulate a few runs of any size and class, with common prefixes, halts and odd limits."""
    random = Random(seed)
    stems = [prompt(random, 280) for _ in range(2)]
    arrivals = []
    for _ in range(random.randint(1, 7)):
        length = random.choice([1, 5, 63, 64, 65, 100, 128, 200, random.randint(1, 280)])
        common = random.random() < 0.6
        tokens = random.choice([1, 2, 10, random.randint(1, 70)])
        arrivals.append(
            Arrival(
                at=random.choice([0.0, 0.0, random.random()]),
                priority=random.choice(list(Priority)),
                prompt=random.choice(stems)[:length] if common else prompt(random, length),
                tokens=tokens,
                max_tokens=tokens + random.choice([0, 0, 30]),
                generated=random.choice([0, 0, 0, random.randrange(tokens)]),
                halt=random.choice([inf, inf, inf, random.random()]),
            )
        )
    limits = Limits(
        running=random.choice([1, 2, 3, 5, 16, 64]),
        waiting=random.choice([2, 100, 100]),
        step_tokens_least=random.choice([65, 70, 128]),
        step_tokens_most=random.choice([128, 256, 4096]),
        replay_rows=random.choice([1, 7, 64]),
        draft_rows=random.choice([0, 1, 4, 8]),
    )
    pages = max(map(pages_of, arrivals)) + random.choice([0, 0, 1, 2, 5, 30])
    guess = random.choice([None, None, 0.5, 0.9])
    return Simulator(arrivals, pages, limits, guess=guess, masked=0.3, seed=seed)


def storm(seed: int) -> Simulator:
    """Short prompts that all grow long, in a pool that holds little more than one of them."""
    random = Random(seed)
    arrivals = []
    for _ in range(random.randint(4, 10)):
        tokens = random.randint(80, 240)
        text = prompt(random, random.randint(1, 70))
        at = random.choice([0.0, random.random()])
        arrivals.append(Arrival(at, random.choice(list(Priority)), text, tokens, tokens))
    pages = max(map(pages_of, arrivals)) + random.choice([0, 1, 3])
    guess = random.choice([None, 0.8])
    return Simulator(arrivals, pages, Limits(running=random.choice([4, 16])), guess=guess)


@pytest.mark.parametrize("block", range(10))
def test_whatever_comes_every_run_ends_with_exactly_its_tokens(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        finish(mixed(seed))


def test_a_pool_that_holds_one_run_carries_many_to_their_end_with_bounded_waste() -> None:
    preemptions = 0
    for seed in range(16):
        simulator = finish(storm(seed))
        tokens = sum(outcome.arrival.tokens for outcome in simulator.outcomes)
        assert len(simulator.plans) <= 1.5 * tokens
        preemptions += simulator.scheduler.load().preemptions
    assert preemptions > 40, "the storm was none"


@pytest.mark.parametrize("load", [mixed, storm])
def test_the_same_load_gives_the_same_plans(load: Callable[[int], Simulator]) -> None:
    for seed in range(3):
        first, second = finish(load(seed)), finish(load(seed))
        assert first.plans == second.plans


def test_all_runs_may_be_halted_at_any_step() -> None:
    for steps in range(0, 60, 3):
        simulator = storm(7)
        for _ in range(steps):
            simulator.step()
        for run in range(len(simulator.outcomes)):
            simulator.scheduler.remove(run)
        assert simulator.scheduler.idle
        assert simulator.pool.free == simulator.pool.pages


# ---- fairness ----


def backlog(sizes: dict[Priority, int], runs: int, slack: int = 1) -> list[Arrival]:
    """All at once; `slack`: how many times what they draw the interactive runs might draw."""
    random = Random(1)
    arrivals = []
    for priority, size in sizes.items():
        for _ in range(runs):
            tokens = random.randint(1, 2 * size)
            might = tokens * slack if priority is INTERACTIVE else tokens
            text = prompt(random, random.randint(1, 200))
            arrivals.append(Arrival(0, priority, text, tokens, might))
    return arrivals


def served(simulator: Simulator, since: int = 0) -> Counter[Priority]:
    """Tokens of each class that went through the model from a step on."""
    tokens: Counter[Priority] = Counter()
    for plan in simulator.plans[since:]:
        for work in plan.work:
            tokens[simulator.outcomes[work.run].arrival.priority] += len(work.ids)
    return tokens


@pytest.mark.parametrize(
    ("sizes", "running", "pages", "slack"),
    [
        ((50, 50, 50), 16, 400, 1),
        ((50, 50, 50), 64, 800, 1),
        ((20, 50, 200), 32, 800, 1),
        ((50, 50, 50), 16, 40, 1),
        ((50, 50, 50), 16, 400, 20),
    ],
)
def test_classes_that_always_have_more_to_do_are_served_by_weight(
    sizes: tuple[int, int, int], running: int, pages: int, slack: int
) -> None:
    arrivals = backlog(dict(zip(Priority, sizes, strict=True)), 400, slack)
    simulator = Simulator(arrivals, pages, Limits(running=running))
    for _ in range(300):
        simulator.step()
    assert min(simulator.scheduler.load().waiting) > 0, "a class ran out of runs"
    tokens = served(simulator)
    for priority, weight in WEIGHTS.items():
        share, fair = tokens[priority] / tokens.total(), weight / sum(WEIGHTS.values())
        assert share == pytest.approx(fair, abs=0.03), priority


@pytest.mark.parametrize("lone", Priority)
@pytest.mark.parametrize("pages", [30, 300])
def test_a_run_starts_soon_however_many_of_other_classes_wait(lone: Priority, pages: int) -> None:
    """No later than the running runs of others need to end, whose number is bounded."""
    others = {priority: 40 for priority in Priority if priority is not lone}
    arrivals = backlog(others, 300)
    late = Arrival(0.5, lone, prompt(Random(2), 500), 30, 30)
    simulator = Simulator([*arrivals, late], pages, Limits(running=16))
    outcome = next(o for o in simulator.outcomes if o.arrival is late)
    while not outcome.ended:
        simulator.step()
        assert simulator.now < 4, "starved"
    assert (
        min(
            w
            for p, w in zip(Priority, simulator.scheduler.load().waiting, strict=True)
            if p is not lone
        )
        > 0
    )


def crowd(
    pages: int, common: int, runs: int, late: list[tuple[Priority, int, int]], seed: int
) -> Simulator:
    """Batch runs with a prefix in common, then runs of (class, pages of prompt, tokens)."""
    random = Random(seed)
    stem = prompt(random, common * PAGE_TOKENS)
    arrivals = [
        Arrival(0.0, BATCH, stem + prompt(random, random.randint(1, 70)), 100, 100)
        for _ in range(runs)
    ]
    for place, (priority, own, tokens) in enumerate(late):
        ids = prompt(random, own * PAGE_TOKENS + 1)
        arrivals.append(Arrival(0.3 + place * 0.1, priority, ids, tokens, tokens))
    return Simulator(arrivals, max(pages, *map(pages_of, arrivals)), Limits(running=16))


@settings(max_examples=20)
@given(
    pages=st.integers(8, 60),
    common=st.integers(1, 20),
    runs=st.integers(1, 24),
    late=st.lists(
        st.tuples(st.sampled_from(Priority), st.integers(0, 30), st.integers(1, 90)), max_size=8
    ),
    seed=st.integers(0, 2**32),
)
def test_no_run_is_preempted_but_for_one_that_starts_or_grows_in_the_same_step(
    pages: int, common: int, runs: int, late: list[tuple[Priority, int, int]], seed: int
) -> None:
    simulator = crowd(pages, common, runs, late, seed)
    table = simulator.scheduler._table
    while any(not outcome.ended for outcome in simulator.outcomes):
        assert len(simulator.plans) < MOST_STEPS, "the runs do not end"
        held = {run: len(known.pages) for run, known in table.running.items()}
        simulator.step()
        plan = simulator.plans[-1]
        now = {work.run: len(work.pages) for work in plan.work}
        now |= {run: len(known.pages) for run, known in table.running.items()}
        gained = [run for run in now if now[run] > held.get(run, 0)]
        assert gained or not plan.preempted


def test_a_long_run_starts_though_short_ones_always_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_table, "PASSING_TOKENS", 4096)
    random = Random(3)
    short = [Arrival(n * 0.01, INTERACTIVE, prompt(random, 60), 40, 40) for n in range(800)]
    long = Arrival(0.5, BATCH, prompt(random, 28 * PAGE_TOKENS), 20, 20)
    simulator = Simulator([*short, long], 30, Limits(running=16))
    outcome = next(o for o in simulator.outcomes if o.arrival is long)
    while not outcome.ended:
        simulator.step()
    assert simulator.now < 7, "only when the others were through"


def test_a_class_that_was_idle_for_long_takes_no_more_than_its_share_afterwards() -> None:
    busy = backlog({STANDARD: 50, BATCH: 50}, 400)
    late = [
        Arrival(2.0, INTERACTIVE, a.prompt, a.tokens, a.tokens)
        for a in backlog({INTERACTIVE: 50}, 300)
    ]
    simulator = Simulator([*busy, *late], 400, Limits(running=16))
    simulator.until(2.0)
    since = len(simulator.plans)
    simulator.until(4.5)
    tokens = served(simulator, since)
    assert min(simulator.scheduler.load().waiting) > 0
    assert tokens[INTERACTIVE] / tokens.total() < 8 / 13 + 0.05
    assert tokens[BATCH] / tokens.total() > 1 / 13 - 0.03


# ---- latency ----


def test_an_interactive_run_gets_its_first_token_soon_though_batch_fills_everything() -> None:
    random = Random(4)
    batch = [Arrival(0, BATCH, prompt(random, 300), 400, 400) for _ in range(200)]
    chats = [Arrival(1 + n * 0.2, INTERACTIVE, prompt(random, 100), 10, 10) for n in range(10)]
    simulator = Simulator([*batch, *chats], 250, Limits(running=32))
    simulator.until(4)
    waits = [
        outcome.times[0] - outcome.arrival.at
        for outcome in simulator.outcomes
        if outcome.arrival.priority is INTERACTIVE
    ]
    assert len(waits) == 10
    assert max(waits) < 6 * simulator.limits.step_seconds


def test_a_burst_of_one_class_gets_its_first_tokens_in_the_order_in_which_it_came() -> None:
    random = Random(8)
    burst = [Arrival(n * 1e-6, STANDARD, prompt(random, 100), 30, 30) for n in range(150)]
    simulator = finish(Simulator(burst, 120, Limits(running=32)))
    first = [outcome.times[0] for outcome in simulator.outcomes]
    assert first == sorted(first)


@pytest.mark.parametrize(
    "cost",
    [Cost(), Cost(step=0.02), Cost(prefill=0.0003, row=0.0006), Cost(0.0, 0.0002, 0.0002)],
)
def test_steps_under_a_heavy_load_last_about_as_long_as_they_should(cost: Cost) -> None:
    random = Random(6)
    arrivals = [
        Arrival(0, random.choice(list(Priority)), prompt(random, 600), 20, 20) for _ in range(300)
    ]
    simulator = Simulator(arrivals, 3000, Limits(running=128), cost)
    for _ in range(150):
        simulator.step()
    late = simulator.seconds[50:]
    target = simulator.limits.step_seconds
    assert mean(late) < 1.1 * target
    assert mean(late) > 0.6 * target


@pytest.mark.parametrize("row", [0.0007, 0.0015])
def test_where_rows_make_steps_late_fewer_runs_are_decoded_at_a_time(row: float) -> None:
    """Preempted runs come back and replay their rows; these have to fit in, too."""
    chats = [Arrival(2 + n * 0.3, INTERACTIVE, prompt(Random(n), 100), 60, 60) for n in range(100)]
    simulator = Simulator(
        [*backlog({BATCH: 400}, 150), *chats], 2000, cost=Cost(0.004, row, 0.0002)
    )
    simulator.until(5)
    settled = len(simulator.plans)
    simulator.until(30)
    lasted, target = simulator.seconds[settled:], simulator.limits.step_seconds
    assert simulator.scheduler.load().waiting[BATCH] > 0
    assert sum(seconds > target for seconds in lasted) < len(lasted) / 50
    assert mean(lasted) > 0.6 * target


def test_batch_runs_that_make_steps_late_as_they_grow_cost_the_others_no_time() -> None:
    """Rows become slower the longer their runs are, and all of these grow at once."""

    class Growing(Cost):
        def seconds(self, plan: Plan) -> float:
            grown = sum(work.start for work in plan.work if not work.prefill)
            return super().seconds(plan) + 2e-6 * grown

    chats = [
        Arrival(2 + n * 0.2, Priority(n % 2), prompt(Random(n), 30), 60, 60) for n in range(150)
    ]
    simulator = Simulator(
        [*backlog({BATCH: 800}, 100), *chats], 3000, cost=Growing(0.004, 0.0005, 0.0002)
    )
    simulator.until(30)
    waits: dict[Priority, list[float]] = {priority: [] for priority in Priority}
    for outcome in simulator.outcomes:
        waits[outcome.arrival.priority] += [b - a for a, b in pairwise(outcome.times)]
    for priority in (INTERACTIVE, STANDARD):
        late = sum(wait > simulator.limits.step_seconds for wait in waits[priority])
        assert late < len(waits[priority]) / 100
    assert simulator.scheduler.load().preemptions == 0
    assert max(waits[BATCH]) < 1, "starved"
