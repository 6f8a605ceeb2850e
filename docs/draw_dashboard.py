"""Draws the dashboard's panels from a real run: `python docs/draw_dashboard.py [--seconds 90]`.

An origin and an edge under the load of `tailrace bench serve`, with cuts; a worker is killed on the
way. Prometheus scrapes both, and every panel of deploy/grafana/tailrace.json is asked of it, as
Grafana would. Needs Prometheus and the extra `dev`; writes docs/dashboard.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.processes import Edge, Origin, free_port, running  # noqa: E402
from tests.e2e.test_prometheus import Prometheus, prometheus  # noqa: E402

COLUMNS = 3
WINDOW = "15s"
UNITS = {"s": (1000, "ms"), "percentunit": (100, "%"), "bytes": (1 / (1 << 20), "MiB")}


async def record(seconds: float) -> list[tuple[dict[str, Any], list[Any]]]:
    """Each panel, with the series that its queries give."""
    ports = {"tailrace-origin": free_port(), "tailrace-edge": free_port()}
    targets = {job: f"127.0.0.1:{port}" for job, port in ports.items()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = folder / "tailrace.toml"
        settings.write_text(
            f'[origin]\nmetrics = "{targets["tailrace-origin"]}"\n'
            f'[edge]\nmetrics = "{targets["tailrace-edge"]}"\n'
        )
        origin = Origin(folder / "data", config=settings)
        edge = Edge(origin, config=settings)
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            running(origin, edge),
            prometheus(client, folder, targets) as asked,
        ):
            begun = time.time()
            load = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tailrace.cli", "bench", "serve", edge.url),
                *("--rate", "3", "--seconds", str(seconds), "--max-tokens", "120", "--cuts", "2"),
            )
            await asyncio.sleep(seconds / 2)
            await origin.kill_worker()
            await load.wait()
            return await panels(asked, begun, time.time())


async def panels(asked: Prometheus, begun: float, ended: float) -> list[Any]:
    board = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text(encoding="utf-8"))
    found = []
    for panel in board["panels"]:
        series = []
        for target in panel.get("targets", ()):
            told = await asked.get(
                "query_range",
                query=target["expr"].replace("$__rate_interval", WINDOW),
                start=str(begun),
                end=str(ended),
                step="1",
            )
            for one in told["result"]:
                label = _named(target["legendFormat"], one["metric"])
                points = [(at - begun, float(value)) for at, value in one["values"]]
                series.append((label, points))
        if panel["type"] == "timeseries":
            found.append((panel, series))
    return found


def _named(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), form)


def draw(path: Path, found: list[tuple[dict[str, Any], list[Any]]]) -> None:
    mpl.rcParams.update({"svg.hashsalt": "tailrace", "font.size": 7})
    rows = -(-len(found) // COLUMNS)
    figure = Figure(figsize=(12, 2.1 * rows), layout="constrained")
    axes = figure.subplots(rows, COLUMNS).flat
    for panel, series in found:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        factor, name = UNITS.get(unit, (1, "/s" if unit in ("ops", "reqps") else ""))
        plot = next(axes)
        for label, points in series:
            plot.plot(
                [at for at, _ in points], [value * factor for _, value in points], label=label
            )
        title = panel["title"] + (f", {name}" if name else "")
        plot.set_title(title, loc="left", fontweight="bold")
        plot.set_ylim(bottom=0)
        plot.grid(alpha=0.3)
        if series:
            plot.legend(frameon=False, fontsize=5, loc="upper left", ncols=2)
        else:
            plot.text(0.5, 0.5, "no data", ha="center", transform=plot.transAxes)
    for plot in axes:
        plot.axis("off")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    draw(ROOT / "docs/dashboard.svg", asyncio.run(record(options.seconds)))


if __name__ == "__main__":
    main()
