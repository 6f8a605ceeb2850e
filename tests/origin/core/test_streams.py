"""The core of streams by itself: no ledger, no worker, only events and commands."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

from tailrace.ledger.errors import LedgerAway, Overloaded, StaleEpoch
from tailrace.ledger.frame import (
    Caller,
    FinishReason,
    Notice,
    Priority,
    StreamEnd,
    Token,
    encode,
)
from tailrace.ledger.interface import Refusal
from tailrace.ledger.links.rights import Right
from tailrace.origin.core.events import Filled, WorkerDied, WorkerReady
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.states import STREAM_TRANSITIONS, StreamEvent, StreamState, WorkerState
from tailrace.origin.core.stream_events import (
    AppendEnd,
    AppendNotices,
    CancelRequested,
    ClaimFailed,
    EndRefused,
    EndStored,
    FindStreams,
    FoundStream,
    OrderRun,
    Purpose,
    ReadersSeen,
    RecordEnd,
    ReportToModels,
    RequestClosed,
    RunsStarted,
    StepDurable,
    StreamCommand,
    StreamHappening,
    StreamsAdmitted,
    StreamsFound,
    StreamsRequested,
    TakenOver,
    TakeOver,
    UnfinishedListed,
    WorkerAvailable,
    WorkerGone,
)
from tailrace.origin.core.streams import (
    CANCEL_TRIES,
    IDLE_STREAM_S,
    LOOK_AGAIN_S,
    MAX_DEATHS,
    PAUSED_S,
    StreamCore,
)
from tailrace.origin.generations.stream_log import History
from tailrace.origin.pool.members import PoolMember
from tailrace.origin.pool.policies.policies import GreedyDual
from tailrace.origin.workers.worker_frame import Emission, Step
from tests.origin.stage import READY, RECIPE, A, B, fresh

AWAY = LedgerAway("the ledger does not answer")
STALE = StaleEpoch("another origin has it")

C = TypeVar("C", bound=StreamCommand)


class Origin:
    """A core and two workers, of which none is ready at first."""

    def __init__(self, max_streams: int = 4) -> None:
        member = PoolMember("", is_pinned=True, workers=2)
        self.models = ModelPool([member], GreedyDual(1.0))
        self.models.handle(Filled(), 0.0)
        self.core = StreamCore(max_streams, self.models)
        self.now = 0.0

    def handle(self, event: StreamHappening) -> list[StreamCommand]:
        return self.core.handle(event, self.now)

    def one(self, event: StreamHappening, kind: type[C]) -> C:
        """Return the one command of a kind that follows an event."""
        [found] = [one for one in self.handle(event) if isinstance(one, kind)]
        return found

    def ready(self, worker: int) -> list[StreamCommand]:
        self.models.handle(WorkerReady(worker, READY), self.now)
        return self.handle(WorkerAvailable(worker, is_new=True))

    def lost(self, worker: int) -> list[StreamCommand]:
        self.models.handle(WorkerDied(worker, "killed"), self.now)
        return self.handle(WorkerGone(worker))

    def claiming(self) -> TakeOver:
        """Return the claim of a stream for the first worker."""
        self.ready(0)
        return self.one(StreamsAdmitted([(A, RECIPE)]), TakeOver)

    def state(self) -> StreamState:
        return self.core.table.state_of(A)


@pytest.fixture
def origin() -> Origin:
    return Origin()


# ---- room ----


def test_a_stream_that_is_opened_is_counted_once(origin: Origin) -> None:
    for stream in fresh(4):
        origin.handle(StreamsRequested([stream], Priority.INTERACTIVE))
        before = origin.core.table.count
        origin.handle(StreamsAdmitted([(stream, RECIPE)]))
        assert origin.core.table.count == before, "it is there, and still being opened"
        origin.handle(RequestClosed([stream]))
    assert origin.core.table.count == 4
    with pytest.raises(Overloaded, match="4 streams run or wait, the limit is 4"):
        origin.handle(StreamsRequested(fresh(), Priority.INTERACTIVE))


def test_an_origin_fills_its_last_places_while_other_streams_are_opened(origin: Origin) -> None:
    first, second = fresh(2), fresh(2)
    origin.handle(StreamsRequested(first, Priority.INTERACTIVE))
    origin.handle(StreamsAdmitted([(stream, RECIPE) for stream in first]))
    origin.handle(StreamsRequested(second, Priority.INTERACTIVE))  # the first request goes on
    origin.handle(StreamsAdmitted([(stream, RECIPE) for stream in second]))
    assert origin.core.table.count == 4


def test_a_tenants_streams_are_counted_once_while_they_are_opened(origin: Origin) -> None:
    caller = Caller(tenant="acme", rights=Right.GENERATE, max_unfinished=2)
    recipe = RECIPE.model_copy(update={"tenant": "acme"})
    for stream in fresh(2):
        origin.handle(StreamsRequested([stream], Priority.STANDARD, caller))
        origin.handle(StreamsAdmitted([(stream, recipe)]))
    assert origin.core.table.unfinished("acme") == 2


def test_room_is_free_again_after_a_request_that_was_refused(origin: Origin) -> None:
    streams = fresh(4)
    origin.handle(StreamsRequested(streams, Priority.INTERACTIVE))
    assert origin.core.table.state_of(streams[0]) is StreamState.OPENING
    origin.handle(RequestClosed(streams))
    assert origin.core.table.count == 0


# ---- answers that come late ----


def test_no_second_claim_begins_before_the_first_is_answered(origin: Origin) -> None:
    claim = origin.claiming()
    origin.ready(1)
    assert origin.lost(0) == []
    assert origin.state() is StreamState.RECALLED
    again = origin.one(TakenOver(A, claim.run, 1, History()), TakeOver)
    assert (again.worker, again.run) != (claim.worker, claim.run)
    assert origin.state() is StreamState.CLAIMING


def test_answers_to_an_earlier_claim_change_nothing(origin: Origin) -> None:
    claim = origin.claiming()
    origin.ready(1)
    origin.lost(0)
    again = origin.one(TakenOver(A, claim.run, 1, History()), TakeOver)
    for late in (TakenOver(A, claim.run, 9, History()), ClaimFailed(A, claim.run, AWAY)):
        assert origin.handle(late) == []
    order = origin.one(TakenOver(A, again.run, 2, History()), OrderRun)
    assert (order.worker, order.run, order.stream.epoch) == (1, again.run, 2)
    for late in (TakenOver(A, again.run, 9, History()), ClaimFailed(A, again.run)):
        assert origin.handle(late) == []
    assert (origin.state(), order.stream.epoch) == (StreamState.RUNNING, 2)


def test_a_step_of_a_run_that_is_over_changes_nothing(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    frame = encode(Token("a", 0))
    step = origin.core.table.step(0, Step.of([Emission(claim.run, 0, (5,), (), frame)]).cut())
    origin.lost(0)
    progress = origin.core.table.by_id[A].progress
    origin.handle(StepDurable(0, step))
    assert progress.next_index == 0
    late = origin.core.table.step(0, Step.of([Emission(claim.run, 0, (5,), (), frame)]).cut())
    assert late.streams == []


def test_answers_to_an_earlier_end_change_nothing(origin: Origin) -> None:
    origin.handle(StreamsAdmitted([(A, RECIPE)]))
    first = origin.one(CancelRequested(A), AppendEnd)
    second = origin.one(EndRefused(A, first.nth, STALE), AppendEnd)
    assert origin.handle(EndStored(A, first.nth)) == []
    assert origin.state() is StreamState.ENDING
    origin.handle(EndStored(A, second.nth))
    assert origin.state() is StreamState.ABSENT
    assert origin.handle(EndStored(A, second.nth)) == []


def test_a_late_refusal_of_a_paused_run_leaves_the_next_claim_alone(origin: Origin) -> None:
    recipe = RECIPE.model_copy(update={"unread": "pause", "unread_after_s": 30})
    origin.ready(0)
    claim = origin.one(StreamsAdmitted([(A, recipe)]), TakeOver)
    origin.handle(TakenOver(A, claim.run, 1, History()))
    token = Step.of([Emission(claim.run, 0, (5,), (), encode(Token("a", 0)))])
    step = origin.core.step(0, token.cut())
    late = step.appends(0.0, 0, lambda _stream, _released: 0)[0]
    origin.now += 31
    origin.handle(ReadersSeen(set()))
    assert origin.state() is StreamState.PAUSED
    origin.one(ReadersSeen({A}), FindStreams)
    again = origin.one(StreamsFound(Purpose.WAKE, {A: FoundStream(recipe, 1)}), TakeOver)
    assert (again.worker, again.stream.epoch) == (0, late.epoch)
    origin.handle(StepDurable(0, step, [Refusal(late, AWAY)]))
    assert origin.state() is StreamState.CLAIMING, "its claim has no answer yet"
    origin.one(TakenOver(A, again.run, 2, History()), OrderRun)


def test_only_an_end_that_is_stored_says_that_all_tokens_are_delivered(origin: Origin) -> None:
    """A worker's end that came too late counted readers that the stored end does not count."""
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    origin.handle(CancelRequested(A))
    end = encode(StreamEnd(0, FinishReason.STOP, 0, 2))
    step = origin.core.step(0, Step.of([Emission(claim.run, 0, (), (), end)]).cut())
    [gone] = [one for one in origin.lost(0) if isinstance(one, AppendEnd)]
    step.appends(0.0, 0, lambda _stream, released: released)
    assert gone.stream.is_delivered, "the worker's end, which the ledger refuses"
    assert not origin.one(EndStored(A, gone.nth), RecordEnd).is_delivered


def test_the_end_of_a_worker_says_that_all_tokens_are_delivered(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    end = encode(StreamEnd(0, FinishReason.STOP, 0, 2))
    step = origin.core.step(0, Step.of([Emission(claim.run, 0, (), (), end)]).cut())
    step.appends(0.0, 0, lambda _stream, released: released)
    assert origin.one(StepDurable(0, step), RecordEnd).is_delivered


def test_a_stream_that_is_found_late_has_one_record(origin: Origin) -> None:
    found: dict[bytes, FoundStream | None] = {A: FoundStream(RECIPE, 3)}
    origin.handle(StreamsAdmitted([(A, RECIPE)]))
    here = origin.core.table.by_id[A]
    for purpose in (Purpose.RESTORE, Purpose.WAKE):
        origin.handle(StreamsFound(purpose, found))
    assert origin.core.table.by_id[A] is here
    end = origin.one(StreamsFound(Purpose.CANCEL, found), AppendEnd)
    assert end.stream is here


# ---- runs that fail ----


def failing(origin: Origin, worker: int, run: int, index: int = 0) -> StepDurable:
    """Return the report of a step in which a run fails, and may succeed if it is repeated."""
    end = StreamEnd(0, FinishReason.FAILED, index, 2, "NaN", retryable=True)
    made = Step.of([Emission(run, index, (), (), encode(end), can_retry=True)])
    return StepDurable(worker, origin.core.step(worker, made.cut()))


def test_a_failed_run_goes_to_another_worker_and_its_failure_is_not_stored(
    origin: Origin,
) -> None:
    claim = origin.claiming()
    origin.ready(1)
    origin.handle(TakenOver(A, claim.run, 1, History()))
    durable = failing(origin, 0, claim.run)
    assert durable.step.streams == []
    assert durable.step.emissions.frames == []
    again = origin.one(durable, TakeOver)
    assert (again.worker, again.run != claim.run) == (1, True)
    told = origin.one(TakenOver(A, again.run, 2, History()), AppendNotices)
    assert [(one.code, one.index) for one in told.notices] == [("retried", 0)]


def test_the_second_failure_of_a_stream_is_stored(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    again = origin.one(failing(origin, 0, claim.run), TakeOver)
    assert again.worker == 0, "there is no other worker"
    history = History(1, notices=[Notice("retried", "", 0)])
    origin.handle(TakenOver(A, again.run, 2, history))
    durable = failing(origin, 0, again.run, 1)
    assert len(durable.step.streams) == 1
    origin.handle(durable)
    assert origin.state() is StreamState.ABSENT


def test_a_stream_that_is_cancelled_is_not_retried(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    origin.handle(CancelRequested(A))
    assert len(failing(origin, 0, claim.run).step.streams) == 1


def test_a_stream_that_is_cancelled_while_its_failure_is_reported_is_cancelled(
    origin: Origin,
) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    durable = failing(origin, 0, claim.run)
    origin.handle(CancelRequested(A))
    assert origin.one(durable, AppendEnd).end.reason is FinishReason.CANCELLED


def test_a_failure_of_a_run_whose_worker_is_lost_meanwhile_changes_nothing(
    origin: Origin,
) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    durable = failing(origin, 0, claim.run)
    origin.lost(0)
    assert {type(one) for one in origin.handle(durable)} <= {ReportToModels}
    assert origin.state() is StreamState.WAITING
    assert not origin.core.table.by_id[A].is_retried


def test_a_retry_counts_as_no_death_of_a_worker(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    stream = origin.core.table.by_id[A]
    stream.standing.deaths = stream.standing.blamed = 4
    origin.handle(failing(origin, 0, claim.run))
    assert (stream.standing.deaths, stream.standing.blamed) == (0, 0)


# ---- orders to cancel ----


def test_a_cancel_waits_for_the_answer_to_a_claim(origin: Origin) -> None:
    claim = origin.claiming()
    assert origin.handle(CancelRequested(A)) == []
    end = origin.one(TakenOver(A, claim.run, 1, History()), AppendEnd)
    assert end.end.reason is FinishReason.CANCELLED


def test_a_cancel_is_tried_a_few_times_and_then_when_the_ledger_lists_streams(
    origin: Origin,
) -> None:
    origin.handle(StreamsAdmitted([(A, RECIPE)]))
    end = origin.one(CancelRequested(A), AppendEnd)
    for _ in range(CANCEL_TRIES - 1):
        end = origin.one(EndRefused(A, end.nth, STALE), AppendEnd)
    assert not [c for c in origin.handle(EndRefused(A, end.nth, STALE)) if isinstance(c, AppendEnd)]
    assert origin.state() is StreamState.DEFERRED
    end = origin.one(UnfinishedListed([]), AppendEnd)
    assert end.end.reason is FinishReason.CANCELLED


def test_a_cancel_comes_before_any_other_end(origin: Origin) -> None:
    claim = origin.claiming()
    origin.handle(TakenOver(A, claim.run, 1, History()))
    origin.handle(CancelRequested(A))
    origin.now += IDLE_STREAM_S  # nobody has read it for so long that it ends as failed
    end = origin.one(ReadersSeen(set()), AppendEnd)
    assert end.end.reason is FinishReason.CANCELLED


def test_an_end_that_another_origin_has_to_write_is_left_to_it(origin: Origin) -> None:
    recipe = RECIPE.model_copy(update={"model": "other"})
    origin.ready(0)
    claim = origin.one(StreamsAdmitted([(A, recipe)]), TakeOver)
    end = origin.one(TakenOver(A, claim.run, 1, History()), AppendEnd)
    assert end.end.reason is FinishReason.ORIGIN_LOST
    origin.handle(EndRefused(A, end.nth, STALE))
    assert origin.state() is StreamState.ABSENT


# ---- streams of other origins ----


def test_a_stream_that_is_being_opened_is_not_restored(origin: Origin) -> None:
    origin.handle(StreamsRequested([A], Priority.STANDARD))
    [looked_for] = [
        one for one in origin.handle(UnfinishedListed([A, B])) if isinstance(one, FindStreams)
    ]
    assert looked_for.streams == [B]


def test_a_stream_that_another_origin_took_is_taken_back_only_if_nothing_is_made_of_it(
    origin: Origin,
) -> None:
    recipe = RECIPE.model_copy(update={"unread": "pause", "unread_after_s": 30})
    origin.ready(0)
    claim = origin.one(StreamsAdmitted([(A, recipe)]), TakeOver)
    assert origin.handle(ReadersSeen({A})) == []
    origin.handle(ClaimFailed(A, claim.run))
    for made in (5, 6):
        assert origin.handle(ReadersSeen({A})) == []
        origin.now += LOOK_AGAIN_S
        origin.one(ReadersSeen({A}), FindStreams)
        origin.handle(StreamsFound(Purpose.WAKE, {A: FoundStream(recipe, 2, made)}))
        assert origin.state() is StreamState.ABSENT
    origin.now += LOOK_AGAIN_S
    origin.one(ReadersSeen({A}), FindStreams)
    origin.one(StreamsFound(Purpose.WAKE, {A: FoundStream(recipe, 2, 6)}), TakeOver)


def found_again(origin: Origin, epoch: int) -> TakeOver:
    """Return the claim of a stream that is found in the ledger while it is read here."""
    if origin.models.workers[0].state is WorkerState.STARTING:
        origin.ready(0)
    recipe = RECIPE.model_copy(update={"unread": "pause", "unread_after_s": 30})
    return origin.one(StreamsFound(Purpose.WAKE, {A: FoundStream(recipe, epoch)}), TakeOver)


def kill_a_worker(origin: Origin, claim: TakeOver) -> list[StreamCommand]:
    """Begin a claimed run, and report that its worker died of it."""
    origin.handle(TakenOver(A, claim.run, claim.stream.epoch + 1, History()))
    origin.handle(RunsStarted(claim.worker, [claim.run]))
    return origin.lost(claim.worker)


def leave(origin: Origin, state: StreamState) -> None:
    """Have a waiting stream paused here (PAUSED), or taken by another origin (ABSENT)."""
    if state is StreamState.PAUSED:
        origin.now += 31
        origin.handle(ReadersSeen(set()))
    else:
        origin.ready(0)
        origin.handle(ClaimFailed(A, origin.core.table.by_id[A].run))
    assert origin.state() is state


@pytest.mark.parametrize("state", [StreamState.PAUSED, StreamState.ABSENT])
def test_a_stream_that_kills_workers_is_ended_although_it_leaves_after_each_death(
    origin: Origin, state: StreamState
) -> None:
    for epoch in range(1, MAX_DEATHS):
        kill_a_worker(origin, found_again(origin, epoch))
        leave(origin, state)
    commands = kill_a_worker(origin, found_again(origin, MAX_DEATHS))
    [end] = [one for one in commands if isinstance(one, AppendEnd)]
    assert end.end.message == f"{MAX_DEATHS} workers died while they ran this stream"


def test_a_stream_that_has_had_output_elsewhere_is_no_longer_blamed(origin: Origin) -> None:
    kill_a_worker(origin, found_again(origin, 1))
    leave(origin, StreamState.ABSENT)
    claim = found_again(origin, 3)
    assert claim.stream.standing.blamed == 1
    origin.handle(TakenOver(A, claim.run, 4, History(1, last_output=0)))
    assert claim.stream.standing.blamed == 0


@pytest.mark.parametrize(("epoch", "is_ours"), [(1, True), (2, False)])
def test_a_stream_that_was_paused_for_too_long_is_cancelled_unless_another_origin_took_it(
    origin: Origin, epoch: int, is_ours: bool
) -> None:
    recipe = RECIPE.model_copy(update={"unread": "pause", "unread_after_s": 30})
    origin.handle(StreamsAdmitted([(A, recipe)]))
    origin.now += 31
    origin.handle(ReadersSeen(set()))
    assert origin.state() is StreamState.PAUSED
    origin.now += PAUSED_S
    late = origin.one(ReadersSeen(set()), FindStreams)
    assert (late.purpose, late.streams) == (Purpose.EXPIRE, [A])
    done = origin.handle(StreamsFound(late.purpose, {A: FoundStream(recipe, epoch)}))
    assert any(isinstance(one, AppendEnd) for one in done) is is_ours
    assert origin.state() is (StreamState.ENDING if is_ours else StreamState.ABSENT)


def test_a_stream_that_cannot_be_read_is_looked_for_once(origin: Origin) -> None:
    origin.one(UnfinishedListed([A]), FindStreams)
    origin.handle(StreamsFound(Purpose.RESTORE, {A: None}))
    assert origin.state() is StreamState.LEFT
    assert origin.handle(UnfinishedListed([A])) == []
    origin.handle(UnfinishedListed([]))
    assert origin.state() is StreamState.ABSENT


# ---- the table of states ----


def test_every_state_can_be_reached_and_left() -> None:
    after: dict[StreamState, set[StreamState]] = {}
    for (before, _), state in STREAM_TRANSITIONS.items():
        after.setdefault(before, set()).add(state)

    def reached(first: StreamState) -> set[Any]:
        seen, new = {first}, {first}
        while new:
            new = set().union(*(after[one] for one in new)) - seen
            seen |= new
        return seen

    assert reached(StreamState.ABSENT) == set(StreamState)
    assert all(StreamState.ABSENT in reached(state) for state in StreamState)


def test_every_event_means_something_somewhere() -> None:
    assert {event for _, event in STREAM_TRANSITIONS} == set(StreamEvent)


@pytest.mark.parametrize("state", [state for state in StreamState if state is not StreamState.LEFT])
def test_an_order_to_cancel_is_never_too_late_while_a_stream_is_here(state: StreamState) -> None:
    assert (state, StreamEvent.CANCELLED) in STREAM_TRANSITIONS
