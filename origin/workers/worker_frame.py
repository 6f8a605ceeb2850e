"""The frames between a supervisor and its workers, and their codec.

These frames have the same header as client frames, and tags from 32 on. A frame's corr is the id of
a run, which the supervisor chooses and which is unique on one worker connection. Frames about the
worker itself have corr 0. Each side first sends a `Hello` with this schema's hash.

After a change to these classes run `make schemas`, which writes origin/workers/worker.bare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, groupby
from typing import NamedTuple, dataclass_transform

from tailrace.ledger.errors import FrameError, SchemaMismatch
from tailrace.ledger.frame import STREAM_ID_BYTES, Hello, OutputFormat, Sampling
from tailrace.ledger.record_extra import IdSpan
from tailrace.ledger.wire.bare import U32Int, U32Ints, Uint
from tailrace.ledger.wire.bare_schema import schema_identity, schema_text
from tailrace.ledger.wire.codec import PREFIX_BYTES, Codec, F, Tagged, framed
from tailrace.ledger.wire.schema import StreamId
from tailrace.origin.workers.liveness import ExitKind, kind_of
from tailrace.origin.workers.load_spans import LoadStage

# Large enough for an order with a prompt of 2^20 token ids of 4 bytes, and for a Step of many
# emissions.
MAX_WORKER_FRAME_BYTES = 8 << 20
MAX_FAULT_CHARS = 500


class WorkerFrame(Tagged):
    """Base class of the frames that only this schema has."""

    __slots__ = ()


Frame = WorkerFrame | Hello
FRAMES: dict[int, type[Frame]] = {Hello.tag: Hello}


@dataclass_transform(frozen_default=True)
def frame(tag: int) -> Callable[[type[F]], type[F]]:
    """Return a decorator that registers a class as the frame with this tag.

    Workers send the tags below 40, and the supervisor those from 40 on; both send `Hello`.
    """
    return framed(FRAMES, tag)


@frame(32)
class LoadProgress(WorkerFrame):
    """Progress of the worker's start: `done` of `total` units of the named stage."""

    stage: str
    done: Uint
    total: Uint


BRANCH = "branch"
"""Name in `Ready.offers` by which a worker of kind `text` says that it can continue any stream."""


@frame(33)
class Ready(WorkerFrame):
    """The worker is ready for orders; `context` and `vocab` are in tokens.

    A worker of kind `tokens` is ordered to generate by `StartRun`, one of kind `text` by
    `StartTextRun`. For a worker of kind `text`, `context` and `vocab` are 0, and `offers` has the
    optional fields of an Open that it supports, with `branch` if it can continue any stream.
    `spans` are the stages of the worker's start, without gaps.
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


class TokenCounts(NamedTuple):
    """Tokens of a run that its StreamEnd does not count.

    `cached` tokens of the prompt were found in the KV cache, also that of an upstream server.
    `reasoning` tokens of the output were reasoning, by an upstream server's count.
    """

    cached: int = 0
    reasoning: int = 0


NOT_COUNTED = TokenCounts()


@dataclass(slots=True)  # not frozen, because creating a frozen one takes three times as long
class Emission:
    """One frame of one run: `frame` is an encoded frame of the client schema with corr 0.

    `ids` are all tokens since the run's previous emission, up to the one whose text completes this
    frame. A token whose text is held back (incomplete UTF-8, a possible stop sequence) yields no
    frame, and its id is in the next emission. `steered` has a span of `ids` for each Steer order;
    the ids of one order are all in one emission. `can_retry`: the frame is the end of a run that
    has failed, and another run can continue the stream from its log. `counted` is for the emission
    of a StreamEnd; it is not compared, because it depends on what the KV cache holds.
    """

    run: int
    index: int
    ids: tuple[int, ...]
    steered: tuple[IdSpan, ...]
    frame: bytes
    can_retry: bool = False
    counted: TokenCounts = field(default=NOT_COUNTED, compare=False)


@dataclass(slots=True)
class Emissions:
    """Emissions as columns of equal length: `runs`, `indexes`, `ids` and `frames`.

    Emission number i has row i of each column. `steered` maps the few rows that have ids from Steer
    orders to the spans of these ids. `failed` has the runs that have failed in these emissions, and
    whose streams another run can continue.
    """

    runs: Sequence[int]
    indexes: Sequence[int]
    ids: Sequence[tuple[int, ...]]
    frames: Sequence[bytes]
    steered: dict[int, tuple[IdSpan, ...]]
    failed: Sequence[int] = ()
    counted: dict[int, TokenCounts] = field(default_factory=dict)
    """The counts of each row that ends a run, unless all of them are 0."""

    @classmethod
    def joined(cls, steps: Sequence[Step]) -> Emissions:
        """Return the emissions of consecutive steps.

        Raises FrameError if the columns of a step contradict each other.
        """
        if len(steps) == 1:
            return steps[0].cut()
        runs, indexes, ids, frames = (
            list[int](),
            list[int](),
            list[tuple[int, ...]](),
            list[bytes](),
        )
        steered: dict[int, tuple[IdSpan, ...]] = {}
        counted: dict[int, TokenCounts] = {}
        for step in steps:
            some, at = step.cut(), len(runs)
            runs += some.runs
            indexes += some.indexes
            ids += some.ids
            frames += some.frames
            steered.update({at + row: spans for row, spans in some.steered.items()})
            counted.update({at + row: counts for row, counts in some.counted.items()})
        failed = [run for step in steps for run in step.failed]
        return cls(runs, indexes, ids, frames, steered, failed, counted)

    def those(self, wanted: Sequence[bool]) -> Emissions:
        """Return the emissions in the rows for which `wanted` is True."""
        places = list(compress(range(len(wanted)), wanted))
        return Emissions(
            list(compress(self.runs, wanted)),
            list(compress(self.indexes, wanted)),
            list(compress(self.ids, wanted)),
            list(compress(self.frames, wanted)),
            {to: self.steered[at] for to, at in enumerate(places) if at in self.steered},
            self.failed,
            {to: self.counted[at] for to, at in enumerate(places) if at in self.counted},
        )


@dataclass(frozen=True, slots=True)
class SteeredIds:
    """The span of ids that one Steer order inserted into the emission that is in row `row`."""

    row: U32Int
    start: U32Int
    count: U32Int


@dataclass(frozen=True, slots=True)
class EndCounts:
    """The `TokenCounts` of the run whose last emission is in row `row`."""

    row: U32Int
    cached: Uint
    reasoning: Uint


@frame(34)
class Step(WorkerFrame):
    """The emissions of one engine step; the last emission of a run is its StreamEnd.

    They are sent as columns, which are ten times quicker to decode than structs. Each emission has
    a row in `runs`, `indexes`, `counts` (how many of `ids` are its own) and `sizes` (how many bytes
    of `frames` are its frame). `ids` and `frames` are concatenated in the order of the rows.
    `failed` has the runs that end here as failed, and whose streams another run can continue.
    """

    runs: U32Ints = ()
    indexes: U32Ints = ()
    counts: U32Ints = ()
    sizes: U32Ints = ()
    ids: U32Ints = ()
    frames: bytes = b""
    steered: tuple[SteeredIds, ...] = ()
    failed: U32Ints = ()
    counted: tuple[EndCounts, ...] = ()

    @classmethod
    def of(cls, emissions: Sequence[Emission]) -> Step:
        """Return a Step with these emissions."""
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
            failed=[each.run for each in emissions if each.can_retry],
            counted=tuple(
                EndCounts(row, *each.counted)
                for row, each in enumerate(emissions)
                if each.counted != NOT_COUNTED
            ),
        )

    def cut(self) -> Emissions:
        """Split the columns into emissions; raises FrameError if they contradict each other."""
        columns = (self.runs, self.indexes, self.counts, self.sizes)
        held = sum(self.counts), sum(self.sizes)
        if len(set(map(len, columns))) != 1 or held != (len(self.ids), len(self.frames)):
            raise FrameError("the columns of a step contradict each other", field="Step", offset=0)
        if min(self.sizes, default=PREFIX_BYTES) < PREFIX_BYTES:
            raise FrameError(
                f"a frame of a step has fewer than {PREFIX_BYTES} bytes",
                field="Step.sizes",
                offset=0,
            )
        all_ids, all_frames, at = tuple(self.ids), self.frames, 0
        ids = [all_ids[at : (at := at + count)] for count in self.counts]
        at = 0
        frames = [all_frames[at : (at := at + size)] for size in self.sizes]
        if any(each.row >= len(frames) for each in self.counted):
            raise FrameError("a row of a step does not exist", field="Step.counted", offset=0)
        counted = {each.row: TokenCounts(each.cached, each.reasoning) for each in self.counted}
        spans = self._spans()
        return Emissions(self.runs, self.indexes, ids, frames, spans, self.failed, counted)

    def _spans(self) -> dict[int, tuple[IdSpan, ...]]:
        spans: dict[int, tuple[IdSpan, ...]] = {}
        for each in self.steered:
            if each.row >= len(self.counts) or each.start + each.count > self.counts[each.row]:
                where = "the steered ids of a step are not in its emissions"
                raise FrameError(where, field="Step.steered", offset=0)
            span = IdSpan(each.start, each.count)
            spans[each.row] = (*spans.get(each.row, ()), span)
        return spans


@frame(36)
class ActiveRuns(WorkerFrame):
    """The runs that the worker works on from now on and that have no emission yet.

    The frame is sent before the work starts, and replaces the previous ActiveRuns. If the worker
    dies, one of these runs may be the cause. Runs that only wait in the worker's queue cannot be
    the cause.
    """

    runs: tuple[U32Int, ...] = ()


@frame(37)
class Fault(WorkerFrame):
    """Why the worker is about to end; `kind` is an `ExitKind`. `error` never quotes a request."""

    error: str
    kind: str

    @classmethod
    def of(cls, error: Exception, *, starting: bool) -> Fault:
        """Return the fault for an exception, as text of one line.

        If it is a crash, its message may quote a request, so only its class is sent.
        """
        kind, name = kind_of(error, starting=starting), type(error).__name__
        said = name if kind is ExitKind.CRASHED else " ".join(f"{name}: {error}".split())
        return cls(said[:MAX_FAULT_CHARS], kind)


@frame(35)
class Load(WorkerFrame):
    """Reports how busy the engine is. Counters count from the worker's start.

    Attributes:
        waiting: Waiting runs now, by priority class.
        running: Running runs now, by priority class.
        batch_limit: Current maximum number of tokens in a step.
        row_limit: Current maximum number of decoding runs; further runs wait.
        turn_limit: Maximum number of decoding runs in one step; beyond it, runs of less urgent
            classes take turns.
        pages: Pages of the KV cache.
        pages_free: Pages that are free or can be evicted; they may hold a reusable prefix.
        step_us: Duration of the last step in microseconds.
        tokens: Counter of generated tokens.
        prompt_tokens: Counter of prefilled tokens.
        reused_tokens: Counter of prompt tokens found in the KV cache.
        preemptions: Counter of runs that gave up their pages.
        drafted: Counter of tokens proposed by speculative decoding.
        accepted: Counter of proposed tokens that were accepted.
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
class StartRun(WorkerFrame):
    """An order to generate a stream, or to continue it.

    Attributes:
        prompt_ids: The prompt.
        generated_ids: Generated ids that are already in the ledger; none at first.
        sent_bytes: UTF-8 bytes of text in the stream's frames so far.
        next_index: Index of the stream's next frame.
        max_tokens: Maximum number of generated tokens, `generated_ids` included.
        sampling: Sampling parameters, all with explicit values.
        stop: Stop sequences.
        ignore_eos: True to continue after an end-of-text token.
        completes: True if the text continues the prompt's text; False for an answer in a chat.
        priority: A `tailrace.ledger.frame.Priority`.
        logprobs: Number of alternatives in each ScoredToken; None for frames without scores.
        format: The regular expression or JSON schema that the text must match, if any.
        tools: JSON of a `ToolUse`: calls of its functions become call frames instead of text.
        steered: Spans of `generated_ids` that came from Steer orders, one for each order.
        inserted_ids: Token ids to take before the first draw, like those of a Steer order.
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
    inserted_ids: U32Ints = ()


@dataclass(frozen=True, slots=True)
class StageTime:
    """The time of one stage of a pipeline in one run.

    `busy_us` is the time in microseconds that its `items` input items took, without the time in
    which it waited for input, or for room for its output.
    """

    stage: str
    items: Uint
    busy_us: Uint


@frame(38)
class StageTimes(WorkerFrame):
    """The times of the stages in the last run of a stream.

    It is sent before the run's StreamEnd, and with `is_final` false now and then while it runs.
    """

    stream: StreamId
    times: tuple[StageTime, ...]
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class BatchWait:
    """A run, and how long it has waited for a place in the batch so far, in milliseconds."""

    run: U32Int
    waited_ms: Uint


@frame(39)
class RunWaits(WorkerFrame):
    """How long runs have waited for the batch of an engine, or for their turn at a text worker.

    Current runs are reported from time to time, and every run before its StreamEnd. Runs that
    have not waited are left out.
    """

    waits: tuple[BatchWait, ...] = ()

    @classmethod
    def of(cls, waits_s: Mapping[int, float]) -> RunWaits:
        """Return the frame for waits in seconds, by run."""
        return cls(tuple(BatchWait(run, round(s * 1000)) for run, s in waits_s.items()))


@frame(43)
class StartTextRun(WorkerFrame):
    """An order to a worker of kind `text` to generate a stream, or to continue it.

    `recipe` is the JSON of a `Recipe`, `delivered` the stream's text so far, `next_index` the index
    of its next frame, and `calls` the number of tool calls in it so far. `inserted` are the indexes
    of the frames that the supervisor itself has added since the producer began, in order. `stream`
    is the id of the stream.
    """

    recipe: str
    delivered: str
    next_index: Uint
    calls: Uint = 0
    inserted: tuple[Uint, ...] = ()
    stream: StreamId = bytes(STREAM_ID_BYTES)


@frame(42)
class Steer(WorkerFrame):
    """Token ids that a run continues with, as if it had sampled them next."""

    ids: tuple[Uint, ...]


@frame(44)
class SetUnread(WorkerFrame):
    """Tells a worker of kind `tokens` whether a run's stream is `unread`; at first it is read.

    The scheduler prefers runs that are read to unread ones of the same priority class.
    """

    unread: bool


@frame(45)
class SetShedding(WorkerFrame):
    """Sets the load shedding of a worker of kind `tokens`; its corr is 0.

    `small_steps` makes its steps as small as possible. `guess` allows speculative decoding. Until
    the first such frame, steps have any size and speculative decoding is allowed.
    """

    small_steps: bool
    guess: bool


@frame(41)
class CancelRun(WorkerFrame):
    """An order to cancel a run; the run still ends with its StreamEnd emission.

    `is_final` is True if the stream ends with this run. Otherwise another run may continue it.
    """

    is_final: bool = False


CODEC: Codec[Frame] = Codec(FRAMES, MAX_WORKER_FRAME_BYTES)
encode, decode = CODEC.encode, CODEC.decode
SCHEMA_TEXT = schema_text(FRAMES, vars())
SCHEMA_HASH = schema_identity(FRAMES)
"""Hash of this schema; a worker whose schema has another hash is refused."""
WORKER = frozenset(tag for tag in FRAMES if tag < StartRun.tag)
SUPERVISOR = frozenset(FRAMES) - WORKER | {Hello.tag}


def together(frames: Iterable[Frame]) -> Iterator[Frame | Emissions]:
    """Yield the frames in order, with consecutive Steps joined to one `Emissions`.

    Handling joined steps costs little more than handling a single one. Raises FrameError if the
    columns of a Step contradict each other.
    """
    for is_step, some in groupby(frames, lambda each: isinstance(each, Step)):
        if is_step:
            yield Emissions.joined([each for each in some if isinstance(each, Step)])
        else:
            yield from some


def check_hello(corr: int, frame: Frame | Emissions) -> None:
    """Raise SchemaMismatch unless the first frame of the other side is a Hello of this schema."""
    if corr or not isinstance(frame, Hello) or frame.schema != SCHEMA_HASH:
        raise SchemaMismatch(
            "supervisor and worker have different schemas", hint="run the same version of both"
        )


class AtWork:
    """Tells the supervisor which runs the worker works on, before the work begins.

    The supervisor needs these reports to find poison streams, which kill their workers
    (`origin/core/poison_streams.py`).
    """

    def __init__(self, send: Callable[[ActiveRuns], None]) -> None:
        self._send = send
        self._taken: set[int] = set()  # runs whose orders were read, but whose work has not begun
        self._begun: set[int] = set()
        self._told: set[int] = set()

    def take(self, run: int) -> None:
        """Record that the order of `run` is now being read, which may already kill the worker."""
        self._taken.add(run)
        self._tell(self._begun | {run})

    def begin(self, runs: Iterable[int]) -> None:
        """Record that the worker works on these runs from now on."""
        begun = self._taken.intersection(runs)
        self._taken -= begun
        self._begun |= begun
        self._tell(self._begun)

    def made(self, runs: Iterable[int]) -> None:
        """Record that these runs have had an emission, so they are no poison streams."""
        for run in runs:
            self._taken.discard(run)
            self._begun.discard(run)

    def repeat(self) -> None:
        """Send the current runs again, so that the supervisor sees that this worker is alive."""
        self._told = set(self._begun)
        self._send(ActiveRuns(tuple(self._begun)))

    def _tell(self, runs: set[int]) -> None:
        if runs != self._told:
            self._told = set(runs)
            self._send(ActiveRuns(tuple(runs)))
