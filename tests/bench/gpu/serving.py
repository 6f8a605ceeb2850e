"""The parts that a worker runs: a loaded model, captures, pipelined steps and first tokens."""

from __future__ import annotations

import statistics
import time

import torch

from tailrace.kernels.sampler.sampler import Sampling
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.origin.models.gpu_model import GpuModel
from tailrace.origin.models.model import Draw, Piece, drawn_before, prefill_chunks
from tests.bench.gpu.place import Place
from tests.bench.gpu.supervisor import found
from tests.bench.gpu.whole_step import config_of, tensors_of

KV_BYTES = 8 << 30
STEP_ROWS = (1, 8, 64, 256)
STEPS = 60
"""Steps that are timed, after some that are not."""
WARM_STEPS = 8
PROMPTS = (64, 512, 2048)
TRIALS = 5


def serving(place: Place) -> None:
    """Tell the time of captures, of the host in a step, of a pipelined step and of first tokens."""
    shape = place.bitnet
    config = config_of(shape, tied=True)
    stages: dict[str, list[float]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, []).append(time.perf_counter())

    tensors = tensors_of(config, place.device, torch.bfloat16)
    began = time.perf_counter()
    model = GpuModel(
        config, tensors, "", place.device, progress, kv_bytes=1 << 20 if place.fake else KV_BYTES,
        step_rows=2 if place.fake else STEP_ROWS[-1],
    )  # fmt: skip
    _tell("model_load", "model from tensors, ms", (time.perf_counter() - began) * 1e3)
    for stage in ("compile", "capture"):
        times = stages.get(stage, [0.0])
        _tell("model_load", f"{stage}, ms", (times[-1] - times[0]) * 1e3)
    _tell("model_load", "captures", model.captured)
    for rows in (1, 2) if place.fake else STEP_ROWS:
        host, step = _steps(model, rows, 2 if place.fake else STEPS)
        _tell("host_us", f"{shape.name} launch of a step, rows={rows}", host)
        _tell("serving_us", f"{shape.name} pipelined step, rows={rows}", step)
    for length in (6,) if place.fake else PROMPTS:
        ms = _first_token(model, length, 1 if place.fake else TRIALS)
        _tell("ttft_ms", f"{shape.name} prompt of {length}", ms)


def _tell(section: str, name: str, value: float) -> None:
    print(f"  {name:60} {value:12.1f}", flush=True)
    found(section, name, round(value, 2))


def _steps(model: GpuModel, rows: int, count: int) -> tuple[float, float]:
    """Return microseconds of the host in `launch`, and of a whole step, as an engine runs them."""
    pages = [[row % model.pages] * 8 for row in range(rows)]
    draws = [Draw(Sampling(), 0)] * rows
    before = model.launch(
        [Piece([1], 0, table, prefill=False) for table in pages], range(rows), draws
    )
    inside = 0.0
    began = time.perf_counter()
    warm = 0 if count < WARM_STEPS else WARM_STEPS
    for at in range(1, warm + count + 1):
        if at == warm + 1:
            inside, began = 0.0, time.perf_counter()
        entered = time.perf_counter()
        pieces = [
            Piece([drawn_before(row)], at, table, prefill=False) for row, table in enumerate(pages)
        ]
        launched = model.launch(pieces, range(rows), draws)
        inside += time.perf_counter() - entered
        before.read()
        before = launched
    before.read()
    return inside / count * 1e6, (time.perf_counter() - began) / count * 1e6


def _first_token(model: GpuModel, length: int, trials: int) -> float:
    """Return the median time in milliseconds from a prompt to its first token, alone."""
    pages = list(range(-(-length // PAGE_TOKENS)))
    times = []
    for _ in range(trials):
        began = time.perf_counter()
        pieces = [
            Piece(chunk, at * PAGE_TOKENS, pages, prefill=True)
            for at, chunk in enumerate(prefill_chunks([1] * length))
        ]
        model.launch(pieces, [length - 1], [Draw(Sampling(), 0)]).read()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)
