"""Contents of a plan: chunks, rows, drafts, draws; and what the scheduler refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.ledger.errors import Overloaded, TooLarge
from tailrace.ledger.wire.schema import Priority
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import Drafts, Plan, Work
from tailrace.origin.scheduler.scheduler import Scheduler

INTERACTIVE, STANDARD, BATCH = Priority
SECONDS = 0.03


ONE_CHUNK = Limits(step_tokens_least=65, step_tokens_most=65)
"""And a row."""
ROWS = 304
"""More than any step here has: what bounds it is its tokens."""


def scheduler(pages: int = 100, limits: Limits | None = None, rows: int = ROWS) -> Scheduler:
    return Scheduler(PagePool(pages), replace(limits or Limits(), step_rows_least=rows))


def add(
    target: Scheduler,
    run: int,
    prompt: Sequence[int] | int = 10,
    generated: Sequence[int] = (),
    priority: Priority = STANDARD,
    max_tokens: int = 200,
) -> None:
    """Add a run; a prompt given as a number has that many tokens, which no other run has."""
    ids = [run * 10_000 + n for n in range(prompt)] if isinstance(prompt, int) else prompt
    target.add(run, priority, ids, generated, max_tokens)


def step(target: Scheduler, drafts: Drafts | None = None, token: int = 5) -> Plan:
    """One step, in which every run that draws gets `token`."""
    plan = target.plan(drafts)
    for work in plan.work:
        if work.draws:
            target.extend(work.run, [token])
    target.done(plan, SECONDS)
    return plan


def guessing(guess: Callable[[int], list[int]]) -> Drafts:
    """Return the same guesses for each run, out of how many there may be."""
    return lambda wanted: [guess(most) for _, most in wanted]


def only(plan: Plan) -> Work:
    assert len(plan.work) == 1
    return plan.work[0]


def shapes(target: Scheduler, steps: int) -> list[tuple[int, int, bool, bool]]:
    """(start, tokens, prefill, draws) of a lone run's next steps."""
    works = [only(step(target)) for _ in range(steps)]
    return [(work.start, len(work.ids), work.prefill, work.draws) for work in works]


# ---- one run ----


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [(0, 1, True, True), (1, 1, False, True)]),
        (64, [(0, 64, True, True), (64, 1, False, True)]),
        (65, [(0, 65, True, True), (65, 1, False, True)]),
        (66, [(0, 64, True, False), (64, 2, True, True), (66, 1, False, True)]),
        (150, [(0, 64, True, False), (64, 64, True, False), (128, 22, True, True)]),
    ],
)
def test_a_prompt_goes_through_in_chunks_at_multiples_of_a_page_and_the_last_one_draws(
    length: int, expected: list[tuple[int, int, bool, bool]]
) -> None:
    target = scheduler(limits=ONE_CHUNK)
    add(target, 1, length)
    assert shapes(target, len(expected)) == expected


def test_a_step_takes_as_many_chunks_of_a_prompt_as_it_has_room_for() -> None:
    target = scheduler(limits=Limits(step_tokens_least=200, step_tokens_most=200))
    add(target, 1, 400)
    assert shapes(target, 4) == [
        (0, 192, True, False),
        (192, 192, True, False),
        (384, 16, True, True),
        (400, 1, False, True),
    ]


def test_each_prompt_has_its_chunk_before_any_has_a_second_one() -> None:
    target = scheduler(limits=Limits(step_tokens_least=5 * 64, step_tokens_most=5 * 64))
    for run in range(3):
        add(target, run, 64 * (run + 1))
    sizes = {work.run: len(work.ids) for work in step(target).work}
    assert sizes == {0: 64, 1: 128, 2: 128}


def test_a_continued_run_prefills_its_prompt_and_replays_what_it_generated() -> None:
    target = scheduler(limits=Limits(replay_rows=40))
    add(target, 1, 70, generated=[5] * 100)
    assert shapes(target, 5) == [
        (0, 70, True, False),
        (70, 40, False, False),
        (110, 40, False, False),
        (150, 20, False, True),
        (170, 1, False, True),
    ]


def test_the_ids_and_pages_of_a_work_are_those_of_its_positions() -> None:
    target = scheduler(limits=ONE_CHUNK)
    add(target, 1, [*range(64), 77, 78])
    assert only(step(target)).ids == list(range(64))
    work = only(step(target, token=9))
    assert (work.ids, len(work.pages)) == ([77, 78], 2)
    work = only(step(target))
    assert (work.ids, work.start, len(set(work.pages))) == ([9], 66, 2)


def test_steered_tokens_are_rows_that_follow_what_is_known() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    target.extend(1, [6, 7, 8])
    work = only(step(target))
    assert (work.start, work.ids, work.prefill, work.draws) == (10, [5, 6, 7, 8], False, True)


def test_tokens_can_be_steered_before_the_prompt_is_through() -> None:
    target = scheduler(limits=ONE_CHUNK)
    add(target, 1, 70)
    step(target)
    target.extend(1, [6, 7])
    assert shapes(target, 2) == [(64, 6, True, False), (70, 2, False, True)]


def test_a_run_whose_token_is_not_known_yet_stands_still() -> None:
    target = scheduler()
    add(target, 1, 10)
    target.done(target.plan(), SECONDS)
    assert target.plan().work == ()
    target.extend(1, [5])
    assert only(target.plan()).ids == [5]


def test_a_plan_that_is_not_done_is_planned_again() -> None:
    target = scheduler(limits=ONE_CHUNK)
    add(target, 1, 100)
    assert target.plan().work == target.plan().work
    assert only(step(target)).start == 0
    assert only(target.plan()).start == 64


def test_a_plan_that_another_one_followed_changes_nothing_any_more() -> None:
    limits = Limits(running=100, step_tokens_least=65, step_tokens_most=65)
    target = scheduler(pages=200, limits=limits)
    for run in range(70):
        add(target, run, 1)
    for _ in range(10):
        step(target)
    forgotten, current = target.plan(), target.plan()
    alone = {work.run for work in forgotten.work} - {work.run for work in current.work}
    assert alone
    target.done(forgotten, SECONDS)
    assert alone <= {work.run for work in target.plan().work}


# ---- many runs ----


def test_continued_runs_replay_no_more_rows_in_a_step_than_it_may_have() -> None:
    target = scheduler(rows=10)
    add(target, 1, generated=range(40))
    add(target, 2, generated=range(40))
    add(target, 3, 200)
    step(target)
    works = {work.run: len(work.ids) for work in target.plan().work}
    assert works == {1: 10, 3: PAGE_TOKENS}, "the chunk has its place all the same"


def test_every_decoding_run_has_a_row_in_each_step_beside_a_long_prompt() -> None:
    target = scheduler(pages=400)
    for run in range(20):
        add(target, run, 10)
    step(target)
    step(target)
    add(target, 99, 5000, priority=INTERACTIVE)
    end = 0
    while end < 5000:
        works = {work.run: work for work in step(target).work}
        assert set(works) == {*range(20), 99}
        assert works[99].start == end
        end += len(works[99].ids)


def test_a_prompt_has_a_chunk_in_each_step_beside_more_decoding_runs_than_fit() -> None:
    target = scheduler(pages=1000, limits=Limits(running=200, step_tokens_most=128))
    for run in range(150):
        add(target, run, 1)
    while any(work.prefill for work in step(target).work):
        pass
    add(target, 999, 640)
    for place in range(10):
        works = step(target).work
        assert len(works) == 65
        assert [work.start for work in works if work.prefill] == [64 * place]


def test_when_rows_do_not_fit_the_runs_of_a_class_take_turns() -> None:
    limits = Limits(running=200, step_tokens_least=65, step_tokens_most=65)
    target = scheduler(pages=500, limits=limits)
    for run in range(100):
        add(target, run, 1)
    while any(work.prefill for work in step(target).work):
        pass
    rows = [0] * 100
    for _ in range(100):
        for work in step(target).work:
            rows[work.run] += 1
    assert sum(rows) == 6500
    assert max(rows) - min(rows) <= 1


def test_when_rows_do_not_fit_classes_share_them_by_weight() -> None:
    limits = Limits(running=240, step_tokens_least=65, step_tokens_most=65)
    target = scheduler(pages=1000, limits=limits)
    for run in range(240):
        add(target, run, 1, priority=Priority(run % 3), max_tokens=10_000 // 64)
    for _ in range(240):
        step(target)
    rows = [0, 0, 0]
    for _ in range(60):
        for work in step(target).work:
            rows[work.run % 3] += 1
    assert [round(13 * r / sum(rows), 1) for r in rows] == pytest.approx([8, 4, 1], abs=0.1)


def crowd(batch: int, interactive: int) -> Scheduler:
    """Return a scheduler of decoding runs, eight of whose rows are in time.

    The interactive runs have odd numbers.
    """
    target = scheduler(rows=8)
    for run in range(batch):
        add(target, 2 * run, 1, priority=BATCH)
    while target.load().running[BATCH] < batch:  # quick steps, so that all of them start
        plan = target.plan()
        for work in plan.work:
            target.extend(work.run, [5])
        target.done(plan, 0.001)
    for run in range(interactive):
        add(target, 2 * run + 1, 1, priority=INTERACTIVE)
    step(target)
    return target


def test_where_rows_are_late_those_of_the_most_urgent_class_are_in_each_step() -> None:
    target = crowd(batch=16, interactive=6)
    rows: Counter[int] = Counter()
    for _ in range(8):
        plan = step(target)
        assert plan.skipped
        rows.update(work.run for work in plan.work)
    assert [rows[2 * run + 1] for run in range(6)] == [8] * 6
    assert [rows[2 * run] for run in range(16)] == [1] * 16, "the others took turns"


def test_the_less_urgent_have_their_share_of_rows_however_many_are_urgent() -> None:
    target = crowd(batch=16, interactive=20)
    for _ in range(8):
        assert sum(work.run % 2 == 0 for work in step(target).work) >= 1


def test_one_class_alone_takes_no_turns() -> None:
    target = crowd(batch=16, interactive=0)
    assert [len(step(target).work) for _ in range(3)] == [16] * 3


def test_in_a_class_the_first_to_come_prefills_first() -> None:
    target = scheduler(limits=Limits(step_tokens_most=128))
    for run in range(4):
        add(target, run, 256)
    starts = [[(work.run, work.start) for work in step(target).work] for _ in range(5)]
    assert starts[:4] == [[(0, 64 * n), (1, 64 * n)] for n in range(4)]
    assert [run for run, _ in starts[4]] == [0, 1, 2]


def test_chunks_that_classes_want_at_once_go_by_weight() -> None:
    target = scheduler(pages=900, limits=Limits(step_tokens_most=128, step_tokens_least=65))
    target.done(Plan(full=True), 1.0)
    for run in range(3):
        add(target, run, 64 * 200, priority=Priority(run))
    chunks = [0, 0, 0]
    for _ in range(65):
        plan = target.plan()
        target.done(plan, 1.0)
        for work in plan.work:
            chunks[work.run] += 1
    assert chunks == pytest.approx([40, 20, 5], abs=1)


# ---- prefixes ----


def test_a_prompt_that_another_run_had_is_found_but_for_its_last_page() -> None:
    target = scheduler()
    add(target, 1, [7] * 200)
    shapes(target, 5)
    target.remove(1)
    add(target, 2, [7] * 200)
    work = only(step(target))
    assert (work.start, len(work.ids), work.draws) == (192, 8, True)
    add(target, 3, [7] * 192)
    assert step(target).work[-1].start == 128
    assert target.load().reused_tokens == 192 + 128


def test_what_was_generated_is_found_too_but_not_as_a_prompt() -> None:
    target = scheduler()
    add(target, 1, [7] * 60)
    for _ in range(80):
        step(target, token=7)
    target.remove(1)
    add(target, 2, [7] * 60, generated=[7] * 70)
    assert only(step(target)).start == 128
    target.remove(2)
    add(target, 3, [7] * 130)
    assert only(step(target)).start == 0


def test_siblings_that_come_together_prefill_their_prompt_once() -> None:
    target = scheduler()
    for run in range(8):
        add(target, run, [7] * 640)
    for _ in range(20):
        plan = step(target)
        computed = [work.start for work in plan.work if work.prefill and work.start < 576]
        assert len(set(computed)) == len(computed)
    load = target.load()
    assert load.prompt_tokens == 576 + 8 * 64
    assert load.reused_tokens == 7 * 576


def test_a_run_goes_on_alone_when_the_one_that_computed_its_prompt_ends() -> None:
    target = scheduler()
    add(target, 1, [7] * 640)
    add(target, 2, [7] * 640)
    step(target)
    step(target)
    target.remove(1)
    assert [only(step(target)).start for _ in range(3)] == [256, 384, 512]


# ---- guesses ----


def test_guesses_are_rows_behind_the_last_known_token_and_right_ones_are_cached() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    plan = target.plan(guessing(lambda most: [6, 7, 8, 9][:most]))
    work = only(plan)
    assert (work.start, work.ids, work.drafts, work.draws) == (10, [5, 6, 7, 8, 9], 4, True)
    target.extend(1, [6, 7, 3])  # two guesses were right, and what follows them is 3
    target.done(plan, SECONDS)
    work = only(target.plan())
    assert (work.start, work.ids) == (13, [3])
    load = target.load()
    assert (load.drafted, load.accepted, load.tokens) == (4, 2, 4)


def test_what_is_known_one_by_one_counts_as_well() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    plan = target.plan(guessing(lambda most: [6, 7, 8]))
    for token in (6, 7, 8, 4):
        target.extend(1, [token])
    target.done(plan, SECONDS)
    assert only(target.plan()).start == 14
    assert target.load().accepted == 3


def test_a_class_pays_for_right_guesses_and_not_for_wrong_ones() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    plan = target.plan(guessing(lambda most: [6, 7, 8]))
    target.extend(1, [6, 7, 1])
    target.done(plan, SECONDS)
    assert target._queue.time(STANDARD) == (10 + 1 + 2) / 4


def test_a_right_guess_from_whose_row_nothing_was_drawn_is_a_row_again() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    plan = target.plan(guessing(lambda most: [6, 7, 8]))
    target.extend(1, [6, 7])
    target.done(plan, SECONDS)
    work = only(target.plan())
    assert (work.start, work.ids, work.draws) == (12, [7], True)
    assert target.load().accepted == 1


def test_a_guess_behind_a_wrong_one_is_wrong() -> None:
    target = scheduler()
    add(target, 1, 10)
    step(target)
    plan = target.plan(guessing(lambda most: [6, 7, 8]))
    target.extend(1, [1])
    target.done(plan, SECONDS)
    target.extend(1, [7, 8])
    assert only(target.plan()).ids == [1, 7, 8]


def test_no_more_is_guessed_than_may_be_known_or_than_the_limits_allow() -> None:
    asked: list[int] = []

    def guess(most: int) -> list[int]:
        asked.append(most)
        return [1] * 50

    target = scheduler(limits=Limits(draft_rows=6))
    add(target, 1, 10, max_tokens=12)
    plans = [step(target, guessing(guess)) for _ in range(11)]
    assert asked == [6, 6, 6, 6, 6, 5, 4, 3, 2, 1]
    assert [plan.work[0].drafts for plan in plans] == [0, *asked]


def test_guesses_displace_no_work() -> None:
    target = scheduler(pages=300, limits=Limits(step_tokens_most=128))
    for run in range(10):
        add(target, run, 10)
    step(target)
    step(target)
    add(target, 50, 64)
    plan = step(target, guessing(lambda most: [1] * most))
    assert plan.tokens == 128
    assert sum(len(work.ids) - work.drafts for work in plan.work) == 10 + 64
    assert [work.drafts for work in plan.work if work.prefill] == [0]


def test_what_a_step_has_no_room_for_is_not_guessed_for_the_last_runs() -> None:
    target = scheduler(rows=20)
    for run in range(4):
        add(target, run, 10)
    step(target)
    plan = step(target, guessing(lambda most: [1] * most))
    assert [work.drafts for work in plan.work] == [8, 8, 0, 0]


def test_guesses_take_no_page_that_a_running_run_may_need() -> None:
    target = scheduler(pages=3)
    add(target, 1, 60, max_tokens=100)
    add(target, 2, 20, max_tokens=40)
    step(target)
    plan = target.plan(guessing(lambda most: [1] * most))
    assert {work.run: work.drafts for work in plan.work} == {1: 3, 2: 8}
    assert target.load().pages_free == 1


# ---- what is refused ----


def test_a_run_that_the_pool_could_never_hold_is_refused_and_told_why() -> None:
    target = scheduler(pages=4)
    add(target, 1, 56, max_tokens=200)
    with pytest.raises(TooLarge, match=r"57 tokens and up to 200 .*cache holds 256 tokens"):
        add(target, 2, 57, max_tokens=200)
    assert not target.load().waiting[BATCH]


def test_a_full_queue_refuses_its_class_and_no_other() -> None:
    target = scheduler(limits=Limits(waiting=3))
    for run in range(3):
        add(target, run)
    with pytest.raises(Overloaded, match="3 standard runs are waiting"):
        add(target, 3)
    add(target, 4, priority=BATCH)
    step(target)
    add(target, 5)
    assert target.load().waiting == (0, 1, 0)


def test_more_tokens_than_a_run_may_have_are_refused() -> None:
    target = scheduler()
    add(target, 1, 10, max_tokens=3)
    step(target)
    with pytest.raises(ValueError, match="run 1 would exceed its maximum of 13"):
        target.extend(1, [1, 2, 3])
    target.extend(1, [1, 2])


# ---- ends and numbers ----


def test_a_run_can_end_at_any_moment_and_gives_its_pages_back() -> None:
    target = scheduler(pages=10)
    for run in range(3):
        add(target, run, 100, max_tokens=20)
    target.remove(0)  # while it waits
    step(target)
    plan = target.plan()
    target.remove(1)  # while its step is under way
    target.remove(77)  # when it is unknown
    for work in plan.work:
        if work.run == 2:
            target.extend(2, [5])
    target.done(plan, SECONDS)
    assert [work.run for work in step(target).work] == [2]
    target.remove(2)
    assert target.idle
    assert target.load().pages_free == 10


def test_a_new_run_with_the_id_of_one_that_ended_in_the_step_knows_nothing_of_it() -> None:
    target = scheduler()
    add(target, 1, 100)
    plan = target.plan()
    target.remove(1)
    add(target, 1, 100)
    target.done(plan, SECONDS)
    assert only(target.plan()).start == 0


def test_the_load_counts_what_was_done() -> None:
    target = scheduler(pages=20, limits=Limits(running=2))
    assert target.idle
    add(target, 1, 100, priority=INTERACTIVE)
    add(target, 2, 10, priority=BATCH)
    add(target, 3, 10, priority=BATCH)
    step(target)
    load = target.load()
    assert (load.waiting, load.running) == ((0, 0, 1), (1, 0, 1))
    assert (load.pages, load.pages_free, load.step_us) == (20, 17, 30_000)
    assert (load.tokens, load.prompt_tokens) == (2, 110)
    assert (load.batch_limit, load.row_limit, load.turn_limit) == (128, ROWS, ROWS)
    assert not target.idle
