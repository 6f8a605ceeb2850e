"""Draws charts of one or two benchmark runs; needs matplotlib, from the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

FIGURES = (("ttft_ms", "time to first token"), ("itl_ms", "time between tokens, median"))


def draw(path: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Draw the latencies of all requests over time, and their distributions, into an image file.

    `runs` maps a label to a run's report.
    """
    mpl.rcParams["svg.hashsalt"] = "tailrace"  # so that the same data gives the same SVG file
    figure = Figure(figsize=(9, 7), layout="constrained")
    panels = figure.subplots(2, len(FIGURES))
    for column, (name, title) in enumerate(FIGURES):
        over, spread = panels[0][column], panels[1][column]
        for label, run in runs.items():
            rows = [row for row in run["requests"] if row[name] is not None]
            over.plot([r["due_s"] for r in rows], [r[name] for r in rows], ".", label=label)
            ordered = sorted(row[name] for row in rows)
            shares = [(n + 1) / len(ordered) for n in range(len(ordered))]
            spread.step(ordered, shares, where="post", label=label)
        over.set(title=title, xlabel="due, s", ylabel="ms", ylim=(0, None))
        spread.set(xlabel="ms", ylabel="share of requests up to it", ylim=(0, 1.02))
        for panel in (over, spread):
            panel.grid(alpha=0.3)
            if len(runs) > 1:
                panel.legend(frameon=False)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata)
