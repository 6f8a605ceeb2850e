"""The fields of a frame as JSON, for people who look at a ledger or at an origin.

What clients get over HTTP has a form of its own for each dialect (`edge/`).
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from tailrace.ledger.frame import Frame
from tailrace.ledger.wire.words import Word


def frame_fields(frame: Frame, *, brief: bool = False) -> dict[str, Any]:
    """Return the fields of a frame as JSON values.

    Bytes are in hex, members of enums are their words, and a number that is not finite is null.
    With `brief`, bytes and lists are replaced by their lengths.
    """
    return {each.name: _plain(getattr(frame, each.name), brief=brief) for each in fields(frame)}


def _plain(value: object, *, brief: bool) -> object:
    if isinstance(value, Word):
        return value.word
    if isinstance(value, bytes | tuple) and brief:
        return len(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item, brief=False) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name), brief=False) for each in fields(value)}
    return value
