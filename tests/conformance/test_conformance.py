"""The public suite of the Durable Streams protocol, through a real edge and a real origin."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.processes import Edge, Origin
from tests.npm import installed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
TESTS = 338
"""All that version 0.3.6 of the suite holds, those of subscriptions included."""
LONG_POLL_S = 0.5
"""Some of its tests wait for a long poll in vain."""
PATIENCE_MS = 15_000
"""Timeout for one test of the suite, in ms, on a busy machine.

The suite itself asserts what has to be quick.
"""
SUITE_TIMEOUT_S = 240.0


class Outcome(NamedTuple):
    """One test of the suite, with the status that vitest gave it: passed, failed, skipped, …."""

    name: str
    status: str
    message: str


def outcomes(report: str) -> list[Outcome]:
    """Return the tests in vitest's JSON report."""
    return [
        Outcome(
            test["fullName"], test["status"], "\n".join(test.get("failureMessages") or [])[:500]
        )
        for file in json.loads(report)["testResults"]
        for test in file["assertionResults"]
    ]


async def run_suite(commands: Path, url: str, report: Path) -> list[Outcome]:
    """Run it against a server; whatever comes of it is in the report."""
    variables = {
        "CONFORMANCE_TEST_URL": url,
        "LPT": str(PATIENCE_MS),
        "SUBS": "1",
    }
    suite = await asyncio.create_subprocess_exec(
        str(commands / "vitest"),
        "run",
        "durable-streams.test.mjs",
        "--reporter=json",
        f"--testTimeout={PATIENCE_MS}",
        f"--outputFile={report}",
        cwd=HERE,
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(SUITE_TIMEOUT_S):
            said, _ = await suite.communicate()
    except TimeoutError:
        suite.kill()
        await suite.wait()
        raise
    assert report.exists(), said.decode(errors="replace")[-2000:]
    return outcomes(report.read_text())


async def test_the_durable_streams_suite_passes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = installed(HERE)
    monkeypatch.setenv("TAILRACE_STREAMS_LONG_POLL_S", str(LONG_POLL_S))
    monkeypatch.setenv("TAILRACE_STREAMS_SUBSCRIPTIONS", "true")
    # The suite's webhooks listen on loopback, which is not allowed otherwise.
    monkeypatch.setenv("TAILRACE_STREAMS_WEBHOOK_HOSTS", "127.0.0.1")
    # The suite demands the CORP cross-origin.
    monkeypatch.setenv("TAILRACE_EDGE_ALLOWED_ORIGINS", "*")
    origin = Origin(tmp_path / "data")
    edge = Edge(origin)
    try:
        await origin.start()
        await origin.saw("origin.listening")  # streams need no worker
        await edge.ready()
        seen = await run_suite(commands, edge.url, tmp_path / "report.json")
    finally:
        await edge.stop()
        await origin.stop()
    others = [outcome for outcome in seen if outcome.status != "passed"]
    assert not others, "\n\n".join(f"{o.status}: {o.name}\n{o.message}" for o in others)
    assert Counter(outcome.status for outcome in seen) == {"passed": TESTS}
