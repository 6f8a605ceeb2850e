"""How often Python looks for cycles in a process through which every token passes."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)
"""New objects until the youngest are looked at, and how many looks until the older ones are.

A frame and its token ids are two objects that stay for some seconds and are in no cycle.
Python's usual 700 makes it look through all of them again and again: with 64 streams that
was a quarter to two fifths of the time of an append, in a few noisy runs.
"""


def look_less_often() -> None:
    """Set it for this process, and leave what was loaded so far out of every look."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
