"""Which JSON schemas are refused because following them would hold everything up.

llguidance limits its work, but not all of it: it joins schemas by intersecting their patterns,
in time exponential in how many there are, and a multiple is an automaton of as many states.
Within these limits a format takes at most some tenths of a second to check and to start.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MAX_REGEX_BYTES = 4 * 1024
"""UTF-8 bytes of an expression, or of one pattern in a schema."""
MAX_JOINED_PATTERNS = 10
"""Different patterns and formats of a schema that joins others; each triples the time."""
MAX_MULTIPLE = 10_000
"""Product of the different multipleOf in a schema, as multiples of their last decimal place."""
JOINING = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if"))


def why_costly(schema: Any) -> str | None:
    """Why a parsed schema is refused, if it is."""
    pairs = list(_pairs(schema))
    patterns = {
        value for key, value in pairs if key in ("pattern", "format") and isinstance(value, str)
    }
    for key, value in pairs:
        if key == "patternProperties" and isinstance(value, dict):
            patterns |= value.keys()
    longest = max(map(size_of, patterns), default=0)
    if longest > MAX_REGEX_BYTES:
        return f"a pattern of {longest} bytes, the limit is {MAX_REGEX_BYTES}"
    joins = any(key in JOINING for key, _ in pairs)
    if joins and len(patterns) > MAX_JOINED_PATTERNS:
        return (
            f"{len(patterns)} different patterns and formats in a schema with anyOf, allOf or"
            f" $ref, the limit is {MAX_JOINED_PATTERNS}"
        )
    multiples = {value for key, value in pairs if key == "multipleOf" and _is_number(value)}
    if _product(multiples) > MAX_MULTIPLE:
        return f"multipleOf of which the product is above {MAX_MULTIPLE}"
    return None


def size_of(text: str) -> int:
    """UTF-8 bytes; a lone surrogate, which JSON can escape, counts as one."""
    return len(text.encode(errors="replace"))


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of every object in a JSON value, with its value."""
    if isinstance(value, dict):
        yield from value.items()
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _pairs(part)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _product(multiples: set[int | float]) -> Decimal:
    exact = [abs(Decimal(str(multiple))) for multiple in multiples]
    unit = min((Decimal(1).scaleb(_exponent(each)) for each in exact), default=Decimal(1))
    return math.prod((each / unit for each in exact), start=Decimal(1))


def _exponent(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return min(0, exponent) if isinstance(exponent, int) else 0
