"""Records of older ledgers, whose token ids held marks (SQLite's layout 6, PostgreSQL's 2).

Bit 31 of an id said that it came from a Steer order (text that a caller inserted), bit 30 that it
was the first id of the order. After the ids of a StreamEnd, the mark LIFE was followed by the
numbers of a `StreamLife`. A Notice with the code `engine` held the fingerprint of the engine.
`unmarked` converts such a record, so that it can still be read.
"""

from __future__ import annotations

from itertools import pairwise

from tailrace.ledger.errors import FrameError
from tailrace.ledger.frame import TAG_OFFSET, Notice, decode
from tailrace.ledger.interface import Record
from tailrace.ledger.record_extra import IdSpan, RecordExtra

STEERED = 1 << 31
STEER_BEGINS = 1 << 30
LIFE = 2**32 - 1
"""The mark after which the numbers of a StreamLife follow."""
UNKNOWN = 2**32 - 2
"""The number that stands for None among the numbers of a StreamLife."""
ENGINE = "engine"
"""Code of the Notice frame whose text is the fingerprint of the engine."""


def unmarked(frame: bytes, ids: tuple[int, ...]) -> Record:
    """Return the record without marks in its ids; its `extra` has what the marks said."""
    is_notice = frame[TAG_OFFSET] == Notice.tag
    if not is_notice and max(ids, default=0) < STEER_BEGINS:
        return Record(frame, ids)
    life: tuple[int | None, ...] = ()
    if LIFE in ids:
        at = ids.index(LIFE)
        life = tuple(None if number == UNKNOWN else number for number in ids[at + 1 :])
        ids = ids[:at]
    begins = [at for at, id_ in enumerate(ids) if id_ & STEER_BEGINS and id_ & STEERED]
    extra = RecordExtra(
        steered=tuple(_span(ids, *places) for places in pairwise([*begins, len(ids)])),
        engine=_engine(frame) if is_notice else None,
        life=life,
    )
    return Record(frame, tuple(id_ & (STEER_BEGINS - 1) for id_ in ids), extra.pack())


def _span(ids: tuple[int, ...], begin: int, end: int) -> IdSpan:
    """Return the span of the ids that came from the Steer order at position `begin`.

    The span ends before the first id that the model drew, or at `end`, where the next Steer order
    begins.
    """
    steered = (at for at in range(begin, end) if not ids[at] & STEERED)
    return IdSpan(begin, next(steered, end) - begin)


def _engine(frame: bytes) -> str | None:
    try:
        _, notice = decode(frame)
    except FrameError:
        return None
    if isinstance(notice, Notice) and notice.code == ENGINE:
        return notice.message
    return None
