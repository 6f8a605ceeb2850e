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
    """Why a stream is looked for in the ledger."""

    RESTORE = "restore"
    """It is unfinished, and its origin is gone."""
    WAKE = "wake"
    """It is read here, and is not generated here."""
    CANCEL = "cancel"
    EXPIRE = "expire"
    """It has been paused here for too long."""


class FoundStream(NamedTuple):
    """A generation without an end, as the ledger knows it."""

    recipe: Recipe
    epoch: int
    next_index: int = 0


# ---- events ----


@dataclass(frozen=True, slots=True)
class StreamsRequested:
    """A client wants to open streams, which get these ids: room is kept for all or for none."""

    streams: Sequence[bytes]
    priority: Priority
    caller: Caller | None = None


@dataclass(frozen=True, slots=True)
class RequestClosed:
    """A request to open streams is over; room is kept no longer for those that were not created."""

    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StreamsAdmitted:
    """New streams are in the ledger.

    `is_read`: whoever opened them will read them. `has_waited`: their model had to be loaded.
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
    """The answers to a FindStreams; None for a stream that has ended or cannot be continued."""

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
    """A client wants a stream to go on with these ids; `ticket` names the order to its caller."""

    stream: bytes
    ids: Sequence[int]
    ticket: int


@dataclass(frozen=True, slots=True)
class WakeRequested:
    """A paused stream is to go on."""

    stream: bytes


@dataclass(frozen=True, slots=True)
class TakenOver:
    """This origin is the producer of a stream under `epoch`, and has read its log."""

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
    """A stream could not be taken over for a run; without an error, nothing is left to do."""

    stream: bytes
    run: int
    error: TailraceError | None = None


@dataclass(frozen=True, slots=True)
class OrderRefused:
    """No frame can hold the order to generate a stream."""

    stream: bytes
    run: int


@dataclass(frozen=True, slots=True)
class StepDurable:
    """The frames of a worker's step are durable, except the refused ones."""

    worker: int
    step: StepFrames
    refusals: Sequence[Refusal] = ()


@dataclass(frozen=True, slots=True)
class EndStored:
    """A stream has an end in the ledger, under this epoch if it was written now."""

    stream: bytes
    nth: int
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class EndRefused:
    """The nth try to write a stream's end has failed."""

    stream: bytes
    nth: int
    error: TailraceError


@dataclass(frozen=True, slots=True)
class RunsStarted:
    """A worker is at work on these of its runs that have made nothing yet: it may die of them."""

    worker: int
    runs: Sequence[int]


@dataclass(frozen=True, slots=True)
class WorkerAvailable:
    """A worker may be given streams: it is ready, or was silent and is heard again.

    Its model knows that already. `is_new`: it has just loaded its model.
    """

    worker: int
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The process of a worker has ended; `is_death` if it was not told to."""

    worker: int
    is_death: bool = True


@dataclass(frozen=True, slots=True)
class ReadersSeen:
    """The streams that were read at any time since the last of these events."""

    streams: AbstractSet[bytes]


@dataclass(frozen=True, slots=True)
class LoadMeasured:
    """The share of the memory that is free."""

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
    """Look for streams in the ledger; answered by StreamsFound or FindFailed."""

    purpose: Purpose
    streams: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Become a stream's producer, for a run; answered by TakenOver or ClaimFailed."""

    stream: Stream
    run: int
    worker: int


@dataclass(frozen=True, slots=True)
class AppendNotices:
    """Log what readers are to be told; answered by NoticesLogged or ClaimFailed."""

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
    """Send a worker of this kind the order to generate a stream, and then what `follow_up` says.

    Answered by OrderRefused if no frame can hold the order.
    """

    worker: int
    run: int
    stream: Stream
    history: History
    kind: str
    follow_up: Sequence[Frame] = ()


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a worker any other order; run 0 means the worker itself."""

    worker: int
    run: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class AnswerSteers:
    """Tell those who steer: their orders are durable, or will not be taken because of `error`."""

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
    """Add a stream that is over here to history, metrics and traces."""

    stream: Stream
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class RecordReleases:
    """Add the releases of a step to the metrics.

    `gaps` are seconds since the release before, with how many frames had it, by class; `firsts`
    are the class, seconds since its admission and trace of each stream with its first release.
    """

    gaps: Sequence[tuple[str, float, int]] = ()
    firsts: Sequence[tuple[str, float, str | None]] = ()


@dataclass(frozen=True, slots=True)
class RecordIdle:
    """Count a stream that is ended because it had neither reader nor output."""

    state: str


@dataclass(frozen=True, slots=True)
class LogLine:
    """Log an event; `level` is a name of a log method."""

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
    | RecordIdle
    | LogLine
)
