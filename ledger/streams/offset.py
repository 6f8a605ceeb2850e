"""Where a reader of a stream is: an opaque token to clients, which sorts as text.

An offset names a frame by its index, and a byte in it. It is nearly always at the beginning
of a frame; within one it is where a reader of text stopped between two characters. So every
offset that is right for its form can be checked against the frame that it names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ledger.errors import CallerError

BEGINNING = "-1"
"""What a client sends to read from the first byte on."""
NOW = "now"
"""What a client sends to read only what is yet to come."""

_DIGITS = 16
_FORM = re.compile(rf"([0-9]{{{_DIGITS}}})_([0-9]{{{_DIGITS}}})")


@dataclass(frozen=True, slots=True, order=True)
class Offset:
    """Byte `byte` of the frame at `index`; as text it sorts as the pair of numbers does."""

    index: int
    byte: int = 0

    def __str__(self) -> str:
        return f"{self.index:0{_DIGITS}d}_{self.byte:0{_DIGITS}d}"


START = Offset(0)


def parse_offset(text: str, field: str = "offset") -> Offset | None:
    """The offset that a client named; None is `now`. CallerError for anything else."""
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
            hint=f"{BEGINNING}, {NOW}, or what Stream-Next-Offset said",
        )
    return Offset(int(match[1]), int(match[2]))
