"""Who wants to know of which streams, found without asking everybody.

Streams are named, or matched by a pattern: `*` is one segment of a name, `**` is any number
of them, none included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TypeVar
from urllib.parse import unquote

ONE = "*"
ANY = "**"
MAX_SEGMENTS = 16
MAX_ANY = 1
"""With one `**` a name matches by its beginning and its end: there is nothing to search for."""

K = TypeVar("K")


class Glob:
    """`matches` compares each segment of the pattern once. ValueError if there are too many."""

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part]
        if len(parts) > MAX_SEGMENTS or parts.count(ANY) > MAX_ANY:
            raise ValueError(
                f"a pattern has at most {MAX_SEGMENTS} segments, and {ANY} at most once"
            )
        self._any = ANY in parts
        at = parts.index(ANY) if self._any else len(parts)
        # None stands for one segment; a name may have a star of its own, written %2A.
        segments = [None if part == ONE else unquote(part) for part in parts]
        self._head, self._tail = segments[:at], segments[at + 1 :]

    @property
    def first(self) -> str | None:
        """The first segment of every name that matches; None if it can be any."""
        return self._head[0] if self._head else None

    @property
    def prefix(self) -> str:
        """What every name that matches begins with."""
        known = self._head[: self._head.index(None)] if None in self._head else self._head
        return "/".join(part for part in known if part is not None)

    def matches(self, name: str) -> bool:
        return self.fits(name.split("/"))

    def fits(self, given: Sequence[str]) -> bool:
        """Whether a name of these segments matches."""
        beyond = len(given) - len(self._head) - len(self._tail)
        if beyond < 0 or (beyond and not self._any):
            return False
        end = given[len(given) - len(self._tail) :] if self._tail else ()
        return _are(self._head, given) and _are(self._tail, end)


def _are(wanted: Sequence[str | None], given: Sequence[str]) -> bool:
    return all(want in (None, part) for want, part in zip(wanted, given, strict=False))


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

    def covers(self, path: str, segments: Sequence[str]) -> bool:
        if path == self._wake:
            return False
        return path in self.streams or (self.glob is not None and self.glob.fits(segments))


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
