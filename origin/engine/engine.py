"""The engine: runs in, emissions out, one `step` at a time; no sockets or threads.

A step does what the scheduler has planned: chunks of prompts, tokens that are known but not cached,
and one new token, or several where guesses were right, of each decoding run. All of it is one
batch for the model, and all that it produced is one Step for the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from tokenizers import Tokenizer
from torch import Tensor

from ledger.errors import CallerError, Conflict, Overloaded, TailraceError, TooLarge
from ledger.frame import FinishReason, Priority
from origin.engine.generation import NOT_A_NUMBER, Generation, Surroundings, refuse
from origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Drawn, Model, Piece
from origin.scheduler.limits import Limits
from origin.scheduler.pages import PagePool
from origin.scheduler.plan import Plan, Work
from origin.scheduler.scheduler import Scheduler
from origin.workers.worker_frame import Emission, Load, Run, plain_ids


class Engine:
    """One model's runs. `clock_s` only measures how long a step took, for the scheduler.

    `begin` is told the runs of each step before the model is.
    """

    def __init__(
        self,
        model: Model,
        around: Surroundings,
        limits: Limits | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        begin: Callable[[Iterable[int]], None] = lambda runs: None,
    ) -> None:
        self._model = model
        self._around = around
        self._clock_s = clock_s
        self._begin = begin
        self._scheduler = Scheduler(PagePool(model.pages), limits)
        self._generations: dict[int, Generation] = {}
        self._outbox: list[Emission] = []
        self._guesses = around.drafter is not None

    @classmethod
    def of(cls, model: Model, tokenizer: Tokenizer, limits: Limits | None = None) -> Engine:
        """With nothing but the model and its tokenizer around."""
        config = model.config
        around = Surroundings(tokenizer, config.eos_ids, config.context, config.vocab)
        return cls(model, around, limits)

    @property
    def idle(self) -> bool:
        """A step would do nothing."""
        return not (self._generations or self._outbox)

    def load(self) -> Load:
        """How busy it is."""
        return self._scheduler.load()

    def add(self, run_id: int, run: Run) -> None:
        """Take a run. One that cannot be served ends as FAILED; Conflict for an id in use."""
        if run_id in self._generations:
            raise Conflict(f"run {run_id} exists", field="corr")
        try:
            self._check(run)
            generation = Generation(run_id, run, self._around)
        except (TailraceError, ValueError) as error:
            self._outbox += refuse(run_id, run, self._around, str(error))
            return
        self._outbox += generation.resume()
        if not generation.ended:
            self._schedule(run_id, run, generation)

    def steer(self, run_id: int, ids: Sequence[int]) -> None:
        """Let a run go on with these tokens; nothing happens if it has ended."""
        generation = self._generations.get(run_id)
        if generation is None:
            return
        taken, emissions = generation.steer(ids)
        self._outbox += emissions
        self._scheduler.extend(run_id, taken)
        self._forget_ended(run_id)

    def halt(self, run_id: int) -> None:
        """Cancel a run; nothing happens if it has ended."""
        generation = self._generations.get(run_id)
        if generation is not None:
            self._outbox += generation.end(FinishReason.CANCELLED)
            self._forget_ended(run_id)

    def attend(self, run_id: int, *, unread: bool) -> None:
        """Whether nobody reads the run's stream; nothing happens if it has ended."""
        self._scheduler.attend(run_id, unread=unread)

    def ease(self, *, small_steps: bool, guess: bool) -> None:
        """Whether steps stay as small as they may be, and whether tokens are guessed at all."""
        self._guesses = guess and self._around.drafter is not None
        self._scheduler.ease(small_steps=small_steps)

    def step(self) -> list[Emission]:
        """Do one plan; returns what it and the calls since the last step produced."""
        emissions, self._outbox = self._outbox, []
        began = self._clock_s()
        plan = self._scheduler.plan(self._propose if self._guesses else None)
        for run_id in plan.preempted:
            self._generations[run_id].release()
        if plan.work:
            self._begin(work.run for work in plan.work)
            emissions += self._carry_out(plan)
        self._scheduler.done(plan, self._clock_s() - began)
        return emissions

    # ---- taking runs ----

    def _check(self, run: Run) -> None:
        """Raise ValueError for what the model has no room or no meaning for."""
        context, vocab = self._around.context, self._around.vocab
        if not 0 < len(run.prompt_ids) < context:
            raise ValueError(f"a prompt of {len(run.prompt_ids)} tokens in a context of {context}")
        if max(chain(run.prompt_ids, plain_ids(run.generated_ids))) >= vocab:
            raise ValueError(f"a token id outside the vocabulary of {vocab}")

    def _schedule(self, run_id: int, run: Run, generation: Generation) -> None:
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

    def _forget_ended(self, run_id: int) -> None:
        if self._generations[run_id].ended:
            self._generations.pop(run_id).release()
            self._scheduler.remove(run_id)

    # ---- a step ----

    def _propose(self, wanted: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Guesses for (run, at most so many); none for runs that are not guessed."""
        assert self._around.drafter is not None
        asked = [self._generations[run_id].asked(most) for run_id, most in wanted]
        found = iter(self._around.drafter.propose([each for each in asked if each is not None]))
        return [() if each is None else next(found) for each in asked]

    def _carry_out(self, plan: Plan) -> list[Emission]:
        hidden = self._model.forward([piece for work in plan.work for piece in _pieces(work)])
        emissions = self._fail_broken(plan, hidden)
        drawing, rows = self._draws(plan, emissions)
        draws = [draw for _, some in drawing for draw in some]
        drawn = iter(self._model.draw(hidden[rows], draws) if draws else ())
        for work, some in drawing:
            emissions += self._accept(work, [next(drawn) for _ in some])
        return emissions

    def _accept(self, work: Work, drawn: Sequence[Drawn]) -> list[Emission]:
        generation = self._generations[work.run]
        known = len(work.ids) - work.drafts
        tokens, emissions = generation.accept(work.ids[known : known + len(drawn) - 1], drawn)
        self._scheduler.extend(work.run, tokens)
        self._forget_ended(work.run)
        return emissions

    def _fail_broken(self, plan: Plan, hidden: Tensor) -> list[Emission]:
        """End the runs of prompt chunks and known tokens that are no numbers.

        Before their pages can be found by others, and before anything is drawn from them.
        """
        fine = hidden.isfinite().all(-1).tolist()
        emissions: list[Emission] = []
        first = 0
        for work in plan.work:
            known = len(work.ids) - work.drafts
            if not all(fine[first : first + known]):
                generation = self._generations[work.run]
                emissions += generation.end(FinishReason.FAILED, NOT_A_NUMBER, retryable=True)
                self._forget_ended(work.run)
            first += len(work.ids)
        return emissions

    def _draws(
        self, plan: Plan, emissions: list[Emission]
    ) -> tuple[list[tuple[Work, list[Draw]]], list[int]]:
        """The work that draws, with its draws, and the rows of all of them in one list.

        A run whose output format has no way on ends, among the emissions.
        """
        drawing: list[tuple[Work, list[Draw]]] = []
        rows: list[int] = []
        first = 0
        for work in plan.work:
            known = len(work.ids) - work.drafts
            generation = self._generations.get(work.run)
            if work.draws and generation is not None:
                try:
                    draws = generation.draws(work.ids[known:])
                except CallerError as error:
                    emissions += generation.end(FinishReason.FAILED, str(error))
                    self._forget_ended(work.run)
                else:
                    drawing.append((work, draws))
                    rows += range(first + known - 1, first + known - 1 + len(draws))
            first += len(work.ids)
        return drawing, rows


def _pieces(work: Work) -> Iterator[Piece]:
    """Each chunk of a prompt is a piece of its own; rows are one."""
    most = PREFILL_CHUNK_TOKENS if work.prefill else len(work.ids)
    for at in range(0, len(work.ids), most):
        yield Piece(work.ids[at : at + most], work.start + at, work.pages, work.prefill)
