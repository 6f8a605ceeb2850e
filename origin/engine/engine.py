"""The engine: takes runs, and returns their frames as emissions, one `step` at a time.

It has no sockets and no threads.

A step executes what the scheduler has planned: chunks of prompts, tokens that are known but not
cached, and for each decoding run one new token, or several if drafts were right. All of it is one
batch for the device, and everything that it produced is one Step frame for the ledger.

A pipelined engine reads a step's tokens after it has launched the next step. That is possible if
the next step depends only on the number of tokens, not on their ids, as it does for decoding
without drafts, grammars or penalties. If a run turns out to have ended, its row in the next step
was computed for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tailrace.ledger.errors import CallerError, Conflict, Overloaded, TailraceError, TooLarge
from tailrace.ledger.frame import FinishReason, Priority
from tailrace.origin.engine.batch_waits import BatchWaits
from tailrace.origin.engine.generation import NOT_A_NUMBER, Generation, ModelContext, refuse
from tailrace.origin.models.model import (
    PREFILL_CHUNK_TOKENS,
    AtOnce,
    Draw,
    Drawn,
    Launched,
    Model,
    Piece,
    StepDevice,
    drawn_before,
)
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.scheduler.pages import PagePool
from tailrace.origin.scheduler.plan import Plan, Work
from tailrace.origin.scheduler.scheduler import Scheduler
from tailrace.origin.workers.worker_frame import Emission, Load, StartRun


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched, and whose results were not read yet.

    `works` has each Work of the step's plan, with the run's generation and the number of its draws.
    """

    plan: Plan
    began_s: float
    works: list[tuple[Work, Generation, int]] = field(default_factory=list)
    launched: Launched | None = None
    first_use: bool = False
    """True if the step includes one-time work, such as compiling; see `Launched.first_use`."""

    @property
    def is_late(self) -> bool:
        """True if the next step can be planned and launched before this one's results are read."""
        return all(
            work.draws and len(work.ids) == 1 and not work.prefill and generation.draws_alone
            for work, generation, _ in self.works
        )

    @property
    def awaited(self) -> dict[Generation, int]:
        """Maps each generation that waits for a draw of this step to the index of the draw."""
        return {generation: place for place, (_, generation, _) in enumerate(self.works)}


class Engine:
    """Runs one model. `clock_s` only measures durations: those of steps, and of waits.

    `begin` is called with the ids of a step's runs before the device starts. If `device` is given,
    the engine is pipelined: it launches the steps on it. Otherwise each step is computed at once.
    """

    def __init__(
        self,
        model: Model,
        model_context: ModelContext,
        limits: Limits | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        begin: Callable[[Iterable[int]], None] = lambda runs: None,
        device: StepDevice | None = None,
    ) -> None:
        self._device = device or AtOnce(model)
        self._pipelined = device is not None
        self._flight: InFlightStep | None = None
        self._landed_s = clock_s()
        self._model_context = model_context
        self._clock_s = clock_s
        self._begin = begin
        self._scheduler = Scheduler(PagePool(model.pages), limits)
        self._waits = BatchWaits()
        self._generations: dict[int, Generation] = {}
        self._outbox: list[Emission] = []
        self._guesses = model_context.drafter is not None

    @property
    def idle(self) -> bool:
        """True if a step would do nothing."""
        return not (self._generations or self._outbox or self._flight)

    def load(self) -> Load:
        """Return the engine's numbers for the supervisor: its runs, limits, pages and tokens."""
        return self._scheduler.load()

    def waits(self) -> dict[int, float]:
        """Return the seconds that current runs have waited for the batch, without short waits."""
        return self._waits.so_far(self._clock_s())

    def take_ended_waits(self) -> dict[int, float]:
        """Return the waits of the runs that have ended since the last call."""
        return self._waits.take_ended()

    def add(self, run_id: int, run: StartRun) -> None:
        """Accept a run.

        A run that cannot be served ends as FAILED. Raises Conflict for an id in use.
        """
        if run_id in self._generations:
            raise Conflict(f"run id {run_id} is in use already", field="corr")
        try:
            self._check(run)
            generation = Generation(run_id, run, self._model_context)
        except (TailraceError, ValueError) as error:
            self._outbox += refuse(run_id, run, self._model_context, str(error))
            return
        self._outbox += generation.resume()
        if not generation.ended:
            self._schedule(run_id, run, generation)

    def steer(self, run_id: int, ids: Sequence[int]) -> None:
        """Append tokens from outside to a run; an ended run is ignored."""
        self._outbox += self._land()
        generation = self._generations.get(run_id)
        if generation is None:
            return
        taken, emissions = generation.steer(ids)
        self._outbox += emissions
        self._scheduler.extend(run_id, taken)
        self._forget_ended(run_id)

    def cancel(self, run_id: int) -> None:
        """Cancel a run; an ended run is ignored."""
        generation = self._generations.get(run_id)
        if generation is not None:
            self._outbox += generation.end(FinishReason.CANCELLED)
            self._forget_ended(run_id)

    def set_unread(self, run_id: int, *, unread: bool) -> None:
        """Set whether the run's stream is without a reader; an ended run is ignored."""
        self._scheduler.set_unread(run_id, unread=unread)

    def set_shedding(self, *, small_steps: bool, guess: bool) -> None:
        """Set whether the engine makes the smallest possible steps, and if it drafts tokens."""
        self._guesses = guess and self._model_context.drafter is not None
        self._scheduler.set_small_steps(enabled=small_steps)

    def step(self) -> list[Emission]:
        """Run one plan; return its emissions, and those of other calls since the last step."""
        emissions, self._outbox = self._outbox, []
        if self._guesses:
            emissions += self._land()  # the drafts depend on the tokens of the last step
        began = self._clock_s()
        plan = self._scheduler.plan(self._propose if self._guesses else None)
        for run_id in plan.preempted:
            self._generations[run_id].release()
        flight = None
        if plan.work:
            self._waits.step((work.run for work in plan.work), began)
            self._begin(work.run for work in plan.work)
            flight = self._launch(plan, began, emissions)
        emissions += self._land()
        self._flight = flight
        if flight is not None and self._pipelined and not self._guesses and flight.is_late:
            self._scheduler.sent(plan)
        else:
            emissions += self._land()
        return emissions

    # ---- taking runs ----

    def _check(self, run: StartRun) -> None:
        """Raise ValueError for a prompt or tokens that the model cannot take."""
        context, vocab = self._model_context.context, self._model_context.vocab
        if not 0 < len(run.prompt_ids) < context:
            raise ValueError(
                f"the prompt has {len(run.prompt_ids)} tokens, but must have 1 to {context - 1}"
            )
        if max(chain(run.prompt_ids, run.generated_ids, run.inserted_ids)) >= vocab:
            raise ValueError(f"a token id of the run is outside the vocabulary of {vocab} ids")

    def _schedule(self, run_id: int, run: StartRun, generation: Generation) -> None:
        priority = Priority(run.priority)
        try:
            self._scheduler.add(
                run_id, priority, run.prompt_ids, generation.generated, generation.max_tokens
            )
        except (Overloaded, TooLarge) as error:
            self._outbox += generation.end(
                FinishReason.FAILED, str(error), retryable=error.retryable
            )
            return
        self._generations[run_id] = generation
        self._waits.added(run_id, self._clock_s())

    def _forget_ended(self, run_id: int) -> None:
        if self._generations[run_id].ended:
            self._generations.pop(run_id).release()
            self._scheduler.remove(run_id)
            self._waits.removed(run_id)

    # ---- a step ----

    def _propose(self, wanted: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return drafts for each (run, maximum); none for runs without speculative decoding."""
        assert self._model_context.drafter is not None
        asked = [self._generations[run_id].asked(most) for run_id, most in wanted]
        found = iter(
            self._model_context.drafter.propose([each for each in asked if each is not None])
        )
        return [() if each is None else next(found) for each in asked]

    def _launch(self, plan: Plan, began_s: float, emissions: list[Emission]) -> InFlightStep:
        """Launch the plan on the device.

        A run whose output format allows no continuation ends; its end is added to `emissions`.
        """
        flight = InFlightStep(plan, began_s)
        before = self._flight.awaited if self._flight is not None else {}
        pieces: list[Piece] = []
        rows: list[int] = []
        draws: list[Draw] = []
        first = 0
        for work in plan.work:
            generation = self._generations[work.run]
            if work.prefill or not generation.is_begun:
                generation.note_prefill(work.start, len(work.ids))
            known = len(work.ids) - work.drafts
            ahead = before.get(generation)
            some: list[Draw] = []
            if work.draws:
                try:
                    some = generation.draws(work.ids[known:], ahead=ahead is not None)
                except CallerError as error:
                    emissions += generation.end(FinishReason.FAILED, str(error))
                    self._forget_ended(work.run)
            pieces += _pieces(work if ahead is None else work._replace(ids=[drawn_before(ahead)]))
            rows += range(first + known - 1, first + known - 1 + len(some))
            draws += some
            flight.works.append((work, generation, len(some)))
            first += len(work.ids)
        flight.launched = self._device.launch(pieces, rows, draws)
        if flight.launched.first_use:
            flight.first_use = True
            if self._flight is not None:
                self._flight.first_use = True
        return flight

    def _land(self) -> list[Emission]:
        """Finish the step in flight, if any, and return its emissions."""
        flight, self._flight = self._flight, None
        if flight is None or flight.launched is None:
            return []
        results = flight.launched.read()
        emissions: list[Emission] = []
        first = at = 0
        for work, generation, count in flight.works:
            if self._generations.get(work.run) is generation:
                # Check that the results are finite before other runs can find this run's pages,
                # and before the run's tokens are taken.
                if not all(results.fine[first : first + len(work.ids) - work.drafts]):
                    emissions += generation.end(FinishReason.FAILED, NOT_A_NUMBER, retryable=True)
                    self._forget_ended(work.run)
                elif count:
                    emissions += self._accept(work, results.drawn[at : at + count])
            first += len(work.ids)
            at += count
        now = self._clock_s()
        seconds = now - max(flight.began_s, self._landed_s)
        self._scheduler.done(flight.plan, seconds, typical=not flight.first_use)
        self._landed_s = now
        return emissions

    def _accept(self, work: Work, drawn: Sequence[Drawn]) -> list[Emission]:
        generation = self._generations[work.run]
        known = len(work.ids) - work.drafts
        tokens, emissions = generation.accept(work.ids[known : known + len(drawn) - 1], drawn)
        self._scheduler.extend(work.run, tokens)
        self._forget_ended(work.run)
        return emissions


def _pieces(work: Work) -> Iterator[Piece]:
    """Yield the pieces of `work`: the chunks of a prompt, or one piece with all decoding rows."""
    most = PREFILL_CHUNK_TOKENS if work.prefill else len(work.ids)
    for at in range(0, len(work.ids), most):
        yield Piece(work.ids[at : at + most], work.start + at, work.pages, work.prefill)
