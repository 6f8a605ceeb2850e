"""Events of an origin's streams, and the commands that their core returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tailrace.ledger.errors import Conflict, TailraceError
from tailrace.ledger.frame import Caller, FinishReason, Notice, Priority
from tailrace.ledger.interface import Refusal
from tailrace.origin.core import events as models
from tailrace.origin.core.step import StepFrames
from tailrace.origin.core.stream import PendingEnd, Stream
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import History
from tailrace.origin.workers.worker_frame import Frame


class Purpose(Enum):
    """The reason for which a stream is looked up in the ledger."""

    RESTORE = "restore"
    """The stream is unfinished, and its origin is gone."""
    WAKE = "wake"
    """The stream is read here, and is not generated here."""
    CANCEL = "cancel"
    EXPIRE = "expire"
    """The stream has been paused here for too long."""


class FoundStream(NamedTuple):
    """The ledger's data about a generated stream that has no end."""

    recipe: Recipe
    epoch: int
    next_index: int = 0


# ---- events ----


@dataclass(frozen=True, slots=True)
class StreamsRequested:
    """A client wants to open streams with these ids: room is reserved for all or for none.

    `now_ms` is Unix time, which decides the day and month of a budget.
    """

    streams: Sequence[bytes]
    priority: Priority
    caller: Caller | None = None
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """A request to open streams has ended: free the room of the streams that were not created."""

    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StreamsAdmitted:
    """New streams have been created in the ledger.

    `is_read`: the client that opened them will read them. `has_waited`: the request waited for
    their model.
    """

    streams: Sequence[tuple[bytes, Recipe]]
    is_read: bool = True
    has_waited: bool = False


@dataclass(frozen=True, slots=True)
class UnfinishedListed:
    """The ledger answers again, and lists the unfinished streams that have no living origin."""

    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StreamsFound:
    """The answer to a FindStreams, with None for each stream that has ended or cannot go on."""

    purpose: Purpose
    found: Mapping[bytes, FoundStream | None]


@dataclass(frozen=True, slots=True)
class FindFailed:
    """A FindStreams got no answer from the ledger."""

    purpose: Purpose
    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A client or an operator wants a stream to end as cancelled."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class SteerRequested:
    """A client wants these token ids inserted into a running stream, after its output so far.

    `ticket` is a number by which the caller recognises the answer to this order.
    """

    stream: bytes
    ids: Sequence[int]
    ticket: int


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """A paused stream must continue, because a client sends it a Steer order."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This origin has become the producer of a stream, under `epoch`, and has read its log."""

    stream: bytes
    run: int
    epoch: int
    history: History


@dataclass(frozen=True, slots=True)
class NoticesLogged:
    """The notices of an AppendNotices are durable; `history` includes them."""

    stream: bytes
    run: int
    history: History


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """A stream could not be taken over for a run.

    Without an error, the stream has ended, was deleted or has another producer.
    """

    stream: bytes
    run: int
    error: TailraceError | None = None


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """The order to generate a stream does not fit into a frame."""

    stream: bytes
    run: int


@dataclass(frozen=True, slots=True)
class StepDurable:
    """The frames of a worker's step are durable, except the refused ones."""

    worker: int
    step: StepFrames
    refusals: Sequence[Refusal] = ()
    took_s: float = 0.0
    """Seconds that the commit of the step took."""


@dataclass(frozen=True, slots=True)
class EndStored:
    """A stream has an end in the ledger.

    `epoch` is the stream's new epoch if this origin took it over to write the end.
    """

    stream: bytes
    nth: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class EndRefused:
    """The attempt with number `nth` to write a stream's end has failed."""

    stream: bytes
    nth: int
    error: TailraceError


@dataclass(frozen=True, slots=True)
class RunsStarted:
    """A worker computes these runs now (see `Stream.run`), and they have no output yet.

    If the worker dies, one of these runs may be the cause.
    """

    worker: int
    runs: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerAvailable:
    """Streams may be placed on a worker: it has loaded its model, or sends frames again.

    The caller must first report WorkerReady or WorkerHeard to the core of models and workers
    (`ModelPool`). `is_new` is True if the worker has just loaded its model, and False if it was
    silent and has sent a frame again.
    """

    worker: int
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The process of a worker has ended; `is_death` is True if it was not told to end."""

    worker: int
    is_death: bool = True


@dataclass(frozen=True, slots=True)
class ReadersSeen:
    """The streams that had a reader at any time since the previous ReadersSeen."""

    streams: AbstractSet[bytes]


@dataclass(frozen=True, slots=True)
class LoadMeasured:
    """The free share of the machine's memory, from 0 to 1, was measured."""

    free_memory: float


StreamHappening = (
    StreamsRequested
    | RequestClosed
    | StreamsAdmitted
    | UnfinishedListed
    | StreamsFound
    | FindFailed
    | CancelRequested
    | SteerRequested
    | WakeRequested
    | TakenOver
    | NoticesLogged
    | ClaimFailed
    | OrderRefused
    | StepDurable
    | EndStored
    | EndRefused
    | RunsStarted
    | WorkerAvailable
    | WorkerGone
    | ReadersSeen
    | LoadMeasured
)

# ---- commands ----


@dataclass(frozen=True, slots=True)
class FindStreams:
    """Look streams up in the ledger; answered by StreamsFound or FindFailed."""

    purpose: Purpose
    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Become the producer of a stream for a run; answered by TakenOver or ClaimFailed."""

    stream: Stream
    run: int
    worker: int


@dataclass(frozen=True, slots=True)
class AppendNotices:
    """Append notices for readers to a stream's log; answered by NoticesLogged or ClaimFailed."""

    stream: bytes
    run: int
    epoch: int
    notices: Sequence[Notice]
    history: History


@dataclass(frozen=True, slots=True)
class AppendEnd:
    """Take a stream over and write its end; answered by EndStored or EndRefused."""

    stream: Stream
    nth: int
    end: PendingEnd


@dataclass(frozen=True, slots=True)
class OrderRun:
    """Send a worker of kind `kind` the order to generate a stream, then the frames `follow_up`.

    Answered by OrderRefused if the order does not fit into a frame.
    """

    worker: int
    run: int
    stream: Stream
    history: History
    kind: str
    follow_up: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a frame other than the order of OrderRun to a worker.

    `run` is the run to which the frame refers, or 0 if it refers to the worker as a whole.
    """

    worker: int
    run: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class AnswerSteers:
    """Answer the callers of Steer orders: the orders are durable, or failed with `error`."""

    tickets: Sequence[int]
    error: Conflict | None = None


@dataclass(frozen=True, slots=True)
class ReportToModels:
    """Report an event to the core of models and workers."""

    event: models.Event


@dataclass(frozen=True, slots=True)
class RecordArrival:
    """Add a new stream to the history."""

    stream: bytes
    model: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """Record the end of a stream in the history, metrics and traces.

    `is_delivered` is True if the usage stored with the end counts all tokens as delivered.
    """

    stream: Stream
    reason: FinishReason
    is_delivered: bool


@dataclass(frozen=True, slots=True)
class RecordReleases:
    """Add the frames that a step released to the metrics.

    Attributes:
        gaps: Tuples of a priority class, the seconds between two releases of a stream, and the
            number of frames for which both are the same.
        firsts: The class, the model, the seconds since admission, and the trace of each stream
            whose first frame was released.
    """

    gaps: Sequence[tuple[str, float, int]] = ()
    firsts: Sequence[tuple[str, str, float, str | None]] = ()


@dataclass(frozen=True, slots=True)
class RecordRetry:
    """Count a stream whose run has failed, and which another run is to continue."""


@dataclass(frozen=True, slots=True)
class RecordIdle:
    """Count a stream that is ended because it had neither a reader nor output for too long."""

    state: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """Log an event; `level` is the name of the logger's method, such as `warning`."""

    level: str
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


StreamCommand = (
    FindStreams
    | TakeOver
    | AppendNotices
    | AppendEnd
    | OrderRun
    | SendFrame
    | AnswerSteers
    | ReportToModels
    | RecordArrival
    | RecordEnd
    | RecordReleases
    | RecordRetry
    | RecordIdle
    | LogLine
)
