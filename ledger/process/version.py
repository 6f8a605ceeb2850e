"""Which Tailrace this is, in the words that peers are told."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+uninstalled"  # run from a source tree that was never installed


@cache
def tailrace_version() -> str:
    try:
        return version("tailrace")
    except PackageNotFoundError:
        return UNINSTALLED


def software(role: str) -> str:
    """The `software` of a Hello, the `User-Agent` of a request: `tailrace-edge/0.1.0`."""
    return f"tailrace-{role}/{tailrace_version()}"
