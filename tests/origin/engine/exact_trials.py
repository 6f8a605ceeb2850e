"""Random requests in random batches, cut at random places: all must give the same frames.

A trial runs a request alone and uninterrupted; then among others, on an engine whose few pages may
make it preempt, until it has made some frames; then the rest from those on another engine, among
others again, as after a failover. What the reader has got must be what he would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tokenizers import Tokenizer

from tailrace.ledger.wire.schema import Priority
from tailrace.origin.engine.drafts import PromptLookup
from tailrace.origin.engine.engine import Engine
from tailrace.origin.engine.generation import ModelContext
from tailrace.origin.models.model import Model, StepDevice
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.workers.worker_frame import Emission
from tests.origin.engine.late_device import LateDevice
from tests.origin.engine.runs import continuation, engine_of, make_run, run_all

MAX_PROMPT_TOKENS = 200
MAX_TOKENS = 40
LONG_TOKENS = 160
"""Number of tokens of one request in four, so that those beside it run out of pages."""
MAX_OTHERS = 6
SUBJECT = 1
"""Run id of the request that a trial is about."""

MakeEngine = Callable[[], Engine]


class Engines:
    """Makes engines of models alike that differ in all that must not matter, and keeps them.

    The first model has pages enough, the second few.
    """

    def __init__(
        self,
        models: Sequence[Model],
        tokenizer: Tokenizer,
        random: Random,
        late: Callable[[Any], StepDevice] = LateDevice,
    ) -> None:
        self.made: list[Engine] = []
        self.devices: list[LateDevice] = []
        self._models = models
        self._late = late
        self._tokenizer = tokenizer
        self._random = random
        # Separate, so that trials do not depend on how often engines read the clock.
        self._clock = Random(1)
        self._now_s = 0.0

    def _clock_s(self) -> float:
        """Return a time that makes each step last from nothing to twice what it should."""
        self._now_s += self._clock.random() * 0.1
        return self._now_s

    def plain(self) -> Engine:
        return engine_of(self._models[0], self._tokenizer)

    def any(self) -> Engine:
        """Return an engine with random limits.

        It has few pages or many, drafts or none, narrow steps or wide ones. Every second one runs
        on a device whose results are read one step late.
        """
        model = self._random.choices(self._models, (1, 2))[0]
        config = model.config
        drafter = self._random.choice((None, PromptLookup()))
        around = ModelContext(
            self._tokenizer, config.eos_ids, config.context, config.vocab, drafter=drafter
        )
        limits = Limits(step_tokens_least=65, step_tokens_most=self._random.choice((65, 256)))
        # The first or the second of a trial, in turn.
        device = self._late(model) if len(self.made) % 4 in (0, 3) else None
        if isinstance(device, LateDevice):
            self.devices.append(device)
        engine = Engine(model, around, limits, self._clock_s, device=device)
        engine.set_shedding(small_steps=len(self.made) % 4 == 1, guess=True)
        self.made.append(engine)
        return engine


Fields = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A request, two batches of others, and the share of its frames after which it is cut."""

    request: Fields
    before: tuple[Fields, ...]
    after: tuple[Fields, ...]
    cut: float


def draw_trial(random: Random, vocab: int, prompts: Sequence[Sequence[int]] = ()) -> Trial:
    """Return a trial; some prompts are those given, or begin alike, so that pages are shared."""

    def request() -> Fields:
        return _draw_request(random, vocab, shared, prompts)

    shared = _ids(random, vocab, random.randrange(MAX_PROMPT_TOKENS))
    others = [tuple(request() for _ in range(random.randrange(MAX_OTHERS + 1))) for _ in range(2)]
    return Trial(request(), others[0], others[1], random.random())


def frames_alone(make_engine: MakeEngine, trial: Trial) -> list[Emission]:
    """Return what the request gives uninterrupted, with nothing beside it."""
    return run_all(make_engine(), {SUBJECT: make_run(**trial.request)})[SUBJECT]


def frames_cut(make_engine: MakeEngine, trial: Trial, whole: int) -> list[Emission]:
    """Return the frames of a run in a batch, with a failover after its share of `whole` frames."""
    kept = _begin(make_engine(), trial, int(trial.cut * whole))
    engine = make_engine()
    rest = continuation(trial.request, kept)
    others = {number: make_run(**fields) for number, fields in enumerate(trial.after, 2)}
    return kept + run_all(engine, others | {SUBJECT: rest})[SUBJECT]


def _begin(engine: Engine, trial: Trial, frames: int) -> list[Emission]:
    """Return the first frames; the others run beside it, and what one of them makes is not kept."""
    for number, fields in enumerate(trial.before, 2):
        engine.add(number, make_run(**fields))
    engine.add(SUBJECT, make_run(**trial.request))
    kept: list[Emission] = []
    while len(kept) < frames:
        kept += [emission for emission in engine.step() if emission.run == SUBJECT]
    return kept[:frames]


def _draw_request(
    random: Random, vocab: int, shared: Sequence[int], prompts: Sequence[Sequence[int]]
) -> Fields:
    prompt = [*(shared if random.random() < 0.5 else ())]
    prompt += random.choice(prompts) if prompts and random.random() < 0.7 else ()
    prompt += _ids(random, vocab, random.randrange(1, 40))
    drawn: Fields = {
        "prompt_ids": tuple(prompt[:MAX_PROMPT_TOKENS]),
        "max_tokens": random.randrange(1, MAX_TOKENS if random.random() < 0.75 else LONG_TOKENS),
        "temperature": random.choice((0.0, 0.7, 1.0, 1.5)),
        "top_k": random.choice((0, 5, 40)),
        "top_p": random.choice((1.0, 0.95, 0.5)),
        "min_p": random.choice((0.0, 0.0, 0.05)),
        "repetition_penalty": random.choice((1.0, 1.0, 1.2)),
        "presence_penalty": random.choice((0.0, 0.0, 0.5)),
        "seed": random.getrandbits(64),
        "ignore_eos": random.random() < 0.7,
        "priority": random.choice(tuple(Priority)),
    }
    return drawn | {"stop": ("e", "th") if drawn["seed"] % 5 == 0 else ()}


def _ids(random: Random, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(1, vocab) for _ in range(count))
