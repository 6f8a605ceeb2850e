"""The life of a subscription: when somebody is woken, who works, and until when.

Sans-I/O. `TABLE` is every transition there is; whatever it does not have is refused. Each
wake has a generation, one higher than the last, by which whoever was woken before is fenced.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum

from ledger.errors import Conflict

FIRST_RETRY_MS = 1_000
"""After the first failed delivery of a wake; twice as long after each further one."""
MAX_RETRY_MS = 60_000
JITTER = 0.2
"""A retry comes up to so much of its delay sooner or later, so that not all come at once."""
WAKE_ID_BYTES = 12


class Phase(Enum):
    IDLE = "idle"
    """Nobody has anything to do."""
    WAKING = "waking"
    """There is work; somebody is being told, and has not come yet."""
    LEASED = "leased"
    """Somebody works, until the lease ends."""


class WakeEvent(Enum):
    WORK = "work"
    """A stream has got something that is not acknowledged."""
    DELIVERED = "delivered"
    """The webhook has taken the wake."""
    FAILED = "failed"
    """The webhook has not taken it."""
    CLAIMED = "claimed"
    """A worker has come for it."""
    EXTENDED = "extended"
    """The holder has said that it is still at work."""
    DONE = "done"
    """The holder has finished."""
    RELEASED = "released"
    """The holder gives up; somebody else may have a try."""
    EXPIRED = "expired"
    """The holder was not heard of until its lease ended."""


TABLE: dict[tuple[Phase, WakeEvent], Phase] = {
    (Phase.IDLE, WakeEvent.WORK): Phase.WAKING,
    (Phase.WAKING, WakeEvent.DELIVERED): Phase.LEASED,
    (Phase.WAKING, WakeEvent.FAILED): Phase.WAKING,
    (Phase.WAKING, WakeEvent.CLAIMED): Phase.LEASED,
    # A webhook may call back before it has answered; its answer then comes to a lease.
    (Phase.WAKING, WakeEvent.EXTENDED): Phase.LEASED,
    (Phase.WAKING, WakeEvent.DONE): Phase.IDLE,
    (Phase.LEASED, WakeEvent.DELIVERED): Phase.LEASED,
    (Phase.LEASED, WakeEvent.FAILED): Phase.LEASED,
    (Phase.LEASED, WakeEvent.EXTENDED): Phase.LEASED,
    (Phase.LEASED, WakeEvent.DONE): Phase.IDLE,
    (Phase.LEASED, WakeEvent.RELEASED): Phase.IDLE,
    (Phase.LEASED, WakeEvent.EXPIRED): Phase.IDLE,
}


@dataclass(frozen=True, slots=True)
class WakeState:
    """Where a subscription stands. Times are Unix ms; None is never."""

    phase: Phase = Phase.IDLE
    generation: int = 0
    wake_id: str | None = None
    holder: str | None = None
    lease_until_ms: int | None = None
    notify_at_ms: int | None = None
    """When the wake is to be told, at first or again."""
    failures: int = 0
    """Of the deliveries of this wake."""

    @property
    def due_ms(self) -> int | None:
        """When time will change something by itself."""
        times = [at for at in (self.lease_until_ms, self.notify_at_ms) if at is not None]
        return min(times, default=None)

    def pack(self) -> bytes:
        return json.dumps(asdict(self) | {"phase": self.phase.value}).encode()

    @classmethod
    def unpack(cls, value: bytes) -> WakeState:
        fields = json.loads(value)
        return cls(**fields | {"phase": Phase(fields["phase"])})


def after(
    now: WakeState,
    event: WakeEvent,
    now_ms: int,
    lease_ms: int,
    random: Callable[[int], bytes],
    holder: str | None = None,
) -> WakeState:
    """The standing after `event`; Conflict (FENCED) for one that the table does not have."""
    phase = TABLE.get((now.phase, event))
    if phase is None:
        raise Conflict(f"nothing {event.value} can be done now", code="FENCED")
    if phase is Phase.IDLE:
        return WakeState(generation=now.generation)
    if event is WakeEvent.WORK:
        wake_id = f"w_{random(WAKE_ID_BYTES).hex()}"
        return WakeState(phase, now.generation + 1, wake_id, notify_at_ms=now_ms)
    if event is WakeEvent.FAILED:
        if phase is Phase.LEASED:
            return now
        delay_ms = _retry_delay_ms(now.failures + 1, random)
        return replace(now, failures=now.failures + 1, notify_at_ms=now_ms + delay_ms)
    return replace(
        now,
        phase=phase,
        holder=holder or now.holder,
        lease_until_ms=now_ms + lease_ms,
        notify_at_ms=None,
        failures=0,
    )


def _retry_delay_ms(failures: int, random: Callable[[int], bytes]) -> int:
    delay_ms = min(FIRST_RETRY_MS << min(failures - 1, 10), MAX_RETRY_MS)
    part = int.from_bytes(random(2), "big") / 0xFFFF * 2 - 1  # from -1 to 1
    return round(delay_ms * (1 + JITTER * part))
