"""The engine: runs in, emissions out, one `step` at a time; no sockets, clocks or threads."""

from __future__ import annotations

import math
from collections import deque
from itertools import chain

from tokenizers import Tokenizer
from torch import Tensor

from kernels.sampler import Sampling
from ledger.errors import Conflict
from ledger.frame import FinishReason
from origin.model import Model, prefill_chunks
from origin.transcript import Transcript
from origin.worker_frame import Emission, Run

MAX_RUNNING_RUNS = 32
# Regenerating the cache of a continued run, decoding runs wait for this many tokens at most.
REBUILD_TOKENS_PER_STEP = 16


class Generation:
    """One running run's place in the model: its cache, and what is still to be pushed into it."""

    def __init__(self, run: Run, transcript: Transcript, model: Model) -> None:
        self.transcript = transcript
        self._model = model
        self._cache = model.new_cache()
        self._sampling = Sampling(run.temperature, run.top_k, run.top_p, run.seed)
        self._chunks = deque(prefill_chunks(run.prompt_ids))
        self._rebuild = deque(run.generated_ids[:-1])
        self._last = run.generated_ids[-1] if run.generated_ids else None
        self._hidden: Tensor | None = None

    @property
    def ready(self) -> bool:
        """All tokens but the last generated one are in the cache: the next can be decoded."""
        return not self._chunks and not self._rebuild

    def prepare(self) -> None:
        """Push one prefill chunk, or some generated tokens one by one as decoding pushed them."""
        if self._chunks:
            self._hidden = self._model.advance(self._chunks.popleft(), self._cache)
            return
        for _ in range(min(REBUILD_TOKENS_PER_STEP, len(self._rebuild))):
            self._model.advance([self._rebuild.popleft()], self._cache)

    def decode(self) -> list[Emission]:
        """Push the last generated token, if there is one, and sample the next."""
        if self._last is not None:
            self._hidden = self._model.advance([self._last], self._cache)
        assert self._hidden is not None, "a run is prepared before it decodes"
        position = self.transcript.total_tokens
        try:
            self._last = self._model.sample(self._hidden, self._sampling, position)
        except FloatingPointError as exc:
            return self.transcript.end(FinishReason.FAILED, str(exc))
        return self.transcript.accept(self._last)


class Engine:
    """Decodes one token of every running run per step; more runs than it may run wait in order.

    A step also does one piece of preparation, a prefill chunk or some rebuilding, for the run
    that has waited longest for it: a long prompt slows its neighbours, but never stops them.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, max_running: int = MAX_RUNNING_RUNS
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_running = max_running
        # The supervisor's admission bounds these; only running runs hold a cache.
        self._waiting: dict[int, tuple[Run, Transcript]] = {}
        self._running: dict[int, Generation] = {}
        self._outbox: list[Emission] = []

    @property
    def idle(self) -> bool:
        """A step would do nothing."""
        return not (self._waiting or self._running or self._outbox)

    def add(self, run_id: int, run: Run) -> None:
        """Take a run. One that cannot be served ends as FAILED; Conflict for an id in use."""
        if run_id in self._waiting or run_id in self._running:
            raise Conflict(f"run {run_id} exists", field="corr")
        config = self._model.config
        transcript = Transcript(run_id, run, self._tokenizer, config.eos_ids, config.context)
        problem = _problem(run, config.context, config.vocab)
        if problem:
            self._outbox += transcript.end(FinishReason.FAILED, problem)
            return
        self._outbox += transcript.resume()
        if not transcript.ended:
            self._waiting[run_id] = run, transcript

    def halt(self, run_id: int) -> None:
        """Cancel a run; nothing happens if it has ended."""
        if run_id in self._running:
            transcript = self._running.pop(run_id).transcript
        elif run_id in self._waiting:
            _, transcript = self._waiting.pop(run_id)
        else:
            return
        self._outbox += transcript.end(FinishReason.CANCELLED)

    def step(self) -> list[Emission]:
        """Advance every running run; returns what they and the calls since then produced."""
        emissions, self._outbox = self._outbox, []
        self._start_waiting()
        for generation in self._running.values():
            if not generation.ready:
                generation.prepare()
                break
        for run_id, generation in list(self._running.items()):
            if generation.ready:
                emissions += generation.decode()
            if generation.transcript.ended:
                del self._running[run_id]
        return emissions

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            run_id = next(iter(self._waiting))
            run, transcript = self._waiting.pop(run_id)
            self._running[run_id] = Generation(run, transcript, self._model)


def _problem(run: Run, context: int, vocab: int) -> str | None:
    """Why the model cannot serve this run, if it cannot."""
    if not 0 < len(run.prompt_ids) < context:
        return f"a prompt of {len(run.prompt_ids)} tokens in a context of {context}"
    if max(chain(run.prompt_ids, run.generated_ids)) >= vocab:
        return f"a token id outside the vocabulary of {vocab}"
    if not (math.isfinite(run.temperature) and run.temperature >= 0 and 0 < run.top_p <= 1):
        return f"temperature {run.temperature}, top_p {run.top_p}"
    return None
