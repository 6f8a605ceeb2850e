"""Measure the stages of speech: how much they compute, what they hear, and how many streams run.

    python tests/bench/bench_speech.py [--seconds 60] [--streams 50,100] [--live 20] [--processes 2]

The speech is made by espeak-ng: digits in several voices, one utterance after the other.

- `factors` has the processor seconds for each second of sound, by stage, of one stream after the
  other, and `english` the same for `transcribe` with the language model of English.
- `accuracy` is the share of words that are right.
- `live` has a row for each number of streams at once. All of them send pieces of 100 ms at the pace
  of the sound; `transcribe` has `--processes` processes, and all other stages share one event loop,
  as in the worker of a pipeline. No edge, origin or ledger is part of it. `interim_p95_ms` is how
  long after a piece was sent the interim result comes that hears it, and `final_p95_ms` the same
  for final ones. `cpu` is the number of busy processors.

It ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.origin.pipelines.origin_client import OriginClient  # noqa: E402
from tailrace.origin.pipelines.process_pool import ProcessPool, RemoteStage  # noqa: E402
from tailrace.origin.pipelines.runner import RunningStage, outputs  # noqa: E402
from tailrace.origin.pipelines.speech.debounce import Debounce, DebounceOptions  # noqa: E402
from tailrace.origin.pipelines.speech.items import Transcript  # noqa: E402
from tailrace.origin.pipelines.speech.punctuate import Punctuate, PunctuateOptions  # noqa: E402
from tailrace.origin.pipelines.speech.transcribe import Transcribe  # noqa: E402
from tailrace.origin.pipelines.speech.vocabulary import VocabularyOptions  # noqa: E402
from tailrace.origin.pipelines.speech.voice_activity import (  # noqa: E402
    VoiceActivity,
    VoiceActivityOptions,
)
from tailrace.origin.pipelines.stage import AnyStage, Item, Prompt, StageContext  # noqa: E402
from tailrace.origin.producer import Data, End, RunFate  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import cpu_s  # noqa: E402
from tests.e2e.processes import children_of  # noqa: E402
from tests.origin.pipelines.staged import unswitched  # noqa: E402
from tests.origin.producers.asked import recipe  # noqa: E402
from tests.spoken import DIGITS, digits, say, wrong_words  # noqa: E402

PIECE_MS = 100
BYTES_PER_MS = 32
VOICES = ("en-us", "en-gb", "en-us+f2", "en-us+m3", "en-gb+f3", "en-us+f4")
SPEEDS = (120, 150, 180)
WORDS = VocabularyOptions(words=DIGITS)
CONTEXT = StageContext("stage", bytes(16), recipe(), OriginClient(Path("none")))


def spoken(seed: int, seconds: float) -> tuple[str, bytes]:
    """Return utterances of one voice, as text and as sound that is at least `seconds` long."""
    voice, speed = VOICES[seed % len(VOICES)], SPEEDS[seed // len(VOICES) % len(SPEEDS)]
    said, pcm, at = [], b"", 0
    while len(pcm) < seconds * 1000 * BYTES_PER_MS:
        said.append(digits(10_000 + 100 * seed + at, 5))
        pcm += say(said[-1], voice, speed)
        at += 1
    return " ".join(said), pcm


def local_stages(options: VocabularyOptions) -> list[AnyStage]:
    """Return the stages of one stream, all in this process."""
    return [
        VoiceActivity(VoiceActivityOptions(), CONTEXT),
        Transcribe(options, CONTEXT),
        Punctuate(PunctuateOptions(), CONTEXT),
        Debounce(DebounceOptions(), CONTEXT),
    ]


def alone(options: VocabularyOptions, pcm: bytes) -> tuple[list[float], list[Item]]:
    """Return the processor time of each stage in seconds, and what comes out of the last one."""
    size = PIECE_MS * BYTES_PER_MS
    items: list[Item] = [Data(pcm[at : at + size]) for at in range(0, len(pcm), size)]
    spent = []
    for stage in local_stages(options):
        made: list[Item] = []
        began_s = time.process_time()
        for item in items:
            made += stage.process(item)  # type: ignore[arg-type]
        made += stage.finish(End())  # type: ignore[arg-type]
        spent.append(time.process_time() - began_s)
        items = made
    return spent, items


def final_text(items: Iterable[Item]) -> str:
    """Return the final results without punctuation."""
    finals = (one.text for one in items if isinstance(one, Transcript) and one.final)
    return "".join(finals).lower().replace(".", "").replace(",", "")


@dataclass
class Live:
    """The delays of a number of streams, in ms."""

    interims: list[float] = field(default_factory=list)
    finals: list[float] = field(default_factory=list)


def made(stage: AnyStage, begin: int) -> AnyStage:
    """Return the stage object itself, which gets all items."""
    assert begin == 0
    return stage


async def listen(pcm: bytes, pool: ProcessPool, wait_s: float, live: Live) -> None:
    """Run one stream at the pace of its sound, after `wait_s`."""
    sent: list[float] = []

    async def sound() -> AsyncGenerator[bytes, None]:
        began_s = time.perf_counter() + wait_s
        size = PIECE_MS * BYTES_PER_MS
        for at in range(0, len(pcm), size):
            due_s = began_s + (at // size + 1) * PIECE_MS / 1000
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            sent.append(due_s)
            yield pcm[at : at + size]

    local = local_stages(WORDS)
    local[1] = RemoteStage(Transcribe, WORDS, CONTEXT, pool, None)
    stages = [RunningStage(f"stage{at}", partial(made, one)) for at, one in enumerate(local)]
    async for item in outputs(stages, Prompt(""), unswitched(stages), RunFate(), sound()):
        if isinstance(item, Transcript):
            piece = min(math.ceil(item.at_ms / PIECE_MS), len(sent)) - 1
            delay_ms = (time.perf_counter() - sent[piece]) * 1000
            (live.finals if item.final else live.interims).append(delay_ms)


async def together(sounds: list[bytes], count: int, processes: int) -> dict[str, float]:
    """Return the figures of `count` streams at once."""
    pool, live, chance = ProcessPool(processes), Live(), random.Random(1)
    # The processes start, and have a decoder each, before anything is measured.
    short = (listen(sounds[0][: 2_000 * BYTES_PER_MS], pool, 0, Live()) for _ in range(processes))
    await asyncio.gather(*short)
    waits = [chance.random() * 2 for _ in range(count)]
    before, began_s = used_s(), time.perf_counter()
    runs = (listen(sounds[at % len(sounds)], pool, waits[at], live) for at in range(count))
    await asyncio.gather(*runs)
    elapsed_s, spent_s = time.perf_counter() - began_s, used_s() - before
    await pool.close()
    return {
        "streams": count,
        "interim_p50_ms": round(statistics.median(live.interims)),
        "interim_p95_ms": round(statistics.quantiles(live.interims, n=20)[-1]),
        "final_p95_ms": round(statistics.quantiles(live.finals, n=20)[-1]),
        "cpu": round(spent_s / elapsed_s, 2),
    }


def used_s() -> float:
    """Return the processor time of this process and of its children, in s."""
    return time.process_time() + sum(map(cpu_s, children_of(os.getpid())))


def main() -> None:
    """Measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description="Measure the stages of speech.")
    parser.add_argument("--seconds", type=float, default=60, help="sound of each stream alone")
    parser.add_argument("--streams", default="50,100", help="numbers of live streams")
    parser.add_argument("--live", type=float, default=20, help="seconds of sound of a live stream")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    names = ("voice-activity", "transcribe", "punctuate", "debounce")
    spent, length_s, wrong, words = [0.0] * len(names), 0.0, 0, 0
    for seed in range(len(VOICES)):
        said, pcm = spoken(seed + len(VOICES), args.seconds)
        times, items = alone(WORDS, pcm)
        spent = [one + other for one, other in zip(spent, times, strict=True)]
        length_s += len(pcm) / 1000 / BYTES_PER_MS
        wrong += wrong_words(said, final_text(items))
        words += len(said.split())
    factors = {name: round(one / length_s, 5) for name, one in zip(names, spent, strict=True)}
    print(f"{length_s:.0f} s of sound, digits: {factors}, {1 - wrong / words:.3f} of {words} words")
    _, pcm = spoken(1, args.seconds / 2)
    times, _ = alone(VocabularyOptions(), pcm)
    english = round(times[1] / (len(pcm) / 1000 / BYTES_PER_MS), 4)
    print(f"English: {english}")

    sounds = [spoken(seed, args.live)[1] for seed in range(len(VOICES))]
    live = []
    for count in map(int, args.streams.split(",")):
        live.append(asyncio.run(together(sounds, count, args.processes)))
        print(live[-1], flush=True)
    print_line(
        {
            "factors": factors,
            "accuracy": round(1 - wrong / words, 3),
            "english": english,
            "processes": args.processes,
            "live": live,
        }
    )


if __name__ == "__main__":
    main()
