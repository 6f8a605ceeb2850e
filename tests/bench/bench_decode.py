"""The CPU model alone, no engine around it: prefill, steps of decoding, draws.

    python tests/bench/bench_decode.py [--model DIR] [--threads 1] [--context 300]

For every batch size: milliseconds to push one row of each sequence and to draw the next tokens
(top_k 40, top_p 0.95), and the tokens per second that this makes. Beside the time on the clock is
that on the processor, which other programs on the machine change less. The last line of output is
one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.kernels.sampler.sampler import Sampling  # noqa: E402
from tailrace.kernels.shapes import PAGE_TOKENS  # noqa: E402
from tailrace.origin.models.cpu_model import CpuModel, load  # noqa: E402
from tailrace.origin.models.model import PREFILL_CHUNK_TOKENS, Draw, Piece, prefill  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402

DEMO_MODEL = ROOT / "origin" / "demo" / "model"
BATCHES = (1, 4, 16)
STEPS = 40
TOKEN = 7
"""Id of the token to decode; no step's time depends on it."""


def median_ms(call: Callable[[], object], repeats: int = STEPS) -> dict[str, float]:
    """Return the median wall-clock and processor time of a call, in ms, after a warm-up."""
    call()
    wall, processor = [], []
    for _ in range(repeats):
        began, worked = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - began)
        processor.append(time.process_time() - worked)
    both = {"wall": wall, "cpu": processor}
    return {name: round(statistics.median(times) * 1e3, 3) for name, times in both.items()}


def step_of(model: CpuModel, batch: int, context: int) -> dict[str, object]:
    """Return a step of `batch` sequences that have `context` tokens each."""
    pages = -(-(context + 1) // PAGE_TOKENS)
    tables = [range(first * pages, (first + 1) * pages) for first in range(batch)]
    for seed, table in enumerate(tables):
        prefill(model, some_ids(model, context, seed), table)
    pieces = [Piece([TOKEN], context, table, prefill=False) for table in tables]
    draws = [
        Draw(Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=seed), context)
        for seed in range(batch)
    ]
    hidden = model.forward(pieces)
    forward = median_ms(lambda: model.forward(pieces))
    draw = median_ms(lambda: model.draw(hidden, draws))
    return {
        "forward_ms": forward,
        "draw_ms": draw,
        "tok_s": {name: round(batch * 1e3 / (forward[name] + draw[name]), 1) for name in forward},
    }


def chunk_of(model: CpuModel, context: int) -> dict[str, float]:
    """Return a whole prefill chunk after all whole chunks of the context."""
    start = context // PREFILL_CHUNK_TOKENS * PREFILL_CHUNK_TOKENS
    pages = range(start // PAGE_TOKENS + 1)
    ids = some_ids(model, start + PREFILL_CHUNK_TOKENS, 1)
    prefill(model, ids, pages)
    piece = Piece(ids[start:], start, pages, prefill=True)
    return median_ms(lambda: model.forward([piece]))


def some_ids(model: CpuModel, count: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(model.config.vocab, (count,), generator=random).tolist()
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    model = load(asked.model)
    result: dict[str, object] = {"prefill_chunk_ms": chunk_of(model, asked.context)}
    print("prefill chunk:", result["prefill_chunk_ms"])
    for batch in BATCHES:
        result[f"batch_{batch}"] = step = step_of(model, batch, asked.context)
        print(f"{batch} streams:", step)
    machine = {"threads": asked.threads, "torch": torch.__version__}
    print_line({**result, "context": asked.context, **machine})


if __name__ == "__main__":
    main()
