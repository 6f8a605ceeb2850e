"""Charts of what keep-alive policies cost; they need matplotlib, from the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from tailrace.origin.pool.policies.simulate import TtlSweep
from tailrace.origin.pool.policies.trace import IdleGaps


def draw_frontier(
    path: Path, gaps: IdleGaps, sweep: TtlSweep, optimum_gpu_s: float, here_s: float | None
) -> None:
    """Draw three charts of fixed TTLs and the clairvoyant optimum.

    The charts show cold starts against idle time, the cost relative to the optimum against the TTL,
    and the distribution of gaps.
    """
    figure = Figure(figsize=(8, 10), layout="constrained")
    pareto, ratio, lengths = figure.subplots(3, 1)
    pareto.plot(sweep.wasted_gpu_s, sweep.cold_starts, marker=".", label="one TTL for all")
    ordered = np.sort(gaps.length_s)
    # The clairvoyant policy keeps a model loaded only in the shortest gaps, and unloads it at once
    # in all others.
    left = np.arange(len(ordered), -1, -1)
    idling = np.concatenate([[0.0], np.cumsum(ordered)])
    pareto.plot(idling, left, color="grey", linestyle="--", label="clairvoyant")
    pareto.set(xlabel="wasted GPU-seconds", ylabel="cold starts", xscale="symlog")
    over = sweep.cost_gpu_s / optimum_gpu_s
    ratio.plot(sweep.ttl_s, over, marker=".", label="one TTL for all")
    ratio.axhline(1.0, color="grey", linestyle="--", label="clairvoyant")
    ratio.set(xlabel="TTL, s", ylabel="cost over optimum", xscale="log", yscale="log")
    lengths.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    lengths.set(xlabel="idle gap, s", ylabel="share of gaps up to it", xscale="log")
    if here_s is not None:
        at = int(np.argmin(np.abs(sweep.ttl_s - here_s)))
        mark = {"color": "crimson", "marker": "o", "linestyle": "", "label": "you are here"}
        pareto.plot(sweep.wasted_gpu_s[at], sweep.cold_starts[at], **mark)
        ratio.plot(sweep.ttl_s[at], over[at], **mark)
    for panel in (pareto, ratio):
        panel.legend(frameon=False)
    for panel in (pareto, ratio, lengths):
        panel.grid(alpha=0.3)
    _save(figure, path)


def draw_residency(path: Path, lanes: Sequence[tuple[str, str, float, float]]) -> None:
    """Draw how long models were in which tier: each lane is (label, tier, from_s, until_s)."""
    names = sorted({name for name, *_ in lanes})
    figure = Figure(figsize=(8, 1.2 + 0.45 * len(names)), layout="constrained")
    panel = figure.subplots()
    told = set()
    for name, tier, begin_s, end_s in lanes:
        label = None if tier in told else tier
        told.add(tier)
        width = end_s - begin_s
        color = TIER_COLORS.get(tier, "grey")
        panel.barh(names.index(name), width, left=begin_s, color=color, label=label)
    panel.set(xlabel="s", yticks=range(len(names)), yticklabels=names)
    panel.invert_yaxis()
    panel.legend(frameon=False, ncols=max(len(told), 1), loc="lower left", bbox_to_anchor=(0, 1))
    _save(figure, path)


TIER_COLORS = {
    "cold": "whitesmoke",
    "launched": "lightgrey",
    "host": "lightsteelblue",
    "device": "cornflowerblue",
    "compiled": "orange",
    "hot": "crimson",
}


def _save(figure: Figure, path: Path) -> None:
    """Save the chart; the same figures give the same file."""
    mpl.rcParams["svg.hashsalt"] = "tailrace"
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_waterfall(path: Path, stages: Sequence[tuple[str, float, float]]) -> None:
    """Draw the stages of a cold start as a waterfall: times and lower bounds in ms."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    at_ms = 0.0
    for row, (name, took_ms, floor_ms) in enumerate(stages):
        first = row == 0
        panel.barh(row, took_ms, left=at_ms, color="steelblue", label="took" if first else None)
        panel.barh(
            row,
            floor_ms,
            left=at_ms,
            height=0.3,
            color="darkorange",
            label="floor" if first else None,
        )
        at_ms += took_ms
        panel.text(at_ms, row, f" {name}: {took_ms:.0f} ms, floor {floor_ms:.0f}", va="center")
    panel.set(xlabel="ms since the worker was asked for", xlim=(0, at_ms * 1.35), yticks=[])
    panel.invert_yaxis()
    panel.legend(frameon=False, loc="lower left")
    _save(figure, path)
