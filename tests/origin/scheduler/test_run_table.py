"""Order of starting runs, and which run makes room for which."""

from __future__ import annotations

from itertools import count

import pytest

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import ScheduledRun
from tailrace.origin.scheduler.run_table import PASSING_TOKENS, FairQueue, RunTable

INTERACTIVE, STANDARD, BATCH = Priority


class Table(RunTable):
    """A table whose runs are told apart by the order in which they came."""

    def __init__(self, pages: int, most: int = 100) -> None:
        self.pool, self.queue = PagePool(pages), FairQueue()
        super().__init__(self.pool, self.queue, most)
        self._numbers = count()

    def come(
        self, priority: Priority, tokens: int = 10, most: int = 64, generated: int = 0
    ) -> ScheduledRun:
        number = next(self._numbers)
        known = [number] * tokens, [number] * generated
        run = ScheduledRun(number, priority, number, *known, most)
        self.wait(run)
        return run

    def come_and_start(self, priority: Priority, tokens: int = 10, most: int = 64) -> ScheduledRun:
        run = self.come(priority, tokens, most)
        self.start()
        assert run.run in self.running
        return run

    def names(self) -> list[int]:
        return sorted(self.running)


def test_a_run_that_starts_has_the_pages_of_all_that_it_knows() -> None:
    table = Table(10)
    run = table.come_and_start(STANDARD, tokens=65)
    assert len(run.pages) == 2
    assert table.pool.free == 8


def test_no_more_runs_start_than_may_run_and_the_first_of_a_class_first() -> None:
    table = Table(100, most=2)
    runs = [table.come(STANDARD) for _ in range(3)]
    table.start()
    assert table.names() == [0, 1]
    table.remove(runs[0])
    table.start()
    assert table.names() == [1, 2]


def started(table: Table, *coming: Priority) -> list[int]:
    """Return how many of each class start; the others wait."""
    waiting = [table.come(priority) for priority in coming]
    table.start()
    classes = [run.priority for run in waiting if run.run in table.running]
    return [classes.count(priority) for priority in Priority]


def test_where_enough_run_the_less_urgent_ones_hold_up_nobody_and_are_not_preempted() -> None:
    table = Table(100)
    for _ in range(20):
        table.come_and_start(BATCH)
    table.enough = 13
    coming = *[INTERACTIVE] * 9, *[STANDARD] * 5, BATCH
    assert started(table, *coming) == [9, 4, 0]
    assert not table.preempted


def test_where_enough_run_that_are_as_urgent_a_class_below_its_share_starts_more() -> None:
    table = Table(100)
    for _ in range(20):
        table.come_and_start(INTERACTIVE)
    table.enough = 13
    assert started(table, INTERACTIVE, *[STANDARD] * 9, *[BATCH] * 3) == [0, 4, 1]
    assert not table.preempted


def test_where_enough_run_those_that_a_lost_worker_had_begun_go_on_all_the_same() -> None:
    table = Table(100, most=5)
    table.enough = 2
    for _ in range(4):
        table.come(STANDARD, generated=3)
    for _ in range(2):
        table.come(STANDARD)
    table.start()
    assert table.names() == [0, 1, 2, 3]


def test_a_run_starts_only_if_each_running_run_can_have_one_more_page() -> None:
    table = Table(4)
    table.come_and_start(STANDARD)
    table.come_and_start(STANDARD)
    third = table.come(STANDARD)
    table.start()
    assert third.run not in table.running
    assert table.pool.free == 2
    table.remove(table.running[0])
    table.start()
    assert third.run in table.running


def test_alone_a_run_may_have_every_page() -> None:
    table = Table(5)
    run = table.come_and_start(BATCH, tokens=5 * PAGE_TOKENS)
    assert len(run.pages) == 5


def test_runs_of_all_classes_start_in_the_ratio_of_the_weights() -> None:
    table = Table(1000, most=26)
    for priority in (BATCH, STANDARD, INTERACTIVE):
        for _ in range(50):
            table.come(priority)
    table.start()
    counts = [sum(r.priority is p for r in table.running.values()) for p in Priority]
    assert counts == pytest.approx([16, 8, 2], abs=1)


def test_an_interactive_run_starts_in_the_place_of_the_newest_batch_run() -> None:
    table = Table(1000, most=13)
    for _ in range(20):
        table.come(BATCH)
    table.start()
    assert table.names() == list(range(13))
    run = table.come_and_start(INTERACTIVE)
    assert table.names() == [*range(12), run.run]
    assert table.preempted == [12]
    assert table.waiting[BATCH][0].run == 12


def test_no_class_is_pushed_below_its_share_and_none_pushes_beyond_its_own() -> None:
    table = Table(1000, most=13)
    for _ in range(20):
        table.come(BATCH)
    table.start()
    for _ in range(20):
        table.come(INTERACTIVE)
        table.begin_step()
        table.start()
    counts = [sum(r.priority is p for r in table.running.values()) for p in Priority]
    assert counts == [8, 0, 5]
    for _ in range(20):
        table.come(STANDARD)
        table.begin_step()
        table.start()
    counts = [sum(r.priority is p for r in table.running.values()) for p in Priority]
    assert counts == [8, 4, 1]
    assert 0 in table.running


def test_no_run_starts_in_the_place_of_a_more_urgent_one() -> None:
    table = Table(1000, most=13)
    for _ in range(13):
        table.come(INTERACTIVE)
    table.start()
    table.come(BATCH)
    table.start()
    assert table.preempted == []
    table.come(INTERACTIVE)
    table.remove(table.running[5])
    table.start()
    assert sorted(table.running)[-1] == 13, "the batch run was next"


def test_a_class_that_is_ahead_takes_nobodys_place() -> None:
    table = Table(1000, most=13)
    for _ in range(13):
        table.come(BATCH)
    table.start()
    table.queue.charge(INTERACTIVE, 1_000_000)
    table.queue.settle([BATCH])
    table.come(INTERACTIVE)
    table.start()
    assert table.preempted == []


def test_pages_are_made_free_for_a_start_only_if_that_is_enough() -> None:
    table = Table(20, most=13)
    for _ in range(13):
        table.come(BATCH, tokens=PAGE_TOKENS)
    table.start()
    assert (len(table.running), table.pool.free) == (10, 10)
    table.come(INTERACTIVE, tokens=19 * PAGE_TOKENS)
    table.start()
    assert table.preempted == []
    table.come_and_start(STANDARD, tokens=12 * PAGE_TOKENS)
    assert table.preempted == [9, 8, 7, 6, 5, 4]


def test_a_run_does_not_start_again_in_the_step_that_preempted_it() -> None:
    table = Table(1000, most=13)
    for _ in range(13):
        table.come(BATCH)
    table.start()
    first = table.come_and_start(INTERACTIVE)
    table.remove(first)
    table.start()
    assert 12 not in table.running
    table.begin_step()
    table.start()
    assert 12 in table.running


def test_short_runs_pass_a_long_one_that_waits_for_pages_but_not_for_ever() -> None:
    table = Table(100)
    table.come_and_start(STANDARD)
    long = table.come(BATCH, tokens=99 * PAGE_TOKENS, most=1)
    passed = 0
    for _ in range(10_000):
        run = table.come(INTERACTIVE, tokens=PAGE_TOKENS, most=PAGE_TOKENS)
        table.start()
        if run.run not in table.running:
            break
        table.queue.charge(INTERACTIVE, 2 * PAGE_TOKENS)
        passed += 1
        table.remove(run)
    assert 0 < passed <= PASSING_TOKENS * 8 // (2 * PAGE_TOKENS) + 1
    table.remove(table.running[0])
    table.start()
    assert long.run in table.running


def test_a_page_is_taken_from_the_newest_run_of_the_class_furthest_ahead() -> None:
    table = Table(9)
    runs = [table.come_and_start(p) for p in (STANDARD, INTERACTIVE, BATCH, BATCH)]
    table.queue.charge(BATCH, 10)
    taken = table.pool.take(5)
    assert taken is not None
    assert table.reach(runs[1], PAGE_TOKENS + 1, ())
    assert table.preempted == [3]
    assert table.reach(runs[1], 2 * PAGE_TOKENS + 1, ())
    assert table.preempted == [3, 2]
    assert [run.run for run in table.waiting[BATCH]] == [2, 3]


def test_a_run_takes_no_page_from_one_that_is_less_far_ahead_or_has_its_work() -> None:
    table = Table(6)
    runs = [table.come_and_start(p) for p in (STANDARD, INTERACTIVE, BATCH)]
    table.queue.charge(BATCH, 10)
    taken = table.pool.take(3)
    assert taken is not None
    assert not table.reach(runs[2], PAGE_TOKENS + 1, ())
    assert not table.reach(runs[1], PAGE_TOKENS + 1, {2})
    assert table.preempted == []
    assert [len(run.pages) for run in runs] == [1, 1, 1]


def test_nobody_takes_a_page_from_the_senior_who_takes_it_from_anybody() -> None:
    table = Table(4)
    senior = table.come_and_start(BATCH)
    other = table.come_and_start(INTERACTIVE)
    taken = table.pool.take(2)
    assert taken is not None
    table.queue.charge(BATCH, 1000)
    assert not table.reach(other, PAGE_TOKENS + 1, ())
    senior.learn([1] * PAGE_TOKENS)
    table.begin_step()
    assert len(senior.pages) == 2
    assert table.preempted == [other.run]


def test_without_runs_there_is_no_senior_to_serve() -> None:
    table = Table(1)
    table.begin_step()
    assert table.senior is None
    assert table.pool.free == 1


def sharing(table: Table, runs: int, common: int) -> list[ScheduledRun]:
    """Batch runs that begin with the same `common` pages, each with one more of its own."""
    first = table.come_and_start(BATCH, tokens=common * PAGE_TOKENS + 1)
    for place in range(common):
        table.pool.publish(first.pages[place], first.key(place))
    others = [table.come(BATCH) for _ in range(runs - 1)]
    for other in others:
        other.ids = list(first.ids)
        other.prompt = first.prompt
    table.start()
    return [first, *others]


def test_nobody_loses_its_place_for_pages_that_others_hold_as_well() -> None:
    table = Table(40)
    table.come_and_start(STANDARD)
    sharing(table, 10, common=20)
    assert (len(table.running), table.pool.free) == (10, 10)
    table.come(INTERACTIVE, tokens=39 * PAGE_TOKENS)
    table.start()
    assert table.preempted == [], "they hold 29 pages, however often these are counted"


def test_all_that_hold_a_common_prefix_give_way_together_to_a_more_urgent_run() -> None:
    table = Table(40)
    runs = sharing(table, 10, common=20)
    assert table.pool.free == 10
    run = table.come_and_start(INTERACTIVE, tokens=30 * PAGE_TOKENS)
    assert table.names() == [run.run]
    assert set(table.preempted) == {r.run for r in runs}


def test_the_senior_makes_room_once_and_is_then_left_to_its_end() -> None:
    table = Table(40)
    senior, _ = sharing(table, 2, common=20)
    table.remove(table.come_and_start(INTERACTIVE, tokens=30 * PAGE_TOKENS))
    table.begin_step()
    table.start()
    assert len(table.running) == 2, "both are back"
    table.begin_step()
    table.come(INTERACTIVE, tokens=30 * PAGE_TOKENS)
    table.start()
    assert senior.run in table.running
    assert table.preempted == []


def test_what_nobody_reads_starts_last_in_its_class_and_makes_room_first() -> None:
    table = Table(1000, most=13)
    unread, read = table.come(BATCH), table.come(BATCH)
    table.set_unread(unread, unread=True)
    assert table.waiting[BATCH] == [read, unread]
    for _ in range(11):
        table.come(BATCH)
    table.start()
    run = table.come_and_start(INTERACTIVE)
    assert table.preempted == [unread.run]
    table.remove(run)
    table.set_unread(unread, unread=False)
    assert table.waiting[BATCH] == [unread]


def test_a_read_run_takes_a_page_from_an_older_unread_one_of_its_class() -> None:
    table = Table(6)
    senior, unread, read = (table.come_and_start(STANDARD) for _ in range(3))
    table.pool.take(3)
    assert not table.reach(read, PAGE_TOKENS + 1, {senior.run})
    table.set_unread(unread, unread=True)
    assert table.reach(read, PAGE_TOKENS + 1, {senior.run})
    assert table.preempted == [unread.run]


def test_a_read_run_starts_in_the_place_of_the_newest_unread_one_of_its_class() -> None:
    table = Table(1000, most=4)
    runs = [table.come_and_start(STANDARD) for _ in range(4)]
    for run in runs[:3]:
        table.set_unread(run, unread=True)
    assert table.come_and_start(STANDARD).run in table.running
    assert table.preempted == [2]
    waiting = table.come(STANDARD)
    table.set_unread(waiting, unread=True)
    table.start()
    assert table.preempted == [2], "one that nobody reads takes nobody's place"


def test_where_enough_run_a_read_run_starts_beside_the_unread_ones_of_its_class() -> None:
    table = Table(1000)
    table.enough = 3
    for run in [table.come_and_start(STANDARD) for _ in range(3)]:
        table.set_unread(run, unread=True)
    table.come_and_start(STANDARD)
    assert table.preempted == []
