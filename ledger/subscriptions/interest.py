"""Who wants to know of which streams, found without asking everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ledger.subscriptions.glob import Glob

K = TypeVar("K")


class Interest:
    """What one subscription wants to know of; never of the stream that it wakes workers by."""

    def __init__(self, pattern: str | None, streams: Sequence[str], wake: str | None) -> None:
        self.streams = frozenset(streams)
        self.glob = None if pattern is None else Glob(pattern)
        self._wake = wake

    @classmethod
    def unpack(cls, entry: bytes) -> Interest:
        fields = json.loads(entry)
        return cls(fields["pattern"], fields["streams"], fields["wake_stream"])

    def covers(self, path: str) -> bool:
        if path == self._wake:
            return False
        return path in self.streams or (self.glob is not None and self.glob.matches(path))


class Directory:
    """Interests by the name of their subscription, and by where the streams' names begin."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[bytes, Interest]] = {}
        self._by_stream: dict[str, dict[str, None]] = {}
        self._by_first: dict[str | None, dict[str, None]] = {}  # None: any first segment

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
        """The subscriptions that want to know of a stream."""
        first = path.partition("/")[0]
        candidates = {
            **self._by_stream.get(path, {}),
            **self._by_first.get(first, {}),
            **self._by_first.get(None, {}),
        }
        return [name for name in candidates if self._entries[name][1].covers(path)]


def _strike(lists: dict[K, dict[str, None]], key: K, name: str) -> None:
    names = lists[key]
    del names[name]
    if not names:
        del lists[key]
