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


def with_slo(*counts: tuple[str, str, int, int]) -> Look:
    """Return a reading of two origins, each with these streams and missed promises."""
    rows = [
        {
            "priority": priority,
            "model": model,
            "promised_ms": 300,
            "streams": streams,
            "missed": missed,
        }
        for priority, model, streams, missed in counts
    ]
    streams = {"live": 0, "paused": 0, "states": {}, "streams": []}
    origins = [{"origin": name, "workers": [], "slo": rows} for name in ("o:1", "o:2")]
    return Look(1.0, streams, {"origins": origins}, None)


def test_it_shows_which_class_and_model_miss_their_promise() -> None:
    before = with_slo(("interactive", "small", 10, 0))
    now = with_slo(("interactive", "small", 20, 1), ("interactive", "large", 4, 3))
    told = document(before, now)["slo"]
    assert told[0] == {
        "priority": "interactive",
        "model": "large",
        "promised_ms": 300,
        "streams": 8,
        "missed": 6,
        "missed_ratio": 0.75,
        "lately": {"streams": 8, "missed": 6},
    }
    assert (told[1]["missed_ratio"], told[1]["lately"]) == (0.05, {"streams": 20, "missed": 2})
    out = io.StringIO()
    Console(file=out, width=200).print(shown("http://edge", document(before, now)))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert ["interactive", "large", "300", "8", "6", "75.0%", "6"] in lines


def test_an_edge_whose_origins_promise_nothing_shows_no_table() -> None:
    seen = look(None)
    out = io.StringIO()
    Console(file=out, width=200).print(shown("http://edge", document(seen, seen)))
    assert "promised" not in out.getvalue()


def test_figures_that_are_not_known_are_left_open() -> None:
    unknown = dict.fromkeys(("name", "utilisation", "memory_used_bytes", "memory_bytes"))
    assert row_of({"gpu": "GPU-8932f937-d72c", **unknown})[-9:-6] == ["GPU-8932f937", "-", "-"]
    assert row_of(None)[-9:-6] == ["-", "-", "-"]


def test_a_stream_has_the_seconds_beside_it_that_it_spent_in_each_place() -> None:
    time = {"queue": 0.0002, "prefill": 0.25, "decode": 3.123, "ledger": 0.012}
    time |= {"relay": 0.0, "away": 1.5}
    row: dict[str, Any] = {"id": "a" * 32, "state": "running", "model": "safe"}
    row |= {
        "priority": "standard",
        "tenant": "",
        "tokens": 7,
        "readers": 1,
        "resumes": 0,
        "takeovers": 0,
    }
    row["time"] = time | {"stages": {"model": 2.9, "group": 0.0}}
    page = {"live": 1, "paused": 0, "states": {"running": 1}, "streams": [row]}
    seen = Look(1.0, page, {"origins": []}, None)
    out = io.StringIO()
    Console(file=out, width=200).print(shown("http://edge", document(seen, seen)))
    assert "prefill 0.25, decode 3.1, ledger 0.012, away 1.5, model 2.9\n" in out.getvalue()
    assert document(seen, seen)["streams"][0]["time"] == row["time"]
    del row["time"]  # an older origin
    Console(file=out, width=200).print(shown("http://edge", document(seen, seen)))
