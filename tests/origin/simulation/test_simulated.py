"""Two thousand seeds per run, and proof that they would find what they are for.

A seed that fails is named. `python -m tests.origin.simulation.simulation SEED` runs that one
again, and so does `SEED=… pytest tests/origin/simulation/test_simulated.py -k two_thousand`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path

import pytest

from tailrace.ledger.branch import BranchPoint, Part, inherited
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import TAG_OFFSET, Priority, Unread
from tailrace.ledger.interface import Ledger
from tailrace.ledger.sqlite.ledger import SqliteLedger
from tailrace.origin.core import pool as pool_module
from tailrace.origin.core import streams as streams_module
from tailrace.origin.core.events import RequestEnded
from tailrace.origin.core.model import ServedModel
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.states import (
    HOLDING_MEMORY,
    WORKER_TRANSITIONS,
    ModelState,
    StreamEvent,
    StreamState,
    WorkerEvent,
    WorkerState,
)
from tailrace.origin.core.step import END, FailedRun, StepFrames
from tailrace.origin.core.stream import Stream
from tailrace.origin.core.stream_events import EndRefused, EndStored, StreamsAdmitted, WorkerGone
from tailrace.origin.core.stream_table import StreamTable
from tailrace.origin.core.streams import StreamCore
from tailrace.origin.generations import runs as runs_module
from tailrace.origin.generations.stream_log import History
from tailrace.origin.generations.takeover import take_over
from tests.ledger.simulation.simulated_storage import Tables
from tests.origin.simulation.simulation import (
    failure,
    play_cores,
    play_models,
    play_streams,
    run,
)

ROOT = Path(__file__).resolve().parents[3]
SIMULATION = "tests.origin.simulation.simulation"
SEEDS = 2_000
PROCESSES = 2
PLANTED_SEEDS = 400
"""Number of seeds of which at least one must find each planted fault."""


def simulate(first: int, count: int, hash_seed: str = "0") -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", SIMULATION, str(first), str(count)]
    return subprocess.Popen(
        [*command, "--processes", str(PROCESSES)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(900)
def test_two_thousand_seeds_lose_no_request_and_hold_every_cap() -> None:
    if "SEED" in os.environ:
        run(int(os.environ["SEED"]))
        return
    said, _ = simulate(0, SEEDS).communicate()
    *failures, found = said.splitlines()
    assert failures == []
    assert {"seeds": SEEDS, "failed": 0}.items() <= json.loads(found).items()


def test_a_seed_is_the_same_run_in_every_process() -> None:
    running = [simulate(17, 1, hash_seed) for hash_seed in ("0", "1", "2")]
    assert {process.communicate()[0] for process in running} == {f"17: {run(17)}\n"}


# ---- faults on purpose ----


def a_stopped_worker_becomes_ready(patch: pytest.MonkeyPatch) -> None:
    """Keep a worker that was told to stop among those that are given streams."""
    patch.setitem(WORKER_TRANSITIONS, (WorkerState.STOPPING, WorkerEvent.READY), WorkerState.READY)


def a_pinned_model_flaps(patch: pytest.MonkeyPatch) -> None:
    """Give up what the operator wants, and want it again at once."""
    give_up = ModelPool._give_up_hopeless

    def give_up_all(pool: ModelPool, model: ServedModel) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ModelPool, "_operator_wants", lambda *_: "")
            give_up(pool, model)
        model.retry_at_s = 0.0

    patch.setattr(ModelPool, "_give_up_hopeless", give_up_all)


def a_draining_model_is_never_given_up(patch: pytest.MonkeyPatch) -> None:
    """Whoever waits for its memory waits for a worker that cannot start."""
    give_up = ModelPool._give_up_hopeless

    def give_up_others(pool: ModelPool, model: ServedModel) -> None:
        if model.state is not ModelState.DRAINING:
            give_up(pool, model)

    patch.setattr(ModelPool, "_give_up_hopeless", give_up_others)


def memory_counts_as_free_while_a_model_leaves(patch: pytest.MonkeyPatch) -> None:
    others = tuple(state for state in HOLDING_MEMORY if state is not ModelState.LEAVING)
    patch.setattr(pool_module, "HOLDING_MEMORY", others)


def a_model_has_gone_with_its_first_worker(patch: pytest.MonkeyPatch) -> None:
    check = ModelPool._check_gone

    def check_one(pool: ModelPool, model: ServedModel) -> None:
        states = [worker.state for worker in model.workers]
        if WorkerState.RESTING in states:
            for worker in model.workers:
                worker.state = WorkerState.RESTING
        check(pool, model)

    patch.setattr(ModelPool, "_check_gone", check_one)


def a_request_is_counted_after_its_end(patch: pytest.MonkeyPatch) -> None:
    end = ModelPool._end

    def end_some(pool: ModelPool, event: RequestEnded) -> None:
        model = pool.of(event.model)
        one = model.requests.get(event.request)
        end(pool, event)
        if one is not None and one.taken_s is None:
            model.requests[event.request] = one

    patch.setattr(ModelPool, "_end", end_some)


def nobody_gets_a_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pool_module, "TURN_S", inf)


def a_schedule_is_as_strong_as_a_pin(patch: pytest.MonkeyPatch) -> None:
    """Pins are checked to leave memory for all others; schedules are not."""

    def is_kept(pool: ModelPool, one: ServedModel, _: ServedModel) -> bool:
        return bool(pool._operator_wants(one))

    patch.setattr(ModelPool, "_is_kept_from", is_kept)


def a_busy_model_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedModel, "is_idle", property(lambda model: model.is_ready))


def a_worker_is_started_behind_the_back_of_its_circuit(patch: pytest.MonkeyPatch) -> None:
    """Count no start as the trial of an open circuit, so that the trial never ends."""
    prove = ModelPool._prove

    def prove_nothing(pool: ModelPool, model: ServedModel) -> None:
        if not model.circuit.reason:
            prove(pool, model)

    patch.setattr(ModelPool, "_prove", prove_nothing)
    patch.setattr(pool_module, "SETTLED_S", 0.0)


def an_order_to_cancel_is_forgotten_while_the_ledger_is_away(patch: pytest.MonkeyPatch) -> None:
    def forget(core: StreamCore, stream: Stream, error: TailraceError) -> None:
        stream.is_cancelled = False
        stream.recipe = stream.recipe.model_copy(update={"unread": Unread.RUN.word})
        defer(core, stream, error)

    defer = StreamCore._defer
    patch.setattr(StreamCore, "_defer", forget)


def an_orphan_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def wait_all_but_one(core: StreamCore, streams: Iterable[Stream], event: StreamEvent) -> None:
        wait_again(core, list(streams)[1:], event)

    wait_again = StreamCore._wait_again
    patch.setattr(StreamCore, "_wait_again", wait_all_but_one)


def a_worker_goes_on_under_the_old_epoch(patch: pytest.MonkeyPatch) -> None:
    async def keep_epoch(
        ledger: Ledger, stream: Stream, turn: asyncio.Lock
    ) -> tuple[int, History] | None:
        before, stream.has_producer = stream.has_producer, False
        try:
            return await take_over(ledger, stream, turn)
        finally:
            stream.has_producer = before

    patch.setattr(runs_module, "take_over", keep_epoch)


def a_paused_stream_is_not_woken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCore, "_wake", lambda *_: None)


def a_cancelled_stream_goes_on_with_its_next_worker(patch: pytest.MonkeyPatch) -> None:
    def forget_cancels(core: StreamCore, event: WorkerGone) -> None:
        for stream in core.table.on(event.worker):
            stream.is_cancelled = False
            stream.recipe = stream.recipe.model_copy(update={"unread": Unread.RUN.word})
            if stream.state is StreamState.CANCELLING:
                stream.state = StreamState.RUNNING
        worker_gone(core, event)

    worker_gone = StreamCore._worker_gone
    patch.setattr(StreamCore, "_worker_gone", forget_cancels)


def a_deferred_stream_is_never_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCore, "_ledger_is_back", lambda _: None)


def a_stream_that_kills_workers_is_never_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams_module, "judge", lambda *_: [])


def a_claim_is_not_awaited_when_its_worker_dies(patch: pytest.MonkeyPatch) -> None:
    """Begin another claim, although the first one may be the later one in the ledger."""

    def wait_at_once(core: StreamCore, event: WorkerGone) -> None:
        for stream in core.table.on(event.worker):
            if stream.state is StreamState.CLAIMING:
                core.table.unplace(stream)
                core._wait_again([stream], StreamEvent.UNPLACED)
        worker_gone(core, event)

    worker_gone = StreamCore._worker_gone
    patch.setattr(StreamCore, "_worker_gone", wait_at_once)


def a_search_without_an_answer_is_not_repeated(patch: pytest.MonkeyPatch) -> None:
    """Leave a paused stream that is read as it is, if it was not found once."""
    patch.setattr(StreamCore, "_find_failed", lambda *_: None)
    patch.setattr(StreamCore, "_is_to_be_found", lambda core, one: one not in core._looks)


def room_is_kept_for_a_stream_that_is_there(patch: pytest.MonkeyPatch) -> None:
    def add(core: StreamCore, event: StreamsAdmitted) -> None:
        before = dict(core.table.opening)
        admit(core, event)
        core.table.opening.update(before)

    admit = StreamCore._admit
    patch.setattr(StreamCore, "_admit", add)


def less_urgent_streams_take_all_the_room(patch: pytest.MonkeyPatch) -> None:
    def require_some(table: StreamTable, streams: int, _: Priority) -> None:
        require_room(table, streams, Priority.INTERACTIVE)

    require_room = StreamTable.require_room
    patch.setattr(StreamTable, "require_room", require_some)


def an_answer_to_an_earlier_end_counts(patch: pytest.MonkeyPatch) -> None:
    """Count a stream as ended that another origin took."""

    def end(core: StreamCore, event: EndRefused) -> None:
        core._end_stored(EndStored(event.stream, event.nth))

    patch.setattr(StreamCore, "_end_refused", end)


def text_is_forgotten_with_its_worker(patch: pytest.MonkeyPatch) -> None:
    def forget(core: StreamCore, event: WorkerGone) -> None:
        for stream in core.table.on(event.worker):
            stream.steering.drop()
        worker_gone(core, event)

    worker_gone = StreamCore._worker_gone
    patch.setattr(StreamCore, "_worker_gone", forget)


def a_failed_run_is_never_retried(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCore, "_may_retry", lambda *_: False)


def a_failed_run_is_retried_again_and_again(patch: pytest.MonkeyPatch) -> None:
    def may_always(core: StreamCore, stream: Stream) -> bool:
        return core.table.may(stream.id, StreamEvent.RETRIED)

    patch.setattr(StreamCore, "_may_retry", may_always)


def the_last_text_of_a_failed_run_is_stored(patch: pytest.MonkeyPatch) -> None:
    """Leave out only the end of a run that is retried."""

    def without_ends(step: StepFrames, failed: Sequence[FailedRun]) -> StepFrames:
        kept = [frame[TAG_OFFSET] != END for frame in step.emissions.frames]
        streams = [one for one, is_kept in zip(step.streams, kept, strict=True) if is_kept]
        return StepFrames(streams, step.emissions.those(kept), failed)

    patch.setattr(StepFrames, "without", without_ends)


def a_branch_forgets_the_tokens_that_it_shares(patch: pytest.MonkeyPatch) -> None:
    """Give a worker only the log from the branch's own first frame on."""

    async def forget(
        ledger: Ledger, stream: Stream, turn: asyncio.Lock
    ) -> tuple[int, History] | None:
        own = {"begin": stream.recipe.base}
        stream.recipe = stream.recipe.model_copy(update=own)
        return await take_over(ledger, stream, turn)

    patch.setattr(runs_module, "take_over", forget)


def the_records_of_a_deleted_stream_go_with_it(patch: pytest.MonkeyPatch) -> None:
    """Delete the segments of a stream although a branch refers to them."""

    def remove(tables: Tables, sids: Sequence[int]) -> None:
        for sid in sids:
            tables.streams.pop(sid, None)
            tables.segments.pop(sid, None)

    patch.setattr(Tables, "_remove", remove)


def a_branch_does_not_wait_until_what_it_shares_is_stored(patch: pytest.MonkeyPatch) -> None:
    async def hurry(ledger: SqliteLedger, base: BranchPoint) -> tuple[Part, ...]:
        tail = ledger.tail(base.stream)
        return inherited(tail.parts, tail.sid, base.end)

    patch.setattr(SqliteLedger, "_parts", hurry)


PLANTED_IN_STREAMS = [
    a_worker_goes_on_under_the_old_epoch,
    a_branch_forgets_the_tokens_that_it_shares,
    the_records_of_a_deleted_stream_go_with_it,
    a_branch_does_not_wait_until_what_it_shares_is_stored,
    a_failed_run_is_never_retried,
]
PLANTED_IN_CORES = [
    an_order_to_cancel_is_forgotten_while_the_ledger_is_away,
    an_orphan_is_forgotten,
    a_paused_stream_is_not_woken,
    a_cancelled_stream_goes_on_with_its_next_worker,
    a_deferred_stream_is_never_tried_again,
    a_stream_that_kills_workers_is_never_blamed,
    a_claim_is_not_awaited_when_its_worker_dies,
    a_search_without_an_answer_is_not_repeated,
    room_is_kept_for_a_stream_that_is_there,
    less_urgent_streams_take_all_the_room,
    an_answer_to_an_earlier_end_counts,
    text_is_forgotten_with_its_worker,
    a_failed_run_is_retried_again_and_again,
    the_last_text_of_a_failed_run_is_stored,
]
PLANTED = [
    a_stopped_worker_becomes_ready,
    a_pinned_model_flaps,
    a_draining_model_is_never_given_up,
    memory_counts_as_free_while_a_model_leaves,
    a_model_has_gone_with_its_first_worker,
    a_request_is_counted_after_its_end,
    nobody_gets_a_turn,
    a_schedule_is_as_strong_as_a_pin,
    a_busy_model_is_evicted,
    a_worker_is_started_behind_the_back_of_its_circuit,
]


PLAYS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[int], object]] = {
    **dict.fromkeys(PLANTED, play_models),
    **dict.fromkeys(PLANTED_IN_CORES, play_cores),
    **dict.fromkeys(PLANTED_IN_STREAMS, play_streams),
}


def found_at(plant: Callable[[pytest.MonkeyPatch], None]) -> int | None:
    """Return the first seed that finds a fault."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        seeds = range(PLANTED_SEEDS)
        return next((seed for seed in seeds if failure(seed, PLAYS[plant]) is not None), None)


@pytest.mark.parametrize("plant", PLAYS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert found_at(plant) is not None
