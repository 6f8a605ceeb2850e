"""Branches: streams that begin with the first records of another stream, without a copy.

A branch refers to the streams that hold its inherited records, by their short local ids (sids). Its
own records follow with the next index. A stream that others refer to may be deleted or expire as
usual: then nobody can read it any more, but the ledger keeps its records until the last branch that
refers to them is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.ledger.errors import BeyondEnd, Conflict

MAX_PARTS = 64
"""Maximum number of other streams that a branch refers to; each branch of a branch adds one."""


class BranchPoint(NamedTuple):
    """The point at which a new stream leaves `stream`: after its first `end` records."""

    stream: bytes
    end: int


class Part(NamedTuple):
    """Records that a branch shares with the stream `sid`: those with indexes below `end`.

    The first index is the `end` of the previous part, or 0.
    """

    sid: int
    end: int


def check_point(end: int, next_index: int, *, ended: bool) -> None:
    """Check that a branch at index `end` shares only records that exist, and no StreamEnd.

    Raises:
        BeyondEnd: The stream has fewer records.
    """
    most = next_index - ended
    if end > most:
        raise BeyondEnd(
            f"index {end} is beyond the {most} frames that a branch can share",
            field="index",
            hint=f"from 0 to {most}" + (", which is before the stream's end" if ended else ""),
        )


def inherited(parts: Sequence[Part], sid: int, end: int) -> tuple[Part, ...]:
    """Return the parts of a branch of stream `sid`, which itself has `parts`, at index `end`.

    Raises:
        Conflict: The branch would have more than MAX_PARTS parts.
    """
    taken: list[Part] = []
    begin = 0
    for part in (*parts, Part(sid, end)):
        if begin < min(part.end, end):
            taken.append(Part(part.sid, min(part.end, end)))
        begin = part.end
    if len(taken) > MAX_PARTS:
        raise Conflict(
            f"the branch would share records of {len(taken)} older streams",
            code="branch_depth",
            field="index",
            hint=f"at most {MAX_PARTS} are possible; branch an earlier stream",
        )
    return tuple(taken)


def part_at(parts: Sequence[Part], sid: int, index: int, limit: int) -> tuple[int, int]:
    """Return the sid of the stream that stores record `index`, and how many records to read there.

    `sid` and `parts` belong to the stream that a reader has requested. The number is at most
    `limit`, and counts only records of the part that has `index`.
    """
    for part in parts:
        if index < part.end:
            return part.sid, min(limit, part.end - index)
    return sid, limit
