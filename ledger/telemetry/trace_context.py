"""W3C Trace Context: the header `traceparent`, which says of which trace a request is."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

HEADER = b"traceparent"
SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """Ids in hex. `text` is what the next one down the line is told."""

    trace_id: str
    span_id: str
    flags: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None for whatever is none: such a header is to be ignored (Trace Context, 3.2.2)."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        is_known = version == "00" and rest is None
        if version == "ff" or not (is_known or version > "00"):
            return None
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, int(flags, 16) & SAMPLED)

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def text(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"
