"""The picture of a soak: memory, waits and tokens per second, by class, over the minutes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.ledger.frame import Priority
from tests.bench.soak_load import Seen

if TYPE_CHECKING:
    from tests.bench.soak_engine import Memory

WINDOW_S = 30.0
COLOURS = {Priority.INTERACTIVE: "#1b7f79", Priority.STANDARD: "#c26a12", Priority.BATCH: "#6b4fa0"}

Moments = Iterable[tuple[float, float]]
"""(when in seconds, value)"""


def draw(
    path: Path, seen: Sequence[Seen], worker: Memory, supervisor: Memory, step_ms: float
) -> None:
    """Four panels over one axis of minutes, as an SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "tailrace"  # the same picture from the same figures
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(4, 1, figsize=(9, 11), sharex=True, layout="constrained")
    memory, ttft, itl, rate = panels
    for name, process in (("worker", worker), ("supervisor", supervisor)):
        memory.plot([at / 60 for at in process.at_s], process.mib, label=name)
    memory.set_ylabel("resident memory, MiB")
    memory.set_ylim(bottom=0)
    for priority in Priority:
        some = [one for one in seen if one.priority is priority]
        starts = [(one.frames_s[0], one.frames_s[0] - one.asked_s) for one in some if one.frames_s]
        _line(ttft, priority, starts, lambda values: statistics.median(values) * 1e3)
        gaps = [gap for one in some for gap in one.gaps()]
        _line(itl, priority, gaps, lambda values: _p99(values) * 1e3)
        frames = [(at, 1.0) for one in some for at in one.frames_s]
        _line(rate, priority, frames, lambda values: len(values) / WINDOW_S)
    ttft.set_ylabel("TTFT, median, ms")
    ttft.set_yscale("log")
    itl.set_ylabel("inter-token latency, p99, ms")
    itl.axhline(step_ms, color="grey", linestyle="--", label="target of a step")
    itl.set_ylim(bottom=0)
    rate.set_ylabel("tokens per second")
    rate.set_xlabel(f"minutes; every point is {WINDOW_S:.0f} s")
    for panel in panels:
        panel.legend(loc="upper left", ncols=4, frameon=False)
        panel.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _line(
    panel: Any, priority: Priority, moments: Moments, of: Callable[[list[float]], float]
) -> None:
    windows: dict[int, list[float]] = defaultdict(list)
    for at, value in moments:
        windows[int(at / WINDOW_S)].append(value)
    minutes = [(window + 0.5) * WINDOW_S / 60 for window in sorted(windows)]
    values = [of(windows[window]) for window in sorted(windows)]
    panel.plot(minutes, values, label=priority.word, color=COLOURS[priority])


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
