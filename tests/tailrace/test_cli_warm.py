"""`tailrace warm` on samples and generated traces."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.origin.pool.history.recorder import HistoryRecorder
from tailrace.origin.pool.history.schema import DAY_MS, HOT, Keeping
from tailrace.origin.pool.history.sqlite_file import SqliteHistory

SAMPLE = Path(__file__).parents[1] / "origin" / "pool" / "policies" / "samples" / "burstgpt.csv"


def warm(*words: str) -> str:
    result = CliRunner().invoke(app, ["warm", *words])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_an_imported_trace_is_simulated_under_a_cap(tmp_path: Path) -> None:
    own = str(tmp_path / "own.csv")
    said = json.loads(warm("trace", "import", "burstgpt", str(SAMPLE), "--to", own, "--json"))
    assert said["requests"] == 36
    words = ("simulate", own, "--memory", "2", "--size", "GPT-4=2", "--json")
    seen = json.loads(warm(*words, "--policy", "greedy-dual", "--policy", "ttl-30"))
    assert seen["optimum"] == "lagrangian-bound"
    assert [one["policy"] for one in seen["policies"]] == ["greedy-dual", "ttl-30"]
    assert all(one["over_optimum"] >= 1 for one in seen["policies"])


def test_tables_name_every_policy_and_mark_where_one_is(tmp_path: Path) -> None:
    shown = warm("simulate", "rare", "--days", "0.5")
    assert "break-even" in shown and "adaptive-ttl" in shown and "greedy-dual" not in shown
    chart = tmp_path / "frontier.svg"
    shown = warm("frontier", "rare", "--days", "1", "--here", "300", "--chart", str(chart))
    assert "300 ← here" in shown
    assert "<svg" in chart.read_text("utf-8")


def test_a_folder_without_kernels_has_none_to_export(tmp_path: Path) -> None:
    file = str(tmp_path / "kernels.tar.zst")
    with pytest.raises(ConfigError, match=r"no compiled kernel of this version is in .*kernels"):
        warm("export-cache", file, "--data", str(tmp_path))
    with pytest.raises(CallerError, match="cannot be read: No such file"):
        warm("import-cache", file, "--data", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("simulate", "rare", "--policy", "lucky"), "no policy is called 'lucky'"),
        (("simulate", "rare", "--policy", "ttl-x"), "'ttl-x' has no valid TTL"),
        (("simulate", "rare", "--policy", "greedy-dual"), "greedy-dual needs a cap"),
        (("simulate", "rare", "--memory", "0.5"), "is too small for 'rare-0'"),
        (("simulate", "rare", "--size", "x=1"), "'x' is not in the trace"),
        (("simulate", "rare", "--size", "rare-0=1", "--size", "rare-0=2"), "is named twice"),
        (("simulate", "rare", "--cold-cost", "0"), "must be a time above zero"),
        (("frontier", "rare", "--chart", "x.gif"), "unsupported image type '.gif'"),
        (("frontier", "no-such-file"), "no-such-file: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(CallerError) as caught:
        warm(*words)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("first_ms", "shown"),
    [
        (None, "1 requests in a day, 0 of them cold starts"),
        (
            2500,
            "1 requests in a day, 0 of them cold starts; 2,500 ms until the first frame on average",
        ),
    ],
)
def test_explain_shows_the_wait_for_the_first_frame_if_it_is_known(
    first_ms: int | None, shown: str, tmp_path: Path
) -> None:
    path = tmp_path / "history.db"

    async def record() -> None:
        recorder = HistoryRecorder(
            lambda: SqliteHistory.open(path, 0),
            "here",
            Keeping(DAY_MS, 1000),
            lambda: round(time.time() * 1e3),
        )
        try:
            recorder.arrived(bytes(16), "demo", HOT)
            recorder.served(bytes(16), first_ms, 3, "stop")
            await recorder.flush()
        finally:
            if recorder.store is not None:  # its thread would keep pytest from ending
                await recorder.store.close()

    asyncio.run(record())
    assert shown in warm("explain", "demo", "--history", str(path)).splitlines()
