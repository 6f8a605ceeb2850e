"""Offsets: positions in a stream, as clients see them.

An offset is an opaque token to clients, which sorts as text. It names a frame by its index, and a
byte in this frame. Nearly every offset is at the beginning of a frame; a reader of text may also
stop inside a frame, between two characters. So every well-formed offset can be checked against the
frame that it names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tailrace.ledger.errors import CallerError

BEGINNING = "-1"
"""Offset for reading from the first byte."""

NOW = "now"
"""Offset for reading only future data."""

_DIGITS = 16

_FORM = re.compile(rf"([0-9]{{{_DIGITS}}})_([0-9]{{{_DIGITS}}})")


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """Byte `byte` of the frame at `index`; as text it sorts like the pair of numbers."""

    index: int
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.index:0{_DIGITS}d}_{self.byte:0{_DIGITS}d}"


START = Offset(0)


def parse_offset(text: str, field: str = "offset") -> Offset | None:
    """Return the offset that a client sent; None is `now`. Raises CallerError for anything else."""
    if text == NOW:
        return None
    if text == BEGINNING:
        return START
    match = _FORM.fullmatch(text)
    if match is None:
        raise CallerError(
            "not an offset",
            code="bad_offset",
            field=field,
            hint=f"send {BEGINNING}, {NOW}, or the value of a Stream-Next-Offset header",
        )
    return Offset(int(match[1]), int(match[2]))


def no_such_offset(offset: Offset, why: str) -> CallerError:
    return CallerError(
        f"no position {offset}: {why}",
        code="bad_offset",
        field="offset",
        hint="send the value of a Stream-Next-Offset header",
    )
