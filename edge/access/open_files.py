"""How many files this process may have open: as many as it may allow itself."""

from __future__ import annotations

import resource
import sys


def raise_open_files() -> int:
    """Raise the soft limit (1,024 on most systems) to the hard one; gives what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # macOS says that it is unlimited, and takes no more than its kernel has
        return wanted
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
