"""Tokens per second of one stream in the engine: no socket, no ledger.

    python tests/bench/bench_decode.py [MODEL_DIR]

The last line of output is one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from pathlib import Path

import tokenizers
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from origin.cpu_model import load  # noqa: E402
from origin.engine import Engine  # noqa: E402
from origin.worker import TORCH_THREADS, load_tokenizer  # noqa: E402
from origin.worker_frame import Run  # noqa: E402
from tests.bench.machine import cpu  # noqa: E402

DEMO_MODEL = ROOT / "origin" / "demo" / "model"
PROMPT = "Once upon a time there was a fox who lived by the river."
TOKENS = 256
REPEATS = 7


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO_MODEL
    torch.set_num_threads(TORCH_THREADS)
    model = load(directory)
    tokenizer = load_tokenizer(directory)
    prompt_ids = tuple(tokenizer.encode(PROMPT, add_special_tokens=False).ids)
    result: dict[str, object] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.8)):
        run = Run(
            prompt_ids=prompt_ids,
            generated_ids=(),
            sent_bytes=0,
            next_index=0,
            max_tokens=TOKENS,
            temperature=temperature,
            top_k=40,
            top_p=0.95,
            ignore_eos=True,
        )
        engine = Engine(model, tokenizer)
        one_run(engine, run)
        measured = [one_run(engine, run) for _ in range(REPEATS)]
        ttft_s, total_s = (statistics.median(column) for column in zip(*measured, strict=True))
        result[f"{name}_tokens_per_s"] = round((TOKENS - 1) / (total_s - ttft_s), 1)
        result[f"{name}_ttft_ms"] = round(ttft_s * 1000, 2)
        print(f"{name}: {result[f'{name}_tokens_per_s']} tokens/s after the first")
    print(json.dumps(summary(result, len(prompt_ids))))


def one_run(engine: Engine, run: Run) -> tuple[float, float]:
    """Seconds to the end of the step that decoded the first token, and of the last."""
    started = time.perf_counter()
    engine.add(1, run)
    engine.step()
    first = time.perf_counter()
    while not engine.idle:
        engine.step()
    return first - started, time.perf_counter() - started


def summary(result: dict[str, object], prompt_tokens: int) -> dict[str, object]:
    return {
        "tokens_per_s": result["sampled_tokens_per_s"],
        "ttft_ms": result["sampled_ttft_ms"],
        **result,
        "prompt_tokens": prompt_tokens,
        "tokens": TOKENS,
        "repeats": REPEATS,
        "threads": torch.get_num_threads(),
        "cpu": cpu(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


if __name__ == "__main__":
    main()
