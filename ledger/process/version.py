"""The version of Tailrace, as peers see it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "0+uninstalled"  # this process runs from a source tree


@cache
def tailrace_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("tailrace")
    except PackageNotFoundError:
        return UNINSTALLED


def software(role: str) -> str:
    """Return the `software` of a Hello or the User-Agent of a request: `tailrace-edge/0.1.0`."""
    return f"tailrace-{role}/{tailrace_version()}"
