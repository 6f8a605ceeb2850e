"""The table of `tailrace top` for made-up documents; tests/e2e/test_top.py has real ones."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from tailrace.top import Look, document, shown

GIB = 1 << 30


def look(gpu: dict[str, Any] | None) -> Look:
    worker = {
        "worker": 3,
        "pid": 7,
        "state": "ready",
        "model": "llama",
        "device": "cuda triton (NVIDIA H100)",
        "streams": 0,
        "deaths": 0,
        "load": None,
        "gpu": gpu,
    }
    pool = {"origins": [{"origin": "o:1", "workers": [worker]}]}
    streams = {"live": 0, "paused": 0, "states": {}, "streams": []}
    return Look(1.0, streams, pool, None)


def row_of(gpu: dict[str, Any] | None) -> list[str]:
    out = io.StringIO()
    seen = look(gpu)
    Console(file=out, width=200).print(shown("http://edge", document(seen, seen)))
    return next(line for line in out.getvalue().splitlines() if line.startswith("o:1")).split()


def test_a_worker_has_its_gpu_beside_it() -> None:
    gpu = {
        "gpu": "3",
        "name": "NVIDIA H100",
        "utilisation": 0.73,
        "memory_used_bytes": 60 * GIB,
        "memory_bytes": 80 * GIB,
    }
    assert row_of(gpu)[-9:-6] == ["3", "73%", "60.0/80"]
    assert document(look(gpu), look(gpu))["pool"][0]["gpu"] == gpu


def test_figures_that_are_not_known_are_left_open() -> None:
    unknown = dict.fromkeys(("name", "utilisation", "memory_used_bytes", "memory_bytes"))
    assert row_of({"gpu": "GPU-8932f937-d72c", **unknown})[-9:-6] == ["GPU-8932f937", "-", "-"]
    assert row_of(None)[-9:-6] == ["-", "-", "-"]
