"""Runs the parts of a bench as child processes, so that one that dies takes no other with it.

A child prints what it finds as lines of JSON that begin with MARK; all else that it prints is for
the reader. Its results are kept as they come, and the report is written after each.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "@found "
"""First characters of a line with a result."""
ERROR_LINES = 8
"""Maximum lines of a failed child's standard error in the report."""
LEAST_SECONDS = 5.0
"""Time in seconds that must be left for a part to be started."""

Results = dict[str, dict[str, Any]]
"""Sections of a report, such as `us`, with a value for each name."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the bench, which runs in a process of its own."""

    name: str
    seconds: float
    """Timeout in seconds."""


@dataclass(slots=True)
class Supervisor:
    """Runs parts one after another within a time limit and collects what they find.

    command: returns the command of a part. keep: called with all results, after each new one.
    """

    command: Callable[[str], Sequence[str]]
    keep: Callable[[Results], None]
    seconds: float
    results: Results = field(default_factory=dict)

    def run(self, parts: Sequence[Part]) -> None:
        """Run the parts; one that fails is named in `failed_parts`, and the next one begins."""
        end = time.monotonic() + self.seconds
        for part in parts:
            left = end - time.monotonic()
            print(f"\n{part.name}", flush=True)
            if left < LEAST_SECONDS:
                self._failed(part, "not started: no time was left")
                continue
            began = time.monotonic()
            fault = self._child(part, min(part.seconds, left))
            self.add("part_seconds", part.name, round(time.monotonic() - began, 1))
            if fault is not None:
                self._failed(part, fault)

    def add(self, section: str, name: str, value: Any) -> None:
        """Keep one result."""
        self.results.setdefault(section, {})[name] = value
        self.keep(self.results)

    def _failed(self, part: Part, fault: str) -> None:
        print(f"  FAILED: {fault}", flush=True)
        self.add("failed_parts", part.name, fault)

    def _child(self, part: Part, seconds: float) -> str | None:
        """Run a part to its end; return what went wrong with it."""
        late = threading.Event()
        with subprocess.Popen(
            self.command(part.name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            errors: deque[str] = deque(maxlen=ERROR_LINES)

            def kill() -> None:
                late.set()  # before the kill, because this thread may go on only after the end
                child.kill()

            timer = threading.Timer(seconds, kill)
            reader = threading.Thread(target=_read, args=(child, errors))
            timer.start()
            reader.start()
            assert child.stdout is not None
            for line in child.stdout:
                self._take(line)
            status = child.wait()
            timer.cancel()
            reader.join()
        if status == 0:
            return None
        if late.is_set():
            return f"killed after {seconds:.0f} s"
        end = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return "\n".join([end, *errors])

    def _take(self, line: str) -> None:
        if not line.startswith(MARK):
            print(line, end="", flush=True)
            return
        section, name, value = json.loads(line.removeprefix(MARK))
        self.add(section, name, value)


def _read(child: subprocess.Popen[str], errors: deque[str]) -> None:
    assert child.stderr is not None
    for line in child.stderr:
        errors.append(line.rstrip())
        print(line, end="", file=sys.stderr, flush=True)


def found(section: str, name: str, value: Any) -> None:
    """Tell the parent process one result."""
    print(f"{MARK}{json.dumps([section, name, value])}", flush=True)


def written(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by one with this JSON, so that a reader never sees half of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
