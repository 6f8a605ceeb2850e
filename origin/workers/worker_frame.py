"""The frames between a supervisor and its workers, and their codec.

Same framing as the client schema, tags from 32 on. corr is the run's id, chosen by the
supervisor and unique on one worker connection; 0 is the connection. Both sides send
`Hello` first, with this schema's hash. After a change run `make schemas`, which writes
origin/workers/worker.bare from these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, groupby
from typing import dataclass_transform

from tailrace.ledger.errors import FrameError, SchemaMismatch
from tailrace.ledger.frame import Hello, OutputFormat, Sampling
from tailrace.ledger.record_extra import IdSpan
from tailrace.ledger.wire.bare import U32Int, U32Ints, Uint
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text
from tailrace.ledger.wire.codec import PREFIX_BYTES, Codec, F, Tagged, framed
from tailrace.origin.workers.liveness import Death, kind_of
from tailrace.origin.workers.load_spans import LoadStage

# A prompt of 2^20 tokens, 4 bytes each, fits, and so does a Step of many emissions.
MAX_WORKER_FRAME_BYTES = 8 << 20
MAX_FAULT_CHARS = 500


class WorkerFrame(Tagged):
    """A struct that is a frame of this schema alone."""

    __slots__ = ()


Frame = WorkerFrame | Hello
FRAMES: dict[int, type[Frame]] = {Hello.tag: Hello}


@dataclass_transform(frozen_default=True)
def frame(tag: int) -> Callable[[type[F]], type[F]]:
    """Makes a class the frame of this schema that has this tag: from 40 on, a supervisor's."""
    return framed(FRAMES, tag)


@frame(32)
class LoadProgress(WorkerFrame):
    """How far loading has come: `done` of `total` units of the named stage."""

    stage: str
    done: Uint
    total: Uint


@frame(33)
class Ready(WorkerFrame):
    """The model is loaded; `context` and `vocab` in tokens.

    A worker of kind `tokens` takes Runs; one of kind `text` takes Asks, and knows of no tokens
    (`context` and `vocab` are 0); of what engines can do it `offers` these fields of an Open.
    `spans` say where the time of its start went, without gaps.
    """

    kind: str
    model: str
    fingerprint: str
    device: str
    context: Uint
    vocab: Uint
    load_ms: Uint
    offers: tuple[str, ...] = ()
    spans: tuple[LoadStage, ...] = ()


@dataclass(slots=True)  # frozen, it takes three times as long to make
class Emission:
    """One frame of one run: a whole encoded logged frame of the client schema, corr 0.

    `ids` are all tokens generated since the run's previous emission, up to and including
    the one whose text completes this frame: a token whose text is held back (incomplete
    UTF-8, a possible stop sequence) yields no frame, and its id rides in the next emission.
    `steered` are the spans of `ids` that came from Steer orders, one for each order. The ids of
    one order are all in one emission.
    """

    run: int
    index: int
    ids: tuple[int, ...]
    steered: tuple[IdSpan, ...]
    frame: bytes


@dataclass(slots=True)
class Emissions:
    """Emissions in columns: one is a place in each of the first four.

    `steered` has the `Emission.steered` of the few places that have any.
    """

    runs: Sequence[int]
    indexes: Sequence[int]
    ids: Sequence[tuple[int, ...]]
    frames: Sequence[bytes]
    steered: dict[int, tuple[IdSpan, ...]]

    @classmethod
    def joined(cls, steps: Sequence[Step]) -> Emissions:
        """Return the emissions of steps in a row; raises FrameError as `Step.cut` does."""
        if len(steps) == 1:
            return steps[0].cut()
        runs, indexes, ids, frames = (
            list[int](),
            list[int](),
            list[tuple[int, ...]](),
            list[bytes](),
        )
        steered: dict[int, tuple[IdSpan, ...]] = {}
        for step in steps:
            some, at = step.cut(), len(runs)
            runs += some.runs
            indexes += some.indexes
            ids += some.ids
            frames += some.frames
            steered.update({at + row: spans for row, spans in some.steered.items()})
        return cls(runs, indexes, ids, frames, steered)

    def those(self, wanted: Sequence[bool]) -> Emissions:
        """Return only the emissions at the places that are wanted."""
        places = compress(range(len(wanted)), wanted)
        return Emissions(
            list(compress(self.runs, wanted)),
            list(compress(self.indexes, wanted)),
            list(compress(self.ids, wanted)),
            list(compress(self.frames, wanted)),
            {to: self.steered[at] for to, at in enumerate(places) if at in self.steered},
        )


@dataclass(frozen=True, slots=True)
class SteeredIds:
    """Those ids of the emission at place `row` that came from one Steer order."""

    row: U32Int
    start: U32Int
    count: U32Int


@frame(34)
class Step(WorkerFrame):
    """All that one engine step produced; the last emission of a run is its StreamEnd.

    In columns, which take a tenth of the time of as many structs to read: an emission is a place
    in each of the first four, `counts` ids and `sizes` bytes of frames.
    """

    runs: U32Ints = ()
    indexes: U32Ints = ()
    counts: U32Ints = ()
    sizes: U32Ints = ()
    ids: U32Ints = ()
    frames: bytes = b""
    steered: tuple[SteeredIds, ...] = ()

    @classmethod
    def of(cls, emissions: Sequence[Emission]) -> Step:
        """Return the step of these emissions."""
        return cls(
            runs=[each.run for each in emissions],
            indexes=[each.index for each in emissions],
            counts=[len(each.ids) for each in emissions],
            sizes=[len(each.frame) for each in emissions],
            ids=list(chain.from_iterable(each.ids for each in emissions)),
            frames=b"".join([each.frame for each in emissions]),
            steered=tuple(
                SteeredIds(row, span.start, span.count)
                for row, each in enumerate(emissions)
                for span in each.steered
            ),
        )

    def cut(self) -> Emissions:
        """Return the emissions; FrameError if the columns do not fit together."""
        columns = (self.runs, self.indexes, self.counts, self.sizes)
        held = sum(self.counts), sum(self.sizes)
        if len(set(map(len, columns))) != 1 or held != (len(self.ids), len(self.frames)):
            raise FrameError("the columns of a step do not fit together", field="Step", offset=0)
        if min(self.sizes, default=PREFIX_BYTES) < PREFIX_BYTES:
            raise FrameError("a frame of a step is too short", field="Step.sizes", offset=0)
        all_ids, all_frames, at = tuple(self.ids), self.frames, 0
        ids = [all_ids[at : (at := at + count)] for count in self.counts]
        at = 0
        frames = [all_frames[at : (at := at + size)] for size in self.sizes]
        return Emissions(self.runs, self.indexes, ids, frames, self._spans())

    def _spans(self) -> dict[int, tuple[IdSpan, ...]]:
        spans: dict[int, tuple[IdSpan, ...]] = {}
        for each in self.steered:
            if each.row >= len(self.counts) or each.start + each.count > self.counts[each.row]:
                where = "the steered ids of a step lie outside of its emissions"
                raise FrameError(where, field="Step.steered", offset=0)
            span = IdSpan(each.start, each.count)
            spans[each.row] = (*spans.get(each.row, ()), span)
        return spans


@frame(36)
class Begun(WorkerFrame):
    """The runs that the worker is at work on from now, of those that have no emission yet.

    Each replaces the one before, and precedes the work: the worker may die of these, and not of
    the runs that only wait in its queue.
    """

    runs: tuple[U32Int, ...] = ()


@frame(37)
class Fault(WorkerFrame):
    """Why the worker ends, which it does next; `kind` is a `Death`. No request is quoted."""

    error: str
    kind: str

    @classmethod
    def of(cls, error: Exception, *, starting: bool) -> Fault:
        """In one line. What it says of a crash amid requests may quote one, and is left out."""
        kind, name = kind_of(error, starting=starting), type(error).__name__
        said = name if kind is Death.CRASHED else " ".join(f"{name}: {error}".split())
        return cls(said[:MAX_FAULT_CHARS], kind)


@frame(35)
class Load(WorkerFrame):
    """How busy the engine is; counts without another word are of the worker's life so far.

    waiting, running: runs now, by priority class. batch_limit: tokens that a step may take now;
    row_limit: rows of decoding for which runs are started; turn_limit: rows of a step beyond which
    less urgent classes take turns. pages, pages_free: of the KV cache, now; free ones may hold a
    reusable prefix. step_us: time of the last step. prompt_tokens: prefilled; reused_tokens: found
    in the cache instead. drafted, accepted: tokens of speculative decoding.
    """

    waiting: tuple[Uint, ...]
    running: tuple[Uint, ...]
    batch_limit: Uint
    row_limit: Uint
    turn_limit: Uint
    pages: Uint
    pages_free: Uint
    step_us: Uint
    tokens: Uint
    prompt_tokens: Uint
    reused_tokens: Uint
    preemptions: Uint
    drafted: Uint
    accepted: Uint


@frame(40)
class Run(WorkerFrame):
    """Generate, or go on: `generated_ids` are those already in the ledger, at first none.

    `steered` are the spans of them that came from Steer orders, one for each order.
    `sent_bytes` counts the UTF-8 bytes of text in the stream's frames so far, `next_index`
    is the index of the next one. `max_tokens` counts the `generated_ids` too. All of
    `sampling` is settled. `completes`: its text goes on from the prompt's, as an answer in a
    conversation does not. `priority` is a
    `tailrace.ledger.frame.Priority`. With `logprobs` every text frame is a ScoredToken with so many
    alternatives. `tools` is the JSON of a `ToolUse`, whose calls are taken out of the text.
    """

    prompt_ids: U32Ints
    generated_ids: U32Ints
    sent_bytes: Uint
    next_index: Uint
    max_tokens: Uint
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    completes: bool = False
    priority: Uint = 1
    logprobs: Uint | None = None
    format: OutputFormat | None = None
    tools: str | None = None
    steered: tuple[IdSpan, ...] = ()


@frame(43)
class Ask(WorkerFrame):
    """A Run for a worker of kind `text`, or the rest of one.

    `recipe` is the JSON of a `Recipe`; `delivered` is the stream's text so far and
    `next_index` the index of its next frame; `calls` of tools are in it.
    """

    recipe: str
    delivered: str
    next_index: Uint
    calls: Uint = 0


@frame(42)
class Steer(WorkerFrame):
    """Tokens that a run goes on with, as if it had drawn them next."""

    ids: tuple[Uint, ...]


@frame(44)
class Attend(WorkerFrame):
    """Whether nobody reads a run's stream: then it gives way to others of its class. At first
    somebody does. Not for a worker of kind `text`, which serves in order of arrival."""

    unread: bool


@frame(45)
class Ease(WorkerFrame):
    """What a worker of kind `tokens` does from now on, about no run: whether its steps are as small
    as they may be, and whether it guesses tokens. At first it guesses, in steps of any size."""

    small_steps: bool
    guess: bool


@frame(41)
class Halt(WorkerFrame):
    """Cancel a run; it still ends with its StreamEnd emission."""


CODEC: Codec[Frame] = Codec(FRAMES, MAX_WORKER_FRAME_BYTES)
encode, decode = CODEC.encode, CODEC.decode
SCHEMA_TEXT = schema_text(FRAMES, vars())
SCHEMA_HASH = schema_identity(SCHEMA_TEXT)
"""The identity of this schema. A worker of another version is refused."""
WORKER = frozenset(tag for tag in FRAMES if tag < Run.tag)
SUPERVISOR = frozenset(FRAMES) - WORKER | {Hello.tag}


def together(frames: Iterable[Frame]) -> Iterator[Frame | Emissions]:
    """Yield the frames in order; steps in a row as the emissions of all of them.

    That costs little more than one of the steps. Raises FrameError as `Step.cut` does.
    """
    for is_step, some in groupby(frames, lambda each: isinstance(each, Step)):
        if is_step:
            yield Emissions.joined([each for each in some if isinstance(each, Step)])
        else:
            yield from some


def check_hello(corr: int, frame: Frame | Emissions) -> None:
    """Raise SchemaMismatch unless a side's first frame is a Hello of this schema."""
    if corr or not isinstance(frame, Hello) or frame.schema != SCHEMA_HASH:
        raise SchemaMismatch(
            "supervisor and worker do not speak one schema", hint="run one version of both"
        )


class AtWork:
    """A worker's side of `origin/core/poison_streams.py`: it speaks before it works on a run."""

    def __init__(self, send: Callable[[Begun], None]) -> None:
        self._send = send
        self._taken: set[int] = set()  # and not begun
        self._begun: set[int] = set()
        self._told: set[int] = set()

    def take(self, run: int) -> None:
        """Its order is looked at now, which is work already; then it waits for its turn."""
        self._taken.add(run)
        self._tell(self._begun | {run})

    def begin(self, runs: Iterable[int]) -> None:
        """What comes next is done for these runs, some of which may have made something."""
        begun = self._taken.intersection(runs)
        self._taken -= begun
        self._begun |= begun
        self._tell(self._begun)

    def made(self, runs: Iterable[int]) -> None:
        """These have an emission, the end perhaps."""
        for run in runs:
            self._taken.discard(run)
            self._begun.discard(run)

    def repeat(self) -> None:
        """Say it again, as a sign of life."""
        self._told = set(self._begun)
        self._send(Begun(tuple(self._begun)))

    def _tell(self, runs: set[int]) -> None:
        if runs != self._told:
            self._told = set(runs)
            self._send(Begun(tuple(runs)))
