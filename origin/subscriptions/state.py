"""The stored state of a subscription, and how far each of its streams is acknowledged.

A wake, the notification that there is work, comes with a callback token, `generation.mac`. The mac
is HMAC-SHA256 over the subscription's id and the generation, with a secret of the subscription. A
token needs no expiry, since the lease has one, and the next wake has another generation.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from pydantic import TypeAdapter

from tailrace.ledger.errors import CallerError, Conflict, Unauthorized
from tailrace.ledger.objects.object import ObjectContext, ObjectRequest
from tailrace.ledger.objects.storage import ObjectStorage
from tailrace.origin.streams.offsets import BEGINNING, START, parse_offset
from tailrace.origin.subscriptions.index import Update, base64url
from tailrace.origin.subscriptions.request import AckBody, CreateBody, HolderBody, parse
from tailrace.origin.subscriptions.subscription import (
    STORED_WAKE,
    Glob,
    Phase,
    WakeEvent,
    WakeState,
    after,
)

LINK = "link/"
"""Prefix of keys of links; a hash of the stream's name follows, as a name may be too long."""
MAX_LINKS = 1_000
"""Maximum links per subscription, each to one stream.

If there are more, a new link replaces a link that only the pattern has made and whose data is all
acknowledged.
"""
MAX_NAMED = MAX_LINKS
"""Maximum streams that one notification names; those with unacknowledged data come first."""
OVERFLOWED = "overflowed"
"""Key of a value that is set once a stream that the pattern matches has no link."""
EMPTY = str(START)
"""The offset that counts as the end of a stream that is empty or does not exist."""

CONFIG = "config"
STANDING = "standing"
SECRET_BYTES = 32
MAX_TOKEN_CHARS = 128


@dataclass(frozen=True, slots=True)
class StreamLink:
    """A stream of the subscription, linked by name (`explicit`), by the pattern (`glob`) or both.

    `tail` is the offset of the stream's end, and `acked` the offset up to which its data is
    acknowledged. Offsets sort as text; `BEGINNING`, which stands for an unseen stream, sorts first.
    """

    path: str
    explicit: bool
    glob: bool
    acked: str
    tail: str

    @property
    def has_pending(self) -> bool:
        return self.tail > self.acked

    @property
    def is_quiet(self) -> bool:
        """True if all data is acknowledged and only the pattern has linked the stream."""
        return not (self.has_pending or self.explicit)

    @property
    def link_type(self) -> str:
        return "explicit" if self.explicit else "glob"


class StreamLinks:
    """The links of one subscription, in memory; changes are also put into the object's storage."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        # Links with unacknowledged data are in the order in which they got it. The other links are
        # in the order in which the last of their data was acknowledged.
        self._links: dict[str, StreamLink] = {}
        self.overflowed = False

    async def load(self) -> None:
        self.overflowed = await self._storage.get(OVERFLOWED) is not None
        for value in (await self._storage.list(prefix=LINK)).values():
            self._keep(StreamLink(**json.loads(value)))

    def __iter__(self) -> Iterator[StreamLink]:
        """Iterate in order of paths."""
        return iter(sorted(self._links.values(), key=lambda link: link.path))

    def get(self, path: str) -> StreamLink | None:
        return self._links.get(path)

    @property
    def first_pending(self) -> str | None:
        return next((link.path for link in self._links.values() if link.has_pending), None)

    def told(self) -> list[StreamLink]:
        """Return the links that a notification lists: first those with unacknowledged data."""
        waiting = [link for link in self._links.values() if link.has_pending]
        quiet = [link for link in self if not link.has_pending]
        return (waiting + quiet)[:MAX_NAMED]

    # ---- changes ----

    def link(self, path: str, *, explicit: bool, acked: str, tail: str) -> None:
        """Link a stream, by name (`explicit`) or by pattern; a link may be made in both ways."""
        there = self._links.get(path)
        if there is None:
            if explicit or self._make_room():
                self._put(StreamLink(path, explicit, not explicit, acked, tail))
        elif explicit and not there.explicit:
            self._put(replace(there, explicit=True))
        elif not explicit and not there.glob:
            self._put(replace(there, glob=True))

    def overflow(self) -> None:
        """Record that the pattern matches a stream that has no link."""
        if not self.overflowed:
            self.overflowed = True
            self._storage.put(OVERFLOWED, b"")

    def _make_room(self) -> bool:
        """Make room for one more link, if necessary by dropping a quiet one (`is_quiet`).

        Return False if there is no quiet link to drop.
        """
        if len(self._links) < MAX_LINKS:
            return True
        self.overflow()
        quiet = next((link.path for link in self._links.values() if link.is_quiet), None)
        if quiet is None:
            return False
        self._drop(quiet)
        return True

    def reach(self, path: str, tail: str) -> None:
        """Record that a stream ends at `tail`; an earlier offset than the known one is ignored."""
        there = self._links[path]
        if tail > there.tail:
            self._put(replace(there, tail=tail))

    def ack(self, path: str, offset: str) -> None:
        there = self._links.get(path)
        if there is not None and offset > there.acked:
            self._put(replace(there, acked=offset))

    def unlink(self, path: str) -> None:
        """Unlink a named stream; a pattern may still match it."""
        there = self._links.get(path)
        if there is None:
            return
        if there.glob:
            self._put(replace(there, explicit=False))
        else:
            self._drop(path)

    def gone(self, path: str) -> None:
        """Handle a stream's deletion.

        A stream that was linked by name stays linked, because it may be created again.
        """
        there = self._links.get(path)
        if there is None:
            return
        if there.explicit:
            self._put(replace(there, acked=EMPTY, tail=EMPTY))
        else:
            self._drop(path)

    def _put(self, link: StreamLink) -> None:
        self._keep(link)
        self._storage.put(_name(link.path), json.dumps(asdict(link)).encode())

    def _keep(self, link: StreamLink) -> None:
        there = self._links.get(link.path, link)
        if (there.has_pending, there.is_quiet) != (link.has_pending, link.is_quiet):
            del self._links[link.path]  # the next line adds it again at the end
        self._links[link.path] = link

    def _drop(self, path: str) -> None:
        del self._links[path]
        self._storage.delete(_name(path))


def _name(path: str) -> str:
    return LINK + hashlib.sha256(path.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Config:
    """A subscription as requested, with the values that were generated when it was created.

    `base` is the scheme and host of the subscription's URL.
    """

    type: str
    pattern: str | None
    streams: tuple[str, ...]
    webhook_url: str | None
    wake_stream: str | None
    lease_ms: int
    description: str | None
    base: str
    created_at: str
    secret: str

    @classmethod
    def create(cls, asked: CreateBody, base: str, now_ms: int, secret: bytes) -> Config:
        return cls(
            type=asked.type,
            pattern=asked.pattern,
            streams=tuple(sorted(set(asked.streams))),
            webhook_url=None if asked.webhook is None else asked.webhook.url,
            wake_stream=asked.wake_stream,
            lease_ms=asked.lease_ttl_ms,
            description=asked.description,
            base=base,
            created_at=datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(),
            secret=secret.hex(),
        )

    def confirms(self, other: Config) -> bool:
        """Return True if `other` requests the same subscription."""
        same = replace(other, base=self.base, created_at=self.created_at, secret=self.secret)
        return same == self

    @property
    def is_webhook(self) -> bool:
        return self.webhook_url is not None


STORED_CONFIG = TypeAdapter(Config)
"""Converts a Config to the stored JSON and back."""


class SubscriptionState:
    """Config, state and links; every change is put into the object's storage."""

    def __init__(self, context: ObjectContext, config: Config, standing: WakeState) -> None:
        self.config = config
        self.standing = standing
        self.links = StreamLinks(context.storage)
        self.glob = None if config.pattern is None else Glob(config.pattern)
        self._context = context

    @classmethod
    async def load(cls, context: ObjectContext) -> SubscriptionState | None:
        values = await context.storage.get_many([CONFIG, STANDING])
        if CONFIG not in values:
            return None
        config = STORED_CONFIG.validate_json(values[CONFIG])
        state = cls(context, config, STORED_WAKE.validate_json(values[STANDING]))
        await state.links.load()
        return state

    @classmethod
    def create(cls, context: ObjectContext, config: Config) -> SubscriptionState:
        state = cls(context, config, WakeState())
        context.storage.put(CONFIG, STORED_CONFIG.dump_json(config))
        context.storage.put(STANDING, STORED_WAKE.dump_json(state.standing))
        return state

    def entry(self) -> bytes:
        return entry_of(self.config, [link.path for link in self.links if link.explicit])

    # ---- its life ----

    def step(self, event: WakeEvent, holder: str | None = None) -> None:
        """Apply `event`, and start the next wake if streams still have unacknowledged data.

        Raises Conflict (FENCED) if the event is not allowed.
        """
        context, lease_ms = self._context, self.config.lease_ms
        self._stand(after(self.standing, event, context.now_ms(), lease_ms, context.random, holder))
        self.wake_if_needed()

    def wake_if_needed(self) -> None:
        """Wake the subscriber if there is work, and no earlier wake or lease is in progress."""
        if self.standing.phase is Phase.IDLE and self.links.first_pending is not None:
            self.step(WakeEvent.WORK)

    def told(self) -> None:
        """Record that a message about the current wake was written to the stream that workers read.

        The alarm then does not write the message again.
        """
        self._stand(replace(self.standing, notify_at_ms=None))

    def _stand(self, standing: WakeState) -> None:
        if standing == self.standing:
            return
        self.standing = standing
        self._context.storage.put(STANDING, STORED_WAKE.dump_json(standing))
        self.arm()

    def arm(self) -> None:
        """Set the alarm for the end of the lease or the next delivery, whichever is first.

        If there is neither, delete the alarm.
        """
        if (due_ms := self.standing.due_ms) is None:
            self._context.storage.delete_alarm()
        else:
            self._context.storage.set_alarm(due_ms)

    # ---- the worker or webhook that was woken ----

    def token(self) -> str:
        """Return the token that proves the current wake."""
        return self._token_of(self.standing.generation)

    def _token_of(self, generation: int) -> str:
        said = f"callback\n{generation}\n{self._context.key.name}".encode()
        secret = bytes.fromhex(self.config.secret)
        return f"{generation}.{base64url(hmac.digest(secret, said, 'sha256'))}"

    def told_streams(self) -> list[dict[str, object]]:
        """Return the linked streams in the JSON form that workers and webhooks get."""
        return [
            {
                "path": link.path,
                "link_type": link.link_type,
                "acked_offset": link.acked,
                "tail_offset": link.tail,
                "has_pending": link.has_pending,
            }
            for link in self.links.told()
        ]

    def holder(self, request: ObjectRequest) -> HolderBody:
        """Return the request's body if its token belongs to the current wake.

        Raises Unauthorized for an invalid token, and Conflict (FENCED) for one of an earlier wake.
        """
        scheme, _, token = (request.header("authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("a bearer token is needed", code="TOKEN_INVALID")
        number = token.partition(".")[0]
        well_formed = len(token) <= MAX_TOKEN_CHARS and number.isascii() and number.isdigit()
        generation = int(number) if well_formed else 0
        if not hmac.compare_digest(token.encode(), self._token_of(generation).encode()):
            raise Unauthorized("the token is not valid", code="TOKEN_INVALID")
        said = parse(HolderBody, request.body)
        now = (self.standing.generation, self.standing.wake_id)
        named = (said.generation, said.wake_id)
        if said.wake_id is None or generation != said.generation or named != now:
            raise Conflict("a later wake has replaced this one", code="FENCED")
        return said

    def check_ack(self, ack: AckBody) -> None:
        """Raise Conflict (INVALID_OFFSET) unless the stream is linked and the offset is valid.

        The offset must lie between the one that is acknowledged already and the stream's end.
        """
        link = self.links.get(ack.name)
        if link is None:
            raise Conflict(
                f"{ack.name!r} is not one of the subscription's streams", code="INVALID_OFFSET"
            )
        try:
            offset = None if ack.offset == BEGINNING else parse_offset(ack.offset)
        except CallerError:
            offset = None
        if offset is None or not link.acked <= ack.offset <= link.tail:
            raise Conflict(
                f"{ack.offset!r} is not an offset from {link.acked} to {link.tail}",
                code="INVALID_OFFSET",
            )

    # ---- its streams ----

    def hear(self, updates: Mapping[str, Update]) -> None:
        """Apply these changes of streams, keyed by path, to the links.

        If a stream has new data, wake the subscriber.
        """
        for path, update in updates.items():
            if update.deleted:
                self.links.gone(path)
            if update.tail is not None:
                self.see(path, update.tail, update.since)
        self.wake_if_needed()

    def see(self, path: str, tail: str, since: str = BEGINNING) -> None:
        """Record that a stream ends at `tail`, and link it if the pattern matches.

        All data of a stream without a link is new. But if links had to be dropped, its data before
        `since` may be acknowledged already, and counts as such.
        """
        if self.glob is not None and self.glob.matches(path) and path != self.config.wake_stream:
            acked = since if self.links.overflowed else BEGINNING
            self.links.link(path, explicit=False, acked=acked, tail=tail)
        if self.links.get(path) is not None:
            self.links.reach(path, tail)


def entry_of(config: Config, streams: Iterable[str]) -> bytes:
    """Return a subscription's entry in the index; `Updates` reads it."""
    fields = {
        "pattern": config.pattern,
        "streams": sorted(streams),
        "wake_stream": config.wake_stream,
    }
    return json.dumps(fields).encode()
