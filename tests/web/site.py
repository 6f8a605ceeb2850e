"""A site whose pages use an edge of another origin, and what its tests do to the edge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.e2e.held import HeldOrigin
from tests.e2e.processes import Edge, running
from tests.schema_text import ROOT

INPUT = {
    "model": "demo",
    "prompt": "Once upon a time",
    "max_tokens": 40,
    "temperature": 0.8,
    "seed": 21,
    "ignore_eos": True,
}
HELD = 200
"""Characters: more than twenty tokens of a text, and less than a hundred."""
PAGE = """<!doctype html><title>Tailrace</title>
<script type="module" src="/tests/web/{script}"></script>"""


class Site:
    """Its pages, and the edge that they use; `result` is what a page posts."""

    def __init__(self, origin: HeldOrigin) -> None:
        self.url = ""
        self.origin = origin
        self.edge: Edge | None = None
        self.world: dict[str, Any] = {}
        self.result: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.app = Starlette(
            routes=[
                Route("/page/{script}", self._page),
                Route("/world", self._world),
                Route("/control/{command}", self._control, methods=["POST"]),
                Route("/result", self._result, methods=["POST"]),
                Mount("/edge/web", StaticFiles(directory=ROOT / "edge/web")),
                Mount("/tests/web", StaticFiles(directory=ROOT / "tests/web")),
            ]
        )

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(PAGE.format(script=request.path_params["script"]))

    async def _world(self, _request: Request) -> Response:
        return JSONResponse(self.world)

    async def _control(self, request: Request) -> Response:
        assert self.edge is not None
        match request.path_params["command"]:
            case "kill":
                await self.edge.kill()
                self.edge.events.clear()
            case "start":
                await self.edge.ready()
            case "hold":
                self.origin.hold(HELD)
            case "go-on":
                self.origin.go_on()
        return Response()

    async def _result(self, request: Request) -> Response:
        self.result.set_result(json.loads(await request.body()))
        return Response()

    async def asked(self) -> dict[str, Any]:
        """Return what a page posts next."""
        told = await self.result
        self.result = asyncio.get_running_loop().create_future()
        return told


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    """Yield the URL where it is served."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
        assert not serving.done(), serving
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    """Yield a site, an origin, and an edge that the site's pages may use."""
    made = Site(HeldOrigin(folder / "data"))
    async with serving(made.app) as made.url:
        settings = folder / "tailrace.toml"
        settings.write_text(f'[edge]\nallowed_origins = ["{made.url}"]\n')
        made.edge = Edge(made.origin, config=settings)
        async with running(made.origin, made.edge), httpx.AsyncClient(timeout=60) as client:
            url = f"{made.edge.url}/v1/generate"
            whole = await client.post(url, json=INPUT)
            made.world = {"generate": url, "text": whole.json()["text"]}
            yield made
