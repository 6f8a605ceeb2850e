"""How much memory is left, of the machine and of the control group that this process is in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = MEMINFO, group: Path = GROUP) -> float:
    """As a share, the lesser of both; 1.0 where neither can be known."""
    shares = [1.0]
    with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        fields = _numbers(meminfo)
        shares.append(fields["MemAvailable:"] / fields["MemTotal:"])
    with suppress(OSError, ValueError, KeyError, ZeroDivisionError):
        limit = int((group / "memory.max").read_text("ascii"))  # "max" is none
        used = int((group / "memory.current").read_text("ascii"))
        # Pages of files that were not used lately are given back when they are needed.
        used -= _numbers(group / "memory.stat")["inactive_file"]
        shares.append(1 - used / limit)
    return max(0.0, min(shares))


def _numbers(path: Path) -> dict[str, int]:
    """The first number behind each name."""
    lines = (line.split() for line in path.read_text("ascii").splitlines())
    return {name: int(value) for name, value, *_ in lines}
