"""Which plain segments become one cold one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ledger.sqlite.cold import COLD_BYTES, COLD_FRAMES
from ledger.sqlite.storage import SegmentRow

RUN_SEGMENTS = 32
"""Plain segments that one commit replaces by a cold one: about a millisecond."""


@dataclass(slots=True)
class Run:
    """Consecutive plain segments of a stream; `beyond` is the index after all that was seen."""

    beyond: int
    rows: list[SegmentRow] = field(default_factory=list)
    frames: int = 0
    bytes: int = 0

    def takes(self, row: SegmentRow) -> bool:
        if not self.rows:
            return True
        return (
            row.first == self.beyond
            and len(self.rows) < RUN_SEGMENTS
            and self.frames + row.length <= COLD_FRAMES
            and self.bytes + len(row.records) <= COLD_BYTES
        )

    def add(self, row: SegmentRow) -> None:
        self.rows.append(row)
        self.frames += row.length
        self.bytes += len(row.records)
        self.beyond = row.first + row.length


def take_run(rows: Sequence[SegmentRow], at: int, until: int | None) -> Run:
    """The first run in `rows`, which lie from index `at` on, and before `until`.

    Cold segments before it are passed over. Without any row the run has not moved on.
    """
    run = Run(at)
    for row in rows:
        if row.coding:
            if run.rows:
                break
            run.beyond = row.first + row.length
        elif (until is not None and row.first + row.length > until) or not run.takes(row):
            break
        else:
            run.add(row)
    return run
