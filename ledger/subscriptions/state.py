"""What one subscription keeps in its object's storage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

from ledger.objects.object import ObjectContext
from ledger.streams.offset import BEGINNING
from ledger.subscriptions.glob import Glob
from ledger.subscriptions.links import Links
from ledger.subscriptions.news import Letter
from ledger.subscriptions.request import CreateBody
from ledger.subscriptions.subscription import Event, Phase, Standing, after
from ledger.subscriptions.token import SECRET_BYTES

CONFIG = "config"
STANDING = "standing"


@dataclass(frozen=True, slots=True)
class Config:
    """What was asked for, and what was made with it. `base` is scheme and host of its URL."""

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
        assert len(secret) == SECRET_BYTES
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
        """Whether the same was asked for."""
        asked = ("type", "pattern", "streams", "webhook_url", "wake_stream", "lease_ms")
        same = all(getattr(self, name) == getattr(other, name) for name in asked)
        return same and self.description == other.description

    @property
    def is_webhook(self) -> bool:
        return self.webhook_url is not None

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, value: bytes) -> Config:
        fields = json.loads(value)
        return cls(**fields | {"streams": tuple(fields["streams"])})


class SubscriptionState:
    """Config, standing and links; every change is put into the object's storage."""

    def __init__(self, context: ObjectContext, config: Config, standing: Standing) -> None:
        self.config = config
        self.standing = standing
        self.links = Links(context.storage)
        self.glob = None if config.pattern is None else Glob(config.pattern)
        self._context = context

    @classmethod
    async def load(cls, context: ObjectContext) -> SubscriptionState | None:
        values = await context.storage.get_many([CONFIG, STANDING])
        if CONFIG not in values:
            return None
        config = Config.unpack(values[CONFIG])
        state = cls(context, config, Standing.unpack(values[STANDING]))
        await state.links.load()
        return state

    @classmethod
    def create(cls, context: ObjectContext, config: Config) -> SubscriptionState:
        state = cls(context, config, Standing())
        context.storage.put(CONFIG, config.pack())
        context.storage.put(STANDING, state.standing.pack())
        return state

    def entry(self) -> bytes:
        """What the index is to know of it."""
        return entry_of(self.config, [link.path for link in self.links if link.explicit])

    # ---- its life ----

    def step(self, event: Event, holder: str | None = None) -> None:
        """Let `event` happen; Conflict (FENCED) where it cannot. Work left over wakes again."""
        context, lease_ms = self._context, self.config.lease_ms
        self._stand(after(self.standing, event, context.now_ms(), lease_ms, context.random, holder))
        self.wake_if_needed()

    def wake_if_needed(self) -> None:
        """Have somebody woken, if there is work that nobody does or is asked to do."""
        if self.standing.phase is Phase.IDLE and self.links.first_pending is not None:
            self.step(Event.WORK)

    def told(self) -> None:
        """The wake has been told where workers read; one of them will come, in its own time."""
        self._stand(replace(self.standing, notify_at_ms=None))

    def _stand(self, standing: Standing) -> None:
        if standing == self.standing:
            return
        self.standing = standing
        self._context.storage.put(STANDING, standing.pack())
        self.arm()

    def arm(self) -> None:
        """Set the alarm for what time will change."""
        if (due_ms := self.standing.due_ms) is None:
            self._context.storage.delete_alarm()
        else:
            self._context.storage.set_alarm(due_ms)

    # ---- its streams ----

    def hear(self, letters: Mapping[str, Letter]) -> None:
        """Take in what has happened to streams."""
        for path, letter in letters.items():
            if letter.deleted:
                self.links.gone(path)
            if letter.tail is not None:
                self.see(path, letter.tail)
        self.wake_if_needed()

    def see(self, path: str, tail: str) -> None:
        """A stream ends at `tail`. One that the pattern matches, and was not there, is new."""
        if self.glob is not None and self.glob.matches(path) and path != self.config.wake_stream:
            self.links.link(path, explicit=False, acked=BEGINNING, tail=tail)
        if self.links.get(path) is not None:
            self.links.reach(path, tail)


def entry_of(config: Config, streams: Iterable[str]) -> bytes:
    """What the index is told of a subscription; `News` reads it."""
    fields = {
        "pattern": config.pattern,
        "streams": sorted(streams),
        "wake_stream": config.wake_stream,
    }
    return json.dumps(fields).encode()
