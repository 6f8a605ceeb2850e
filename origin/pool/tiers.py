"""How near a model is to answering, and what a model that is kept may become next: a table."""

from __future__ import annotations

from enum import Enum, IntEnum

from tailrace.ledger.errors import Conflict


class Tier(IntEnum):
    """From nothing at all to a model that has just answered; what a start still has to pay.

    On a CPU: `launched` is a launcher to fork from, `host` weights that were read before and lie
    in the system's page cache, `device` the model in its worker's memory.
    """

    COLD = 0
    LAUNCHED = 1
    """A process has imported what a worker needs."""
    HOST = 2
    """Its weights are in the host's memory."""
    DEVICE = 3
    """They are on the device."""
    COMPILED = 4
    """Its kernels are compiled, the shapes that it has seen were replayed: it may be asked."""
    HOT = 5
    """It has answered since."""

    @property
    def word(self) -> str:
        return self.name.lower()


STAGE_TIERS = {
    "check": Tier.LAUNCHED,
    "read": Tier.LAUNCHED,
    "hash": Tier.LAUNCHED,
    "unpack": Tier.HOST,
    "move": Tier.HOST,
    "tokenizer": Tier.DEVICE,
    "warm-up": Tier.DEVICE,
    "compile": Tier.DEVICE,
}
"""What a worker has reached by the time that it enters a stage of its start."""


class Residence(Enum):
    """What the pool does with a model."""

    AWAY = "away"
    QUEUED = "queued"
    """It is wanted, and there is no room yet."""
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """It takes no more requests, and leaves when those that it has are over: others' turn."""
    LEAVING = "leaving"
    RETURNING = "returning"
    """It is leaving, and was asked for again: it is loaded once it has gone."""


class PoolEvent(Enum):
    WANTED = "wanted"
    ADMITTED = "admitted"
    """There is room for it now."""
    LOADED = "loaded"
    LOST = "lost"
    """Its last worker died; its slots start another one."""
    GIVEN_UP = "given_up"
    """None of its workers starts; it holds no room until it is tried again."""
    DRAINED = "drained"
    """Another one has waited for its room for long enough."""
    EVICTED = "evicted"
    GONE = "gone"
    """Its workers have ended, and their memory is free."""


TRANSITIONS: dict[tuple[Residence, PoolEvent], Residence] = {
    (Residence.AWAY, PoolEvent.WANTED): Residence.QUEUED,
    (Residence.QUEUED, PoolEvent.WANTED): Residence.QUEUED,
    (Residence.QUEUED, PoolEvent.ADMITTED): Residence.LOADING,
    (Residence.QUEUED, PoolEvent.GIVEN_UP): Residence.AWAY,
    (Residence.LOADING, PoolEvent.WANTED): Residence.LOADING,
    (Residence.LOADING, PoolEvent.LOADED): Residence.READY,
    (Residence.LOADING, PoolEvent.LOST): Residence.LOADING,
    (Residence.LOADING, PoolEvent.GIVEN_UP): Residence.LEAVING,
    (Residence.READY, PoolEvent.WANTED): Residence.READY,
    (Residence.READY, PoolEvent.LOADED): Residence.READY,
    (Residence.READY, PoolEvent.LOST): Residence.LOADING,
    (Residence.READY, PoolEvent.EVICTED): Residence.LEAVING,
    (Residence.READY, PoolEvent.DRAINED): Residence.DRAINING,
    (Residence.DRAINING, PoolEvent.WANTED): Residence.DRAINING,
    (Residence.DRAINING, PoolEvent.GIVEN_UP): Residence.LEAVING,
    (Residence.DRAINING, PoolEvent.EVICTED): Residence.LEAVING,
    (Residence.LEAVING, PoolEvent.WANTED): Residence.RETURNING,
    (Residence.LEAVING, PoolEvent.GONE): Residence.AWAY,
    (Residence.RETURNING, PoolEvent.WANTED): Residence.RETURNING,
    (Residence.RETURNING, PoolEvent.GONE): Residence.QUEUED,
}
"""What is not here cannot happen: above all, a model that is loading is never evicted."""

HOLDING_ROOM = frozenset(Residence) - {Residence.AWAY, Residence.QUEUED}

ABOUT_TO_GO = frozenset((Residence.LEAVING, Residence.RETURNING))


def follow(before: Residence, event: PoolEvent) -> Residence:
    """What comes of it; raises Conflict for what the table does not know."""
    try:
        return TRANSITIONS[before, event]
    except KeyError:
        raise Conflict(f"a model that is {before.value} cannot be {event.value}") from None
