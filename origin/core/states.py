"""The states of models, workers and streams, and every transition between them.

Transitions that are not in a table are impossible: a model that is loading is never evicted, a
worker that was told to stop never becomes ready, and a stream has at most one claim at a time.
"""

from __future__ import annotations

from enum import Enum

from tailrace.ledger.errors import Conflict


class ModelState(Enum):
    """The state of a model; the values are shown to operators."""

    AWAY = "away"
    QUEUED = "queued"
    """The model is to be loaded, and waits for memory."""
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """The model takes no new requests and is unloaded after its last one, because another model
    waits for its memory."""
    LEAVING = "leaving"
    RETURNING = "returning"
    """The model is being unloaded and was requested again: it is queued when its workers have
    ended."""


class ModelEvent(Enum):
    """An event that changes the state of a model."""

    WANTED = "wanted"
    ADMITTED = "admitted"
    """There is memory for the model now."""
    LOADED = "loaded"
    LOST = "lost"
    """The last worker of the model died; another one is started."""
    DROPPED = "dropped"
    """No request waits for the model any more, and its load has not begun."""
    GIVEN_UP = "given up"
    """The workers of the model die before they are ready, and its memory is needed, or no request
    waits for the model."""
    DRAINED = "drained"
    """Another model has waited long enough for the memory of this one."""
    EVICTED = "evicted"
    GONE = "gone"
    """All workers of the model have ended, so its memory is free."""


class WorkerState(Enum):
    """The state of a worker and of its process."""

    RESTING = "resting"
    """The worker has no process, and none is to be started."""
    WAITING = "waiting"
    """A process is to be started as soon as the circuit breaker of the model allows it."""
    STARTING = "starting"
    """The worker's process loads the model."""
    READY = "ready"
    SILENT = "silent"
    """The worker was ready and has sent no frame for too long: it gets no further streams."""
    STOPPING = "stopping"
    """The worker's process was told to end, and has not ended yet."""


class WorkerEvent(Enum):
    """An event that changes the state of a worker."""

    WANTED = "wanted"
    STARTED = "started"
    READY = "ready"
    SILENT = "silent"
    HEARD = "heard"
    UNWANTED = "unwanted"
    DIED = "died"
    """The worker's process ended without being told to."""
    EXITED = "exited"
    """The worker's process ended because it was told to."""


class StreamState(Enum):
    """The state of a stream at one origin."""

    ABSENT = "absent"
    """This origin has no record of the stream: it has ended, or another origin generates it, or
    there is no such stream."""
    OPENING = "opening"
    """Room is reserved for the stream while its request is checked and it is created in the
    ledger."""
    WAITING = "waiting"
    """The stream waits for a worker."""
    CLAIMING = "claiming"
    """A worker was chosen, and the ledger is asked to make this origin its producer."""
    RECALLED = "recalled"
    """The claim is not needed any more: the worker died, or the stream was cancelled. Until the
    ledger has answered, nothing else is done with the stream: if this origin sent a second claim
    now, the ledger might carry out the second one first."""
    RUNNING = "running"
    """A worker has the order to generate the stream."""
    CANCELLING = "cancelling"
    """The worker of the stream was told to cancel it."""
    ENDING = "ending"
    """The stream has no worker, and this origin writes the stream's end."""
    DEFERRED = "deferred"
    """The ledger gave no answer; the stream is tried again when the ledger answers again."""
    PAUSED = "paused"
    """No client reads the stream, so it is not generated until a client reads it again. A paused
    stream counts against no limit of running streams."""
    LEFT = "left"
    """The stream has no end, and this origin cannot continue it: it is damaged, or was written by
    another version."""


class StreamEvent(Enum):
    """An event that changes the state of a stream."""

    OPENED = "opened"
    CLOSED = "closed"
    """The request to open the stream was refused or abandoned before the stream was created."""
    ADMITTED = "admitted"
    FOUND = "found"
    """The stream is unfinished in the ledger, and its origin is gone or a client reads it here."""
    UNREADABLE = "unreadable"
    PLACED = "placed"
    CLAIMED = "claimed"
    """This origin has become the stream's producer, under a new epoch."""
    RECALLED = "recalled"
    RELEASED = "released"
    """The ledger has answered a claim that is not needed any more."""
    UNPLACED = "unplaced"
    """The stream lost its worker, and is to get another one."""
    RETRIED = "retried"
    """The stream's run has failed for the first time, and another run is to continue it."""
    CANCELLED = "cancelled"
    END_DUE = "end due"
    """This origin has to write the stream's end, because no worker can."""
    LEDGER_AWAY = "ledger away"
    LEDGER_BACK = "ledger back"
    PAUSED = "paused"
    DAMAGED = "damaged"
    TAKEN = "taken"
    """Another origin is the stream's producer, or the stream is not in the ledger any more."""
    ENDED = "ended"
    """The stream's end is durable."""


_M, _ME, _W, _WE = ModelState, ModelEvent, WorkerState, WorkerEvent
_S, _SE = StreamState, StreamEvent

MODEL_TRANSITIONS: dict[tuple[ModelState, ModelEvent], ModelState] = {
    (_M.AWAY, _ME.WANTED): _M.QUEUED,
    (_M.QUEUED, _ME.WANTED): _M.QUEUED,
    (_M.QUEUED, _ME.ADMITTED): _M.LOADING,
    (_M.QUEUED, _ME.DROPPED): _M.AWAY,
    (_M.LOADING, _ME.WANTED): _M.LOADING,
    (_M.LOADING, _ME.LOADED): _M.READY,
    (_M.LOADING, _ME.GIVEN_UP): _M.LEAVING,
    (_M.READY, _ME.WANTED): _M.READY,
    (_M.READY, _ME.LOST): _M.LOADING,
    (_M.READY, _ME.EVICTED): _M.LEAVING,
    (_M.READY, _ME.DRAINED): _M.DRAINING,
    (_M.DRAINING, _ME.WANTED): _M.DRAINING,
    (_M.DRAINING, _ME.GIVEN_UP): _M.LEAVING,
    (_M.DRAINING, _ME.EVICTED): _M.LEAVING,
    (_M.LEAVING, _ME.WANTED): _M.RETURNING,
    (_M.LEAVING, _ME.GONE): _M.AWAY,
    (_M.RETURNING, _ME.WANTED): _M.RETURNING,
    (_M.RETURNING, _ME.GONE): _M.QUEUED,
}

WORKER_TRANSITIONS: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_W.RESTING, _WE.WANTED): _W.WAITING,
    (_W.WAITING, _WE.STARTED): _W.STARTING,
    (_W.WAITING, _WE.UNWANTED): _W.RESTING,
    (_W.STARTING, _WE.READY): _W.READY,
    (_W.STARTING, _WE.DIED): _W.WAITING,
    (_W.STARTING, _WE.UNWANTED): _W.STOPPING,
    (_W.READY, _WE.SILENT): _W.SILENT,
    (_W.READY, _WE.DIED): _W.WAITING,
    (_W.READY, _WE.UNWANTED): _W.STOPPING,
    (_W.SILENT, _WE.HEARD): _W.READY,
    (_W.SILENT, _WE.DIED): _W.WAITING,
    (_W.SILENT, _WE.UNWANTED): _W.STOPPING,
    (_W.STOPPING, _WE.DIED): _W.RESTING,
    (_W.STOPPING, _WE.EXITED): _W.RESTING,
}

STREAM_TRANSITIONS: dict[tuple[StreamState, StreamEvent], StreamState] = {
    (_S.ABSENT, _SE.OPENED): _S.OPENING,
    (_S.ABSENT, _SE.ADMITTED): _S.WAITING,
    (_S.ABSENT, _SE.FOUND): _S.WAITING,
    (_S.ABSENT, _SE.CANCELLED): _S.ENDING,
    (_S.ABSENT, _SE.PAUSED): _S.PAUSED,
    (_S.ABSENT, _SE.UNREADABLE): _S.LEFT,
    (_S.OPENING, _SE.CLOSED): _S.ABSENT,
    (_S.OPENING, _SE.ADMITTED): _S.WAITING,
    (_S.OPENING, _SE.CANCELLED): _S.ENDING,
    (_S.WAITING, _SE.PLACED): _S.CLAIMING,
    (_S.WAITING, _SE.PAUSED): _S.PAUSED,
    (_S.WAITING, _SE.CANCELLED): _S.ENDING,
    (_S.WAITING, _SE.END_DUE): _S.ENDING,
    (_S.CLAIMING, _SE.CLAIMED): _S.RUNNING,
    (_S.CLAIMING, _SE.RECALLED): _S.RECALLED,
    (_S.CLAIMING, _SE.UNPLACED): _S.WAITING,
    (_S.CLAIMING, _SE.CANCELLED): _S.RECALLED,
    (_S.CLAIMING, _SE.END_DUE): _S.ENDING,
    (_S.CLAIMING, _SE.LEDGER_AWAY): _S.DEFERRED,
    (_S.CLAIMING, _SE.TAKEN): _S.ABSENT,
    (_S.RECALLED, _SE.CANCELLED): _S.RECALLED,
    (_S.RECALLED, _SE.RELEASED): _S.WAITING,
    (_S.RECALLED, _SE.END_DUE): _S.ENDING,
    (_S.RECALLED, _SE.LEDGER_AWAY): _S.DEFERRED,
    (_S.RECALLED, _SE.TAKEN): _S.ABSENT,
    (_S.RUNNING, _SE.CANCELLED): _S.CANCELLING,
    (_S.RUNNING, _SE.UNPLACED): _S.WAITING,
    (_S.RUNNING, _SE.RETRIED): _S.WAITING,
    (_S.RUNNING, _SE.PAUSED): _S.PAUSED,
    (_S.RUNNING, _SE.END_DUE): _S.ENDING,
    (_S.RUNNING, _SE.LEDGER_AWAY): _S.DEFERRED,
    (_S.RUNNING, _SE.TAKEN): _S.ABSENT,
    (_S.RUNNING, _SE.ENDED): _S.ABSENT,
    (_S.CANCELLING, _SE.CANCELLED): _S.CANCELLING,
    (_S.CANCELLING, _SE.END_DUE): _S.ENDING,
    (_S.CANCELLING, _SE.LEDGER_AWAY): _S.DEFERRED,
    (_S.CANCELLING, _SE.TAKEN): _S.ABSENT,
    (_S.CANCELLING, _SE.ENDED): _S.ABSENT,
    (_S.ENDING, _SE.CANCELLED): _S.ENDING,
    (_S.ENDING, _SE.ENDED): _S.ABSENT,
    (_S.ENDING, _SE.TAKEN): _S.ABSENT,
    (_S.ENDING, _SE.LEDGER_AWAY): _S.DEFERRED,
    (_S.ENDING, _SE.DAMAGED): _S.LEFT,
    (_S.DEFERRED, _SE.CANCELLED): _S.DEFERRED,
    (_S.DEFERRED, _SE.LEDGER_BACK): _S.WAITING,
    (_S.DEFERRED, _SE.END_DUE): _S.ENDING,
    (_S.PAUSED, _SE.FOUND): _S.WAITING,
    (_S.PAUSED, _SE.CANCELLED): _S.ENDING,
    (_S.PAUSED, _SE.TAKEN): _S.ABSENT,
    (_S.LEFT, _SE.FOUND): _S.WAITING,
    (_S.LEFT, _SE.CANCELLED): _S.ENDING,
    (_S.LEFT, _SE.TAKEN): _S.ABSENT,
}

ABOUT_TO_GO = (ModelState.LEAVING, ModelState.RETURNING)
HOLDING_MEMORY = (ModelState.LOADING, ModelState.READY, ModelState.DRAINING, *ABOUT_TO_GO)
UP = (WorkerState.READY, WorkerState.SILENT)


def next_state(before: ModelState, event: ModelEvent) -> ModelState:
    """Return a model's next state; raises Conflict if the table has no such transition."""
    try:
        return MODEL_TRANSITIONS[before, event]
    except KeyError:
        raise Conflict(f"a model that is {before.value} cannot be {event.value}") from None
