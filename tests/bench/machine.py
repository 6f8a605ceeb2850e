"""The machine and the Python that a figure was measured on."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from tailrace.python_build import PythonBuild, python_build


def cpu() -> str:
    """Return the number and name of the processors, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if names:
            return f"{len(names)} x {names[0]}"
    return platform.processor() or platform.machine()


def disk(folder: Path) -> str:
    """File system and device of a folder, as far as the system tells."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown"
    best, place = "unknown", -1
    for line in mounts.read_text(encoding="utf-8").splitlines():
        device, where, kind, *_ = line.split()
        if folder.resolve().is_relative_to(where) and len(where) >= place:
            best, place = f"{kind} on {device}", len(where)
    return best


def conditions(build: PythonBuild | None = None) -> dict[str, object]:
    """Return what decides whether the figures of a run can be compared with those of others."""
    build = build or python_build()
    return {
        "cpu": cpu(),
        "load": round(os.getloadavg()[0], 1),
        "python": build.facts(),
        "comparable": build.is_optimised,
    }


def print_line(found: Mapping[str, object], build: PythonBuild | None = None) -> None:
    """Print the figures of a run and its conditions as one line of JSON.

    A run is comparable only on a Python that is known to be optimised.
    """
    build = build or python_build()
    if (warning := build.warning()) is not None:
        print(f"not comparable: {warning}", file=sys.stderr)
    print(json.dumps(conditions(build) | dict(found)))
