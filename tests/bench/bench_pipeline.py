"""Measure what pipelines cost: of text and of speech, also while their processes are killed.

    python tests/bench/bench_pipeline.py [--streams 100] [--tokens 300] [--rounds 3] [--kills 6]
        [--speakers 100] [--seconds 30] [--only text|captions]

Origin, workers and edge are real processes on loopback, and the ledger is a file.

Text: a producer gives words of a known text at a pace of 20 a second to each of the streams, which
begin together. They are read by HTTP/1.1 as server-sent events: once from the producer itself, and
once from a pipeline around it, which has a blocklist with 1,000 phrases that masks one word of the
text.

- `stage_overhead_us` is the processor time in us that the pipeline adds to each token: of origin,
  workers and edge together, with the second write to the ledger.
- `word_p95_ms` is how long after its time a word reaches its reader through the pipeline, and
  `direct_p95_ms` the same without one. `end_p95_ms` is that of the end of a stream.

Captions: each of the speakers sends sound made by espeak-ng in real time, in pieces of 100 ms over
a WebSocket of its own, and reads its captions there (`pipeline_captions`).

- `interim_p95_ms` is how long after the piece of sound that it follows an interim text has come,
  and `final_p95_ms` the same for final ones. `captions_cpu` is the number of processors that edge,
  origin and workers kept busy.

`lost` and `changed` count what is missing or other than it should be: the characters of the texts
and the revisions of the captions, all of them again while processes are killed in turn, `--kills`
times: the pipeline's worker and the model's, and the captions' worker and the process of a stage.

It ends with one line of JSON; medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tailrace.origin.producer import About, End, Output, Request, Resumption, Text  # noqa: E402
from tests.bench.machine import print_line  # noqa: E402
from tests.bench.measured import cpu_s  # noqa: E402
from tests.bench.pipeline_captions import SETTINGS as CAPTIONS  # noqa: E402
from tests.bench.pipeline_captions import (  # noqa: E402
    caption_all,
    kill_in_turn,
    prepared,
)
from tests.e2e.processes import (  # noqa: E402
    Edge,
    Origin,
    children_of,
    running,
)
from tests.e2e.sse import SSE, events  # noqa: E402

WORDS = ("the", " river", " ran", " down", " to", " a", " mill", ",", " and", " turned", " it")
BLOCKED = "mill"
WORDS_PER_S = 20
PHRASES = [BLOCKED, *(f"phrase {number}" for number in range(999))]
SETTINGS = f"""
[origin]
max_streams = 4096
text_streams = 1024

[models.words]
producer = "tests.bench.bench_pipeline:Paced"

[[pipelines.safe.stages]]
stage = "model"
model = "words"
[[pipelines.safe.stages]]
stage = "blocklist"
action = "mask"
words = {PHRASES}
"""


class Paced:
    """A producer of WORDS at WORDS_PER_S; the prompt is the Unix time of the first word."""

    about = About("words", "paced words 1", Resumption.REPEATS)

    async def produce(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yield each word at its time, or at once if that has passed."""
        begin_s = float(request.recipe.prompt or 0)
        for number in range(request.recipe.max_tokens):
            await asyncio.sleep(begin_s + number / WORDS_PER_S - time.time())
            yield Text(WORDS[number % len(WORDS)])
        yield End(total_tokens=request.recipe.max_tokens)

    async def close(self) -> None:
        """Hold nothing."""


@dataclass
class Outcome:
    """Texts of the streams, and how late their words and ends were, in ms."""

    texts: list[str] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    end_ms: list[float] = field(default_factory=list)


async def read_all(edge: Edge, model: str, streams: int, tokens: int) -> Outcome:
    """Read streams that begin together, and return what came."""
    outcome = Outcome()
    begin_s = time.time() + 1.0
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120.0, limits=limits) as client:
        body = {"model": model, "prompt": str(begin_s), "max_tokens": tokens}

        async def read() -> None:
            text = ""
            url = f"{edge.url}/v1/generate"
            async with client.stream("POST", url, json=body, headers=SSE) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for event in events(answer):
                    now_s = time.time()
                    if event.name == "message":
                        # A word that may begin a phrase comes with the next one: its own time
                        # is that of the last word that has come.
                        text += event.data["text"]
                        due_s = begin_s + words_in(text) / WORDS_PER_S
                        outcome.late_ms.append((now_s - due_s) * 1e3)
                    elif event.name == "end":
                        due_s = begin_s + (tokens - 1) / WORDS_PER_S
                        outcome.end_ms.append((now_s - due_s) * 1e3)
            outcome.texts.append(text)

        await asyncio.gather(*(read() for _ in range(streams)))
    return outcome


def words_in(text: str) -> int:
    """Return the number of the last word of a text that has come, counted from 0."""
    whole, rest = divmod(len(text), len("".join(WORDS)))
    number = whole * len(WORDS)
    for word in WORDS:
        if rest <= 0:
            break
        rest -= len(word)
        number += 1
    return number - 1


def expected(tokens: int, *, masked: bool) -> str:
    """Return the text that a reader should get."""
    text = "".join(word for word, _ in zip(cycle(WORDS), range(tokens), strict=False))
    return text.replace(BLOCKED, "*" * len(BLOCKED)) if masked else text


def pids(origin: Origin, edge: Edge) -> list[int]:
    """Return the processes of origin, workers and edge."""
    workers = [one["pid"] for one in origin.events if one.get("message") == "worker.ready"]
    return [origin.pid, edge.pid, *workers]


async def timed(
    origin: Origin, edge: Edge, model: str, options: argparse.Namespace
) -> tuple[float, Outcome]:
    """Return the processor time of all processes in us for each token, and the outcome."""
    before = sum(map(cpu_s, pids(origin, edge)))
    outcome = await read_all(edge, model, options.streams, options.tokens)
    spent_s = sum(map(cpu_s, pids(origin, edge))) - before
    return spent_s / (options.streams * options.tokens) * 1e6, outcome


async def killed(origin: Origin, edge: Edge, options: argparse.Namespace) -> Outcome:
    """Read streams of the pipeline while its worker and that of its model are killed in turn."""
    reading = asyncio.ensure_future(read_all(edge, "safe", options.streams, options.tokens))
    pause_s = options.tokens / WORDS_PER_S / (options.kills + 1)
    for _, model in zip(range(options.kills), cycle(("safe", "words")), strict=False):
        await asyncio.sleep(pause_s)  # the kills are spread over the time of the streams
        await origin.replace_worker(model)
    return await reading


def differences(texts: list[str], right: str, streams: int) -> tuple[int, int]:
    """Return how many characters are missing, and how many are other than they should be."""
    lost = (streams - len(texts)) * len(right) + sum(len(right) - len(text) for text in texts)
    pairs = (pair for text in texts for pair in zip(text, right, strict=False))
    return lost, sum(one != other for one, other in pairs)


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


async def measure_text(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures of text."""
    settings = folder / "tailrace.toml"
    settings.write_text(SETTINGS)
    origin = Origin(folder / "data", config=settings)
    edge = Edge(origin)
    figures: dict[str, list[float]] = {}
    async with running(origin, edge):
        await origin.saw("worker.ready", 2)
        for nth in range(1, options.rounds + 1):
            print(f"round {nth} of {options.rounds}", file=sys.stderr)
            direct_us, direct = await timed(origin, edge, "words", options)
            piped_us, piped = await timed(origin, edge, "safe", options)
            assert set(direct.texts) == {expected(options.tokens, masked=False)}
            assert set(piped.texts) == {expected(options.tokens, masked=True)}
            for name, value in (
                ("stage_overhead_us", piped_us - direct_us),
                ("direct_us", direct_us),
                ("word_p95_ms", p95(piped.late_ms)),
                ("direct_p95_ms", p95(direct.late_ms)),
                ("end_p95_ms", p95(piped.end_ms)),
            ):
                figures.setdefault(name, []).append(value)
        print(f"{options.kills} kills", file=sys.stderr)
        outcome = await killed(origin, edge, options)
    right = expected(options.tokens, masked=True)
    lost, changed = differences(outcome.texts, right, options.streams)
    medians = {name: round(statistics.median(each), 1) for name, each in figures.items()}
    return {"text_streams": options.streams, **medians, "lost": lost, "changed": changed}


async def measure_captions(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures of captions."""
    settings = folder / "captions.toml"
    settings.write_text(CAPTIONS)
    origin = Origin(folder / "captions", config=settings)
    edge = Edge(origin)
    print("making the speech", file=sys.stderr)
    sounds = prepared(options.seconds)
    async with running(origin, edge):
        await origin.saw("worker.ready", 1)
        await caption_all(edge, len(sounds), sounds)  # starts the processes of the stages
        print(f"{options.speakers} speakers", file=sys.stderr)
        captioned = [*pids(origin, edge), *children_of(pids(origin, edge)[-1])]
        before_s, began_s = sum(map(cpu_s, captioned)), time.perf_counter()
        quiet = await caption_all(edge, options.speakers, sounds)
        cpu = (sum(map(cpu_s, captioned)) - before_s) / (time.perf_counter() - began_s)
        print(f"{options.kills} kills", file=sys.stderr)
        # Fewer speakers: a killed process has all of their sound to hear again.
        few = max(1, options.speakers // 4)
        speaking = asyncio.ensure_future(caption_all(edge, few, sounds))
        await kill_in_turn(origin, options.kills, options.seconds)
        killed = await speaking
    return {
        "streams": options.speakers,
        "interim_p95_ms": round(p95(quiet.interim_ms), 1),
        "final_p95_ms": round(p95(quiet.final_ms), 1),
        "captions_cpu": round(cpu, 2),
        "lost": quiet.lost + killed.lost,
        "changed": quiet.changed + killed.changed,
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the figures of the parts that were chosen."""
    parts = []
    if options.only != "text":
        parts.append(await measure_captions(options, folder))
    if options.only != "captions":
        parts.append(await measure_text(options, folder))
    wrong = {name: sum(part[name] for part in parts) for name in ("lost", "changed")}
    return {name: value for part in parts for name, value in part.items()} | wrong


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=100, help="number of streams (default 100)")
    parser.add_argument("--tokens", type=int, default=300, help="words of each (default 300)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default 3)")
    parser.add_argument("--kills", type=int, default=6, help="number of kills (default 6)")
    parser.add_argument("--speakers", type=int, default=100, help="captioned (default 100)")
    parser.add_argument("--seconds", type=float, default=30, help="of each speaker (default 30)")
    parser.add_argument("--only", choices=("text", "captions"), help="one part (default both)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    print_line(figures)


if __name__ == "__main__":
    main()
