"""The engine: speed for one stream and for sixteen, exactness, memory.

    python tests/bench/bench_engine.py [--model DIR] [--device cpu] [--trials 200]

No socket and no ledger: `bench_resume.py` and `soak_engine.py` go through both. It ends with one
line of JSON. `ttft_ms` and `itl_p99_ms` are of the sixteen streams, which all begin at once.
`exact_equal` of `exact_trials` requests gave the same frames alone and in company with a failover
in the middle (tests/origin/engine/exact_trials.py). `peak_memory_vs_batch` is the peak resident
memory of a process that streams, over that of one that keeps the ids and makes text of them at the
end.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import tokenizers
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.ledger.frame import Sampling, Token, tag_of  # noqa: E402
from tailrace.origin.checkpoint.tokenizer_file import load_tokenizer  # noqa: E402
from tailrace.origin.engine.engine import Engine  # noqa: E402
from tailrace.origin.models.load import load_model  # noqa: E402
from tailrace.origin.models.model import Device, Model  # noqa: E402
from tailrace.origin.workers.worker_frame import Emission, StartRun  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.origin.engine.exact_trials import draw_trial, frames_alone, frames_cut  # noqa: E402
from tests.origin.engine.runs import engine_of  # noqa: E402

DEMO_MODEL = ROOT / "origin" / "demo" / "model"
PROMPT = "Once upon a time there was a fox who lived by the river."
QUESTIONS = ("Tell me a story about a bear.", "Count from 3 to 12.", "Reverse the word river.")
TOKENS = 256
MANY = 16
REPEATS = 5
SEED = 20


@dataclass(slots=True)
class Timed:
    """Times at which each stream got its frames, in seconds after all were requested."""

    frames: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def ttft_ms(self) -> float:
        return statistics.median(times[0] for times in self.frames.values()) * 1e3

    def itl_ms(self) -> list[float]:
        gaps = [b - a for times in self.frames.values() for a, b in pairwise(times)]
        return sorted(gap * 1e3 for gap in gaps)


class Bench:
    """A model and its tokenizer, and what is measured of engines that run it."""

    def __init__(self, directory: Path, device: Device) -> None:
        self.model: Model = load_model(directory, device=device)
        self.tokenizer = load_tokenizer(directory)

    def engine(self) -> Engine:
        return engine_of(self.model, self.tokenizer)

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def run(self, seed: int, tokens: int = TOKENS) -> StartRun:
        return StartRun(
            prompt_ids=self.ids(PROMPT),
            generated_ids=(),
            sent_bytes=0,
            next_index=0,
            max_tokens=tokens,
            ignore_eos=True,
            sampling=Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=seed),
        )

    def streams(self, count: int) -> Timed:
        """Run `count` streams at once, to their end."""
        engine, timed = self.engine(), Timed()
        began = time.perf_counter()
        for number in range(count):
            engine.add(number + 1, self.run(number))
        while not engine.idle:
            emissions = engine.step()
            now = time.perf_counter() - began
            for emission in emissions:
                timed.tokens += len(emission.ids)
                if tag_of(emission.frame) == Token.tag:
                    timed.frames[emission.run].append(now)
        timed.seconds = time.perf_counter() - began
        return timed

    def exact(self, trials: int, console: Console) -> int:
        """Return how many of the trials gave the same frames."""
        random, equal = Random(SEED), 0
        prompts = [self.ids(question) for question in QUESTIONS]
        for number in range(trials):
            trial = draw_trial(random, self.model.config.vocab, prompts)
            whole = frames_alone(self.engine, trial)
            equal += frames_cut(self.engine, trial, len(whole)) == whole
            if (number + 1) % 20 == 0:
                console.print(f"exact: {equal} of {number + 1}")
        return equal


def resident_mib(options: argparse.Namespace, *, streaming: bool) -> float:
    """Peak of a process of its own that generates, with and without giving frames out."""
    command = [sys.executable, str(Path(__file__)), "--model", str(options.model)]
    command += ["--alone", "streaming" if streaming else "batch", "--device", options.device]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(ran.stdout.split()[-1])


def generate_alone(bench: Bench, *, streaming: bool) -> None:
    """Print the peak memory of this process in MiB after generating; `resident_mib` runs it."""
    engine, ids = bench.engine(), defaultdict[int, list[int]](list)
    for number in range(MANY):
        engine.add(number + 1, bench.run(number))
    sent = 0
    while not engine.idle:
        for emission in engine.step():
            sent += _give_out(emission) if streaming else 0
            if not streaming:
                ids[emission.run] += emission.ids
    texts = [bench.tokenizer.decode(some) for some in ids.values()]
    assert streaming == (sent > 0) == (not texts)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def _give_out(emission: Emission) -> int:
    return len(emission.frame)


def measure(options: argparse.Namespace, console: Console) -> dict[str, object]:
    bench = Bench(options.model, options.device)
    bench.streams(2)  # warms up
    one = [bench.streams(1) for _ in range(REPEATS)]
    console.print(f"1 stream: {[round(timed.tok_s, 1) for timed in one]} tok/s")
    many = [bench.streams(MANY) for _ in range(REPEATS)]
    console.print(f"{MANY} streams: {[round(timed.tok_s, 1) for timed in many]} tok/s")
    itl = sorted(gap for timed in many for gap in timed.itl_ms())
    equal = bench.exact(options.trials, console)
    streaming, batch = (resident_mib(options, streaming=s) for s in (True, False))
    return {
        "demo_tok_s_1": round(statistics.median(timed.tok_s for timed in one), 1),
        "demo_tok_s_16": round(statistics.median(timed.tok_s for timed in many), 1),
        "ttft_ms": round(statistics.median(timed.ttft_ms for timed in many), 2),
        "ttft_ms_1": round(statistics.median(timed.ttft_ms for timed in one), 2),
        "itl_p50_ms": round(statistics.median(itl), 2),
        "itl_p99_ms": round(itl[int(len(itl) * 0.99)], 2),
        "exact_trials": options.trials,
        "exact_equal": equal,
        "peak_memory_vs_batch": round(streaming / batch, 3),
        "peak_streaming_mib": round(streaming, 1),
        "tokens": TOKENS,
        "repeats": REPEATS,
        "threads": torch.get_num_threads(),
        "model": options.model.name if options.model != DEMO_MODEL else "demo",
        "device": bench.model.device,
        "versions": {
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint folder")
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.CPU)
    parser.add_argument("--trials", type=int, default=200, help="of exactness")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes on")
    parser.add_argument("--alone", choices=("streaming", "batch"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        bench = Bench(options.model, options.device)
        generate_alone(bench, streaming=options.alone == "streaming")
        return
    console = Console(stderr=True)
    print_line(measure(options, console))


if __name__ == "__main__":
    main()
