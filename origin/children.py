"""What every child process of an origin is given."""

from __future__ import annotations

import os
from pathlib import Path


def import_environment() -> dict[str, str]:
    """For a child that is to find our packages where this process did."""
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
