"""A picture of the dashboard over a real run: `python docs/dashboard/draw.py [--seconds 90]`.

An origin and an edge under the load of `tailrace bench serve`, with cuts; a worker is killed on the
way. Prometheus scrapes both, and is asked every query of deploy/grafana/tailrace.json, as Grafana
would ask it; Grafana's own panels, packages of npm, draw the answers in Chromium. Needs
Prometheus, Chromium, Node.js and the extra `dev`; writes docs/dashboard.png.
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
from PIL import Image
from playwright.async_api import async_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.browser import program  # noqa: E402
from tests.e2e.processes import running  # noqa: E402
from tests.e2e.test_prometheus import Prometheus, measured, prometheus  # noqa: E402
from tests.npm import installed  # noqa: E402

WINDOW = "15s"
BUNDLED = (
    *("--bundle", "--minify", "--jsx=automatic", "--log-level=error"),
    *("--define:global=window", '--define:process.env.NODE_ENV="production"'),
    *("--loader:.svg=dataurl", "--loader:.ttf=dataurl"),
)
DRAWN = "count => document.querySelectorAll('canvas, .none').length == count"
SHOWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


async def record(seconds: float, folder: Path) -> dict[str, Any]:
    """Return what page.jsx reads: the dashboard, and the series of each of its panels."""
    board = json.loads((ROOT / "deploy/grafana/tailrace.json").read_text(encoding="utf-8"))
    origin, edge, targets = measured(folder)
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
        ended = time.time()
        series = {
            panel["id"]: await series_of(panel, asked, begun, ended) for panel in board["panels"]
        }
    return {"board": board, "series": series, "begun": begun, "ended": ended}


async def series_of(
    panel: dict[str, Any], asked: Prometheus, begun: float, ended: float
) -> list[dict[str, Any]]:
    """Return the name and the points of each series that a panel's queries give."""
    found = []
    for target in panel.get("targets", ()):
        told = await asked.get(
            "query_range",
            query=target["expr"].replace("$__rate_interval", WINDOW),
            start=str(begun),
            end=str(ended),
            step="1",
        )
        for one in told["result"]:
            name = _named(target["legendFormat"], one["metric"])
            found.append({"name": name, "points": one["values"]})
    return found


def _named(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), form)


async def draw(path: Path, recorded: dict[str, Any], folder: Path) -> None:
    """Return the page with the recorded data, as a picture of 256 colours."""
    esbuild = installed(HERE) / "esbuild"
    out = f"--outfile={folder / 'page.js'}"
    bundling = await asyncio.create_subprocess_exec(esbuild, HERE / "page.jsx", out, *BUNDLED)
    assert await bundling.wait() == 0
    html = folder / "page.html"
    html.write_text('<!doctype html><link rel="stylesheet" href="page.css"><body></body>')
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program(), args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport={"width": 1400, "height": 900})
        await page.goto(html.as_uri())
        await page.evaluate("recorded => { window.recorded = recorded }", recorded)
        await page.add_script_tag(path=folder / "page.js")
        plots = sum(panel["type"] != "row" for panel in recorded["board"]["panels"])
        await page.wait_for_function(DRAWN, arg=plots)
        await page.evaluate(SHOWN)
        await page.screenshot(path=path, full_page=True)
        await browser.close()
    with Image.open(path) as picture:
        few = picture.quantize(256)
    few.save(path, optimize=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        recorded = await record(options.seconds, Path(name))
        await draw(ROOT / "docs/dashboard.png", recorded, Path(name))


if __name__ == "__main__":
    asyncio.run(main())
