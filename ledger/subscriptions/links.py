"""The streams of one subscription, and how far each has been acknowledged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from ledger.objects.object import ObjectStorage
from ledger.streams.offset import START

LINK = "link/"
"""Names of values: what follows is a hash, for a stream's name can be longer than theirs."""
MAX_TOLD = 1_000
"""Streams that one notification names; those with work come first."""
EMPTY = str(START)
"""Where a stream ends that has nothing in it, or is not there."""


@dataclass(frozen=True, slots=True)
class Link:
    """Offsets sort as text, and `BEGINNING`, of a stream not even seen, before all of them."""

    path: str
    explicit: bool
    glob: bool
    acked: str
    tail: str

    @property
    def has_pending(self) -> bool:
        return self.tail > self.acked

    @property
    def link_type(self) -> str:
        return "explicit" if self.explicit else "glob"


class Links:
    """The links in memory, and in an object's storage as they change."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._links: dict[str, Link] = {}
        self._pending: dict[str, None] = {}  # paths, those longest in it first

    async def load(self) -> None:
        for value in (await self._storage.list(prefix=LINK)).values():
            self._keep(Link(**json.loads(value)))

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        """In order of their paths."""
        return iter(sorted(self._links.values(), key=lambda link: link.path))

    def get(self, path: str) -> Link | None:
        return self._links.get(path)

    @property
    def first_pending(self) -> str | None:
        return next(iter(self._pending), None)

    def told(self) -> list[Link]:
        """What somebody who is woken is told."""
        waiting = [self._links[path] for path in self._pending]
        quiet = [link for link in self if not link.has_pending]
        return (waiting + quiet)[:MAX_TOLD]

    # ---- changes ----

    def link(self, path: str, *, explicit: bool, acked: str, tail: str) -> None:
        """Make a link, or add to an existing one that it is of this kind too."""
        there = self._links.get(path)
        if there is None:
            self._put(Link(path, explicit, not explicit, acked, tail))
        elif explicit and not there.explicit:
            self._put(replace(there, explicit=True))
        elif not explicit and not there.glob:
            self._put(replace(there, glob=True))

    def reach(self, path: str, tail: str) -> None:
        """The stream goes on to `tail` now; news may come late, and never take it back."""
        there = self._links[path]
        if tail > there.tail:
            self._put(replace(there, tail=tail))

    def ack(self, path: str, offset: str) -> None:
        there = self._links.get(path)
        if there is not None and offset > there.acked:
            self._put(replace(there, acked=offset))

    def unlink(self, path: str) -> None:
        """It is no longer named; a pattern may still match it."""
        there = self._links.get(path)
        if there is None:
            return
        if there.glob:
            self._put(replace(there, explicit=False))
        else:
            self._drop(path)

    def gone(self, path: str) -> None:
        """The stream was deleted. One that is named stays so, for another of that name."""
        there = self._links.get(path)
        if there is None:
            return
        if there.explicit:
            self._put(replace(there, acked=EMPTY, tail=EMPTY))
        else:
            self._drop(path)

    def _put(self, link: Link) -> None:
        self._keep(link)
        self._storage.put(_name(link.path), json.dumps(asdict(link)).encode())

    def _keep(self, link: Link) -> None:
        self._links[link.path] = link
        if link.has_pending:
            self._pending.setdefault(link.path)
        else:
            self._pending.pop(link.path, None)

    def _drop(self, path: str) -> None:
        del self._links[path]
        self._pending.pop(path, None)
        self._storage.delete(_name(path))


def _name(path: str) -> str:
    return LINK + hashlib.sha256(path.encode()).hexdigest()
