"""`tailrace bench serve` against a real edge, by both of its dialects."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ROOT, Edge, Origin, running

pytestmark = pytest.mark.anyio

FEW = ("--rate", "20", "--seconds", "1", "--max-tokens", "12", "--prompt-words", "4")
SLOWER = 3


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    origin = Origin(tmp_path_factory.mktemp("bench"))
    edge = Edge(origin)
    async with running(origin, edge):
        yield edge


async def bench(edge: Edge, *flags: object) -> tuple[int, str]:
    command = (sys.executable, "-m", "tailrace.cli", "bench", "serve", edge.url, *FEW, *flags)
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.parametrize("flags", [("--cuts", "2"), ("--api", "chat")], ids=["native", "chat"])
async def test_a_run_measures_every_request(
    edge: Edge, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out, chart = tmp_path / "run.json", tmp_path / "run.svg"
    status, told = await bench(edge, *flags, "--out", out, "--chart", chart)
    assert status == 0, told
    run: dict[str, Any] = json.loads(out.read_text())
    assert run["errors"] == {} and run["requests_sent"] == len(run["requests"]) > 5
    assert all(row["tokens"] == 12 for row in run["requests"])
    assert all(row["ttft_ms"] > 0 for row in run["requests"])
    assert (run["resume_ms"] is not None) == ("--cuts" in flags)
    assert chart.read_text().startswith("<?xml")
    # The same figures are alike; beside ones that a machine a hundred times as fast would have,
    # they are slower.
    for row in run["requests"]:
        row["ttft_ms"] /= 100
    old = tmp_path / "old.json"
    old.write_text(json.dumps(run))
    status, told = await bench(edge, *flags, "--against", old, "--json")
    verdicts = {each["figure"]: each["word"] for each in json.loads(told)["verdicts"]}
    assert status == SLOWER and verdicts["ttft_ms"] == "slower"


async def test_times_of_a_trace_are_kept_and_a_server_that_refuses_is_a_failure(
    edge: Edge, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("model,arrival_s,duration_s\n" + "".join(f"m,{n * 10},1\n" for n in range(6)))
    out = tmp_path / "run.json"
    flags = ("--trace", trace, "--speed", "100", "--model", "no-such-model", "--out", out)
    status, told = await bench(edge, *flags)
    run = json.loads(out.read_text())
    assert [row["due_s"] for row in run["requests"]] == [0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert status == 1 and list(run["errors"].values()) == [6], told


@pytest.mark.parametrize(
    "flags",
    [("--api", "grpc"), ("--api", "chat", "--cuts", "1"), ("--chart", "x.gif")],
    ids=" ".join,
)
async def test_what_makes_no_sense_is_refused(edge: Edge, flags: tuple[str, ...]) -> None:
    status, _ = await bench(edge, *flags)
    assert status == 2
