"""Measure the least time of a restore: load the demo model, and continue the streams of a kill.

    python tests/bench/restore_floor.py < HISTORIES

HISTORIES is JSON: for each kill, how many frames each of its streams had. Prints one JSON list of
seconds. It is the workers' own engine, in a process that has imported everything, without
sockets, ledger or readers; each is forked anew, as a worker is.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import structlog
import torch

from tailrace.ledger.frame import SAMPLING, Sampling, Token, decode
from tailrace.origin.checkpoint.prompt import PromptReader
from tailrace.origin.config import OriginConfig
from tailrace.origin.engine.engine import Engine
from tailrace.origin.models import cpu_model  # noqa: F401  (as the fork server imports it)
from tailrace.origin.scheduler.limits import Limits
from tailrace.origin.workers import token_worker
from tailrace.origin.workers.worker_frame import StartRun

_NEUTRAL: dict[str, Any] = {name: setting.neutral for name, setting in SAMPLING.items()}
PROMPT = "Once upon a time"
TOKENS = 400

Frames = list[tuple[list[int], int]]
"""Frames of one stream: the token ids of each, and the bytes of its text."""


def loaded() -> Engine:
    config = OriginConfig()
    model, around = token_worker._load(config, lambda *_: None)
    limits = Limits(running=config.running_streams, step_seconds=config.step_ms / 1000)
    return Engine(model, around, limits)


def ordered(prompt: Sequence[int], seed: int, frames: Frames) -> StartRun:
    """Return the run that continues behind these frames, or begins if there are none."""
    ids = tuple(id_ for some, _ in frames for id_ in some)
    sent = sum(size for _, size in frames)
    sampling = replace(Sampling(**_NEUTRAL), temperature=0.8, seed=seed)
    return StartRun(
        tuple(prompt), ids, sent, len(frames), TOKENS, sampling, ignore_eos=True, completes=True
    )


def recorded(prompt: Sequence[int], streams: int) -> list[Frames]:
    """Return what each stream consists of, from its beginning to its end."""
    engine = loaded()
    made: list[Frames] = [[] for _ in range(streams)]
    for seed in range(streams):
        engine.add(seed + 1, ordered(prompt, seed, []))
    while not engine.idle:
        for emission in engine.step():
            _, frame = decode(emission.frame)
            if isinstance(frame, Token):
                size = len(frame.text.encode())
                made[emission.run - 1].append((list(emission.ids), size))
    return made


def restored(prompt: Sequence[int], histories: Sequence[Frames]) -> float:
    """Seconds from nothing but imports to the next frame of each stream."""
    began = time.perf_counter()
    engine = loaded()
    for seed, frames in enumerate(histories):
        engine.add(seed + 1, ordered(prompt, seed, frames))
    waiting = set(range(1, len(histories) + 1))
    while waiting:
        waiting -= {emission.run for emission in engine.step()}
    return time.perf_counter() - began


def forked(work: Callable[[], Any]) -> Any:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with os.fdopen(write, "w") as tell:
            json.dump(work(), tell)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        made = json.load(told)
    os.waitpid(pid, 0)
    return made


def main() -> None:
    # Standard output holds the result alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(token_worker.TORCH_THREADS)
    counts: list[list[int]] = json.load(sys.stdin)
    prompt = PromptReader(OriginConfig().model).read(PROMPT, (), None).ids
    frames = forked(lambda: recorded(prompt, max(map(len, counts))))

    def took(some: Sequence[int]) -> float:
        cut = [own[: min(count, len(own) - 1)] for own, count in zip(frames, some, strict=False)]
        return float(forked(lambda: restored(prompt, cut)))

    print(json.dumps([took(some) for some in counts]))


if __name__ == "__main__":
    main()
