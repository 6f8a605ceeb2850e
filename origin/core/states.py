"""The states of models and workers, and every transition between them.

What is not in a table cannot happen: above all, a model that is loading is never evicted, and a
worker that was told to stop never becomes ready.
"""

from __future__ import annotations

from enum import Enum

from tailrace.ledger.errors import Conflict


class ModelState(Enum):
    """Whether a model is loaded, and what is under way; operators see the words."""

    AWAY = "away"
    QUEUED = "queued"
    """It is wanted, and waits for memory."""
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """It takes no new requests and leaves after its last one, because another model waits."""
    LEAVING = "leaving"
    RETURNING = "returning"
    """It is leaving, and was requested again: it is loaded after its workers have ended."""


class ModelEvent(Enum):
    """What changes the state of a model."""

    WANTED = "wanted"
    ADMITTED = "admitted"
    """There is memory for it now."""
    LOADED = "loaded"
    LOST = "lost"
    """Its last worker died; another one is started."""
    DROPPED = "dropped"
    """Nobody waits for it any more, and it was not admitted yet."""
    GIVEN_UP = "given up"
    """Its workers die before they are ready, and its memory is needed or nobody wants it."""
    DRAINED = "drained"
    """Another model has waited for its memory for long enough."""
    EVICTED = "evicted"
    GONE = "gone"
    """All its workers have ended, so its memory is free."""


class WorkerState(Enum):
    """Whether a worker has a process, and what that process does."""

    RESTING = "resting"
    """It has no process and is to have none."""
    WAITING = "waiting"
    """It is to have a process; the circuit breaker of its model delays the start."""
    STARTING = "starting"
    """Its process loads the model."""
    READY = "ready"
    SILENT = "silent"
    """It was ready, and has said nothing for too long: it is given no streams."""
    STOPPING = "stopping"
    """Its process was told to end, and has not ended yet."""


class WorkerEvent(Enum):
    """What changes the state of a worker."""

    WANTED = "wanted"
    STARTED = "started"
    READY = "ready"
    SILENT = "silent"
    HEARD = "heard"
    UNWANTED = "unwanted"
    DIED = "died"
    """Its process ended, and was not told to."""
    EXITED = "exited"
    """Its process ended as it was told to."""


_M, _ME, _W, _WE = ModelState, ModelEvent, WorkerState, WorkerEvent

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

HOLDING_MEMORY = frozenset(ModelState) - {ModelState.AWAY, ModelState.QUEUED}
ABOUT_TO_GO = frozenset((ModelState.LEAVING, ModelState.RETURNING))
UP = frozenset((WorkerState.READY, WorkerState.SILENT))


def next_state(before: ModelState, event: ModelEvent) -> ModelState:
    """Return the state that follows; raises Conflict for what the table does not know."""
    try:
        return MODEL_TRANSITIONS[before, event]
    except KeyError:
        raise Conflict(f"a model that is {before.value} cannot be {event.value}") from None
