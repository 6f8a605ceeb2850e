"""How a stream fared, kept for as long as the stream is: behind the token ids of its StreamEnd.

A record's ids are never sent to a client, and an ended stream has no continuation that would need
them; so the end's own ids have room for what was measured until then, in the same commit, in every
kind of ledger, at no cost for any other record. A mark that no token has says where it begins.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from tailrace.ledger.interface import Record

MARK = 2**32 - 1
"""Before the numbers. Token ids have fewer bits."""
UNKNOWN = 2**32 - 2
"""Of a number that was not measured, or does not fit."""


class StreamLife(NamedTuple):
    """Times in ms since the stream came to the origin that ended it; None: not known there.

    New numbers are added at the end, and those that are missing are None: older ledgers and
    older readers go on with each other.
    """

    queue_ms: int | None = None
    """Until a worker had it."""
    first_ms: int | None = None
    """Until its first frame was durable that is no notice."""
    whole_ms: int | None = None
    """Until its end was written."""
    gap_p50_ms: int | None = None
    """Between two frames, takeovers included; the same for the next two."""
    gap_p95_ms: int | None = None
    gap_p99_ms: int | None = None
    resumes: int | None = None
    """Times that a client read it anew."""
    takeovers: int | None = None
    """Workers that went on with it."""

    def behind(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids of the StreamEnd's record; `ids` are the tokens that it completes."""
        return (*ids, MARK, *(_stored(number) for number in self))

    @classmethod
    def of(cls, end: Record) -> Self | None:
        """What the record of a StreamEnd tells; None where it tells nothing."""
        at = len(tokens_of(end)) + 1
        if at > len(end.ids):
            return None
        found = end.ids[at : at + len(cls._fields)]
        return cls(*(None if number == UNKNOWN else number for number in found))


def tokens_of(record: Record) -> tuple[int, ...]:
    """The token ids that a record completes."""
    ids = record.ids
    return ids[: ids.index(MARK)] if MARK in ids else ids


def _stored(number: int | None) -> int:
    return UNKNOWN if number is None else min(max(0, number), UNKNOWN)
