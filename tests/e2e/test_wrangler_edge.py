"""`tailrace edge --wrangler FILE`, as it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import START_TIMEOUT_S, Origin, Process, free_port, running
from tests.e2e.sse import TIMEOUT

POLL_S = 0.05


@pytest.mark.anyio
async def test_an_edge_listens_where_a_wrangler_file_says_and_goes_by_its_routes(
    tmp_path: Path,
) -> None:
    port = free_port()
    file = tmp_path / "wrangler.jsonc"
    said: dict[str, object] = {"name": "relay", "main": "x.ts", "compatibility_date": "2026-01-31"}
    said |= {"dev": {"ip": "127.0.0.1", "port": port}}
    said |= {"env": {"live": {"routes": ["api.example.com/*"], "vars": {"MODE": "live"}}}}
    file.write_text(json.dumps(said))
    (tmp_path / ".dev.vars.live").write_text("TAILRACE_EDGE_ORIGIN_SECRET=hunter-two-hunter-two\n")
    edge = await Process("edge", "--wrangler", file, "--env", "live").start()
    try:
        await edge.saw(f"Running on http://127.0.0.1:{port}")
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT) as client:
            for host, status in (("api.example.com", 200), ("other.example.com", 421)):
                answer = await client.get("/healthz", headers={"Host": host})
                assert answer.status_code == status
    finally:
        await edge.stop()
    assert "hunter-two" not in str(edge.events)


@pytest.mark.anyio
async def test_a_files_bindings_are_objects_of_the_origin_and_its_migrations_are_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_ORIGIN_OBJECTS", "tests.origin.own_objects:Counter")
    monkeypatch.setenv("TAILRACE_ORIGIN_PRODUCER", "tests.runtimes.scripted_producer:make")
    origin = Origin(tmp_path / "origin")
    file = tmp_path / "wrangler.json"

    async def edge(*steps: object, class_name: str) -> tuple[Process, str]:
        url = f"127.0.0.1:{free_port()}"
        file.write_text(
            json.dumps(
                {
                    "name": "relay",
                    "main": "x.ts",
                    "compatibility_date": "2026-01-31",
                    "durable_objects": {"bindings": [{"name": "C", "class_name": class_name}]},
                    "migrations": steps,
                }
            )
        )
        links = ("--origin", origin.link, "--http", url)
        made = await Process("edge", "--wrangler", file, *links).start()
        await made.saw("Running on")
        return made, f"http://{url}"

    async with running(origin), httpx.AsyncClient(timeout=START_TIMEOUT_S) as client:
        new = {"tag": "v1", "new_sqlite_classes": ["Counter"]}
        first, url = await edge(new, class_name="Counter")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while (await client.get(f"{url}/readyz")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
            counts = [(await client.post(f"{url}/v1/objects/C/a%20b/up")).text for _ in range(2)]
            assert (counts, (await client.get(f"{url}/v1/objects/C/b")).text) == (["1", "2"], "1")
            for path, code in (
                ("D/a", "unknown_binding"),
                ("C/", "unknown_object"),
                ("C/%ff", "unknown_object"),
                ("C/" + "a" * 600, "invalid_request"),
            ):
                answer = await client.get(f"{url}/v1/objects/{path}")
                assert answer.json()["error"]["code"] == code
        finally:
            await first.stop()
        gone = {"tag": "v2", "renamed_classes": [{"from": "Counter", "to": "Tally"}]}
        second, url = await edge(new, gone, class_name="Tally")
        try:
            await second.saw("deployment refused")
            answer = await client.get(f"{url}/readyz")
            assert answer.status_code == 503
            [reason] = answer.json()["reasons"]
            assert "this origin has no class Tally" in reason
        finally:
            await second.stop()
