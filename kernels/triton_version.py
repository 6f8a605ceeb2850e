"""Versions of Triton that the kernels are known to run on. This file imports no Triton or torch."""

from __future__ import annotations

import re

FIRST_VERSION = (3, 6)
LAST_VERSION = (3, 7)
"""Last minor version of Triton that every kernel was compiled with; FIRST_VERSION is the first.

Compiling ahead of time (`kernels.ahead`) relies on the names that these versions give to the files
in their cache.
"""


def is_supported(version: str) -> bool:
    """Return True if this version of Triton, such as `3.7.1`, is known to work."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    return FIRST_VERSION <= (int(numbers[1]), int(numbers[2])) <= LAST_VERSION


def supported_versions() -> str:
    """Return the supported versions as text: `3.6 to 3.7`."""
    return " to ".join(".".join(map(str, one)) for one in (FIRST_VERSION, LAST_VERSION))
