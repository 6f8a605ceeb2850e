"""The core of streams: decides where each stream is generated. Events in, commands out.

A caller reports each event and its time (`handle`), and carries out the returned commands. The
answer to a command is reported as another event. If an answer comes late, the states in `states.py`
show that nothing waits for it any more, and it is ignored.

A run is a stream on one worker under one epoch. When a worker dies, its streams wait for other
workers, which continue them from their logs in the ledger. Several origins may share the ledger:
the origin that took a stream over last is its producer, and appends of the others are refused.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from tailrace.ledger.errors import (
    Damaged,
    FrameError,
    LedgerFull,
    NotFound,
    StaleEpoch,
    StreamFull,
    TailraceError,
    Unavailable,
)
from tailrace.ledger.frame import TAG_OFFSET, FinishReason, Priority, Unread
from tailrace.ledger.interface import Refusal
from tailrace.origin.core import stream_events as events
from tailrace.origin.core.budgets import Budgets, has_budget
from tailrace.origin.core.continuation import notices, why_not
from tailrace.origin.core.events import RequestArrived, RequestEnded, WorkerProved
from tailrace.origin.core.load_shedding import LoadShedding, Readings
from tailrace.origin.core.model import Worker
from tailrace.origin.core.poison_streams import judge, worker_for
from tailrace.origin.core.pool import ModelPool
from tailrace.origin.core.quotas import Quotas, tenant_of
from tailrace.origin.core.states import StreamEvent, StreamState, WorkerState
from tailrace.origin.core.step import END, FailedRun, StepFrames, end_reason
from tailrace.origin.core.stream import (
    TEXT,
    UNKNOWN_EPOCH,
    PendingEnd,
    Stream,
)
from tailrace.origin.core.stream_events import Purpose, StreamCommand, StreamHappening
from tailrace.origin.core.stream_table import Opening, Paused, StreamTable
from tailrace.origin.core.time_spent import CommitTime
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import CancelRun, Emissions, Frame, SetUnread

MOST_WAIT_S = 60.0
"""Seconds for which a stream may wait for a worker to begin it; longer waits raise the load
level."""
IDLE_STREAM_S = 21_600.0
"""Seconds after which a stream that has neither a reader nor output is ended."""
UNREAD_GRACE_S = 5.0
"""Seconds after which a stream without a reader gives way to others. Within this time its reader
may come back over another connection."""
PAUSED_S = 86_400.0
"""Seconds after which a paused stream is cancelled."""
MAX_PAUSED = 4096
"""Maximum number of paused streams; beyond it, those that were paused first are cancelled."""
MAX_DEATHS = 5
"""Number of blamed deaths in a row after which a stream is ended as failed. A stream is blamed for
the death of a worker if no other stream can be the cause."""
CANCEL_TRIES = 3
"""Maximum number of attempts in a row to write a stream's end, which fails if another origin takes
the stream over between our takeover and our write. After these attempts the stream is deferred."""
LOOK_AGAIN_S = 30.0
"""Interval in seconds between two look-ups in the ledger of a stream that a client reads here
although another origin took it."""
IS_HERE = -1
"""Value of `Look.found` for a stream that was at this origin when it was last looked up."""

GENERATING = (StreamState.RUNNING, StreamState.CANCELLING)
"""States in which a worker has the order to generate a stream."""


class Look(NamedTuple):
    """The last look-up in the ledger of a stream that is read here.

    `found` is the next index of the stream at that time. It is None before the first answer, and
    IS_HERE for a stream that was at this origin.
    """

    at_s: float
    found: int | None


class StreamCore:
    """Decides about the streams of one origin, whose records are in `table`.

    `shedding` has the load level, and `quotas` the limits of tenants. Models and workers have a
    core of their own (`ModelPool`), whose records are read here; that core must get each event
    before this one.
    """

    def __init__(
        self,
        max_streams: int,
        models: ModelPool,
        *,
        paused_s: float = PAUSED_S,
        most_wait_s: float = MOST_WAIT_S,
        idle_s: float = IDLE_STREAM_S,
        cold_wait_s: float | None = None,
    ) -> None:
        """Create a core without streams.

        Args:
            max_streams: Maximum number of streams that are here or are being opened.
            models: The models and workers of the origin.
            paused_s: Seconds after which a paused stream is cancelled.
            most_wait_s: Seconds that a stream may wait for a worker to begin it. A longer wait
                raises the load level.
            idle_s: Seconds without reader and output after which a stream is ended.
            cold_wait_s: Maximum seconds for which a new stream waits for its model to load; None
                for no limit.
        """
        self.table = StreamTable(max_streams)
        self.shedding = LoadShedding(most_wait_s)
        self.quotas = Quotas()
        self.budgets = Budgets()
        self._models = models
        self._paused_s, self._idle_s, self._cold_wait_s = paused_s, idle_s, cold_wait_s
        self._groups = itertools.count(1)  # numbers of the groups of suspects, see `judge`
        self._commits = defaultdict[int, CommitTime](CommitTime)  # by worker
        self._looks: dict[bytes, Look] = {}
        """Last look-up of each stream that is read here; see `Look`."""
        self._now = -inf
        self._commands: list[StreamCommand] = []
        self._handlers: dict[type[StreamHappening], Callable[[Any], object]] = {
            events.StreamsRequested: self._request,
            events.RequestClosed: self._close,
            events.StreamsAdmitted: self._admit,
            events.UnfinishedListed: self._list_unfinished,
            events.StreamsFound: self._found,
            events.FindFailed: self._find_failed,
            events.CancelRequested: self._cancel,
            events.SteerRequested: self._steer,
            events.WakeRequested: lambda event: self._wake([event.stream]),
            events.TakenOver: self._taken_over,
            events.NoticesLogged: self._notices_logged,
            events.ClaimFailed: self._claim_failed,
            events.OrderRefused: self._order_refused,
            events.StepDurable: self._step_durable,
            events.EndStored: self._end_stored,
            events.EndRefused: self._end_refused,
            events.RunsStarted: self._runs_started,
            events.WorkerAvailable: self._worker_available,
            events.WorkerGone: self._worker_gone,
            events.ReadersSeen: self._readers_seen,
            events.LoadMeasured: self._load_measured,
        }

    def handle(self, event: StreamHappening, now: float) -> list[StreamCommand]:
        """Take note of an event, and return the commands to be carried out now, in order.

        Raises:
            Overloaded: There is no room for new streams, or for another Steer order of a stream.
            TooManyRequests: The tenant of new streams has reached its quota.
            Conflict: A stream that was to be steered was cancelled.
            Unavailable: A stream that was to be steered is not generated here.
        """
        self._now = max(self._now, now)
        commands: list[StreamCommand] = []
        self._commands = commands
        self._handlers[type(event)](event)
        if self.table.may_place and self.table.has_waiting:
            self._place()
        self.table.may_place = False
        return commands

    def step(self, worker: int, emissions: Emissions) -> StepFrames:
        """Return the emissions of a worker that are to be stored; report the result as StepDurable.

        Emissions of runs that are over are left out. So are all emissions in this step of a run
        that fails for the first time here, its end included: another run makes them again from the
        stream's log, and no reader has seen them. Their last text may differ from that of an
        uninterrupted run, because the worker of a failed run sends the text that it had held back.
        """
        step = self.table.step(worker, emissions)
        if not emissions.failed:
            return step
        retried = [one for one in step.failures() if self._may_retry(one.stream)]
        return step.without(retried) if retried else step

    # ---- room ----

    def _request(self, event: events.StreamsRequested) -> None:
        """Reserve room for all streams of a request, or for none."""
        streams, tenant = len(event.streams), tenant_of(event.caller)
        self.shedding.admit(event.priority)
        self.table.require_room(streams, event.priority)
        self.quotas.admit(event.caller, streams, self.table.unfinished(tenant), self._now)
        if event.caller is not None and has_budget(event.caller):
            running = self.table.tokens_of(event.caller.key)
            self.budgets.admit(event.caller, running, self._now, event.now_ms)
        for stream in event.streams:
            if self.table.may(stream, StreamEvent.OPENED):
                self.table.opening[stream] = Opening(event.priority, tenant)

    def _close(self, event: events.RequestClosed) -> None:
        for stream in event.streams:
            self.table.opening.pop(stream, None)

    # ---- streams that come ----

    def _admit(self, event: events.StreamsAdmitted) -> None:
        for id_, recipe in event.streams:
            if not self.table.may(id_, StreamEvent.ADMITTED):
                continue  # the stream has a record already: it was found in the ledger
            self.quotas.charge(recipe.tenant, len(recipe.prompt_ids), self._now)
            is_up = self._models.is_up(recipe.model) and not event.has_waited
            self._order(events.RecordArrival(id_, recipe.model, is_up))
            stream = self._add(id_, recipe, StreamEvent.ADMITTED)
            stream.asked_s, stream.unread = self._now, not event.is_read

    def _list_unfinished(self, event: events.UnfinishedListed) -> None:
        """Try deferred streams again, and look up unfinished streams that are unknown here."""
        self._ledger_is_back()
        self.table.left.intersection_update(event.streams)
        unknown = [one for one in event.streams if self.table.state_of(one) is StreamState.ABSENT]
        if unknown and (wanted := unknown[: self.table.room]):
            self._order(events.FindStreams(Purpose.RESTORE, wanted))

    def _found(self, event: events.StreamsFound) -> None:
        take = {
            Purpose.RESTORE: self._restore,
            Purpose.WAKE: self._wake_found,
            Purpose.CANCEL: self._cancel_found,
            Purpose.EXPIRE: self._expire_found,
        }[event.purpose]
        for stream, found in event.found.items():
            take(stream, found)

    def _restore(self, stream: bytes, found: events.FoundStream | None) -> None:
        """Continue a stream whose origin is gone, or pause it if it can wait for a reader."""
        if self.table.state_of(stream) is not StreamState.ABSENT:
            return
        if found is None:
            self.table.left.add(stream)
        elif found.recipe.unread == Unread.PAUSE.word and self.table.is_crowded:
            self.table.paused[stream] = Paused(self._now, found.epoch)
        else:
            self._add(stream, found.recipe, StreamEvent.FOUND, found.epoch)

    def _wake(self, streams: Iterable[bytes]) -> None:
        """Look up streams that are read here but not generated here, if there is room for them.

        Such a stream may be paused, here or at another origin. It may also be generated by another
        origin, which does not know that the stream has readers here.
        """
        if wanted := list(streams)[: self.table.room]:
            for stream in wanted:
                last = self._looks.get(stream)
                self._looks[stream] = Look(self._now, None if last is None else last.found)
            self._order(events.FindStreams(Purpose.WAKE, wanted))

    def _wake_found(self, stream: bytes, found: events.FoundStream | None) -> None:
        if found is None:
            self.table.paused.pop(stream, None)
        elif found.recipe.unread != Unread.RUN.word and self.table.may(stream, StreamEvent.FOUND):
            look = self._looks.get(stream)
            # Two origins with readers of one stream would take the stream from each other again and
            # again. So this origin takes the stream back only if the other origin has added no
            # frame since the last look.
            if look is None or look.found in (None, found.next_index):
                self._add(stream, found.recipe, StreamEvent.FOUND, found.epoch)
            else:
                self._looks[stream] = Look(look.at_s, found.next_index)

    def _find_failed(self, event: events.FindFailed) -> None:
        """Repeat failed look-ups of streams that are read; other look-ups are repeated anyway."""
        for stream in event.streams if event.purpose is Purpose.WAKE else ():
            self._looks.pop(stream, None)

    def _cancel_found(self, stream: bytes, found: events.FoundStream | None) -> None:
        if (known := self.table.by_id.get(stream)) is not None:
            self._cancel_here(known)
        elif found is None:
            self.table.paused.pop(stream, None)
        elif self.table.may(stream, StreamEvent.CANCELLED):
            # The stream gets its record now, so that no later event creates a second one.
            here = self._add(stream, found.recipe, StreamEvent.CANCELLED, found.epoch)
            here.is_cancelled = True
            self._write_end(here, PendingEnd(FinishReason.CANCELLED))

    def _expire_found(self, stream: bytes, found: events.FoundStream | None) -> None:
        """Cancel a stream that was paused here for too long, unless another origin took it."""
        paused = self.table.paused.get(stream)
        if paused is None:
            return
        if found is not None and found.epoch > paused.epoch != UNKNOWN_EPOCH:
            del self.table.paused[stream]
            return
        self._cancel_found(stream, found)

    def _add(
        self, id_: bytes, recipe: Recipe, event: StreamEvent, epoch: int | None = None
    ) -> Stream:
        """Create the record of a stream; `epoch` is the epoch of its last producer, if any."""
        stream = self.table.add(id_, recipe, event, self._now, epoch)
        model = self._models.serving(recipe.model)
        if stream.state is StreamState.WAITING and model is not None:
            self._order(events.ReportToModels(RequestArrived(model.name, id_, begun=True)))
        return stream

    # ---- streams that wait ----

    def _wait_again(self, streams: Iterable[Stream], event: StreamEvent) -> None:
        """Queue streams that have lost their worker.

        Such streams come before those that wait for their first token, because the readers of a
        stream that has begun see a pause. Suspects come last, since the other streams are less
        likely to kill a worker.
        """
        waiting = [stream for stream in streams if self.table.turn(stream, event)]
        for stream in waiting:
            stream.progress.time.queued(self._now)
        others = [stream for stream in waiting if stream.standing.group is None]
        others.sort(key=lambda stream: not stream.standing.proven)
        for stream in reversed(others):
            self.table.queue(stream, is_first=True)
        for stream in waiting:
            if stream.standing.group is not None:
                self.table.queue(stream)

    def _ledger_is_back(self) -> None:
        deferred = [one for one in self.table.by_id.values() if one.state is StreamState.DEFERRED]
        for stream in reversed(deferred):
            if stream.is_cancelled:
                self._end(stream, FinishReason.CANCELLED)
            elif self.table.turn(stream, StreamEvent.LEDGER_BACK):
                self.table.queue(stream, is_first=True)

    def _place(self) -> None:
        """Give waiting streams, the most urgent class first, to workers that may take them."""
        ready = [one.number for one in self._models.workers if one.state is WorkerState.READY]
        company = self.table.standings(ready)
        for stream in self.table.waiting if company else ():
            model = stream.recipe.model
            may_take = {
                worker: standings
                for worker, standings in company.items()
                if self._models.may_take(worker, model)
            }
            if len(may_take) > 1 and stream.failed_on is not None:
                may_take.pop(stream.failed_on, None)
            worker = worker_for(stream.standing, may_take)
            if worker is None:
                continue  # no worker may take this stream yet, but one may take a later stream
            self.table.place(stream, worker)
            company[worker].append(stream.standing)
            self._order(events.TakeOver(stream, stream.run, worker))

    # ---- claims ----

    def _claimed(self, stream: bytes, run: int) -> Stream | None:
        """Return the stream whose claim for `run` was answered; None if that claim is obsolete."""
        known = self.table.by_id.get(stream)
        is_asked = known is not None and known.run == run
        states = (StreamState.CLAIMING, StreamState.RECALLED)
        return known if is_asked and known is not None and known.state in states else None

    def _taken_over(self, event: events.TakenOver) -> None:
        """Begin a claimed run, after notices if there are any; or end or requeue the stream."""
        stream = self._claimed(event.stream, event.run)
        if stream is None:
            return
        stream.epoch, stream.has_producer = event.epoch, True
        if stream.state is StreamState.RECALLED:
            self._release(stream)
            return
        history, worker = event.history, stream.worker
        ready = None if worker is None else self._models.workers[worker].ready
        if history.has_end:
            self._leave(stream, StreamEvent.TAKEN)
        elif ready is None:
            self.table.unplace(stream)
            self._wait_again([stream], StreamEvent.UNPLACED)
        else:
            inserts = bool(stream.recipe.inserts(history))
            if durable := stream.steering.begin(len(history.steered), inserts=inserts):
                self._order(events.AnswerSteers(durable))
            stream.use_engine(ready.fingerprint, history)
            reason = why_not(stream.recipe, ready, history)
            stream.is_retried = stream.is_retried or bool(history.retried)
            told = notices(stream.recipe, ready, history, stream.failure)
            if reason is not None:
                self._end(stream, FinishReason.ORIGIN_LOST, reason)
            elif told:
                order = events.AppendNotices(stream.id, stream.run, stream.epoch, told, history)
                self._order(order)
            else:
                self._begin(stream, history)

    def _notices_logged(self, event: events.NoticesLogged) -> None:
        stream = self._claimed(event.stream, event.run)
        if stream is None:
            return
        if stream.state is StreamState.RECALLED:
            self._release(stream)
        else:
            self._begin(stream, event.history)

    def _claim_failed(self, event: events.ClaimFailed) -> None:
        stream = self._claimed(event.stream, event.run)
        if stream is not None:
            self._refused(stream, event.error)

    def _release(self, stream: Stream) -> None:
        """Cancel or queue a stream whose claim was answered, but is not needed any more."""
        if stream.is_cancelled:
            self._end(stream, FinishReason.CANCELLED)
        else:
            self._wait_again([stream], StreamEvent.RELEASED)

    def _begin(self, stream: Stream, history: History) -> None:
        """Send the worker of a claimed stream its order to generate it."""
        assert stream.worker is not None, "a stream is claimed for no worker"
        ready = self._models.workers[stream.worker].ready
        kind = "" if ready is None else ready.kind
        self.table.turn(stream, StreamEvent.CLAIMED)
        stream.progress.go_on(history, self._now)
        stream.standing.go_on(history.last_output)
        commits = self._commits[stream.worker]
        stream.progress.time.placed(self._now, commits, is_begun=history.is_begun)
        stream.timed_ms = history.at_ms
        follow_up: list[Frame] = [*stream.steering.orders]
        if stream.unread and kind != TEXT:
            follow_up.append(SetUnread(unread=True))
        order = events.OrderRun(stream.worker, stream.run, stream, history, kind, follow_up)
        self._order(order)

    def _order_refused(self, event: events.OrderRefused) -> None:
        stream = self.table.by_id.get(event.stream)
        if stream is not None and stream.run == event.run and stream.state in GENERATING:
            message = "the order to generate this stream is too large for a frame"
            self._end(stream, FinishReason.FAILED, message)

    def _refused(self, stream: Stream, error: TailraceError | None) -> None:
        """End, defer, drop or requeue a stream whose claim or frame the ledger has refused."""
        self.table.unplace(stream)
        stream.progress.time.queued(self._now)
        match error:
            case StreamFull():
                self._end(stream, FinishReason.LENGTH, error.message)
            case LedgerFull():
                self._end(stream, FinishReason.FAILED, error.message, retryable=True)
            case Damaged() | FrameError():
                self._log("error", "stream.damaged", stream, error=str(error))
                reason = "the stored frames of this stream are damaged"
                self._end(stream, FinishReason.FAILED, reason)
            case Unavailable():
                self._defer(stream, error)
            case _ if stream.is_cancelled:  # it ends, even if another origin generates it now
                self._end(stream, FinishReason.CANCELLED)
            case None | NotFound() | StaleEpoch():
                self._leave(stream, StreamEvent.TAKEN)
            case _ if stream.state is StreamState.RECALLED:
                self._release(stream)
            case _:
                if not self._blame(stream, "sent frames that do not fit"):
                    self.table.turn(stream, StreamEvent.UNPLACED)
                    self.table.queue(stream)

    def _defer(self, stream: Stream, error: TailraceError) -> None:
        """Defer a stream, to try it again when the ledger answers again.

        The ledger may have carried out the takeover, though its answer was lost.
        """
        if self.table.turn(stream, StreamEvent.LEDGER_AWAY):
            self._log("warning", "stream.deferred", stream, error=str(error))
            stream.has_producer, stream.epoch = True, UNKNOWN_EPOCH

    # ---- what clients order ----

    def _cancel(self, event: events.CancelRequested) -> None:
        stream = self.table.by_id.get(event.stream)
        if stream is None:
            self._order(events.FindStreams(Purpose.CANCEL, [event.stream]))
        else:
            self._cancel_here(stream)

    def _cancel_here(self, stream: Stream) -> None:
        """Accept an order to cancel a stream; its worker or this origin writes the end."""
        before, stream.is_cancelled = stream.state, True
        self.table.turn(stream, StreamEvent.CANCELLED)
        match before:
            case StreamState.WAITING:
                self._write_end(stream, PendingEnd(FinishReason.CANCELLED))
            case StreamState.CLAIMING:
                self.table.unplace(stream)
            case StreamState.RUNNING:
                self._send_cancel(stream, is_final=True)

    def _steer(self, event: events.SteerRequested) -> None:
        stream = self.table.by_id.get(event.stream)
        if stream is None:
            raise Unavailable(
                "another origin generates this stream, or soon will",
                hint="send the request to an edge of that origin",
            )
        if stream.is_cancelled:
            raise stream.not_taken()
        order = stream.steering.add(event.ids, event.ticket)
        if stream.state is StreamState.RUNNING and stream.worker is not None:
            self._order(events.SendFrame(stream.worker, stream.run, order))

    # ---- ends ----

    def _end(
        self,
        stream: Stream,
        reason: FinishReason,
        message: str | None = None,
        *,
        retryable: bool = False,
    ) -> None:
        """Write a stream's end, because no worker can; an accepted cancel replaces `reason`."""
        self.table.unplace(stream)
        stream.progress.time.queued(self._now)
        if self.table.turn(stream, StreamEvent.END_DUE):
            end = PendingEnd(reason, message, retryable)
            if stream.is_cancelled:
                end = PendingEnd(FinishReason.CANCELLED)
            self._write_end(stream, end)

    def _write_end(self, stream: Stream, end: PendingEnd) -> None:
        stream.end, stream.end_tries = end, 0
        self._try_end(stream)

    def _try_end(self, stream: Stream) -> None:
        stream.end_tries += 1
        stream.end_nth += 1
        self._order(events.AppendEnd(stream, stream.end_nth, stream.end))

    def _ending(self, stream: bytes, nth: int) -> Stream | None:
        """Return the stream that attempt `nth` was to end; None if a later attempt replaced it."""
        known = self.table.by_id.get(stream)
        if known is None or known.state is not StreamState.ENDING or known.end_nth != nth:
            return None
        return known

    def _end_stored(self, event: events.EndStored) -> None:
        if (stream := self._ending(event.stream, event.nth)) is not None:
            stream.epoch = event.epoch or stream.epoch
            self._finish(stream, stream.end.reason)

    def _end_refused(self, event: events.EndRefused) -> None:
        """Try again to write an end that was refused, or leave the stream to another origin.

        If another origin has taken the stream over, the end is written only for a cancel; otherwise
        that origin continues the stream.
        """
        stream = self._ending(event.stream, event.nth)
        if stream is None:
            return
        match event.error:
            case NotFound():  # the stream was deleted, or has expired
                self._end_stored(events.EndStored(event.stream, event.nth))
            case Damaged():
                # Nothing is written: readers get the error from the ledger.
                self._log("error", "stream.damaged", stream, error=event.error.message)
                self._finish(stream, FinishReason.FAILED, StreamEvent.DAMAGED)
            case Unavailable():
                self._defer(stream, event.error)
            case StaleEpoch() if not stream.is_cancelled:
                self._leave(stream, StreamEvent.TAKEN)
            case _ if stream.end_tries < CANCEL_TRIES:
                if stream.is_cancelled:
                    stream.end = PendingEnd(FinishReason.CANCELLED)
                self._try_end(stream)
            case _:
                self._defer(stream, event.error)

    def _finish(
        self,
        stream: Stream,
        reason: FinishReason,
        event: StreamEvent = StreamEvent.ENDED,
        *,
        is_delivered: bool = False,
    ) -> None:
        """Record the end of a stream, keep its summary, and drop its record.

        `is_delivered` says that the stored usage counts all tokens as delivered.
        """
        stream.progress.time.ended(self._now)
        self._order(events.RecordEnd(stream, reason, is_delivered))
        self.budgets.ended(stream.recipe.key, stream.used)
        self.table.remember(stream, reason, self._now)
        self._leave(stream, event)

    def _leave(self, stream: Stream, event: StreamEvent) -> None:
        """Drop the record of a stream that no longer runs or waits here; fail its Steer orders."""
        if not self.table.drop(stream, event, self._now):
            return
        if untaken := stream.steering.drop():
            self._order(events.AnswerSteers(untaken, stream.not_taken()))
        if (model := self._models.serving(stream.recipe.model)) is not None:
            self._order(events.ReportToModels(RequestEnded(model.name, stream.id)))

    # ---- workers ----

    def _runs_started(self, event: events.RunsStarted) -> None:
        for stream in self.table.on(event.worker):
            stream.standing.begun = stream.run in event.runs

    def _worker_available(self, event: events.WorkerAvailable) -> None:
        self.table.may_place = True
        if event.is_new and self.shedding.level:
            self._send_mode(self._models.workers[event.worker])

    def _worker_gone(self, event: events.WorkerGone) -> None:
        """Queue the streams of a worker that is gone; after a death, blame a poison stream."""
        orphans = self.table.on(event.worker)
        for stream in orphans:
            self.table.unplace(stream)
        standings = [stream.standing for stream in orphans]
        blamed = judge(standings, self._groups) if event.is_death else []
        homeless = []
        for stream in orphans:
            if stream.state is StreamState.CLAIMING:
                self.table.turn(stream, StreamEvent.RECALLED)
            elif stream.is_cancelled:
                self._end(stream, FinishReason.CANCELLED)
            elif stream.standing not in blamed or not self._blame(stream, "died while they ran"):
                homeless.append(stream)
        self._wait_again(homeless, StreamEvent.UNPLACED)

    def _blame(self, stream: Stream, fate: str) -> bool:
        """Blame a stream for a lost worker or run; return True if it is ended for that."""
        stream.standing.blamed += 1
        if stream.standing.blamed < MAX_DEATHS:
            return False
        message = f"{stream.standing.blamed} workers {fate} this stream"
        self._end(stream, FinishReason.FAILED, message)
        return True

    def _step_durable(self, event: events.StepDurable) -> None:
        """Note which frames of a step are durable, and which were refused."""
        worker, now = event.worker, self._now
        self._commits[worker].seconds += event.took_s
        for refusal in event.refusals:
            self._append_refused(worker, refusal)
        emissions, revision = event.step.emissions, self.table.next_revision()
        if emissions.steered:
            self._steers_durable(worker, event.step)
        gaps: list[tuple[str, float]] = []
        firsts: list[tuple[str, str, float, str | None]] = []
        columns = emissions.runs, emissions.indexes, emissions.ids, emissions.frames
        for stream, run, index, ids, frame in zip(event.step.streams, *columns, strict=True):
            if stream.run != run or stream.worker != worker:
                continue  # the stream was taken off the worker meanwhile
            if not stream.standing.proven:
                stream.standing.prove()
                self.table.may_place = True  # a suspect may have waited for this stream's output
            self.quotas.charge(stream.recipe.tenant, len(ids), now)
            stream.progress.released(index, len(ids), now, revision)
            if frame[TAG_OFFSET] == END:
                self._finish(stream, end_reason(frame), is_delivered=stream.is_delivered)
                continue
            if stream.released_s is not None:
                gaps.append((stream.recipe.priority, stream.released_s))
            elif stream.asked_s is not None:
                recipe = stream.recipe
                waited_s = now - stream.asked_s
                firsts.append((recipe.priority, recipe.model, waited_s, recipe.trace))
            stream.released_s = now
        if gaps or firsts:
            counts = Counter(gaps).items()  # streams of one step mostly share their last release
            spent = [(priority, now - last_s, count) for (priority, last_s), count in counts]
            self._order(events.RecordReleases(spent, firsts))
        if self._models.model_of(worker).circuit.deaths:
            self._order(events.ReportToModels(WorkerProved(worker)))
        for failed in event.step.failed:
            self._retry(worker, failed)

    def _may_retry(self, stream: Stream) -> bool:
        """Return True if a run that fails now is retried: the first one, unless it is cancelled."""
        return not stream.is_retried and self.table.may(stream.id, StreamEvent.RETRIED)

    def _retry(self, worker: int, failed: FailedRun) -> None:
        """Queue a stream whose run has failed; the next worker continues it from its log."""
        stream = failed.stream
        if stream.run != failed.run or stream.worker != worker:
            return  # the stream was taken off the worker meanwhile
        self.table.unplace(stream)
        if stream.is_cancelled:  # cancelled meanwhile; the failed run sends no other end
            self._end(stream, FinishReason.CANCELLED)
            return
        stream.is_retried, stream.failure, stream.failed_on = True, failed.message, worker
        stream.standing.prove()  # the stream did not kill its worker
        self._log("warning", "stream.retried", stream, slot=worker, error=failed.message)
        self._order(events.RecordRetry())
        self._wait_again([stream], StreamEvent.RETRIED)

    def _steers_durable(self, worker: int, step: StepFrames) -> None:
        for at, spans in step.emissions.steered.items():
            stream = step.streams[at]
            if stream.worker == worker and stream.run == step.emissions.runs[at]:
                durable = [one for span in spans for one in stream.steering.confirm(span.count)]
                if durable:
                    self._order(events.AnswerSteers(durable))

    def _append_refused(self, worker: int, refusal: Refusal) -> None:
        """End a run whose frame the ledger refused, for example because of a newer producer."""
        append = refusal.append
        stream = self.table.by_id.get(append.stream)
        if stream is None or stream.worker != worker or stream.epoch != append.epoch:
            return  # the core has ended this run already
        if stream.state not in GENERATING:
            # The run was paused, and the stream is claimed again for the same worker. Until that
            # claim is answered, the stream has the epoch of the paused run.
            return
        fields = {"index": append.index, "error": str(refusal.error)}
        self._log("warning", "append.refused", stream, **fields)
        self._send_cancel(stream, is_final=False)
        self._refused(stream, refusal.error)

    # ---- readers ----

    def _readers_seen(self, event: events.ReadersSeen) -> None:
        """Note which streams are read, and pause, cancel, end or look up other streams."""
        lately = event.streams
        if self.table.by_id:
            self._note_presence(lately)
            self._end_unread()
        if self.table.paused and (late := self._paused_too_long()):
            self._order(events.FindStreams(Purpose.EXPIRE, late))
        here = self.table.by_id.keys() | self.table.opening.keys()
        self._looks = {one: look for one, look in self._looks.items() if one in lately}
        self._looks |= dict.fromkeys(lately & here, Look(self._now, IS_HERE))
        if absent := [one for one in sorted(lately - here) if self._is_to_be_found(one)]:
            self._wake(absent)

    def _end_unread(self) -> None:
        """Pause or cancel abandoned streams; end idle ones and those that waited too long."""
        resting = (StreamState.WAITING, StreamState.RUNNING)
        for stream in [one for one in self.table.by_id.values() if one.state in resting]:
            if self._is_abandoned(stream):
                if stream.recipe.unread == Unread.PAUSE.word:
                    self._pause(stream)
                else:
                    self._cancel_here(stream)
        for stream in [one for one in self.table.by_id.values() if self._is_idle(one)]:
            self._end_idle(stream)
        for stream in [one for one in self.table.waiting if self._is_overdue(one)]:
            self._end(stream, FinishReason.FAILED, self._why_late(stream), retryable=True)

    def _is_to_be_found(self, stream: bytes) -> bool:
        """Return True if a stream that is read here is due for its first or its next look-up."""
        look = self._looks.get(stream)
        return look is None or self._now - look.at_s >= LOOK_AGAIN_S

    def _note_presence(self, lately: Iterable[bytes]) -> None:
        """Note which streams are read, and tell workers which streams are unread."""
        for stream in self.table.by_id.values():
            was_unread = stream.unread
            if stream.id in lately:
                stream.read_s, stream.unread = self._now, False
            elif self._now - stream.read_s >= UNREAD_GRACE_S:
                stream.unread = True
            if stream.unread != was_unread and stream.state in GENERATING:
                assert stream.worker is not None, "a stream runs on no worker"
                if self._takes_tokens(stream.worker):
                    frame = SetUnread(stream.unread)
                    self._order(events.SendFrame(stream.worker, stream.run, frame))

    def _is_abandoned(self, stream: Stream) -> bool:
        """Return True if a stream has been unread for as long as its request allows."""
        if stream.recipe.unread == Unread.RUN.word or stream.steering.orders:
            return False
        return self._now - stream.read_s >= stream.recipe.unread_after_s

    def _is_idle(self, stream: Stream) -> bool:
        """Return True if a stream has had neither a reader nor output for too long."""
        if stream.state is not StreamState.WAITING and stream.state not in GENERATING:
            return False
        return self._now - max(stream.read_s, stream.released_s or 0.0) >= self._idle_s

    def _is_overdue(self, stream: Stream) -> bool:
        """Return True if a new stream has waited too long for its model to load.

        If the model was never loaded and its circuit breaker is open, any wait is too long.
        """
        model = self._models.find(stream.recipe.model)
        if self._cold_wait_s is None or model is None or model.is_ready:
            return False
        if stream.asked_s is None or stream.has_producer:
            return False
        return self._now - stream.asked_s > self._cold_wait_s or model.never_starts

    def _why_late(self, stream: Stream) -> str:
        name = stream.recipe.model
        trouble = self._models.of(name).trouble
        return f"{name!r} was not loaded in time" + (f": {trouble}" if trouble else "")

    def _pause(self, stream: Stream) -> None:
        """Stop a stream's run and drop its record; the ledger has all it needs to continue."""
        self._send_cancel(stream, is_final=False)
        self._leave(stream, StreamEvent.PAUSED)
        self._log("info", "stream.paused", stream)

    def _end_idle(self, stream: Stream) -> None:
        """End an idle stream, because it takes room, and perhaps a worker, from others."""
        state = "running" if stream.state in GENERATING else "waiting"
        self._log("warning", "stream.idle", stream, state=state, idle_s=self._idle_s)
        self._order(events.RecordIdle(state))
        self._send_cancel(stream, is_final=True)
        why = f"the stream had neither a reader nor output for {self._idle_s:g} s"
        self._end(stream, FinishReason.FAILED, why, retryable=True)

    def _paused_too_long(self) -> list[bytes]:
        latest_s = self._now - self._paused_s
        late = [one for one, paused in self.table.paused.items() if paused.since_s <= latest_s]
        return late or [*self.table.paused][:-MAX_PAUSED]

    # ---- load ----

    def _load_measured(self, event: events.LoadMeasured) -> None:
        """Adapt load shedding to the current load, and tell the workers if its level changes."""
        up = [worker for worker in self._models.workers if worker.is_up]
        if not up:
            return  # while no worker is up, waiting streams are no sign of overload
        readings = Readings(self._longest_wait_s(), event.free_memory)
        shedding, before = self.shedding, self.shedding.level
        if shedding.look(readings, self._now):
            level = "warning" if shedding.level > before else "info"
            fields = {"rung": shedding.level.word, "was": before.word, "reason": shedding.reason}
            self._order(events.LogLine(level, "overload.rung", fields))
            for worker in up:
                self._send_mode(worker)
        if shedding.is_critical(readings) and (longest := self._longest_batch()) is not None:
            self._send_cancel(longest, is_final=True)
            why = "memory was nearly used up, and this stream had the most tokens of class batch"
            self._end(longest, FinishReason.FAILED, why, retryable=True)

    def _longest_wait_s(self) -> float:
        """Return the longest time that a stream has waited for a worker to begin it.

        Unread streams, those of class batch, and those whose model is not loaded do not count.
        """
        since = (
            stream.asked_s
            for stream in self.table.by_id.values()
            if stream.asked_s is not None and stream.released_s is None
            if not (stream.standing.begun or stream.unread)
            if self._models.is_up(stream.recipe.model)
            if stream.recipe.priority != Priority.BATCH.word
        )
        return self._now - min(since, default=self._now)

    def _longest_batch(self) -> Stream | None:
        """Return the running stream of class batch with the most tokens, or None."""
        running = (
            stream
            for stream in self.table.by_id.values()
            if stream.state is StreamState.RUNNING
            if stream.recipe.priority == Priority.BATCH.word
        )
        return max(running, key=lambda stream: stream.progress.tokens, default=None)

    # ---- records and commands ----

    def _order(self, command: StreamCommand) -> None:
        self._commands.append(command)

    def _log(self, level: str, event: str, stream: Stream, **fields: object) -> None:
        self._order(events.LogLine(level, event, {"stream": stream.id.hex(), **fields}))

    def _send_cancel(self, stream: Stream, *, is_final: bool) -> None:
        """Tell the worker of a stream to end its run, if it has the order to generate it.

        `is_final` is True if no other run will continue the stream.
        """
        if stream.worker is not None and stream.state in GENERATING:
            self._order(events.SendFrame(stream.worker, stream.run, CancelRun(is_final)))

    def _send_mode(self, worker: Worker) -> None:
        if self._takes_tokens(worker.number):
            self._order(events.SendFrame(worker.number, 0, self.shedding.worker_mode))

    def _takes_tokens(self, worker: int) -> bool:
        """Return True if a worker has loaded its model and is not of kind `text`.

        Workers of kind `text` have no engine, so they ignore load shedding and readers.
        """
        ready = self._models.workers[worker].ready
        return ready is not None and ready.kind != TEXT
