"""What a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu() -> str:
    """Number and name of the processors, as far as the system tells."""
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
