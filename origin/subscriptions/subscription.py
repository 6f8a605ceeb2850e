"""The rules of a subscription: streams it matches, when it wakes a worker, and who holds the lease.

Sans-I/O. Streams are named, or matched by a pattern: `*` is one segment of a name, `**` is any
number of them, including none. `TABLE` has every transition; others are refused. Each wake has a
generation, one higher than the last, which fences workers that were woken before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar
from urllib.parse import unquote

from pydantic import TypeAdapter

from tailrace.ledger.errors import Conflict

ONE = "*"
ANY = "**"
MAX_SEGMENTS = 16
MAX_ANY = 1
"""Maximum number of `**` in a pattern; with only one, matching needs no backtracking."""

K = TypeVar("K")

FIRST_RETRY_MS = 1_000
"""Delay in ms after the first failed delivery of a wake; each further failure doubles it."""
MAX_RETRY_MS = 60_000
JITTER = 0.2
"""Random part of a retry's delay, as a share of the delay, so that retries do not coincide."""
WAKE_ID_BYTES = 12


class Glob:
    """A pattern for names of streams: `*` stands for one segment, `**` for any number of segments.

    Raises ValueError if the pattern has too many segments, or more than one `**`.
    """

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part]
        if len(parts) > MAX_SEGMENTS or parts.count(ANY) > MAX_ANY:
            raise ValueError(
                f"a pattern has at most {MAX_SEGMENTS} segments, and {ANY} at most once"
            )
        self._any = ANY in parts
        at = parts.index(ANY) if self._any else len(parts)
        # None stands for `*`, which matches any segment. A literal star is written as %2A.
        segments = [None if part == ONE else unquote(part) for part in parts]
        self._head, self._tail = segments[:at], segments[at + 1 :]

    @property
    def first(self) -> str | None:
        """First segment that all matching names share; None if it can be any."""
        return self._head[0] if self._head else None

    @property
    def prefix(self) -> str:
        """Beginning that all matching names share; it may be empty."""
        known = self._head[: self._head.index(None)] if None in self._head else self._head
        return "/".join(part for part in known if part is not None)

    def matches(self, name: str) -> bool:
        return self.fits(name.split("/"))

    def fits(self, given: Sequence[str]) -> bool:
        """Return True if the pattern matches a name that consists of these segments."""
        beyond = len(given) - len(self._head) - len(self._tail)
        if beyond < 0 or (beyond and not self._any):
            return False
        end = given[len(given) - len(self._tail) :] if self._tail else ()
        return _are(self._head, given) and _are(self._tail, end)


def _are(wanted: Sequence[str | None], given: Sequence[str]) -> bool:
    return all(want in (None, part) for want, part in zip(wanted, given, strict=False))


class Interest:
    """The streams that a subscription matches, without the stream `wake`.

    The subscription appends a message about each wake to the stream `wake`. If it matched that
    stream, each wake would cause the next one.
    """

    def __init__(self, pattern: str | None, streams: Sequence[str], wake: str | None) -> None:
        self.streams = frozenset(streams)
        self.glob = None if pattern is None else Glob(pattern)
        self._wake = wake

    @classmethod
    def unpack(cls, entry: bytes) -> Interest:
        fields = json.loads(entry)
        return cls(fields["pattern"], fields["streams"], fields["wake_stream"])

    def covers(self, path: str, segments: Sequence[str]) -> bool:
        if path == self._wake:
            return False
        return path in self.streams or (self.glob is not None and self.glob.fits(segments))


class Directory:
    """The interests of all subscriptions, indexed by the first segment of the streams' names."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[bytes, Interest]] = {}
        self._by_stream: dict[str, dict[str, None]] = {}
        # Patterns by their first segment; None for patterns that any first segment can match.
        self._by_first: dict[str | None, dict[str, None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._entries))

    def entry(self, name: str) -> bytes | None:
        entry, _ = self._entries.get(name, (None, None))
        return entry

    def enter(self, name: str, entry: bytes) -> None:
        self.leave(name)
        interest = Interest.unpack(entry)
        self._entries[name] = entry, interest
        for stream in interest.streams:
            self._by_stream.setdefault(stream, {})[name] = None
        if interest.glob is not None:
            self._by_first.setdefault(interest.glob.first, {})[name] = None

    def leave(self, name: str) -> None:
        _, interest = self._entries.pop(name, (None, None))
        if interest is None:
            return
        for stream in interest.streams:
            _strike(self._by_stream, stream, name)
        if interest.glob is not None:
            _strike(self._by_first, interest.glob.first, name)

    def interested(self, path: str) -> list[str]:
        """Return the subscriptions that are interested in a stream."""
        segments = path.split("/")
        candidates = {
            **self._by_stream.get(path, {}),
            **self._by_first.get(segments[0], {}),
            **self._by_first.get(None, {}),
        }
        return [name for name in candidates if self._entries[name][1].covers(path, segments)]


def _strike(lists: dict[K, dict[str, None]], key: K, name: str) -> None:
    names = lists[key]
    del names[name]
    if not names:
        del lists[key]


class Phase(Enum):
    """Phase of a subscription."""

    IDLE = "idle"
    """There is no work, and no worker or webhook holds the lease."""
    WAKING = "waking"
    """There is work, and a wake is being delivered."""
    LEASED = "leased"
    """A worker or webhook, the holder, has the lease and handles the work."""


class WakeEvent(Enum):
    """Event that may change the phase."""

    WORK = "work"
    """A stream has data that is not acknowledged."""
    DELIVERED = "delivered"
    """The webhook has accepted the wake."""
    FAILED = "failed"
    """The webhook has not accepted the wake."""
    CLAIMED = "claimed"
    """A worker has claimed the wake."""
    EXTENDED = "extended"
    """The worker that holds the lease has extended it."""
    DONE = "done"
    """The worker that holds the lease has handled the wake."""
    RELEASED = "released"
    """The worker that holds the lease has given it up, so that another one may claim."""
    EXPIRED = "expired"
    """The lease ended without a report from its holder."""


TABLE: dict[tuple[Phase, WakeEvent], Phase] = {
    (Phase.IDLE, WakeEvent.WORK): Phase.WAKING,
    (Phase.WAKING, WakeEvent.DELIVERED): Phase.LEASED,
    (Phase.WAKING, WakeEvent.FAILED): Phase.WAKING,
    (Phase.WAKING, WakeEvent.CLAIMED): Phase.LEASED,
    # A webhook may call back before it answers the delivery. So EXTENDED and DONE are allowed while
    # a wake is delivered, and the result of the delivery may arrive during a lease.
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
    """State of a subscription. Times are Unix ms; None is never."""

    phase: Phase = Phase.IDLE
    generation: int = 0
    wake_id: str | None = None
    holder: str | None = None
    lease_until_ms: int | None = None
    notify_at_ms: int | None = None
    """Time of the next attempt to deliver the wake."""
    failures: int = 0
    """Number of failed deliveries of this wake."""

    @property
    def due_ms(self) -> int | None:
        """Time at which the lease ends or the wake is to be delivered, whichever is first."""
        times = [at for at in (self.lease_until_ms, self.notify_at_ms) if at is not None]
        return min(times, default=None)


STORED_WAKE = TypeAdapter(WakeState)
"""Converts a WakeState to the stored JSON and back."""


def after(
    now: WakeState,
    event: WakeEvent,
    now_ms: int,
    lease_ms: int,
    random: Callable[[int], bytes],
    holder: str | None = None,
) -> WakeState:
    """Return the state after `event`; raises Conflict (FENCED) if `TABLE` lacks the transition."""
    phase = TABLE.get((now.phase, event))
    if phase is None:
        message = f"a subscription that is {now.phase.value} does not accept {event.value!r}"
        raise Conflict(message, code="FENCED")
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
    part = int.from_bytes(random(2), "big") / 0xFFFF * 2 - 1  # uniform from -1 to 1
    return round(delay_ms * (1 + JITTER * part))
