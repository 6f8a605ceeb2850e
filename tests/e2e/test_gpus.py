"""GPUs of an origin's worker processes; no process here uses one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running

pytestmark = pytest.mark.anyio


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


async def test_four_workers_of_an_origin_see_one_of_two_gpus_each(
    tmp_path: Path, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_ORIGIN_GPUS", "0, GPU-8932f937")
    monkeypatch.setenv("TAILRACE_ORIGIN_WORKERS", "4")
    monkeypatch.setenv("TAILRACE_ORIGIN_FORK_WORKERS", "false")
    monkeypatch.setenv("TAILRACE_ORIGIN_KV_MIB", "16")
    origin = Origin(tmp_path)
    edge = Edge(origin)
    async with running(origin, edge):
        await origin.saw("worker.ready", 4)
        seen: dict[str, Any] = {}
        # While four workers import torch, the origin may send nothing for some seconds. The edge
        # then drops its link and connects again.
        while "workers" not in seen:
            [seen] = (await client.get(f"{edge.url}/v1/admin/pool")).json()["origins"]
        pids = [worker["pid"] for worker in seen["workers"]]
        environments = [environment_of(pid) for pid in pids]
        gpus = Counter(one["CUDA_VISIBLE_DEVICES"] for one in environments)
        assert gpus == {"0": 2, "GPU-8932f937": 2}
        # Where torch has no CUDA, or there is no GPU, `auto` has chosen the CPU.
        on_gpu = [worker["device"].startswith("cuda") for worker in seen["workers"]]
        assert [worker["gpu"] is not None for worker in seen["workers"]] == on_gpu
