"""The Worker of wrangler-compat/, in workerd, in front of a real edge with a real origin."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import httpx
import pytest

from tailrace.edge.access.page_origins import OriginRule, access_headers, preflight_headers
from tailrace.ledger.process.version import tailrace_version
from tests.bench.edge.readers import stream_id
from tests.bench.worker.source import THOUSAND
from tests.e2e.processes import ROOT, Edge, Origin, free_port, running
from tests.e2e.sse import after_retry
from tests.npm import installed
from tests.worker.workerd import FOLDER, Workerd

TYPES_TIMEOUT_S = 120.0
TIMEOUT_S = 60.0
POLL_S = 0.05
SSE = {"Accept": "text/event-stream"}
FRAMES = {"Accept": "application/vnd.tailrace.frames"}
REQUEST = {"model": "demo", "prompt": "Once upon", "max_tokens": 12, "seed": 3}


class Place:
    """An origin, an edge of it, and the Worker in front of that."""

    def __init__(self, folder: Path) -> None:
        self.origin = Origin(folder / "origin")
        self.edge = Edge(self.origin)
        self.worker = Workerd(self.edge.url, folder / "worker")


@pytest.fixture(scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    made = Place(tmp_path_factory.mktemp("place"))
    async with running(made.origin, made.edge), made.worker:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as made:
        yield made


pytestmark = pytest.mark.anyio


def test_the_workers_types_are_sound() -> None:
    done = subprocess.run(
        [installed(FOLDER) / "tsc", "--project", FOLDER],
        capture_output=True,
        text=True,
        timeout=TYPES_TIMEOUT_S,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0


def test_the_worker_is_of_this_release() -> None:
    assert json.loads((FOLDER / "package.json").read_text())["version"] == tailrace_version()


def frames_in(answer: httpx.Response) -> str:
    """Return a body in either view, without the `retry:` that each answer draws for itself."""
    is_events = answer.headers.get("Content-Type") == SSE["Accept"]
    return after_retry(answer.text) if is_events else answer.content.hex()


@pytest.mark.parametrize("view", [SSE, FRAMES], ids=["events", "frames"])
async def test_a_stream_is_the_same_here_as_at_the_edge_behind_from_every_index(
    place: Place, client: httpx.AsyncClient, view: dict[str, str]
) -> None:
    begun = await client.post(f"{place.worker.url}/v1/generate", json=REQUEST, headers=view)
    path = f"/v1/generate/{begun.headers['Tailrace-Stream']}"
    for after in (None, *range(14)):
        query = {} if after is None else {"after": after}
        here = await client.get(place.worker.url + path, params=query, headers=view)
        there = await client.get(place.edge.url + path, params=query, headers=view)
        assert (here.status_code, frames_in(here)) == (there.status_code, frames_in(there))
        if after is None:
            assert frames_in(here) == frames_in(begun)


async def test_pages_are_told_the_same_as_by_an_edge(
    tmp_path: Path, place: Place, client: httpx.AsyncClient
) -> None:
    rule = OriginRule(["https://app.example"])
    access = access_headers(rule, "https://app.example")
    worker = Workerd(place.edge.url, tmp_path, TAILRACE_EDGE_ALLOWED_ORIGINS="https://app.example")
    async with worker:
        page = {"Origin": "https://app.example"}
        asked = await client.options(f"{worker.url}/v1/generate", headers=page)
        begun = await client.post(f"{worker.url}/v1/generate", json=REQUEST, headers=SSE | page)
        other = await client.get(f"{worker.url}/healthz", headers={"Origin": "https://x.example"})
    assert asked.status_code == 204
    assert asked.headers.items() >= httpx.Headers(preflight_headers(access)).items()
    assert begun.headers.items() >= httpx.Headers(access).items()
    assert other.json()["error"]["code"] == "foreign_origin"


async def test_an_answer_has_the_request_id_that_was_given_or_one_of_its_own(
    place: Place, client: httpx.AsyncClient
) -> None:
    for path in ("/healthz", "/v1/generate/none"):
        given = await client.get(place.worker.url + path, headers={"X-Request-Id": "mine-7"})
        assert given.headers["X-Request-Id"] == "mine-7"
        made = await client.get(place.worker.url + path, headers={"X-Request-Id": "not one"})
        assert len(made.headers["X-Request-Id"]) == 32


async def test_an_object_that_was_killed_while_it_read_reads_on_before_anybody_asks(
    tmp_path: Path,
) -> None:
    async with endless_origin() as url, Workerd(url, tmp_path) as worker:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            path = f"{worker.url}/v1/generate/{stream_id(THOUSAND, 1).hex()}"
            async with client.stream("GET", path, headers=FRAMES) as answer:
                async for _ in answer.aiter_raw():
                    break
                await worker.kill()
        before = frames_kept(tmp_path)
        await worker.start()
        async with asyncio.timeout(TIMEOUT_S):
            while frames_kept(tmp_path) <= before:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(POLL_S)


@asynccontextmanager
async def endless_origin() -> AsyncIterator[str]:
    """Yield the bench's source, which has a frame a millisecond for whoever reads."""
    link, port = free_port(), free_port()
    source = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.worker.source", str(link), str(port)),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert source.stdin is not None
    assert source.stdout is not None
    try:
        await source.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        source.kill()
        await source.wait()


def frames_kept(disk: Path) -> int:
    """Return how many frames the one stream has that an object keeps on this disk."""
    for file in (disk / "objects").rglob("*.sqlite"):
        database = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            named = "SELECT 1 FROM sqlite_master WHERE name = 'frames'"
            if database.execute(named).fetchone():
                return int(database.execute("SELECT max(next) FROM frames").get or 0)
        finally:
            database.close()
    return 0


async def test_what_was_read_here_outlives_a_kill_and_the_edge_behind(
    tmp_path: Path, place: Place, client: httpx.AsyncClient
) -> None:
    edge = Edge(place.origin)
    async with running(edge), Workerd(edge.url, tmp_path) as worker:
        begun = await client.post(f"{worker.url}/v1/generate", json=REQUEST, headers=SSE)
        path = f"/v1/generate/{begun.headers['Tailrace-Stream']}"
        with_token = SSE | {"Tailrace-Token": begun.headers["Tailrace-Token"]}
        await worker.kill()
        await edge.stop()
        await worker.start()
        again = await client.get(worker.url + path, headers=with_token)
        assert (again.status_code, frames_in(again)) == (200, frames_in(begun))
        stranger = await client.get(
            worker.url + path, headers=SSE | {"Tailrace-Token": "v1.none.such.token"}
        )
        assert stranger.json()["error"]["code"] == "origin_unreachable"
        models = await client.get(f"{worker.url}/v1/models")
        chat = await client.post(f"{worker.url}/v1/chat/completions", json={"model": "demo"})
        for answer, code in ((models, "origin_unreachable"), (chat, "outcome_unknown")):
            said = answer.json()["error"]
            assert (answer.status_code, said["type"], said["code"]) == (503, "server_error", code)
            assert answer.headers["X-Should-Retry"] == "true"
        message = await client.post(f"{worker.url}/v1/messages", json={"model": "demo"})
        assert (message.status_code, message.json()["error"]["type"]) == (503, "api_error")
        assert message.headers["Request-Id"] == message.json()["request_id"]
